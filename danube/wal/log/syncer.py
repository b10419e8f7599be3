"""Group commit: one thread that carries out sync and seal jobs, off the worker's loop.

Jobs that are submitted while a group runs form the next group.  Within a group each file is synced once, one
after another.  The outcomes of a group come back in one call on the loop's thread.  A disk gets one flush at
a time, so a slow disk delays the answers and never reorders them.  A group of many sync jobs uses one call
for the whole file system.  If that call fails, each file is synced by itself, so that the error reaches its
owner.

Jobs of the thread: syncing and sealing.

A job is made on the loop's thread, its files stay pinned, it runs in the thread and is handed back to
the log (``synced``, ``sealed``, ``sync_failed`` or ``seal_failed``).  A file whose sync failed is
marked in the thread, before anything else can run, so a later job never syncs it again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from danube.errors import ClosedError, StorageFailed
from danube.host import files
from danube.wal.recovery.witness import Witness
from danube.wal.segments.descriptors import LogFile, descriptors
from danube.wal.segments.segment import NO_HASH, Summary
from danube.wal.segments.stored_segment import StoredSegment, write_footer


def check_file(file: LogFile) -> None:
    """Raise StorageFailed if an earlier sync of the file failed; no later one restores the lost bytes."""
    if file.failed:
        raise StorageFailed("an earlier sync of this file failed", file=file.path.name)


def sync_file(file: LogFile, fd: int) -> None:
    """One fdatasync of a file that is where it should be; after it failed once, StorageFailed without asking
    the kernel again."""
    check_file(file)
    try:
        files.fdatasync(fd)
        files.check_there(fd, file.path)
    except OSError:
        file.failed = True
        raise


class SyncJob:
    """Makes everything below ``end_offset`` durable: older files first, then the directory.

    The log that makes the job keeps ``files`` pinned until the job's result is known.
    """

    __slots__ = ("base_offset", "created", "directory", "end_offset", "epoch", "files", "position")

    def __init__(
        self, files: list[LogFile], directory: Path | None, created: int,
        end_offset: int, base_offset: int, position: int, epoch: int,
    ) -> None:  # fmt: skip
        self.files = files
        self.directory = directory
        self.created = created
        self.end_offset = end_offset
        self.base_offset = base_offset
        self.position = position
        self.epoch = epoch

    def run(self, synced: set[object] | None = None) -> None:
        """Sync; ``synced`` holds the files that the same group has synced already, and is extended."""
        done = set() if synced is None else synced
        for file in self.files:
            if file not in done or file.failed:
                sync_file(file, file.fd)
                done.add(file)
        if self.directory is not None and self.directory not in done:
            files.fsync_directory(self.directory)
            done.add(self.directory)

    def check_files(self) -> None:
        """All is synced by other means; StorageFailed if an earlier sync of a file has failed, OSError
        where one was deleted."""
        for file in self.files:
            check_file(file)
            try:
                files.check_there(file.fd, file.path)
            except OSError:
                file.failed = True
                raise


class SealJob:
    """Hashes a rolled segment and writes its footer.

    ``deferred``: the disk was too full for the footer, or for that of the segment before, whose hash this
    one names; the segment stays as it is, and readable.
    """

    __slots__ = (
        "_fd", "_front_hash", "_pinned", "_previous", "deferred", "segment", "size_bytes", "snapshot",
        "summary", "witness",
    )  # fmt: skip

    def __init__(
        self, segment: StoredSegment, previous: StoredSegment | None, snapshot: bytes | None,
        front_hash: bytes = NO_HASH, witness: Witness | None = None,
    ) -> None:  # fmt: skip
        self.segment = segment
        self.witness = witness
        self.snapshot = snapshot
        self.summary: Summary | None = None
        self.size_bytes = 0
        self.deferred = False
        self._previous = previous
        self._front_hash = front_hash  # of the segment that was deleted before this one
        self._fd = descriptors.pin(segment.file)
        self._pinned = True

    def run(self, synced: set[object] | None = None) -> None:
        previous = self._previous
        if self.witness is not None:
            self.witness.reached(self.segment.end_offset)
        try:
            if previous is not None and not previous.sealed and previous.content_hash == NO_HASH:
                self.deferred = True
            else:
                self._seal()
        except OSError as error:
            if error.errno not in files.FULL_ERRNOS or self.segment.file.failed:
                raise
            self.deferred = True
        finally:
            self.release()

    def _seal(self) -> None:
        previous_hash = self._previous.content_hash if self._previous is not None else self._front_hash
        file: Final = self.segment.file
        self.summary, self.size_bytes = write_footer(
            self._fd, self.segment, previous_hash, self.snapshot, lambda fd: sync_file(file, fd)
        )
        # Read by the next SealJob, which runs after this one and before the loop hears of either.
        self.segment.content_hash = self.summary.content_hash

    def release(self) -> None:
        if self._pinned:
            self._pinned = False
            descriptors.unpin(self.segment.file)


class LeftoverJob:
    """Syncs the whole file system once: what a process wrote that ended before its own sync.

    A partition that was given to another broker meanwhile is not opened here again, so no other sync covers
    the end of its log.
    """

    __slots__ = ("_directory",)

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def run(self, synced: set[object] | None = None) -> None:
        """Raise OSError if the file system cannot be synced."""
        files.sync_file_system_of(self._directory)


TOGETHER_MIN: Final = 32


class Job(Protocol):
    """A job for the thread; ``synced`` holds the files that the group has synced already."""

    def run(self, synced: set[object]) -> None: ...


OnDone = Callable[[Any, Exception | None], None]
_Outcome = tuple[OnDone, Job, Exception | None]


class Syncer:
    """``call_on_loop`` is the loop's call_soon_threadsafe, or any function with its meaning."""

    def __init__(
        self, call_on_loop: Callable[[Callable[[], None]], object], directory: Path | None = None
    ) -> None:
        self._call_on_loop = call_on_loop
        self._ready = threading.Condition()
        self._queue: list[tuple[Job, OnDone]] = []
        self._stopping = False
        # Opened before anything is written, so that no error of a write goes by unseen.
        self._file_system = files.open_directory(directory) if directory is not None else -1
        self._thread: threading.Thread | None = None
        self.group_count = 0
        self.job_count = 0

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="danube-syncer", daemon=True)
            self._thread.start()

    def submit(self, job: Job, on_done: OnDone) -> None:
        """Run ``job`` with the next group; then ``on_done(job, error)`` on the loop's thread."""
        self.submit_all([(job, on_done)])

    def submit_all(self, jobs: list[tuple[Job, OnDone]]) -> None:
        """Like submit for each, in one group."""
        with self._ready:
            if self._stopping:
                raise ClosedError("the syncer was stopped")
            self._queue += jobs
            self._ready.notify()

    def stop(self) -> None:
        """Carry out submitted jobs, return the outcomes to the loop and end the thread."""
        with self._ready:
            self._stopping = True
            self._ready.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._file_system >= 0:
            files.close(self._file_system)
            self._file_system = -1

    def _work(self) -> None:
        while True:
            with self._ready:
                while not self._queue and not self._stopping:
                    self._ready.wait()
                group, self._queue = self._queue, []
            if not group:
                return
            outcomes = self._run(group)
            self._call_on_loop(lambda outcomes=outcomes: self._deliver(outcomes))  # type: ignore[misc]

    def _deliver(self, outcomes: list[_Outcome]) -> None:
        for on_done, job, error in outcomes:
            on_done(job, error)

    def _run(self, group: list[tuple[Job, OnDone]]) -> list[_Outcome]:
        self.group_count += 1
        self.job_count += len(group)
        together = self._sync_together(group)
        synced: set[object] = set()
        outcomes: list[_Outcome] = []
        for job, on_done in group:
            try:
                if together and type(job) is SyncJob:
                    job.check_files()  # nothing else is left to do, and thousands wait for this thread
                else:
                    job.run(synced)
            except Exception as error:  # returned to the job's owner, which decides
                outcomes.append((on_done, job, error))
            else:
                outcomes.append((on_done, job, None))
        return outcomes

    def _sync_together(self, group: list[tuple[Job, OnDone]]) -> bool:
        """Whether one call for the file system has synced all SyncJobs; not asked for few of them."""
        if self._file_system < 0 or sum(type(job) is SyncJob for job, _ in group) < TOGETHER_MIN:
            return False
        try:
            files.syncfs(self._file_system)
        except OSError:
            return False
        return True
