"""Produce, consume, bench, load."""
