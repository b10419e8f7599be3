"""Encoding records into one batch (the format is drawn in :mod:`danube.core.batch.format`).

The body, everything from byte 36 on, is joined once: its checksum is one call over that object and
a socket sends head and body as they are.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NoReturn

import numpy as np

from danube.core.batch.checksum import crc32c
from danube.core.batch.compression import compress
from danube.core.batch.format import (
    BODY_CRC_START,
    HEADER_BYTES,
    MAGIC,
    BatchHeader,
    Compression,
    Flag,
    padded,
    read_header,
)
from danube.core.batch.payloads import (
    PayloadColumn,
    Piece,
    offsets_of_pieces,
    payload_column,
    refuse_batch,
    refuse_single,
    refuse_size,
    refuse_type,
)
from danube.errors import InvalidArgument, LimitExceeded
from danube.limits import (
    ATTRIBUTE_BYTES_MAX,
    ATTRIBUTES_PER_RECORD_MAX,
    BATCH_BYTES_MAX,
    KEY_BYTES_MAX,
    RECORD_BYTES_MAX,
)

_HEAD: Final = struct.Struct("<4sIQqIII")  # bytes 0 .. 36 of the header
_REST: Final = struct.Struct("<HHIIQQQqIIIIIHH")  # bytes 36 .. 104
_ONE: Final = struct.Struct("<ii")  # offsets of a single record
_ONE_WITH_ID: Final = struct.Struct("<Qii")  # the request id before them
_ATTRIBUTE: Final = struct.Struct("<HI")
_PADDING: Final = tuple(bytes(-size % 8) for size in range(8))
_ARRAY_CODES: Final = {"<i8": "q", "<u8": "Q"}
_BIG_ENDIAN: Final = sys.byteorder == "big"
_NAME_BYTES_MAX: Final = 0xFFFF
_COLUMNS: Final = 2  # where they begin among a builder's pieces

Keys = Sequence[bytes | str | None]
Attributes = Sequence[Mapping[str, str] | None]

if _HEAD.size != BODY_CRC_START or _HEAD.size + _REST.size != HEADER_BYTES:
    raise ImportError("head and rest make one header")


class EncodedBatch:
    """A batch ready to send: ``head`` is its first 36 bytes and ``body`` all the others."""

    __slots__ = ("_header", "body", "head", "record_count", "size")

    def __init__(self, head: bytes, body: bytes | memoryview, record_count: int) -> None:
        self.head = head
        self.body = body  # a view where the caller of encode() had memory for it
        self.record_count = record_count
        self.size = len(head) + len(body)
        self._header: BatchHeader | None = None

    @property
    def header(self) -> BatchHeader:
        """The header as numbers, read on first use."""
        if self._header is None:
            self._header = read_header(self.head + self.body[: HEADER_BYTES - len(self.head)])
        return self._header

    def to_bytes(self) -> bytes:
        """Head and body as one object (a copy)."""
        return self.head + self.body

    def __repr__(self) -> str:
        return f"EncodedBatch({self.record_count} records, {self.size} bytes)"


def encode(
    payloads: Any,
    *,
    producer_name: str = "",
    keys: Keys | None = None,
    attributes: Attributes | None = None,
    publish_time_us: int,
    publish_times: Any = None,
    producer_id: int = 0,
    producer_epoch: int = 0,
    base_sequence: int = 0,
    schema_id: int | None = None,
    schema_version: int | None = None,
    request_ids: Any = None,
    origin: str = "",
    compression: Compression = Compression.NONE,
) -> EncodedBatch:
    """Encode one record or more as a batch whose stamp (offset, epoch, append time) is still empty.

    ``payloads`` is a sequence of bytes, a numpy array, a pyarrow array or a column of them; the other
     sequences have one element per record.  Times are microseconds since 1970 UTC.  A batch
    that compression would not shrink is left uncompressed.

    Raises RecordTooLarge or LimitExceeded if a limit is passed and InvalidArgument for
    anything that cannot be encoded; facts hold the record's index.
    """
    alone = type(payloads) is list and len(payloads) == 1 and type(payloads[0]) is bytes
    if alone and keys is attributes is publish_times is request_ids is None and not compression:
        return encode_plain(
            payloads[0], producer_name=producer_name, origin=origin, publish_time_us=publish_time_us,
            producer_id=producer_id, producer_epoch=producer_epoch, base_sequence=base_sequence,
            schema_id=schema_id, schema_version=schema_version,
        )  # fmt: skip
    builder = _Builder(producer_name, origin, compression)
    if alone:
        builder.add_one_payload(payloads[0])
    else:
        builder.add_payloads(payloads)
    if keys is not None:
        builder.add_keys(keys)
    if attributes is not None:
        builder.add_attributes(attributes)
    if publish_times is not None or request_ids is not None:
        builder.add_numbers(publish_times, request_ids)
    if schema_id is not None:
        builder.flags |= Flag.SCHEMA_ID
    if schema_version is not None:
        builder.flags |= Flag.SCHEMA_VERSION
    schema = (schema_version or 0, schema_id or 0)
    return builder.finish((*schema, producer_id, base_sequence, publish_time_us, producer_epoch))


def encode_plain(
    payload: bytes,
    *,
    producer_name: str,
    origin: str,
    publish_time_us: int,
    request_id: int = 0,
    producer_id: int = 0,
    producer_epoch: int = 0,
    base_sequence: int = 0,
    schema_id: int | None = None,
    schema_version: int | None = None,
) -> EncodedBatch:
    """encode() of one record without key and attributes, at less than half its cost.

    ``request_id`` 0 is none.  The batch is the same to the byte, and so are the refusals.
    """
    size = len(payload)
    if size > RECORD_BYTES_MAX:
        refuse_size("payload", 0, size, RECORD_BYTES_MAX)
    names, name_size, origin_size = _encode_names(producer_name, origin)
    flags = Flag.REQUEST_IDS if request_id else 0
    if schema_id is not None:
        flags |= Flag.SCHEMA_ID
    if schema_version is not None:
        flags |= Flag.SCHEMA_VERSION
    columns_size = (16 if request_id else 8) + padded(size)
    try:
        column = _ONE_WITH_ID.pack(request_id, 0, size) if request_id else _ONE.pack(0, size)
        rest = _REST.pack(
            flags, name_size, 1, schema_version or 0, schema_id or 0, producer_id, base_sequence,
            publish_time_us, producer_epoch, size, 0, 0, columns_size, origin_size, 0,
        )  # fmt: skip
    except struct.error as error:
        raise InvalidArgument("a number of the batch does not fit its field", why=str(error)) from None
    body = b"".join((rest, names, column, payload, _PADDING[size & 7]))
    return EncodedBatch(_HEAD.pack(MAGIC, BODY_CRC_START + len(body), 0, 0, 0, crc32c(body), 0), body, 1)


class _Builder:
    """Collects the pieces of the columns in their order and their sizes; joins once."""

    __slots__ = (
        "attribute_bytes",
        "columns_size",
        "compression",
        "count",
        "flags",
        "key_bytes",
        "name_size",
        "names",
        "origin_size",
        "payload_bytes",
        "pieces",
        "source",
    )

    def __init__(self, producer_name: str, origin: str, compression: Compression) -> None:
        self.names, self.name_size, self.origin_size = _encode_names(producer_name, origin)
        self.compression = compression
        self.flags = 0
        self.key_bytes = 0
        self.attribute_bytes = 0
        self.pieces: list[Piece] = [b"", self.names]  # the first is the rest of the header

    def add_one_payload(self, payload: bytes) -> None:
        size = len(payload)
        if size > RECORD_BYTES_MAX:
            refuse_size("payload", 0, size, RECORD_BYTES_MAX)
        self.count = 1
        self.source: Sequence[Any] = ()
        self.payload_bytes = size
        self.pieces += (_ONE.pack(0, size), payload, _PADDING[size & 7])
        self.columns_size = 8 + size + (-size & 7)

    def add_payloads(self, payloads: Any) -> None:
        column = payloads if isinstance(payloads, PayloadColumn) else payload_column(payloads)
        self.count = column.record_count
        self.payload_bytes = total = column.total
        self.columns_size = 0
        self.source = column.pieces
        self._add_variable(column.offsets, column.pieces, total)

    def _add_variable(self, offsets: bytes, pieces: Sequence[Piece], total: int) -> None:
        """One column of offsets and bytes, each padded."""
        offsets_size = len(offsets)
        self.pieces += (offsets, _PADDING[offsets_size & 7])
        self.pieces += pieces
        self.pieces.append(_PADDING[total & 7])
        self.columns_size += padded(offsets_size) + padded(total)

    def add_keys(self, keys: Keys) -> None:
        self._check_length(keys, "keys")
        try:
            data = b"".join(keys)  # type: ignore[arg-type]
            present: Sequence[Any] = keys
            nulls = False
        except TypeError:
            nulls = None in keys
            present = [_key_bytes(key, index) for index, key in enumerate(keys)]
            data = b"".join(present)
        if nulls:
            valid = np.fromiter((key is not None for key in keys), np.bool_, self.count)
            if not valid.any():
                return
            bitmap = np.packbits(valid, bitorder="little").tobytes()
            self.flags |= Flag.NULL_KEYS
            self.pieces += (bitmap, _PADDING[len(bitmap) & 7])
            self.columns_size += padded(len(bitmap))
        offsets, self.key_bytes = offsets_of_pieces(present, KEY_BYTES_MAX, "key")
        if self.key_bytes != len(data):
            refuse_type((), "key")
        self.flags |= Flag.KEYS
        self._add_variable(offsets, (data,), self.key_bytes)

    def add_attributes(self, attributes: Attributes) -> None:
        self._check_length(attributes, "attributes")
        encoded = []
        last: Mapping[str, str] | None = None
        piece = b""
        for index, each in enumerate(attributes):
            if each is not last:  # senders often pass the same mapping for every record
                piece = _encode_attributes(each, index)
                last = each
            encoded.append(piece)
        if not any(encoded):
            return
        offsets, self.attribute_bytes = offsets_of_pieces(encoded, ATTRIBUTE_BYTES_MAX, "attributes")
        self.flags |= Flag.ATTRIBUTES
        self._add_variable(offsets, encoded, self.attribute_bytes)

    def add_numbers(self, publish_times: Any, request_ids: Any) -> None:
        """The columns of eight bytes a record go before all others."""
        pieces = []
        if publish_times is not None:
            pieces.append(self._numbers(publish_times, "<i8", "publish times"))
            self.flags |= Flag.TIMES
        if request_ids is not None:
            pieces.append(self._numbers(request_ids, "<u8", "request ids"))
            self.flags |= Flag.REQUEST_IDS
        self.pieces[_COLUMNS:_COLUMNS] = pieces
        self.columns_size += sum(map(len, pieces))

    def _numbers(self, values: Any, dtype: str, what: str) -> bytes:
        self._check_length(values, what)
        if not isinstance(values, np.ndarray):
            try:
                numbers = array(_ARRAY_CODES[dtype], values)
            except (TypeError, OverflowError) as error:
                raise InvalidArgument(f"{what} are not 64-bit integers", why=str(error)) from None
            if _BIG_ENDIAN:
                numbers.byteswap()
            return numbers.tobytes()
        kind = values.dtype.kind
        if values.ndim != 1 or kind not in "iu" or (kind == "i" and dtype == "<u8" and values.min() < 0):
            raise InvalidArgument(f"{what} are not 64-bit integers", why=f"they are {values.dtype}")
        column: bytes = values.astype(dtype).tobytes()
        return column

    def _check_length(self, values: Any, what: str) -> None:
        if type(values) is not list and isinstance(values, str | bytes | bytearray | Mapping):
            refuse_single(values, what)
        if len(values) != self.count:
            raise InvalidArgument(f"there are {len(values)} {what} for {self.count} records")

    def finish(self, numbers: tuple[int, ...]) -> EncodedBatch:
        """Compress if requested, write the header and join; ``numbers``: schema_version .. producer_epoch."""
        names_size = len(self.names)
        inner_size = self.columns_size
        if HEADER_BYTES + names_size + inner_size > BATCH_BYTES_MAX:
            refuse_batch(HEADER_BYTES + names_size + inner_size)
        flags = self.flags
        if self.compression:
            block = compress(self.compression, self._join(_COLUMNS))
            if block is not None:
                flags |= self.compression
                self.pieces[_COLUMNS:] = (block, _PADDING[len(block) & 7])
                inner_size = padded(len(block))
        try:
            sizes = (self.payload_bytes, self.key_bytes, self.attribute_bytes, self.columns_size)
            head = (flags, self.name_size, self.count)
            self.pieces[0] = _REST.pack(*head, *numbers, *sizes, self.origin_size, 0)
        except struct.error as error:
            raise InvalidArgument("a number of the batch does not fit its field", why=str(error)) from None
        body = self._join(0)
        size = HEADER_BYTES + names_size + inner_size
        if len(body) != size - BODY_CRC_START:
            refuse_type(self.source, "payload")
        return EncodedBatch(_HEAD.pack(MAGIC, size, 0, 0, 0, crc32c(body), 0), body, self.count)

    def _join(self, first: int) -> bytes:
        """The pieces from ``first`` on, side by side."""
        try:
            return b"".join(self.pieces[first:])
        except (TypeError, BufferError):
            refuse_type(self.source, "payload")


@lru_cache(maxsize=1024)
def _encode_names(producer_name: str, origin: str) -> tuple[bytes, int, int]:
    """Both names, padded, and the size of each."""
    try:
        name, source = producer_name.encode(), origin.encode()
    except (UnicodeEncodeError, AttributeError) as error:
        raise InvalidArgument("producer name and origin must be text", why=str(error)) from None
    if max(len(name), len(source)) > _NAME_BYTES_MAX:
        raise LimitExceeded(f"producer name or origin is longer than {_NAME_BYTES_MAX} bytes")
    both = name + source
    return both + _PADDING[len(both) & 7], len(name), len(source)


def _key_bytes(key: Any, index: int) -> bytes:
    if key is None:
        return b""
    try:
        return key.encode() if isinstance(key, str) else bytes(memoryview(key))
    except (UnicodeEncodeError, TypeError) as error:
        raise InvalidArgument(
            f"key of record {index} is {type(key).__name__}",
            why=str(error),
            hint="a key is bytes, text or None",
            index=index,
        ) from None


def _encode_attributes(attributes: Mapping[str, str] | None, index: int) -> bytes:
    if not attributes:
        return b""
    if len(attributes) > ATTRIBUTES_PER_RECORD_MAX:
        raise LimitExceeded(
            f"record {index} has {len(attributes)} attributes",
            why=f"the limit is {ATTRIBUTES_PER_RECORD_MAX}",
            index=index,
        )
    pieces: list[bytes] = []
    for name, value in attributes.items():
        try:
            key, text = name.encode(), value.encode()
        except (AttributeError, UnicodeEncodeError) as error:
            _refuse_attribute(index, error)
        if len(key) > ATTRIBUTE_BYTES_MAX or len(text) > ATTRIBUTE_BYTES_MAX:
            refuse_size("an attribute", index, max(len(key), len(text)), ATTRIBUTE_BYTES_MAX)
        pieces += (_ATTRIBUTE.pack(len(key), len(text)), key, text)
    return b"".join(pieces)


def _refuse_attribute(index: int, error: Exception) -> NoReturn:
    raise InvalidArgument(
        f"attributes of record {index} cannot be encoded",
        why=str(error),
        hint="attributes map text to text",
        index=index,
    ) from None
