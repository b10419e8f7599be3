"""The bytes of a plan's pieces: files mapped where they lie, objects fetched in ranges one piece ahead.

A piece that begins inside a sealed segment is found through the index in the segment's footer, one that
begins inside an active segment by walking batch headers.  At most two pieces are held: the one that is
being decoded and the one that is being fetched.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from danube.core.batch.format import HEADER_BYTES as BATCH_HEADER_BYTES
from danube.errors import Damage, ObjectMissing, StorageFailed
from danube.host import files
from danube.limits import MIB
from danube.spark.history.places import AnyPlace, DataDirectory, StorePlace
from danube.spark.history.plan import Piece
from danube.spark.history.segments import SegmentRef
from danube.wal.segments.index import SparseIndex
from danube.wal.segments.segment import (
    HEADER_BYTES,
    NO_LOG,
    STRANGER,
    SUMMARY_BYTES,
    LogIdentity,
    read_header,
    read_summary,
    split_footer,
)
from danube.wal.segments.walk import Place, intact_header
from danube.wal.stores.directory import LocalStore

_Key = TypeVar("_Key")
_Found = TypeVar("_Found")
_STEP_BYTES: Final = 1 * MIB


class Fetched(NamedTuple):
    """Bytes of one segment: ``octets`` (uint8, read-only) begin at file position ``origin``.

    ``start``: where in ``octets`` the first batch begins, whose offset is ``offset`` (in a compacted
    segment: at least).  Batches end at ``len(octets)`` or begin at the piece's end or behind it.
    ``where``: the file or object, for people.  ``boundaries``: known ``(offset, file position)`` pairs.
    """

    piece: Piece
    octets: NDArray[np.uint8]
    origin: int
    start: int
    offset: int
    where: str
    boundaries: tuple[tuple[int, int], ...] = ()


class Fetcher:
    """Fetches pieces of one partition after the other, for one task.

    ``identity`` is checked against the header or footer of each segment, so bytes of another partition
    are never taken for this one's.
    """

    def __init__(self, places: Sequence[AnyPlace]) -> None:
        self._places = places
        self._pool: ThreadPoolExecutor | None = None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def each(self, identity: LogIdentity, pieces: Iterable[Piece]) -> Iterator[Fetched]:
        """Yield every piece in turn; the next one is fetched while one is used.

        Raises ObjectMissing if a file or object is gone, Damage if it belongs to another log, or the error of
        the store.
        """
        waiting = iter(pieces)
        piece = next(waiting, None)
        ahead = None if piece is None else self._begin(identity, piece)
        while ahead is not None:
            fetched = ahead()
            piece = next(waiting, None)
            ahead = None if piece is None else self._begin(identity, piece)
            yield fetched
            del fetched

    def fetch(self, identity: LogIdentity, piece: Piece) -> Fetched:
        """One piece, now."""
        place = self._places[piece.place]
        if isinstance(place, DataDirectory):
            return _fetch_local(place, identity, piece)
        return _fetch_object(place, identity, piece)

    def since(self, identity: LogIdentity, piece: Piece, time_us: int) -> Piece:
        """The part of a piece that holds the first record appended at ``time_us`` or later, by the index.

        All of the piece where the segment has no index to ask.
        """
        place, segment = self._places[piece.place], piece.segment
        if not segment.sealed:
            return piece
        if isinstance(place, DataDirectory):
            path = place.segment_path(identity, segment.key)
            with _opened(path, segment) as fd:
                index = _index_in_file(fd, segment, str(path))
        else:
            index = _index_in_store(place, segment)
        number = bisect_left(index.times, time_us)
        start = index.offsets[number - 1] if number else piece.start
        end = index.offsets[number] + 1 if number < len(index) else piece.end
        return piece._replace(start=max(start, piece.start), end=min(end, piece.end))

    def _begin(self, identity: LogIdentity, piece: Piece) -> Callable[[], Fetched]:
        """Fetch an object ahead; of a mapped file the kernel reads ahead.  Returns how to get the piece."""
        fetch = partial(self.fetch, identity, piece)
        if isinstance(self._places[piece.place], DataDirectory):
            return fetch
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="danube-fetch")
        return self._pool.submit(fetch).result


# -- files ------------------------------------------------------------------------------------------


def _fetch_local(place: DataDirectory, identity: LogIdentity, piece: Piece) -> Fetched:
    path = place.segment_path(identity, piece.segment.key)
    with _opened(path, piece.segment) as fd:
        _check_header(files.pread(fd, HEADER_BYTES, 0), identity, piece.segment, str(path))
        begin, end, offset, boundaries = _range_in_file(fd, piece, str(path))
        octets, origin = _mapped(fd, begin, end) if piece.segment.sealed else _read(fd, begin, end)
    return Fetched(piece, octets, origin, begin - origin, offset, str(path), boundaries)


@contextmanager
def _opened(path: Path, segment: SegmentRef) -> Iterator[int]:
    """The file's descriptor; ObjectMissing if it has gone, StorageFailed if it cannot be read."""
    try:
        fd = files.open_existing(path, writable=False)
    except FileNotFoundError:
        raise ObjectMissing(f"segment {path} is gone", key=segment.key) from None
    except OSError as error:
        raise StorageFailed(f"{path} cannot be opened", why=str(error)) from None
    try:
        yield fd
    except OSError as error:
        raise StorageFailed(f"{path} cannot be read", why=str(error)) from None
    finally:
        files.close(fd)


