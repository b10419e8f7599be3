"""Cold tiers at the owner: reports to the mover, eviction, restore, inheritance."""
