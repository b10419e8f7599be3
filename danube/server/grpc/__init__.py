"""GRPC ports: sockets, connections, calls, placing."""
