"""Findings of validation: kinds of damage, rows, and the report.

A finding names file (or key), byte and offset.  *Errors* mean that records are lost, wrong or in doubt.
*Warnings* mean that something is there which should not be, and that no record suffers from it.

Facts of a segment before and after it is validated are here as well.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Any, Final

import msgspec

from danube.wal.verify.bytes import Damage, Judged
from danube.wal.verify.walk import Segment

EXIT_CLEAN: Final = 0
EXIT_PARTIAL: Final = 9
EXIT_FINDINGS: Final = 10
EXIT_UNCHECKED: Final = 11


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"


WARNINGS: Final = frozenset(
    {
        Damage.INDEX_ENTRY, Damage.OBJECT_ORPHAN, Damage.OBJECT_UNKNOWN, Damage.CURSOR_DAMAGED,
        Damage.PAYLOAD_INVALID, Damage.SCHEMA_UNKNOWN, Damage.FINDINGS_LEFT_OUT, Damage.MARK_DAMAGED,
    }
)  # fmt: skip


class Finding(msgspec.Struct, frozen=True, array_like=True):
    """One thing that is wrong.  ``byte`` is a position in ``file``, ``offset`` a record's; -1: none."""

    file: str
    byte: int
    offset: int
    kind: str
    detail: str
    severity: str


def finding(kind: Damage, file: str, detail: str, byte: int = -1, offset: int = -1) -> Finding:
    """A finding with the severity of its kind."""
    severity = Severity.WARNING if kind in WARNINGS else Severity.ERROR
    return Finding(file, byte, offset, kind.value, detail, severity.value)


def findings_in(judged: Judged) -> list[Finding]:
    """Findings of the independent reader, as a report has them."""
    found: list[Finding] = []
    for one in judged.findings:
        offset = one.start if one.start != one.end else -1
        found.append(finding(Damage(one.fault), one.where, one.what, one.position, offset))
    return found


class Report(msgspec.Struct, kw_only=True):
    """Report of a job.  ``counts`` are plain numbers by name; ``remarks`` are for people and no fault.

    ``partial``: a part of the request was left undone, and the counts say how much.
    """

    job: str
    findings: list[Finding] = msgspec.field(default_factory=list)
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    remarks: list[str] = msgspec.field(default_factory=list)
    facts: dict[str, Any] = msgspec.field(default_factory=dict)
    seconds: float = 0.0
    fail_on: str = Severity.WARNING.value
    partial: bool = False

    def count(self, name: str, number: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + number

    @property
    def by_kind(self) -> dict[str, int]:
        return dict(sorted(Counter(one.kind for one in self.findings).items()))

    @property
    def exit_code(self) -> int:
        """0: nothing at or above ``fail_on``; 9: ``partial``; 10: findings; 11: not all could be read."""
        errors = [one for one in self.findings if one.severity == Severity.ERROR]
        counted = errors if self.fail_on == Severity.ERROR else self.findings
        if any(one.kind != Damage.UNREADABLE for one in counted):
            return EXIT_FINDINGS
        if counted:
            return EXIT_UNCHECKED
        return EXIT_PARTIAL if self.partial else EXIT_CLEAN

    def to_json(self) -> bytes:
        """The report as JSON, indented; findings as objects with named fields."""
        told = msgspec.structs.asdict(self) | {
            "findings": [msgspec.structs.asdict(one) for one in self.findings],
            "exit_code": self.exit_code,
            "by_kind": self.by_kind,
        }
        return msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n"


class Expected(msgspec.Struct, frozen=True, array_like=True):
    """Facts of a segment that are known before it is read.

    ``where``: the path of a file, or the key of an object.  ``synced``: bytes below it were on disk once, so
    they cannot be an unfinished write.
    """

    where: str
    topic_id: int
    partition: int
    base_offset: int
    sealed: bool = False
    synced: int = 0
    size: int = 0


class SegmentFacts(Segment, array_like=True, kw_only=True):
    """Content of a segment, for comparisons with its neighbours and with the manifest.

    ``sequences``: producer id, epoch, first sequence, next sequence, offset of the first record.
    ``schemas``: schema id, version (0: none), position, offset at which it is named first.
    """

    gone: bool = False
    sequences: list[tuple[int, int, int, int, int]] = msgspec.field(default_factory=list)
    schemas: list[tuple[int, int, int, int]] = msgspec.field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        """Faults of the segment by itself."""
        judged = Judged()
        judged.add(self.where, self.faults)
        return findings_in(judged)
