"""Routing of frames to the worker that owns the partition."""
