"""One walk over the batches of a segment, on behind damage, while its content is hashed.

`danube verify` and Spark's validation both read segments by it.  Batches are examined piece by piece and come
as tables of numbers.  The examiner here knows ``docs/formats/batch.md`` and nothing else of the product;
Spark brings one that also judges columns, in machine code.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from danube.core.batch.checksum import content_hasher, crc32c
from danube.limits import MIB
from danube.wal.verify.bytes import Damage, FindingKind, Problem, Source

PROBLEMS_MAX: Final = 1_000  # told of one segment
COMPACTED: Final = 2  # flag in the footer
CHAINED: Final = 4  # flag in the footer
HEADER_BYTES: Final = 64  # of a segment
ROWS_MAX: Final = 4_096
WORDS: Final = 14
_BATCH_HEADER: Final = 104
_BATCH_MAX: Final = 12 * MIB
_RECORDS_MAX: Final = 65_536
_SELECTED: Final = 1 << 8
_MAGIC: Final = b"DNB1"
_STAMPED: Final = struct.Struct("<4sIQqIII")
_HEADER: Final = struct.Struct("<4sIQqIIIHHIIqqqqI20x")
_ROOM_BYTES: Final = _BATCH_MAX + 16 * MIB  # and two pieces

Octets = NDArray[np.uint8]
Mask = NDArray[np.bool_]
_KIND_OF: Final = {  # all others: CHECKSUM
    Damage.SEGMENT_VERSION: FindingKind.VERSION,
    Damage.WRONG_PARTITION: FindingKind.IDENTITY,
    Damage.WRONG_NAME: FindingKind.IDENTITY,
    Damage.EPOCH_ORDER: FindingKind.IDENTITY,
    Damage.FOOTER_DIFFERS: FindingKind.DISAGREEMENT,
    Damage.INDEX_ENTRY: FindingKind.DISAGREEMENT,
    Damage.OFFSETS_MISSING: FindingKind.GAP,
    Damage.OFFSETS_REPEATED: FindingKind.OVERLAP,
}


class Segment(msgspec.Struct):
    """Content of one file or object, as its bytes alone show it.

    ``tail``: bytes behind the last batch of an unsealed one.  ``log_id``: zeros if it does not say which log
    it is of.  ``begun_seal``: whole sectors of its damaged footer are missing.  That is no fault where a
    power cut can have left it: in a data directory, when no later segment is sealed.  ``claimed_end``: which
    the whole summary of such a footer names.  ``where``: the file's path or the object's key.
    """

    base_offset: int
    size: int = 0
    end_offset: int = 0
    sealed: bool = False
    has_header: bool = False
    topic_id: int = 0
    partition: int = 0
    epoch: int = 0
    first_epoch: int = -1  # of the header, if it has one
    created_us: int = 0
    log_id: bytes = bytes(16)
    data_end: int = 0
    record_count: int = 0
    batch_count: int = 0
    first_append_us: int = 0
    last_append_us: int = 0
    flags: int = 0
    index_count: int = 0
    snapshot_size: int = 0
    content_hash: bytes = bytes(16)
    previous_hash: bytes = bytes(16)
    chain_hash: bytes = bytes(16)
    begun_seal: bool = False
    claimed_end: int = 0
    tail: tuple[int, int] | None = None
    gaps: list[tuple[int, int]] = msgspec.field(default_factory=list)
    problems: list[Problem] = msgspec.field(default_factory=list)
    left_out: int = 0  # problems that are too many
    where: str = ""

    @property
    def compacted(self) -> bool:
        return bool(self.flags & COMPACTED)

    @property
    def faults(self) -> list[Problem]:
        """Its problems, and how many more there were."""
        if not self.left_out:
            return self.problems
        what = f"{self.left_out} more findings are not listed"
        return [*self.problems, Problem(FindingKind.CHECKSUM, what, -1, fault=Damage.FINDINGS_LEFT_OUT)]

    @property
    def chained(self) -> bool:
        """Made from several segments, so that its chain hash is another than its content hash."""
        return bool(self.flags & CHAINED)

    def note(
        self, fault: Damage, what: str, position: int = -1, start: int = -1, end: int = -1,
        kind: FindingKind | None = None,
    ) -> None:  # fmt: skip
        if len(self.problems) < PROBLEMS_MAX:
            kind = kind or _KIND_OF.get(fault, FindingKind.CHECKSUM)
            self.problems.append(Problem(kind, what, position, start, end, fault))
        else:
            self.left_out += 1

    def note_missing(self, start: int, end: int, what: str, position: int) -> None:
        self.gaps.append((start, end))
        self.note(Damage.OFFSETS_MISSING, what, position, start, end)

    def shows(self, *faults: Damage) -> bool:
        """Whether one of these was noted."""
        return any(problem.fault in faults for problem in self.problems)


class Verdict(IntEnum):
    """Fault of a batch whose header is intact."""

    FINE = 0
    BODY = 1
    SHAPE = 2
    PAYLOADS = 3
    KEYS = 4
    ATTRIBUTES = 5
    DELTAS = 6


class Stop(IntEnum):
    END = 0
    CUT = 1
    BAD_HEADER = 2


class Rows(NamedTuple):
    """int64[n] each; ``end_offset`` is behind the last record, also where records are left out."""

    position: NDArray[np.int64]
    size: NDArray[np.int64]
    base_offset: NDArray[np.int64]
    end_offset: NDArray[np.int64]
    record_count: NDArray[np.int64]
    append_time_us: NDArray[np.int64]
    epoch: NDArray[np.int64]
    flags: NDArray[np.int64]
    producer_id: NDArray[np.int64]
    producer_epoch: NDArray[np.int64]
    base_sequence: NDArray[np.int64]
    schema_id: NDArray[np.int64]
    schema_version: NDArray[np.int64]
    verdict: NDArray[np.int64]

    @property
    def selected(self) -> Mask:
        """Batches of which records were left out."""
        return np.asarray(self.flags & _SELECTED, np.bool_)


class Examined(NamedTuple):
    """The batches up to ``stop``; END before the end of the bytes when there were too many for one call."""

    rows: Rows
    stop: int
    reason: Stop


class Examiner(NamedTuple):
    """``examine(data, start, end)`` judges batches; ``find(data, start, end, least_offset)`` seeks one."""

    examine: Callable[[Octets, int, int], Examined]
    find: Callable[[Octets, int, int, int], int]


Judge = Callable[[bytes, int], tuple[Verdict, int]]
OnRows = Callable[[Octets, int, Rows], None]
"""Called with believed batches: the bytes that they lie in, the position of those in the source, and rows
with positions in the bytes."""


def _shape(_: bytes, count: int) -> tuple[Verdict, int]:
    return (Verdict.FINE if 0 < count <= _RECORDS_MAX else Verdict.BODY), count


def examine(data: Octets, start: int, end: int, judge: Judge = _shape) -> Examined:
    """Judge the batches in ``data[start:end]``; ``judge`` gets one whose checksums hold, and its count.

    It returns the verdict, and how many offsets the batch spans.
    """
    content = data[start:end].tobytes()
    rows: list[tuple[int, ...]] = []
    place, reason = 0, Stop.END
    while place < len(content) and len(rows) < ROWS_MAX:
        if len(content) - place < _BATCH_HEADER:
            reason = Stop.CUT
            break
        if not _header_intact(content, place):
            reason = Stop.BAD_HEADER
            break
        (
            _, size, base, time_us, epoch, body_crc, _, flags, _, count, version,
            schema_id, producer, sequence, _, producer_epoch,
        ) = _HEADER.unpack_from(content, place)  # fmt: skip
        if size > len(content) - place:
            reason = Stop.CUT
            break
        batch = content[place : place + size]
        verdict, span = judge(batch, count) if crc32c(batch[36:]) == body_crc else (Verdict.BODY, count)
        rows.append(
            (start + place, size, base, base + span, count, time_us, epoch, flags, producer, producer_epoch,
             sequence, schema_id, version, verdict)
        )  # fmt: skip
        place += size
    table = np.array(rows, np.int64).reshape(-1, WORDS)
    return Examined(Rows._make(table.T), start + place, reason)


def _header_intact(content: bytes, place: int) -> bool:
    magic, size, base, _, _, _, header_crc = _STAMPED.unpack_from(content, place)
    if magic != _MAGIC or size & 7 or not _BATCH_HEADER <= size <= _BATCH_MAX or base >> 63:
        return False
    return bool(crc32c(content[place : place + 32]) == header_crc)


def find(data: Octets, start: int, end: int, least_offset: int) -> int:
    """Position of the next intact header at or above ``least_offset``, in steps of 8; -1 where none is."""
    content = data[start:end].tobytes()
    place = content.find(_MAGIC)
    while 0 <= place <= len(content) - _BATCH_HEADER:
        intact = place & 7 == 0 and _header_intact(content, place)
        if intact and struct.unpack_from("<Q", content, place + 8)[0] >= least_offset:
            return start + place
        place = content.find(_MAGIC, place + 1)
    return -1


PLAIN: Final = Examiner(examine, find)
_rooms: list[Octets] = []


class Window:
    """A source read once from its start.  ``data[start:fill]`` are the bytes at ``position`` and behind.

    What lies below ``hash_end`` is hashed while it is read.  Windows that follow each other share their room.
    """

    def __init__(self, source: Source, limit: int, hash_end: int) -> None:
        self._source = source
        self._limit = limit
        self._hash_end = hash_end
        self._hasher = content_hasher()
        try:
            self.data = _rooms.pop()
        except IndexError:
            self.data = np.empty(_ROOM_BYTES, np.uint8)
        self._view: memoryview = self.data.data
        self.base = 0  # of data[0] in the source
        self.start = 0
        self.fill = 0

    @property
    def position(self) -> int:
        return self.base + self.start

    def more(self) -> bool:
        """Read the next piece behind ``fill``; False at the limit.  Moves what is kept to the front."""
        read_end = self.base + self.fill
        wanted = min(self._source.piece_bytes, self._limit - read_end)
        if wanted <= 0:
            return False
        if self.start:
            kept = self.fill - self.start
            self.data[:kept] = self.data[self.start : self.fill]
            self.base, self.start, self.fill = self.base + self.start, 0, kept
        target = self._view[self.fill : self.fill + wanted]
        taken = self._source.read_into(target, read_end)
        if taken <= 0:
            self._limit = read_end
            return False
        if read_end < self._hash_end:
            self._hasher.update(target[: min(taken, self._hash_end - read_end)])
        self.fill += taken
        return True

    def digest(self) -> bytes:
        """Hash of the bytes below ``hash_end``, which were all read."""
        return bytes(self._hasher.digest())

    def close(self) -> None:
        if not _rooms:
            _rooms.append(self.data)


_WHAT: Final = {
    Verdict.BODY: (Damage.BATCH_BODY, "no batch can be read: its body fails its checksum"),
    Verdict.SHAPE: (Damage.BATCH_SHAPE, "the batch's sizes contradict each other"),
    Verdict.PAYLOADS: (Damage.BATCH_COLUMNS, "the offsets of its payloads go astray"),
    Verdict.KEYS: (Damage.BATCH_COLUMNS, "its key column is malformed"),
    Verdict.ATTRIBUTES: (Damage.BATCH_COLUMNS, "its attribute column is malformed"),
    Verdict.DELTAS: (Damage.BATCH_COLUMNS, "the offsets of its selected records do not ascend"),
}


class Walk:
    """All batches of a segment up to its ``data_end``, one piece after the other.

    ``entries``: of its index, int64[n, 3]: base offset, position, append time; ``matched``: those that lead
    to a batch.  ``synced``: bytes below it were on disk once, so they cannot be an unfinished write.
    """

    def __init__(
        self, segment: Segment, source: Source, entries: NDArray[np.int64], *,
        synced: int, examiner: Examiner, on_rows: OnRows | None,
    ) -> None:  # fmt: skip
        self.segment = segment
        self.matched = np.zeros(len(entries), np.bool_)
        self._entries = entries
        self.intact_end = min(HEADER_BYTES, source.size)
        self.digest = b""
        self.damaged: list[tuple[int, int]] = []
        self._source = source
        self._synced = synced
        self._examiner = examiner
        self._on_rows = on_rows
        self._unsure = False  # records behind the last sound batch are lost already
        self._gaps_known: set[int] = set()  # positions behind damaged batches
        self._doubt: tuple[int, int, int] | None = None  # start, end, problems before: nothing sound follows

    def run(self, *, hashed: bool) -> None:
        """Walk to the end; leaves the window to the next segment."""
        window = Window(self._source, self.segment.data_end, self.segment.data_end if hashed else 0)
        try:
            if window.more() and window.fill >= HEADER_BYTES:
                window.start = HEADER_BYTES
                self._run(window)
            self.digest = window.digest()
        finally:
            window.close()
        self._forgive()

    def _forgive(self) -> None:
        """Forgive an unfinished write: the end of an unsealed segment that was never synced."""
        segment = self.segment
        if self._doubt is None or segment.sealed or self._doubt[0] < self._synced:
            return
        start, end, count = self._doubt
        del segment.problems[count:]
        segment.tail = (start, end if segment.tail is None else max(end, segment.tail[1]))

    def _run(self, window: Window) -> None:
        while True:
            examined = self._examiner.examine(window.data, window.start, window.fill)
            if len(examined.rows.position):
                self._take(window, examined.rows)
            window.start = examined.stop
            if examined.reason is Stop.END and examined.stop < window.fill:
                continue
            if examined.reason in (Stop.END, Stop.CUT):
                if window.more():
                    continue
                if examined.reason is Stop.END or not self._search(window, cut=True):
                    return
            elif not self._search(window, cut=False):
                return

    def _take(self, window: Window, rows: Rows) -> None:
        if (rows.verdict == Verdict.FINE).all():
            self._doubt = None
        else:
            rows = self._judge(window.base, rows)
        if not len(rows.position):
            return
        placed = rows._replace(position=rows.position + window.base)
        self._check_offsets(placed)
        self._match(placed)
        self._count(placed)
        if self._on_rows is not None:
            self._on_rows(window.data, window.base, rows)
        self.intact_end = int(placed.position[-1] + placed.size[-1])

    def _judge(self, base: int, rows: Rows) -> Rows:
        """Name damaged batches; return those whose record count can be believed."""
        believed = rows.verdict != Verdict.BODY
        last_believed = int(np.flatnonzero(believed)[-1]) if believed.any() else -1
        if last_believed >= 0:
            self._doubt = None
        for place in np.flatnonzero(rows.verdict).tolist():
            fault, what = _WHAT[Verdict(int(rows.verdict[place]))]
            position, offset = base + int(rows.position[place]), int(rows.base_offset[place])
            end = position + int(rows.size[place])
            if place > last_believed:
                begun = self._doubt or (position, end, len(self.segment.problems))
                self._doubt = (begun[0], end, begun[2])
                self._unsure = True
            self.segment.note(fault, what, position, offset)
            self.damaged.append((position, end))
        lost = np.flatnonzero(~believed)
        self._gaps_known = set((base + rows.position[lost] + rows.size[lost]).tolist())
        return Rows._make(column[believed] for column in rows)

    def _check_offsets(self, rows: Rows) -> None:
        """Offsets go on where the batches before ended."""
        segment, bases, ends = self.segment, rows.base_offset, rows.end_offset
        before = np.concatenate(([segment.end_offset], np.maximum.accumulate(ends)[:-1]))
        before = np.maximum(before, segment.end_offset)
        for place in np.flatnonzero(bases != before).tolist():
            self._note_offsets(int(rows.position[place]), int(bases[place]), int(before[place]), place == 0)
        self._unsure = False
        segment.end_offset = max(segment.end_offset, int(ends.max()))

    def _note_offsets(self, position: int, base: int, before: int, first: bool) -> None:
        segment = self.segment
        if base < before:
            what = f"offsets {base} to {before} were there before"
            segment.note(Damage.OFFSETS_REPEATED, what, position, base, before)
        elif not segment.compacted:
            known = position in self._gaps_known or (first and self._unsure)
            where = "were in the damaged batches before this place" if known else "are missing"
            segment.note_missing(before, base, f"offsets {before} to {base} {where}", position)

    def _match(self, rows: Rows) -> None:
        """Tick off the index entries that lead to these batches."""
        if not len(self._entries):
            return
        places = np.searchsorted(self._entries[:, 1], rows.position)
        places = np.minimum(places, len(self._entries) - 1)
        found = self._entries[places]
        same = (found[:, 0] == rows.base_offset) & (found[:, 1] == rows.position)
        self.matched[places[same & (found[:, 2] == rows.append_time_us)]] = True

    def _count(self, rows: Rows) -> None:
        segment = self.segment
        if not segment.batch_count:
            segment.first_append_us = int(rows.append_time_us[0])
        segment.last_append_us = int(rows.append_time_us[-1])
        segment.batch_count += len(rows.position)
        segment.record_count += int(rows.record_count.sum())
        if segment.compacted:
            return
        for place in np.flatnonzero(rows.selected).tolist():
            what = "a selection of records lies in a segment that is not compacted"
            position, base = int(rows.position[place]), int(rows.base_offset[place])
            segment.note(Damage.SELECTION_MISPLACED, what, position, base, int(rows.end_offset[place]))

    def _search(self, window: Window, *, cut: bool) -> bool:
        """Go to the next intact header behind the window's start; False when there is none."""
        begin = dirty = window.position
        window_start = window.start + 8
        while True:
            found = self._examiner.find(window.data, window_start, window.fill, self.segment.end_offset)
            stop = found if found >= 0 else window.fill
            used = np.flatnonzero(window.data[window.start : stop])
            if len(used):
                dirty = window.position + int(used[-1]) + 1
            if found >= 0:
                self._note_damaged(begin, window.base + found)
                window.start = found
                self._unsure = True
                return True
            window.start = max(window.start, window.fill - ((window.fill - window.start) & 7) - 128)
            window_start = window.start
            if not window.more():
                break
            window_start = window.start
        self._ended(begin, dirty, cut)
        return False

    def _note_damaged(self, begin: int, end: int) -> None:
        self.damaged.append((begin, end))
        what = f"no batch can be read from position {begin} to {end}"
        self.segment.note(Damage.BATCH_HEADER, what, begin, self.segment.end_offset)

    def _ended(self, begin: int, dirty: int, cut: bool) -> None:
        """Judge the last bytes, from ``begin`` to ``dirty``: not zero, and without an intact batch."""
        segment = self.segment
        if dirty <= begin and not segment.sealed:
            return
        end = segment.data_end if segment.sealed else dirty
        if not segment.sealed and segment.shows(Damage.FOOTER_DAMAGED):
            return  # the footer lies there
        if not segment.sealed and begin >= self._synced:
            self.damaged.append((begin, end))
            segment.tail = (begin, end)
        elif cut:
            self.damaged.append((begin, end))
            what = f"the batch at position {begin} is longer than what is left"
            segment.note(Damage.BATCH_CUT, what, begin, segment.end_offset)
        else:
            self._note_damaged(begin, end)
