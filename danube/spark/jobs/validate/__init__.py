"""Validation of stored history, byte by byte."""
