"""Usage of what namespaces and tenants may have together, in words that every process of a host reads.

    block of a worker     SLOTS slots of 8 signed words:
                          key, records, bytes, held, stored bytes, 3 free

A worker has a slot for each sum that is limited.  The key names it, see ``key_of`` of
:mod:`danube.core.placement.shares`, and 0 is a free slot.  Records, bytes and held only grow while the worker
runs.  Each word has one writer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from danube.ipc.layout import LINE_BYTES, USAGE_BLOCK_BYTES

if TYPE_CHECKING:
    from danube.ipc.atomics import Words
    from danube.ipc.region import Region

SLOT_WORDS: Final = 8
SLOTS: Final = USAGE_BLOCK_BYTES // (8 * SLOT_WORDS)
_TOUCHED: Final = 1
_RECORDS, _BYTES, _HELD, _STORED = 1, 2, 3, 4


class Used(NamedTuple):
    """A sum's figures over all workers of the host."""

    records: int = 0
    size_bytes: int = 0
    held: int = 0  # how often more was wanted than there was
    stored_bytes: int = 0


NOT_USED: Final = Used()


class UsageSlot:
    """One sum at one worker, and where the other workers count it."""

    def __init__(self, key: int, words: Any, start: int) -> None:
        self.key = key
        self._words = words
        self._start = start
        self._others: list[tuple[Any, int]] = []

    def take(self, records: int, size_bytes: int) -> None:
        """Count a batch."""
        self._words[self._start + _RECORDS] += records
        self._words[self._start + _BYTES] += size_bytes

    def hold(self) -> None:
        """Note that a batch waits or was refused."""
        self._words[self._start + _HELD] += 1

    def store(self, size_bytes: int) -> None:
        """Note how much this worker's partitions store."""
        self._words[self._start + _STORED] = size_bytes

    def others(self) -> tuple[int, int]:
        """Return the records and bytes that other workers have taken."""
        records = size_bytes = 0
        for words, start in self._others:
            if words[start] == self.key:
                records += words[start + _RECORDS]
                size_bytes += words[start + _BYTES]
        return records, size_bytes

    def stored_bytes(self) -> int:
        """Return how much the partitions of all workers store."""
        found: int = self._words[self._start + _STORED]
        for words, start in self._others:
            if words[start] == self.key:
                found += words[start + _STORED]
        return found

    def look(self, blocks: list[Any]) -> None:
        """Find the slots of the other workers anew."""
        found = []
        for words in blocks:
            keys = words[::SLOT_WORDS].tolist()
            if self.key in keys:
                found.append((words, keys.index(self.key) * SLOT_WORDS))
        self._others = found

    def free(self) -> None:
        """The sum is limited no more."""
        for word in range(SLOT_WORDS):
            self._words[self._start + word] = 0


class Usage:
    """The slots of one worker, which begins with none."""

    def __init__(self, region: Region, worker: int) -> None:
        _mark(region, worker).store(_TOUCHED, 1)
        blocks = blocks_of(region)
        self._own = blocks.pop(worker)
        self._others = blocks
        for place in range(0, SLOTS * SLOT_WORDS, SLOT_WORDS):
            if self._own[place]:  # of a worker that ran before this one
                for word in range(SLOT_WORDS):
                    self._own[place + word] = 0

    def slot(self, key: int) -> UsageSlot:
        """Return a slot for a sum; where all are taken, one that other workers do not see."""
        keys = self._own[::SLOT_WORDS].tolist()
        try:
            words, start = self._own, keys.index(0) * SLOT_WORDS
        except ValueError:
            words, start = memoryview(bytearray(8 * SLOT_WORDS)).cast("q"), 0
        words[start] = key
        made = UsageSlot(key, words, start)
        made.look(self._others)
        return made

    def look(self, slot: UsageSlot) -> None:
        """Find where other workers count a sum: they may have begun to since."""
        slot.look(self._others)


def _mark(region: Region, worker: int) -> Words:
    """The line of a worker's sleeping word, whose second word tells whether its block is in use."""
    return region.words(region.layout.sleeping_position(worker), LINE_BYTES)


def blocks_of(region: Region) -> list[Any]:
    """The words of every worker's block."""
    starts = [region.layout.usage_block_position(worker) for worker in range(region.layout.workers)]
    return [region.memory[start : start + USAGE_BLOCK_BYTES].cast("q") for start in starts]


def used(region: Region) -> dict[int, Used]:
    """The figures of all sums by key, over all workers; blocks that were never used are not touched."""
    found: dict[int, Used] = {}
    for worker, words in enumerate(blocks_of(region)):
        if not _mark(region, worker).load(_TOUCHED):
            continue
        for index, key in enumerate(words[::SLOT_WORDS].tolist()):
            if key:
                start = index * SLOT_WORDS
                one = Used(*words[start + 1 : start + 1 + len(Used._fields)].tolist())
                found[key] = Used(*map(sum, zip(found.get(key, NOT_USED), one, strict=True)))
    return found
