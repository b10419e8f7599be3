"""Access to a broker: certificates, roles, keys, tokens, contexts, and the audit of it."""
