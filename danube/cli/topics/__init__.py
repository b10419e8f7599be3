"""Topics, subscriptions, schemas."""
