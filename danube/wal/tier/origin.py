"""Origin of a manifest or segment: this log, or another broker's topic with the same name and ids.

A manifest does not name its log, but its segments do: a local segment with the same offsets has the same
content hash, and the header of an object has the id of its log.
"""

from __future__ import annotations

from pathlib import Path

from danube.errors import Damage, ObjectMissing
from danube.host import files
from danube.wal.segments.segment import (
    HEADER_BYTES,
    NO_LOG,
    STRANGER,
    SUMMARY_BYTES,
    LogIdentity,
    Summary,
    base_offset_of,
    read_header,
    read_summary,
)
from danube.wal.stores.objects import ObjectStore
from danube.wal.tier.keys import segment_key
from danube.wal.tier.manifest import EntryFlag, Manifest, SegmentEntry

_REWRITTEN = EntryFlag.MERGED | EntryFlag.COMPACTED


def why_foreign(manifest: Manifest, directory: Path, store: ObjectStore, log_id: bytes) -> str:
    """Return why a manifest is of another log; empty if it is not, or cannot be told.

    Asks the store for one header at most, and only where no file tells.
    """
    if log_id == NO_LOG or not len(manifest):
        return ""
    for path in _segments_in(directory):
        entry = _entry_of(manifest, path)
        summary = _summary_of(path) if entry is not None else None
        if entry is None or summary is None or summary.identity != manifest.identity:
            continue
        if summary.end_offset == entry.end_offset and not summary.compacted:
            same = summary.content_hash == entry.content_hash
            return "" if same else f"it names other records than {path.name} holds"
    return _object_tells(manifest.identity, manifest.entry(len(manifest) - 1), store, log_id)


def refuse_stranger(path: Path, log_id: bytes) -> None:
    """Raise Damage where the segment in a file says that it is of another log."""
    if log_id == NO_LOG:
        return
    data, _ = files.read_start(path, HEADER_BYTES)
    try:
        header = read_header(data)
    except Damage:
        return  # the reader of its batches reports it
    if header.stranger_to(log_id):
        raise Damage(STRANGER, file=path.name)


def _segments_in(directory: Path) -> list[Path]:
    try:
        names = files.list_names(directory)
    except FileNotFoundError:
        return []
    return [directory / name for name in sorted(names) if base_offset_of(name) is not None]


def _entry_of(manifest: Manifest, path: Path) -> SegmentEntry | None:
    """The entry that begins where a file does, unless it was made anew since it was a file."""
    base_offset = base_offset_of(path.name) or 0
    number = manifest.find(base_offset)
    if number >= len(manifest):
        return None
    entry = manifest.entry(number)
    return entry if entry.base_offset == base_offset and not entry.flags & _REWRITTEN else None


def _summary_of(path: Path) -> Summary | None:
    """Return the summary of a sealed file; None if it is not sealed or cannot be read."""
    try:
        fd = files.open_existing(path, writable=False)
        try:
            size = files.size_of(fd)
            return read_summary(files.pread(fd, SUMMARY_BYTES, max(0, size - SUMMARY_BYTES)), size)
        finally:
            files.close(fd)
    except (OSError, Damage):
        return None


def _object_tells(identity: LogIdentity, entry: SegmentEntry, store: ObjectStore, log_id: bytes) -> str:
    try:
        header = read_header(store.get(segment_key(identity, entry), 0, HEADER_BYTES))
    except (ObjectMissing, Damage):
        return ""  # told where it is read
    return STRANGER if header.stranger_to(log_id) else ""
