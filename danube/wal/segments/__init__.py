"""Segment files: format, index, walking, writing, merging."""
