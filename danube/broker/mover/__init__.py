"""The one process that speaks to the object store."""
