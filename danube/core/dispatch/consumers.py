"""The consumers of one subscription: connections, credit, and whose turn it is.

Each consumer has a seat, a small number that the window's arrays store.  Seats are given lowest
first and are the order of the round robin, so consumers that stay are served in the order in which
they joined.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from danube.core.dispatch.consumer_window import NEVER_NS, PacedSeat
from danube.core.dispatch.filters import KeyFilter
from danube.core.dispatch.grants import JoinResult, Mode
from danube.errors import InvalidArgument, LimitExceeded, SubscriptionBusy, SubscriptionNotFound, broken
from danube.limits import CONSUMERS_PER_SUBSCRIPTION_MAX

_CREDIT_MAX: Final = 1 << 40
_SEATS_FIRST: Final = 8
_LISTED_ONE_BY_ONE_MAX: Final = 32

Seats = npt.NDArray[np.int16]


@dataclass(slots=True, eq=False)
class Consumer:
    """One connected consumer."""

    consumer_id: int
    name: str
    seat: int
    key_filter: KeyFilter


class Consumers:
    """Seats with ``credit`` (int64, records) and ``ready`` (uint8); ``eligible`` has a bit for each
    seat that may be sent records now.
    """

    __slots__ = ("_by_name", "_free", "_pointer", "_stall_ns", "by_id", "by_seat", "credit", "eligible",
                 "mode", "order", "paced", "ready", "single")  # fmt: skip

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.single = mode.single
        self.by_id: dict[int, Consumer] = {}
        self._by_name: dict[str, Consumer] = {}
        self.by_seat: dict[int, Consumer] = {}
        self.order: list[Consumer] = []
        self.paced: dict[int, PacedSeat] = {}
        self._stall_ns = NEVER_NS  # no paced consumer may have more before
        self.credit = np.zeros(_SEATS_FIRST, np.int64)
        self.ready = np.zeros(_SEATS_FIRST, np.uint8)
        self.eligible = 0
        self._pointer = 0
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def active(self) -> Consumer | None:
        """The consumer that gets everything (exclusive, failover): the first that joined."""
        return self.order[0] if self.order else None

    def check_join(self, consumer_id: int, name: str) -> Consumer | None:
        """The consumer of the same name that would be displaced, or None; raises where joining cannot be."""
        same = self._by_name.get(name)
        if consumer_id in self.by_id and (same is None or same.consumer_id != consumer_id):
            raise InvalidArgument(f"consumer id {consumer_id} is in use under another name")
        if same is None and self.mode is Mode.EXCLUSIVE and self.order:
            raise SubscriptionBusy(
                "the subscription is exclusive and has a consumer",
                why=f"{self.order[0].name!r} is connected",
                hint="use that name to take over, or a shared subscription",
            )
        if same is None and len(self) >= CONSUMERS_PER_SUBSCRIPTION_MAX:
            raise LimitExceeded(
                "the subscription has too many consumers",
                why=f"the limit is {CONSUMERS_PER_SUBSCRIPTION_MAX}",
            )
        return same

    def add(self, consumer_id: int, name: str, key_filter: KeyFilter, place: int | None = None) -> Consumer:
        """Give a seat, without credit; ``place`` is where in the order of joins it stands (None: last)."""
        seat = heapq.heappop(self._free) if self._free else len(self.by_id)
        if seat >= len(self.credit):
            self.credit = np.concatenate((self.credit, np.zeros_like(self.credit)))
            self.ready = np.concatenate((self.ready, np.zeros_like(self.ready)))
        consumer = Consumer(consumer_id, name, seat, key_filter)
        self.credit[seat] = 0
        self.ready[seat] = 1
        self.by_id[consumer_id] = self.by_seat[seat] = self._by_name[name] = consumer
        self.order.insert(len(self.order) if place is None else place, consumer)
        return consumer

    def remove(self, consumer: Consumer) -> int:
        """Free the seat; return the place in the order of joins."""
        place = self.order.index(consumer)
        del self.order[place], self._by_name[consumer.name]
        del self.by_id[consumer.consumer_id], self.by_seat[consumer.seat]
        self.eligible &= ~(1 << consumer.seat)
        self.credit[consumer.seat] = 0
        self.ready[consumer.seat] = 0
        self.paced.pop(consumer.seat, None)
        heapq.heappush(self._free, consumer.seat)
        return place

    def result(self, consumer: Consumer, displaced: Consumer | None) -> JoinResult:
        active = not self.single or self.order[0] is consumer
        return JoinResult(active, None if displaced is None else displaced.consumer_id)

    # -- credit ------------------------------------------------------------------------------------

    def add_credit(self, consumer_id: int, records: int) -> None:
        if records < 0:
            raise InvalidArgument("credit is not negative", records=records)
        seat = self._seat(consumer_id)
        paced = self.paced.get(seat)
        if paced is None:
            self._set_credit(seat, int(self.credit[seat]) + min(records, _CREDIT_MAX))
        else:
            paced.withheld = min(paced.withheld + records, _CREDIT_MAX)
            self._set_credit(seat, paced.usable(int(self.credit[seat])))
            self._stall_ns = min(self._stall_ns, paced.stalled_ns(int(self.credit[seat])))

    def return_credit(self, consumer_id: int, records: int) -> None:
        """Return the credit of records that were granted and not sent."""
        seat = self._seat(consumer_id)
        self._set_credit(seat, int(self.credit[seat]) + records)

    def _set_credit(self, seat: int, records: int) -> None:
        self.credit[seat] = min(records, _CREDIT_MAX)
        if records and self.ready[seat]:
            self.eligible |= 1 << seat
        else:
            self.eligible &= ~(1 << seat)

    def set_ready(self, consumer_id: int, ready: bool) -> None:
        seat = self._seat(consumer_id)
        self.ready[seat] = ready
        if ready and self.credit[seat]:
            self.eligible |= 1 << seat
        else:
            self.eligible &= ~(1 << seat)

    def _seat(self, consumer_id: int) -> int:
        consumer = self.by_id.get(consumer_id)
        if consumer is None:
            raise SubscriptionNotFound(f"consumer {consumer_id} is not connected to the subscription")
        return consumer.seat

    def spend(self, seat: int, records: int) -> None:
        """Take credit from one seat, which has it."""
        left = int(self.credit[seat]) - records
        if left < 0:
            broken("a consumer was granted more than its credit", seat=seat, records=records, left=left)
        self.credit[seat] = left
        if not left:
            self.eligible &= ~(1 << seat)

    def exhausted(self, seats: list[int]) -> None:
        """Credit of these seats was spent in the array: take those without any out of the turns."""
        for seat in seats:
            if not self.credit[seat]:
                self.eligible &= ~(1 << seat)

    @property
    def usable_credit(self) -> int:
        """Records that all consumers together may be sent now."""
        return int(self.credit[self.ready != 0].sum())

    @property
    def alone(self) -> bool:
        """Whether exactly one seat is eligible."""
        return self.eligible > 0 and self.eligible & (self.eligible - 1) == 0

    def active_credit(self) -> int:
        """Records that the active consumer may be sent now."""
        active = self.active
        if active is None or not self.eligible >> active.seat & 1:
            return 0
        return int(self.credit[active.seat])

    # -- pace --------------------------------------------------------------------------------------

    def pace(self, consumer_id: int, now_ns: int, ack_timeout_ns: int) -> None:
        """Let its acks say how much of its credit this consumer can use; it has none yet."""
        self.paced[self._seat(consumer_id)] = PacedSeat(now_ns, ack_timeout_ns)

    def began(self, consumer_ids: list[int], now_ns: int) -> None:
        """These were granted something."""
        for consumer_id in consumer_ids:
            paced = self.paced.get(self.by_id[consumer_id].seat)
            if paced is not None:
                paced.began(now_ns)
                self._may_stall(paced, now_ns)

    def released(self, seat: int, count: int, handled: int, now_ns: int) -> None:
        """Note records that left flight at ``seat``, ``handled`` or timed out (0)."""
        paced = self.paced.get(seat)
        if paced is not None:
            if handled:
                paced.settled(handled, now_ns)
            else:
                paced.timed_out(now_ns)
            self._may_stall(paced, now_ns)
            self.forgotten(seat, count, now_ns)

    def forgotten(self, seat: int, count: int, now_ns: int) -> None:
        """Note records that left flight at ``seat`` without the consumer's doing."""
        paced = self.paced.get(seat)
        if paced is not None:
            credit = int(self.credit[seat])
            paced.open -= count
            if paced.open == credit:
                paced.has_nothing(now_ns)
            self._set_credit(seat, paced.usable(credit))

    def nothing_in_flight(self, now_ns: int) -> None:
        """All that was in flight is forgotten."""
        for seat, paced in self.paced.items():
            self.forgotten(seat, paced.open - int(self.credit[seat]), now_ns)

    def follow(self, ack_timeout_ns: int) -> None:
        """The ack timeout is another one."""
        for paced in self.paced.values():
            paced.follow(ack_timeout_ns)

    def pass_stalls(self, now_ns: int) -> int | None:
        """Give more to those that settle nothing, and return when to ask again."""
        if now_ns >= self._stall_ns:
            self._stall_ns = NEVER_NS
            for seat, paced in self.paced.items():
                if paced.stalled_ns(int(self.credit[seat])) <= now_ns:
                    paced.stalled(now_ns)
                    self._set_credit(seat, paced.usable(int(self.credit[seat])))
                self._stall_ns = min(self._stall_ns, paced.stalled_ns(int(self.credit[seat])))
        return None if self._stall_ns == NEVER_NS else self._stall_ns

    def _may_stall(self, paced: PacedSeat, now_ns: int) -> None:
        self._stall_ns = min(self._stall_ns, max(paced.stalled_ns(0), now_ns))

    # -- turns -------------------------------------------------------------------------------------

    def turns(self, records: int) -> Seats:
        """Spend credit for up to ``records`` records, one by one in turn; return their seats, int16[n]."""
        parts: list[Seats] = []
        while records > 0 and self.eligible:
            seats = self._seats_in_turn(records)
            credit = self.credit[seats]
            rounds = min(records // len(seats), int(credit.min()))
            parts.append(np.tile(seats, rounds))
            credit -= rounds
            self.credit[seats] = credit
            self.exhausted(seats[credit == 0].tolist())
            self._pointer = int(seats[-1]) + 1
            records -= rounds * len(seats)
        if not parts:
            return np.empty(0, np.int16)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def turn(self) -> int:
        """The seat whose turn it is, for one record; the caller saw that one is eligible."""
        later = self.eligible >> self._pointer << self._pointer
        bits = later or self.eligible
        seat = (bits & -bits).bit_length() - 1
        self._pointer = seat + 1
        self.spend(seat, 1)
        return seat

    def take_one(self, records: int) -> tuple[int, int] | None:
        """Spend credit for up to ``records`` at the one seat that gets them: ``(seat, records)``.

        None if several take turns.  The caller saw that one is eligible.
        """
        eligible = self.eligible
        if self.single:
            seat = self.order[0].seat
        elif records == 1 or not eligible & (eligible - 1):
            bits = eligible >> self._pointer << self._pointer or eligible
            seat = (bits & -bits).bit_length() - 1
            self._pointer = seat + 1
        else:
            return None
        credit = int(self.credit[seat])
        count = min(records, credit)
        self.credit[seat] = credit - count
        if count == credit:
            self.eligible = eligible & ~(1 << seat)
        return seat, count

    def _seats_in_turn(self, seats_max: int) -> Seats:
        """Eligible seats from the pointer around, at most ``seats_max``."""
        later = self.eligible >> self._pointer << self._pointer
        count = min(self.eligible.bit_count(), seats_max)
        if count > _LISTED_ONE_BY_ONE_MAX:
            seats = np.flatnonzero((self.credit > 0) & (self.ready != 0))
            split = int(np.searchsorted(seats, self._pointer))
            return np.concatenate((seats[split:], seats[:split]))[:count].astype(np.int16)
        listed: list[int] = []
        bits = later or self.eligible
        while len(listed) < count:
            listed.append((bits & -bits).bit_length() - 1)
            bits &= bits - 1
            if not bits:
                bits = self.eligible
        return np.array(listed, np.int16)

    def check(self) -> None:
        """Raise InvariantBroken where seats, credit and the eligible bits differ."""
        expected = 0
        for seat, consumer in self.by_seat.items():
            if consumer.seat != seat or self.by_id.get(consumer.consumer_id) is not consumer:
                broken("a seat has another consumer", seat=seat)
            if self.credit[seat] > 0 and self.ready[seat]:
                expected |= 1 << seat
        if expected != self.eligible:
            broken("eligible seats differ from credit", eligible=self.eligible, expected=expected)
        if not len(self.by_id) == len(self.by_seat) == len(self.order):
            broken("consumers are counted differently", by_id=len(self.by_id), order=len(self.order))
