"""Bytes to be verified: a file or an object, read in order with little memory, and findings about them.

Part of the independent reader: knows the layouts in ``docs/formats`` and shares no code with what
writes logs, manifests and objects.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from danube.errors import StorageFailed
from danube.limits import MIB

_ZEROS_KEPT: Final = 8 * MIB  # more than any entry that ends in zeros


class FindingKind(StrEnum):
    """Kind of a fault, in one word."""

    GAP = "gap"  # offsets that no intact batch holds
    OVERLAP = "overlap"  # offsets that are held twice
    CHECKSUM = "checksum"  # bytes differ from their checksum or hash, or from the format
    TRUNCATED = "truncated"  # shorter than its header states
    IDENTITY = "identity"  # of another partition, under another name, or of another epoch
    CHAIN = "chain"  # the hash of the segment before differs
    MISSING = "missing"  # named and not there
    ORPHAN = "orphan"  # there and not named
    DISAGREEMENT = "disagreement"  # two copies, or a copy and its description, differ
    VERSION = "version"  # of a newer Danube: not judged


class Damage(StrEnum):
    """Kind of a fault, exactly, in the order of the parts that it is found in."""

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


class Problem(NamedTuple):
    """One fault of a file: ``start .. end`` are offsets, equal where none are meant.

    ``fault``: exactly, where a segment has it.
    """

    kind: FindingKind
    what: str
    position: int
    start: int = 0
    end: int = 0
    fault: str = ""


@dataclass(kw_only=True)
class Content:
    """Content of a small file, as far as it can be read, and its faults."""

    problems: list[Problem] = field(default_factory=list)

    def note(self, kind: FindingKind, what: str, position: int, start: int = 0, end: int = 0) -> None:
        self.problems.append(Problem(kind, what, position, start, end))


class Finding(NamedTuple):
    """One thing that is wrong: ``where`` is a file or key, ``position`` a byte in it (-1: all of it).

    ``start .. end`` are the offsets that it is about; equal where it is about none.  ``fault``: exactly, of
    what Spark's validation judges too.
    """

    kind: FindingKind
    where: str
    what: str
    position: int = -1
    start: int = 0
    end: int = 0
    fault: str = ""


@dataclass(kw_only=True)
class Judged:
    """Findings about some files or objects.  ``remarks`` are for people and no fault."""

    findings: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def note(
        self, kind: FindingKind, where: Path | str, what: str, position: int = -1, start: int = 0,
        end: int = 0, fault: str = "",
    ) -> None:  # fmt: skip
        self.findings.append(Finding(kind, str(where), what, position, start, end, fault))

    def add(self, where: Path | str, problems: Iterable[Problem], fault: str = "") -> None:
        """Note the problems of a file; ``fault`` of those that name none."""
        for one in problems:
            self.findings.append(Finding(one.kind, str(where), *one[1:5], one.fault or fault))


def outside(holes: Iterable[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """The parts of ``start .. end`` that lie in no hole; ``holes`` by offset."""
    found: list[tuple[int, int]] = []
    for first, last in holes:
        if start < first < end:
            found.append((start, first))
        if first < end and last > start:
            start = last
    return [*found, (start, end)] if start < end else found


class Source(Protocol):
    """Something with bytes; a read gives fewer than asked for only at the end.

    ``piece_bytes`` is a good size of one read for a reader of everything.
    """

    @property
    def size(self) -> int: ...
    @property
    def piece_bytes(self) -> int: ...

    def read(self, position: int, size: int) -> bytes: ...
    def read_into(self, target: memoryview, position: int) -> int: ...


class BytesSource:
    """Bytes at hand."""

    def __init__(self, data: bytes, piece_bytes: int = MIB) -> None:
        self._data = data
        self.size, self.piece_bytes = len(data), piece_bytes

    def read(self, position: int, size: int) -> bytes:
        return self._data[position : position + size]

    def read_into(self, target: memoryview, position: int) -> int:
        part = self.read(position, len(target))
        target[: len(part)] = part
        return len(part)


class FileSource:
    """A file as long as it was when it was opened; close it.  FileNotFoundError if there is none.

    It is read and not mapped: a broker cuts the file that it writes, and a mapping would end the process.
    """

    piece_bytes: Final = MIB

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def read(self, position: int, size: int) -> bytes:
        data = memoryview(bytearray(max(0, min(size, self.size - position))))
        return data[: self.read_into(data, position)].tobytes()

    def read_into(self, target: memoryview, position: int) -> int:
        taken, wanted = 0, min(len(target), self.size - position)
        try:
            while taken < wanted:
                part = os.preadv(self._fd, [target[taken:wanted]], position + taken)
                if not part:
                    break
                taken += part
        except OSError as error:
            why = error.strerror or str(error)
            raise StorageFailed(f"{self._path} cannot be read", why=why, position=position) from error
        return taken

    def read_front(self, size_max: int) -> bytes:
        """At most ``size_max`` bytes; of the zeros at the end only _ZEROS_KEPT, which need no memory so."""
        data = bytearray()
        position, size = 0, min(self.size, size_max)
        while position < size:
            window = self.read(position, min(_ZEROS_KEPT, size - position))
            if not window:
                break
            if window.count(0) != len(window):
                data += bytes(position - len(data)) + window
            position += len(window)
        return bytes(data) + bytes(min(max(position - len(data), 0), _ZEROS_KEPT))

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> FileSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
