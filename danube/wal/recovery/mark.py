"""The sync mark: how far a partition's log is on stable storage, for recovery.

    position  size  field                          two slots of 64 bytes, at 0 and at 64
           0     8  magic       b"DANUBMRK"
           8     2  version     1
          10     2  zero
          12     4  partition
          16     8  topic_id
          24     8  number      counts rewrites; the larger valid one of the slots is in force
          32     8  synced_end  offset
          40     8  base_offset of the segment that holds synced_end
          48     8  position    in that segment; every byte below it was synced
          56     4  epoch
          60     4  CRC32C of bytes 0 .. 60

Written after a successful sync, never before, and not synced itself: a mark that is too old is
safe, one that is too new cannot exist unless the device lied.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from danube.core.batch.checksum import crc32c
from danube.errors import StorageIncompatible
from danube.host import files
from danube.wal.segments.descriptors import LogFile, descriptors
from danube.wal.segments.segment import LogIdentity

FILE_NAME: Final = "mark"
SLOT_BYTES: Final = 64
_MAGIC: Final = b"DANUBMRK"
_VERSION: Final = 1
_SLOT: Final = struct.Struct("<8sHHIQQQQQI")
_CRC: Final = struct.Struct("<I")

if _SLOT.size != SLOT_BYTES - 4:
    raise ImportError("the table above is the format")


class Mark(NamedTuple):
    number: int
    synced_end: int
    base_offset: int
    position: int
    epoch: int


class MarkReading(NamedTuple):
    """``mark`` is None when there is none; ``damaged`` when a slot holds something else than a mark."""

    mark: Mark | None
    damaged: bool


def pack_slot(identity: LogIdentity, mark: Mark) -> bytes:
    packed = _SLOT.pack(_MAGIC, _VERSION, 0, identity.partition, identity.topic_id, *mark)
    return packed + _CRC.pack(crc32c(packed))


def read_mark(directory: Path, identity: LogIdentity) -> MarkReading:
    """The mark in force; StorageIncompatible for a newer version."""
    try:
        data, size = files.read_start(directory / FILE_NAME, 2 * SLOT_BYTES)
    except FileNotFoundError:
        return MarkReading(None, False)
    found: list[Mark] = []
    damaged = size > 2 * SLOT_BYTES
    for start in (0, SLOT_BYTES):
        slot = data[start : start + SLOT_BYTES]
        if not slot.strip(b"\0"):
            continue
        if len(slot) < SLOT_BYTES or _CRC.unpack_from(slot, SLOT_BYTES - 4)[0] != crc32c(slot[:-4]):
            damaged = True
            continue
        magic, version, _, partition, topic_id, *fields = _SLOT.unpack_from(slot)
        if magic == _MAGIC and version != _VERSION:
            raise StorageIncompatible(
                f"sync mark has format version {version}", hint="start the newer Danube"
            )
        if magic != _MAGIC or (topic_id, partition) != identity:
            damaged = True
            continue
        found.append(Mark(*fields))
    return MarkReading(max(found, default=None), damaged)


class MarkWriter:
    """Rewrites the mark, one slot after the other; a noted position counts once it is stored."""

    def __init__(self, directory: Path, identity: LogIdentity, mark: Mark | None) -> None:
        self._file = LogFile(directory / FILE_NAME, writable=True)
        self._identity = identity
        self._number = mark.number if mark else 0
        self._noted: tuple[int, int, int, int] | None = None

    def note(self, synced_end: int, base_offset: int, position: int, epoch: int) -> None:
        """This is synced; store() writes it."""
        self._noted = synced_end, base_offset, position, epoch

    def store(self) -> None:
        """Write the last noted position, unless it is written already.

        If writing fails the older mark stays in force, which is safe: recovery then scans and copies more.
        """
        noted, self._noted = self._noted, None
        if noted is None:
            return
        mark = Mark(self._number + 1, *noted)
        with suppress(OSError):
            try:
                fd = descriptors.fd(self._file)
            except FileNotFoundError:
                fd = descriptors.create(self._file)
            files.write_all(fd, pack_slot(self._identity, mark), mark.number % 2 * SLOT_BYTES)
            self._number = mark.number

    def close(self) -> None:
        descriptors.close(self._file)
