"""Walking all batches of a segment, on behind damage, while its content is hashed.

Sequences of idempotent producers in stored batches: none may be stored twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from danube.core.batch.format import Flag
from danube.core.partition.dedup import ProducerTable
from danube.errors import Damage as DamageError
from danube.errors import StorageIncompatible
from danube.spark.jobs.findings import Damage, Expected, SegmentFacts
from danube.spark.jobs.validate.bytes import Window
from danube.spark.jobs.validate.rows import Rows, Stop, Verdict, examine, find
from danube.wal.segments.segment import HEADER_BYTES, Summary
from danube.wal.verify.bytes import Source

_SNAPSHOT_MAGIC: Final = b"DND"

Range = tuple[int, int, int, int, int]  # producer id, epoch, first sequence, next sequence, first offset


class Sequences:
    """Sequences that the producers of one segment gave, in the order of offsets."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], list[int]] = {}  # first, next, first offset

    def add(self, rows: Rows) -> list[tuple[int, str]]:
        """Take more batches; the places of those that repeat a sequence, and what they repeat."""
        numbered = np.flatnonzero(rows.producer_id)
        if not len(numbered):
            return []
        ids, epochs = rows.producer_id[numbered], rows.producer_epoch[numbered]
        firsts = rows.base_sequence[numbered]
        nexts = firsts + (rows.end_offset - rows.base_offset)[numbered]
        order = np.lexsort((np.arange(len(ids)), epochs, ids))
        changes = np.flatnonzero(np.diff(ids[order]) | np.diff(epochs[order])) + 1
        repeats: list[tuple[int, str]] = []
        for group in np.split(order, changes):
            key = int(ids[group[0]]), int(epochs[group[0]])
            offset = int(rows.base_offset[numbered[group[0]]])
            known = self._known.setdefault(key, [int(firsts[group[0]]), int(firsts[group[0]]), offset])
            reached = np.maximum.accumulate(np.concatenate(([known[1]], nexts[group])))
            for place in np.flatnonzero(firsts[group] < reached[:-1]).tolist():
                detail = _repeated(*key, int(firsts[group[place]]), int(reached[place]))
                repeats.append((int(numbered[group[place]]), detail))
            known[1] = int(reached[-1])
        return sorted(repeats)

    def ranges(self) -> list[Range]:
        return [(*key, known[0], known[1], known[2]) for key, known in self._known.items()]


def _repeated(producer_id: int, epoch: int, first: int, reached: int) -> str:
    return (
        f"producer {producer_id:x} (epoch {epoch}) stored sequence {first} again, "
        f"after it had come to {reached}"
    )


def repeats_between(segments: Iterable[tuple[str, list[Range]]]) -> list[tuple[str, int, str]]:
    """File, offset and detail where a segment repeats what earlier ones, in the order of offsets, hold."""
    reached: dict[tuple[int, int], int] = {}
    found: list[tuple[str, int, str]] = []
    for where, ranges in segments:
        for producer_id, epoch, first, following, offset in ranges:
            before = reached.get((producer_id, epoch), first)
            if first < before:
                found.append((where, offset, _repeated(producer_id, epoch, first, before)))
            reached[producer_id, epoch] = max(before, following)
    return found


def check_snapshot(snapshot: bytes, end_offset: int) -> str:
    """Return the fault of a footer's producer snapshot; empty for a sound one or an unknown kind."""
    if not snapshot.startswith(_SNAPSHOT_MAGIC):
        return ""
    try:
        known_end, _ = ProducerTable().restore(snapshot)
    except (DamageError, StorageIncompatible) as error:
        return error.what
    except Exception as error:  # counts that lie, although the checksum holds
        return f"producer snapshot is malformed: {error}"
    if known_end > end_offset:
        return f"the producer snapshot knows offsets up to {known_end}, behind the segment's end"
    return ""


_SELECTED: Final = int(Flag.SELECTED)
_SCHEMA_ID: Final = int(Flag.SCHEMA_ID)
_WHAT: Final = {
    Verdict.BODY: (Damage.BATCH_BODY, "the batch's body fails its checksum"),
    Verdict.SHAPE: (Damage.BATCH_SHAPE, "the batch's sizes contradict each other"),
    Verdict.PAYLOADS: (Damage.BATCH_COLUMNS, "the offsets of its payloads go astray"),
    Verdict.KEYS: (Damage.BATCH_COLUMNS, "its key column is malformed"),
    Verdict.ATTRIBUTES: (Damage.BATCH_COLUMNS, "its attribute column is malformed"),
    Verdict.DELTAS: (Damage.BATCH_COLUMNS, "the offsets of its selected records do not ascend"),
}

Mask = NDArray[np.bool_]
OnBatch = Callable[[NDArray[np.uint8], int, int, int], None]
"""Called for sound batches: bytes, place and size in them, position in the segment."""


