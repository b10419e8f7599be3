"""Audit: who asked for what and what came of it, in files that tell when they were changed."""
