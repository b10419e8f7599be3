"""Schemas: meaning of a definition, compatibility of the next one, and validation of payloads.

Types are modules of one shape (see :mod:`danube.schema.kinds`). An untrusted definition is read first in a
child process with fixed time and memory (:mod:`danube.schema.limited.door`). A definition that passed there
is safe to load anywhere.
"""
