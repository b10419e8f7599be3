"""Holes of a partition: offsets that no object holds, and the state of each.

An owner that died may have given offsets that only its disk knows of.  The next owner begins behind them and
says so in the manifest: from where to where, and on whose disk records may lie.

    open      records may be there, and come back
    unused    no record was ever given these offsets: that disk has come back
    given up  an operator gave them up; records there may have been, and are lost

    hole, 48 bytes
     0   8  start
     8   8  end        more than the start
    16   8  broker_id  whose disk may hold records of it; 0: any that owned it up to that epoch
    24   4  epoch      up to which that broker owned it, at most the manifest's
    28   4  kind       see HoleKind
    32   8  since_us   when it was found, signed
    40   8  settled_us when it came to be no open one, signed; 0 before

Holes ascend and do not overlap, neither each other nor entries, and none lies wholly below the start.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from danube.errors import InvalidArgument

HOLE_BYTES: Final = 48
HOLES_MAX: Final = 65_536
HOLE: Final = np.dtype(
    [
        ("start", "<u8"),
        ("end", "<u8"),
        ("broker_id", "<u8"),
        ("epoch", "<u4"),
        ("kind", "<u4"),
        ("since_us", "<i8"),
        ("settled_us", "<i8"),
    ]
)
NO_HOLES: Final = np.zeros(0, HOLE)
NO_HOLES.flags.writeable = False
_OFFSET_MAX: Final = 2**63 - 1

if HOLE.itemsize != HOLE_BYTES:
    raise ImportError("the table above is the format")


class HoleKind(IntEnum):
    OPEN = 0
    UNUSED = 1
    GIVEN_UP = 2

    @property
    def words(self) -> str:
        """Description of such a hole."""
        return ("records may come back", "no record was ever there", "given up")[self]


class Hole(NamedTuple):
    """One row as plain values; times in microseconds of 1970."""

    start: int
    end: int
    broker_id: int
    epoch: int
    kind: HoleKind = HoleKind.OPEN
    since_us: int = 0
    settled_us: int = 0

    @property
    def open(self) -> bool:
        return self.kind is HoleKind.OPEN

    def settled(self, kind: HoleKind, now_us: int) -> Hole:
        return self._replace(kind=kind, settled_us=now_us)

    def described(self) -> dict[str, Any]:
        """For people."""
        return {
            "start": self.start,
            "end": self.end,
            "kind": self.kind.name.lower(),
            "broker_id": self.broker_id,
            "epoch": self.epoch,
            "since_us": self.since_us,
            "settled_us": self.settled_us,
        }


def hole_of(row: Any) -> Hole:
    """A row of an array of HOLE."""
    start, end, broker_id, epoch, kind, since_us, settled_us = row.item()
    return Hole(start, end, broker_id, epoch, HoleKind(kind), since_us, settled_us)


def rows_of(holes: Iterable[Hole]) -> NDArray[np.void]:
    """Ascending; neighbours that are both unused are one."""
    joined: list[Hole] = []
    for hole in sorted(holes):
        if hole.start >= hole.end:
            continue
        last = joined[-1] if joined else None
        if last is not None and last.end == hole.start and last.kind is hole.kind is HoleKind.UNUSED:
            joined[-1] = last._replace(end=hole.end, epoch=max(last.epoch, hole.epoch))
        else:
            joined.append(hole)
    rows = np.zeros(len(joined), HOLE)
    for number, hole in enumerate(joined):
        try:
            rows[number] = tuple(hole)
        except OverflowError as error:
            raise InvalidArgument("a hole's numbers do not fit a manifest", why=str(error)) from None
    return rows


def flaw_in(holes: NDArray[np.void], entries: NDArray[np.void], start_offset: int, epoch: int) -> str:
    """Return the first breach of the format among the holes; empty if there is none."""
    if not len(holes):
        return ""
    starts, ends = holes["start"], holes["end"]
    if len(holes) > HOLES_MAX:
        return f"it has more than {HOLES_MAX} holes"
    if ends.max() > _OFFSET_MAX or (starts >= ends).any():
        return "a hole ends where it begins, or before"
    if (starts[1:] < ends[:-1]).any():
        return "holes overlap"
    if int(ends[0]) <= start_offset:
        return "a hole lies below the start offset"
    if holes["kind"].max() > max(HoleKind):
        return "a hole is of an unknown kind"
    if holes["epoch"].max() > epoch:
        return "a hole is of a later epoch than the manifest"
    first = np.searchsorted(entries["end_offset"], starts, "right")
    stop = np.searchsorted(entries["base_offset"], ends, "left")
    if (first < stop).any():
        return "a hole overlaps a segment"
    return ""
