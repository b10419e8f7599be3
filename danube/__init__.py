"""Danube: a message broker for Python teams."""

__version__ = "0.1.0"
