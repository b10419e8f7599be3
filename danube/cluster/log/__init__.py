"""Metadata on one host's disk: log file, the machine over it, a worker's view."""
