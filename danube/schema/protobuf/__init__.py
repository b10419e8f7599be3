"""Protobuf: compile, compare, check payloads."""
