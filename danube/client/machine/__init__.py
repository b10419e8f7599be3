"""The protocol without a socket: session, producers, consumers, requests."""
