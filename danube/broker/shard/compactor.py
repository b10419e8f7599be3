"""Key compaction of local logs, one partition at a time: keys are read and segments written in a thread.

    look() -> keys of one partition are read -> one group of segments is written anew -> it is installed
                                                     ^------------- the next group -----------'

A thread's result has a name that recovery removes.  It is installed on the loop, and only while the log still
holds the same source segments.  After retention, a reopened log, a changed policy or a deleted topic it is
dropped.  Groups are installed in offset order, so older records of a key are removed before its tombstone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from danube.core.partition.compaction_plan import (
    CompactionRound,
    CompactionSettings,
    Piece,
    group_end,
    next_round,
)
from danube.errors import DanubeError
from danube.host import clock, files, telemetry
from danube.wal.log.retention import unnamed_path
from danube.wal.segments.key_compaction import Compacted, KeysRead, compact, read_keys
from danube.wal.segments.merge import SealedRange
from danube.wal.segments.stored_segment import StoredSegment

if TYPE_CHECKING:
    from danube.broker.partition.hosted import HostedPartition
    from danube.wal.log.log import Log

LOOKED_AT_MAX: Final = 1_000  # partitions checked in one call; ten thousand would take the loop 45 ms
PAUSE_NS: Final = 600 * 1_000_000_000  # of a partition whose round failed or changed nothing

_log = telemetry.events("compactor")


class _Work(NamedTuple):
    """State of one partition's round; ``removed_count`` counts the records removed so far."""

    hosted: HostedPartition
    log: Log
    segments: list[StoredSegment]
    keys: KeysRead | None
    start: int  # of the next group, in ``segments``
    removed_count: int
    advanced: bool  # something was compacted for the first time


class Compactor:
    """Compacts the logs of one worker without tiered storage; only the jobs run in a thread."""

    def __init__(
        self,
        partitions: Callable[[], Iterable[HostedPartition]],
        executor: Executor,
        call_on_loop: Callable[..., object],
        roll: Callable[[HostedPartition], None],
        settings: CompactionSettings,
    ) -> None:
        self.settings = settings
        self.busy = False
        self._partitions = partitions
        self._executor = executor
        self._call_on_loop = call_on_loop
        self._roll = roll
        self._pauses: dict[tuple[int, int], int] = {}  # end of a partition's pause, by topic id and index
        self._last: tuple[int, int] = (-1, -1)  # topic id and index of the last round's partition
        self._unseen: list[HostedPartition] = []  # partitions that look() has still to check

    def look(self) -> None:
        """Begin a round for the next partition that needs one; partitions take turns."""
        if not self._unseen:
            self._unseen = list(self._partitions())
        some = self._unseen[-LOOKED_AT_MAX:]
        del self._unseen[-LOOKED_AT_MAX:]
        chosen = [one for one in some if one.policy.compacts and one.failure is None and not one.deleted]
        for hosted in chosen:
            self._end_old_active(hosted)
        if self.busy:
            return
        now_ns = clock.monotonic_ns()
        self._pauses = {key: end_ns for key, end_ns in self._pauses.items() if end_ns > now_ns}
        chosen.sort(key=_identity)
        chosen.sort(key=lambda hosted: _identity(hosted) <= self._last)
        for hosted in chosen:
            if _identity(hosted) not in self._pauses and self._begin(hosted):
                return

    def _end_old_active(self, hosted: HostedPartition) -> None:
        """Roll an active segment that is old enough: an active segment is never compacted."""
        active = hosted.log.active if hosted.log is not None else None
        oldest_us = clock.wall_us() - self.settings.roll_us
        if active is not None and active.batch_count and active.first_append_us < oldest_us:
            self._roll(hosted)

    def _begin(self, hosted: HostedPartition) -> bool:
        log = hosted.log
        if log is None or hosted.tier is not None or log.fenced:
            return False
        sealed = [one for one in log.front() if one.sealed and one.end_offset <= log.synced_end]
        while len(sealed) > 1 and not sealed[-2].has_snapshot:  # such a segment cannot end a group
            del sealed[-2]
        found = next_round([_piece(one) for one in sealed], clock.wall_us(), self.settings)
        if found is None:
            return False
        self._last = _identity(hosted)
        self.busy = True
        segments = sealed[found.first : found.stop]
        work = _Work(hosted, log, segments, None, 0, 0, advanced=False)
        self._submit(partial(_read, segments, found, self.settings.keys_max), partial(self._keys_read, work))
        return True

    def _submit(self, job: Callable[[], Any], then: Callable[[Future[Any]], None]) -> None:
        future = self._executor.submit(job)
        future.add_done_callback(lambda done: self._call_on_loop(then, done))

    # -- one after another ------------------------------------------------------------------------

    def _keys_read(self, work: _Work, done: Future[KeysRead]) -> None:
        if self._failed(work, done):
            return
        self._write_next(work._replace(keys=done.result()))

    def _write_next(self, work: _Work) -> None:
        keys = work.keys
        end = None
        if keys is not None and _present(work, work.segments[work.start :]):
            rest = work.segments[: keys.stop]
            end = group_end(
                [one.size_bytes for one in rest],
                [one.has_snapshot for one in rest],
                work.start,
                self.settings,
            )
        if keys is None or end is None:
            self._end(work)
            return
        group = work.segments[work.start : end]
        age_ms = work.hosted.policy.tombstone_retention_ms
        before_us = clock.wall_us() - age_ms * 1000 if keys.complete else None
        job = partial(_write, group, keys, before_us)
        self._submit(job, partial(self._written, work._replace(start=end), group))

    def _written(self, work: _Work, group: list[StoredSegment], done: Future[Compacted | None]) -> None:
        if self._failed(work, done):
            return
        result = done.result()
        if result is not None:
            path = unnamed_path(group[0].directory, group[0].base_offset)
            if not _present(work, group):
                with suppress(OSError):  # the directory may have been removed meanwhile
                    files.unlink(path)
                self._end(work)
                return
            try:
                work.log.replace(group, result.merged, path)
            except DanubeError as error:
                self._pause(work, error)
                return
            work = work._replace(
                removed_count=work.removed_count + result.removed_count,
                advanced=work.advanced or not all(one.compacted for one in group),
            )
        self._write_next(work)

    # -- the end ----------------------------------------------------------------------------------

    def _failed(self, work: _Work, done: Future[Any]) -> bool:
        error = done.exception()
        if error is None:
            return False
        if not isinstance(error, DanubeError | OSError):
            raise error
        self._pause(work, error)
        return True

    def _pause(self, work: _Work, error: Exception) -> None:
        if not work.hosted.deleted and work.hosted.log is work.log:
            _log.warning("not compacted", partition=work.hosted.name, error=str(error))
            self._rest(work)
        self.busy = False

    def _rest(self, work: _Work) -> None:
        self._pauses[_identity(work.hosted)] = clock.monotonic_ns() + PAUSE_NS

    def _end(self, work: _Work) -> None:
        self.busy = False
        if not work.advanced:  # the next round would change nothing either
            self._rest(work)
        if work.removed_count:
            facts = {"removed_count": work.removed_count, "end": work.segments[work.start - 1].end_offset}
            _log.info("compacted", partition=work.hosted.name, **facts)


