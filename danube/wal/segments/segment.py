"""The segment file: one contiguous piece of a partition's log.  Little-endian, all parts 8-aligned.

    position       part
           0       header, 64 bytes
          64       batches, exactly as in danube.core.batch.format, one after another
    data_end       active segment: zeros (space reserved ahead), to the end of the file
                   sealed segment: footer, which ends the file

    header                                     footer summary, the last 144 bytes of the file
     0   8  magic        b"DANUBSEG"             0   8  topic_id
     8   2  version      1                       8   4  partition
    10   2  header size  64                     12   4  epoch
    12   4  partition                           16   8  base_offset
    16   8  topic_id                            24   8  end_offset
    24   8  base_offset                         32   8  record_count
    32   8  created_us                          40   8  batch_count
    40   4  epoch                               48   8  first_append_us
    44  16  log id, or zeros                    56   8  last_append_us
    60   4  CRC32C of bytes 0 .. 60             64   8  data_end
                                                72  16  XXH3-128 of bytes 0 .. data_end
    footer                                      88  16  the same of the previous segment, or zeros
     0   8  magic        b"DANUBFTR"           104   4  entry_count
     8   4  entry_count                        108   4  snapshot_size
    12   4  snapshot_size                      112   4  flags: bit 0, there is a snapshot; bit 1,
    16      index entries, 24 bytes each:               compacted; bit 2, there is a chain hash
            u64 base_offset, u64 position,     116   4  CRC32C of the footer before the summary
            i64 append_time_us                 120   4  footer size, summary included
            snapshot, padded to 8              124   2  version 1
            chain hash, 16 bytes, if any       126   2  zero
            summary                            128   4  CRC32C of bytes 0 .. 128
                                               132   4  zero
                                               136   8  magic b"DANUBEND"

Magic, version and header CRC keep their places in every version, so that an older program can tell
a newer file (refused, untouched) from a damaged one.  The file is named after its base offset; the
header says which partition it belongs to, so that a file in the wrong directory is never served.

Ids of topics are small numbers, so two brokers can use the same one.  So the header also has the log's id,
which follows from the topic's name, id and time of creation (log_id_of) and differs for another broker's log.
Files of earlier versions have zeros there and are accepted.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from danube.core.batch.checksum import content_hasher, crc32c
from danube.core.batch.format import padded
from danube.errors import Damage, StorageIncompatible

if TYPE_CHECKING:
    from danube.core.metadata.commands import TopicRecord

VERSION: Final = 1
MAGIC: Final = b"DANUBSEG"
FOOTER_MAGIC: Final = b"DANUBFTR"
END_MAGIC: Final = b"DANUBEND"
HEADER_BYTES: Final = 64
FOOTER_HEAD_BYTES: Final = 16
ENTRY_BYTES: Final = 24
SUMMARY_BYTES: Final = 144
SNAPSHOT_BYTES_MAX: Final = 64 * 1024 * 1024
HASH_BYTES: Final = 16
NO_HASH: Final = bytes(HASH_BYTES)
NO_LOG: Final = bytes(16)
STRANGER: Final = "the file is another broker's, whose topic has the same id"

_HEADER: Final = struct.Struct("<8sHHIQQqI16s")
_SUMMARY: Final = struct.Struct("<QIIQQQQqqQ16s16sIIIIIHH")
_CRC: Final = struct.Struct("<I")
_FOOTER_HEAD: Final = struct.Struct("<8sII")
_FLAG_SNAPSHOT: Final = 1
_FLAG_COMPACTED: Final = 2
_FLAG_CHAINED: Final = 4
_FLAGS_KNOWN: Final = 7
_NAME: Final = re.compile(r"([0-9]{20})\.seg\Z")
_SPARE: Final = re.compile(r"next-([0-9]+)\.seg\.new\Z")

if (_HEADER.size, _SUMMARY.size) != (HEADER_BYTES - 4, SUMMARY_BYTES - 16):
    raise ImportError("the table above is the format")


class LogIdentity(NamedTuple):
    """Which partition a file belongs to."""

    topic_id: int
    partition: int

    @property
    def directory_name(self) -> str:
        """Name of the partition's directory: ids only, never user text."""
        return f"{self.topic_id:016x}-{self.partition}"


class SegmentHeader(NamedTuple):
    identity: LogIdentity
    epoch: int
    base_offset: int
    created_us: int
    log_id: bytes = NO_LOG

    def stranger_to(self, log_id: bytes) -> bool:
        """Whether it is of another log than the one with this id; False if its id is not known."""
        return stranger(self.log_id, log_id)


class Summary(NamedTuple):
    """The fixed part of a footer; ``has_snapshot`` tells an empty snapshot from none.

    ``compacted``: records are missing between its batches, and in them, on purpose.  ``chained``: it was
    merged, and the footer holds the content hash of the last original segment in it.
    """

    identity: LogIdentity
    epoch: int
    base_offset: int
    end_offset: int
    record_count: int
    batch_count: int
    first_append_us: int
    last_append_us: int
    data_end: int
    content_hash: bytes
    previous_hash: bytes
    entry_count: int
    snapshot_size: int
    has_snapshot: bool
    footer_crc: int
    footer_size: int
    compacted: bool = False
    chained: bool = False


def stranger(found: bytes, log_id: bytes) -> bool:
    """Whether the id ``found`` is of another log; zeros are an id that is not known."""
    return NO_LOG not in (found, log_id) and found != log_id


def log_id_of(topic: str, topic_id: int, created_us: int) -> bytes:
    """16 bytes that name the log of a topic among all brokers."""
    hasher = content_hasher()
    hasher.update(f"{topic}\0{topic_id}\0{created_us}".encode())
    return bytes(hasher.digest())


