"""The blocking shell (danube.sync)."""
