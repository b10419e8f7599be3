"""History in segments: which bytes hold which records, and reading them; no Spark in it."""
