"""Avro: parse, compare, walk payloads."""
