"""Opening a partition's log after any end of the process that wrote it.

Every step can be repeated: a crash during recovery leaves a directory that the next recovery
understands.  In order:

1.  Look at every file without changing any (:mod:`danube.wal.recovery.inventory`).
2.  Set files aside that belong elsewhere; remove unfinished temporary files.
3.  Sealed segments are trusted by their footers; unsealed ones are scanned.  What follows the last
    intact batch is
        zeros                                    a clean end;
        other bytes, at or above the sync mark   a torn tail: cut back;
        other bytes below the mark, or offsets
        missing before the next segment          damage: the bytes stay, the range is reported.
    Damage between intact batches is reported and skipped.  Offsets are never given out twice: where
    records are missing at the end, numbering goes on behind what the mark says was synced.
4.  Intact batches above the sync mark may never have reached the disk, and a descriptor whose sync
    failed once must not be synced again: they are copied into a new file of the new epoch, synced,
    renamed into place, and only then cut from the old file.  The copy becomes the active segment.
    On a full disk they are written once more where they lie, and synced: opening needs no room.
5.  Unsealed segments get their footer, also those whose footer a cut left unfinished
    (:mod:`danube.wal.recovery.inventory`).  Appends never go to an older owner's file.
6.  What a witness outside the directory says was here and is not is reported
(danube.wal.recovery.witness).  Where
    first segments are gone an empty one takes their place, so that readers are told.  Where all are gone the
    log goes on far ahead: nobody can say which offsets were given.
7.  A log of a history that is gone, or of before the end of the machine, goes on ahead of its end
    (:class:`danube.wal.segments.local_holes.OffsetJump`).  A hole is named before any file is changed.

Where a segment reaches beyond the base offset of the next file, the next file wins: it is the copy
of step 4, or the file of an owner that came later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from danube.core.batch.format import padded
from danube.core.placement.recovered import offset_ahead
from danube.errors import Damage
from danube.host import files
from danube.host.clock import wall_us
from danube.wal.recovery.carry import carry_over, create_empty, drop_copy, write_again
from danube.wal.recovery.damage import DamagedRange
from danube.wal.recovery.inventory import FoundFile, Inventory, name_aside, take_inventory
from danube.wal.recovery.mark import FILE_NAME as MARK_NAME
from danube.wal.recovery.mark import Mark
from danube.wal.recovery.producers import FILE_NAME as CHECKPOINT_NAME
from danube.wal.recovery.producers import read_checkpoint, remove_checkpoint
from danube.wal.recovery.survey import Headers, Survey, survey
from danube.wal.recovery.witness import Witness
from danube.wal.segments.descriptors import LogFile, descriptors
from danube.wal.segments.local_holes import FILE_NAME as HOLES_NAME
from danube.wal.segments.local_holes import LocalHoles, OffsetJump
from danube.wal.segments.segment import FOOTER_MAGIC, HEADER_BYTES, NO_HASH, NO_LOG, LogIdentity, file_name
from danube.wal.segments.stored_segment import StoredSegment, write_footer
from danube.wal.segments.walk import WINDOW_BYTES, Place, read_run

_WHOLE = 1 << 62


class RecoveryReport(NamedTuple):
    """Findings and actions of opening a log.

    ``producer_snapshot`` is the newest stored one; ``headers`` are those of all batches that may
    come after it, in log order, each handed out once.  ``damaged`` are the offset ranges and files
    that are not as they were written; ``unfinished_seals`` the files whose footer was not finished.
    """

    start: int
    log_end: int
    scanned_bytes: int = 0
    torn_bytes: int = 0
    carried_bytes: int = 0
    damaged: tuple[DamagedRange, ...] = ()
    producer_snapshot: bytes | None = None
    headers: Headers = Headers()
    unfinished_seals: tuple[str, ...] = ()


def _newest_epoch(inventory: Inventory) -> int:
    """Return the epoch of the last owner that has written a segment here; 0 without one."""
    parts = [part for file in inventory.files for part in (file.header, file.summary) if part is not None]
    return max((part.epoch for part in parts), default=0)


class Recovered(NamedTuple):
    """``active`` is the last of ``segments`` when it is of the new epoch, to be appended to."""

    segments: list[StoredSegment]
    active: StoredSegment | None
    mark: Mark | None
    holes: LocalHoles
    report: RecoveryReport


class Recovery:
    """One opening of one log; ``run`` does it all."""

    def __init__(
        self, directory: Path, identity: LogIdentity, epoch: int, trusted_end: int | None,
        ahead: OffsetJump | None = None, log_id: bytes = NO_LOG, witness: Witness | None = None,
        made: bool = False,
    ) -> None:  # fmt: skip
        """``made``: the directory was not there."""
        self._directory = directory
        self._log_id = log_id
        self._identity = identity
        self._epoch = epoch
        self._trusted_end = trusted_end
        self._ahead = ahead
        self._witness = witness if witness is not None and witness.known else None
        self._made = made
        self._gone = ""  # why there is no segment at all, where there were some
        self._holes = LocalHoles(directory)
        self._damaged: list[DamagedRange] = []
        self._unfinished_seals: list[str] = []
        self._headers_of: dict[StoredSegment, Headers] = {}
        self._surveys: dict[StoredSegment, Survey] = {}
        self._locked: dict[StoredSegment, LogFile] = {}
        self._scanned_bytes = self._torn_bytes = self._carried_bytes = 0

    def run(self) -> Recovered:
        """Raises Fenced, AlreadyRunning, StorageIncompatible (nothing touched), StorageFull or OSError."""
        try:
            return self._run()
        finally:
            for file in self._locked.values():
                descriptors.unpin(file)
                descriptors.close(file)

    def _run(self) -> Recovered:
        inventory = take_inventory(self._directory, self._identity, self._epoch, self._log_id)
        mark = inventory.mark.mark
        if inventory.mark.damaged:
            self._note(MARK_NAME, 0, 0, 0, "a slot of the sync mark is damaged")
        self._load_holes()
        synced_end = max(mark.synced_end if mark else 0, self._trusted_end or 0)
        if self._witness is not None:
            inventory, synced_end = self._miss(self._witness, inventory, synced_end)
        found, removable = self._choose(inventory, synced_end)
        segments = self._look(found, mark, synced_end)
        log_end = max([synced_end, *self._claims(inventory), *(segment.end_offset for segment in segments)])
        ends = [segment.base_offset for segment in segments[1:]] + [log_end] * bool(segments)
        self._report_holes(segments, ends)
        if mark is not None and mark.synced_end and not inventory.files:
            why = "the sync mark says that records were here, and there is no segment"
            self._note(file_name(mark.base_offset), 0, mark.base_offset, mark.synced_end, why)
        snapshot, headers = self._producers(segments, log_end)
        self._tidy(inventory, [file for file in removable if file.base_offset != log_end])
        ahead = self._goes_ahead(inventory)
        start = self._name_hole(ahead, segments, log_end) if ahead is not None else log_end
        segments, active = self._make_durable(segments, ends)
        if ahead is not None:
            if active is not None:
                self._seal_copy(active, segments[-2].content_hash if len(segments) > 1 else NO_HASH)
                active = None
            self._remove_unused(log_end)  # makes way for the segment behind the hole
            log_end = start
        if log_end > (segments[-1].end_offset if segments else 0):
            # Nothing else says where numbering goes on; the new file replaces an empty one of its name.
            active = create_empty(self._directory, self._identity, self._epoch, log_end, 0, self._log_id)
            segments.append(active)
        elif active is None:
            self._remove_unused(log_end)
        report = RecoveryReport(
            segments[0].base_offset if segments else 0, log_end, self._scanned_bytes, self._torn_bytes,
            self._carried_bytes, tuple(self._damaged), snapshot, headers,
            tuple(self._unfinished_seals),
        )  # fmt: skip
        return Recovered(segments, active, mark, self._holes, report)

    # -- going ahead ------------------------------------------------------------------------------

    def _load_holes(self) -> None:
        """Load the local holes; note a file that cannot be read, whose holes then count as missing."""
        try:
            self._holes = LocalHoles.load(self._directory)
        except Damage as error:
            self._note(HOLES_NAME, 0, 0, 0, error.why)

    def _miss(self, witness: Witness, inventory: Inventory, synced_end: int) -> tuple[Inventory, int]:
        """Report missing data that the witness names; return the inventory then, and the synced end.

        The missing data of a log in tiers may be in the store; then no replacement is made.
        """
        found, start = inventory.files, witness.start
        end = found[0].base_offset if found else synced_end
        what = "the first segments of the log are gone"
        if not found and (self._made or witness.began):
            what = "the log's directory is gone" if self._made else "all segments of the log are gone"
            self._gone, end = what, max(synced_end, witness.end)
        elif start >= end:
            return inventory, synced_end
        told = (start, end) if witness.holds_all else (end, end)
        self._note(file_name(start), 0, *told, f"{what}: a witness says that they were here")
        if witness.holds_all and start < end:
            self._set_aside(inventory)  # a file of that name is replaced
            epoch = found[0].header.epoch if found and found[0].header is not None else 0
            create_empty(self._directory, self._identity, epoch, start, 0, self._log_id)
            inventory = take_inventory(self._directory, self._identity, self._epoch, self._log_id)
        return inventory, max(synced_end, end)

    def _goes_ahead(self, inventory: Inventory) -> OffsetJump | None:
        """Why offsets behind the end may have been given before, to records that are gone, if they were."""
        newest = _newest_epoch(inventory)
        ahead = self._ahead
        if self._gone:
            return OffsetJump(self._epoch, wall_us(), self._gone)
        while ahead is not None and (self._holes.made_since(ahead.since_us) or newest >= ahead.first_epoch):
            ahead = ahead.also
        return ahead

    def _name_hole(self, ahead: OffsetJump, segments: list[StoredSegment], log_end: int) -> int:
        """Before any file has the new epoch, which would hide that the log is older; where it goes on."""
        start = log_end + ahead.step if ahead.step else offset_ahead(log_end, ahead.since_us)
        self._holes.forget_below(segments[0].base_offset if segments else log_end)
        self._holes.add(log_end, start, self._epoch, ahead)
        return start

    def _note(self, file: str, position: int, start: int, end: int, why: str) -> None:
        self._damaged.append(DamagedRange(file, position, start, end, why))

    # -- looking: nothing is changed --------------------------------------------------------------

    def _choose(self, inventory: Inventory, synced_end: int) -> tuple[list[FoundFile], list[FoundFile]]:
        """Files that are part of the log, and those to remove: empty, or above ``trusted_end``."""
        chosen: list[FoundFile] = []
        removable: list[FoundFile] = []
        for file in inventory.files:
            above = file.base_offset >= synced_end
            # An empty file below the synced end once held records: it stays, and they are reported.
            useless = above and (file.empty or self._trusted_end is not None)
            (removable if useless else chosen).append(file)
        return chosen, removable

    def _claims(self, inventory: Inventory) -> Iterator[int]:
        """Offsets that numbering must not fall below although no record there can be read."""
        for file in inventory.files:
            if file.empty and file.header is not None and self._trusted_end is None:
                yield file.base_offset
            if self._trusted_end is None:
                yield file.claimed_end
        if all(file.empty for file in inventory.files) and self._trusted_end is None:
            yield from (file.base_offset for file in inventory.files)
        for file, _ in inventory.foreign:
            if file.summary is not None and file.summary.identity == self._identity:
                yield file.summary.end_offset
        yield self._holes.end

    def _look(self, found: list[FoundFile], mark: Mark | None, synced_end: int) -> list[StoredSegment]:
        segments: list[StoredSegment] = []
        for number, file in enumerate(found):
            later = found[number + 1 :]
            following = later[0].base_offset if later else None
            for flaw in file.flaws:
                self._note(file.path.name, 0, file.base_offset, file.base_offset, flaw)
            cut = following
            if self._trusted_end is not None:
                cut = synced_end if following is None else min(following, synced_end)
            summary = file.summary
            if summary is not None and (self._trusted_end is None or summary.end_offset <= synced_end):
                segment = StoredSegment.of_summary(self._directory, summary, file.size)
                segment.end_offset = min(segment.end_offset, following if following is not None else _WHOLE)
            else:
                segment = self._survey(file, self._synced_position(file, later, mark), synced_end, cut)
                self._look_for_footer(segment, file, any(other.summary is not None for other in later))
            segments.append(segment)
        return segments

    def _synced_position(self, file: FoundFile, later: list[FoundFile], mark: Mark | None) -> int:
        """Below which position of an unsealed file every byte was synced.

        A segment is sealed, and the mark moves into a file, only after all older files were synced.
        """
        if self._trusted_end is not None or any(other.summary is not None for other in later):
            return _WHOLE
        if mark is None or mark.base_offset < file.base_offset:
            return 0
        return mark.position if mark.base_offset == file.base_offset else _WHOLE

    def _survey(
        self, file: FoundFile, synced_position: int, synced_end: int, cut: int | None
    ) -> StoredSegment:
        epoch = file.header.epoch if file.header is not None else 0
        segment = StoredSegment(self._directory, self._identity, file.base_offset, epoch)
        locked = LogFile(file.path, locked=True)
        fd = descriptors.pin(locked)
        self._locked[segment] = locked
        headers = Headers()
        result = survey(segment, fd, file.size, Place(synced_position, synced_end), headers, cut)
        self._scanned_bytes += result.scanned_bytes
        self._headers_of[segment] = headers
        self._surveys[segment] = result
        for gap in segment.gaps.values():
            self._note(segment.name, gap.position, gap.start, gap.end, "batches are damaged")
        return segment

    def _look_for_footer(self, segment: StoredSegment, file: FoundFile, sealed_behind: bool) -> None:
        """Tell of a seal that a cut left unfinished; one in front of a sealed segment was finished."""
        fd = self._locked[segment].fd
        begun = files.pread(fd, len(FOOTER_MAGIC), segment.data_end) == FOOTER_MAGIC
        if file.unfinished or (begun and not file.flaws and not sealed_behind):
            self._unfinished_seals.append(segment.name)
        elif begun and not file.flaws:
            end = segment.end_offset
            self._note(segment.name, segment.data_end, end, end, "the end of the segment footer is missing")

    def _report_holes(self, segments: list[StoredSegment], ends: list[int]) -> None:
        for segment, end in zip(segments, ends, strict=True):
            for first, last in self._holes.uncovered(segment.end_offset, end):
                self._note(segment.name, segment.data_end, first, last, "batches are missing")

    # -- producers --------------------------------------------------------------------------------

    def _producers(self, segments: list[StoredSegment], log_end: int) -> tuple[bytes | None, Headers]:
        """The newest usable snapshot and the headers of all batches behind it."""
        known_end, snapshot = self._checkpoint(log_end)
        for segment in reversed(segments):
            if segment.end_offset <= known_end:
                break
            if segment.has_snapshot:
                try:
                    snapshot = segment.load_snapshot()
                except Damage as error:
                    end = segment.end_offset
                    self._note(segment.name, segment.data_end, end, end, error.what)
                    continue
                known_end = segment.end_offset
                break
        headers = Headers()
        for segment in segments:
            if segment.end_offset > known_end:
                headers.extend(self._headers_of.get(segment) or self._read_headers(segment))
        return snapshot, headers

    def _checkpoint(self, log_end: int) -> tuple[int, bytes | None]:
        try:
            checkpoint = read_checkpoint(self._directory, self._identity)
        except Damage as error:
            if type(error) is not Damage:
                raise
            self._note(CHECKPOINT_NAME, 0, 0, 0, error.what)
            return 0, None
        if checkpoint is None:
            return 0, None
        if checkpoint.end_offset > log_end:
            # It knows records that were cut away; their offsets are given out again.
            remove_checkpoint(self._directory)
            return 0, None
        return checkpoint

    def _read_headers(self, segment: StoredSegment) -> Headers:
        headers = Headers()
        place = Place(HEADER_BYTES, segment.base_offset)
        extent = segment.extent()
        while place.position < segment.data_end and place.offset < segment.end_offset:
            run = read_run(
                extent.fd, place.position, segment.data_end, place.offset, WINDOW_BYTES, extent.sparse
            )
            if run is None:
                gap = segment.gap_at(place)
                place = Place(gap.resume, gap.end)
                continue
            headers.add(run, len(run.batches.positions))
            self._scanned_bytes += run.batches.stop
            place = Place(run.position_end, run.offset_end)
        return headers

    # -- changing ---------------------------------------------------------------------------------

    def _tidy(self, inventory: Inventory, removable: list[FoundFile]) -> None:
        for path in inventory.temporary:
            with suppress(FileNotFoundError):  # a fenced log of this process may drop its spare meanwhile
                files.unlink(path)
        self._set_aside(inventory)
        for file in reversed(removable):
            files.unlink(file.path)
        if inventory.foreign or removable:
            files.fsync_directory(self._directory)

    def _set_aside(self, inventory: Inventory) -> None:
        """Keep files that belong elsewhere for a person to look at."""
        bases = [file.base_offset for file in inventory.files]
        for file, reason in inventory.foreign:
            aside = name_aside(file.path)
            files.rename(file.path, aside)
            following = min((base for base in bases if base > file.base_offset), default=file.base_offset)
            missing = file.base_offset < min(bases, default=0)  # elsewhere the hole itself is reported
            self._note(aside.name, 0, file.base_offset, following if missing else file.base_offset, reason)

    def _remove_unused(self, log_end: int) -> None:
        """Make way for the active segment of the new epoch."""
        try:
            files.unlink(self._directory / file_name(log_end))
        except FileNotFoundError:
            return
        files.fsync_directory(self._directory)

    def _make_durable(
        self, segments: list[StoredSegment], ends: list[int]
    ) -> tuple[list[StoredSegment], StoredSegment | None]:
        """Cut torn tails, copy batches that may be unsynced, seal the rest."""
        durable: list[StoredSegment] = []
        active: StoredSegment | None = None
        for segment, end in zip(segments, ends, strict=True):
            previous_hash = durable[-1].content_hash if durable else NO_HASH
            if segment.sealed:
                durable.append(segment)
                continue
            result = self._surveys[segment]
            fd = self._locked[segment].fd
            if result.tail_size and segment.end_offset < end:
                segment.data_end = padded(result.tail_end)
            else:
                self._torn_bytes += result.tail_size
            if segment.end_offset == segment.base_offset == end:
                continue  # not one whole batch, and none is missing
            files.ftruncate(fd, segment.data_end)
            copy = self._carry(segment, fd, result.unsynced)
            if copy is None or copy.base_offset > segment.base_offset:
                self._seal(segment, fd, previous_hash)
                previous_hash = segment.content_hash
                durable.append(segment)
            if copy is None:
                continue
            durable.append(copy)
            if segment is segments[-1] and segment.end_offset == end:
                active = copy
            else:
                self._seal_copy(copy, previous_hash)
        return durable, active

    def _carry(self, segment: StoredSegment, fd: int, start: Place | None) -> StoredSegment | None:
        if start is None:
            return None
        try:
            copy = carry_over(segment, fd, start, self._epoch, self._log_id)
        except OSError as error:
            if error.errno not in files.FULL_ERRNOS:
                raise
            drop_copy(segment, start)
            write_again(fd, start.position, segment.data_end)  # no room for a copy: they stay where they are
            return None
        self._carried_bytes += copy.data_end - HEADER_BYTES
        if start.position > HEADER_BYTES:
            files.ftruncate(fd, start.position)
            segment.forget()
            survey(segment, fd, start.position, start, Headers(), start.offset)
        return copy

    def _seal_copy(self, copy: StoredSegment, previous_hash: bytes) -> None:
        fd = descriptors.pin(copy.file)
        try:
            self._seal(copy, fd, previous_hash)
        finally:
            descriptors.unpin(copy.file)
            descriptors.close(copy.file)
        copy.file = LogFile(copy.file.path)

    def _seal(self, segment: StoredSegment, fd: int, previous_hash: bytes) -> None:
        """Write the footer; where the disk is full the segment stays unsealed and readable."""
        try:
            summary, size = write_footer(fd, segment, previous_hash, None, files.fdatasync)
        except OSError as error:
            if error.errno not in files.FULL_ERRNOS:
                raise
            return
        segment.take_summary(summary, size)
