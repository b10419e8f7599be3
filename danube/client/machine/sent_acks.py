"""Acknowledgements that were sent and that the broker may not have stored.

It also keeps records that this client acked recently, so that a redelivery which crossed the ack is dropped.

The broker sends a record again if its ack comes late or was lost with a connection.  Both copies may be here:
the ack of the first one then counts for the second.  Such records are kept for a short time, and dropped at a
seek, because the application wants those records again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from danube.client.machine.received import ReceivedBatch, ranges_of, take_batch
from danube.core.batch.format import BODY_CRC_START, pack_header
from danube.core.batch.selection import select

Ranges = list[tuple[int, int]]

KEPT_NS: Final = 15_000_000_000  # a broker stores cursors sooner, and a lost connection is noticed sooner
RANGES_KEPT_MAX: Final = 16_384


class SentAcks:
    """Sent acks to send again before the broker can say that everything is stored.

    Each is kept for KEPT_NS at least; the broker has stored older ones by then if it runs.  Acks are sent
    again only when the application asks for a sync.
    """

    __slots__ = ("_asked", "_earlier", "_last", "_lost", "_now_ns", "_recent", "_turned_ns", "unsure")

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.unsure = False  # something was sent since the last sync that was answered
        self._now_ns = now_ns
        self._recent: Ranges = []
        self._earlier: Ranges = []
        self._asked: Ranges = []  # a sync that is not answered yet is about these
        self._lost: Ranges = []  # sent on a connection that is gone
        self._last: tuple[int, int] | None = None
        self._turned_ns = now_ns()

    def add(self, ranges: Ranges) -> None:
        """These were written for the broker; at least one."""
        now_ns = self._now_ns()
        recent = self._recent
        if now_ns - self._turned_ns > KEPT_NS or len(recent) > RANGES_KEPT_MAX:
            self._earlier, self._turned_ns = recent, now_ns
            recent = self._recent = []
        if recent and recent[-1][1] == ranges[0][0]:
            recent[-1] = (recent[-1][0], ranges[0][1])
            recent += ranges[1:]
        else:
            recent += ranges
        self._last = ranges[-1]
        self.unsure = True

    def lose(self) -> None:
        """Note that the connection is lost, and with it the answer to the open request."""
        if self.unsure or self._asked:
            self.unsure = True
            lost = self._lost + self._asked + self._earlier + self._recent
            self._lost = lost[-RANGES_KEPT_MAX:]
            self._asked, self._earlier, self._recent = [], [], []

    def clear(self) -> None:
        """Forget all acks after a seek: records acked before must not be acked again."""
        self._lost, self._asked, self._earlier, self._recent = [], [], [], []
        self._last = None

    def take_lost(self) -> Ranges:
        """Take the acks to send again before a sync."""
        lost, self._lost = self._lost, []
        return lost

    def begin_sync(self) -> tuple[int, int] | None:
        """A range to ask about, whose answer is about everything sent so far; None if nothing was."""
        self._asked = self._asked + self._earlier + self._recent
        self._earlier, self._recent = [], []
        self.unsure = False  # until more is sent
        return self._last

    def end_sync(self, stored: bool) -> None:
        """The broker has answered."""
        if not stored:
            self._earlier = self._asked + self._earlier
            self.unsure = True
        self._asked = []


LATELY_NS: Final = 10_000_000_000
ROUNDS_MAX: Final = 4_096  # of acks
RANGES_MAX: Final = 16_384


class LatelyAcked:
    """Recent acks of one partition, in one subscription of it."""

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
            rounds[0][0] < now_ns - LATELY_NS or len(rounds) > ROUNDS_MAX or self._range_count > RANGES_MAX
        ):
            self._range_count -= len(rounds.popleft()[1])

    def split(self, batch: ReceivedBatch, now_ns: int, start: int = 0) -> tuple[ReceivedBatch | None, Ranges]:
        """Split a batch from record ``start`` on: the part that was not acked, and the acked ranges.

        The first is the batch itself if all of it is left, and None if nothing is.
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
