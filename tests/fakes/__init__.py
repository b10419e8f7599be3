"""Stand-ins that obey the real protocols."""
