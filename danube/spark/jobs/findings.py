"""Findings of validation: kinds of damage, rows, and the report.

A finding names file (or key), byte and offset.  *Errors* mean that records are lost, wrong or in doubt.
*Warnings* mean that something is there which should not be, and that no record suffers from it.

Facts of a segment before and after it is validated are here as well.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import msgspec

from danube.wal.segments.segment import NO_LOG

EXIT_CLEAN: Final = 0
EXIT_PARTIAL: Final = 9
EXIT_FINDINGS: Final = 10
EXIT_UNCHECKED: Final = 11
FINDINGS_PER_FILE_MAX: Final = 1_000


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"


class Damage(StrEnum):
    """The kinds, in the order of the parts that they are found in."""

    SEGMENT_HEADER = "segment_header"  # missing, or fails its checksum
    SEGMENT_VERSION = "segment_version"  # of a newer Danube: not judged
    WRONG_PARTITION = "wrong_partition"  # a file of another partition
    WRONG_NAME = "wrong_name"  # a file under another segment's name
    FOOTER_DAMAGED = "footer_damaged"
    FOOTER_MISSING = "footer_missing"  # a segment that must be sealed is not
    FOOTER_DIFFERS = "footer_differs"  # it says other numbers than the batches show
    CONTENT_HASH = "content_hash"
    INDEX_ENTRY = "index_entry"  # of the sparse index: leads to no batch
    PRODUCER_SNAPSHOT = "producer_snapshot"
    BATCH_HEADER = "batch_header"  # no batch can be read here
    BATCH_BODY = "batch_body"
    BATCH_SHAPE = "batch_shape"  # checksums hold, its sizes contradict each other
    BATCH_COLUMNS = "batch_columns"  # offsets of a column go astray
    BATCH_CUT = "batch_cut"
    BATCH_COMPRESSION = "batch_compression"  # its columns do not inflate
    SELECTION_MISPLACED = "selection_misplaced"  # a selection in a segment that is not compacted
    OFFSETS_MISSING = "offsets_missing"
    OFFSETS_REPEATED = "offsets_repeated"
    EPOCH_ORDER = "epoch_order"
    TIME_ORDER = "time_order"
    CHAIN = "chain"  # the hash of the segment before is another one
    SEQUENCE_REPEATED = "sequence_repeated"  # a producer's record is stored twice
    SYNCED_LOST = "synced_lost"  # bytes or records below the sync mark are not there
    MARK_DAMAGED = "mark_damaged"
    HOLES_DAMAGED = "holes_damaged"
    CURSOR_DAMAGED = "cursor_damaged"
    CURSOR_BEYOND_END = "cursor_beyond_end"
    MANIFEST_DAMAGED = "manifest_damaged"
    MANIFEST_REGRESSED = "manifest_regressed"  # a later generation names less
    MANIFEST_DIFFERS = "manifest_differs"  # it says other things of an object than the object shows
    OBJECT_MISSING = "object_missing"
    OBJECT_SIZE = "object_size"
    OBJECT_ORPHAN = "object_orphan"  # no manifest names it, and it is older than a day
    OBJECT_UNKNOWN = "object_unknown"  # not one of Danube's names
    COPIES_DIFFER = "copies_differ"  # local file and object hold other batches
    METADATA_DAMAGED = "metadata_damaged"
    STORE_IDENTITY = "store_identity"  # store.json cannot be read
    SCHEMA_UNKNOWN = "schema_unknown"  # a record names a schema that the registry does not have
    PAYLOAD_INVALID = "payload_invalid"  # breaks the schema that it names
    UNREADABLE = "unreadable"  # the disk or the store did not answer
    FINDINGS_LEFT_OUT = "findings_left_out"  # more of them in this file than are listed


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
        numbers: dict[str, int] = {}
        for one in self.findings:
            numbers[one.kind] = numbers.get(one.kind, 0) + 1
        return dict(sorted(numbers.items()))

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
        fields = msgspec.structs.asdict(self)
        rows = [dict(zip(Finding.__struct_fields__, msgspec.to_builtins(one), strict=True))
                for one in self.findings]  # fmt: skip
        summary = {"exit_code": self.exit_code, "by_kind": self.by_kind}
        return (
            msgspec.json.format(msgspec.json.encode({**fields, "findings": rows, **summary}), indent=2)
            + b"\n"
        )


class Expected(msgspec.Struct, frozen=True, array_like=True):
    """Facts of a segment that are known before it is read.

    ``synced``: bytes below it were on disk once, so they cannot be an unfinished write.  ``log_id``: of
    danube.wal.segments.segment, zeros if it is not known.
    """

    where: str
    topic_id: int
    partition: int
    base_offset: int
    sealed: bool = False
    synced: int = 0
    log_id: bytes = NO_LOG


class SegmentFacts(msgspec.Struct, array_like=True):
    """Content of a segment, for comparisons with its neighbours and with the manifest.

    ``sequences``: producer id, epoch, first sequence, next sequence, offset of the first record.
    ``schemas``: schema id, version (0: none), position, offset at which it is named first.
    """

    where: str
    base_offset: int
    end_offset: int
    size: int = 0
    data_end: int = 0
    sealed: bool = False
    compacted: bool = False
    chained: bool = False
    topic_id: int = -1
    partition: int = -1
    epoch: int = -1
    first_epoch: int = -1
    record_count: int = 0
    batch_count: int = 0
    first_append_us: int = 0
    last_append_us: int = 0
    content_hash: bytes = b""
    previous_hash: bytes = b""
    chain_hash: bytes = b""
    tail: tuple[int, int] | None = None
    gone: bool = False
    begun_seal: bool = False  # the footer is damaged as a power cut leaves it
    sequences: list[tuple[int, int, int, int, int]] = msgspec.field(default_factory=list)
    schemas: list[tuple[int, int, int, int]] = msgspec.field(default_factory=list)
    findings: list[Finding] = msgspec.field(default_factory=list)
    left_out: int = 0

    def note(self, kind: Damage, detail: str, byte: int = -1, offset: int = -1) -> None:
        if len(self.findings) >= FINDINGS_PER_FILE_MAX:
            self.left_out += 1
            return
        self.findings.append(finding(kind, self.where, detail, byte, offset))
