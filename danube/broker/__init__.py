"""Processes of one broker: the supervisor, its workers and what each worker owns."""
