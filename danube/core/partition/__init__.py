"""A partition at its owner: order, duplicates, policy, and when its segments move."""