def _mapped(fd: int, begin: int, end: int) -> tuple[NDArray[np.uint8], int]:
    """A sealed file never changes, and deleting it takes nothing from a mapping."""
    end = min(end, files.size_of(fd))
    if begin >= end:
        return np.zeros(0, np.uint8), begin
    return np.frombuffer(files.mapped(fd, begin, end), np.uint8), begin


def _read(fd: int, begin: int, end: int) -> tuple[NDArray[np.uint8], int]:
    """An active file may be cut by its owner's recovery, which a mapping would not survive."""
    octets = np.empty(max(0, min(end, files.size_of(fd)) - begin), np.uint8)
    filled = 0
    while filled < len(octets):
        count = os.preadv(fd, [octets[filled:].data], begin + filled)
        if not count:
            break
        filled += count
    octets = octets[:filled]
    octets.flags.writeable = False
    return octets, begin


def _range_in_file(fd: int, piece: Piece, where: str) -> tuple[int, int, int, tuple[tuple[int, int], ...]]:
    segment = piece.segment
    if piece.whole:
        return HEADER_BYTES, segment.data_end, segment.base_offset, ()
    if not segment.sealed:
        place = _place_of(fd, where, segment, piece.start)
        last = _place_of(fd, where, segment, piece.end - 1)
        header = intact_header(files.pread(fd, BATCH_HEADER_BYTES, last.position))
        reached = header is not None and header.base_offset == last.offset < piece.end <= header.end_offset
        end = last.position + header.size if header is not None and reached else segment.data_end
        return place.position, end, place.offset, ()
    return _range_of(_index_in_file(fd, segment, where), piece)


def _index_in_file(fd: int, segment: SegmentRef, where: str) -> SparseIndex:
    key = (where, files.inode_of(fd))
    index = _indexes.get(key)
    if index is None:
        size = files.size_of(fd)
        tail = files.pread(fd, max(0, size - segment.data_end), segment.data_end)
        index = _indexes[key] = _index_of(tail, size)
    return index


# -- objects ----------------------------------------------------------------------------------------


def _fetch_object(place: StorePlace, identity: LogIdentity, piece: Piece) -> Fetched:
    segment, store = piece.segment, place.store()
    where = f"{place.name}/{segment.key}"
    begin, end, offset = 0, segment.data_end, segment.base_offset
    boundaries: tuple[tuple[int, int], ...] = ()
    if not piece.whole:
        begin, end, offset, boundaries = _range_of(_index_in_store(place, segment), piece)
    mapped = store.mapped(segment.key, begin, end) if isinstance(store, LocalStore) else None
    data = store.get(segment.key, begin, end) if mapped is None else mapped
    if begin == 0:
        _check_header(bytes(data[:HEADER_BYTES]), identity, segment, where)
    elif segment.log_id != NO_LOG and where not in _proven:
        _check_header(store.get(segment.key, 0, HEADER_BYTES), identity, segment, where)
        _proven[where] = True
    start = HEADER_BYTES if begin == 0 else 0
    return Fetched(piece, np.frombuffer(data, np.uint8), begin, start, offset, where, boundaries)


