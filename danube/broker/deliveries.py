"""Which subscriptions of a worker are looked at in a turn, and in which order.

    near     the next record is in memory, or does not exist yet: looked at in the turn of every write
    behind   reads the log or objects: looked at when something happened to it, within the turn's share

A look costs time also where it sends nothing, and a turn keeps everybody else waiting.  So readers that
are behind stand in one queue for all partitions, and a turn serves it from the front until its share
is used up: hundreds of readers of old records delay a publish by one share and not by hundreds of
looks.  While somebody publishes the share is small, though twice what is written, so that a reader
can catch up with any producer; and where they are many, a turn that wrote leaves it to the next one, so
that answers and new records leave at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from danube import clock, telemetry
from danube.errors import DanubeError
from danube.limits import KIB, MIB

if TYPE_CHECKING:
    from danube.broker.consumers import SubscriptionHost
    from danube.broker.hosted import HostedPartition, TrafficCounters
    from danube.core.grants import DeadLetter

_log = telemetry.events("deliveries")
READ_RETRY_NS: Final = 1_000_000_000
DEAD_LETTERS_PER_TURN: Final = 64
TURN_BYTES: Final = 4 * MIB  # of one subscription, and of all together that are behind
SHARE_NS: Final = 4_000_000
BUSY_SHARE_NS: Final = 500_000
BUSY_SHARE_BYTES: Final = 256 * KIB
BUSY_NS: Final = 50_000_000  # so long after a publish the share is the small one
FEW: Final = 8  # so many readers do not wait for the turn after a write

DeadLetterTaker = Callable[["SubscriptionHost", list["DeadLetter"]], None]


class Deliveries:
    """All methods run on the worker's loop; ``turn`` once in each of its turns."""

    def __init__(
        self,
        counters: TrafficCounters,
        schedule_turn: Callable[[], None],
        take_dead_letters: DeadLetterTaker,
    ) -> None:
        self.touched: dict[HostedPartition, None] = {}  # looked at since cursors were stored
        self._counters = counters
        self._schedule_turn = schedule_turn
        self._take_dead_letters = take_dead_letters
        self._asked: dict[SubscriptionHost, None] = {}
        self._lossy: dict[HostedPartition, None] = {}
        self._deadlines: dict[HostedPartition, int] = {}
        self._published_ns = -BUSY_NS
        self._published_bytes = 0
        self._wrote = False  # this turn did
        self._left_out = False  # the turn before this one served nobody who is behind

    # -- asking for a look ------------------------------------------------------------------------

    def wake(self, hosted: HostedPartition) -> None:
        """Look at every subscription of this partition."""
        self._asked.update(dict.fromkeys(hosted.subscriptions.values()))
        self._lossy[hosted] = None
        self._schedule_turn()

    def wake_one(self, hosted: HostedPartition, subscription: str) -> None:
        """Look at one subscription: something happened to it alone."""
        host = hosted.subscriptions.get(subscription)
        if host is None:
            self._lossy[hosted] = None
        else:
            hosted.place(host)
            self._asked[host] = None
        self._schedule_turn()

    def wake_readers(self, hosted: HostedPartition) -> None:
        """Look at the subscriptions that waited for bytes which are there now."""
        self._asked.update(dict.fromkeys(host for host in hosted.subscriptions.values() if host.bytes_came))
        self._schedule_turn()

    def written(self, hosted: HostedPartition) -> None:
        """There are new records: look, in the turn that runs or comes, at who is near."""
        self._asked.update(hosted.near)
        if hosted.lossy:
            self._lossy[hosted] = None

    def published(self, size_bytes: int, now_ns: int) -> None:
        """In the turn that runs so much was published."""
        self._published_ns, self._published_bytes = now_ns, size_bytes
        self._wrote = True

    def tick(self, now_ns: int) -> None:
        """Timers of subscriptions: ack deadlines and redeliveries whose time has come."""
        due = [hosted for hosted, deadline_ns in self._deadlines.items() if deadline_ns <= now_ns]
        for hosted in due:
            del self._deadlines[hosted]
            for host in hosted.subscriptions.values():
                if host.deadline_ns is not None and host.deadline_ns <= now_ns:
                    self._asked[host] = None
                else:
                    self._note_deadline(host)
        if due:
            self._schedule_turn()

    def forget(self, hosted: HostedPartition) -> None:
        """The partition is not hosted here any more."""
        self._asked = {host: None for host in self._asked if host.hosted is not hosted}
        for known in (self._lossy, self._deadlines, self.touched):
            known.pop(hosted, None)

    # -- the turn ---------------------------------------------------------------------------------

    def turn(self, now_ns: int) -> None:
        """Look at what asked for it; what is over the share stays asked for, in its order."""
        wrote, self._wrote = self._wrote, False
        if not self._asked and not self._lossy:
            return
        lossy, self._lossy = self._lossy, {}
        for hosted in lossy:
            for host in hosted.lossy.values():
                host.dispatch()
        asked, self._asked = self._asked, {}
        looked: dict[HostedPartition, None] = {}
        behind: list[SubscriptionHost] = []
        for one in asked:
            if one not in one.hosted.near:
                behind.append(one)
            else:
                self._look(one, now_ns, TURN_BYTES)
                looked[one.hosted] = None
        self._left_out = wrote and len(behind) > FEW and not self._left_out
        left = behind if self._left_out else self._serve(behind, now_ns, looked)
        self._asked = dict.fromkeys(left) | self._asked
        for hosted in looked:
            # One chunk outlives the turn: the next in the queue is often at the same place.
            hosted.looked_at(keep_chunk=bool(left) and left[0].hosted is hosted)
        if self._asked:
            self._schedule_turn()

    def _serve(
        self, behind: list[SubscriptionHost], now_ns: int, looked: dict[HostedPartition, None]
    ) -> list[SubscriptionHost]:
        """Serve the queue from its front until the share is used up; returns what is left of it."""
        bytes_left, share_ns = TURN_BYTES, SHARE_NS
        if now_ns - self._published_ns < BUSY_NS:
            bytes_left = min(max(BUSY_SHARE_BYTES, 2 * self._published_bytes), TURN_BYTES)
            share_ns = min(BUSY_SHARE_NS * bytes_left // BUSY_SHARE_BYTES, SHARE_NS)
        end_ns = clock.monotonic_ns() + share_ns
        for number, host in enumerate(behind):
            if number and (bytes_left <= 0 or clock.monotonic_ns() >= end_ns):
                return behind[number:]
            before = host.bytes_sent
            self._look(host, now_ns, bytes_left)
            looked[host.hosted] = None
            bytes_left -= host.bytes_sent - before
        return []

    def _look(self, host: SubscriptionHost, now_ns: int, bytes_max: int) -> None:
        hosted = host.hosted
        if hosted.deleted or hosted.subscriptions.get(host.core.name) is not host:
            return
        try:
            if host.dispatch(now_ns, bytes_max):
                self._asked[host] = None
        except DanubeError as error:
            self._counters.add("storage_errors")
            _log.error("delivery failed", partition=hosted.name, error=str(error))
            host.deadline_ns = now_ns + READ_RETRY_NS
        hosted.place(host)
        self.touched[hosted] = None
        self._note_deadline(host)
        if host.core.failure.poison == "dead_letter":
            letters = host.core.take_dead_letters(DEAD_LETTERS_PER_TURN)
            if letters:
                self._take_dead_letters(host, letters)

    def _note_deadline(self, host: SubscriptionHost) -> None:
        deadline_ns = host.deadline_ns
        if deadline_ns is not None:
            known_ns = self._deadlines.get(host.hosted, deadline_ns)
            self._deadlines[host.hosted] = min(known_ns, deadline_ns)
