"""The local cache of objects: sparse files, filled by fetches that another process carries out.

    need()     asks for bytes of an object; a Ticket tells when it is worth looking again
    mark_read()  there is room for who waits behind (see danube.wal.cold.reads)
    fetched()  the bytes are in the file, or why not
    tick()     fetches that nobody answers, and pauses that are over

Bounds: ``bytes_max`` of blocks on disk (the least recently used give way, one by one), at most
FETCHES_MAX fetches at a time, urgent ones first, SEGMENTS_MAX files.  The directory belongs to one
process and is emptied when the cache is opened: nothing in it is needed after a restart.

A fetch that fails makes its object pause, longer each time; a read of it meanwhile gets the error
and a ticket for the end of the pause.  Owner: one thread.
"""

from __future__ import annotations

import errno
import shutil
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Hashable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

from danube.errors import DanubeError, StorageFailed, StoreDamaged, StoreUnavailable
from danube.host import files
from danube.limits import MIB
from danube.wal.cold.reads import Ticket, WaitingRead, WaitingReads
from danube.wal.cold.segment import BLOCK_BYTES, ColdSegment, Missing
from danube.wal.segments.descriptors import descriptors
from danube.wal.segments.index import index_cache
from danube.wal.segments.reading import OffsetRange
from danube.wal.segments.segment import HEADER_BYTES, NO_LOG, LogIdentity
from danube.wal.tier.keys import segment_key
from danube.wal.tier.manifest import SegmentEntry

FETCH_BYTES_MAX: Final = 4 * MIB
FETCHES_MAX: Final = 16
AHEAD_WAITING_MAX: Final = 256
SEGMENTS_MAX: Final = 1024
ANSWER_MAX_NS: Final = 120_000_000_000
PAUSE_FIRST_NS: Final = 200_000_000
PAUSE_MAX_NS: Final = 30_000_000_000
_PAUSE_FOR_GOOD_NS: Final = 5_000_000_000  # errors that only an operator can mend are not retried more often


