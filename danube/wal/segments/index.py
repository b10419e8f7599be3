"""The sparse index of a segment: one entry for about every 64 KiB of batches."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from danube.limits import KIB
from danube.wal.segments.segment import ENTRY_BYTES

if TYPE_CHECKING:
    from danube.core.batch.format import BatchHeader

ENTRY_EVERY_BYTES: Final = 64 * KIB
LOADED_MAX: Final = 256


class SparseIndex:
    """Entries ``(base_offset, position, append_time_us)``, ascending in all three."""

    __slots__ = ("offsets", "positions", "times")

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.positions: list[int] = []
        self.times: list[int] = []

    def __len__(self) -> int:
        return len(self.offsets)

    def add(self, base_offset: int, position: int, append_time_us: int) -> None:
        """Offer a batch; it becomes an entry when it lies far enough behind the last one."""
        positions = self.positions
        if not positions or position - positions[-1] >= ENTRY_EVERY_BYTES:
            self.offsets.append(base_offset)
            positions.append(position)
            self.times.append(append_time_us)

    def add_all(self, headers: Sequence[BatchHeader], position: int) -> None:
        """Offer batches that lie one behind the other from ``position`` on."""
        for header in headers:
            self.add(header.base_offset, position, header.append_time_us)
            position += header.size

    def below(self, offset: int) -> tuple[int, int] | None:
        """``(base_offset, position)`` of the last entry at or below ``offset``."""
        number = bisect_right(self.offsets, offset) - 1
        return None if number < 0 else (self.offsets[number], self.positions[number])

    def after(self, position: int) -> Iterable[tuple[int, int]]:
        """``(base_offset, position)`` of the entries that lie behind ``position``."""
        first = bisect_right(self.positions, position)
        return zip(self.offsets[first:], self.positions[first:], strict=True)

    def offset_before_time(self, time_us: int) -> int | None:
        """Base offset of the last entry that was appended before ``time_us``."""
        number = bisect_left(self.times, time_us) - 1
        return None if number < 0 else self.offsets[number]

    def pack(self) -> bytes:
        table = np.array([self.offsets, self.positions, self.times], "<i8").T
        return np.ascontiguousarray(table).tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> SparseIndex:
        index = cls()
        table = np.frombuffer(data, "<i8").reshape(-1, ENTRY_BYTES // 8)
        index.offsets, index.positions, index.times = (column.tolist() for column in table.T)
        return index


class IndexCache:
    """Indexes read from footers, for the whole process; the least recently used go first.

    Safe for threads.
    """

    def __init__(self, loaded_max: int = LOADED_MAX) -> None:
        self._loaded: OrderedDict[object, SparseIndex] = OrderedDict()
        self._loaded_max = loaded_max
        self._lock = threading.Lock()

    def get(self, key: object) -> SparseIndex | None:
        with self._lock:
            index = self._loaded.get(key)
            if index is not None:
                self._loaded.move_to_end(key)
            return index

    def put(self, key: object, index: SparseIndex) -> None:
        with self._lock:
            self._loaded[key] = index
            if len(self._loaded) > self._loaded_max:
                self._loaded.popitem(last=False)

    def drop(self, key: object) -> None:
        with self._lock:
            self._loaded.pop(key, None)


index_cache = IndexCache()
