"""Layout of the region: the arithmetic that every process shares.

    control     header line, then one line of 64 bytes per worker    see docs/formats/region.md
    counters    COUNTER_BLOCK_BYTES per worker
    rings       one per ordered pair of workers: a page of words, then ``ring_bytes`` of slots
    tails       one per worker: a page of words, then ``tail_bytes``

Rings grow with the square of the workers, so their size is halved until all of them together fit
RINGS_BYTES_TOTAL; a record larger than half a ring crosses it in fragments.  Tails are halved likewise
but always hold the largest batch.

    workers   ring      tail      whole region
          1   -         32 MiB    32 MiB
          2   16 MiB    32 MiB    96 MiB
          4   16 MiB    32 MiB    320 MiB
          8    8 MiB    32 MiB    704 MiB
         16    2 MiB    32 MiB    993 MiB
         64  128 KiB    16 MiB    1.5 GiB
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from danube.errors import InvalidArgument
from danube.limits import BATCH_BYTES_MAX, KIB, MIB, RING_BYTES, TAIL_BYTES, WORKERS_MAX

PAGE_BYTES: Final = 4096
LINE_BYTES: Final = 64
COUNTER_BLOCK_BYTES: Final = 512
RING_WORDS_BYTES: Final = PAGE_BYTES
TAIL_WORDS_BYTES: Final = PAGE_BYTES

RINGS_BYTES_TOTAL: Final = 512 * MIB
TAILS_BYTES_TOTAL: Final = 512 * MIB
RING_BYTES_MIN: Final = 128 * KIB
TAIL_BYTES_MIN: Final = 16 * MIB

if not (TAIL_BYTES_MIN > BATCH_BYTES_MAX and RING_BYTES_MIN & (RING_BYTES_MIN - 1) == 0):
    raise ImportError("danube.ipc.layout disagrees with danube.limits")


def _halved(size: int, count: int, total: int, least: int) -> int:
    while size > least and size * count > total:
        size //= 2
    return size


def _page_aligned(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes and positions, in bytes, of a region for ``workers`` workers."""

    workers: int
    ring_bytes: int
    tail_bytes: int

    @classmethod
    def plan(cls, workers: int, ring_bytes: int = 0, tail_bytes: int = 0) -> Layout:
        """Sizes for ``workers`` workers; 0 takes the size from the table above."""
        if not 1 <= workers <= WORKERS_MAX:
            raise InvalidArgument(f"{workers} workers", why=f"a broker has 1 .. {WORKERS_MAX}")
        pairs = workers * (workers - 1)
        ring = ring_bytes or _halved(RING_BYTES, pairs, RINGS_BYTES_TOTAL, RING_BYTES_MIN)
        tail = tail_bytes or _halved(TAIL_BYTES, workers, TAILS_BYTES_TOTAL, TAIL_BYTES_MIN)
        for name, size in (("ring_bytes", ring), ("tail_bytes", tail)):
            if size < PAGE_BYTES or size & (size - 1):
                raise InvalidArgument(f"{name}={size}", why=f"it is a power of two from {PAGE_BYTES} on")
        return cls(workers, ring, tail)

    def incarnation_position(self, worker: int) -> int:
        """A line that only the supervisor writes."""
        return LINE_BYTES + LINE_BYTES * worker

    def sleeping_position(self, worker: int) -> int:
        """A line that only ``worker`` writes."""
        return LINE_BYTES + LINE_BYTES * (self.workers + worker)

    @property
    def counters_position(self) -> int:
        return _page_aligned(LINE_BYTES + 2 * LINE_BYTES * self.workers)

    def counter_block_position(self, worker: int) -> int:
        return self.counters_position + COUNTER_BLOCK_BYTES * worker

    @property
    def rings_position(self) -> int:
        return self.counters_position + _page_aligned(COUNTER_BLOCK_BYTES * self.workers)

    def ring_position(self, writer: int, reader: int) -> int:
        """The words of the ring that ``writer`` writes and ``reader`` reads; its slots follow."""
        if writer == reader or not (0 <= writer < self.workers and 0 <= reader < self.workers):
            raise InvalidArgument(f"no ring from worker {writer} to worker {reader}")
        place = writer * (self.workers - 1) + reader - (reader > writer)
        return self.rings_position + place * (RING_WORDS_BYTES + self.ring_bytes)

    @property
    def tails_position(self) -> int:
        pairs = self.workers * (self.workers - 1)
        return self.rings_position + pairs * (RING_WORDS_BYTES + self.ring_bytes)

    def tail_position(self, worker: int) -> int:
        return self.tails_position + worker * (TAIL_WORDS_BYTES + self.tail_bytes)

    @property
    def region_bytes(self) -> int:
        return self.tails_position + self.workers * (TAIL_WORDS_BYTES + self.tail_bytes)
