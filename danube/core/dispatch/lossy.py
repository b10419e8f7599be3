"""A subscription of a non-reliable topic: batches wait in a bounded queue, the oldest give way.

A batch is a *token*: any object that the caller gets back when records of the batch are granted.  There are
no acks and no redelivery; granted records are not kept.  The producer never waits.  Above the bounds the
oldest batches are dropped, and without a consumer all are.  Every record that was not granted is counted as
dropped, or as skipped if no consumer's filters match its key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from danube.core.dispatch.consumers import Consumers
from danube.core.dispatch.filters import KeyFilter
from danube.core.dispatch.grants import JoinResult, Mode, Offsets
from danube.core.dispatch.key_ring import NOBODY, KeyRing
from danube.core.dispatch.rate import UNLIMITED
from danube.errors import InvalidArgument, broken

KeyOf = Callable[[Any, int], bytes]
Hashes = npt.NDArray[np.uint64]
LossyGrant = tuple[Any, int, Offsets | None]

_ROUTES_REMEMBERED_MAX: Final = 65_536


@dataclass(slots=True)
class Waiting:
    """A queued batch.  Records below ``taken`` are granted; key-shared keeps the others in ``open``."""

    token: Any
    record_count: int
    size_bytes: int
    hashes: Hashes | None
    taken: int = 0
    open: Offsets | None = None  # indexes in the batch
    seats: npt.NDArray[np.int16] | None = None  # of the open ones, while the ring is ``ring_version``
    seat_bits: int = 0
    ring_version: int = -1

    @property
    def left(self) -> int:
        return self.record_count - self.taken if self.open is None else len(self.open)


class LossySubscription:
    """Queue and consumers of one subscription; ``bytes_max`` and ``records_max`` bound the queue.

    The newest batch stays even if it is larger than the bounds by itself.
    """

    def __init__(
        self, name: str, mode: Mode, *, bytes_max: int, records_max: int, key_of: KeyOf | None = None
    ) -> None:
        """``key_of(token, index)`` gives a record's key; key filters need it."""
        self.name = name
        self.mode = mode
        self._bytes_max = bytes_max
        self._records_max = records_max
        self._key_of = key_of
        self._consumers = Consumers(mode)
        self._ring = KeyRing()
        self._ring_version = 0
        self._route_by_hash: dict[int, int] = {}
        self._queue: deque[Waiting] = deque()
        self._queued_bytes = self._queued_records = 0
        self._offered = self._granted = self._dropped = self._skipped = 0

    # -- consumers ---------------------------------------------------------------------------------

    def join(
        self, consumer_id: int, name: str, *, filters: Sequence[str] = (), now_ns: int = 0
    ) -> JoinResult:
        """Connect a consumer, without credit; one of the same name is displaced.

        Raises as Subscription.join, and InvalidArgument for filters where keys are not at hand.
        """
        key_filter = KeyFilter(filters)
        if not key_filter.everything and self._key_of is None and self.mode is Mode.KEY_SHARED:
            raise InvalidArgument("key filters cannot be used here", why="records' keys are not at hand")
        displaced = self._consumers.check_join(consumer_id, name)
        place = self._remove(displaced.consumer_id) if displaced is not None else None
        consumer = self._consumers.add(consumer_id, name, key_filter, place)
        if self.mode is Mode.KEY_SHARED:
            self._ring.add(consumer.seat, consumer_id, key_filter)
            self._ring_changed()
        return self._consumers.result(consumer, displaced)

    def leave(self, consumer_id: int, now_ns: int = 0) -> None:
        """Disconnect a consumer; with the last one the queue is dropped.  Unknown ids are ignored."""
        if consumer_id in self._consumers.by_id:
            self._remove(consumer_id)
            if not len(self._consumers):
                while self._queue:
                    self._drop_oldest()

    def _remove(self, consumer_id: int) -> int:
        consumer = self._consumers.by_id[consumer_id]
        if self.mode is Mode.KEY_SHARED:
            self._ring.remove(consumer.seat)
            self._ring_changed()
        return self._consumers.remove(consumer)

    def _ring_changed(self) -> None:
        self._ring_version += 1
        self._route_by_hash.clear()

    def credit(self, consumer_id: int, records: int) -> None:
        """Let a consumer have ``records`` more."""
        self._consumers.add_credit(consumer_id, records)

    def set_ready(self, consumer_id: int, ready: bool) -> None:
        """Pause a consumer or resume it; its credit does not change."""
        self._consumers.set_ready(consumer_id, ready)

    # -- the queue ---------------------------------------------------------------------------------

    def offer(
        self, token: Any, base_offset: int, record_count: int, size_bytes: int, hashes: Hashes | None = None
    ) -> int:
        """Queue one batch and return how many records were dropped for it.

        Key-shared needs ``hashes``, uint64[record_count].  ``base_offset`` is for the caller's order
        only: batches are offered in it.
        """
        if not len(self._consumers):
            self.count_dropped(record_count)
            return record_count
        if self.mode is Mode.KEY_SHARED and (hashes is None or len(hashes) != record_count):
            broken("a key-shared subscription needs a hash for each record", subscription=self.name)
        self._offered += record_count
        self._queue.append(Waiting(token, record_count, size_bytes, hashes))
        self._queued_bytes += size_bytes
        self._queued_records += record_count
        dropped = 0
        while len(self._queue) > 1 and (
            self._queued_bytes > self._bytes_max or self._queued_records > self._records_max
        ):
            dropped += self._drop_oldest()
        return dropped

    def count_dropped(self, record_count: int) -> None:
        """Count records that were published while no consumer was connected."""
        self._offered += record_count
        self._dropped += record_count

    def _drop_oldest(self) -> int:
        waiting = self._queue.popleft()
        self._queued_bytes -= waiting.size_bytes
        self._queued_records -= waiting.left
        self._dropped += waiting.left
        return waiting.left

    # -- grants ------------------------------------------------------------------------------------

    @property
    def has_more(self) -> bool:
        """Whether batches are queued, and a consumer has credit."""
        return bool(self._queue and self._consumers.eligible)

    def grant(self, enough: int = UNLIMITED) -> list[LossyGrant]:
        """Grant what consumers have credit for: ``(token, consumer_id, indexes)``, oldest batch first.

        ``indexes`` is None for the whole batch, else int64[n], ascending.  No batch is begun when ``enough``
        records are granted.
        """
        grants: list[LossyGrant] = []
        if not self._queue or not self._consumers.eligible:
            return grants
        granted_end = self._granted + enough
        if self.mode is Mode.KEY_SHARED:
            self._grant_keyed(grants, granted_end)
            return grants
        while self._queue:
            waiting = self._queue[0]
            granted = self._grant_next(waiting, grants)
            if waiting.left:
                break
            self._queue.popleft()
            self._queued_bytes -= waiting.size_bytes
            if not granted or self._granted >= granted_end:
                break
        return grants

    def _grant_next(self, waiting: Waiting, grants: list[LossyGrant]) -> int:
        """Grant the next records of a batch, to the active consumer or in turn; return how many."""
        consumers, start = self._consumers, waiting.taken
        if self.mode.single or consumers.alone:
            credit = consumers.active_credit() if self.mode.single else consumers.usable_credit
            count = min(waiting.left, credit)
            if count:
                seat = consumers.order[0].seat if self.mode.single else consumers.turn()
                consumers.spend(seat, count if self.mode.single else count - 1)
                whole = count == waiting.record_count
                indexes = None if whole else np.arange(start, start + count, dtype=np.int64)
                self._give(waiting, seat, indexes, grants)
        else:
            seats = consumers.turns(waiting.left)
            count = len(seats)
            for seat in np.unique(seats).tolist():
                self._give(waiting, seat, np.flatnonzero(seats == seat) + start, grants)
        waiting.taken += count
        self._queued_records -= count
        return count

    def _give(self, waiting: Waiting, seat: int, indexes: Offsets | None, grants: list[LossyGrant]) -> None:
        """Grant the records at ``indexes``; None, or an index for each, is the whole batch."""
        count = waiting.record_count if indexes is None else len(indexes)
        consumer_id = self._consumers.by_seat[seat].consumer_id
        grants.append((waiting.token, consumer_id, None if count == waiting.record_count else indexes))
        self._granted += count

    # -- key-shared --------------------------------------------------------------------------------

    def _grant_keyed(self, grants: list[LossyGrant], granted_end: int) -> None:
        """Every batch from the oldest on: a consumer without credit holds up its own keys only."""
        done = False
        for waiting in self._queue:
            self._route(waiting)
            if waiting.seat_bits & self._consumers.eligible:
                self._grant_routed(waiting, grants)
            done = done or not waiting.left
            if not self._consumers.eligible or self._granted >= granted_end:
                break
        if done:
            self._queued_bytes -= sum(waiting.size_bytes for waiting in self._queue if not waiting.left)
            self._queue = deque(waiting for waiting in self._queue if waiting.left)

    def _grant_routed(self, waiting: Waiting, grants: list[LossyGrant]) -> None:
        consumers, seats, indexes = self._consumers, waiting.seats, waiting.open
        if seats is None or indexes is None:
            broken("a queued batch was not routed", subscription=self.name)
        kept = np.ones(len(seats), np.bool_)
        for seat in np.unique(seats).tolist():
            if not consumers.eligible >> seat & 1:
                continue
            chosen = np.flatnonzero(seats == seat)[: int(consumers.credit[seat])]
            consumers.spend(seat, len(chosen))
            self._give(waiting, seat, indexes[chosen], grants)
            kept[chosen] = False
        self._queued_records -= len(kept) - int(np.count_nonzero(kept))
        self._keep(waiting, kept)

    def _keep(self, waiting: Waiting, kept: npt.NDArray[np.bool_]) -> None:
        if waiting.open is not None and waiting.seats is not None:
            waiting.open, waiting.seats = waiting.open[kept], waiting.seats[kept]
            waiting.seat_bits = sum(1 << seat for seat in np.unique(waiting.seats).tolist())

    def _route(self, waiting: Waiting) -> None:
        """Find the seat of every open record, unless it is known; drop those that no consumer wants."""
        if waiting.ring_version == self._ring_version or waiting.hashes is None:
            return
        waiting.ring_version = self._ring_version
        if waiting.open is None:
            waiting.open = np.arange(waiting.record_count, dtype=np.int64)
        waiting.seats = self._seats_of(waiting, waiting.open)
        wanted = waiting.seats != NOBODY
        skipped = len(wanted) - int(np.count_nonzero(wanted))
        self._skipped += skipped
        self._queued_records -= skipped
        self._keep(waiting, wanted)

    def _seats_of(self, waiting: Waiting, indexes: Offsets) -> npt.NDArray[np.int16]:
        ring, hashes = self._ring, waiting.hashes
        if hashes is None:
            broken("a queued batch has no hashes", subscription=self.name)
        if not ring.filtered:
            places = np.searchsorted(ring.positions, hashes[indexes] & np.uint64(0xFFFFFFFF))
            places[places == len(ring.positions)] = 0
            return ring.seats[places]
        distinct, first, inverse = np.unique(hashes[indexes], return_index=True, return_inverse=True)
        routes = [
            self._seat_of(value, waiting.token, int(indexes[index]))
            for value, index in zip(distinct.tolist(), first.tolist(), strict=True)
        ]
        return np.array(routes, np.int16)[inverse]

    def _seat_of(self, value: int, token: Any, index: int) -> int:
        seat = self._route_by_hash.get(value)
        if seat is None:
            if len(self._route_by_hash) >= _ROUTES_REMEMBERED_MAX:
                self._route_by_hash.clear()
            key = b"" if self._key_of is None else self._key_of(token, index)
            seat = self._route_by_hash[value] = self._ring.seat_of(value & 0xFFFFFFFF, key)
        return seat

    # -- looking at it -----------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Counts in records; offered = granted + dropped + skipped + queued_records."""
        return {
            "mode": self.mode.label,
            "consumers": len(self._consumers),
            "offered": self._offered,
            "granted": self._granted,
            "dropped": self._dropped,
            "skipped": self._skipped,
            "queued_records": self._queued_records,
            "queued_bytes": self._queued_bytes,
            "queued_batches": len(self._queue),
        }

    def check(self) -> None:
        """Raise InvariantBroken if a count does not add up."""
        self._consumers.check()
        left = sum(waiting.left for waiting in self._queue)
        size = sum(waiting.size_bytes for waiting in self._queue)
        if (left, size) != (self._queued_records, self._queued_bytes):
            broken("the queue is counted wrongly", records=left, bytes=size, statistics=self.statistics())
        if self._offered != self._granted + self._dropped + self._skipped + left:
            broken("records of a lossy subscription do not add up", statistics=self.statistics())
