"""Deliveries of a turn: which subscriptions of a worker get one, and in which order.

    near     the next record is in memory, or does not exist yet: looked at in the turn of every write
    behind   reads the log or objects: looked at when something happened to it, within the turn's share

A look costs time also where it sends nothing, and a turn keeps everybody else waiting.  So readers that
are behind stand in one queue for all partitions, and a turn serves it from the front until its share
is used up: hundreds of readers of old records delay a publish by one share and not by hundreds of
looks.  While somebody publishes the share is small, though twice what is written, so that a reader
can catch up with any producer.  Where they are many, a turn that wrote leaves it to the next one, so that
answers and new records leave at once, and after each share there is a rest, so that a worker whose
processor is wanted by others too is not the one that has to wait for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from danube.core.partition.policy import Durability
from danube.errors import DanubeError
from danube.host import clock, telemetry
from danube.limits import KIB, MIB

if TYPE_CHECKING:
    from danube.broker.partition.hosted import HostedPartition, HostedSubscription
    from danube.broker.traffic import TrafficCounters
    from danube.core.dispatch.grants import DeadLetter

_log = telemetry.events("deliveries")
_FSYNC: Final = Durability.FSYNC  # a member of an IntEnum costs as much to look up as five numbers
READ_RETRY_NS: Final = 1_000_000_000
DEAD_LETTERS_PER_TURN: Final = 64
TURN_BYTES: Final = 4 * MIB  # of one subscription, and of all together that are behind
SHARE_NS: Final = 4_000_000
BUSY_SHARE_NS: Final = 250_000
BUSY_SHARE_BYTES: Final = 128 * KIB
BUSY_NS: Final = 50_000_000  # so long after a publish the share is the small one
FEW: Final = 8  # so many readers wait for no other turn
REST_FACTOR: Final = 2  # of the time that the share took
MS_NS: Final = 1_000_000
REST_MIN_NS: Final = 1 * MS_NS

DeadLetterTaker = Callable[["HostedSubscription", list["DeadLetter"]], None]


class Deliveries:
    """All methods run on the worker's loop; ``turn`` once in each of its turns."""

    def __init__(
        self,
        counters: TrafficCounters,
        schedule_turn: Callable[[], None],
        call_later: Callable[..., object],
        take_dead_letters: DeadLetterTaker,
    ) -> None:
        self.touched: dict[HostedPartition, None] = {}  # looked at since cursors were stored
        self._counters = counters
        self._schedule_turn = schedule_turn
        self._call_later = call_later
        self._take_dead_letters = take_dead_letters
        self._near: dict[HostedSubscription, None] = {}
        self._queue: OrderedDict[HostedSubscription, None] = OrderedDict()  # of those behind
        self._lossy: dict[HostedPartition, None] = {}
        self._deadlines: dict[HostedPartition, int] = {}
        self._waiting: dict[HostedSubscription, None] = {}  # for bytes that do not come, or were told so
        self._published_ns = -BUSY_NS
        self._published_bytes = 0
        self._wrote = False  # this turn did
        self._left_out = False  # the last turn served no subscription that is behind
        self._rest_end_ns = 0
        self._resting = False  # a turn will come when the rest is over

    # -- asking for a look ------------------------------------------------------------------------

    def wake(self, hosted: HostedPartition) -> None:
        """Look at every subscription of this partition."""
        for host in hosted.subscriptions.values():
            self._ask(host)
        self._lossy[hosted] = None
        self._schedule_turn()

    def wake_one(self, hosted: HostedPartition, subscription: str) -> None:
        """Look at one subscription: something happened to it alone."""
        host = hosted.subscriptions.get(subscription)
        if host is None:
            self._lossy[hosted] = None
        else:
            host.next = host.core.next
            hosted.update_near(host)
            self._ask(host)
        self._schedule_turn()

    def settled(self, host: HostedSubscription) -> None:
        """A consumer acked, or may have more: store the cursor, and dispatch if records wait."""
        hosted = host.hosted
        if hosted.silent:
            return
        self.touched[hosted] = None
        if host.core.has_more(hosted.core.high_watermark):
            self._ask(host)
            self._schedule_turn()

    def wake_readers(self, hosted: HostedPartition) -> None:
        """Look at the subscriptions that waited for bytes which are there now, or that a hole has moved."""
        for host in hosted.subscriptions.values():
            if host.needs_dispatch:
                host.next = host.core.next
                hosted.update_near(host)
                self._ask(host)
        self._schedule_turn()

    def _ask(self, host: HostedSubscription) -> None:
        asked = self._near if host in host.hosted.near else self._queue
        asked[host] = None

    def written(self, hosted: HostedPartition) -> None:
        """Dispatch new records, in this or the next turn, to subscriptions that read near the end."""
        self._near.update(hosted.near)
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
                    self._ask(host)
                else:
                    self._note_deadline(host)
        if due:
            self._schedule_turn()

    def second(self) -> None:
        """Tell consumers why they wait; a wait of less than a second is not reported."""
        hosted = (one for one in self._waiting if one.hosted.subscriptions.get(one.core.name) is one)
        self._waiting = {host: None for host in hosted if host.tell_waiting()}

    def forget(self, hosted: HostedPartition) -> None:
        """The partition is not hosted here any more."""
        for host in hosted.subscriptions.values():
            self._waiting.pop(host, None)
            self._near.pop(host, None)
            self._queue.pop(host, None)
        for known in (self._lossy, self._deadlines, self.touched):
            known.pop(hosted, None)

    # -- the turn ---------------------------------------------------------------------------------

    def turn(self, now_ns: int) -> None:
        """Dispatch the subscriptions that requested it; those beyond the share keep their place."""
        wrote, self._wrote = self._wrote, False
        if not (self._near or self._queue or self._lossy):
            return
        lossy, self._lossy = self._lossy, {}
        for hosted in lossy:
            for host in hosted.lossy.values():
                host.dispatch()
        near, self._near = self._near, {}
        looked: dict[HostedPartition, None] = {}
        for one in near:
            self._look(one, now_ns, TURN_BYTES)
            looked[one.hosted] = None
        if self._queue and self._may_serve(wrote):
            self._serve(now_ns, looked)
        first = next(iter(self._queue), None)
        for hosted in looked:
            # One chunk outlives the turn: the next in the queue is often at the same place.
            hosted.after_dispatch(keep_chunk=first is not None and first.hosted is hosted)
        if self._near:
            self._schedule_turn()
        elif self._queue:
            self._come_back()

    def _may_serve(self, wrote: bool) -> bool:
        if len(self._queue) <= FEW:
            return True
        if clock.monotonic_ns() < self._rest_end_ns:
            return False
        self._left_out = wrote and not self._left_out
        return not self._left_out

    def _come_back(self) -> None:
        """Schedule a turn for the queue, at once or after the pause."""
        rest_ns = self._rest_end_ns - clock.monotonic_ns()
        if rest_ns <= 0 or len(self._queue) <= FEW:
            self._schedule_turn()
        elif not self._resting:
            self._resting = True
            self._call_later(-(-rest_ns // MS_NS) / 1e3, self._rested)  # the loop rounds to milliseconds

    def _rested(self) -> None:
        self._resting = False
        self._schedule_turn()

    def _serve(self, now_ns: int, looked: dict[HostedPartition, None]) -> None:
        """Serve the queue from its front until the share is used up, each subscription once."""
        busy = now_ns - self._published_ns < BUSY_NS
        bytes_left, share_ns = TURN_BYTES, SHARE_NS
        if busy:
            bytes_left = min(max(BUSY_SHARE_BYTES, 2 * self._published_bytes), TURN_BYTES)
            share_ns = min(BUSY_SHARE_NS * bytes_left // BUSY_SHARE_BYTES, SHARE_NS)
        start_ns = end_ns = clock.monotonic_ns()
        for _ in range(len(self._queue)):
            host, _ = self._queue.popitem(last=False)
            before = host.bytes_sent
            self._look(host, now_ns, bytes_left)
            looked[host.hosted] = None
            bytes_left -= host.bytes_sent - before
            end_ns = clock.monotonic_ns()
            if bytes_left <= 0 or end_ns >= start_ns + share_ns:
                break
        self._rest_end_ns = end_ns + max(REST_FACTOR * (end_ns - start_ns), REST_MIN_NS) if busy else 0

    def _look(self, host: HostedSubscription, now_ns: int, bytes_max: int) -> None:
        hosted = host.hosted
        if hosted.silent or hosted.subscriptions.get(host.core.name) is not host:
            return
        core = hosted.core
        if core.level >= _FSYNC and core.settling:  # looked at again when the sync that makes it so is done
            return
        more = False
        try:
            more = host.dispatch(now_ns, bytes_max)
            host.read_error = None
        except DanubeError as error:
            host.read_error = error
            self._counters.add("storage_errors")
            _log.error("delivery failed", partition=hosted.name, error=str(error))
            host.deadline_ns = now_ns + READ_RETRY_NS
        if host.pending_new is not None or host.pending_again is not None or host.read_error is not None:
            self._waiting[host] = None
        hosted.update_near(host)
        if more:
            self._ask(host)
        self.touched[hosted] = None
        self._note_deadline(host)
        if host.core.failure.poison == "dead_letter":
            letters = host.core.take_dead_letters(DEAD_LETTERS_PER_TURN)
            if letters:
                self._take_dead_letters(host, letters)

    def _note_deadline(self, host: HostedSubscription) -> None:
        deadline_ns = host.deadline_ns
        if deadline_ns is not None:
            known_ns = self._deadlines.get(host.hosted, deadline_ns)
            self._deadlines[host.hosted] = min(known_ns, deadline_ns)
