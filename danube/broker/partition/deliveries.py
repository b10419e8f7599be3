"""Deliveries of a turn: which subscriptions of a worker are dispatched, and in which order.

    near     the next record is in memory, or does not exist yet: dispatched in the turn of every write
    behind   reads the log or objects: dispatched after an event of its own, within the turn's share

A dispatch takes time even if it sends nothing, and publishers wait for the end of the turn.  So all
subscriptions that are behind stand in one queue, and a turn serves the queue from its front until the share
is used up.  Hundreds of readers of old records then delay a publish by one share, not by hundreds of
dispatches.

During publishing the share is small, but at least twice the published bytes, so that a reader can catch up
with any producer.  If many subscriptions are behind, a turn that wrote leaves the queue to the next turn, so
that answers and new records are sent first.  After each share the queue rests, so that other processes get
the processor.
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
    from danube.broker.traffic import Traffic
    from danube.core.dispatch.grants import DeadLetter

_log = telemetry.events("deliveries")
_FSYNC: Final = Durability.FSYNC  # a member of an IntEnum costs as much to look up as five numbers
READ_RETRY_NS: Final = 1_000_000_000
DEAD_LETTERS_PER_TURN: Final = 64
TURN_BYTES: Final = 4 * MIB  # for one near subscription, and for all together that are behind
SHARE_NS: Final = 4_000_000
BUSY_SHARE_NS: Final = 250_000
BUSY_SHARE_BYTES: Final = 128 * KIB
BUSY_NS: Final = 50_000_000  # time after a publish in which the share is small
FEW: Final = 8  # a queue of at most this length is served in every turn, without rests
REST_FACTOR: Final = 2  # length of a rest, in units of the share's time
MS_NS: Final = 1_000_000
REST_MIN_NS: Final = 1 * MS_NS

DeadLetterTaker = Callable[["HostedSubscription", list["DeadLetter"]], None]


class Deliveries:
    """Schedules the dispatches of one worker's subscriptions; all methods run on its loop.

    The shard calls ``turn`` once in each turn of the worker.
    """

    def __init__(
        self,
        counters: Traffic,
        schedule_turn: Callable[[], None],
        call_later: Callable[..., object],
        take_dead_letters: DeadLetterTaker,
    ) -> None:
        self.touched: dict[HostedPartition, None] = {}  # partitions whose cursors may have changed
        self._counters = counters
        self._schedule_turn = schedule_turn
        self._call_later = call_later
        self._take_dead_letters = take_dead_letters
        self._near: dict[HostedSubscription, None] = {}
        self._queue: OrderedDict[HostedSubscription, None] = OrderedDict()  # subscriptions that are behind
        self._lossy: dict[HostedPartition, None] = {}
        self._deadlines: dict[HostedPartition, int] = {}
        self._waiting: dict[HostedSubscription, None] = {}  # subscriptions that wait for bytes
        self._published_ns = -BUSY_NS
        self._published_bytes = 0
        self._wrote = False  # whether this turn wrote published batches
        self._left_out = False  # whether the last turn left the queue to the next one
        self._rest_end_ns = 0
        self._resting = False  # whether a turn is scheduled for the end of the rest

    # -- requesting a dispatch --------------------------------------------------------------------

    def wake(self, hosted: HostedPartition) -> None:
        """Dispatch every subscription of this partition, in this or the next turn."""
        for host in hosted.subscriptions.values():
            self._ask(host)
        self._lossy[hosted] = None
        self._schedule_turn()

    def wake_one(self, hosted: HostedPartition, subscription: str) -> None:
        """Dispatch one subscription, in this or the next turn."""
        host = hosted.subscriptions.get(subscription)
        if host is None:
            self._lossy[hosted] = None
        else:
            hosted.update_near(host)
            self._ask(host)
        self._schedule_turn()

    def settled(self, host: HostedSubscription) -> None:
        """Have the cursor stored and waiting records dispatched, after an ack or new credit."""
        hosted = host.hosted
        if hosted.silent:
            return
        self.touched[hosted] = None
        if host.core.has_more(hosted.core.high_watermark):
            self._ask(host)
            self._schedule_turn()

    def wake_readers(self, hosted: HostedPartition) -> None:
        """Dispatch the subscriptions whose requested bytes have arrived, or whose holes have changed."""
        for host in hosted.subscriptions.values():
            if host.needs_dispatch:
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
        """Note the bytes that were published in the current turn."""
        self._published_ns, self._published_bytes = now_ns, size_bytes
        self._wrote = True

    def tick(self, now_ns: int) -> None:
        """Dispatch the subscriptions with a due timer: an ack deadline or a redelivery."""
        due = [hosted for hosted, deadline_ns in self._deadlines.items() if deadline_ns <= now_ns]
        for hosted in due:
            del self._deadlines[hosted]
            if hosted.lossy:
                self._lossy[hosted] = None
            for host in hosted.subscriptions.values():
                if host.deadline_ns is not None and host.deadline_ns <= now_ns:
                    self._ask(host)
                else:
                    self._note_deadline(host)
        if due:
            self._schedule_turn()

    def second(self) -> None:
        """Report to consumers why they wait; called each second, so shorter waits are not reported."""
        hosted = (one for one in self._waiting if one.hosted.subscriptions.get(one.core.name) is one)
        self._waiting = {host: None for host in hosted if host.tell_waiting()}

    def forget(self, hosted: HostedPartition) -> None:
        """Drop all requests of a partition that this worker no longer hosts."""
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
                next_ns = host.dispatch(now_ns)
                if next_ns is not None:
                    self._deadlines[hosted] = min(self._deadlines.get(hosted, next_ns), next_ns)
        near, self._near = self._near, {}
        looked: dict[HostedPartition, None] = {}
        for one in near:
            self._look(one, now_ns, TURN_BYTES)
            looked[one.hosted] = None
        if self._queue and self._may_serve(wrote):
            self._serve(now_ns, looked)
        first = next(iter(self._queue), None)
        for hosted in looked:
            # One chunk is kept after the turn: the next subscription in the queue often reads the same one.
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
        """Schedule a turn for the queue, at once or after the rest."""
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
        if core.level >= _FSYNC and core.settling:  # dispatched again when the running sync has ended
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
