"""Bytes of the small protocols: native frames, gRPC framing, one HTTP/1.1 request."""
