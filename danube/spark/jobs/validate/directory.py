"""A broker's data directory: files to read, and checks of them against mark, cursors and each other.

It may run beside the broker.  The mark and the cursors are read first, so that they cannot be ahead of files
that are read later.  Apparent faults are checked again while the directory changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from danube.errors import StorageFailed
from danube.spark.jobs.findings import Expected, SegmentFacts
from danube.spark.jobs.validate.order import check_order, without_leftovers
from danube.wal.segments.segment import base_offset_of, spare_epoch_of
from danube.wal.verify.bytes import Damage, FindingKind
from danube.wal.verify.state import Identity, Mark, reached
from danube.wal.verify.tree import (
    LocalPartition,
    judge_log_ids,
    judge_mark,
    judge_segments,
    read_cursors_of,
    read_holes_of,
    read_mark_of,
)

_EVERYTHING: Final = 1 << 62


class DirectoryPlan:
    """One partition's directory at the time of listing, and what is wrong with it.

    ``log_id``: that its segments are to be of, None if it is not known.  Raises StorageFailed if the disk
    fails.
    """

    def __init__(self, identity: Identity, directory: Path, log_id: bytes | None = None) -> None:
        self.part = part = LocalPartition(identity, directory)
        self.work: list[Expected] = []
        self.facts: list[SegmentFacts] = []  # of the segments that were there, by base offset
        self._log_id = log_id
        read_holes_of(part)
        read_mark_of(part)
        read_cursors_of(part)
        self._state = _state_of(directory)
        for name, size, _ in self._state:
            base_offset = base_offset_of(name)
            if base_offset is not None:
                synced = _synced(part.mark, base_offset)
                self.work.append(
                    Expected(str(directory / name), *identity, base_offset, synced=synced, size=size)
                )
            elif name.endswith((".aside", ".new")) and spare_epoch_of(name) is None:
                part.remarks.append(f"{directory / name}: left by an opening, never read")

    def judge(self, segments: Sequence[SegmentFacts]) -> None:
        """Note all that is wrong with the partition."""
        part = self.part
        self.facts = [one for one in segments if not one.gone]
        part.segments = list(self.facts)
        judge_segments(part)
        judge_log_ids(part.segments, part.log_ids, self._log_id, part)
        kept, leftovers = without_leftovers(self.facts)
        part.remarks += [
            f"{one.where}: its records are in the compacted segment before it" for one in leftovers
        ]
        part.segments = list(kept)
        passed = {end for _, end in part.holes}
        part.findings += check_order(kept, lambda facts: facts.base_offset in passed)
        judge_mark(part)
        end = max([part.end, *passed])
        for name, offset in reached(part.cursors).items():
            if kept and offset > end:
                what = f"subscription {name!r} has acknowledged up to offset {offset}, the log ends at {end}"
                fault, span = Damage.CURSOR_BEYOND_END, (offset, offset + 1)
                part.note(FindingKind.DISAGREEMENT, part.directory, what, -1, *span, fault)

    def again(self) -> DirectoryPlan | None:
        """A new plan if the directory has changed meanwhile."""
        part = self.part
        if len(self.facts) == len(self.work) and _state_of(part.directory) == self._state:
            return None
        return DirectoryPlan(part.identity, part.directory, self._log_id)


def _state_of(directory: Path) -> tuple[tuple[str, int, int], ...]:
    """Return names, sizes and times of change; equal as long as no process writes."""
    found: list[tuple[str, int, int]] = []
    try:
        for path in directory.iterdir():
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            found.append((path.name, status.st_size, status.st_mtime_ns))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise StorageFailed(f"{directory} cannot be read", why=str(error)) from None
    return tuple(sorted(found))


def _synced(mark: Mark, base_offset: int) -> int:
    """Below which byte of a segment everything was synced."""
    if not mark.number or base_offset > mark.base_offset:
        return 0
    return mark.position if base_offset == mark.base_offset else _EVERYTHING