def _index_in_store(place: StorePlace, segment: SegmentRef) -> SparseIndex:
    key = (f"{place.name}/{segment.key}", 0)
    index = _indexes.get(key)
    if index is None:
        tail = place.store().get(segment.key, segment.data_end, segment.size_bytes)
        index = _indexes[key] = _index_of(tail, segment.size_bytes)
    return index


# -- indexes ----------------------------------------------------------------------------------------


def _check_header(data: bytes, identity: LogIdentity, segment: SegmentRef, where: str) -> None:
    """The header is of this partition and this segment; a damaged one is no obstacle, the batches tell."""
    try:
        header = read_header(data)
    except Damage:
        return
    if header.identity != identity or header.base_offset != segment.base_offset:
        raise Damage(
            f"{where} belongs elsewhere",
            why=f"its header names {header.identity.directory_name}, offset {header.base_offset}",
            file=where,
        )
    if header.stranger_to(segment.log_id):
        raise Damage(
            f"{where} belongs elsewhere", why=STRANGER, hint="`danube verify` names what is wrong", file=where
        )


def _index_of(tail: bytes, size: int) -> SparseIndex:
    """The index in a footer; an empty one, that is a walk from the first batch, where it is damaged."""
    try:
        summary = read_summary(tail[-SUMMARY_BYTES:], size)
        if summary is None:
            return SparseIndex()
        return SparseIndex.unpack(split_footer(tail[:-SUMMARY_BYTES], summary)[0])
    except Damage:
        return SparseIndex()


def _range_of(index: SparseIndex, piece: Piece) -> tuple[int, int, int, tuple[tuple[int, int], ...]]:
    """Positions that hold the piece, the offset at the first one, and known places between them."""
    segment = piece.segment
    entry = index.below(piece.start)
    offset, begin = (segment.base_offset, HEADER_BYTES) if entry is None else entry
    number = bisect_left(index.offsets, piece.end)
    end = index.positions[number] if number < len(index) else segment.data_end
    boundaries = tuple((at, position) for at, position in index.after(begin) if position < end)
    return begin, end, offset, boundaries


class _Recent(OrderedDict[_Key, _Found]):
    """Latest finds of this process, up to a number; the oldest go first."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: _Key, found: _Found) -> None:
        super().__setitem__(key, found)
        if len(self) > self._most:
            self.popitem(last=False)


def _place_of(fd: int, where: str, segment: SegmentRef, offset: int) -> Place:
    """The place of the batch that holds ``offset``, or where walking headers stopped.

    A stream goes on where it was in an active segment.
    """
    key = (where, files.inode_of(fd))
    place = _active_places.get(key)
    if place is None or place.offset > offset:
        place = Place(HEADER_BYTES, segment.base_offset)
    place = _active_places[key] = _walked(fd, place, segment.data_end, offset)
    return place


def _walked(fd: int, place: Place, limit: int, offset: int) -> Place:
    """From header to header up to the batch that holds ``offset``; each has its checksum."""
    data, origin = b"", place.position
    while place.position < limit:
        at = place.position - origin
        if len(data) - at < BATCH_HEADER_BYTES:
            data, origin, at = files.pread(fd, _STEP_BYTES, place.position), place.position, 0
        header = intact_header(memoryview(data)[at : at + BATCH_HEADER_BYTES])
        if header is None or header.base_offset != place.offset or header.end_offset > offset:
            return place
        place = Place(place.position + header.size, header.end_offset)
        if place.position - origin > len(data):
            data, origin = b"", place.position
    return place


_indexes: Final = _Recent[tuple[str, int], SparseIndex](64)
_active_places: Final = _Recent[tuple[str, int], Place](256)
_proven: Final = _Recent[str, bool](4_096)  # objects of which a piece was read, and whose header was right
