"""A partition at its owner: publish, read, subscribe, deliver."""
