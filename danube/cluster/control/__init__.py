"""The controller: proposals, leadership, formation, membership, and its door."""
