"""The consensus of members: engine, journal, roles, replication."""
