"""Reading records that only the store has: a bounded cache of blocks."""
