"""Topics as Parquet, Delta or Iceberg."""
