"""Retention of a partition in two tiers: expired segments, and segments that may leave this host.

Expired segments are above the topic's retention by age or size.  They are deleted in both tiers, uploaded or
not.  Evictable segments are sealed here and verified in the store.  They are deleted here by local retention.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Final, NamedTuple

from danube.core.partition.policy import TopicPolicy
from danube.wal.log.log import Log
from danube.wal.log.retention import expired
from danube.wal.segments.stored_segment import StoredSegment
from danube.wal.tier.manifest import EntryFlag, Manifest

_NOWHERE: Final = "all before it has expired, and no object or file holds it"


class _Piece(NamedTuple):
    """A segment in either tier, with the facts that retention needs."""

    base_offset: int
    end_offset: int
    last_append_us: int
    size_bytes: int


def _remote(manifest: Manifest, start: int, log_start: int) -> Iterator[_Piece]:
    """Return segments with records above ``start`` that are only in the store, or begin there."""
    entries = manifest.entries[manifest.find(start) :]
    count = int((entries["base_offset"] < log_start).sum())
    columns = [entries[name][:count].tolist() for name in ("base_offset", "end_offset", "last_append_us")]
    return map(_Piece, *columns, entries["size_bytes"][:count].tolist())


class Expired(NamedTuple):
    """All records below ``end`` have expired, for the reason ``fact``."""

    end: int
    fact: str


NONE_EXPIRED: Final = Expired(0, "")


def expired_end(
    manifest: Manifest | None, start: int, log: Log, policy: TopicPolicy, now_us: int, *, confirmed: bool
) -> Expired:
    """Return the end of the expired records; NONE_EXPIRED if none at or above ``start`` has expired.

    Whole segments expire, from the front: those older than ``retention_ms``, or beyond ``retention_bytes`` or
    ``retention_segments`` of completed segments (both tiers together). Offsets in no file and no object
    expire with the records before them; only a ``confirmed`` manifest, one that was read from the store, can
    show that.
    """
    if not (policy.expires and (policy.retention_ms or policy.retention_bytes or policy.retention_segments)):
        return NONE_EXPIRED
    remote = list(_remote(manifest, start, log.start)) if manifest is not None else []
    local = [
        _Piece(one.base_offset, one.end_offset, one.last_append_us, one.stored_bytes) for one in log.front()
    ]
    over = _Over(
        policy, now_us, sum(piece.size_bytes for piece in remote) + log.local_bytes, len(remote) + len(local)
    )
    found = Expired(start, "")
    for piece in (*remote, *local):
        if manifest is not None and confirmed and _nowhere(manifest, found.end, piece.base_offset):
            found = Expired(piece.base_offset, _NOWHERE)
        fact = over.take(piece)
        if not fact:
            break
        found = Expired(piece.end_offset, fact)
    else:
        if manifest is not None and confirmed and _nowhere(manifest, found.end, log.start):
            found = Expired(log.start, _NOWHERE)
    return found if found.fact else NONE_EXPIRED


class _Over:
    """Excess over the bounds of a policy, segment by segment from the front."""

    def __init__(self, policy: TopicPolicy, now_us: int, size_bytes: int, count: int) -> None:
        self._policy = policy
        self._cutoff_us = now_us - policy.retention_ms * 1000 if policy.retention_ms else None
        self._excess_bytes = size_bytes - policy.retention_bytes if policy.retention_bytes else -1
        self._excess_count = count - policy.retention_segments if policy.retention_segments else 0

    def take(self, piece: _Piece) -> str:
        """Return why the next segment has expired; empty if it has not."""
        policy = self._policy
        if self._cutoff_us is not None and piece.last_append_us < self._cutoff_us:
            fact = f"older than retention_ms={policy.retention_ms}"
        elif self._excess_bytes >= piece.size_bytes:
            fact = f"beyond retention_bytes={policy.retention_bytes}"
        elif self._excess_count > 0:
            fact = f"beyond retention_segments={policy.retention_segments}"
        else:
            return ""
        self._excess_bytes -= piece.size_bytes
        self._excess_count -= 1
        return fact


def _nowhere(manifest: Manifest, end: int, base_offset: int) -> bool:
    """Return whether no tier and no other disk has ``end .. base_offset``, behind the expired records."""
    if not 0 < end < base_offset or manifest.plan(end, base_offset):
        return False
    return not any(one.open and one.start < base_offset and end < one.end for one in manifest.all_holes())


def verified(segment: StoredSegment, manifest: Manifest) -> bool:
    """Return whether verified objects hold every record of a sealed local segment."""
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
    """Limits of data that stays on this host although the store has it too; 0 is no limit."""

    ms: int = 0
    size_bytes: int = 0
    segments: int = 0  # for each partition


def evictable_end(manifest: Manifest, log: Log, now_us: int, keep: LocalRetention) -> int:
    """Return the offset below which local segments may be evicted now; 0 if none may."""
    front = log.front()
    candidates = list(takewhile(lambda one: one.sealed and verified(one, manifest), front))
    cutoff_us = now_us - keep.ms * 1000 if keep.ms else None
    excess_bytes = log.local_bytes - keep.size_bytes if keep.size_bytes else 0
    doomed = expired(candidates, cutoff_us, excess_bytes)
    surplus = candidates[: max(0, len(front) - keep.segments)] if keep.segments else []
    return max((one.end_offset for one in (*doomed[-1:], *surplus[-1:])), default=0)
