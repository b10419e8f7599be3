"""A log's files with bytes that are not on the disk yet, pinned for as long as that is so.

A sync job uses the descriptors of the files that were in here when it was made.  So what a job may use stays
pinned until the log has heard what became of it, also when the log was abandoned meanwhile.
"""

from __future__ import annotations

from danube.wal.segments.descriptors import LogFile, descriptors


class Unsynced:
    """One log's; all methods run on the thread that owns it."""

    __slots__ = ("_abandoned", "_ends", "_jobs")

    def __init__(self) -> None:
        self._ends: dict[LogFile, int] = {}  # the offset up to which each is written
        self._jobs = 0  # that run
        self._abandoned = False

    def __contains__(self, file: LogFile) -> bool:
        return file in self._ends

    def __bool__(self) -> bool:
        return bool(self._ends)

    def wrote(self, file: LogFile, end: int) -> None:
        """The file is written up to the offset ``end``."""
        if file not in self._ends:
            descriptors.pin(file)
        self._ends[file] = end

    def files(self) -> list[LogFile]:
        """All of them, the oldest first."""
        return list(self._ends)

    def start_job(self) -> list[LogFile]:
        """All files, the oldest first, for a job that syncs them; end_job() must follow."""
        self._jobs += 1
        return self.files()

    def end_job(self, synced_end: int = -1) -> None:
        """A job has ended: what is written up to ``synced_end`` is synced."""
        self._jobs -= 1
        ends = self._ends
        for file in [file for file, end in ends.items() if end <= synced_end]:
            del ends[file]
            descriptors.unpin(file)
        if self._abandoned:
            self.abandon()

    def abandon(self) -> None:
        """Nothing here is synced any more: give all files back, as soon as no job uses them."""
        self._abandoned = True
        if not self._jobs:
            for file in self._ends:
                descriptors.unpin(file)
            self._ends.clear()
