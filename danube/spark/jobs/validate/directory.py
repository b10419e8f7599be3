"""A broker's data directory: files to read, and checks of them against mark, cursors and each other.

It may run beside the broker.  The mark and the cursors are read first, so that they cannot be ahead of files
that are read later.  Apparent faults are checked again while the directory changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from danube.core.dispatch.cursor import CursorState
from danube.errors import Damage as DamageError
from danube.errors import StorageFailed, StorageIncompatible
from danube.spark.history.places import DataDirectory
from danube.spark.jobs.findings import Expected, Finding, SegmentFacts, finding
from danube.spark.jobs.validate.order import check_order, without_leftovers
from danube.spark.jobs.validate.task import SegmentWork
from danube.wal.recovery.mark import Mark, read_mark
from danube.wal.segments.holes import Hole
from danube.wal.segments.local_holes import FILE_NAME as HOLES_NAME
from danube.wal.segments.local_holes import holes_in
from danube.wal.segments.segment import NO_LOG, LogIdentity, base_offset_of, spare_epoch_of
from danube.wal.tier.keys import PARTITIONS_PREFIX, parse_partition
from danube.wal.verify.bytes import Damage, FileSource
from danube.wal.verify.state import Cursors, read_cursors

ATTEMPTS: Final = 5
CURSORS_BYTES_MAX: Final = 1 << 33
_EVERYTHING: Final = 1 << 62
_CURSOR_FILES: Final = ("cursors-a", "cursors-b")


@dataclass
class DirectoryPlan:
    """One partition's directory at the time of listing.

    ``state`` changes when a broker works on the directory.
    """

    identity: LogIdentity
    directory: Path
    mark: Mark | None = None
    holes: tuple[Hole, ...] = ()  # offsets that the log passed over
    ends: dict[str, int] = field(default_factory=dict)  # subscription: offset that its cursor reaches
    work: list[SegmentWork] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    state: tuple[tuple[str, int, int], ...] = ()


def directories(place: DataDirectory) -> Iterator[tuple[LogIdentity, Path]]:
    """Partitions that have a directory, by name; names that are none of ours are left out."""
    folder = Path(place.path) / PARTITIONS_PREFIX
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageFailed(f"{folder} cannot be read", why=str(error)) from None
    for name in names:
        identity = parse_partition(name)
        if identity is not None:
            yield identity, folder / name


def plan_directory(identity: LogIdentity, directory: Path, log_id: bytes = NO_LOG) -> DirectoryPlan:
    """List the files to read; raises StorageFailed if the disk fails."""
    plan = DirectoryPlan(identity, directory)
    try:
        _read_holes(plan)
        _read_mark(plan)
        _read_cursors(plan)
        plan.state = directory_state(directory)
    except OSError as error:
        raise StorageFailed(f"{directory} cannot be read", why=str(error)) from None
    for name, size, _ in plan.state:
        base_offset = base_offset_of(name)
        if base_offset is None:
            if name.endswith((".aside", ".new")) and spare_epoch_of(name) is None:
                plan.remarks.append(f"{directory / name}: left by an opening, never read")
            continue
        expected = Expected(
            str(directory / name),
            *identity,
            base_offset,
            synced=_synced(plan.mark, base_offset),
            log_id=log_id,
        )
        plan.work.append(SegmentWork(expected, str(directory / name), size))
    return plan


def directory_state(directory: Path) -> tuple[tuple[str, int, int], ...]:
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
    return tuple(sorted(found))


def _synced(mark: Mark | None, base_offset: int) -> int:
    """Below which byte of a segment everything was synced."""
    if mark is None or base_offset > mark.base_offset:
        return 0
    return mark.position if base_offset == mark.base_offset else _EVERYTHING


def _read_holes(plan: DirectoryPlan) -> None:
    try:
        plan.holes = holes_in(plan.directory)
    except DamageError as error:
        where = str(plan.directory / HOLES_NAME)
        plan.findings.append(finding(Damage.HOLES_DAMAGED, where, error.why))


def _read_mark(plan: DirectoryPlan) -> None:
    where = str(plan.directory / "mark")
    damaged = False
    for _ in range(ATTEMPTS):  # a broker may be writing one of the slots
        try:
            plan.mark, damaged = read_mark(plan.directory, plan.identity)
        except StorageIncompatible as error:
            plan.findings.append(finding(Damage.SEGMENT_VERSION, where, error.what, 8))
            return
        if not damaged:
            return
    plan.findings.append(finding(Damage.MARK_DAMAGED, where, "a slot is damaged, or of another partition"))


def _read_cursors(plan: DirectoryPlan) -> None:
    """The file in force, read again while it is written; the other one may be half overwritten."""
    found: list[tuple[str, Cursors]] = []
    for _ in range(ATTEMPTS):
        found = [
            (name, read_cursors(data)) for name in _CURSOR_FILES if (data := _content(plan.directory / name))
        ]
        if not any(cursors.problems for _, cursors in found):
            break
    whole = [cursors.generation for _, cursors in found if not cursors.problems]
    newest = max((cursors.generation for _, cursors in found), default=0)
    for name, cursors in found:
        where = str(plan.directory / name)
        if cursors.problems and (cursors.generation == newest or newest not in whole):
            plan.findings += [
                finding(Damage.CURSOR_DAMAGED, where, problem.what, problem.position)
                for problem in cursors.problems
            ]
        if cursors.generation == newest:
            plan.findings += read_states(where, cursors, plan.identity, plan.ends)


def read_states(where: str, cursors: Cursors, identity: LogIdentity, ends: dict[str, int]) -> list[Finding]:
    """Decode the states of a cursor file; ``ends`` gets the offset that each of them reaches."""
    found: list[Finding] = []
    if cursors.generation and cursors.identity != identity:
        detail = f"it is of partition {LogIdentity(*cursors.identity).directory_name}"
        found.append(finding(Damage.WRONG_PARTITION, where, detail, 12))
        return found
    for name, blob in cursors.states.items():
        if blob is None:
            continue
        try:
            state = CursorState.decode(blob)
        except (DamageError, StorageIncompatible) as error:
            found.append(finding(Damage.CURSOR_DAMAGED, where, f"subscription {name!r}: {error.what}"))
            continue
        ends[name] = max(state.ack_floor, int(state.acked[-1, 1]) if len(state.acked) else 0)
    return found


def _content(path: Path) -> bytes:
    try:
        with FileSource(path) as source:
            return source.read_front(CURSORS_BYTES_MAX)
    except FileNotFoundError:
        return b""


def judge_directory(plan: DirectoryPlan, segments: Sequence[SegmentFacts]) -> list[Finding]:
    """All that is wrong with the partition; ``segments`` are those that were there, by base offset."""
    found = list(plan.findings)
    begun = _begun_seals(segments)
    for facts in segments:
        left = any(one is facts for one in begun)
        found += [one for one in facts.findings if not left or one.kind != Damage.FOOTER_DAMAGED]
    segments, leftovers = without_leftovers(segments)
    plan.remarks += [f"{one.where}: its records are in the compacted segment before it" for one in leftovers]
    passed = {hole.end for hole in plan.holes}
    found += check_order(segments, lambda facts: facts.base_offset in passed)
    end = max([*(one.end_offset for one in segments), *passed], default=0)
    if plan.mark is not None and segments and end < plan.mark.synced_end:
        detail = f"records up to offset {plan.mark.synced_end} were synced, and are not there"
        found.append(finding(Damage.SYNCED_LOST, str(plan.directory / "mark"), detail, 32, end))
    for name, reached in plan.ends.items():
        if segments and reached > end:
            detail = f"subscription {name!r} has acknowledged up to offset {reached}, the log ends at {end}"
            found.append(finding(Damage.CURSOR_BEYOND_END, str(plan.directory), detail, -1, reached))
    return found


def _begun_seals(segments: Sequence[SegmentFacts]) -> list[SegmentFacts]:
    """Return segments whose footer a power cut may have left unfinished: no later one is sealed."""
    sealed_end = max((one.end_offset for one in segments if one.sealed), default=0)
    return [one for one in segments if one.begun_seal and one.base_offset >= sealed_end]


def remarks_of(segments: Sequence[SegmentFacts]) -> list[str]:
    """Describe leftovers of a crash."""
    begun = [f"{facts.where}: its seal was never finished; the next start seals it"
             for facts in _begun_seals(segments)]  # fmt: skip
    return begun + [
        f"{facts.where}: bytes {facts.tail[0]} to {facts.tail[1]} are a write that was never finished"
        for facts in segments
        if facts.tail is not None
    ]
