"""Object stores behind one port: S3, GCS, Azure, a directory."""
