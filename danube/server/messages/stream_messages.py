"""Delivered batches as ``danube.StreamMessage``s, written by hand: the hot way out of the gRPC door.

Most fields are the same in the whole batch: they are encoded once (``_Constant``) and a record adds its
offset, request id and payload.  The generated class costs two to three times as much before it has
read a column.

Every message is preceded by gRPC's five bytes: 0 (not compressed) and its size, 32 bits, big-endian.  Fields
are written in the order: constant ones, publish_time (4) if it varies, attributes (7), routing_key (10),
msg_id (2), request_id (1), payload (3); a reader takes them in any order.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache
from itertools import repeat
from typing import Final, Literal, NamedTuple

from danube.core.batch.columns import BatchView
from danube.core.batch.format import COMPRESSION_MASK, HEADER_BYTES, Flag
from danube.core.batch.row_mark import PREFIX
from danube.errors import ProtocolError

_TIMES: Final = int(Flag.TIMES)
_KEYS: Final = int(Flag.KEYS)
_NULL_KEYS: Final = int(Flag.NULL_KEYS)
_ATTRIBUTES: Final = int(Flag.ATTRIBUTES)
_REQUEST_IDS: Final = int(Flag.REQUEST_IDS)
_SELECTED: Final = int(Flag.SELECTED)
_SCHEMA_ID_KNOWN: Final = int(Flag.SCHEMA_ID)
_ROW_MARK: Final = PREFIX.encode()
_SCHEMA_VERSION_KNOWN: Final = int(Flag.SCHEMA_VERSION)
_VARYING: Final = _TIMES | _KEYS | _ATTRIBUTES
_NOT_PLAIN: Final = _VARYING | _SELECTED | COMPRESSION_MASK
_US_PER_MS: Final = 1000

# Tags: field number << 3 | wire type (0 varint, 2 length-delimited).
_REQUEST_ID: Final = b"\x08"
_PLACE: Final = b"\x12"  # msg_id
_PAYLOAD: Final = b"\x1a"
_PUBLISH_TIME: Final = b"\x20"
_PRODUCER_NAME: Final = b"\x2a"
_ATTRIBUTE: Final = b"\x3a"
_SCHEMA_ID: Final = b"\x40"
_SCHEMA_VERSION: Final = b"\x48"
_ROUTING_KEY: Final = b"\x52"
# Inside MsgID and inside a map's entry.
_PRODUCER_ID: Final = b"\x08"
_TOPIC_NAME: Final = b"\x12"
_BROKER_ADDR: Final = b"\x1a"
_TOPIC_OFFSET: Final = b"\x28"
_ENTRY_KEY: Final = b"\x0a"
_ENTRY_VALUE: Final = b"\x12"

_SHORT_END: Final = 1 << 14
_SHORT: Final = (  # the varints of one or two bytes
    *(bytes((number,)) for number in range(128)),
    *(bytes((number & 127 | 128, number >> 7)) for number in range(128, _SHORT_END)),
)
_MORE: Final = tuple(bytes((number | 128,)) for number in range(128))
_new: Final = tuple.__new__  # makes a named tuple without a call of a Python function
_prefix = struct.Struct(">BI").pack
_ends = struct.Struct("<ii").unpack_from
_u64 = struct.Struct("<Q").unpack_from


def varint(number: int) -> bytes:
    """Base-128 encoding of 0 .. 2**64 - 1, least significant group first."""
    encoded = b""
    while number >= _SHORT_END:
        encoded += _MORE[number & 127]
        number >>= 7
    return encoded + _SHORT[number]


def _sized(tag: bytes, data: bytes) -> bytes:
    return tag + varint(len(data)) + data


class _Constant(NamedTuple):
    """Bytes that all messages of a batch share."""

    fields: bytes  # producer_name, schema_id, schema_version, publish_time where it is one
    place: bytes  # MsgID up to the value of topic_offset


def framed_messages(batch: BatchView, topic_name: str, producer_id: int, *, stored: bool = True) -> bytes:
    """All records of ``batch`` as length-prefixed StreamMessages, back to back.

    ``topic_name`` is the partition's physical name and ``producer_id`` the door's id of the batch's producer.
    Messages of a topic that is not ``stored`` have topic_offset 0. A routing key that is not UTF-8 (native
    producers may send any bytes, a proto string may not) arrives with each wrong byte as ``\\xNN``; times
    before 1970 arrive as 0.

    Raises ProtocolError if the batch's columns are malformed.
    """
    fields, place = _constant(batch, topic_name, producer_id)
    if batch.record_count == 1 and not batch.header.flags & _NOT_PLAIN:
        return _one_message(batch, fields, place, batch.header.base_offset if stored else 0)
    place_size = len(place)
    pieces: list[bytes] = []
    add = pieces.extend
    for offset, request_id, payload, own in zip(
        _offsets(batch) if stored else repeat(0, batch.record_count),
        _request_ids(batch),
        batch.payloads(),
        _varying(batch),
        strict=True,
    ):
        number = varint(offset)
        head = fields + own + _PLACE + varint(place_size + len(number)) + place + number
        if request_id:
            head += _REQUEST_ID + varint(request_id)
        if payload:
            head += _PAYLOAD + varint(len(payload))
        add((_prefix(0, len(head) + len(payload)), head, payload))
    return b"".join(pieces)


def _one_message(batch: BatchView, fields: bytes, place: bytes, offset: int) -> bytes:
    """The message of a batch of one record without keys, attributes or compression.

    Clients that wait for each answer make such batches; the columns' views would cost more than all the rest.
    """
    header, data = batch.header, batch.data
    position = HEADER_BYTES + (header.name_size + header.origin_size + 7 & ~7)  # as padded()
    number = _SHORT[offset] if offset < _SHORT_END else varint(offset)
    size = len(place) + len(number)
    head = fields + _PLACE + (_SHORT[size] if size < _SHORT_END else varint(size)) + place + number
    if header.flags & _REQUEST_IDS:
        (request_id,) = _u64(data, position)
        position += 8
        if request_id:
            head += _REQUEST_ID + (_SHORT[request_id] if request_id < _SHORT_END else varint(request_id))
    size = header.payload_bytes
    if position + 8 + size > len(data) or _ends(data, position) != (0, size):
        raise ProtocolError("offsets of a column do not ascend from 0 to its size")
    position += 8
    payload = bytes(data[position : position + size])
    if payload:
        head += _PAYLOAD + (_SHORT[size] if size < _SHORT_END else varint(size))
    return b"".join((_prefix(0, len(head) + size), head, payload))


def _constant(batch: BatchView, topic_name: str, producer_id: int) -> _Constant:
    header = batch.header
    middle = HEADER_BYTES + header.name_size
    names = bytes(batch.data[HEADER_BYTES : middle + header.origin_size])
    if header.origin_size and names.startswith(_ROW_MARK, header.name_size):
        names = names[: header.name_size]  # of jobs, and another one in each batch
    fields, place = _named(names, header.name_size, topic_name, producer_id)
    if header.flags & _SCHEMA_ID_KNOWN:
        fields += _SCHEMA_ID + varint(header.schema_id)
    if header.flags & _SCHEMA_VERSION_KNOWN:
        fields += _SCHEMA_VERSION + varint(header.schema_version)
    if not header.flags & _TIMES:
        fields += _publish_time_ms(header.publish_time_us // _US_PER_MS)
    return _new(_Constant, (fields, place))


@lru_cache(maxsize=4096)
def _named(names: bytes, name_size: int, topic_name: str, producer_id: int) -> _Constant:
    """The part that depends on names alone; batches of one producer share it."""
    name, origin = names[:name_size], names[name_size:]
    try:
        _ = name.decode(), origin.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError("batch holds text that is not UTF-8", why=str(error)) from None
    place = _PRODUCER_ID + varint(producer_id) if producer_id else b""
    place += _sized(_TOPIC_NAME, topic_name.encode())
    if origin:
        place += _sized(_BROKER_ADDR, origin)
    return _Constant(_sized(_PRODUCER_NAME, name) if name else b"", place + _TOPIC_OFFSET)


@lru_cache(maxsize=1024)
def _publish_time_ms(time_ms: int) -> bytes:
    """Neighbouring batches often fall into one millisecond."""
    return _PUBLISH_TIME + varint(time_ms) if time_ms > 0 else b""


def _varying(batch: BatchView) -> list[bytes]:
    """publish_time, attributes and routing_key of each record, encoded."""
    flags = batch.header.flags
    if not flags & _VARYING:
        return [b""] * batch.record_count
    columns: list[list[bytes]] = []
    if flags & _TIMES:
        times = _words(batch, batch.layout.times, "q")
        columns.append([_publish_time_ms(time_us // _US_PER_MS) for time_us in times])
    if flags & _ATTRIBUTES:
        columns.append([_attributes(attributes) for attributes in batch.attributes_list()])
    if flags & _KEYS:
        columns.append([_routing_key(key) for key in _keys(batch)])
    if len(columns) == 1:
        return columns[0]
    return list(map(b"".join, zip(*columns, strict=True)))


def _attributes(attributes: Mapping[str, str]) -> bytes:
    encoded = b""
    for name, value in attributes.items():
        entry = _sized(_ENTRY_KEY, name.encode()) + _sized(_ENTRY_VALUE, value.encode())
        encoded += _sized(_ATTRIBUTE, entry)
    return encoded


def _routing_key(key: bytes | None) -> bytes:
    if key is None:
        return b""
    if not key.isascii():
        key = key.decode(errors="backslashreplace").encode()
    return _sized(_ROUTING_KEY, key)


def _offsets(batch: BatchView) -> list[int]:
    offsets: list[int] = batch.offsets.tolist()
    return offsets


def _request_ids(batch: BatchView) -> list[int]:
    if not batch.header.flags & _REQUEST_IDS:
        return [0] * batch.record_count
    return _words(batch, batch.layout.request_ids, "Q")


def _words(batch: BatchView, position: int, code: Literal["q", "Q"]) -> list[int]:
    """A column of eight bytes a record."""
    return batch.columns[position : position + 8 * batch.record_count].cast(code).tolist()


def _keys(batch: BatchView) -> list[bytes | None]:
    header = batch.header
    if batch.record_count > 1 or header.flags & _NULL_KEYS:
        return batch.keys()
    layout, columns = batch.layout, batch.columns
    if _ends(columns, layout.key_offsets) != (0, header.key_bytes):
        raise ProtocolError("offsets of a column do not ascend from 0 to its size")
    return [bytes(columns[layout.keys : layout.keys + header.key_bytes])]
