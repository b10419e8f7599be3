"""The two ends of a load test in each protocol."""
