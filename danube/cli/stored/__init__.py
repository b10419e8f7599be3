"""Commands about data on disk and in stores: inspect, verify, storage, spark."""
