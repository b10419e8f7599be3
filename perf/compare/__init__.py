"""Danube beside other brokers on one machine, each figure with the durability level of its acknowledgements.

``python -m perf.compare``, or ``scripts/compare``, which also fetches the peers' clients and tools.  How it
is measured and what each level means for each product: docs/comparison.md.
"""
