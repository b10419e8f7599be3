"""Connections between members: greeting, frames, lanes, TLS."""
