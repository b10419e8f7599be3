"""The batch: consecutive records of one producer for one partition under one header.

The same bytes cross the socket, lie in the ring, in the log, in the sealed segment and in the
object store.  Little-endian; the header and every section start at a multiple of 8 from the
start of the batch.

    position  size  field
           0     4  magic             b"DNB1"; the digit is the format version
           4     4  size              header and body in bytes, a multiple of 8
           8     8  base_offset       stamped by the owner
          16     8  append_time_us    stamped by the owner, microseconds since 1970 UTC
          24     4  epoch             stamped by the owner
          28     4  body_crc          CRC32C of bytes 36 .. size, set by the producer
          32     4  header_crc        CRC32C of bytes 0 .. 32, set by the owner with the stamp
          36     2  flags             see Flag; bits 0-2 are the compression
          38     2  name_size         bytes of the producer's name
          40     4  record_count      1 .. BATCH_RECORDS_MAX
          44     4  schema_version    valid with Flag.SCHEMA_VERSION
          48     8  schema_id         valid with Flag.SCHEMA_ID
          56     8  producer_id       0: not idempotent
          64     8  base_sequence     the producer's number of the first record
          72     8  publish_time_us   of all records, unless Flag.TIMES gives one each
          80     4  producer_epoch
          84     4  payload_bytes     byte total of the payload column
          88     4  key_bytes         byte total of the key column
          92     4  attribute_bytes   byte total of the attribute column
          96     4  columns_size      bytes of the columns when not compressed
         100     2  origin_size       bytes of the origin (the address a gRPC producer named)
         102     2  reserved          0
         104        names             producer name, then origin; padded to 8
                    columns           as below, or one compressed block of them; padded to 8

Columns, each padded to 8:

    Flag.TIMES        int64[n]     publish time in microseconds
    Flag.REQUEST_IDS  uint64[n]    request ids of a gRPC producer
    Flag.SELECTED     uint32[n]    offset minus base_offset; only in deliveries, never stored
    always            payloads     int32 offsets[n+1], padded; bytes, padded
    Flag.KEYS         keys         with Flag.NULL_KEYS first a validity bitmap of ceil(n/8) bytes,
                                   least significant bit first, padded; then as payloads
    Flag.ATTRIBUTES   attributes   as payloads; each record's bytes are, for every attribute,
                                   u16 key size, u32 value size, key, value (UTF-8)

``offsets`` followed by bytes is Apache Arrow's binary layout.  What the owner stamps lies outside
``body_crc``, so a batch is stored without being read again; ``header_crc`` makes ``size`` and
``body_crc`` trustworthy before the body is touched.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from danube.core.batch.checksum import crc32c
from danube.errors import LimitExceeded, ProtocolError
from danube.limits import BATCH_BYTES_MAX, BATCH_RECORDS_MAX

MAGIC: Final = b"DNB1"
HEADER_BYTES: Final = 104
STAMPED_BYTES: Final = 32
BODY_CRC_START: Final = 36

_HEADER: Final = struct.Struct("<4sIQqIIIHHIIQQQqIIIIIHH")
_STAMP: Final = struct.Struct("<QqI")
_STAMP_POSITION: Final = 8
_CRC: Final = struct.Struct("<I")
_new: Final = tuple.__new__  # makes a named tuple without a call of a Python function
_HEADER_CRC_POSITION: Final = 32

if _HEADER.size != HEADER_BYTES:
    raise ImportError("the table above is the format")


class Flag:
    """Optional columns and fields of a batch, as plain numbers; the low three bits are a Compression."""

    TIMES: Final = 1 << 3
    KEYS: Final = 1 << 4
    NULL_KEYS: Final = 1 << 5
    ATTRIBUTES: Final = 1 << 6
    REQUEST_IDS: Final = 1 << 7
    SELECTED: Final = 1 << 8
    SCHEMA_ID: Final = 1 << 9
    SCHEMA_VERSION: Final = 1 << 10


FLAGS_KNOWN: Final = 0x7FF
COMPRESSION_MASK: Final = 0x7


class Compression(IntEnum):
    NONE = 0
    LZ4 = 1
    ZSTD = 2


class BatchHeader(NamedTuple):
    """The 104 header bytes as numbers; field names and units as in the table above."""

    magic: bytes
    size: int
    base_offset: int
    append_time_us: int
    epoch: int
    body_crc: int
    header_crc: int
    flags: int
    name_size: int
    record_count: int
    schema_version: int
    schema_id: int
    producer_id: int
    base_sequence: int
    publish_time_us: int
    producer_epoch: int
    payload_bytes: int
    key_bytes: int
    attribute_bytes: int
    columns_size: int
    origin_size: int
    reserved: int

    def stamped(self, base_offset: int, epoch: int, append_time_us: int) -> BatchHeader:
        """This header with the owner's numbers, as stamp() writes them (``header_crc`` stays)."""
        return _new(BatchHeader, (*self[:2], base_offset, append_time_us, epoch, *self[5:]))

    @property
    def end_offset(self) -> int:
        """Offset after the last record (not for SELECTED batches, whose offsets have gaps)."""
        return self.base_offset + self.record_count


