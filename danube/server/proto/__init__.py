"""Messages of the gRPC services: ``*.proto`` is written by hand, the rest comes from ``scripts/protos``."""
