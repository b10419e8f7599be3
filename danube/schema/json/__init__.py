"""JSON Schema: parse, bound the cost, compare."""
