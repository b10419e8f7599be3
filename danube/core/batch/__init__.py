"""The one shape of bytes: make, check, read, compress, select."""
