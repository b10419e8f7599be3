"""The cold tier of one partition at its owner: its manifest, and reads below the local start.

Offsets ``start .. log.start`` are read from objects, through the cache; later offsets from local files.  A
read that must wait raises FetchPending, which states when to try again.  No record is skipped because the
store does not answer, an object is missing or its bytes are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

from danube.core.partition.pending import NOTHING, Pending, together
from danube.errors import DanubeError, FetchPending, OffsetOutOfRange, StorageFailed, StoreDamaged, broken
from danube.host import clock, telemetry
from danube.wal.cold.reads import Ticket
from danube.wal.cold.segment import BLOCK_BYTES, ColdSegment, Missing
from danube.wal.segments.reading import Chunk, OffsetRange
from danube.wal.segments.segment import HEADER_BYTES as SEGMENT_HEADER_BYTES
from danube.wal.segments.segment import NO_HASH, LogIdentity
from danube.wal.tier.keys import segment_key
from danube.wal.tier.manifest import Manifest, SegmentEntry

if TYPE_CHECKING:
    from danube.core.metadata.commands import TopicRecord
    from danube.core.partition.partition import Partition
    from danube.wal.cold.cache import ColdCache
    from danube.wal.log.log import Log
    from danube.wal.segments.holes import Hole
    from danube.wal.segments.stored_segment import StoredSegment

_log = telemetry.events("tier")
WHOLE_BYTES_MAX: Final = 4 * BLOCK_BYTES  # smaller objects are fetched whole, with their footer
NO_COMPACTION: Final = (False, 0)  # the mover's default: whether to compact, age of tombstones in ms
AHEAD_STEP_BYTES: Final = 4 * BLOCK_BYTES
AHEAD_SHARE: Final = 4  # one reader's window is at most the cache's size divided by this


class TieredPartition(Protocol):
    """Members of :class:`danube.broker.partition.hosted.HostedPartition` that PartitionTier uses."""

    name: str
    record: TopicRecord
    index: int
    core: Partition
    log: Log | None

    @property
    def topic_id(self) -> int: ...
    @property
    def high_watermark(self) -> int: ...
    def follow_holes(self, holes: list[Hole]) -> None: ...


class PartitionTier:
    """Cold tier of one hosted partition with a log; all methods run on the worker's loop."""

    def __init__(self, hosted: TieredPartition, cache: ColdCache) -> None:
        self.hosted = hosted
        self.identity = LogIdentity(hosted.topic_id, hosted.index)
        self.manifest: Manifest | None = None
        self.known = Ticket()  # done when the mover has reported the store's content
        self.error = ""  # why nothing can be uploaded now
        self.confirmed = False  # whether the mover has read the manifest from the store
        self.given_up_end = 0  # an operator has given up the holes that begin below
        self.trimmed = 0  # records below have expired, even if the manifest names them
        self.cursors_sent = -1
        self.leave_id = 0  # number of the last request to give the partition away; 0: it stays
        self.given_away = False  # whether it was given away with all its records in the store
        self.left_id = 0  # the last such request whose cursors the mover has stored
        self.compaction_sent = NO_COMPACTION
        self._cache = cache
        self._told = ""
        self._rolled = NOTHING
        self._rolled_state: tuple[object, ...] = ()  # the unit of ``_rolled``

    @property
    def log(self) -> Log:
        """Return the partition's log; a tier exists only for a partition with one."""
        log = self.hosted.log
        if log is None:
            broken("a partition without a log has a cold tier", partition=self.hosted.name)
        return log

    # -- ends -------------------------------------------------------------------------------------

    @property
    def start(self) -> int:
        """Return the first readable offset; raises FetchPending while it is unknown."""
        local_start = self.log.start
        if local_start == 0:
            return 0
        manifest = self.manifest
        if manifest is None:
            raise self._unknown()
        return min(local_start, max(manifest.start_offset, self.trimmed))

    @property
    def known_start(self) -> int | None:
        """Return ``start``; None while it is unknown."""
        return self.start if self.manifest is not None or self.log.start == 0 else None

    @property
    def uploaded_end(self) -> int:
        """Return the offset up to which records were uploaded and verified."""
        return 0 if self.manifest is None else self.manifest.uploaded_end

    def _unknown(self, ready: Callable[[], bool] | None = None) -> FetchPending:
        return FetchPending(
            f"it is not known yet what of {self.hosted.name} is in the object store",
            why=self.error, ready=ready or (lambda: self.known.done), hint="it goes on by itself",
        )  # fmt: skip

    # -- what the mover tells ---------------------------------------------------------------------

    def on_state(self, frame: dict[str, Any]) -> bool:
        """Take the mover's state; return True if its manifest is new.

        States of another ownership are ignored: an earlier manifest may end before this log begins, and the
        offsets between would count as expired.
        """
        if frame["epoch"] != self.hosted.core.epoch:
            self.error = frame["error"] or self.error
            return False
        if frame["error"] and frame["error"] != self.error:
            _log.warning("not uploaded", partition=self.hosted.name, error=frame["error"])
        self.error = frame["error"]
        self.left_id = frame.get("left_id", 0)
        if not frame["manifest"]:
            return False
        try:
            manifest = Manifest.decode(frame["manifest"])
        except DanubeError as error:
            self.error = str(error)
            return False
        known = self.manifest
        if known is None and not manifest.generation and manifest.start_offset < self.log.start:
            return False  # the mover has not read the store yet
        if manifest.identity != self.identity or manifest.topic != self.hosted.record.topic:
            self.error = f"the store's manifest is of {manifest.topic}, not of this topic"
            return False
        if known is not None and (manifest.epoch, manifest.generation) < (known.epoch, known.generation):
            return False
        if manifest.uploaded_end > self.log.log_end:
            self.error = (
                f"the store holds records up to {manifest.uploaded_end}, this host's log ends at"
                f" {self.log.log_end}: local data was lost; restore the broker from the store"
            )
            _log.error("log is shorter than its objects", partition=self.hosted.name, error=self.error)
            return False
        self.manifest = manifest
        self.confirmed |= frame["loaded"]
        self.known.end()
        self._link_hashes(manifest)
        if len(manifest.holes) or (known is not None and len(known.holes)):
            self.hosted.follow_holes(manifest.all_holes())
        return True

    def open_holes(self, end_offset: int) -> list[Hole]:
        """Return open holes that begin below ``end_offset``; raises FetchPending while they are unknown."""
        if self.manifest is None:
            raise self._unknown()
        return [hole for hole in self.manifest.all_holes() if hole.open and hole.start < end_offset]

    def _link_hashes(self, manifest: Manifest) -> None:
        """Give the log the hash of the last uploaded segment, which the next segment names."""
        log = self.log
        number = manifest.find(log.start) - 1
        if log.front_hash == NO_HASH and number >= 0 and manifest.entry(number).end_offset == log.start:
            log.front_hash = manifest.entry(number).chain_hash

    # -- reading ----------------------------------------------------------------------------------

    def read(self, offset: int, end: int, bytes_max: int) -> Chunk:
        """Return stored batches from ``offset``, which is below the local start.

        Raises FetchPending, OffsetOutOfRange below ``start``, and StorageFailed if this host's disk fails.
        """
        start = self.start
        if not start <= offset < self.log.start:
            raise OffsetOutOfRange(
                f"offset {offset} is not in {self.hosted.name}",
                why=f"it begins at {start}", start=start, end=self.hosted.high_watermark,
            )  # fmt: skip
        manifest = self.manifest
        if manifest is None:
            raise self._unknown()
        number = manifest.find(offset)
        if number >= len(manifest) or offset < manifest.entry(number).base_offset:
            return self._between(manifest, number, offset)
        entry = manifest.entry(number)
        segment = self._cache.segment(self.identity, entry, self.log.options.log_id)
        now_ns = clock.monotonic_ns()
        self._prove(segment, now_ns)
        try:
            found = segment.read(offset, end, bytes_max)
        except StoreDamaged as error:
            raise self._pending(segment, self._pause(segment, error, now_ns)) from error
        except OSError as error:
            raise StorageFailed("the cache of objects cannot be read", why=str(error)) from error
        if isinstance(found, Missing):
            raise self._pending(segment, self._need(segment, found, offset, now_ns))
        self._cache.read_well(segment)
        if self._told and not self._cache.errors(self.identity):
            self._told = ""
            _log.info("object store is read again", partition=self.hosted.name, offset=offset)
        chunk, position, ahead_end = found
        self._cache.touch(segment, position - len(chunk.data), position)
        self._cache.mark_read(segment, range(chunk.first_offset, chunk.next_offset), now_ns)
        self._read_ahead(manifest, number, segment, Missing(position, ahead_end), now_ns)
        return chunk

    def _between(self, manifest: Manifest, number: int, offset: int) -> Chunk:
        """Return an empty chunk at ``offset``, which no object holds: a hole, or lost records."""
        hole = manifest.hole_at(offset)
        if hole is not None:
            return Chunk(b"", offset, min(hole.end, self.log.start), hole=hole.kind)
        if not self.confirmed:  # this is an older manifest, copied on this host; a newer one may differ
            raise self._unknown(lambda: self.confirmed)
        following = manifest.entry(number).base_offset if number < len(manifest) else self.log.start
        end = min([following, *(one.start for one in manifest.all_holes() if one.start > offset)])
        return Chunk(b"", offset, end, (OffsetRange(offset, end),))

    def _prove(self, segment: ColdSegment, now_ns: int) -> None:
        """Fetch the object's header, once for each object; raises FetchPending until it is there.

        The footer, which every first read needs, is fetched at the same time, so no read waits twice.
        """
        if not segment.unproven:
            return
        footer = Missing(segment.data_end, segment.size_bytes)
        span = Missing(0, SEGMENT_HEADER_BYTES)
        if segment.size_bytes <= WHOLE_BYTES_MAX and not segment.footer_there:
            span = Missing(0, segment.size_bytes)
        elif not segment.footer_there:
            self._cache.need(segment, footer, now_ns)
        raise self._pending(segment, self._cache.need(segment, span, now_ns))

    def _need(self, segment: ColdSegment, missing: Missing, offset: int, now_ns: int) -> Ticket:
        if not segment.footer_there and missing.start >= segment.data_end:
            # One request instead of two, because the needed bytes are known.
            if segment.size_bytes <= WHOLE_BYTES_MAX:
                missing = Missing(0, segment.size_bytes)
            elif offset == segment.base_offset:
                self._cache.need(segment, Missing(0, BLOCK_BYTES), now_ns)
        return self._cache.need(segment, missing, now_ns, offset)

    def _pause(self, segment: ColdSegment, error: StoreDamaged, now_ns: int) -> Ticket:
        pause = self._cache.pause_of(segment, now_ns) or self._cache.pause(segment, error, now_ns)
        return pause.ticket

    def _pending(self, segment: ColdSegment, ticket: Ticket) -> FetchPending:
        pause = self._cache.pause_of(segment, clock.monotonic_ns())
        why = "" if pause is None else str(pause.error)
        if why and why != self._told:
            self._told = why
            _log.warning("object store cannot be read", partition=self.hosted.name, error=why)
        return FetchPending(
            f"offsets {segment.base_offset} .. {segment.end_offset} of {self.hosted.name} are being fetched",
            why=why, ready=lambda: ticket.done, hint="it goes on by itself",
            cause=None if pause is None else pause.error,
        )  # fmt: skip

    def _read_ahead(
        self, manifest: Manifest, number: int, segment: ColdSegment, span: Missing, now_ns: int
    ) -> None:
        """Fetch the bytes that a continuing reader needs next, in steps worth a request."""
        window = min(span.end - span.start, self._cache.bytes_max // AHEAD_SHARE)
        step = min(AHEAD_STEP_BYTES, max(window // 2, 1))
        self._ask_ahead(segment, Missing(span.start, span.start + window), step, now_ns)
        beyond = span.start + window - segment.data_end
        if beyond <= 0 or segment.end_offset >= self.log.start or number + 1 >= len(manifest):
            return
        following = self._cache.segment(self.identity, manifest.entry(number + 1), self.log.options.log_id)
        if not following.footer_there:
            footer = Missing(following.data_end, following.size_bytes)
            self._cache.ahead(following, footer, now_ns)
        self._ask_ahead(following, Missing(0, beyond), step, now_ns)

    def _ask_ahead(self, segment: ColdSegment, span: Missing, step: int, now_ns: int) -> None:
        """Request the bytes of ``span`` that are not requested yet, once they are ``step`` or the last."""
        inside = Missing(span.start, min(span.end, segment.data_end))
        unasked = self._cache.unasked(segment, inside)
        if unasked is None:
            return
        if unasked.end - unasked.start >= step or unasked.end == segment.data_end:
            self._cache.ahead(segment, unasked, now_ns)

    def offset_at_time(self, time_us: int) -> int | None:
        """Return the first offset below the local start from ``time_us`` on; None if all are older."""
        start = self.start
        manifest = self.manifest
        if manifest is None or start >= self.log.start:
            return None
        for number in range(max(manifest.at_time(time_us), manifest.find(start)), len(manifest)):
            entry = manifest.entry(number)
            if entry.base_offset >= self.log.start:
                return None
            segment = self._cache.segment(self.identity, entry, self.log.options.log_id)
            now_ns = clock.monotonic_ns()
            self._prove(segment, now_ns)
            try:
                found = segment.offset_at_time(time_us)
            except StoreDamaged as error:
                raise self._pending(segment, self._pause(segment, error, now_ns)) from error
            except OSError as error:
                raise StorageFailed("the cache of objects cannot be read", why=str(error)) from error
            if isinstance(found, Missing):
                raise self._pending(segment, self._cache.need(segment, found, now_ns, ("time", time_us)))
            self._cache.mark_read(segment, {("time", time_us)}, now_ns)
            if found is not None:
                return max(found, start)
        return None

    # -- for people -------------------------------------------------------------------------------

    def unreadable(self) -> list[tuple[OffsetRange, DanubeError]]:
        """Return offsets whose objects could not be read lately, with the errors."""
        return self._cache.unreadable(self.identity)

    def statistics(self) -> dict[str, Any]:
        """Return figures of the tier, for answers and metrics.  Keys are never removed from the map."""
        errors = [str(error) for _, error in self.unreadable()]
        pending = self.pending()
        return {
            "start": self.known_start,
            "local_start": self.log.start,
            "uploaded_end": self.uploaded_end,
            "uploaded_bytes": 0 if self.manifest is None else self.manifest.size_bytes,
            "objects": 0 if self.manifest is None else len(self.manifest),
            "pending_bytes": pending.size_bytes,
            "pending_seconds": pending.age_s(clock.wall_us()),
            "holes": 0 if self.manifest is None else sum(hole.open for hole in self.manifest.all_holes()),
            "upload_error": self.error,
            "read_error": errors[0] if errors else "",
            "known": self.confirmed,
        }

    def segments(self, after_offset: int) -> Iterator[dict[str, Any]]:
        """Uploaded segments with records from ``after_offset`` on."""
        manifest = self.manifest
        if manifest is None:
            raise self._unknown()
        listed = range(manifest.find(after_offset), len(manifest))
        return (_described(self.identity, manifest.entry(number)) for number in listed)

    def pending(self) -> Pending:
        """Return the data that is only on this host, i.e. that the known manifest does not name.

        The owner computes it, because the mover may not run, not know the store, or be behind.
        """
        log, active = self.log, self.log.active
        end = max(self.uploaded_end, self.trimmed)
        rolled_end = log.written_end if active is None else active.base_offset
        state = (log, end, log.start, rolled_end)
        if state != self._rolled_state:
            self._rolled_state = state
            self._rolled = together(_pending(one) for one in log.above(end) if one is not active)
        return self._rolled if active is None else self._rolled.joined(_pending(active))


def _pending(segment: StoredSegment) -> Pending:
    return Pending(segment.data_end, segment.first_append_us) if segment.batch_count else NOTHING


def _described(identity: LogIdentity, entry: SegmentEntry) -> dict[str, Any]:
    return {
        "key": segment_key(identity, entry),
        "start_offset": entry.base_offset,
        "end_offset": entry.end_offset,
        "size_bytes": entry.size_bytes,
        "record_count": entry.record_count,
        "first_append_us": entry.first_append_us,
        "last_append_us": entry.last_append_us,
        "uploaded_us": entry.uploaded_us,
        "content_hash": entry.content_hash.hex(),
    }
