"""Is every byte what it was?."""
