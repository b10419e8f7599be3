"""Named counters in shared memory: one block per worker, each word with a single writer.

A worker adds to its own block with plain stores; every process may read.  Totals continue across restarts of
the worker; gauges (see GAUGES) start again.  A block is 64 signed 64-bit words, so names can be added at the
end without moving others.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

from danube.ipc.layout import COUNTER_BLOCK_BYTES

if TYPE_CHECKING:
    from danube.ipc.region import Region


class Counter(IntEnum):
    """Place of each counter in its block.  The first four are written by the supervisor."""

    PID = 0
    INCARNATION = 1
    RESTARTS = 2
    STARTED_NS = 3  # monotonic clock
    STATE = 4  # see State
    HEARTBEAT_NS = 5  # monotonic clock
    CONNECTIONS = 6
    CONNECTIONS_TOTAL = 7
    PARTITIONS_OPEN = 8
    RECORDS_IN = 9
    BYTES_IN = 10
    BATCHES_IN = 11
    RECORDS_OUT = 12
    BYTES_OUT = 13
    ACKS_IN = 14
    NACKS = 15
    REDELIVERIES = 16
    DEAD_LETTERS = 17
    DROPPED_RECORDS = 18
    DUPLICATES = 19
    ERRORS = 20
    TURNS = 21
    PUBLISH_STALLS = 22
    STORAGE_ERRORS = 23
    DAMAGED_RECORDS = 24
    SYNCS = 25
    FORWARDED_IN = 26  # batches that came over a ring
    FORWARDED_OUT = 27
    RING_FULL = 28
    STALE_RECORDS = 29
    TAIL_MISSES = 30
    SUBSCRIPTIONS_OPEN = 31
    PRODUCERS_OPEN = 32
    CONSUMERS_OPEN = 33
    SCHEMA_REJECTED = 34  # records refused because they break their topic's schema
    SCHEMA_WARNINGS = 35  # records that break it and were let through
    BACKLOG_RECORDS = 36  # above the ack floors of all subscriptions, a moment ago
    CONNECTIONS_PASSED = 37  # to the worker that owns what they opened first
    TLS_HANDSHAKES_FAILED = 38
    TLS_RELOAD_FAILED = 39  # 1 while files of TLS cannot be loaded, and the former ones are in use
    TLS_RELOADS = 40  # contexts that were made anew because their files changed
    DEAD_LETTERS_REFUSED = 41  # attempts; each record is tried again
    KEYS_RELOAD_FAILED = 42  # 1 while keys of tokens cannot be loaded, and the former ones are in use
    KEYS_RELOADS = 43  # how often changed keys came into use
    RIGHTS_UNKNOWN = 44  # 1 while the cluster is not heard for so long that nobody's rights are known


class State(IntEnum):
    """Where a worker is in its life; a killed worker stays where it was until it is replaced."""

    STARTING = 0
    READY = 1
    DRAINING = 2
    STOPPED = 3


GAUGES: Final = (
    Counter.STATE,
    Counter.HEARTBEAT_NS,
    Counter.CONNECTIONS,
    Counter.PARTITIONS_OPEN,
    Counter.SUBSCRIPTIONS_OPEN,
    Counter.PRODUCERS_OPEN,
    Counter.CONSUMERS_OPEN,
    Counter.BACKLOG_RECORDS,
    Counter.TLS_RELOAD_FAILED,
    Counter.KEYS_RELOAD_FAILED,
    Counter.RIGHTS_UNKNOWN,
)

if len(Counter) * 8 > COUNTER_BLOCK_BYTES:
    raise ImportError("the counters do not fit their block")


class Counters:
    """The block of one worker: ``words`` by Counter.  Only its single writer changes them."""

    def __init__(self, region: Region, worker: int) -> None:
        start = region.layout.counter_block_position(worker)
        self.words = region.memory[start : start + COUNTER_BLOCK_BYTES].cast("q")

    def add(self, counter: int, amount: int = 1) -> None:
        self.words[counter] += amount

    def put(self, counter: Counter, value: int) -> None:
        self.words[counter] = value

    def get(self, counter: Counter) -> int:
        return self.words[counter]

    def begin(self, pid: int, incarnation: int, now_ns: int) -> None:
        """Supervisor, before the worker runs: gauges start again, totals go on."""
        for gauge in GAUGES:
            self.words[gauge] = 0
        self.words[Counter.INCARNATION] = incarnation
        self.words[Counter.STARTED_NS] = now_ns
        self.words[Counter.PID] = pid

    def snapshot(self) -> dict[str, int]:
        """All counters by lower-case name; each value is whole, the set is not of one instant."""
        return {counter.name.lower(): self.words[counter] for counter in Counter}


def snapshot(region: Region) -> list[dict[str, int]]:
    """The counters of all workers, by worker index."""
    return [Counters(region, worker).snapshot() for worker in range(region.layout.workers)]
