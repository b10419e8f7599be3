"""From a segment's bytes to Arrow record batches, with every checksum verified on the way.

A large batch becomes columns where it lies; small ones are joined into record batches of some ten thousand
rows.  Compressed ones are inflated first.  A batch is used only if its checksums are right and its
offset is the next one, or a later one in a compacted segment.  Other bytes are damage: an error that names
file, position and offset, or skipped and counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from danube.core.batch.columns import BatchView, StopReason, scan
from danube.core.batch.format import (
    COMPRESSION_MASK,
    HEADER_BYTES,
    Flag,
    pack_header,
    padded,
)
from danube.core.batch.joined import AttributeColumns, BatchTable, VariableColumn, read_headers
from danube.errors import Damage, DanubeError, ProtocolError
from danube.limits import BATCH_BYTES_MAX, KIB, MIB
from danube.spark.history.fetch import Fetched
from danube.wal.segments.walk import Extent, Place, resume

ROWS_MAX: Final = 32_768
BYTES_MAX: Final = 8 * MIB
_SCAN_BYTES: Final = 4 * MIB  # verified and decoded while it is in the processor's cache
_ALONE_BYTES: Final = 256 * KIB  # a batch of this size is not worth copying
_REPEATED_MAX: Final = 64

MICROSECONDS: Final = pa.timestamp("us", tz="UTC")
ATTRIBUTES: Final = pa.map_(pa.string(), pa.string())
COLUMNS: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("publish_time", MICROSECONDS),
        ("append_time", MICROSECONDS),
        ("key", pa.binary()),
        ("payload", pa.binary()),
        ("attributes", ATTRIBUTES),
        ("producer", pa.string()),
        ("schema_id", pa.int64()),
        ("schema_version", pa.int32()),
    ]
)
_REASONS: Final = {
    StopReason.CUT: "a batch is cut",
    StopReason.BAD_HEADER: "a batch's header is damaged",
    StopReason.BAD_BODY: "a batch fails its checksum",
    StopReason.OFFSET_MISMATCH: "a batch has another offset than the next one",
    StopReason.END: "batches are missing",
}


class Skipped(NamedTuple):
    """Records ``start .. end`` that were skipped at byte ``position`` of ``where``, and why."""

    where: str
    position: int
    start: int
    end: int
    why: str


@dataclass
class Losses:
    """Skipped records.  ``allowed`` false: the first loss is raised instead."""

    allowed: bool = False
    skipped: list[Skipped] = field(default_factory=list)

    def note(self, loss: Skipped) -> None:
        """Count a loss, or raise Damage."""
        if not self.allowed:
            raise Damage(
                f"{loss.where} is damaged at byte {loss.position}",
                why=f"{loss.why}; records {loss.start} to {loss.end} cannot be read",
                hint="failOnDataLoss=false skips them; `danube spark validate` tells more",
                file=loss.where,
                position=loss.position,
                start=loss.start,
                end=loss.end,
            )
        self.skipped.append(loss)

    @property
    def record_count(self) -> int:
        return sum(loss.end - loss.start for loss in self.skipped)


class Stretch(NamedTuple):
    """Intact batches that lie one after the other: ``positions`` in ``octets``, of one fetched piece."""

    octets: NDArray[np.uint8]
    positions: NDArray[np.int64]
    headers: NDArray[np.void]


def stretches(fetched: Fetched, losses: Losses) -> Iterator[Stretch]:
    """The intact batches of a piece, some MiB at a time.

    They hold all records of the piece that can be read, and perhaps some before and behind it.  Losses
    are those of the piece alone.
    """
    octets, piece = fetched.octets, fetched.piece
    compacted = piece.segment.compacted
    at, expected, size = fetched.start, fetched.offset, _SCAN_BYTES
    while expected < piece.end:
        limit = min(at + size, len(octets))
        found = scan(octets.data, at, limit, None if compacted else expected)
        positions, bases, reason = found.positions, found.base_offsets, found.reason
        if compacted and len(bases):
            positions, bases, reason = _ascending(found, expected)
        if len(positions):
            headers = read_headers(octets, positions)
            last = BatchView(octets.data, position=int(positions[-1]))
            yield Stretch(octets, positions, headers)
            at, expected, size = found.stop, int(last.offsets[-1]) + 1, _SCAN_BYTES
            if len(positions) < len(found.positions):
                at = int(found.positions[len(positions)])
            if reason in (StopReason.END, StopReason.CUT):
                continue
        elif reason is StopReason.CUT and limit < len(octets) and size < BATCH_BYTES_MAX:
            size = BATCH_BYTES_MAX
            continue
        if at >= len(octets) and compacted:
            return
        at, expected = _skip(fetched, at, expected, reason, losses)


def _ascending(found: Any, expected: int) -> tuple[Any, Any, StopReason]:
    """The batches up to the first that begins below the one before it."""
    bases = found.base_offsets
    wrong = np.flatnonzero(np.diff(bases, prepend=expected - 1) <= 0)
    if not len(wrong):
        return found.positions, bases, found.reason
    kept = int(wrong[0])
    return found.positions[:kept], bases[:kept], StopReason.OFFSET_MISMATCH


def _skip(fetched: Fetched, at: int, expected: int, reason: StopReason, losses: Losses) -> tuple[int, int]:
    """Find where intact batches go on behind damage, and with which offset; note the lost range."""
    piece, octets = fetched.piece, fetched.octets
    ended = at >= len(octets)
    found = None if ended else _resumed(fetched, at, expected)
    following = piece.end if found is None else found[1]
    lost_start, lost_end = max(expected, piece.start), min(following, piece.end)
    if lost_start < lost_end:
        why = "the file ends" if ended else _REASONS[reason]
        losses.note(Skipped(fetched.where, fetched.origin + at, lost_start, lost_end, why))
    return (len(octets), piece.end) if found is None else found


def _resumed(fetched: Fetched, at: int, expected: int) -> tuple[int, int] | None:
    """As the broker's log finds its way: the same walk, over a copy of the bytes in a file of memory."""
    segment = fetched.piece.segment
    end_known = fetched.origin + len(fetched.octets) == segment.data_end and segment.sealed
    fd = os.memfd_create("danube-damaged")
    try:
        os.pwrite(fd, fetched.octets[at:].data, 0)
        shift = fetched.origin + at
        limit = len(fetched.octets) - at
        sparse = Place(limit, segment.end_offset) if segment.compacted else None
        extent = Extent(fd, limit, segment.end_offset if end_known else None, 0, sparse)
        bounds = [(offset, place - shift) for offset, place in fetched.boundaries if place > shift]
        found = resume(extent, 0, expected, bounds)
    finally:
        os.close(fd)
    return None if found is None else (at + found.position, found.offset)


