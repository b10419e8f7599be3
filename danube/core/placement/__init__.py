"""Placement of partitions: loads, moves, and the leader's duties."""
