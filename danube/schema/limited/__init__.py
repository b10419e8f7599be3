"""Definitions from clients, examined in a child process of fixed time and memory."""
