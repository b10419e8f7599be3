"""Chunks: runs of whole batches in memory, read once and shared by all subscriptions that read there.

A chunk's bytes never change, so a frame may reference them for as long as a socket needs.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import deque
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from danube.core.batch.columns import BatchView
from danube.core.batch.format import BatchHeader, read_header
from danube.core.batch.selection import ring_hashes, select
from danube.core.dispatch.grants import no_ranges

_SIZE_AND_OFFSET = struct.Struct("<4xIQ")
_COUNT = struct.Struct("<I")
_COUNT_POSITION = 40


class Place(NamedTuple):
    """One batch in a chunk: its bytes and its offsets, in a sparse chunk up to the next batch."""

    position: int
    size: int
    base_offset: int
    end_offset: int


class Chunk:
    """Whole batches back to back; ``first_offset`` .. ``next_offset`` are the records in them.

    ``sparse``: records were removed by key compaction, so that some of these offsets have none.
    """

    def __init__(self, data: bytes, first_offset: int, next_offset: int, *, sparse: bool = False) -> None:
        self.data = data
        self.sparse = sparse
        self.first_offset = first_offset
        self.next_offset = next_offset
        self.hole_before = "damaged"  # why offsets between the requested and the first one are missing

    @cached_property
    def places(self) -> list[Place]:
        """Return all batches of the chunk, in offset order."""
        places = []
        position = 0
        data = self.data
        while position < len(data):
            size, base_offset = _SIZE_AND_OFFSET.unpack_from(data, position)
            (count,) = _COUNT.unpack_from(data, position + _COUNT_POSITION)
            places.append(Place(position, size, base_offset, base_offset + count))
            position += size
        if self.sparse:
            ends = [place.base_offset for place in places[1:]] + [self.next_offset]
            places = [place._replace(end_offset=end) for place, end in zip(places, ends, strict=True)]
        return places

    @cached_property
    def _held(self) -> tuple[npt.NDArray[np.int64], list[int]]:
        """Return the offsets of all records, and for each place the index of its first one."""
        found = [BatchView(self.batch(place)).offsets for place in self.places]
        starts = [0, *np.cumsum([len(offsets) for offsets in found]).tolist()]
        return np.concatenate([np.empty(0, np.int64), *found]), starts

    def held(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return bool[n]: whether each of these offsets, all covered by the chunk, has a record."""
        if not self.sparse:
            return np.ones(len(offsets), np.bool_)
        held = self._held[0]
        found = np.searchsorted(held, offsets)
        inside = found < len(held)
        inside[inside] = held[found[inside]] == offsets[inside]
        return inside

    @cached_property
    def missing(self) -> npt.NDArray[np.int64]:
        """Return the ranges of first_offset .. next_offset without a record, int64[n][2]."""
        if not self.sparse:
            return no_ranges()
        edges = np.concatenate(([self.first_offset - 1], self._held[0], [self.next_offset]))
        gaps = np.flatnonzero(np.diff(edges) > 1)
        return np.stack((edges[gaps] + 1, edges[gaps + 1]), axis=1)

    def index_of(self, place: Place, offset: int) -> int | None:
        """Return the index in the batch of the record with this offset; None if it was removed."""
        if not self.sparse:
            return offset - place.base_offset
        held, starts = self._held
        number = int(np.searchsorted(held, offset))
        if number == len(held) or held[number] != offset:
            return None
        return number - starts[self.find(offset)]

    @cached_property
    def _bases(self) -> list[int]:
        return [place.base_offset for place in self.places]

    @cached_property
    def view(self) -> memoryview:
        """Return all bytes of the chunk."""
        return memoryview(self.data)

    def find(self, offset: int) -> int:
        """Return the index of the place that holds ``offset``, else of the last place before it."""
        return max(bisect_right(self._bases, offset) - 1, 0)

    def header(self, place: Place) -> BatchHeader:
        """Return the header of one batch."""
        return read_header(self.data, place.position)

    def batch(self, place: Place) -> memoryview:
        """Return the bytes of one batch."""
        return self.view[place.position : place.position + place.size]

    @cached_property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """Return the ring hash of every offset first_offset .. next_offset (0 in holes)."""
        hashes = np.zeros(self.next_offset - self.first_offset, np.uint64)
        for place in self.places:
            batch, header = self.batch(place), self.header(place)
            at = place.base_offset - self.first_offset
            if self.sparse:
                hashes[BatchView(batch, header).offset_deltas + at] = ring_hashes(batch, header)
            else:
                hashes[at : at + place.end_offset - place.base_offset] = ring_hashes(batch, header)
        return hashes

    def key(self, offset: int) -> bytes:
        """Return the key of the record at ``offset``, else the producer's name; empty without a record."""
        place = self.places[self.find(offset)]
        index = self.index_of(place, offset)
        if index is None:
            return b""
        batch = BatchView(self.batch(place))
        key = batch.key(index)
        return batch.producer_name.encode() if key is None else key

    def key_at(self, index: int) -> bytes:
        """Return the key of the record at the chunk's first offset plus ``index``."""
        return self.key(self.first_offset + index)

    def cut(self, start: int, end: int) -> list[bytes | memoryview]:
        """Return the records start .. end of a chunk that is not sparse.

        Whole batches are slices of the chunk; batches at the edges are copied in part.
        """
        if start <= self.first_offset and end >= self.next_offset:
            return [self.data]
        places = self.places
        index = self.find(start)
        last = self.find(end - 1)
        parts: list[bytes | memoryview] = []
        if places[index].base_offset < start or (index == last and places[index].end_offset > end):
            parts.append(self._part(places[index], start, end))
            index += 1
        tail: memoryview | bytes | None = None
        if index <= last and places[last].end_offset > end:
            tail = self._part(places[last], start, end)
            last -= 1
        if index <= last:
            whole_end = places[last].position + places[last].size
            if index == 0 and whole_end == len(self.data):
                parts.append(self.data)
            else:
                parts.append(self.view[places[index].position : whole_end])
        if tail is not None:
            parts.append(tail)
        return [part for part in parts if part]

    def _part(self, place: Place, start: int, end: int) -> bytes | memoryview:
        low, high = max(start, place.base_offset), min(end, place.end_offset)
        if low >= high:
            return b""
        indexes = np.arange(low - place.base_offset, high - place.base_offset)
        return select(self.batch(place), self.header(place), indexes)

    def pick(self, offsets: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        """Return the records with these ascending offsets, all of which the chunk holds."""
        if self.sparse:
            return self._pick_sparse(offsets)
        parts: list[bytes | memoryview] = []
        taken = 0
        index = self.find(int(offsets[0]))
        while taken < len(offsets) and index < len(self.places):
            place = self.places[index]
            index += 1
            until = int(np.searchsorted(offsets, place.end_offset))
            if until == taken:
                continue
            indexes = offsets[taken:until] - place.base_offset
            taken = until
            indexes = indexes[indexes >= 0]
            if len(indexes) == place.end_offset - place.base_offset:
                parts.append(self.batch(place))
            elif len(indexes):
                parts.append(select(self.batch(place), self.header(place), indexes))
        return parts

    def _pick_sparse(self, offsets: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        held, starts = self._held
        if len(offsets) == len(held):
            return [self.data]
        parts: list[bytes | memoryview] = []
        numbers = np.searchsorted(held, offsets)
        edges = np.searchsorted(numbers, starts).tolist()
        for place, first, last, start, end in zip(
            self.places, edges, edges[1:], starts, starts[1:], strict=False
        ):
            if last - first == end - start > 0:
                parts.append(self.batch(place))
            elif last > first:
                parts.append(select(self.batch(place), self.header(place), numbers[first:last] - start))
        return parts


class HotBatches:
    """The newest batches of one partition, kept while consumers follow its end closely."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._batches: deque[tuple[int, int, bytes]] = deque()
        self.size_bytes = 0
        self.start = -1  # offset of the first record in memory; -1 if there is none

    def add(self, base_offset: int, end_offset: int, batch: bytes) -> None:
        """Append a batch; drop the oldest beyond the limit of bytes, and all if the batch leaves a gap."""
        batches = self._batches
        if batches and batches[-1][1] != base_offset:
            self.clear()
        batches.append((base_offset, end_offset, batch))
        self.size_bytes += len(batch)
        while self.size_bytes > self._bytes_max and len(batches) > 1:
            self.size_bytes -= len(batches.popleft()[2])
        self.start = batches[0][0]

    def chunk(self, offset: int, end: int, bytes_max: int) -> Chunk | None:
        """Return batches from the one with ``offset`` up to ``end``; None if ``offset`` is not in memory."""
        batches = self._batches
        if not batches or not batches[0][0] <= offset < batches[-1][1]:
            return None
        parts: list[bytes] = []
        size = 0
        first = next_offset = -1
        for base_offset, end_offset, batch in batches:
            if end_offset <= offset:
                continue
            if base_offset >= end or (parts and size + len(batch) > bytes_max):
                break
            if not parts:
                first = base_offset
            parts.append(batch)
            size += len(batch)
            next_offset = end_offset
        if not parts:
            return None
        return Chunk(parts[0] if len(parts) == 1 else b"".join(parts), first, next_offset)

    def trim(self, offset: int) -> None:
        """Drop batches that end at or before ``offset``."""
        batches = self._batches
        while batches and batches[0][1] <= offset:
            self.size_bytes -= len(batches.popleft()[2])
        self.start = batches[0][0] if batches else -1

    def truncate(self, offset: int) -> None:
        """Drop batches at or above ``offset``, because they were not stored."""
        batches = self._batches
        while batches and batches[-1][1] > offset:
            self.size_bytes -= len(batches.pop()[2])
        if not batches:
            self.start = -1

    def clear(self) -> None:
        """Drop all batches."""
        self._batches.clear()
        self.size_bytes = 0
        self.start = -1