def log_id_of_topic(record: TopicRecord) -> bytes:
    """Return log_id_of() for a topic as the metadata describes it."""
    return log_id_of(record.topic, record.topic_id, record.created_us)


def file_name(base_offset: int) -> str:
    return f"{base_offset:020d}.seg"


def spare_name(epoch: int) -> str:
    """Of the file that owner ``epoch`` makes ahead for its next segment; to any reader it is unfinished."""
    return f"next-{epoch}.seg.new"


def spare_epoch_of(name: str) -> int | None:
    """Its owner's epoch in a spare's file name; None for any other file."""
    match = _SPARE.match(name)
    return int(match[1]) if match else None


def base_offset_of(name: str) -> int | None:
    """Base offset in a segment's file name; None for any other file."""
    match = _NAME.match(name)
    return int(match[1]) if match else None


def pack_header(header: SegmentHeader) -> bytes:
    topic_id, partition = header.identity
    packed = _HEADER.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES,
        partition,
        topic_id,
        header.base_offset,
        header.created_us,
        header.epoch,
        header.log_id,
    )
    return packed + _CRC.pack(crc32c(packed))


def read_header(data: bytes) -> SegmentHeader:
    """Decode the first 64 bytes; raise Damage, or StorageIncompatible for a newer version."""
    if len(data) < HEADER_BYTES or data[:8] != MAGIC:
        raise Damage("segment header is missing")
    if _CRC.unpack_from(data, HEADER_BYTES - 4)[0] != crc32c(data[: HEADER_BYTES - 4]):
        raise Damage("segment header fails its checksum")
    _, version, _, partition, topic_id, base_offset, created_us, epoch, log_id = _HEADER.unpack_from(data)
    _check_version("segment", version)
    return SegmentHeader(LogIdentity(topic_id, partition), epoch, base_offset, created_us, log_id)


def pack_footer(
    summary: Summary, entries: bytes, snapshot: bytes | None, chain_hash: bytes | None = None
) -> bytes:
    """The whole footer; its sizes, its CRC and all flags but ``compacted`` are computed here."""
    blob = snapshot or b""
    head = _FOOTER_HEAD.pack(FOOTER_MAGIC, len(entries) // ENTRY_BYTES, len(blob))
    body = head + entries + blob + bytes(padded(len(blob)) - len(blob)) + (chain_hash or b"")
    flags = 0 if snapshot is None else _FLAG_SNAPSHOT
    flags |= _FLAG_COMPACTED * summary.compacted | _FLAG_CHAINED * (chain_hash is not None)
    fields = (*summary.identity, *summary[1:11], len(entries) // ENTRY_BYTES, len(blob))
    packed = _SUMMARY.pack(*fields, flags, crc32c(body), len(body) + SUMMARY_BYTES, VERSION, 0)
    return body + packed + _CRC.pack(crc32c(packed)) + bytes(4) + END_MAGIC


def read_summary(data: bytes, file_size: int) -> Summary | None:
    """Decode the last 144 bytes of a file of ``file_size`` bytes.

    None: the file has no footer.  Damage: it has one that cannot be trusted.
    """
    if len(data) < SUMMARY_BYTES:
        return None
    packed, tail = data[: _SUMMARY.size], data[_SUMMARY.size :]
    sound = _CRC.unpack_from(tail)[0] == crc32c(packed)
    if not sound or tail[4:] != bytes(4) + END_MAGIC:
        if sound or tail[8:] == END_MAGIC:
            raise Damage("segment footer fails its checksum")
        return None
    topic_id, partition, *fields = _SUMMARY.unpack(packed)
    _check_version("segment footer", fields[15])
    flags, footer_crc, footer_size = fields[12:15]
    known = (
        LogIdentity(topic_id, partition),
        *fields[:12],
        bool(flags & _FLAG_SNAPSHOT),
        footer_crc,
        footer_size,
        bool(flags & _FLAG_COMPACTED),
        bool(flags & _FLAG_CHAINED),
    )
    summary = Summary._make(known)
    body_size = FOOTER_HEAD_BYTES + summary.entry_count * ENTRY_BYTES + padded(summary.snapshot_size)
    expected = body_size + HASH_BYTES * summary.chained + SUMMARY_BYTES
    if flags & ~_FLAGS_KNOWN:
        raise Damage("segment footer has unknown flags", flags=flags)
    if summary.footer_size != expected or summary.data_end + expected != file_size:
        raise Damage("segment footer does not fit its file", file_size=file_size)
    return summary


def split_footer(data: bytes, summary: Summary) -> tuple[bytes, bytes | None]:
    """``(index entries, snapshot)`` of the footer bytes before the summary; Damage when they differ."""
    if len(data) != summary.footer_size - SUMMARY_BYTES or crc32c(data) != summary.footer_crc:
        raise Damage("segment footer fails its checksum")
    entries_end = FOOTER_HEAD_BYTES + summary.entry_count * ENTRY_BYTES
    snapshot = data[entries_end : entries_end + summary.snapshot_size]
    return data[FOOTER_HEAD_BYTES:entries_end], snapshot if summary.has_snapshot else None


def chain_hash_of(data: bytes, summary: Summary) -> bytes:
    """Return the next segment's ``previous_hash``, from the footer bytes before the summary."""
    return data[-HASH_BYTES:] if summary.chained else summary.content_hash


def _check_version(what: str, version: int) -> None:
    if version != VERSION:
        raise StorageIncompatible(
            f"{what} has format version {version}",
            why=f"this program reads version {VERSION}",
            hint="start the newer Danube that wrote it; nothing was touched",
            version=version,
        )
