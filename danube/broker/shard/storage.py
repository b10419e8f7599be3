"""Durability at run time: group commit, fencing after a failed disk, reopening, rolling, cursors.

    dirty log --submit--> Syncer thread: fdatasync --on_done (loop)--> synced end --> answers

A log that failed is *fenced*: its un-acknowledged publishes fail, no batch is appended, and the log is opened
anew from the disk with a new epoch.  The failed descriptor is never synced again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from danube.broker.partition.hosted import HostedPartition, OpenedStorage
from danube.broker.processes.removing import remove_directory
from danube.core.partition.policy import Durability
from danube.errors import ClosedError, DanubeError, InvalidArgument, StorageFailed, StorageFull
from danube.host import clock, telemetry
from danube.limits import UNSYNCED_RECORDS_MAX

if TYPE_CHECKING:
    from pathlib import Path

    from danube.wal.log.log import Log
    from danube.wal.log.syncer import SealJob, Syncer
    from danube.wal.segments.descriptors import LogFile
    from danube.wal.segments.spare import Spare

_log = telemetry.events("storage")
_FSYNC = Durability.FSYNC  # a member of an IntEnum costs as much to look up as five numbers
SEAL_AGAIN_S = 1.0
MARKS_AT_ONCE = 4
MARKS_CALLS = 3_000  # a mark is written at most so many intervals after its background sync
REOPEN_DELAY_FIRST_NS = 100_000_000
REOPEN_DELAY_MAX_NS = 2_000_000_000


class Keeper(Protocol):
    """Members of the shard that Storage uses: notices, and ``reopen``, which runs in a thread."""

    def reopen(self, hosted: HostedPartition, trusted_end: int | None) -> OpenedStorage: ...
    def reopened(self, hosted: HostedPartition) -> None: ...
    def reopen_ended(self, hosted: HostedPartition) -> None: ...
    def progressed(self, hosted: HostedPartition) -> None: ...
    def sealed(self, hosted: HostedPartition) -> None: ...
    def wake(self, hosted: HostedPartition) -> None: ...


class Storage:
    """Writes, syncs, rolls, seals and reopens the logs of one worker; all methods run on its loop."""

    def __init__(
        self,
        shard: Keeper,
        syncer: Syncer,
        sealer: Syncer,
        reserver: Syncer,
        executor: Executor,
        call_on_loop: Callable[..., object],
        call_later: Callable[..., object],
        sync_lag_max_ns: int,
    ) -> None:
        """``reserver``: its thread makes and deletes spare segments.  ``sync_lag_max_ns``: see WalConfig."""
        self._shard = shard
        self._syncer = syncer
        self._sealer = sealer
        self.reserver = reserver
        self._executor = executor
        self._call_on_loop = call_on_loop
        self._call_later = call_later
        self._reopening: set[Path] = set()  # logs that a thread opens anew, hosted or not
        self.sync_lag_max_ns = sync_lag_max_ns
        self._unsynced: dict[HostedPartition, None] = {}
        self._unmarked: dict[Log, None] = {}  # logs that are synced further than their marks, oldest first
        self._spares: dict[Spare, None] = {}  # logs' spares that may have a file
        self._unsynced_cursors: dict[HostedPartition, None] = {}

    # -- log --------------------------------------------------------------------------------------

    def write(self, hosted: HostedPartition) -> None:
        """Write queued batches, start a sync if the level needs one now, roll a full segment."""
        if hosted.log is not None and hosted.core.level < _FSYNC:
            self._mind_lag(hosted, hosted.log)
        try:
            hosted.write()
        except StorageFull:
            self.drop_spares()
            return
        except DanubeError as error:
            self.fence(hosted, error)
            return
        log = hosted.log
        if log is None:
            return
        if hosted.core.level >= _FSYNC:
            self.request_sync(hosted)
        else:
            self._unsynced[hosted] = None
        active = log.active
        if active is None or log.age_due or active.data_end >= log.spare.quiet_below:
            self._see_to_next_segment(hosted, log)

    def _mind_lag(self, hosted: HostedPartition, log: Log) -> None:
        """Before a write: if syncs are too far behind, let acknowledgements wait for the disk from now on."""
        now_ns = clock.monotonic_ns()
        if not hosted.unsynced_ns:
            hosted.unsynced_ns = now_ns
        if not hosted.core.held and self._fallen_behind(hosted, log, now_ns):
            hosted.core.hold()
            count = log.log_end - log.synced_end
            _log.limited("acknowledgements wait for the disk", source=hosted.name, unsynced_records=count)
            self.request_sync(hosted)

    def _fallen_behind(self, hosted: HostedPartition, log: Log, now_ns: int) -> bool:
        since_ns = hosted.unsynced_ns or now_ns
        return now_ns - since_ns > self.sync_lag_max_ns or log.log_end - log.synced_end > UNSYNCED_RECORDS_MAX

    def _see_to_next_segment(self, hosted: HostedPartition, log: Log) -> None:
        """Roll a full segment, or have the space for the next one reserved."""
        if log.should_roll:
            self.roll(hosted)
        spare = log.spare.job(log.active)
        if spare is not None:
            self._spares[log.spare] = None
            self.reserver.submit(spare, log.spare.done)

    def drop_spares(self, now_us: int | None = None) -> None:
        """Delete the spare segments of logs that became slower; without ``now_us`` all, for a full disk."""
        for spare in list(self._spares):
            if now_us is None or spare.old(now_us):
                self.drop_spare(spare)
            if not spare.held:
                del self._spares[spare]

    def drop_spare(self, spare: Spare) -> None:
        """Delete a spare segment, if there is one, in a thread."""
        job = spare.drop()
        if job is None:
            return
        try:
            self.reserver.submit(job, lambda job, error: None)
        except ClosedError:  # the worker ends, and with it the thread
            job.run()

    def follow_level(self, hosted: HostedPartition) -> None:
        """Sync records of a lower level, if the topic's level was raised."""
        if hosted.core.settling:
            self.request_sync(hosted)

    def request_sync(self, hosted: HostedPartition) -> None:
        """Sync written bytes, or note that a sync must follow the running one."""
        asked = self._sync_job(hosted)
        if asked is not None:
            self._syncer.submit(*asked)

    def sync_departing(self, log: Log) -> None:
        """Sync a log that is about to be abandoned, because only this disk may have its records."""
        job = log.sync_job()
        if job is None:
            return
        try:
            self._syncer.submit(job, partial(_departed, log))
        except ClosedError:  # the worker ends, and with it the thread
            error: Exception | None = None
            try:
                job.run()
            except (OSError, DanubeError) as failure:
                error = failure
            _departed(log, job, error)

    def _sync_job(
        self, hosted: HostedPartition
    ) -> tuple[Any, Callable[[Any, Exception | None], None]] | None:
        """Return the job that syncs written bytes, and the action after it; None while one is running."""
        if hosted.sync_running or hosted.failure is not None or hosted.log is None:
            return None
        job = hosted.log.sync_job()
        if job is None:
            return None
        hosted.sync_running = True
        log: Log = hosted.log
        made_ns = clock.monotonic_ns()

        def done(job: Any, error: Exception | None) -> None:
            hosted.sync_running = False
            if error is None:
                log.synced(job)
            else:
                log.sync_failed(job, error)
            if hosted.log is not log or hosted.deleted:
                return
            if hosted.unsynced_ns:  # the remaining bytes were written after the job was made
                hosted.unsynced_ns = made_ns if log.synced_end < log.written_end else 0
            if error is not None:
                self.fence(hosted, StorageFailed("sync failed", why=str(error), partition=hosted.name))
            elif log.fenced:
                self.fence(hosted, StorageFailed("a newer owner has taken the log over"))
            else:
                self._synced(hosted, log)

        return job, done

    def _synced(self, hosted: HostedPartition, log: Log) -> None:
        core = hosted.core
        settling = core.settling
        core.synced(log.synced_end)
        hosted.counters.add("syncs")
        if core.level < _FSYNC and not core.held:  # the records were acknowledged when they were written
            self._unmarked[log] = None
            return
        if core.held and not self._fallen_behind(hosted, log, clock.monotonic_ns()):
            core.release()
        log.store_mark()  # before the answers: the mark proves that these records were on disk
        hosted.complete()
        self.request_sync(hosted)
        self._shard.progressed(hosted)
        if settling and not core.settling:
            self._shard.wake(hosted)

    def sync_written(self) -> None:
        """Sync all logs of the `written` level as one group; called every interval."""
        self._store_marks()
        due, self._unsynced = self._unsynced, {}
        asked = []
        for hosted in due:
            if hosted.sync_running:
                self._unsynced[hosted] = None
            else:
                asked.append(self._sync_job(hosted))
        jobs = [one for one in asked if one is not None]
        if jobs:
            self._syncer.submit_all(jobs)

    def _store_marks(self) -> None:
        """Write the marks of background syncs: for few logs at once, for many over several calls."""
        for _ in range(min(len(self._unmarked), MARKS_AT_ONCE + len(self._unmarked) // MARKS_CALLS)):
            log = next(iter(self._unmarked))
            del self._unmarked[log]
            log.store_mark()

    def roll(self, hosted: HostedPartition) -> None:
        """Seal the full segment, with hashing in a thread, and continue in a new one."""
        if hosted.log is None or hosted.failure is not None:
            return
        try:
            job = hosted.log.roll(hosted.core.snapshot(hosted.core.written_end))
        except DanubeError as error:
            _log.warning("roll failed", partition=hosted.name, error=str(error))
            return
        if job is not None:
            self._sealer.submit(job, self._sealed(hosted))

    def seal(self, hosted: HostedPartition, then: Callable[[int | DanubeError], None]) -> None:
        """End the active segment now; ``then`` gets, on the loop, the offset below which all is sealed.

        Raises InvalidArgument for a partition without a log, and the failure of a log that must be reopened.
        """
        log = hosted.log
        if log is None:
            raise InvalidArgument(f"{hosted.name} keeps no log", why="its topic is not reliable")
        if hosted.failure is not None:
            raise hosted.failure
        end = log.written_end
        job = log.roll(hosted.core.snapshot(hosted.core.written_end))
        if job is None:  # earlier rolled segments are sealed when the jobs before this one are done
            self._sealer.submit(_Turn(), lambda turn, error: then(end))
            return
        sealed = self._sealed(hosted)

        def done(job: Any, error: Exception | None) -> None:
            sealed(job, error)
            if error is not None or job.deferred:
                why = str(error) if error is not None else "the disk is full"
                then(StorageFailed(f"{hosted.name} was not sealed", why=why, hint="it is tried again"))
            else:
                then(end)

        self._sealer.submit(job, done)

    def _sealed(self, hosted: HostedPartition) -> Callable[[Any, Exception | None], None]:
        log = hosted.log

        def done(job: Any, error: Exception | None) -> None:
            if log is None:
                return
            if error is None:
                log.sealed(job)
                if job.deferred:
                    self.drop_spares()
                    self._call_later(SEAL_AGAIN_S, self._seal_again, hosted, log, job)
                elif hosted.log is log and not hosted.deleted:
                    self._shard.sealed(hosted)
                return
            log.seal_failed(job, error)
            if hosted.log is log:
                self.fence(hosted, StorageFailed("seal failed", why=str(error), partition=hosted.name))

        return done

    def _seal_again(self, hosted: HostedPartition, log: Log, job: SealJob) -> None:
        """Try a seal again after the disk was full; until then this and later segments are not uploaded."""
        if hosted.log is not log or hosted.deleted or hosted.failure is not None:
            return
        if job.segment in log.front():
            self._sealer.submit(log.seal_job(job.segment, job.snapshot), self._sealed(hosted))
        elif job.segment.base_offset >= log.start:
            self._call_later(SEAL_AGAIN_S, self._seal_again, hosted, log, job)

    # -- failure ----------------------------------------------------------------------------------

    def fence(self, hosted: HostedPartition, error: DanubeError) -> None:
        """Refuse publishes, answer waiting ones with the error, and open the log anew after a pause."""
        if hosted.failure is not None or hosted.deleted or hosted.log is None:
            return
        _log.error("log fenced", partition=hosted.name, error=str(error))
        hosted.counters.add("storage_errors")
        hosted.failure = hosted.refusal = StorageFailed(
            f"{hosted.name} cannot be written now",
            why=str(error),
            hint="it is opened anew by itself; send again",
        )
        hosted.log.discard_pending()
        self.drop_spare(hosted.log.spare)
        hosted.fail_waiting(hosted.failure, hosted.core.acknowledged_end)
        hosted.hot.clear()
        self._schedule_reopen(hosted)

    def _schedule_reopen(self, hosted: HostedPartition) -> None:
        hosted.reopen_delay_ns = min(
            max(hosted.reopen_delay_ns * 2, REOPEN_DELAY_FIRST_NS), REOPEN_DELAY_MAX_NS
        )
        self._call_later(hosted.reopen_delay_ns / 1e9, self._start_reopen, hosted)

    def _start_reopen(self, hosted: HostedPartition) -> None:
        if hosted.deleted or hosted.log is None:
            return
        if hosted.directory is not None:
            self._reopening.add(hosted.directory)
        core = hosted.core
        # Records above the synced end may have been acknowledged at a lower level; they are kept.
        unseen = core.level >= _FSYNC and not core.settling
        trusted_end = hosted.log.synced_end if unseen else None
        future = self._executor.submit(self._shard.reopen, hosted, trusted_end)
        future.add_done_callback(lambda done: self._call_on_loop(self._reopen_ended, hosted, done))

    def reopening(self, directory: Path) -> bool:
        """Return whether a thread opens this log anew; no other may open it before that has ended."""
        return directory in self._reopening

    def _reopen_ended(self, hosted: HostedPartition, done: Any) -> None:
        self._reopened(hosted, done)
        if hosted.directory is not None:  # and a log that it opened too late is abandoned
            self._reopening.discard(hosted.directory)
        self._shard.reopen_ended(hosted)

    def _reopened(self, hosted: HostedPartition, done: Any) -> None:
        error = done.exception()
        if error is not None:
            if not isinstance(error, DanubeError | OSError):
                raise error
            _log.warning("reopen failed", partition=hosted.name, error=str(error))
            self._schedule_reopen(hosted)
            return
        opened: OpenedStorage = done.result()
        if hosted.deleted:
            opened.log.abandon()
            # Opening may have made a deleted topic's directory again; one that was given away or taken anew
            # stays.
            if hosted.directory is not None and hosted.moved is None:
                self._executor.submit(remove_directory, hosted.directory)
            return
        if opened.core.log_end < hosted.high_watermark:
            # Acknowledged records are missing: this log is not used, and opening is tried again.
            _log.error(
                "acknowledged records are missing after a disk failure",
                partition=hosted.name,
                start=opened.core.log_end,
                end=hosted.high_watermark,
            )
            opened.log.abandon()
            self._schedule_reopen(hosted)
            return
        if hosted.log is not None:
            hosted.log.abandon()
        settling = hosted.core.settling
        hosted.adopt(opened)
        hosted.reopen_delay_ns = 0
        _log.info("log opened anew", partition=hosted.name, epoch=hosted.core.epoch)
        self._shard.reopened(hosted)
        self._shard.progressed(hosted)
        if settling:
            self._shard.wake(hosted)

    # -- cursors ----------------------------------------------------------------------------------

    def when_cursors_stored(
        self, hosted: HostedPartition, then: Callable[[DanubeError | None], None]
    ) -> None:
        """Store changed cursors, sync them, then call ``then`` on the loop, with the error if it failed."""
        if hosted.cursors is None:
            then(None)
        elif not self._sync_cursors(hosted, then):
            # All files are requested already, and the syncer handles earlier requests first.
            self._syncer.submit(_Turn(), lambda job, error: then(hosted.cursor_failure))

    def sync_cursors(self) -> None:
        """Sync changed cursor files; called about once a second."""
        due, self._unsynced_cursors = self._unsynced_cursors, {}
        for hosted in due:
            if not hosted.deleted:
                self._sync_cursors(hosted, lambda error: None)

    def _sync_cursors(self, hosted: HostedPartition, then: Callable[[DanubeError | None], None]) -> bool:
        """Write and sync changed cursors; return False if all of them are being synced already."""
        cursors = hosted.cursors
        if cursors is None:
            return False
        hosted.store_cursors()
        behind: list[LogFile] = []
        made = False
        log = hosted.log
        if log is not None and hosted.failure is None and hosted.high_watermark > log.synced_end:
            behind, made = log.unsynced_files()  # consumers may have acked their records
        job = cursors.sync_job(behind, made=made)
        if job is None:
            return False

        def done(job: Any, error: Exception | None) -> None:
            if error is None:
                cursors.synced(job)
                hosted.cursor_failure = None
            else:
                cursors.sync_failed(job, error)
                hosted.counters.add("storage_errors")
                _log.error("cursor sync failed", partition=hosted.name, error=str(error))
                self._unsynced_cursors[hosted] = None
                hosted.cursor_failure = StorageFailed(
                    f"cursors of {hosted.name} cannot be stored now", why=str(error), hint="it is tried again"
                )
            then(hosted.cursor_failure)

        self._syncer.submit(job, done)
        return True

    def cursors_written(self, hosted: HostedPartition) -> None:
        """Note that this cursor file must be synced."""
        self._unsynced_cursors[hosted] = None

    def close(self, hosted: HostedPartition) -> None:
        """Store cursors, write, sync and close; used when the worker drains."""
        if hosted.log is None:
            return
        if hosted.failure is None:
            hosted.store_cursors()
            hosted.log.close(hosted.core.snapshot(hosted.core.written_end))
        if hosted.cursors is not None:
            hosted.cursors.close()


def _departed(log: Log, job: Any, error: Exception | None) -> None:
    """Take the result of the last sync of a log that another broker takes over."""
    if error is None:
        log.synced(job)
        return
    log.sync_failed(job, error)
    _log.error(
        "acknowledged records of a partition that another broker has now may not be on this disk",
        directory=str(log.directory), why=str(error),
    )  # fmt: skip


class _Turn:
    """A job that does nothing: it is done when the jobs before it are."""

    def run(self, synced: set[object]) -> None:
        return
