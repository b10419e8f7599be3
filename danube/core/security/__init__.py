"""Who asks, and what they may: principals, authority, the table of operations."""
