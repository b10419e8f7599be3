"""What the syncer's thread carries out for a log: syncing and sealing.

A job is made on the loop's thread, its files stay pinned, it runs in the thread and is handed back to
the log (``synced``, ``sealed``, ``sync_failed`` or ``seal_failed``).  A file whose sync failed is
marked in the thread, before anything else can run, so a later job never syncs it again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from danube.errors import StorageFailed
from danube.host import files
from danube.wal.recovery.witness import Witness
from danube.wal.segments.descriptors import LogFile, descriptors
from danube.wal.segments.segment import NO_HASH, Summary
from danube.wal.segments.stored_segment import StoredSegment, write_footer


def check_file(file: LogFile) -> None:
    """StorageFailed where an earlier sync of the file has failed: what it lost no later one brings back."""
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

    The log that makes it keeps ``files`` pinned until it hears what became of the job.
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
        """Sync; ``synced`` holds what the same group has synced already, and is added to."""
        done = set() if synced is None else synced
        for file in self.files:
            if file not in done or file.failed:
                sync_file(file, file.fd)
                done.add(file)
        if self.directory is not None and self.directory not in done:
            files.fsync_directory(self.directory)
            done.add(self.directory)

    def check_files(self) -> None:
        """All is synced by other means; StorageFailed where an earlier sync of a file has failed, OSError
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
