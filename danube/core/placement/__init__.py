"""Where partitions belong: loads, moves, and the leader's duties."""