class _Wanted(NamedTuple):
    """Selected records of a partition, the source of their bytes, and the treatment of losses."""

    topic: str
    partition: int
    start: int
    end: int
    where: str
    origin: int
    losses: Losses

    def lose(self, headers: NDArray[np.void], position: int, error: Exception) -> None:
        """Note the records of one batch that has its checksums and cannot be read all the same."""
        first = int(headers["base_offset"][0])
        start, end = max(self.start, first), min(self.end, first + int(headers["record_count"][0]))
        if start < end:
            self.losses.note(Skipped(self.where, self.origin + position, start, end, str(error)))


class Decoder:
    """Makes record batches of the columns that are asked for, in the order of ``columns``.

    ``columns``: names of COLUMNS; none is fine, the rows count then.
    """

    def __init__(self, columns: Sequence[str], *, rows_max: int = ROWS_MAX) -> None:
        self.columns = tuple(columns)
        self.schema = pa.schema([COLUMNS.field(name) for name in self.columns])
        self._rows_max = rows_max
        self._repeated: dict[tuple[Any, pa.DataType], pa.Array] = {}

    def decode(
        self, fetched: Fetched, topic: str, partition: int, losses: Losses
    ) -> Iterator[pa.RecordBatch]:
        """The piece's records, each once, in the order of their offsets."""
        piece = fetched.piece
        wanted = _Wanted(topic, partition, piece.start, piece.end, fetched.where, fetched.origin, losses)
        for stretch in stretches(fetched, losses):
            yield from self._of_stretch(stretch, wanted)

    def decode_batches(
        self, octets: NDArray[np.uint8], topic: str, partition: int, start: int, end: int, losses: Losses
    ) -> Iterator[pa.RecordBatch]:
        """Records ``start .. end`` of whole batches that lie one after the other, as a broker sends them."""
        found = scan(octets.data, 0, len(octets))
        if found.reason is not StopReason.END:
            raise Damage(_REASONS[found.reason], position=found.stop)
        positions = np.ascontiguousarray(found.positions)
        where = f"what the broker sent of {topic}"
        wanted = _Wanted(topic, partition, start, end, where, 0, losses)
        yield from self._of_stretch(Stretch(octets, positions, read_headers(octets, positions)), wanted)

    # -- batches put together ---------------------------------------------------------------------

    def _of_stretch(self, stretch: Stretch, wanted: _Wanted) -> Iterator[pa.RecordBatch]:
        """The stretch's batches in groups that make one record batch each."""
        octets, positions, headers = stretch
        compressed = (headers["flags"] & np.uint16(COMPRESSION_MASK)) != 0
        sizes = np.maximum(headers["size"], headers["columns_size"]).astype(np.int64)
        alone = ~compressed & (sizes >= _ALONE_BYTES)
        for first, last in _groups(headers["record_count"], sizes, alone, compressed, self._rows_max):
            group = slice(first, last)
            if compressed[first]:
                yield from self._of_group(*_inflated(octets, positions[group], wanted), wanted)
            else:
                yield from self._of_group(octets, positions[group], headers[group], wanted)

    def _of_group(
        self,
        octets: NDArray[np.uint8],
        positions: NDArray[np.int64],
        headers: NDArray[np.void],
        wanted: _Wanted,
    ) -> Iterator[pa.RecordBatch]:
        """One record batch; where a stored batch has columns that cannot be, the others one by one."""
        if not len(positions):
            return
        try:
            made = self._record_batch(BatchTable(octets, positions, headers), wanted)
        except (Damage, ProtocolError, UnicodeDecodeError) as error:
            if len(positions) == 1:
                wanted.lose(headers, int(positions[0]), error)
                return
            for one in range(len(positions)):
                own = slice(one, one + 1)
                yield from self._of_group(octets, positions[own], headers[own], wanted)
            return
        if made is not None:
            yield made

    def _record_batch(self, table: BatchTable, wanted: _Wanted) -> pa.RecordBatch | None:
        offsets = table.offsets()
        first, last = 0, len(offsets)
        if offsets[0] < wanted.start or offsets[-1] >= wanted.end:
            bounds = np.searchsorted(offsets, [wanted.start, wanted.end], "left")
            first, last = int(bounds[0]), int(bounds[1])
        if first >= last:
            return None
        made = [self._column(name, table, offsets, wanted.topic, wanted.partition) for name in self.columns]
        batch = pa.RecordBatch.from_arrays(made, schema=self.schema) if made else _rows_only(len(offsets))
        return batch if last - first == len(offsets) else batch.slice(first, last - first)

    def _column(
        self, name: str, table: BatchTable, offsets: NDArray[np.int64], topic: str, partition: int
    ) -> pa.Array:
        rows = len(offsets)
        if name == "offset":
            return _numbers(offsets, pa.int64())
        if name == "payload":
            return _binary(table.payloads(), rows, pa.binary())
        if name == "key":
            keys = table.keys()
            return pa.nulls(rows, pa.binary()) if keys is None else _binary(keys, rows, pa.binary())
        if name == "topic":
            return self._repeat(topic, pa.string(), rows)
        if name == "partition":
            return self._repeat(partition, pa.int32(), rows)
        if name == "publish_time":
            return _numbers(table.publish_times(), MICROSECONDS)
        if name == "append_time":
            return _numbers(table.repeated("append_time_us"), MICROSECONDS)
        if name == "producer":
            return self._producers(table, rows)
        if name == "attributes":
            return _attributes(table.attributes(), rows)
        if name == "schema_id":
            return _flagged(table, "schema_id", Flag.SCHEMA_ID, pa.int64(), "<i8")
        return _flagged(table, "schema_version", Flag.SCHEMA_VERSION, pa.int32(), "<i4")

    def _repeat(self, value: Any, kind: pa.DataType, rows: int) -> pa.Array:
        """One value for each row; made once and cut from."""
        known = self._repeated.get((value, kind))
        if known is None or len(known) < rows:
            if len(self._repeated) >= _REPEATED_MAX:
                self._repeated.clear()
            known = pa.repeat(pa.scalar(value, kind), max(rows, self._rows_max))
            self._repeated[value, kind] = known
        return known.slice(0, rows)

    def _producers(self, table: BatchTable, rows: int) -> pa.Array:
        names = table.producers()
        if names.count(names[0]) == len(names):
            return self._repeat(names[0].decode(), pa.string(), rows)
        numbers: dict[bytes, int] = {}
        codes = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int32)
        texts = pa.array([name.decode() for name in numbers], pa.string())
        return pa.DictionaryArray.from_arrays(np.repeat(codes, table.counts), texts).cast(pa.string())


