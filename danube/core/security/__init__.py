"""Access: principals, what they may do, and the table of operations."""
