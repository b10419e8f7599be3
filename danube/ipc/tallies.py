"""Counts by name over all workers of a host: a client must not pass a limit by the worker that it reaches.

    block of a worker     two rows of ROW_COUNTS counts of 32 bits

A name has a place in each row, by a hash that clients cannot foresee.  A worker adds in its own block, and
reads those of all.  The total of a name is the smaller one of its two sums.  So it is never too small, and
too large only if both places are other names' as well.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from danube.ipc.layout import TALLY_BLOCK_BYTES

if TYPE_CHECKING:
    from danube.ipc.region import Region

ROW_COUNTS: Final = TALLY_BLOCK_BYTES // 8
_MASK: Final = 0xFFFFFFFF


class Tallies:
    """The counts as one worker sees them; a worker that starts again begins with none of its own."""

    def __init__(self, region: Region, worker: int) -> None:
        layout = region.layout
        starts = [layout.tally_block_position(one) for one in range(layout.workers)]
        blocks = [region.memory[start : start + TALLY_BLOCK_BYTES] for start in starts]
        blocks[worker][:] = bytes(TALLY_BLOCK_BYTES)
        self._blocks = [block.cast("I") for block in blocks]
        self._own = self._blocks[worker]
        self._secret = region.secret

    def add(self, name: str, amount: int) -> None:
        """Add to the name's count; only what was added is taken away again."""
        for place in self._places(name):
            self._own[place] = self._own[place] + amount & _MASK

    def total(self, name: str) -> int:
        """Return the name's count over all workers."""
        return min(sum(block[place] for block in self._blocks) & _MASK for place in self._places(name))

    def _places(self, name: str) -> tuple[int, int]:
        digest = blake2b(name.encode(), digest_size=8, key=self._secret).digest()
        first, second = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
        return first % ROW_COUNTS, ROW_COUNTS + second % ROW_COUNTS
