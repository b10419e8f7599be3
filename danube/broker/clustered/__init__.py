"""What a worker has beside that in a cluster: leases, epochs, moves, other brokers."""
