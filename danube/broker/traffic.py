"""Counters of one worker, backed by shared memory."""

from __future__ import annotations

from danube.ipc.counters import Counter, Counters

_BY_NAME = {counter.name.lower(): counter for counter in Counter}


class Traffic:
    """Counts what passes; see :class:`danube.ipc.counters.Counter` for the names."""

    def __init__(self, counters: Counters) -> None:
        self.block = counters

    def add_in(self, records: int, size_bytes: int) -> None:
        block = self.block
        block.add(Counter.BATCHES_IN)
        block.add(Counter.RECORDS_IN, records)
        block.add(Counter.BYTES_IN, size_bytes)

    def add_out(self, records: int, size_bytes: int, redelivery_count: int) -> None:
        block = self.block
        block.add(Counter.RECORDS_OUT, records)
        block.add(Counter.BYTES_OUT, size_bytes)
        if redelivery_count:
            block.add(Counter.REDELIVERIES, records)

    def add(self, name: str, amount: int = 1) -> None:
        self.block.add(_BY_NAME[name], amount)
