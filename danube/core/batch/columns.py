"""Reading a batch in place, and encoding one (:func:`encode`).

:class:`BatchView` owns and copies nothing; it is valid until the buffer's owner releases it.
Nothing that a peer wrote is trusted: the positions of all columns follow from the header and are
checked against its size before the first read, and the offsets of a column are checked when it is
first touched.  Every accessor raises ProtocolError instead of reading outside its column.
"""

from __future__ import annotations

import struct
from io import BytesIO
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from danube.core import kernels
from danube.core.batch.builder import Attributes, EncodedBatch, Keys, encode
from danube.core.batch.checksum import key_hash
from danube.core.batch.compression import check_ratio, decompress
from danube.core.batch.format import (
    COMPRESSION_MASK,
    HEADER_BYTES,
    BatchHeader,
    Flag,
    body_intact,
    padded,
    read_header,
    unpack_header,
)
from danube.core.batch.payloads import larger_record_hint
from danube.core.batch.row_mark import RowMark, read_mark
from danube.core.batch.scan import ScanResult, StopReason, scan
from danube.errors import ProtocolError, RecordTooLarge
from danube.limits import ATTRIBUTE_BYTES_MAX, ATTRIBUTES_PER_RECORD_MAX, KEY_BYTES_MAX

__all__ = [
    "Attributes",
    "BatchView",
    "EncodedBatch",
    "Keys",
    "Layout",
    "ScanResult",
    "StopReason",
    "check_columns",
    "encode",
    "key_partitions",
    "layout_of",
    "place_columns",
    "scan",
]

Data = bytes | bytearray | memoryview

_OFFSET_MAX: Final = 2**63 - 1 - 2**32
_ONE: Final = struct.Struct("<ii")
_ATTRIBUTE: Final = struct.Struct("<HI")


class Layout(NamedTuple):
    """Byte positions from the start of the columns; -1 where a column is absent."""

    times: int
    request_ids: int
    selected: int
    payload_offsets: int
    payloads: int
    key_validity: int
    key_offsets: int
    keys: int
    attribute_offsets: int
    attributes: int
    end: int


def layout_of(header: BatchHeader) -> Layout:
    """Return the position of every column; raises ProtocolError if the header's sizes disagree."""
    flags, count = header.flags, header.record_count
    if (
        (flags & Flag.NULL_KEYS and not flags & Flag.KEYS)
        or (header.key_bytes and not flags & Flag.KEYS)
        or (header.attribute_bytes and not flags & Flag.ATTRIBUTES)
    ):
        raise ProtocolError("batch header names bytes of a column that it does not have", flags=flags)
    layout = place_columns(flags, count, header.payload_bytes, header.key_bytes, header.attribute_bytes)
    if layout.end != header.columns_size:
        raise ProtocolError(
            "batch columns do not add up to their size", columns_size=header.columns_size, needed=layout.end
        )
    names_size = padded(header.name_size + header.origin_size)
    if not flags & COMPRESSION_MASK and header.size != HEADER_BYTES + names_size + layout.end:
        raise ProtocolError("batch is larger than its columns", size=header.size, columns_size=layout.end)
    return layout


