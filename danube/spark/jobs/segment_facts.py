"""What is known of a segment before it is validated, and what is known of it afterwards."""

from __future__ import annotations

import msgspec

from danube.spark.jobs.findings import FINDINGS_PER_FILE_MAX, Damage, Finding, finding
from danube.wal.segments.segment import NO_LOG


class Expected(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a segment before it is read.

    ``synced``: bytes below it were on disk once, so they cannot be an unfinished write.  ``log_id``: of
    danube.wal.segments.segment, zeros where it is not known.
    """

    where: str
    topic_id: int
    partition: int
    base_offset: int
    sealed: bool = False
    synced: int = 0
    log_id: bytes = NO_LOG


class SegmentFacts(msgspec.Struct, array_like=True):
    """What a segment holds, for comparisons with its neighbours and with the manifest.

    ``sequences``: producer id, epoch, first sequence, next sequence, offset of the first record.
    ``schemas``: schema id, version (0: none), position, offset where it is named first.
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
