"""Format("danube") for writing, every row once."""
