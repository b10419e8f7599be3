"""Values instead of bytes: models and the registry."""
