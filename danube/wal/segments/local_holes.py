"""Holes that this host made in its own log: offsets that it skipped, so that none is given twice.

A log skips offsets if those behind its end may have been given to records that are lost: in the history after
a restore or a restored copy, and after a crash of the machine.  Before the first append behind it, the hole
is named in the file ``holes`` of the partition's directory:

    <CRC32C of the rest, 8 hexadecimal digits> <JSON: [{start, end, epoch, since_us, why}, ...]>

In *this* history no record has these offsets, so readers skip such a hole (its kind is ``unused``). The
manifest gets the hole together with the first segment behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from danube.core.batch.checksum import crc32c
from danube.errors import Damage
from danube.host import files
from danube.wal.segments.holes import Hole, HoleKind

FILE_NAME: Final = "holes"
_FILE_BYTES_MAX: Final = 16 << 20
_DIGITS: Final = 8


class _Row(msgspec.Struct, frozen=True):
    start: int
    end: int
    epoch: int
    since_us: int
    why: str


class OffsetJump(msgspec.Struct, frozen=True):
    """A log whose newest segment is older than ``first_epoch`` skips offsets before it continues.

    ``since_us`` identifies the hole, which is made once, however often the log is opened.  ``step`` is its
    width; 0: the width of a new history.  ``also`` is the jump that applies if this one does not.
    """

    first_epoch: int
    since_us: int
    why: str
    step: int = 0
    also: OffsetJump | None = None


class LocalHoles:
    """The holes of one log, by offset; they do not overlap."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._rows: list[_Row] = []

    @classmethod
    def load(cls, directory: Path) -> LocalHoles:
        """Load the holes that the directory names; raises Damage if its file cannot be read."""
        holes = cls(directory)
        try:
            data, size = files.read_start(holes._path, _FILE_BYTES_MAX)
        except FileNotFoundError:
            return holes
        holes._rows = decode(data, str(holes._path), size)
        return holes

    def __iter__(self) -> Iterator[Hole]:
        for row in self._rows:
            yield Hole(row.start, row.end, 0, row.epoch, HoleKind.UNUSED, row.since_us, row.since_us)

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def end(self) -> int:
        """Behind the last one; 0 if there is none."""
        return self._rows[-1].end if self._rows else 0

    def made_since(self, since_us: int) -> bool:
        """Whether the log went on ahead in the history of that time."""
        return any(row.since_us == since_us for row in self._rows)

    def at(self, offset: int) -> Hole | None:
        """The hole that ``offset`` lies in."""
        return next((hole for hole in self if hole.start <= offset < hole.end), None)

    def add(self, start: int, end: int, epoch: int, ahead: OffsetJump) -> None:
        """Name one more, behind all others; on disk when this returns."""
        self._rows.append(_Row(start, end, epoch, ahead.since_us, ahead.why))
        files.replace_durably(self._path, _encode(self._rows))

    def forget_below(self, offset: int) -> None:
        """Drop holes that end below the first segment, when the file is written next.

        Holes that reach up to it stay, in any number of pieces, because no record in them could have expired.
        """
        start = self.start_below(offset)
        self._rows = [row for row in self._rows if row.end > start or row.start >= offset]

    def start_below(self, offset: int) -> int:
        """Return where the unused offsets up to ``offset`` begin: at the hole before it, or there."""
        for row in reversed(self._rows):
            if row.start < offset <= row.end:
                offset = row.start
        return offset

    def uncovered(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts of ``start .. end`` that lie in no hole."""
        for hole in self:
            if hole.end <= start or hole.start >= end:
                continue
            if start < hole.start:
                yield start, hole.start
            start = hole.end
        if start < end:
            yield start, end


def holes_in(directory: Path) -> tuple[Hole, ...]:
    """Return the holes for a reader outside the broker; raises Damage if the file cannot be read."""
    return tuple(LocalHoles.load(directory))


def decode(data: bytes, where: str, size: int = 0) -> list[_Row]:
    """Return the rows of a file of ``size`` bytes; raises Damage if the file was changed."""
    digits, content = data[:_DIGITS], data[_DIGITS + 1 :].rstrip(b"\n")
    try:
        if size > len(data):
            raise ValueError(f"it has {size} bytes, more than any")
        if int(digits, 16) != crc32c(content):
            raise ValueError("its checksum differs")
        rows = msgspec.json.decode(content, type=list[_Row])
        ends = [end for row in rows for end in (row.start, row.end)]
        if sorted(ends) != ends or any(row.start >= row.end for row in rows):
            raise ValueError("its holes overlap")
    except (ValueError, msgspec.MsgspecError) as error:
        raise Damage(
            f"{where} is damaged", why=str(error),
            hint="put it back from a backup; without it what it names is reported as missing", file=where,
        ) from None  # fmt: skip
    return rows


def _encode(rows: Iterable[_Row]) -> bytes:
    content = msgspec.json.encode(list(rows))
    return f"{crc32c(content):0{_DIGITS}x} ".encode() + content + b"\n"