def _identity(hosted: HostedPartition) -> tuple[int, int]:
    return hosted.topic_id, hosted.index


def _piece(segment: StoredSegment) -> Piece:
    whole = segment.compacted or segment.record_count == segment.end_offset - segment.base_offset
    return Piece(
        segment.base_offset, segment.end_offset, segment.size_bytes, segment.record_count,
        segment.last_append_us, segment.compacted, whole,
    )  # fmt: skip


def _present(work: _Work, segments: list[StoredSegment]) -> bool:
    """Whether these are still part of the log, at rest, and to be compacted."""
    hosted = work.hosted
    if hosted.log is not work.log or work.log.fenced or hosted.deleted or not hosted.policy.compacts:
        return False
    front = set(work.log.front())
    return all(segment in front for segment in segments)


# -- what a thread does ---------------------------------------------------------------------------


@contextmanager
def _at_hand(segment: StoredSegment) -> Iterator[SealedRange]:
    yield SealedRange(segment.file.path)


def _read(segments: list[StoredSegment], found: CompactionRound, keys_max: int) -> KeysRead:
    dirty = found.dirty - found.first
    return read_keys(segments, dirty, _at_hand, from_start=found.from_start, keys_max=keys_max)


def _write(group: list[StoredSegment], keys: KeysRead, tombstones_before_us: int | None) -> Compacted | None:
    """Write the group as one segment without a final name; return None if it would not change."""
    path = unnamed_path(group[0].directory, group[0].base_offset)
    result = compact(
        [SealedRange(segment.file.path) for segment in group],
        keys.latest,
        path,
        tombstones_before_us=tombstones_before_us,
    )
    if len(group) == 1 and group[0].compacted and not result.removed_count:
        files.unlink(path)
        return None
    return result