@dataclass
class Footer:
    """A footer whose checksums hold.  ``matched``: which index entries lead to a batch."""

    summary: Summary
    entries: NDArray[np.int64]  # int64[n, 3]: base offset, position, append time
    snapshot: bytes | None
    matched: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.matched = np.zeros(len(self.entries), np.bool_)

    def match(self, rows: Rows) -> None:
        """Tick off the index entries that lead to these batches."""
        if not len(self.entries):
            return
        places = np.searchsorted(self.entries[:, 1], rows.position)
        places = np.minimum(places, len(self.entries) - 1)
        found = self.entries[places]
        same = (found[:, 0] == rows.base_offset) & (found[:, 1] == rows.position)
        self.matched[places[same & (found[:, 2] == rows.append_time_us)]] = True


class Walk:
    """All batches of a segment, one piece after the other."""

    def __init__(
        self,
        facts: SegmentFacts,
        source: Source,
        footer: Footer | None,
        expected: Expected,
        on_batch: OnBatch | None,
    ) -> None:
        self.facts = facts
        self.sequences = Sequences()
        self.intact_end = min(HEADER_BYTES, source.size)
        self.digest = b""
        self.damaged: list[tuple[int, int]] = []
        self._source = source
        self._footer = footer
        self._synced = expected.synced
        self._on_batch = on_batch
        self._schemas: set[tuple[int, int]] = set()
        self._time_us = -(2**63)
        self._epoch = -1
        self._unsure = False  # records behind the last sound batch are lost already
        self._gaps_known: set[int] = set()  # positions behind damaged batches
        self._doubt: tuple[int, int, int] | None = None  # start, end, findings before: nothing sound follows

    def run(self) -> None:
        """Walk to the end; leaves the window to the next segment."""
        footer = self._footer
        window = Window(self._source, self.facts.data_end, footer.summary.data_end if footer else 0)
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
        facts = self.facts
        if self._doubt is None or facts.sealed or self._doubt[0] < self._synced:
            return
        start, end, count = self._doubt
        del facts.findings[count:]
        facts.tail = (start, end if facts.tail is None else max(end, facts.tail[1]))

    def _run(self, window: Window) -> None:
        while True:
            examined = examine(window.data, window.start, window.fill)
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
        offset_in_file = window.position_of(0)
        placed = rows._replace(position=rows.position + offset_in_file)
        sound = rows.verdict == Verdict.FINE
        if sound.all():
            self._doubt = None
        else:
            placed, rows, sound = self._judge(placed, rows, sound)
        self._check_order(placed)
        if self._footer is not None:
            self._footer.match(placed)
        self._count(placed)
        self._check_contents(window, rows, placed, sound)
        if len(placed.position):
            self.intact_end = int(placed.position[-1] + placed.size[-1])

    def _judge(self, placed: Rows, rows: Rows, sound: Mask) -> tuple[Rows, Rows, NDArray[np.bool_]]:
        """Name damaged batches; only those whose record count can be believed stay in the tables."""
        believed = rows.verdict != Verdict.BODY
        last_believed = int(np.flatnonzero(believed)[-1]) if believed.any() else -1
        if last_believed >= 0:
            self._doubt = None
        for place in np.flatnonzero(~sound).tolist():
            kind, what = _WHAT[Verdict(int(rows.verdict[place]))]
            position, offset = int(placed.position[place]), int(rows.base_offset[place])
            end = position + int(rows.size[place])
            if place > last_believed:
                begun = self._doubt or (position, end, len(self.facts.findings))
                self._doubt = (begun[0], end, begun[2])
                self._unsure = True
            self.facts.note(kind, what, position, offset)
            self.damaged.append((position, end))
        lost = np.flatnonzero(~believed)
        self._gaps_known = set((placed.position[lost] + rows.size[lost]).tolist())
        return (
            Rows._make(column[believed] for column in placed),
            Rows._make(column[believed] for column in rows),
            sound[believed],
        )

    def _check_order(self, rows: Rows) -> None:
        """Offsets, epochs and append times go on where the batches before ended."""
        if not len(rows.position):
            return
        facts, bases, ends = self.facts, rows.base_offset, rows.end_offset
        before = np.concatenate(([facts.end_offset], np.maximum.accumulate(ends)[:-1]))
        before = np.maximum(before, facts.end_offset)
        if not (bases == before).all():
            for place in np.flatnonzero(bases != before).tolist():
                self._note_offsets(
                    int(rows.position[place]), int(bases[place]), int(before[place]), place == 0
                )
        self._unsure = self._unsure and not len(bases)
        times = np.concatenate(([self._time_us], rows.append_time_us))
        for place in np.flatnonzero(times[1:] < times[:-1]).tolist():
            detail = f"appended at {times[place + 1]} us, before the batch in front of it ({times[place]} us)"
            facts.note(Damage.TIME_ORDER, detail, int(rows.position[place]), int(bases[place]))
        epochs = np.concatenate(([self._epoch], rows.epoch))
        for place in np.flatnonzero(epochs[1:] < epochs[:-1]).tolist():
            detail = f"epoch {epochs[place + 1]} follows epoch {epochs[place]}"
            facts.note(Damage.EPOCH_ORDER, detail, int(rows.position[place]), int(bases[place]))
        facts.end_offset = max(facts.end_offset, int(ends.max()))
        self._time_us, self._epoch = int(rows.append_time_us.max()), int(rows.epoch.max())

    def _note_offsets(self, position: int, base: int, before: int, first: bool) -> None:
        facts = self.facts
        if base < before:
            facts.note(
                Damage.OFFSETS_REPEATED, f"offsets {base} to {before} were there before", position, base
            )
        elif facts.compacted:
            return
        elif position in self._gaps_known or (first and self._unsure):
            detail = f"offsets {before} to {base} were in the damaged batches before this place"
            facts.note(Damage.OFFSETS_MISSING, detail, position, before)
        else:
            facts.note(Damage.OFFSETS_MISSING, f"offsets {before} to {base} are missing", position, before)

    def _count(self, rows: Rows) -> None:
        facts = self.facts
        if not len(rows.position):
            return
        if not facts.batch_count:
            facts.first_append_us = int(rows.append_time_us[0])
        facts.last_append_us = int(rows.append_time_us[-1])
        facts.batch_count += len(rows.position)
        facts.record_count += int(rows.record_count.sum())

    def _check_contents(self, window: Window, rows: Rows, placed: Rows, sound: Mask) -> None:
        facts = self.facts
        selected = (rows.flags & _SELECTED) != 0
        if selected.any() and not facts.compacted:
            for place in np.flatnonzero(selected).tolist():
                detail = "a selection of records lies in a segment that is not compacted"
                facts.note(Damage.SELECTION_MISPLACED, detail, int(placed.position[place]),
                           int(rows.base_offset[place]))  # fmt: skip
        for repeat in self.sequences.add(rows):
            place, detail = repeat
            facts.note(
                Damage.SEQUENCE_REPEATED, detail, int(placed.position[place]), int(rows.base_offset[place])
            )
        self._note_schemas(placed)
        if self._on_batch is not None:
            for place in np.flatnonzero(sound).tolist():
                self._on_batch(window.data, int(rows.position[place]), int(rows.size[place]),
                               int(placed.position[place]))  # fmt: skip

    def _note_schemas(self, rows: Rows) -> None:
        named = np.flatnonzero((rows.flags & _SCHEMA_ID) != 0)
        if not len(named):
            return
        pairs = np.stack((rows.schema_id[named], rows.schema_version[named]))
        found, first = np.unique(pairs, axis=1, return_index=True)
        for (schema_id, version), place in zip(found.T.tolist(), named[first].tolist(), strict=True):
            if (schema_id, version) not in self._schemas:
                self._schemas.add((schema_id, version))
                where = int(rows.position[place]), int(rows.base_offset[place])
                self.facts.schemas.append((schema_id, version, *where))

    def _search(self, window: Window, *, cut: bool) -> bool:
        """Go to the next intact header behind the window's start; False when there is none."""
        facts = self.facts
        begin = dirty = window.position
        window_start = window.start + 8
        while True:
            found = find(window.data, window_start, window.fill, facts.end_offset)
            stop = found if found >= 0 else window.fill
            used = np.flatnonzero(window.data[window.start : stop])
            if len(used):
                dirty = window.position + int(used[-1]) + 1
            if found >= 0:
                self._damaged(begin, window.position_of(found))
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

    def _damaged(self, begin: int, end: int) -> None:
        self.damaged.append((begin, end))
        detail = f"no batch can be read from byte {begin} to {end}"
        self.facts.note(Damage.BATCH_HEADER, detail, begin, self.facts.end_offset)

    def _ended(self, begin: int, dirty: int, cut: bool) -> None:
        """Judge the last bytes, from ``begin`` to ``dirty``: not zero, and without an intact batch."""
        facts = self.facts
        if dirty <= begin and not facts.sealed:
            return
        end = facts.data_end if facts.sealed else dirty
        if not facts.sealed and any(one.kind == Damage.FOOTER_DAMAGED for one in facts.findings):
            return  # the footer lies there
        self.damaged.append((begin, end))
        if facts.sealed or begin < self._synced:
            if cut:
                detail = f"the batch at byte {begin} is longer than what is left"
                facts.note(Damage.BATCH_CUT, detail, begin, facts.end_offset)
            else:
                self._damaged(begin, end)
        else:
            facts.tail = (begin, end)
