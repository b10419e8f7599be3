"""The independent reader of producers' state, as footers and checkpoints hold it."""

from __future__ import annotations

import struct
from typing import Final

from danube.core.batch.checksum import crc32c
from danube.wal.verify.bytes import FindingKind

_MAGIC: Final = b"DND1"
_HEAD: Final = struct.Struct("<4sIQqII")
_PRODUCER: Final = struct.Struct("<QQII")
_BATCH_BYTES: Final = 28


def flaw_of_producers(snapshot: bytes) -> tuple[FindingKind, str] | None:
    """Return the fault of a snapshot of a partition's producers; None without one.

    The log takes any bytes here, covered by the footer's or the checkpoint's checksum.  So bytes that do not
    begin like the broker's own snapshot are not judged.
    """
    if snapshot[:3] != _MAGIC[:3]:
        return None
    if snapshot[:4] != _MAGIC:
        return FindingKind.VERSION, f"the producer snapshot has the format {snapshot[:4]!r}"
    if len(snapshot) < _HEAD.size:
        return FindingKind.TRUNCATED, "the producer snapshot is cut"
    _, crc, _, _, _, count = _HEAD.unpack_from(snapshot)
    if crc32c(snapshot[8:]) != crc:
        return FindingKind.CHECKSUM, "the producer snapshot is damaged"
    heads_end = _HEAD.size + count * _PRODUCER.size
    if heads_end <= len(snapshot):
        heads = _PRODUCER.iter_unpack(snapshot[_HEAD.size : heads_end])
        if len(snapshot) == heads_end + _BATCH_BYTES * sum(batches for _, _, _, batches in heads):
            return None
    return FindingKind.TRUNCATED, f"{count} producers and their batches do not fit the producer snapshot"
