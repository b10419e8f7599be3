"""Owner of a partition among a host's workers: every process computes the same.

Topics are spread by multiplying their id with 2**64 divided by the golden ratio: any run of
consecutive ids falls on the workers as evenly as a run can, which a random hash does not do for the
few topics that most brokers have.  The partitions of one topic then follow each other around the
workers, so no two workers' shares of a topic differ by more than one.

The answer depends on the worker count.  It is fixed while a broker runs; after a restart with
another count most partitions have another owner, which costs nothing, because every log is opened
anew then.
"""

from __future__ import annotations

from typing import Final

from danube.errors import broken

_GOLDEN: Final = 11_400_714_819_323_198_485
_MASK: Final = (1 << 64) - 1


def owner_of(topic_id: int, partition: int, worker_count: int) -> int:
    """Number of the owner among ``worker_count`` workers, 0 .. worker_count - 1."""
    if worker_count < 1 or topic_id < 0 or partition < 0:
        broken("no worker to place on", topic_id=topic_id, partition=partition, worker_count=worker_count)
    first = ((topic_id * _GOLDEN & _MASK) * worker_count) >> 64
    return (first + partition) % worker_count
