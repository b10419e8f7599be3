"""The table of operations that any worker answers itself, for native ADMIN frames and gRPC calls.

Operations of a partition's owner are in :mod:`danube.broker.shard.admin`.
"""

from __future__ import annotations

from danube.broker.operations import cluster as cluster_operations
from danube.broker.operations import roles as access_operations
from danube.broker.operations import schemas as schema_operations
from danube.broker.operations import storage as storage_operations
from danube.broker.operations import topics as topic_operations
from danube.broker.operations.arguments import Args
from danube.broker.operations.context import Answer, Operation, Operations
from danube.errors import InvalidArgument

_TABLE: dict[str, Operation] = {
    **topic_operations.TABLE,
    **schema_operations.TABLE,
    **access_operations.TABLE,
    **storage_operations.TABLE,
    **cluster_operations.TABLE,
}


def carry_out(operations: Operations, op: str, args: Args, answer: Answer) -> None:
    """Do what ``op`` says; raises the error of a request that cannot be taken, answers all others."""
    operation = _TABLE.get(op)
    if operation is None:
        raise InvalidArgument(f"operation {op[:80]!r} is not known", hint="the client may be newer")
    operation(operations, args, answer)
