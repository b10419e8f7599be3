"""The independent reader of a member's journal, ``raft/raft.log``, and of ``raft.id`` beside it.

Knows the layout in ``docs/formats/metadata.md`` and shares no code with what writes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from danube.wal.verify.bytes import Content, FindingKind
from danube.wal.verify.state import (
    LOG_HEAD_BYTES,
    METADATA_MAGIC,
    entry_at,
    list_in,
    read_log_head,
    read_snapshot,
)

_IDENTITY, _BASE, _PART, _PROMISE, _PUT = range(1, 6)
_FIELDS: Final = {_IDENTITY: 2, _BASE: 6, _PART: 1, _PROMISE: 2, _PUT: 2}
_ENTRY_KINDS: Final = (0, 1, 2)


@dataclass
class MemberJournal(Content):
    """Content of a journal.  ``steps`` are those below the mark and whole ones behind it."""

    identity: tuple[str, str] = ("", "")  # cluster id, node id
    steps: int = 0
    last_index: int = 0
    snapshot_index: int = 0
    snapshot: bytes = b""
    committed_end: int = 0
    unfinished: int = 0


def looks_like_journal(data: bytes) -> bool:
    """Whether the bytes begin as a journal does: a log file that has no snapshot of its own."""
    return data[:3] == METADATA_MAGIC and len(data) >= 24 and data[16:24] == bytes(8)


def read_member_journal(data: bytes) -> MemberJournal:
    """Return the content of a journal's bytes; an incomplete step behind the mark is ignored."""
    journal = MemberJournal()
    head = read_log_head(data, journal)
    if head is None:
        return journal
    _, _, journal.committed_end = head
    if not LOG_HEAD_BYTES < journal.committed_end <= len(data):
        what = f"bytes up to {journal.committed_end} were synced, the file has {len(data)}"
        journal.note(FindingKind.TRUNCATED, what, min(len(data), journal.committed_end))
    _Reading(data, journal).run()
    return journal


def read_member_identity(data: bytes) -> tuple[str, str] | None:
    """Cluster id and node id of ``raft.id``; None if it holds something else."""
    record = list_in(data)
    if record is None or len(record) != 3 or record[0] != _IDENTITY:
        return None
    return (record[1], record[2]) if all(isinstance(one, str) for one in record[1:]) else None


class _Reading:
    """All steps of a journal, one after the other."""

    def __init__(self, data: bytes, journal: MemberJournal) -> None:
        self._data = data
        self._journal = journal
        self._base: list[Any] | None = None
        self._parts: list[bytes] = []

    def run(self) -> None:
        journal, position = self._journal, LOG_HEAD_BYTES
        while position < len(self._data):
            step = entry_at(self._data, position)
            if step is None or step[0] != journal.steps + 1:
                break
            journal.steps, content, end = step
            if not self._take(content):
                journal.note(FindingKind.CHECKSUM, f"step {journal.steps} is not one", position)
                return
            position = end
        if position < journal.committed_end <= len(self._data):
            what = f"the step behind step {journal.steps} fails its checksum"
            journal.note(FindingKind.CHECKSUM, what, position)
            return
        journal.unfinished = len(self._data) - position
        self._check_snapshot()

    def _take(self, content: bytes) -> bool:
        records = list_in(content)
        if records is None or (self._journal.steps == 1) != (self._base is None):
            return False
        try:
            return all(self._take_record(number, record) for number, record in enumerate(records))
        except (TypeError, IndexError):  # a value of another type than the format has there
            return False

    def _take_record(self, number: int, record: Any) -> bool:
        journal, (tag, *values) = self._journal, record
        if len(values) != _FIELDS.get(tag):
            return False
        if (number < 2 and journal.steps == 1) != (tag in (_IDENTITY, _BASE)):
            return False
        if tag == _IDENTITY:
            journal.identity = (values[0], values[1])
        elif tag == _BASE:
            self._base = values
            journal.snapshot_index = values[0]
            journal.last_index = values[2]
        elif tag == _PART:
            self._parts.append(values[0])
        elif tag == _PUT:
            first, entries = values
            if self._base is None or not self._base[2] < first <= journal.last_index + 1:
                return False
            journal.last_index = first + len(entries) - 1
            return all(len(one) == 3 and one[1] in _ENTRY_KINDS for one in entries)
        return True

    def _check_snapshot(self) -> None:
        journal = self._journal
        if self._base is None:
            journal.note(FindingKind.TRUNCATED, "there is no whole step", LOG_HEAD_BYTES)
            return
        journal.snapshot = b"".join(self._parts)
        if len(journal.snapshot) != self._base[5]:
            what = f"the snapshot has {len(journal.snapshot)} bytes instead of {self._base[5]}"
            journal.note(FindingKind.TRUNCATED, what, LOG_HEAD_BYTES)
        elif journal.snapshot:
            journal.problems += read_snapshot(journal.snapshot, -1).problems
