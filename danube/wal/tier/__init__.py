"""Segments in a store: manifest, upload, staged and returned objects, holes."""