def padded(size: int) -> int:
    """Round up to a multiple of 8."""
    return (size + 7) & ~7


def pack_header(header: BatchHeader) -> bytes:
    """The header's 104 bytes."""
    return _HEADER.pack(*header)


def unpack_header(buffer: bytes | bytearray | memoryview) -> BatchHeader:
    """The numbers of a header at the start that needs no check any more."""
    return _new(BatchHeader, _HEADER.unpack_from(buffer))


def read_header(buffer: bytes | bytearray | memoryview, position: int = 0) -> BatchHeader:
    """Read and check the shape of the header at ``position``; the body is not touched.

    Raises ProtocolError (bad magic, sizes that cannot be, unknown flags) or LimitExceeded.  The
    checks bound every later allocation, so they run before one is made.
    """
    if len(buffer) - position < HEADER_BYTES:
        raise ProtocolError("batch is shorter than its header")
    header = _new(BatchHeader, _HEADER.unpack_from(buffer, position))
    size, count = header.size, header.record_count
    if header.magic != MAGIC:
        raise ProtocolError("not a batch", why=f"magic is {header.magic!r}, not {MAGIC!r}")
    if size > BATCH_BYTES_MAX or count > BATCH_RECORDS_MAX:
        raise LimitExceeded(
            f"batch of {size} bytes and {count} records is too large",
            why=f"limits are {BATCH_BYTES_MAX} bytes and {BATCH_RECORDS_MAX} records",
            hint="send smaller batches",
        )
    names = padded(header.name_size + header.origin_size)
    least = HEADER_BYTES + names + (0 if header.flags & COMPRESSION_MASK else header.columns_size)
    if count == 0 or size & 7 or size < least or header.flags & ~FLAGS_KNOWN or header.reserved:
        raise ProtocolError("batch header is malformed", size=size, count=count, flags=header.flags)
    if header.columns_size > BATCH_BYTES_MAX:
        raise LimitExceeded("batch is too large when decompressed", columns_size=header.columns_size)
    return header


def stamp(batch: bytearray | memoryview, base_offset: int, epoch: int, append_time_us: int) -> None:
    """Write the owner's part of the header in place; the body and its checksum stay as they are."""
    _STAMP.pack_into(batch, _STAMP_POSITION, base_offset, append_time_us, epoch)
    _CRC.pack_into(batch, _HEADER_CRC_POSITION, crc32c(batch[:STAMPED_BYTES]))


def body_intact(batch: bytes | bytearray | memoryview, header: BatchHeader) -> bool:
    """Whether the body's checksum is right; all ``header.size`` bytes must be at hand."""
    return crc32c(memoryview(batch)[BODY_CRC_START : header.size]) == header.body_crc


def header_intact(batch: bytes | bytearray | memoryview, header: BatchHeader) -> bool:
    """Whether the checksum of the header's stamped part is right."""
    return crc32c(memoryview(batch)[:STAMPED_BYTES]) == header.header_crc
