"""What expires, and what may leave this host, when a partition lies in two tiers.

Expired: older than the topic's retention, or more than it.  It is deleted in both tiers, uploaded or not.
Evictable: sealed here and, verified, in the store.  It leaves when local retention says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

from danube.core.policy import TopicPolicy
from danube.wal.log import Log
from danube.wal.manifest import EntryFlag, Manifest
from danube.wal.retention import expired
from danube.wal.stored_segment import StoredSegment


class _Piece(NamedTuple):
    """A segment in either tier, as far as retention asks."""

    end_offset: int
    last_append_us: int
    size_bytes: int


def _remote(manifest: Manifest, start: int, log_start: int) -> Iterator[_Piece]:
    """Segments that lie only in the store, or begin there, and hold records above ``start``."""
    entries = manifest.entries[manifest.find(start) :]
    count = int((entries["base_offset"] < log_start).sum())
    for end_offset, last_us, size in zip(
        entries["end_offset"][:count].tolist(),
        entries["last_append_us"][:count].tolist(),
        entries["size_bytes"][:count].tolist(),
        strict=True,
    ):
        yield _Piece(end_offset, last_us, size)


def expired_end(manifest: Manifest | None, start: int, log: Log, policy: TopicPolicy, now_us: int) -> int:
    """Offset below which all records have expired; 0 when none at or above ``start`` has.

    Whole segments from the front: older than ``retention_ms``, or beyond ``retention_bytes`` or
    ``retention_segments`` that are not written any more (both of the tiers together).
    """
    if not policy.expires:
        return 0
    remote = list(_remote(manifest, start, log.start)) if manifest is not None else []
    local = [_Piece(one.end_offset, one.last_append_us, one.stored_bytes) for one in log.front()]
    cutoff_us = now_us - policy.retention_ms * 1000 if policy.retention_ms else None
    remote_bytes = sum(piece.size_bytes for piece in remote)
    excess_bytes = remote_bytes + log.local_bytes - policy.retention_bytes if policy.retention_bytes else 0
    rolled = len(remote) + len(local)
    excess_count = rolled - policy.retention_segments if policy.retention_segments else 0
    end = 0
    for end_offset, last_us, size in (*remote, *local):
        too_old = cutoff_us is not None and last_us < cutoff_us
        if not (too_old or excess_bytes >= size or excess_count > 0):
            break
        excess_bytes -= size
        excess_count -= 1
        end = end_offset
    return end


def verified(segment: StoredSegment, manifest: Manifest) -> bool:
    """Whether the store holds every record of a sealed local segment, by a verified entry."""
    number = manifest.find(segment.base_offset)
    if number >= len(manifest):
        return False
    entry = manifest.entry(number)
    if (entry.base_offset, entry.end_offset) == (segment.base_offset, segment.end_offset):
        return entry.content_hash == segment.content_hash or bool(
            entry.flags & (EntryFlag.MERGED | EntryFlag.COMPACTED)
        )
    merged = bool(entry.flags & EntryFlag.MERGED)
    return merged and entry.base_offset <= segment.base_offset and segment.end_offset <= entry.end_offset


class LocalRetention(NamedTuple):
    """What stays on this host besides what only it has; 0 is no limit."""

    ms: int = 0
    size_bytes: int = 0
    segments: int = 0  # of one partition


def evictable_end(manifest: Manifest, log: Log, now_us: int, keep: LocalRetention) -> int:
    """Offset below which local segments may leave this host now; 0 when none may."""
    front = log.front()
    candidates = list(takewhile(lambda one: one.sealed and verified(one, manifest), front))
    cutoff_us = now_us - keep.ms * 1000 if keep.ms else None
    excess_bytes = log.local_bytes - keep.size_bytes if keep.size_bytes else 0
    doomed = expired(candidates, cutoff_us, excess_bytes, None)
    surplus = candidates[: max(0, len(front) - keep.segments)] if keep.segments else []
    return max((one.end_offset for one in (*doomed[-1:], *surplus[-1:])), default=0)
