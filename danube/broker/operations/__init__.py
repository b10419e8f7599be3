"""Administration: one table of operations that any worker answers."""
