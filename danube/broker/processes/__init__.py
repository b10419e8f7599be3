"""Fork, watch, restart and drain; what each process is given."""
