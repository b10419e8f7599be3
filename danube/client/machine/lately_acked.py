"""Records that this client acked a moment ago, so that a redelivery which crossed the ack is not handed out.

The broker sends a record again when its ack comes late, or was lost with a connection.  Both copies may be
here: the ack of the first one then answers for the second.  Only a moment is kept, and nothing beyond a seek:
somebody wants to see those records again.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

from danube.client.machine.received import ReceivedBatch, ranges_of, take_batch
from danube.core.batch.format import BODY_CRC_START, pack_header
from danube.core.batch.selection import select

KEPT_NS: Final = 10_000_000_000
ROUNDS_MAX: Final = 4_096  # of acks
RANGES_MAX: Final = 16_384

Ranges = list[tuple[int, int]]


class LatelyAcked:
    """Of one partition and one subscribing."""

    __slots__ = ("_range_count", "_rounds")

    def __init__(self) -> None:
        self._rounds: deque[tuple[int, Ranges]] = deque()
        self._range_count = 0

    def clear(self) -> None:
        self._rounds.clear()
        self._range_count = 0

    def acked(self, ranges: Ranges, now_ns: int) -> None:
        self._rounds.append((now_ns, ranges))
        self._range_count += len(ranges)
        self._expire(now_ns)

    def _expire(self, now_ns: int) -> None:
        rounds = self._rounds
        while rounds and (
            rounds[0][0] < now_ns - KEPT_NS or len(rounds) > ROUNDS_MAX or self._range_count > RANGES_MAX
        ):
            self._range_count -= len(rounds.popleft()[1])

    def split(self, batch: ReceivedBatch, now_ns: int, start: int = 0) -> tuple[ReceivedBatch | None, Ranges]:
        """What of a batch from record ``start`` on was not acked (None: nothing), and the ranges that were.

        The batch itself where all of it is left.
        """
        self._expire(now_ns)
        offsets = batch.offsets
        acked = self._among(offsets)
        acked[:start] = False
        left = ~acked
        left[:start] = False
        if left.all():
            return batch, []
        ranges = ranges_of(offsets[acked]) if acked.any() else []
        if not left.any():
            return None, ranges
        whole = pack_header(batch.header)[:BODY_CRC_START] + batch.body
        chosen = select(whole, batch.header, np.flatnonzero(left))
        return take_batch(memoryview(chosen), 0, batch.redelivery_count, compacted=batch.compacted), ranges

    def _among(self, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        acked = np.zeros(len(offsets), np.bool_)
        for _, ranges in self._rounds:
            bounds = np.array(ranges, np.int64).reshape(-1, 2)
            bounds = bounds[np.argsort(bounds[:, 0], kind="stable")]
            place = np.searchsorted(bounds[:, 0], offsets, side="right") - 1
            acked |= (place >= 0) & (offsets < bounds[np.maximum(place, 0), 1])
        return acked
