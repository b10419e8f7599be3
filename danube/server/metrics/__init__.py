"""Prometheus' text over HTTP, from a process of its own."""
