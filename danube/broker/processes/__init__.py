"""Fork, watch, restart and drain; the context of each process."""
