"""One worker process: its turns and its periodic work."""
