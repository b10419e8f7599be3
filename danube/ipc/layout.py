"""Layout of the region: the arithmetic that every process shares.

    control     header line, then one line of 64 bytes per worker    see docs/formats/region.md
    counters    COUNTER_BLOCK_BYTES per worker
    tallies     TALLY_BLOCK_BYTES per worker; taken when connections are limited
    usage       USAGE_BLOCK_BYTES per worker; taken when sums of namespaces are limited
    rings       one per ordered pair of workers: a page of words, then ``ring_bytes`` of slots

Rings grow with the square of the workers, so their size is halved until all of them together fit
RINGS_BYTES_TOTAL; a record larger than half a ring crosses it in fragments.

    workers   ring      whole region
          2   16 MiB    32 MiB
          4   16 MiB    192 MiB
          8    8 MiB    448 MiB
         16    2 MiB    481 MiB
         64  128 KiB    520 MiB
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from danube.errors import InvalidArgument
from danube.limits import KIB, MIB, RING_BYTES, WORKERS_MAX

PAGE_BYTES: Final = 4096
LINE_BYTES: Final = 64
COUNTER_BLOCK_BYTES: Final = 512
TALLY_BLOCK_BYTES: Final = 64 * KIB
USAGE_BLOCK_BYTES: Final = 64 * KIB
RING_WORDS_BYTES: Final = PAGE_BYTES

RINGS_BYTES_TOTAL: Final = 512 * MIB
RING_BYTES_MIN: Final = 128 * KIB


def _page_aligned(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes and positions, in bytes, of a region for ``workers`` workers."""

    workers: int
    ring_bytes: int

    @classmethod
    def plan(cls, workers: int, ring_bytes: int = 0) -> Layout:
        """Sizes for ``workers`` workers; 0 takes the size from the table above."""
        if not 1 <= workers <= WORKERS_MAX:
            raise InvalidArgument(f"{workers} workers", why=f"a broker has 1 .. {WORKERS_MAX}")
        pairs = workers * (workers - 1)
        ring = ring_bytes or RING_BYTES
        while not ring_bytes and ring > RING_BYTES_MIN and ring * pairs > RINGS_BYTES_TOTAL:
            ring //= 2
        if ring < PAGE_BYTES or ring & (ring - 1):
            raise InvalidArgument(f"ring_bytes={ring}", why=f"it is a power of two from {PAGE_BYTES} on")
        return cls(workers, ring)

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
    def tallies_position(self) -> int:
        return self.counters_position + _page_aligned(COUNTER_BLOCK_BYTES * self.workers)

    def tally_block_position(self, worker: int) -> int:
        return self.tallies_position + TALLY_BLOCK_BYTES * worker

    def usage_block_position(self, worker: int) -> int:
        return self.tally_block_position(self.workers) + USAGE_BLOCK_BYTES * worker

    @property
    def rings_position(self) -> int:
        return self.usage_block_position(self.workers)

    def ring_position(self, writer: int, reader: int) -> int:
        """The words of the ring that ``writer`` writes and ``reader`` reads; its slots follow."""
        if writer == reader or not (0 <= writer < self.workers and 0 <= reader < self.workers):
            raise InvalidArgument(f"no ring from worker {writer} to worker {reader}")
        place = writer * (self.workers - 1) + reader - (reader > writer)
        return self.rings_position + place * (RING_WORDS_BYTES + self.ring_bytes)

    @property
    def region_bytes(self) -> int:
        pairs = self.workers * (self.workers - 1)
        return self.rings_position + pairs * (RING_WORDS_BYTES + self.ring_bytes)
