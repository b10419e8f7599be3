"""Group commit: one thread that carries out sync and seal jobs, off the worker's loop.

Jobs that are submitted while a group runs form the next group.  Within a group each file is synced
once, one after another.  The outcomes of a group come back in one call on the loop's thread.  A
disk is asked for one flush at a time, so a slow one delays the answers and never reorders them.
A group of many sync jobs is carried out with one call for the whole file system; where that fails, each file
is asked, so that the error meets its owner.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from danube.errors import ClosedError
from danube.host import files
from danube.wal.log.jobs import SyncJob

TOGETHER_MIN: Final = 32


class Job(Protocol):
    """Something to do in the thread; ``synced`` holds what the group has synced already."""

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
        self._owed_count = 0  # jobs whose outcome the loop has not heard
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
            self._owed_count += len(jobs)
            self._ready.notify()

    def stop(self) -> None:
        """Carry out what was submitted, hand the outcomes to the loop and end the thread."""
        with self._ready:
            self._stopping = True
            self._ready.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._file_system >= 0:
            files.close(self._file_system)
            self._file_system = -1

    @property
    def busy(self) -> bool:
        """Whether a job was submitted whose outcome the loop has not heard."""
        return self._owed_count > 0

    def statistics(self) -> dict[str, int]:
        return {"groups": self.group_count, "jobs": self.job_count, "waiting": len(self._queue)}

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
        with self._ready:
            self._owed_count -= len(outcomes)
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
            except Exception as error:  # handed to the job's owner, who decides; nothing is hidden
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
