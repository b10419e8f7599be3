"""Definitions of strangers, judged in a child process of fixed time and memory."""
