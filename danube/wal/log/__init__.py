"""The running log: append, sync, read, retain."""
