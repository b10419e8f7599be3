"""What lies on disk and in stores: inspect, verify, storage, spark."""
