"""Danube-cli and danube-admin, in the words of the official commands."""
