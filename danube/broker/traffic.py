"""Counters of one worker, in shared memory."""

from __future__ import annotations

from danube.ipc.counters import Counter, Counters

# A member of an IntEnum costs several times as much to look up as a number.
_BATCHES_IN, _RECORDS_IN, _BYTES_IN = map(int, (Counter.BATCHES_IN, Counter.RECORDS_IN, Counter.BYTES_IN))
_RECORDS_OUT, _BYTES_OUT = map(int, (Counter.RECORDS_OUT, Counter.BYTES_OUT))
_BY_NAME = {counter.name.lower(): counter for counter in Counter}


class Traffic:
    """Counts records, bytes and events; the names are those of :class:`danube.ipc.counters.Counter`."""

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
