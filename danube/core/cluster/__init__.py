"""The machine's part for clusters: brokers, leases, ownership, keys, agreed time."""
