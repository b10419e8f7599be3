"""The producer checkpoint: a snapshot of the producers' sequences that no segment's footer holds.

    position  size  field
           0     8  magic  b"DANUBPRD"
           8     2  version  1
          10     2  zero
          12     4  partition
          16     8  topic_id
          24     8  end_offset: the snapshot knows the batches below it
          32     4  snapshot size
          36     4  CRC32C of the snapshot
          40     4  CRC32C of bytes 0 .. 40
          44     4  zero
          48        snapshot

Written when retention deletes the last segment whose footer held one, and by Log.checkpoint after
a recovery, so that the next one need not read the same headers again.  Replaced whole.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final, NamedTuple

from danube.core.batch.checksum import crc32c
from danube.errors import Damage, StorageIncompatible
from danube.host import files
from danube.host.disk_reserve import reserve
from danube.wal.segments.segment import SNAPSHOT_BYTES_MAX, LogIdentity

FILE_NAME: Final = "producers"
_MAGIC: Final = b"DANUBPRD"
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sHHIQQII")
_CRC: Final = struct.Struct("<II")
_HEAD_BYTES: Final = _HEAD.size + _CRC.size


class Checkpoint(NamedTuple):
    end_offset: int
    snapshot: bytes


def write_checkpoint(
    directory: Path, identity: LogIdentity, checkpoint: Checkpoint, *, urgent: bool = False
) -> None:
    """Replace the file, durably.  ``urgent``: on a full disk with the room that is kept for that."""
    topic_id, partition = identity
    end_offset, snapshot = checkpoint
    head = _HEAD.pack(_MAGIC, _VERSION, 0, partition, topic_id, end_offset, len(snapshot), crc32c(snapshot))
    data = head + _CRC.pack(crc32c(head), 0) + snapshot
    replace = reserve.replace_durably if urgent else files.replace_durably
    replace(directory / FILE_NAME, data)


def read_checkpoint(directory: Path, identity: LogIdentity) -> Checkpoint | None:
    """Return the checkpoint; None without one, Damage when it is not as it was written."""
    try:
        data, file_size = files.read_start(directory / FILE_NAME, SNAPSHOT_BYTES_MAX + _HEAD_BYTES)
    except FileNotFoundError:
        return None
    if file_size > len(data):
        raise Damage("producer checkpoint is longer than any")
    head, snapshot = data[: _HEAD.size], data[_HEAD_BYTES:]
    if len(data) < _HEAD_BYTES or _CRC.unpack_from(data, _HEAD.size) != (crc32c(head), 0):
        raise Damage("producer checkpoint fails its checksum")
    magic, version, _, partition, topic_id, end_offset, size, crc = _HEAD.unpack(head)
    if magic == _MAGIC and version != _VERSION:
        raise StorageIncompatible(f"producer checkpoint has version {version}", hint="start the newer Danube")
    if (
        magic != _MAGIC
        or (topic_id, partition) != identity
        or len(snapshot) != size
        or crc32c(snapshot) != crc
    ):
        raise Damage("producer checkpoint is not this partition's, or damaged")
    return Checkpoint(end_offset, snapshot)


def remove_checkpoint(directory: Path) -> None:
    try:
        files.unlink(directory / FILE_NAME)
    except FileNotFoundError:
        return
    files.fsync_directory(directory)
