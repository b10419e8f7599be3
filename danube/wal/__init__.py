"""The durable log: segment files, recovery, cursors and group commit.  See README.md."""
