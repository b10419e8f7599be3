"""The server side of an HTTP/2 connection as a machine (RFC 9113)."""
