"""One partition's durable log: append, write, sync, read, roll, delete.

    append()     queues a stamped batch                            log_end moves
    write()      all that is queued goes to the file               written_end moves
    sync_job()   run in the syncer's thread, then synced()         synced_end moves
    roll()       a new file from here on; the old one is sealed by a SealJob
    spare        that new file, made in a thread for a log that fills segments quickly
    read()       whole, verified batches at any offset below written_end
    retain()     deletes sealed segments from the front; evict() does so up to an offset
    replace()    lets a compacted segment take the place of sealed ones

Owner: one thread (the worker's loop), except that jobs run in another.  After StorageFull the log
goes on as before and the next write tries again.  After StorageFailed it is *fenced*: nothing is
appended or synced any more, reading goes on, and the owner opens the log anew with a new epoch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, NoReturn

from danube.core.batch.format import BatchHeader
from danube.errors import DanubeError, Fenced, OffsetOutOfRange, StorageFailed, StorageFull, broken
from danube.host import files
from danube.limits import READ_CHUNK_BYTES
from danube.wal.log.retention import below, deletable, expired, remove, replace
from danube.wal.log.syncer import SealJob, SyncJob
from danube.wal.recovery.carry import create_empty
from danube.wal.recovery.damage import DamagedRange, DamageRegister
from danube.wal.recovery.mark import MarkWriter
from danube.wal.recovery.producers import Checkpoint, write_checkpoint
from danube.wal.recovery.recovery import Recovered, Recovery, RecoveryReport
from danube.wal.recovery.witness import Witness
from danube.wal.segments.descriptors import LogFile, Unsynced, descriptors
from danube.wal.segments.local_holes import LocalHoles, OffsetJump
from danube.wal.segments.merge import Merged
from danube.wal.segments.reading import Chunk, OffsetRange, offset_at_time, read_segment
from danube.wal.segments.segment import NO_HASH, LogIdentity
from danube.wal.segments.spare import Spare
from danube.wal.segments.stored_segment import StoredSegment
from danube.wal.segments.walk import Gap, Place
from danube.wal.segments.writer import Buffer, LogOptions, SegmentWriter

__all__ = [
    "Chunk", "Log", "LogIdentity", "LogOptions", "OffsetRange", "RecoveryReport", "SealJob", "SyncJob",
]  # fmt: skip

_PLACES_MAX: Final = 256
_AGE_ROLLS: Final = 4  # an active segment is rolled when it spans a quarter of the retention time


class Log:
    """:meth:`open` makes a log; ``recovery`` is the report of opening."""

    def __init__(
        self, directory: Path, identity: LogIdentity, epoch: int, options: LogOptions, recovered: Recovered,
        witness: Witness | None = None,
    ) -> None:  # fmt: skip
        self.directory = directory
        self.witness = witness
        self.identity = identity
        self.epoch = epoch
        self.options = options
        self.recovery: RecoveryReport = recovered.report
        self.damage = DamageRegister(directory)
        self.holes = recovered.holes
        self._segments: list[StoredSegment] = recovered.segments
        self._bases: list[int] = [segment.base_offset for segment in self._segments]
        self._unsynced = Unsynced()
        self._writer: SegmentWriter | None = None
        if recovered.active is not None:
            self._writer = self._writer_of(recovered.active, created=False)
        self.log_end = self.written_end = self.synced_end = recovered.report.log_end
        self._pending: list[Buffer] = []
        self._headers: list[BatchHeader] = []
        self._pending_bytes = 0
        self._mark = MarkWriter(directory, identity, recovered.mark)
        self._files_created = self._files_synced = 0
        self._requested_end = self.synced_end
        self._reader = LogReader(self._segments, self._bases, self.damage, self.holes)
        self.age_due = False  # retention waits for the active segment
        self._unsealed_snapshot: Checkpoint | None = None
        self.front_hash = NO_HASH  # content hash of the segment before the first one here, if known
        self.failure: DanubeError | None = None
        self.spare = Spare(directory, epoch, options)

    @classmethod
    def open(
        cls, directory: Path, identity: LogIdentity, epoch: int, options: LogOptions | None = None,
        *, trusted_end: int | None = None, ahead: OffsetJump | None = None, witness: Witness | None = None,
    ) -> Log:  # fmt: skip
        """Recover the log in ``directory`` (created when missing) as owner ``epoch``.

        With ``trusted_end`` the log is truncated there: records above it were never acknowledged.  ``ahead``:
        the jump of a log of an older history.  ``witness``: the record of the data that existed.  Raises
        Fenced for a newer owner's files, AlreadyRunning while an older owner's process still writes,
        StorageIncompatible for a newer format (nothing is touched), StorageFull, StorageFailed.
        """
        try:
            made = not directory.is_dir()
            files.make_directory(directory)
            options = options or LogOptions()
            recovered = Recovery(
                directory, identity, epoch, trusted_end, ahead, options.log_id, witness, made
            ).run()
            log = cls(directory, identity, epoch, options, recovered, witness)
        except OSError as error:
            if error.errno in files.FULL_ERRNOS:
                raise StorageFull("the log cannot be opened: the disk is full", why=str(error)) from error
            raise StorageFailed("the log cannot be opened", why=str(error)) from error
        log._note_recovery()
        return log

    def _note_recovery(self) -> None:
        for record in self.recovery.damaged:
            self.damage.note(record)
        self.damage.store()
        if self.log_end:
            self._note_all_synced()
            self.store_mark()
        self._tell_witness(began=bool(self._segments))

    def _tell_witness(self, start: int | None = None, *, began: bool = False) -> None:
        """Tell the witness the extent of the log; ``start``: where the log will begin."""
        if self.witness is not None:
            self.witness.note_log(self.start if start is None else start, self.written_end, began=began)

    # -- ends -------------------------------------------------------------------------------------

    @property
    def start(self) -> int:
        """First offset that is still stored; log_end when nothing is."""
        return self._bases[0] if self._bases else self.written_end

    @property
    def pending_bytes(self) -> int:
        """Bytes that append() queued and write() has not taken yet."""
        return self._pending_bytes

    @property
    def fenced(self) -> bool:
        return self.failure is not None

    @property
    def local_bytes(self) -> int:
        """Bytes of all segments; space reserved ahead is not counted."""
        return sum(segment.stored_bytes for segment in self._segments)

    @property
    def should_roll(self) -> bool:
        """The active segment is full, or a spare is ready for the next, or retention waits for it."""
        if (active := self.active) is None or not active.batch_count:
            return False
        return self.age_due or self.spare.ends_segment(active.data_end)

    @property
    def active(self) -> StoredSegment | None:
        return self._writer.segment if self._writer is not None else None

    # -- append and write -------------------------------------------------------------------------

    def append(self, batch: Buffer, header: BatchHeader) -> None:
        """Queue a stamped batch; its bytes must stay as they are until write() returns."""
        if self.failure is not None:
            raise self._fenced_error()
        if header.base_offset != self.log_end or header.size != len(batch):
            broken(
                "appended batch does not continue the log",
                base_offset=header.base_offset, log_end=self.log_end, size=header.size, present=len(batch),
            )  # fmt: skip
        self._pending.append(batch)
        self._headers.append(header)
        self._pending_bytes += header.size
        self.log_end = header.base_offset + header.record_count

    def write(self) -> int:
        """Write all that is queued and return written_end.

        StorageFull: nothing of it is stored, log_end is back at written_end, the log goes on.
        StorageFailed: the same, and the log is fenced.
        """
        if self.failure is not None:
            self.discard_pending()
            raise self._fenced_error()
        if not self._pending:
            return self.written_end
        try:
            segment = self._write_pending()
        except OSError as error:
            self.discard_pending()
            if error.errno in files.FULL_ERRNOS:
                raise StorageFull(
                    "the disk is full", why=str(error), hint="free space; the log goes on by itself"
                ) from error
            self._fence(StorageFailed("write failed", why=str(error)), error)
        except DanubeError as error:
            self.discard_pending()
            self._fence(error, error)
        segment.count_written(self._headers, self._pending_bytes)
        self.written_end = self.log_end
        self._unsynced.wrote(segment.file, self.log_end)
        self.discard_pending()
        return self.written_end

    def _write_pending(self) -> StoredSegment:
        """A full disk is asked once more, without the spare segment where there is one."""
        while True:
            try:
                writer = self._writer or self._create_writer()
                writer.write(self._pending, self._pending_bytes, self._headers[0].append_time_us)
            except OSError as error:
                if error.errno not in files.FULL_ERRNOS or not self.spare.give_up():
                    raise
            else:
                return writer.segment

    def discard_pending(self) -> None:
        """Drop queued batches; log_end goes back to written_end."""
        self._pending.clear()
        self._headers.clear()
        self._pending_bytes = 0
        self.log_end = self.written_end

    def _writer_of(self, segment: StoredSegment, *, created: bool) -> SegmentWriter:
        return SegmentWriter(segment, self._unsynced, self.options, created=created)

    def _create_writer(self) -> SegmentWriter:
        segment = StoredSegment(self.directory, self.identity, self.written_end, self.epoch)
        segment.file = LogFile(segment.file.path, locked=True)
        segment.size_bytes = self.spare.create(segment.file)
        self._writer = writer = self._writer_of(segment, created=True)
        self._files_created += 1
        self._segments.append(segment)
        self._bases.append(segment.base_offset)
        return writer

    # -- failure ----------------------------------------------------------------------------------

    def _fence(self, failure: DanubeError, cause: BaseException | None = None) -> NoReturn:
        if self.failure is None:
            self.failure = failure
        raise self._fenced_error() from cause

    def _fenced_error(self) -> StorageFailed:
        failure = self.failure
        if isinstance(failure, StorageFailed):
            return StorageFailed(failure.what, why=failure.why, hint="the log is opened anew by its owner")
        return StorageFailed("the log is fenced", why=str(failure))

    # -- sync -------------------------------------------------------------------------------------

    def sync_job(self) -> SyncJob | None:
        """Return the work of a thread that makes all written batches durable; None if it is under way."""
        active_end = self.written_end
        if self.failure is not None or active_end <= self._requested_end or not self._unsynced.ends:
            return None
        self._requested_end = active_end
        last = self._segments[-1]
        return SyncJob(
            self._unsynced.start_job(),
            self.directory if self._files_created > self._files_synced else None,
            self._files_created, active_end, last.base_offset, last.data_end, self.epoch,
        )  # fmt: skip

    def unsynced_files(self) -> tuple[list[LogFile], bool]:
        """Files with bytes that may not be on the disk, the oldest first, and whether any of them is new."""
        return self._unsynced.files(), self._files_created > self._files_synced

    def synced(self, job: SyncJob) -> None:
        """``job`` succeeded: advance synced_end; store_mark() tells recovery of it."""
        active = self.active
        if self.failure is None and active is not None and active.file.lost:
            self.failure = Fenced("a newer owner has taken the log over")
        self._unsynced.end_job(job.end_offset if self.failure is None else -1)
        if self.failure is not None:
            return
        if job.end_offset > self.written_end:
            broken("sync moved outside the log", end=job.end_offset, written_end=self.written_end)
        if self.witness is not None and not self.witness.began and job.created > self._files_synced:
            self._tell_witness(began=True)
        self._files_synced = max(self._files_synced, job.created)
        if job.end_offset > self.synced_end:
            self.synced_end = job.end_offset
            self._mark.note(job.end_offset, job.base_offset, job.position, self.epoch)

    def store_mark(self) -> None:
        """Rewrite the sync mark if it is old; a fenced log's may be a newer owner's by now."""
        if self.failure is None:
            self._mark.store()

    def sync_failed(self, job: SyncJob, error: Exception) -> None:
        """``job`` failed: the log is fenced, and none of its descriptors is synced again."""
        for file in job.files:
            file.failed = True
        self._unsynced.end_job()
        if self.failure is None:
            self.failure = StorageFailed("sync failed", why=str(error))

    def _note_all_synced(self) -> None:
        last = self._segments[-1]
        self._mark.note(self.synced_end, last.base_offset, last.data_end, self.epoch)

    # -- roll and seal ----------------------------------------------------------------------------

    def roll(self, producer_snapshot: bytes = b"") -> SealJob | None:
        """End the active segment here; the returned job seals it (run it in a thread, then sealed()).

        ``producer_snapshot`` describes the producers at written_end.  None: there was nothing to end.
        """
        if self.failure is not None:
            raise self._fenced_error()
        active = self.active
        if active is None or not active.batch_count:
            return None
        self._writer = None
        self.age_due = False
        return self.seal_job(active, producer_snapshot or None)

    def seal_job(self, segment: StoredSegment, snapshot: bytes | None) -> SealJob:
        """The job that seals a rolled segment; also again, after one that was deferred."""
        number = self._segments.index(segment)
        segment.sealing = True
        previous = self._segments[number - 1] if number else None
        return SealJob(segment, previous, snapshot, self.front_hash, self.witness)

    def sealed(self, job: SealJob) -> None:
        """``job`` succeeded, or was deferred by a full disk: then it comes again (seal_job)."""
        segment = job.segment
        segment.sealing = False
        job.release()
        if job.deferred or job.summary is None:
            if job.snapshot is not None:
                self._unsealed_snapshot = Checkpoint(segment.end_offset, job.snapshot)
            return
        segment.take_summary(job.summary, job.size_bytes)
        if segment.file not in self._unsynced.ends and segment.file.writable:
            descriptors.close(segment.file)
            segment.file = LogFile(segment.file.path)

    def seal_failed(self, job: SealJob, error: Exception) -> None:
        """``job`` failed: the log is fenced."""
        job.segment.sealing = False
        job.release()
        if self.failure is None:
            self.failure = StorageFailed("seal failed", why=str(error))

    def checkpoint(self, producer_snapshot: bytes) -> None:
        """Store the state of the producers at synced_end.

        No later recovery then reads their headers again.  Call it once after a recovery that scanned much.
        """
        with suppress(OSError):  # without it the next recovery only takes longer
            write_checkpoint(self.directory, self.identity, Checkpoint(self.synced_end, producer_snapshot))

    # -- read -------------------------------------------------------------------------------------

    def read(self, offset: int, end: int, bytes_max: int = READ_CHUNK_BYTES) -> Chunk:
        """Stored batches from the one that holds ``offset``, none that starts at or above ``end``.

        At least one batch, however large; an empty chunk where nothing is left below ``end`` or all
        up to ``next_offset`` is damaged.  Raises OffsetOutOfRange, and StorageFailed if the disk
        does not answer: the log itself stays as it is.
        """
        end = min(end, self.written_end)
        if self.holes and offset < end and (hole := self.holes.at(offset)) is not None:
            return Chunk(b"", offset, min(hole.end, end), hole=hole.kind)
        if not self.start <= offset <= self.log_end:
            raise OffsetOutOfRange(
                f"offset {offset} is not in the log",
                why=f"it holds {self.start} .. {self.written_end}", start=self.start, end=self.written_end,
            )  # fmt: skip
        if offset >= end:
            return Chunk(b"", offset, offset)
        return self._reader.read(offset, end, bytes_max, self.active, fenced=self.fenced)

    def offset_at_time(self, time_us: int) -> int:
        """First offset appended at or after ``time_us``; written_end when all are older."""
        offset = self._reader.offset_at_time(time_us)
        return self.written_end if offset is None else offset

    # -- retention --------------------------------------------------------------------------------

    def retain(self, now_us: int, retention_ms: int, retention_bytes: int) -> list[OffsetRange]:
        """Delete rolled segments from the front that are too old or too many; 0 keeps for ever."""
        cutoff_us = now_us - retention_ms * 1000 if retention_ms else None
        self.check_age(now_us, retention_ms)
        if self._segments == [self.active]:
            return []  # as most of many logs are, most of the time
        excess_bytes = self.local_bytes - retention_bytes if retention_bytes else 0
        return self._delete(expired(self.front(), cutoff_us, excess_bytes))

    def check_age(self, now_us: int, retention_ms: int) -> None:
        """Make should_roll true if the active segment is old for ``retention_ms`` (0: never).

        Its owner then rolls it, also for a topic without producers, and retention deletes it later.
        """
        active = self.active
        if retention_ms and active is not None and active.batch_count:
            self.age_due = active.first_append_us < now_us - retention_ms * 1000 // _AGE_ROLLS

    def evict(self, end_offset: int, *, sealed: bool = True) -> list[OffsetRange]:
        """Delete segments from the front that end at or below ``end_offset``; only sealed ones, or any."""
        return self._delete(below(self.front(), end_offset, sealed=sealed))

    def front(self) -> list[StoredSegment]:
        """Rolled segments from the front that nothing is done with: they may be deleted."""
        if self.failure is not None:
            return []
        active = self.active
        held = {
            segment for segment in self._segments if segment.file in self._unsynced.ends or segment.sealing
        }
        return list(takewhile(lambda segment: segment is not active and segment not in held, self._segments))

    def above(self, offset: int) -> Iterator[StoredSegment]:
        """Segments that end above ``offset``, the newest first."""
        return takewhile(lambda segment: segment.end_offset > offset, reversed(self._segments))

    def _delete(self, doomed: list[StoredSegment]) -> list[OffsetRange]:
        if not doomed:
            return []
        try:
            doomed = deletable(doomed, self._segments, self._unsealed_snapshot)
            if len(doomed) == len(self._segments):
                # The name and header of an empty segment keep the numbering when all files are gone.
                created_us = doomed[-1].last_append_us
                empty = create_empty(
                    self.directory, self.identity, self.epoch, self.written_end, created_us,
                    self.options.log_id,
                )  # fmt: skip
                self._segments.append(empty)
                self._bases.append(empty.base_offset)
                self._writer = self._writer_of(empty, created=False)
            self._tell_witness(self._bases[len(doomed)])  # first, because its claims must hold
            deleted = remove(doomed, self._segments, self._bases)
            self.front_hash = doomed[-1].content_hash
            self._reader.forget_places()
            files.fsync_directory(self.directory)
        except OSError as error:
            raise StorageFailed("old segments cannot be deleted", why=str(error)) from error
        self.damage.forget_below(self.start)
        self.damage.store()
        return deleted

    def replace(self, sources: list[StoredSegment], made: Merged, path: Path) -> None:
        """Let the compacted segment in the file ``path`` take the place of ``sources``, of the front()."""
        try:
            replace(sources, made, path, self._segments, self._bases)
        except OSError as error:
            raise StorageFailed("segments cannot be replaced", why=str(error)) from error
        finally:
            self._reader.forget_places()

    # -- close ------------------------------------------------------------------------------------

    def close(self, producer_snapshot: bytes = b"") -> None:
        """Write, sync and seal the active segment, then release everything.  A fenced log is abandoned.

        Raises like write(), and StorageFailed if the last sync fails; all is released even then.
        """
        if self.failure is not None:
            self.abandon()
            return
        self.spare.give_up()  # a footer may need the room
        try:
            self.write()
            job = self.sync_job()
            if job is not None:
                self._run(job, self.synced, self.sync_failed)
            seal = self.roll(producer_snapshot)
            if seal is not None:
                self._run(seal, self.sealed, self.seal_failed)
                self._note_all_synced()
            elif producer_snapshot and self.recovery.scanned_bytes:
                self.checkpoint(producer_snapshot)  # no footer will hold it: nothing was appended
            self.store_mark()
        finally:
            self.abandon()

    def _run(self, job: Any, done: Callable[[Any], None], failed: Callable[[Any, Exception], None]) -> None:
        try:
            job.run()
        except (OSError, DanubeError) as error:
            failed(job, error)
            raise self._fenced_error() from error
        done(job)

    def abandon(self) -> None:
        """Release files and locks as they are: nothing is written, synced or sealed."""
        self.failure = self.failure or Fenced("the log was closed")
        if self.witness is not None:
            self.witness.leave()
        self.discard_pending()
        self.spare.give_up()
        self._unsynced.abandon()
        for segment in self._segments:
            descriptors.close(segment.file)
        self._mark.close()


class LogReader:
    """Reads a log as one ordered stream; damage is skipped and reported once.

    Shares ``segments`` and their ``bases`` with the log that owns them.  Remembers where recent reads ended,
    so that reading on needs no search and no second scan.
    """

    def __init__(
        self, segments: list[StoredSegment], bases: list[int], damage: DamageRegister, holes: LocalHoles
    ) -> None:
        self._segments = segments
        self._bases = bases
        self._damage = damage
        self._holes = holes
        self._places: OrderedDict[int, tuple[StoredSegment, Place]] = OrderedDict()

    def forget_places(self) -> None:
        """Segments were deleted."""
        self._places.clear()

    def read(
        self, offset: int, end: int, bytes_max: int, active: StoredSegment | None, *, fenced: bool
    ) -> Chunk:
        """A chunk from ``offset``, which lies in the log below ``end``; StorageFailed as in Log.read."""
        segment, place = self._places.pop(offset, (None, None))
        if segment is None or offset >= segment.end_offset:
            place = None
            segment = self._segments[bisect_right(self._bases, offset) - 1]
        if offset >= segment.end_offset:
            _check_owned(fenced)
            return self._hole(segment, offset, end)
        try:
            reading = read_segment(segment, offset, end, bytes_max, place)
        except OSError as error:
            raise StorageFailed("read failed", why=str(error), file=segment.name) from error
        if reading.gaps:
            _check_owned(fenced)
            self._note(segment, reading.gaps)
        chunk = reading.chunk
        if chunk.next_offset < segment.end_offset or segment is active:
            self._places[chunk.next_offset] = (segment, reading.next_place)
            if len(self._places) > _PLACES_MAX:
                self._places.popitem(last=False)
        return chunk

    def _hole(self, segment: StoredSegment, offset: int, end: int) -> Chunk:
        """Offsets that no segment holds: reading goes on at the next one."""
        number = bisect_right(self._bases, segment.base_offset)
        hole_end = self._bases[number] if number < len(self._bases) else end
        start, position = segment.end_offset, segment.data_end
        hole_end = next((named.start for named in self._holes if offset < named.start < hole_end), hole_end)
        if self._damage.note(DamagedRange(segment.name, position, start, hole_end, "batches are missing")):
            self._damage.store()
        following = min(hole_end, end)
        return Chunk(b"", offset, following, (OffsetRange(offset, following),))

    def _note(self, segment: StoredSegment, gaps: tuple[Gap, ...]) -> None:
        new = False
        for position, _, start, end in gaps:
            new |= self._damage.note(DamagedRange(segment.name, position, start, end, "batches are damaged"))
        if new:
            self._damage.store()

    def offset_at_time(self, time_us: int) -> int | None:
        """First offset appended at or after ``time_us``; None when all are older."""
        for segment in self._segments:
            if segment.last_append_us < time_us:
                continue
            try:
                offset = offset_at_time(segment, time_us)
            except OSError as error:
                raise StorageFailed("read failed", why=str(error), file=segment.name) from error
            if offset is not None:
                return offset
        return None


def _check_owned(fenced: bool) -> None:
    """Refuse a read of a fenced log: the newer owner's recovery moves its batches, which is no damage."""
    if fenced:
        raise StorageFailed("the log is being opened anew", hint="read again later")
