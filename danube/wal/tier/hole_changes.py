"""Changes to a partition's holes: found by a new owner, filled by a disk that comes back, given up.

Pure functions from one manifest to the next, for :meth:`danube.wal.tier.uploader.Uploader.install`.  Repeated
after a crash, they change nothing that was done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from danube.errors import InvalidArgument
from danube.wal.segments.holes import Hole, HoleKind
from danube.wal.tier.manifest import Manifest, SegmentEntry
from danube.wal.tier.staged import Row
from danube.wal.tier.uploader import Change


class Tail(msgspec.Struct, frozen=True, array_like=True):
    """Segments on a broker's disk beyond its uploaded end: sealed, and objects by now.

    The broker owned the partition from ``first_epoch`` to ``last_epoch`` (of its log) without a break.  The
    log ends at ``log_end``: the broker never gave offsets from there on.
    """

    broker_id: int
    first_epoch: int
    last_epoch: int
    log_end: int
    rows: list[Row]

    @property
    def entries(self) -> list[SegmentEntry]:
        return [SegmentEntry._make(row) for row in self.rows]

    def owns(self, hole: Hole) -> bool:
        """Return whether this disk alone can fill the hole; or, if the hole has no broker, whether it may."""
        if hole.broker_id:
            whose = hole.broker_id == self.broker_id and self.first_epoch <= hole.epoch <= self.last_epoch
        else:
            whose = self.last_epoch <= hole.epoch
        return hole.open and whose


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Tail)


def encode_tail(tail: Tail) -> bytes:
    return _encoder.encode(tail)


def decode_tail(data: bytes) -> Tail:
    """InvalidArgument for bytes that are none."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise InvalidArgument("the list of a disk's records cannot be read", why=str(error)) from None


def holing(reserved_end: int, broker_id: int, epoch: int, now_us: int) -> Change:
    """The change that says: from where uploading has come to ``reserved_end`` only that broker may know."""

    def change(manifest: Manifest) -> Manifest | None:
        start = manifest.uploaded_end
        if reserved_end <= start:
            return None
        hole = Hole(start, reserved_end, broker_id, epoch, HoleKind.OPEN, now_us)
        return manifest.with_holes([*manifest.all_holes(), hole])

    return change


class Span(Protocol):
    """Offsets of a segment, wherever it lies."""

    @property
    def base_offset(self) -> int: ...
    @property
    def end_offset(self) -> int: ...


def named(manifest: Manifest, entry: Span) -> bool:
    """Whether the manifest holds these records, in this object or in one that was made of it."""
    index = manifest.find(entry.base_offset)
    if index >= len(manifest):
        return False
    found = manifest.entry(index)
    return found.base_offset <= entry.base_offset and entry.end_offset <= found.end_offset


def objection_to(tail: Tail, entry: SegmentEntry, manifest: Manifest) -> str:
    """Why a segment of a tail cannot be named now; empty when it can."""
    if entry.end_offset <= manifest.start_offset:
        return "its records have expired"
    hole = manifest.hole_at(entry.base_offset)
    if hole is None:
        return "there is no hole where it lies"
    if not tail.owns(hole):
        if not hole.open:
            return f"its offsets are {hole.kind.words}"
        return f"what lies there is broker {hole.broker_id}'s, of epoch {hole.epoch}"
    if entry.end_offset > hole.end:
        return f"it ends at {entry.end_offset}, behind what was reserved: {hole.end}"
    if not entry.epoch <= min(tail.last_epoch, manifest.epoch):
        return f"it is of epoch {entry.epoch}, and not of that broker's time"
    return _unchained(tail, entry, manifest)


def _unchained(tail: Tail, entry: SegmentEntry, manifest: Manifest) -> str:
    """Return why the entry does not follow the segment before it; empty if it does."""
    hashes = {one.content_hash for one in tail.entries if one.end_offset == entry.base_offset}
    index = manifest.find(entry.base_offset) - 1
    if index >= 0 and manifest.entry(index).end_offset == entry.base_offset:
        before = manifest.entry(index)
        hashes |= {before.content_hash, before.chain_hash}
    if hashes and any(entry.previous_hash) and entry.previous_hash not in hashes:
        return "it does not follow the segment before it: its previous hash is another one"
    return ""


def filling(tail: Tail, ready: Sequence[SegmentEntry], now_us: int) -> Change:
    """Return the change that adds ``ready``, examined segments of the tail.

    The change also settles the rest of its holes.  Behind the end of its log no offset was ever given.
    Ranges that the disk should have and did not offer stay open.
    """

    def change(manifest: Manifest) -> Manifest | None:
        added: list[SegmentEntry] = []
        for entry in sorted(ready):
            overlaps = added and added[-1].end_offset > entry.base_offset
            if not overlaps and not objection_to(tail, entry, manifest):
                added.append(entry._replace(uploaded_us=now_us))
        holes: list[Hole] = []
        for hole in manifest.all_holes():
            holes += _left_of(hole, added, tail.log_end, now_us) if tail.owns(hole) else [hole]
        if not added and holes == manifest.all_holes():
            return None
        return manifest.with_holes(holes, added)

    return change


def _left_of(hole: Hole, added: Sequence[SegmentEntry], log_end: int, now_us: int) -> list[Hole]:
    """Return the unfilled parts of a hole: still open below the end of the log, unused from there on.

    A log that ends before the hole begins has lost its records, so it proves nothing about the hole.  If the
    hole has no broker, no log proves a part unused: another disk may bring more.
    """
    if not hole.broker_id:
        log_end = hole.end
    if log_end < hole.start:
        return [hole]
    left: list[Hole] = []
    at = hole.start
    for entry in added:
        if hole.start <= entry.base_offset < hole.end:
            left.append(hole._replace(start=at, end=entry.base_offset))
            at = entry.end_offset
    given = min(max(at, log_end), hole.end)
    left.append(hole._replace(start=at, end=given))
    left.append(hole._replace(start=given).settled(HoleKind.UNUSED, now_us))
    return [one for one in left if one.start < one.end]


def giving_up(end: int, now_us: int) -> Change:
    """The change that gives up all open holes that begin below ``end``."""

    def change(manifest: Manifest) -> Manifest | None:
        before = manifest.all_holes()
        holes = [
            hole.settled(HoleKind.GIVEN_UP, now_us) if hole.open and hole.start < end else hole
            for hole in before
        ]
        return manifest.with_holes(holes) if holes != before else None

    return change
