"""A topic's history into another topic, cluster or files."""
