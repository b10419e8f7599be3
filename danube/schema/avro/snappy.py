"""Snappy blocks of Avro container files, inflated up to a bound.

A block is raw Snappy data and four bytes, the big-endian CRC-32 of what it inflates to.
Source: Snappy's "format description" and Avro specification 1.12, "Required Codecs".
"""

from __future__ import annotations

import zlib


def inflate_snappy(block: bytes, left: int) -> bytes:
    """The inflated block.  Raises ValueError, IndexError for what is none, or inflates beyond ``left``."""
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
