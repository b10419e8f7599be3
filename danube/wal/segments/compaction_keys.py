"""The first half of a compaction: the latest offset of each key, within bounded memory.  Blocking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

from danube.wal.segments.key_compaction import LatestKeys
from danube.wal.segments.merge import SealedRange

Source = TypeVar("Source")


class KeysRead(NamedTuple):
    """``stop``: how many of the sources may be compacted with ``latest``.

    ``complete``: every key in them is known, so an old tombstone may go: whatever it replaced goes too.
    """

    latest: LatestKeys
    stop: int
    complete: bool


def read_keys(
    sources: Sequence[Source],
    dirty: int,
    at_hand: Callable[[Source], AbstractContextManager[SealedRange]],
    *,
    from_start: bool,
    keys_max: int,
) -> KeysRead:
    """Read adjacent sealed segments, oldest first; those before ``dirty`` only where that is worth it.

    When more keys are met than ``keys_max``, the round ends before the segment that was too much.  A
    single dirty segment that is too much is taken all the same: some of its records are kept for nothing.
    ``at_hand`` gives the bytes of a source for a while.  Raises like LatestKeys.add() and what it raises.
    """
    latest = LatestKeys(keys_max)
    for number in range(0 if from_start else dirty, len(sources)):
        with at_hand(sources[number]) as one:
            latest.add([one])
        if latest.overflowed and number > dirty:
            return KeysRead(latest, number, from_start)
        if latest.overflowed and from_start:
            return read_keys(sources, dirty, at_hand, from_start=False, keys_max=keys_max)
        if latest.overflowed:
            return KeysRead(latest, number + 1, complete=False)
    return KeysRead(latest, len(sources), from_start)
