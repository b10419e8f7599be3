"""Many small objects into large ones; latest record of each key."""