def _attributes(found: AttributeColumns | None, rows: int) -> pa.Array:
    """A map for each record; null for one without attributes, which costs Spark nothing."""
    if found is None:
        return pa.nulls(rows, ATTRIBUTES)
    names = _binary(found.names, len(found.names.offsets) - 1, pa.string())
    values = _binary(found.values, len(found.values.offsets) - 1, pa.string())
    absent = found.ends[1:] == found.ends[:-1]
    mask = pa.array(absent) if absent.any() else None
    return pa.MapArray.from_arrays(pa.array(found.ends), names, values, mask=mask)


def _rows_only(rows: int) -> pa.RecordBatch:
    """A record batch without columns cannot count, so it gets one that the caller drops."""
    return pa.RecordBatch.from_arrays([pa.nulls(rows)], names=[""]).select([])


def _numbers(values: NDArray[np.int64], kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _binary(column: VariableColumn, rows: int, kind: pa.DataType) -> pa.Array:
    validity = None if column.validity is None else pa.py_buffer(column.validity)
    content = [validity, pa.py_buffer(column.offsets), pa.py_buffer(column.data)]
    return pa.Array.from_buffers(kind, rows, content, column.null_count)


def _flagged(table: BatchTable, name: str, flag: int, kind: pa.DataType, dtype: str) -> pa.Array:
    """A header's number where its flag is set, else null."""
    valid = table.flagged(flag)
    if valid is None:
        return pa.array(table.repeated(name, dtype))
    if not valid.any():
        return pa.nulls(len(valid), kind)
    return pa.array(table.repeated(name, dtype), mask=~valid)


def _groups(
    counts: NDArray[Any], sizes: NDArray[np.int64], alone: NDArray[np.bool_], kinds: NDArray[np.bool_],
    rows_max: int,
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """Bounds of consecutive batches of one kind that make about ``rows_max`` rows, or BYTES_MAX bytes."""
    cuts = np.flatnonzero(alone[1:] | alone[:-1] | (kinds[1:] != kinds[:-1])) + 1
    rows, octets = np.cumsum(counts, dtype=np.int64), np.cumsum(sizes)
    bounds = [0, *cuts.tolist(), len(counts)]
    for first, last in pairwise(bounds):
        while first < last:
            before_rows = int(rows[first - 1]) if first else 0
            before_bytes = int(octets[first - 1]) if first else 0
            stop = int(np.searchsorted(rows, before_rows + rows_max, "right"))
            stop = min(stop, int(np.searchsorted(octets, before_bytes + BYTES_MAX, "right")), last)
            stop = max(stop, first + 1)
            yield first, stop
            first = stop


def _inflated(
    octets: NDArray[np.uint8], positions: NDArray[np.int64], wanted: _Wanted
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.void]]:
    """Return the batches without compression, their positions and headers; damage is left out and noted."""
    parts: list[bytes | memoryview] = []
    places: list[int] = []
    end = 0
    for position in positions.tolist():
        view = BatchView(octets.data, position=position)
        header = view.header
        try:
            columns = view.columns
        except DanubeError as error:
            wanted.lose(read_headers(octets, np.array([position])), position, error)
            continue
        names_end = HEADER_BYTES + padded(header.name_size + header.origin_size)
        size = names_end + len(columns)
        plain = header._replace(size=size, flags=header.flags & ~COMPRESSION_MASK)
        parts += (pack_header(plain), view.data[HEADER_BYTES:names_end], columns)
        places.append(end)
        end += size
    inflated, found = np.frombuffer(b"".join(parts), np.uint8), np.array(places, np.int64)
    return inflated, found, read_headers(inflated, found)
