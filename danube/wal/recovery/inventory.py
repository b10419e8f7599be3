"""Inventory of a partition's directory, taken before recovery changes anything.

Every file is examined and none is changed, so a file of a newer version stops the opening with
the directory as it was.

Footers that a power cut left unfinished are told from damaged ones.

A footer is written behind data that was synced, and is synced itself before any later segment gets one.
A power cut before that sync keeps some of its sectors; the others read as zeros.  So only a footer behind the
newest whole one can be unfinished.  Its segment is as unsealed as before: it is read, and sealed again.
When a finished footer rots, no whole sector turns into zeros: that is damage.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from danube.errors import Damage, Fenced
from danube.host import files
from danube.wal.recovery.mark import MarkReading, read_mark
from danube.wal.segments.segment import (
    HEADER_BYTES,
    NO_LOG,
    STRANGER,
    SUMMARY_BYTES,
    LogIdentity,
    SegmentHeader,
    Summary,
    base_offset_of,
    read_header,
    read_summary,
    split_footer,
)

SECTOR_BYTES: Final = 512
_HEAD_BYTES: Final = 16  # of a summary, and of a footer: never all zeros


def torn(data: bytes, position: int) -> bool:
    """Whether a sector is missing in a footer, or in the last bytes of one, which begins at ``position``."""
    cuts = [0, *range(-position % SECTOR_BYTES, len(data), SECTOR_BYTES), len(data)]
    pieces = [data[:_HEAD_BYTES], *(data[start:end] for start, end in pairwise(cuts) if start < end)]
    return any(not piece.strip(b"\0") for piece in pieces)


TEMPORARY_SUFFIX = ".new"
ASIDE_SUFFIX = ".aside"


def name_aside(path: Path) -> Path:
    """Return a free name for a file that cannot keep its own name and is kept for people."""
    aside = path.with_name(path.name + ASIDE_SUFFIX)
    while aside.exists():
        aside = aside.with_name(aside.name + "+")
    return aside


class FoundFile(NamedTuple):
    """One segment file: ``header`` or ``summary`` is None if there is none that can be trusted.

    ``unfinished``: a seal was under way when the machine ended; it names ``claimed_end``, or no end (0).
    """

    path: Path
    base_offset: int
    size: int
    header: SegmentHeader | None
    summary: Summary | None
    flaws: tuple[str, ...]
    unfinished: bool = False
    claimed_end: int = 0

    @property
    def empty(self) -> bool:
        return self.size <= HEADER_BYTES


class Inventory(NamedTuple):
    """``files`` by base offset; ``foreign`` belong elsewhere and are set aside, with the reason."""

    files: list[FoundFile]
    foreign: list[tuple[FoundFile, str]]
    temporary: list[Path]
    mark: MarkReading


def take_inventory(directory: Path, identity: LogIdentity, epoch: int, log_id: bytes = NO_LOG) -> Inventory:
    """Read all headers, footers' summaries and the mark.

    Raises StorageIncompatible for a newer version, Fenced for a newer owner's file.
    """
    found: list[FoundFile] = []
    foreign: list[tuple[FoundFile, str]] = []
    temporary: list[Path] = []
    for name in files.list_names(directory):
        base_offset = base_offset_of(name)
        if base_offset is not None:
            file = _examine(directory / name, base_offset)
            reason = _why_foreign(file, identity, log_id)
            if reason:
                foreign.append((file, reason))
            else:
                found.append(file)
        elif name.endswith(TEMPORARY_SUFFIX):
            temporary.append(directory / name)
    found = _without_duplicates(_judge_seals(found), foreign, temporary)
    newest = max((file.header.epoch for file in found if file.header), default=0)
    if newest > epoch:
        raise Fenced(
            f"the log was opened with epoch {newest}",
            why=f"this owner has epoch {epoch}",
            hint="the partition has a newer owner; nothing was touched",
            epoch=newest,
        )
    return Inventory(found, foreign, temporary, read_mark(directory, identity))


def _examine(path: Path, base_offset: int) -> FoundFile:
    header: SegmentHeader | None = None
    summary: Summary | None = None
    unfinished = False
    flaws: list[str] = []
    fd = files.open_existing(path, writable=False)
    try:
        size = files.size_of(fd)
        head = files.pread(fd, HEADER_BYTES, 0)
        tail = files.pread(fd, SUMMARY_BYTES, max(0, size - SUMMARY_BYTES))
    finally:
        files.close(fd)
    try:
        if head.strip(b"\0"):
            header = read_header(head)
    except Damage as error:
        _refuse_newer(error)
        flaws.append(error.what)
    try:
        if size >= HEADER_BYTES + SUMMARY_BYTES:
            summary = read_summary(tail, size)
    except Damage as error:
        _refuse_newer(error)
        flaws.append(error.what)
        unfinished = torn(tail, size - SUMMARY_BYTES)
    return FoundFile(path, base_offset, size, header, summary, tuple(flaws), unfinished)


def _judge_seals(found: list[FoundFile]) -> list[FoundFile]:
    """Seals that a cut left unfinished are no damage; they lie behind the newest footer that is whole."""
    judged = list(found)
    newest = True
    for number, file in reversed(list(enumerate(found))):
        if file.summary is not None and newest:
            judged[number] = _with_whole_footer(file, file.summary)
            newest = False
        elif file.unfinished:  # its footer's flaw is the last one
            judged[number] = file._replace(unfinished=newest, flaws=file.flaws[:-1] if newest else file.flaws)
    return judged


def _with_whole_footer(file: FoundFile, summary: Summary) -> FoundFile:
    """Return the file; as unsealed if sectors of the footer before its summary were never written."""
    fd = files.open_existing(file.path, writable=False)
    try:
        footer = files.pread(fd, summary.footer_size, summary.data_end)
    finally:
        files.close(fd)
    try:
        split_footer(footer[:-SUMMARY_BYTES], summary)
    except Damage as error:
        if torn(footer, summary.data_end) and not summary.compacted and not summary.chained:
            return file._replace(summary=None, unfinished=True, claimed_end=summary.end_offset)
        return file._replace(flaws=(*file.flaws, error.what))
    return file


def _refuse_newer(error: Damage) -> None:
    if type(error) is not Damage:
        raise error


def _why_foreign(file: FoundFile, identity: LogIdentity, log_id: bytes) -> str:
    if file.header is not None and file.header.stranger_to(log_id):
        return STRANGER
    for part in (file.header, file.summary):
        if part is not None and part.identity != identity:
            return "the file belongs to another partition"
        if part is not None and part.base_offset != file.base_offset:
            return "the file has another segment's name"
    return ""


def _without_duplicates(
    found: list[FoundFile], foreign: list[tuple[FoundFile, str]], temporary: list[Path]
) -> list[FoundFile]:
    """Take out files whose offsets a sealed segment of the same owner, or a later one, holds.

    Sealed ones inside a compacted segment are those that it was made from: a crash left them.
    """
    kept: list[FoundFile] = []
    for file in found:
        holder = kept[-1].summary if kept else None
        inside = holder is not None and file.base_offset < holder.end_offset
        if holder is not None and inside and _replaced(file, holder):
            temporary.append(file.path)
        elif holder is not None and inside and file.header is not None and file.header.epoch <= holder.epoch:
            foreign.append((file, "the file repeats offsets of another segment"))
        else:
            kept.append(file)
    return kept


def _replaced(file: FoundFile, holder: Summary) -> bool:
    """Whether the compacted segment ``holder`` has taken the place of this one."""
    summary = file.summary
    return (
        holder.compacted
        and summary is not None
        and summary.end_offset <= holder.end_offset
        and summary.epoch <= holder.epoch
    )
