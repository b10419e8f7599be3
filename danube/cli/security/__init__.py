"""Who may come in and who did what: certificates, roles, keys, tokens, contexts, audit."""