class Fetch:
    """Bytes ``start .. end`` of an object on their way into its file."""

    __slots__ = ("asked_ns", "end", "number", "segment", "start", "ticket", "urgent")

    def __init__(
        self, number: int, segment: ColdSegment, span: Missing, ticket: Ticket, *, urgent: bool
    ) -> None:
        self.number = number
        self.segment = segment
        self.start, self.end = span.start, span.end
        self.urgent = urgent
        self.asked_ns = 0  # 0: waits for its turn
        self.ticket = ticket

    @property
    def blocks(self) -> range:
        """Numbers of the blocks that it brings; none for a footer, or for a header alone."""
        if self.end <= HEADER_BYTES:
            return range(0)
        end = min(self.end, self.segment.data_end)
        return range(self.start // BLOCK_BYTES, -(-end // BLOCK_BYTES)) if self.start < end else range(0)


class Pause:
    """Reason why an object is not requested now, and until when."""

    __slots__ = ("delay_ns", "end_ns", "error", "ticket")

    def __init__(self, error: DanubeError, delay_ns: int, end_ns: int, ticket: Ticket) -> None:
        self.error = error
        self.delay_ns = delay_ns
        self.end_ns = end_ns
        self.ticket = ticket


class ColdCache:
    """``send(fetch)`` gives a fetch to the fetcher; ``changed(identity)`` reports that reading may continue.

    ``ready(identity)`` reports the same, also during a call of a read, so it must only note the identity.
    """

    def __init__(
        self,
        directory: Path,
        bytes_max: int,
        send: Callable[[Fetch], None],
        changed: Callable[[LogIdentity], None],
        ready: Callable[[LogIdentity], None] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self.directory = directory
        self.bytes_max = bytes_max
        self.bytes_used = 0
        self.fetched_bytes = self.failed_count = self.evicted_count = 0
        self._send = send
        self._changed = changed
        self._ready = ready or changed
        self._segments: OrderedDict[str, ColdSegment] = OrderedDict()  # by key, least recently used first
        self._blocks: OrderedDict[tuple[str, int], None] = OrderedDict()  # on disk, least recently used first
        self._reads = WaitingReads(bytes_max, _block_size)
        self._fetches: dict[int, Fetch] = {}
        self._running: dict[int, Fetch] = {}
        self._urgent: deque[Fetch] = deque()
        self._ahead: deque[Fetch] = deque()
        self._by_block: dict[tuple[str, int], Fetch] = {}
        self._pauses: dict[str, Pause] = {}
        self._ended: set[LogIdentity] = set()  # whose reads need not wait any more, and were not told yet
        self._number = 0
        self._punches = True
        self._random = Random(seed)  # noqa: S311 - spreads retries, guards nothing
        self._made = self._make()

    def _make(self) -> bool:
        """Make the directory, and empty; False on a full disk, whose worker starts without it."""
        shutil.rmtree(self.directory, ignore_errors=True)
        try:
            files.make_directory(self.directory)
        except OSError as error:
            if error.errno not in files.FULL_ERRNOS:
                raise
            return False
        return True

    # -- objects ----------------------------------------------------------------------------------

    def segment(self, identity: LogIdentity, entry: SegmentEntry, log_id: bytes = NO_LOG) -> ColdSegment:
        """The cache's file for an object, made when there is none; StorageFailed if that fails."""
        key = segment_key(identity, entry)
        segment = self._segments.get(key)
        if segment is None:
            path = self.directory / key.replace("/", "+")
            self._made = self._made or self._make()
            try:
                fd = files.open_new(path)
                try:
                    files.ftruncate(fd, entry.size_bytes)
                finally:
                    files.close(fd)
            except OSError as error:
                raise StorageFailed("the cache of objects cannot be written", why=str(error)) from error
            segment = self._segments[key] = ColdSegment(path, identity, entry, key)
            segment.log_id = log_id
            self._bound_segments(segment)
        self._segments.move_to_end(key)
        return segment

    def _bound_segments(self, newest: ColdSegment) -> None:
        for segment in list(self._segments.values()):
            if len(self._segments) <= SEGMENTS_MAX:
                return
            if segment is not newest and not self._busy(segment.key):
                self._remove(segment)

    def _busy(self, key: str) -> bool:
        return self._reads.waits_for(key) or any(one.segment.key == key for one in self._fetches.values())

    def forget(self, identity: LogIdentity) -> None:
        """The partition is not read here any more."""
        for segment in [one for one in self._segments.values() if one.identity == identity]:
            self._remove(segment)

    def _remove(self, segment: ColdSegment) -> None:
        for fetch in [one for one in self._fetches.values() if one.segment is segment]:
            self._take_out(fetch)
            fetch.ticket.end()
        self._reads.drop(segment)
        for held in [held for held in self._blocks if held[0] == segment.key]:
            self._count_out(held, segment)
        self._unpause(segment)
        del self._segments[segment.key]
        descriptors.close(segment.file)
        index_cache.drop(segment.file)
        segment.file.path.unlink(missing_ok=True)
        self._tell()  # waiting reads ask again

    # -- asking -----------------------------------------------------------------------------------

    def touch(self, segment: ColdSegment, start: int, end: int) -> None:
        """Bytes ``start .. end`` were read now."""
        for block in range(start // BLOCK_BYTES, -(-min(end, segment.data_end) // BLOCK_BYTES)):
            if (segment.key, block) in self._blocks:
                self._blocks.move_to_end((segment.key, block))

    def read_well(self, segment: ColdSegment) -> None:
        """Note that bytes of the object were read and are right, so an earlier fault is over."""
        self._unpause(segment)
        self._tell()

    def _unpause(self, segment: ColdSegment) -> None:
        pause = self._pauses.pop(segment.key, None)
        if pause is not None:
            pause.ticket.end()

    def pause_of(self, segment: ColdSegment, now_ns: int) -> Pause | None:
        """The pause that the object is in."""
        pause = self._pauses.get(segment.key)
        return pause if pause is not None and now_ns < pause.end_ns else None

    def need(self, segment: ColdSegment, span: Missing, now_ns: int, reader: Hashable = None) -> Ticket:
        """Ask for bytes that a read waits for; done when they came, failed, or a pause is over.

        With ``reader``, a name of this read, they stay until ``mark_read`` is called with it, and so do
        those that the read has begun with.
        """
        pause = self.pause_of(segment, now_ns)
        if pause is not None:
            return pause.ticket
        if reader is not None and span.end <= segment.data_end:
            first = (span.start if span.begun is None else span.begun) // BLOCK_BYTES
            last = (span.end - 1) // BLOCK_BYTES
            read = self._reads.wait(segment, reader, first, last, self._ticket(segment))
            if self._reads.admitted(read):
                self._ask_for(read)
            self._admit(now_ns)
            self._reads.came(segment, now_ns)
            self._tell()
            return read.ticket
        tickets = [fetch.ticket for fetch in self._ask(segment, span, urgent=True)]
        self._pump(now_ns)
        return tickets[0] if tickets else Ticket(done=True)

    def _ticket(self, segment: ColdSegment) -> Ticket:
        return Ticket(partial(self._ended.add, segment.identity))

    def _tell(self) -> None:
        """Report the partitions whose reads need not wait any more: once each, however many reads."""
        while self._ended:
            self._ready(self._ended.pop())

    def mark_read(self, segment: ColdSegment, readers: Container[Hashable], now_ns: int) -> None:
        """The reads that asked under these names can have their bytes."""
        if self._reads.mark_read(segment, readers):
            self._admit(now_ns)
            self._tell()

    def _admit(self, now_ns: int) -> None:
        """Ask for the blocks of those reads whose turn it is now."""
        for read in self._reads.admit(self._other_bytes):
            self._ask_for(read)
            self._reads.came(read.segment, now_ns)
        self._pump(now_ns)

    def _ask_for(self, read: WaitingRead) -> None:
        end = min((read.last + 1) * BLOCK_BYTES, read.segment.data_end)
        self._ask(read.segment, Missing(read.first * BLOCK_BYTES, end), urgent=True)

    @property
    def _other_bytes(self) -> int:
        """Blocks on their way that are not kept for a read."""
        return sum(
            _block_size(fetch.segment, block)
            for fetch in self._running.values()
            for block in fetch.blocks
            if not self._reads.keeps((fetch.segment.key, block))
        )

    def ahead(self, segment: ColdSegment, span: Missing, now_ns: int) -> None:
        """Ask for bytes that a read will want soon; forgotten where too much is asked for already."""
        if len(self._ahead) < AHEAD_WAITING_MAX and self.pause_of(segment, now_ns) is None:
            self._ask(segment, span, urgent=False)
            self._pump(now_ns)

    def unasked(self, segment: ColdSegment, span: Missing) -> Missing | None:
        """The first run of whole blocks of ``span`` that are neither there nor under way."""
        end = min(span.end, segment.data_end)
        first: int | None = None
        for block in range(span.start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            if block in segment.blocks or (segment.key, block) in self._by_block:
                if first is not None:
                    return Missing(first * BLOCK_BYTES, block * BLOCK_BYTES)
            elif first is None:
                first = block
        if first is None:
            return None
        return Missing(first * BLOCK_BYTES, min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, segment.data_end))

    def _ask(self, segment: ColdSegment, span: Missing, *, urgent: bool) -> list[Fetch]:
        """Fetches that bring ``span``, those under way included."""
        asked: list[Fetch] = []
        if span.end <= HEADER_BYTES:  # whose the object is: no block is worth that
            return [self._fetch(segment, Missing(0, HEADER_BYTES), [-2], urgent)]
        if span.end > segment.data_end and not segment.footer_there:
            asked.append(self._fetch(segment, Missing(segment.data_end, segment.size_bytes), [-1], urgent))
        blocks: list[int] = []
        for absent in segment.absent(span.start, span.end):
            for block in range(absent.start // BLOCK_BYTES, -(-absent.end // BLOCK_BYTES)):
                under_way = self._by_block.get((segment.key, block))
                if under_way is not None:
                    asked.append(self._promote(under_way, urgent))
                    continue
                follows = blocks and block == blocks[-1] + 1 and len(blocks) * BLOCK_BYTES < FETCH_BYTES_MAX
                if blocks and not follows:
                    asked.append(self._fetch_blocks(segment, blocks, urgent))
                    blocks = []
                blocks.append(block)
        if blocks:
            asked.append(self._fetch_blocks(segment, blocks, urgent))
        return asked

    def _fetch_blocks(self, segment: ColdSegment, blocks: list[int], urgent: bool) -> Fetch:
        end = min((blocks[-1] + 1) * BLOCK_BYTES, segment.data_end)
        return self._fetch(segment, Missing(blocks[0] * BLOCK_BYTES, end), blocks, urgent)

    def _fetch(self, segment: ColdSegment, span: Missing, blocks: list[int], urgent: bool) -> Fetch:
        """A new fetch; block -1 is the footer, block -2 the header alone."""
        under_way = self._by_block.get((segment.key, blocks[0]))
        if under_way is not None:
            return self._promote(under_way, urgent)
        self._number += 1
        fetch = Fetch(self._number, segment, span, self._ticket(segment), urgent=urgent)
        self._fetches[fetch.number] = fetch
        for block in blocks:
            self._by_block[segment.key, block] = fetch
        (self._urgent if urgent else self._ahead).append(fetch)
        return fetch

    def _promote(self, fetch: Fetch, urgent: bool) -> Fetch:
        if urgent and not fetch.urgent:
            fetch.urgent = True
            if not fetch.asked_ns:
                self._ahead.remove(fetch)
                self._urgent.append(fetch)
        return fetch

    def _pump(self, now_ns: int) -> None:
        while len(self._running) < FETCHES_MAX and (waiting := self._urgent or self._ahead):
            fetch = next((one for one in waiting if self._fits(one)), None)
            if fetch is None:
                return
            waiting.remove(fetch)
            self._make_room(fetch.end - fetch.start)
            fetch.asked_ns = now_ns
            self._running[fetch.number] = fetch
            self._send(fetch)

    def _fits(self, fetch: Fetch) -> bool:
        """Whether it may be made now without a block that is kept having to go."""
        kept, other = self._reads.kept_bytes, self._other_bytes
        loose = [one for one in fetch.blocks if not self._reads.keeps((fetch.segment.key, one))]
        if not other and (not kept or len(loose) < len(fetch.blocks)):
            return True
        return kept + other + sum(_block_size(fetch.segment, one) for one in loose) <= self.bytes_max

    def ask_again(self, now_ns: int) -> None:
        """Send all fetches under way to a fetcher that has started anew."""
        for fetch in self._fetches.values():
            if fetch.asked_ns:
                fetch.asked_ns = now_ns
                self._send(fetch)

    # -- answers ----------------------------------------------------------------------------------

    def fetched(self, number: int, error: DanubeError | None, now_ns: int) -> None:
        """A fetch has ended; an unknown number is one that was given up."""
        fetch = self._fetches.get(number)
        if fetch is None:
            return
        segment = fetch.segment
        self._take_out(fetch)
        if error is None:
            try:
                segment.take(fetch.start, fetch.end)
            except StoreDamaged as wrong:
                error = wrong
        if error is None:
            self.fetched_bytes += fetch.end - fetch.start
            self._count_in(fetch)
            self._reads.came(segment, now_ns)
        else:
            self.failed_count += 1
            self.pause(segment, error, now_ns)
        fetch.ticket.end()
        self._admit(now_ns)
        self._ended.discard(segment.identity)  # told by the last line
        self._tell()
        self._changed(segment.identity)

    def _take_out(self, fetch: Fetch) -> None:
        del self._fetches[fetch.number]
        if self._running.pop(fetch.number, None) is None:
            (self._urgent if fetch.urgent else self._ahead).remove(fetch)
        for key in [key for key, other in self._by_block.items() if other is fetch]:
            del self._by_block[key]

    def pause(self, segment: ColdSegment, error: DanubeError, now_ns: int) -> Pause:
        """Reads of this object wait; after a while everything is tried anew."""
        former = self._pauses.get(segment.key)
        delay_ns = min(2 * former.delay_ns, PAUSE_MAX_NS) if former is not None else PAUSE_FIRST_NS
        if not error.retryable:
            delay_ns = max(delay_ns, _PAUSE_FOR_GOOD_NS)
        jittered_ns = int(delay_ns * self._random.uniform(0.5, 1.0))
        ticket = self._ticket(segment)
        pause = self._pauses[segment.key] = Pause(error, delay_ns, now_ns + jittered_ns, ticket)
        if former is not None:
            former.ticket.end()
        segment.forget_attempts()
        self._reads.drop(segment)
        self._tell()
        return pause

    def tick(self, now_ns: int) -> None:
        """Give up fetches without an answer; wake reads whose pause is over."""
        for fetch in list(self._fetches.values()):
            if fetch.asked_ns and now_ns - fetch.asked_ns > ANSWER_MAX_NS:
                silent = StoreUnavailable("the fetch of an object is not answered", key=fetch.segment.key)
                self.fetched(fetch.number, silent, now_ns)
        for pause in self._pauses.values():
            if now_ns >= pause.end_ns:
                pause.ticket.end()
        if self._reads.let_go(now_ns):
            self._admit(now_ns)
        self._tell()

    def errors(self, identity: LogIdentity) -> list[DanubeError]:
        """Why objects of this partition cannot be read now."""
        return [error for _, error in self.unreadable(identity)]

    def unreadable(self, identity: LogIdentity) -> list[tuple[OffsetRange, DanubeError]]:
        """Which offsets of this partition cannot be read now, object by object, and why."""
        paused = ((self._segments[key], pause.error) for key, pause in self._pauses.items())
        return [
            (OffsetRange(segment.base_offset, segment.end_offset), error)
            for segment, error in paused
            if segment.identity == identity
        ]

    # -- room -------------------------------------------------------------------------------------

    def _count_in(self, fetch: Fetch) -> None:
        segment = fetch.segment
        if fetch.end > segment.data_end:
            return  # footers are few and small: they count by SEGMENTS_MAX
        for block in fetch.blocks:
            held = (segment.key, block)
            if held not in self._blocks:
                self.bytes_used += _block_size(segment, block)
            self._blocks[held] = None
            self._blocks.move_to_end(held)

    def _count_out(self, held: tuple[str, int], segment: ColdSegment) -> None:
        del self._blocks[held]
        self.bytes_used -= _block_size(segment, held[1])

    def _make_room(self, size: int) -> None:
        """Evict blocks until ``size`` more bytes, and those under way, fit."""
        coming = sum(fetch.end - fetch.start for fetch in self._running.values())
        while self.bytes_used + coming + size > self.bytes_max:
            held = next((one for one in self._blocks if not self._reads.keeps(one)), None)
            if held is None:  # one read alone needs more than the cache may hold
                return
            self._evict(held, self._segments[held[0]])

    def _evict(self, held: tuple[str, int], segment: ColdSegment) -> None:
        self.evicted_count += 1
        dropped = segment.drop(held[1])
        if self._punches:
            self._punch(segment, dropped.start, dropped.end)
        if not self._punches and not self._busy(segment.key):
            self._remove(segment)
            return
        self._count_out(held, segment)

    def _punch(self, segment: ColdSegment, start: int, end: int) -> None:
        try:
            fd = files.open_existing(segment.file.path, writable=True)
            try:
                files.punch_hole(fd, start, end - start)
            finally:
                files.close(fd)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                self._punches = False  # from now on whole files are removed
            # Else the space stays taken for a while: a cache must not end a read that has its bytes.

    def statistics(self) -> dict[str, Any]:
        """Numbers for people."""
        return {
            "bytes_used": self.bytes_used,
            "bytes_max": self.bytes_max,
            "segments": len(self._segments),
            "fetches": len(self._fetches),
            "waiting_reads": len(self._reads),
            "fetched_bytes": self.fetched_bytes,
            "failed": self.failed_count,
            "evicted_blocks": self.evicted_count,
        }

    def close(self) -> None:
        """Remove all files."""
        for segment in list(self._segments.values()):
            self._remove(segment)
        shutil.rmtree(self.directory, ignore_errors=True)


def _block_size(segment: ColdSegment, block: int) -> int:
    return min(BLOCK_BYTES, segment.data_end - block * BLOCK_BYTES)
