"""Avro object container files as payloads: a header with the writer's schema, then blocks of datums.

The writer's schema comes with the payload, so it is untrusted: it is read with smaller limits than a
definition and must resolve to the topic's version.  The result is cached by its text.  Blocks are inflated up
to a bound that holds for the whole payload.  Source: Avro specification 1.12, "Object Container Files".

Snappy blocks of Avro container files, inflated up to a bound.

A block is raw Snappy data and four bytes, the big-endian CRC-32 of the inflated data.  Source: Snappy's
"format description" and Avro specification 1.12, "Required Codecs".
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from danube.errors import SchemaInvalid
from danube.schema.avro.compatibility import differences
from danube.schema.avro.parse import parse
from danube.schema.avro.payload import Broken, Step, number, step_for, walk
from danube.schema.avro.types import Type, weightless
from danube.schema.json_text import canonical, decode


def inflate_snappy(block: bytes, left: int) -> bytes:
    """Return the inflated block.

    Raises ValueError or IndexError if it is malformed or inflates beyond ``left``.
    """
    packed, checksum = block[:-4], block[-4:]
    size, position = _size(packed)
    if size > left:
        raise ValueError(f"it claims {size} bytes, and {left} are left to it")
    inflated = bytearray()
    while position < len(packed):
        tag = packed[position]
        if tag & 3 == 0:
            position = _literal(packed, position, inflated)
        else:
            position = _copy(packed, position, inflated)
        if len(inflated) > size:
            raise ValueError("it is longer than it claims")
    if len(inflated) != size or zlib.crc32(inflated) != int.from_bytes(checksum, "big"):
        raise ValueError("its length or checksum is wrong")
    return bytes(inflated)


def _size(packed: bytes) -> tuple[int, int]:
    value = 0
    for position in range(5):
        byte = packed[position]
        value |= (byte & 127) << (7 * position)
        if byte < 128:
            return value, position + 1
    raise ValueError("its length has more than 5 bytes")


def _literal(packed: bytes, position: int, inflated: bytearray) -> int:
    length = packed[position] >> 2
    position += 1
    if length >= 60:
        width = length - 59
        length = int.from_bytes(packed[position : position + width], "little")
        position += width
    end = position + length + 1
    if end > len(packed):
        raise ValueError("it ends inside a literal")
    inflated += packed[position:end]
    return end


def _copy(packed: bytes, position: int, inflated: bytearray) -> int:
    """Repeat earlier output; a copy may overlap what it writes."""
    tag = packed[position]
    if tag & 3 == 1:
        length, width = 4 + (tag >> 2 & 7), 1
        back = (tag >> 5) << 8 | packed[position + 1]
    else:
        length, width = 1 + (tag >> 2), 2 if tag & 3 == 2 else 4
        back = int.from_bytes(packed[position + 1 : position + 1 + width], "little")
    start = len(inflated) - back
    if not 0 <= start < len(inflated):
        raise ValueError("a copy starts before the output")
    if length <= back:
        inflated += inflated[start : start + length]
    else:
        pattern = bytes(inflated[start:])
        inflated += (pattern * (length // back + 1))[:length]
    return position + 1 + width


MAGIC: Final = b"Obj\x01"
INFLATED_BYTES_MAX: Final = 32 * 1024 * 1024
SCHEMA_BYTES_MAX: Final = 64 * 1024
TYPES_MAX: Final = 1_000
PAIRS_MAX: Final = 5_000
METADATA_MAX: Final = 64
REMEMBERED_MAX: Final = 32
_SYNC_BYTES: Final = 16
_XZ_MEMORY_BYTES: Final = 64 * 1024 * 1024

Inflate = Callable[[bytes, int], bytes]


class Container:
    """Checks container files against one version of a schema."""

    def __init__(self, reader: Type, text: bytes, step: Step) -> None:
        self._reader = reader
        self._canonical = canonical(decode(text, "Avro definition"))
        self._own = (step, id(reader) in weightless(reader))
        self._writers: OrderedDict[bytes, tuple[Step, bool] | str] = OrderedDict({text: self._own})

    def check(self, payload: bytes) -> str | None:
        """Return None if the version can read the schema of every datum, else the fault."""
        try:
            self._check(payload)
        except Broken as broken:
            return f"Avro container: {broken}"
        except IndexError:
            return "Avro container: it ends inside its header or a block"
        return None

    def _check(self, payload: bytes) -> None:
        metadata, position = _metadata(payload, len(MAGIC))
        sync = payload[position : position + _SYNC_BYTES]
        position += _SYNC_BYTES
        if len(sync) < _SYNC_BYTES:
            raise Broken("its header is cut")
        step, no_bytes = self._writer(metadata.get(b"avro.schema", b""))
        codec = metadata.get(b"avro.codec", b"null")
        inflate = _CODECS.get(codec)
        if inflate is None:
            raise Broken(f"codec {codec[:20]!r} is not read here; write null, deflate, snappy, bzip2 or xz")
        left = INFLATED_BYTES_MAX
        while position < len(payload):
            count, position = number(payload, position)
            size, position = number(payload, position)
            end = position + size
            if count < 0 or size < 0 or payload[end : end + _SYNC_BYTES] != sync:
                raise Broken("a block does not end with the file's marker")
            block = _inflated(inflate, payload[position:end], left)
            left -= len(block)
            _walk_block(step, block, count, no_bytes)
            position = end + _SYNC_BYTES

    def _writer(self, text: bytes) -> tuple[Step, bool]:
        """(step of the writer's schema, whether its values take no bytes); raises Broken."""
        if (known := self._writers.get(text)) is None:
            known = self._writers[text] = self._examined(text)
            if len(self._writers) > REMEMBERED_MAX:
                self._writers.popitem(last=False)
        else:
            self._writers.move_to_end(text)
        if isinstance(known, str):
            raise Broken(known)
        return known

    def _examined(self, text: bytes) -> tuple[Step, bool] | str:
        if len(text) > SCHEMA_BYTES_MAX:
            return f"its schema has {len(text)} bytes, at most {SCHEMA_BYTES_MAX}"
        try:
            value = decode(text, "schema of the container")
            if canonical(value) == self._canonical:
                return self._own
            writer = parse(value, types_max=TYPES_MAX, defaults=False)
            found = differences(self._reader, writer, pairs_max=PAIRS_MAX)
        except SchemaInvalid as error:
            return str(error)
        if found:
            first = found[0]
            return f"its schema does not resolve to the topic's: {first.path}: {first.message}"
        return step_for(writer), id(writer) in weightless(writer)


def _metadata(payload: bytes, position: int) -> tuple[dict[bytes, bytes], int]:
    metadata: dict[bytes, bytes] = {}
    while True:
        count, position = number(payload, position)
        if count < 0:
            count = -count
            _, position = number(payload, position)
        if not count:
            return metadata, position
        if count + len(metadata) > METADATA_MAX:
            raise Broken(f"its header has more than {METADATA_MAX} entries")
        for _ in range(count):
            key, position = _bytes(payload, position)
            metadata[key], position = _bytes(payload, position)


def _bytes(payload: bytes, position: int) -> tuple[bytes, int]:
    size, position = number(payload, position)
    end = position + size
    if size < 0 or end > len(payload):
        raise Broken(f"a length in its header claims {size} bytes")
    return payload[position:end], end


def _walk_block(step: Step, block: bytes, count: int, no_bytes: bool) -> None:
    if no_bytes:
        if block:
            raise Broken("a block of values without bytes has some")
        return
    if count > len(block):
        raise Broken(f"a block claims {count} values in {len(block)} bytes")
    position = 0
    for number_in_block in range(count):
        try:
            position = walk(step, block, position)
        except Broken as broken:
            broken.path.append(f"value {number_in_block}")
            raise
    if position != len(block):
        raise Broken(f"{len(block) - position} bytes follow the last value of a block")


def _inflated(inflate: Inflate, block: bytes, left: int) -> bytes:
    try:
        inflated = inflate(block, left)
    except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, IndexError) as error:
        if isinstance(error, Broken):
            raise
        raise Broken(f"a block cannot be inflated: {str(error)[:100]}") from None
    if len(inflated) > left:
        raise Broken(f"it inflates to more than {INFLATED_BYTES_MAX} bytes")
    return inflated


def _as_it_is(block: bytes, left: int) -> bytes:
    return block


def _deflate(block: bytes, left: int) -> bytes:
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    return _whole(inflater.decompress(block, left + 1), left, inflater.eof)


def _bzip2(block: bytes, left: int) -> bytes:
    inflater = bz2.BZ2Decompressor()
    return _whole(inflater.decompress(block, left + 1), left, inflater.eof)


def _xz(block: bytes, left: int) -> bytes:
    inflater = lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES)
    return _whole(inflater.decompress(block, left + 1), left, inflater.eof)


def _whole(inflated: bytes, left: int, ended: bool) -> bytes:
    if len(inflated) <= left and not ended:
        raise Broken("a block is cut before its compressed data ends")
    return inflated


_CODECS: Final[dict[bytes, Inflate]] = {
    b"null": _as_it_is,
    b"deflate": _deflate,
    b"snappy": inflate_snappy,
    b"bzip2": _bzip2,
    b"xz": _xz,
}