def place_columns(flags: int, count: int, payload_bytes: int, key_bytes: int, attribute_bytes: int) -> Layout:
    """Positions of the columns of ``count`` records with these byte totals."""
    offsets_size = 4 * (count + 1) + 7 & ~7
    times = request_ids = selected = validity = key_offsets = keys = attribute_offsets = attributes = -1
    end = 0
    if flags & Flag.TIMES:
        times, end = end, end + 8 * count
    if flags & Flag.REQUEST_IDS:
        request_ids, end = end, end + 8 * count
    if flags & Flag.SELECTED:
        selected, end = end, end + (4 * count + 7 & ~7)
    payload_offsets = end
    payloads = end + offsets_size
    end = payloads + (payload_bytes + 7 & ~7)
    if flags & Flag.NULL_KEYS:
        validity, end = end, end + ((count + 63) // 64 * 8)
    if flags & Flag.KEYS:
        key_offsets, keys = end, end + offsets_size
        end = keys + (key_bytes + 7 & ~7)
    if flags & Flag.ATTRIBUTES:
        attribute_offsets, attributes = end, end + offsets_size
        end = attributes + (attribute_bytes + 7 & ~7)
    return Layout(
        times, request_ids, selected, payload_offsets, payloads, validity, key_offsets, keys,
        attribute_offsets, attributes, end,
    )  # fmt: skip


class BatchView:
    """One batch where it lies: socket buffer, ring slot, read buffer or fetched object."""

    __slots__ = ("_columns", "_layout", "_variable", "data", "header", "record_count")

    def __init__(self, data: Data, header: BatchHeader | None = None, position: int = 0) -> None:
        """View the batch at ``position``; raises ProtocolError or LimitExceeded like read_header."""
        self.header = header or read_header(data, position)
        self.data = memoryview(data)[position : position + self.header.size]
        if len(self.data) != self.header.size:
            raise ProtocolError("batch is cut", size=self.header.size, present=len(self.data))
        self.record_count = self.header.record_count
        self._layout: Layout | None = None
        self._columns: memoryview | None = None
        self._variable: dict[int, tuple[NDArray[np.int32], memoryview]] = {}

    def __len__(self) -> int:
        return self.record_count

    @property
    def layout(self) -> Layout:
        if self._layout is None:
            self._layout = layout_of(self.header)
        return self._layout

    @property
    def columns(self) -> memoryview:
        """The bytes of all columns, inflated once if need be (ProtocolError if that fails)."""
        if self._columns is None:
            header, layout = self.header, self.layout
            start = HEADER_BYTES + padded(header.name_size + header.origin_size)
            block = self.data[start:]
            kind = header.flags & COMPRESSION_MASK
            self._columns = memoryview(decompress(kind, block, layout.end)) if kind else block
        return self._columns

    @property
    def producer_name(self) -> str:
        return self._text(HEADER_BYTES, self.header.name_size)

    @property
    def origin(self) -> str:
        """The address that a producer of gRPC named."""
        text = self._origin_text
        return "" if read_mark(text) else text

    @property
    def row_mark(self) -> RowMark | None:
        """Which rows of its task the log has up to this batch; None if the producer is no job."""
        return read_mark(self._origin_text)

    @property
    def _origin_text(self) -> str:
        return self._text(HEADER_BYTES + self.header.name_size, self.header.origin_size)

    def _text(self, position: int, size: int) -> str:
        return _decode(self.data[position : position + size])

    @property
    def schema_id(self) -> int | None:
        return self.header.schema_id if self.header.flags & Flag.SCHEMA_ID else None

    @property
    def schema_version(self) -> int | None:
        return self.header.schema_version if self.header.flags & Flag.SCHEMA_VERSION else None

    @property
    def offsets(self) -> NDArray[np.int64]:
        """int64[n]: offset of each record."""
        first = self.header.base_offset
        if first > _OFFSET_MAX:
            raise ProtocolError("base offset is not one", base_offset=first)
        return self.offset_deltas + first

    @property
    def offset_deltas(self) -> NDArray[np.int64]:
        """int64[n]: offset minus base_offset; ProtocolError if SELECTED ones do not ascend."""
        if not self.header.flags & Flag.SELECTED:
            return np.arange(self.record_count, dtype=np.int64)
        deltas = self._numbers(self.layout.selected, "<u4").astype(np.int64)
        if not (deltas[1:] > deltas[:-1]).all():
            raise ProtocolError("selected offsets do not ascend")
        return deltas

    @property
    def publish_times(self) -> NDArray[np.int64]:
        """int64[n]: microseconds since 1970 UTC."""
        if self.header.flags & Flag.TIMES:
            return self._numbers(self.layout.times, "<i8")
        return np.full(self.record_count, self.header.publish_time_us, np.int64)

    @property
    def request_ids(self) -> NDArray[np.uint64] | None:
        return self._numbers(self.layout.request_ids, "<u8") if self.header.flags & Flag.REQUEST_IDS else None

    def _numbers(self, position: int, dtype: str) -> NDArray[Any]:
        return np.frombuffer(self.columns, dtype, self.record_count, position)

    # Variable-length columns: offsets are checked when a column is first touched.

    def _column(
        self, offsets_position: int, position: int, total: int
    ) -> tuple[NDArray[np.int32], memoryview]:
        column = self._variable.get(position)
        if column is None:
            columns = self.columns
            offsets = np.frombuffer(columns, "<i4", self.record_count + 1, offsets_position)
            if offsets[0] != 0 or offsets[-1] != total or not (offsets[1:] >= offsets[:-1]).all():
                raise ProtocolError("offsets of a column do not ascend from 0 to its size")
            column = self._variable[position] = (offsets, columns[position : position + total])
        return column

    def _payload_column(self) -> tuple[NDArray[np.int32], memoryview]:
        layout = self.layout
        return self._column(layout.payload_offsets, layout.payloads, self.header.payload_bytes)

    def _key_column(self) -> tuple[NDArray[np.int32], memoryview]:
        layout = self.layout
        return self._column(layout.key_offsets, layout.keys, self.header.key_bytes)

    def _attribute_column(self) -> tuple[NDArray[np.int32], memoryview]:
        layout = self.layout
        return self._column(layout.attribute_offsets, layout.attributes, self.header.attribute_bytes)

    @property
    def payload_offsets(self) -> NDArray[np.int32]:
        """int32[n+1]: where each payload starts in payload_bytes, and the end of the last."""
        return self._payload_column()[0]

    @property
    def payload_bytes(self) -> memoryview:
        return self._payload_column()[1]

    def payload(self, index: int) -> bytes:
        offsets, data = self._payload_column()
        index = self._index(index)
        return bytes(data[offsets[index] : offsets[index + 1]])

    def payloads(self) -> list[bytes]:
        """All payloads, copied out as bytes."""
        if self.record_count == 1:
            return [self._only_payload()]
        return _split(*self._payload_column())

    def _only_payload(self) -> bytes:
        layout, columns = self.layout, self.columns
        total = self.header.payload_bytes
        if _ONE.unpack_from(columns, layout.payload_offsets) != (0, total):
            raise ProtocolError("offsets of a column do not ascend from 0 to its size")
        return bytes(columns[layout.payloads : layout.payloads + total])

    def _index(self, index: int) -> int:
        if not 0 <= index < self.record_count:
            raise IndexError(f"record {index} of {self.record_count}")
        return index

    @property
    def key_offsets(self) -> NDArray[np.int32]:
        """int32[n+1]: where each key starts in key_bytes, and the end of the last; of a batch with keys."""
        return self._key_column()[0]

    @property
    def key_bytes(self) -> memoryview:
        return self._key_column()[1]

    @property
    def key_validity(self) -> NDArray[np.bool_] | None:
        """bool[n]: which records have a key; None if all or none have one."""
        if not self.header.flags & Flag.NULL_KEYS:
            return None
        bitmap = np.frombuffer(self.columns, np.uint8, (self.record_count + 7) // 8, self.layout.key_validity)
        return np.unpackbits(bitmap, count=self.record_count, bitorder="little").view(np.bool_)

    def keys(self) -> list[bytes | None]:
        """The key of each record, None if it has none."""
        if not self.header.flags & Flag.KEYS:
            return [None] * self.record_count
        keys: list[bytes | None] = list(_split(*self._key_column()))
        validity = self.key_validity
        if validity is not None:
            for index in np.flatnonzero(~validity).tolist():
                keys[index] = None
        return keys

    def key(self, index: int) -> bytes | None:
        index = self._index(index)
        if not self.header.flags & Flag.KEYS:
            return None
        if self.header.flags & Flag.NULL_KEYS:
            octet = self.columns[self.layout.key_validity + index // 8]
            if not octet >> (index & 7) & 1:
                return None
        offsets, data = self._key_column()
        return bytes(data[offsets[index] : offsets[index + 1]])

    def removes_key(self, index: int) -> bool:
        """Whether the record has a key and an empty payload: a tombstone where its topic is compacted."""
        offsets = self.payload_offsets
        index = self._index(index)
        return bool(offsets[index] == offsets[index + 1]) and self.key(index) is not None

    def removes_keys_only(self) -> bool:
        """Whether every record has a key and an empty payload."""
        if self.header.payload_bytes or not self.header.flags & Flag.KEYS:
            return False
        validity = self.key_validity
        return validity is None or bool(validity.all())

    def attributes(self, index: int) -> dict[str, str]:
        """Attributes of one record; ProtocolError if they are malformed."""
        index = self._index(index)
        if not self.header.flags & Flag.ATTRIBUTES:
            return {}
        offsets, data = self._attribute_column()
        return decode_attributes(data[offsets[index] : offsets[index + 1]])

    def attributes_list(self) -> list[dict[str, str]]:
        """Attributes of every record."""
        if not self.header.flags & Flag.ATTRIBUTES:
            return [{} for _ in range(self.record_count)]
        return [decode_attributes(memoryview(piece)) for piece in _split(*self._attribute_column())]

    def check(self) -> None:
        """Verify the structure of everything, as a consumer of untrusted bytes; raise ProtocolError."""
        _ = self.producer_name, self.origin, self.offsets, self.columns
        self._payload_column()
        if self.header.flags & Flag.KEYS:
            offsets, _ = self._key_column()
            validity = self.key_validity
            if validity is not None and np.diff(offsets)[~validity].any():
                raise ProtocolError("a record without a key has key bytes")
        if self.header.flags & Flag.ATTRIBUTES:
            self.attributes_list()


def _split(offsets: NDArray[np.int32], data: memoryview) -> list[bytes]:
    """Cut checked columns into bytes objects."""
    count = len(offsets) - 1
    width = int(offsets[1])
    lengths = offsets[1:] - offsets[:-1]
    if width and width * count == len(data) and (lengths == width).all():
        rows: list[bytes] = np.frombuffer(data, f"V{width}").tolist()
        return rows
    return list(map(BytesIO(data).read, lengths.tolist()))  # reading costs half of slicing


def _decode(text: memoryview) -> str:
    try:
        return str(text, "utf-8")
    except UnicodeDecodeError as error:
        raise ProtocolError("batch holds text that is not UTF-8", why=str(error)) from None


def decode_attributes(data: memoryview) -> dict[str, str]:
    if len(data) > ATTRIBUTE_BYTES_MAX:
        raise ProtocolError("attributes of a record are too large", size=len(data))
    attributes: dict[str, str] = {}
    position, end = 0, len(data)
    count = 0
    while position < end:
        if end - position < _ATTRIBUTE.size or count == ATTRIBUTES_PER_RECORD_MAX:
            raise ProtocolError("attributes of a record are malformed", position=position)
        name_size, value_size = _ATTRIBUTE.unpack_from(data, position)
        name_end = position + _ATTRIBUTE.size + name_size
        if name_end + value_size > end:
            raise ProtocolError("attributes of a record are cut", position=position)
        name = _decode(data[position + _ATTRIBUTE.size : name_end])
        position = name_end + value_size
        attributes[name] = _decode(data[name_end:position])
        count += 1
    return attributes


def key_partitions(keys: list[bytes], partitions: int) -> NDArray[np.int64]:
    """int64[n]: the partition of each key, its XXH3-64 (seed 0) modulo ``partitions``."""
    hashes = np.fromiter(map(key_hash, keys), np.uint64, len(keys))
    return (hashes % np.uint64(partitions)).astype(np.int64)


def check_published(batch: memoryview, max_record_bytes: int) -> BatchHeader:
    """Check a batch as a producer sent it and return its header; it can then be stored and read.

    Raises ProtocolError, LimitExceeded, RecordTooLarge, or the errors of decompression: a batch that cannot
    be inflated would stop all of its consumers.
    """
    if kernels.available:
        sound = kernels.compiled.batch_is_sound
        if sound(np.frombuffer(batch, np.uint8), max_record_bytes):
            return unpack_header(batch)
    header = read_header(batch)
    if header.size != len(batch):
        raise ProtocolError("PUBLISH does not hold exactly one batch", size=header.size, body=len(batch))
    if not body_intact(batch, header):
        raise ProtocolError("batch fails its checksum", hint="the bytes changed on the way; send it again")
    check_columns(batch, header, max_record_bytes)
    if header.flags & COMPRESSION_MASK:
        BatchView(batch, header).check()
    return header


def check_columns(view: Data | BatchView, header: BatchHeader, max_record_bytes: int) -> None:
    """Check a producer's batch before its owner stores it: structure and record sizes.

    Compressed columns are not inflated; consumers check them.  Raises ProtocolError, LimitExceeded
    or RecordTooLarge (facts name the first such record's index).
    """
    if header.flags & Flag.SELECTED:
        raise ProtocolError("a producer cannot send a selection")
    data = view.data if isinstance(view, BatchView) else view
    if len(data) < header.size:
        raise ProtocolError("batch is cut", size=header.size, present=len(data))
    if kernels.available:
        sound = kernels.compiled.columns_are_sound
        if sound(np.frombuffer(data, np.uint8), max_record_bytes):
            return
    layout_of(header)
    if header.flags & COMPRESSION_MASK:
        inner_size = header.size - HEADER_BYTES - padded(header.name_size + header.origin_size)
        check_ratio(inner_size, header.columns_size)
        if header.payload_bytes > max_record_bytes * header.record_count:
            _refuse_record(0, -(-header.payload_bytes // header.record_count), max_record_bytes)
        return
    _check_names(data, header)
    check_columns_twin(BatchView(data, header), max_record_bytes)


def _check_names(data: Data, header: BatchHeader) -> None:
    middle = HEADER_BYTES + header.name_size
    names = memoryview(data)
    _decode(names[HEADER_BYTES:middle])
    if header.origin_size:
        _decode(names[middle : middle + header.origin_size])


def check_columns_twin(view: BatchView, max_record_bytes: int) -> None:
    """check_columns() of columns that are not compressed, by numpy."""
    header = view.header
    _refuse_larger(view.payload_offsets, max_record_bytes, "payload")
    if header.flags & Flag.KEYS:
        _refuse_larger(view._key_column()[0], KEY_BYTES_MAX, "key")
    if header.flags & Flag.ATTRIBUTES:
        _refuse_larger(view._attribute_column()[0], ATTRIBUTE_BYTES_MAX, "attributes")
    view.check()


def _refuse_larger(offsets: NDArray[np.int32], limit: int, what: str) -> None:
    if offsets[-1] <= limit:
        return
    lengths = np.diff(offsets)
    index = int((lengths > limit).argmax())
    if lengths[index] > limit:
        _refuse_record(index, int(lengths[index]), limit, what)


def _refuse_record(index: int, size: int, limit: int, what: str = "payload") -> NoReturn:
    raise RecordTooLarge(
        f"{what} of record {index} has {size} bytes",
        why=f"the limit is {limit} bytes",
        hint=larger_record_hint(size) if what == "payload" else f"the limit of {what} is fixed",
        index=index,
        size=size,
        limit=limit,
    )
