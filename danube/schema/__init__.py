"""Schemas: what a definition means, what may follow it, and whether a payload keeps to it.

Types are modules of one shape (see :mod:`danube.schema.kinds`).  Whatever reads a stranger's definition
for the first time runs in a child process with fixed time and memory (:mod:`danube.schema.limited.door`);
a definition that passed there is safe to load anywhere.
"""
