"""Reading what only the store has: a bounded cache of blocks."""
