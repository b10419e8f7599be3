"""Parts of a worker for a cluster: leases, epochs, moves, links to other brokers."""
