"""Counters of one worker: those that partitions use, and those in shared memory."""

from __future__ import annotations

from typing import Protocol

from danube.ipc.counters import Counter, Counters

# A member of an IntEnum costs several times as much to look up as a number.
_BATCHES_IN, _RECORDS_IN, _BYTES_IN = map(int, (Counter.BATCHES_IN, Counter.RECORDS_IN, Counter.BYTES_IN))
_RECORDS_OUT, _BYTES_OUT = map(int, (Counter.RECORDS_OUT, Counter.BYTES_OUT))
_BY_NAME = {counter.name.lower(): counter for counter in Counter}


class TrafficCounters(Protocol):
    """Counters of partitions; the worker backs them with shared memory."""

    def add_in(self, records: int, size_bytes: int) -> None: ...

    def add_out(self, records: int, size_bytes: int, redelivery_count: int) -> None: ...

    def add(self, name: str, amount: int = 1) -> None: ...


class Traffic:
    """Counts records and bytes that pass; see :class:`danube.ipc.counters.Counter` for the names."""

    def __init__(self, counters: Counters) -> None:
        self.block = counters

    def add_in(self, records: int, size_bytes: int) -> None:
        words = self.block.words
        words[_BATCHES_IN] += 1
        words[_RECORDS_IN] += records
        words[_BYTES_IN] += size_bytes

    def add_out(self, records: int, size_bytes: int, redelivery_count: int) -> None:
        words = self.block.words
        words[_RECORDS_OUT] += records
        words[_BYTES_OUT] += size_bytes
        if redelivery_count:
            words[Counter.REDELIVERIES] += records

    def add(self, name: str, amount: int = 1) -> None:
        self.block.add(_BY_NAME[name], amount)
