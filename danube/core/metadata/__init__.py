"""The metadata machine: namespaces, topics, schemas, roles; commands in, changes out."""
