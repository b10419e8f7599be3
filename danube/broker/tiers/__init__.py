"""Cold tiers at the owner: what the mover is told, what may leave, restore, inheritance."""
