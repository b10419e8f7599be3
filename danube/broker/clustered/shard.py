"""A shard of a broker in a cluster: it serves what the broker owns, and only while the broker's lease holds.

    of nobody --granted--> ours --opened--> hosted --asked to release--> leaving --released--> departed
                             ^                |                                                   |
                             '----- taken ----'  the lease was over, the worker is a new one      |
    clients are told the new owner's address when it is known  <---------------------------------'

A turn checks the right to acknowledge twice, by the clock: before it writes, and before answers leave the
process.  So a worker that was paused beyond its lease appends nothing and answers nothing: its connections
are dropped with their unsent answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from danube.broker.clustered.leaving import Leaving
from danube.broker.partition.opening import ANY_EPOCH, after_cut, lost_before, partition_directory
from danube.broker.shard.shard import Shard
from danube.core.cluster.ownership import DELETED
from danube.core.placement.recovered import LOG_EPOCHS
from danube.errors import DanubeError, OwnerMoved, TopicNotFound, Unavailable, broken
from danube.host import clock, telemetry
from danube.wal.segments.segment import log_id_of_topic

if TYPE_CHECKING:
    from danube.broker.api import Session
    from danube.broker.clustered.directory import Directory
    from danube.broker.clustered.owning import Owning, Place
    from danube.broker.clustered.reserving import Reserving
    from danube.broker.partition.hosted import HostedPartition
    from danube.broker.processes.lease import SharedLease
    from danube.broker.tiers.worker_tiers import Tiers
    from danube.core.cluster.commands import Ownership
    from danube.core.metadata.commands import TopicRecord
    from danube.core.partition.partition import OffsetBudget
    from danube.wal.segments.local_holes import OffsetJump

RESERVE_NS: Final = 500_000_000
OPEN_AGAIN_NS: Final = 2_000_000_000
DEPARTED_NS: Final = 1_000_000_000  # limit of clients' wait for the address of a partition's new owner
STALE_NS: Final = 5_000_000_000  # limit of requests' wait for a thread that still opens the former log

Then = Callable[["HostedPartition | DanubeError"], None]

_log = telemetry.events("shard")


class ClusterShard(Shard):
    """Shard of a broker in a cluster, see the module; :meth:`follow` takes each change of ownership."""

    def __init__(
        self, directory: Directory, owning: Owning, reserving: Reserving, lease: SharedLease,
        silence: Callable[[], None], **parts: Any,
    ) -> None:  # fmt: skip
        super().__init__(**parts)
        self._directory = directory
        self._owning = owning
        self._reserving = reserving
        self._lease = lease
        self._silence = silence  # drops the connections with their unsent output
        self._asked: dict[Place, Ownership] = {}  # partitions that must leave and are not open yet
        self._unopened: set[Place] = set()  # partitions that must be opened without a request
        self._open_ns = 0  # time of the next attempt to open them
        self._leaving: dict[Place, Leaving] = {}
        self._departed: dict[Place, tuple[HostedPartition, int]] = {}  # released partitions, with deadlines
        self._inheriting: dict[Place, list[Then]] = {}  # requests for partitions that the mover prepares
        self._reserve_ns = 0  # time of the next check of reservations
        self._held: dict[Place, list[Then]] = {}  # requests for partitions that are leaving
        self._stale: dict[Place, int] = {}  # deadlines of partitions whose former log a thread still opens
        self._serving = False  # whether the lease held at the last check
        self._registration = 0

    # -- the lease --------------------------------------------------------------------------------

    def turn(self) -> None:
        if self._lease_holds():
            super().turn()
            self._lease_holds()
        elif self._dirty:  # the buffer of their batches is reused after this turn
            broken("records were taken without a lease", partitions=len(self._dirty))

    def _lease_holds(self) -> bool:
        """Return whether the lease has held since :meth:`_serve`, without a lapse in between."""
        if not self._serving:
            return False
        lease = self._lease
        # Read the end first, because it is stored after the registration that it belongs to.
        if clock.elapsed_ns() < lease.end_ns and lease.registration == self._registration:
            return True
        self._lapse()
        return False

    def _lapse(self) -> None:
        """Stop writing, answering and delivering, because other brokers may own the partitions now."""
        self._serving = False
        departed = [hosted for hosted, _ in self._departed.values()]
        _log.warning("the broker's lease is over", partitions=len(self.partitions))
        self._silence()
        self._owning.forget()
        error = OwnerMoved("the broker's lease was over", hint="the client asks again by itself")
        hosts, self.partitions = [*self.partitions.values(), *departed], {}
        self._asked.clear()
        self._unopened.clear()
        self._leaving.clear()
        self._departed.clear()
        for hosted in hosts:
            self._depart(hosted, error)
        for place in list(self._held):
            self._release_held(place, error)

    def _serve(self) -> None:
        """Begin to serve, or again after a lapse, when this worker has read the registration's metadata."""
        holds, registration = clock.elapsed_ns() < self._lease.end_ns, self._lease.registration
        if holds and 0 < registration <= self._directory.version:
            self._serving, self._registration = True, registration
            self._owning.begin()

    def tick(self) -> None:
        super().tick()
        now_ns = clock.monotonic_ns()
        if not self._lease_holds():
            self._serve()
        self._owning.step()
        if now_ns >= self._reserve_ns:
            self._reserve_ns = now_ns + RESERVE_NS
            for hosted in self.partitions.values():
                self._reserving.look(hosted)
        if now_ns >= self._open_ns:
            self._open_ns = now_ns + OPEN_AGAIN_NS
            for place in list(self._unopened):
                self._keep_open(place)
        for leaving in list(self._leaving.values()):
            leaving.step(now_ns)
        for place, (hosted, until_ns) in list(self._departed.items()):
            if until_ns <= now_ns:
                self._tell_departed(place, Unavailable(f"{hosted.name} has no owner yet", hint="ask again"))
        for place in [place for place, until_ns in self._stale.items() if until_ns <= now_ns]:
            _log.limited("a partition waits for its disk", source=self._name(place) or "", topic_id=place[0])
            error = Unavailable("an earlier opening of its log has not ended", hint="ask again")
            self._release_held(place, error)

    # -- ownership --------------------------------------------------------------------------------

    def serves(self, topic_id: int, index: int) -> bool:
        return self._owning.owned(topic_id, index)

    def follow(self, record: Ownership) -> None:
        """Follow a changed ownership of a partition; outdated changes are ignored."""
        place = record.topic_id, record.partition
        if not self._owning.here(*place):
            return
        if record.reason == DELETED:
            self._delete(place)
            return
        if record != self._directory.ownership(*place):
            return
        hosted = self._hosted(place)
        if record.broker_id != self._directory.broker_id:
            self._lose(place, hosted)
        elif record.reason:
            self._asked_to_leave(place, hosted, record)
        else:
            self._own(place, hosted, record)

    def _delete(self, place: Place) -> None:
        """Drop a partition whose topic was deleted, and fail its waiting requests."""
        error = TopicNotFound("the topic was deleted")
        self._owning.lose(place)
        self._asked.pop(place, None)
        self._leaving.pop(place, None)
        hosted, _ = self._departed.pop(place, (None, 0))
        if hosted is not None:
            self._forget(hosted, error)
        self._release_held(place, error)

    def _own(self, place: Place, hosted: HostedPartition | None, record: Ownership) -> None:
        """Open the partition under a fresh epoch, in which no owner has appended."""
        self._asked.pop(place, None)
        self._leaving.pop(place, None)
        if hosted is not None:  # an open log belongs to the former ownership
            self.partitions.pop(hosted.name)
            self._depart(hosted, OwnerMoved("the partition is opened anew", hint="open it again"))
        self._tell_departed(place, OwnerMoved("the partition is opened anew", hint="open it again"))
        self._owning.grant(place, record.epoch)
        self._release_held(place, None)
        if hosted is not None or record.epoch > 1:  # consumers, or another disk's records, may wait for it
            self._keep_open(place)

    def _lose(self, place: Place, hosted: HostedPartition | None) -> None:
        self._owning.lose(place)
        self._asked.pop(place, None)
        elsewhere = self._directory.moved(*place)
        leaving = self._leaving.pop(place, None)
        if hosted is not None:
            del self.partitions[hosted.name]
            if hosted.tier is not None:
                hosted.tier.given_away = leaving is not None and leaving.given_away
            if leaving is not None and leaving.given_away and not isinstance(elsewhere, OwnerMoved):
                self._departed[place] = hosted, clock.monotonic_ns() + DEPARTED_NS
                self._deliveries.forget(hosted)
                if self.tiers is not None:
                    self.tiers.forget(hosted)
                return
            self._depart(hosted, _retryable(elsewhere))
        if isinstance(elsewhere, OwnerMoved):
            self._tell_departed(place, elsewhere)

    def _tell_departed(self, place: Place, error: DanubeError) -> None:
        """Redirect open handles and pending requests of a released partition to its new owner."""
        hosted, _ = self._departed.pop(place, (None, 0))
        if hosted is not None:
            self._depart(hosted, error)
        self._release_held(place, error)

    def _depart(self, hosted: HostedPartition, error: DanubeError) -> None:
        """Stop hosting a partition of another broker; its files stay."""
        hosted.moved = hosted.refusal = error
        if hosted.log is not None:
            self.storage.sync_departing(hosted.log)
        self._let_go(hosted, error)

    def _asked_to_leave(self, place: Place, hosted: HostedPartition | None, record: Ownership) -> None:
        if place in self._leaving:
            return
        if hosted is None:  # it must be opened, so that its local records get into the store
            self._asked[place] = record
            self._keep_open(place)
        else:
            self._leaving[place] = Leaving(hosted, record, self)

    def _keep_open(self, place: Place) -> None:
        """Open the partition without a request; try again later if that fails, e.g. without the store."""
        name = self._name(place)
        if name is None or not self._owning.owned(*place) or self._hosted(place) is not None:
            self._unopened.discard(place)
            return
        self._unopened.add(place)
        if place not in self._inheriting and name not in self._opening:
            self.open(name, lambda outcome: None)

    def keep(self, place: Place) -> None:
        """Take back a partition that cannot be given away; that also withdraws the request to release it."""
        _log.warning("a partition stays: its records are on this host only", topic_id=place[0])
        self._leaving.pop(place, None)
        self._owning.take(place)

    def silence(self, hosted: HostedPartition) -> None:
        """Stop accepting and delivering, before the partition is given away."""
        hosted.silent = True
        hosted.refusal = OwnerMoved(f"{hosted.name} moves to another broker", hint="open it again")

    def serve_on(self, hosted: HostedPartition) -> None:
        """Serve the partition again, because it cannot be given away yet."""
        hosted.silent = False
        hosted.refusal = hosted.failure
        self._release_held((hosted.topic_id, hosted.index), None)
        self.wake(hosted)

    def release(
        self, hosted: HostedPartition, record: Ownership, then: Callable[[DanubeError | None], None]
    ) -> None:
        """Close the reservation at the log's end and release the partition, without a wait in between."""
        self._reserving.close(hosted)
        self._owning.release(record, then)

    def end_reservations(self) -> None:
        """Close all reservations at the logs' ends for the next owners; the worker ends in order."""
        for hosted in self.partitions.values():
            if hosted.failure is None:
                self._reserving.close(hosted)

    def _hosted(self, place: Place) -> HostedPartition | None:
        name = self._name(place)
        hosted = self.partitions.get(name) if name is not None else None
        return hosted if hosted is not None and hosted.topic_id == place[0] else None

    def _name(self, place: Place) -> str | None:
        return self._directory.name(*place)

    # -- opening ----------------------------------------------------------------------------------

    def open(self, name: str, then: Then) -> None:
        if name in self.partitions or name in self._opening:
            self._open_hosted(name, then)
            return
        try:
            record, index = self._find_topic(name)
        except DanubeError as error:
            then(error)
            return
        place = record.topic_id, index
        elsewhere = self._directory.moved(*place)
        if place in self._departed:
            self._held.setdefault(place, []).append(then)
        elif elsewhere is not None:
            then(elsewhere)
        elif not self._owning.granted(place):
            self._owning.take(place, lambda error: then(error) if error else self.open(name, then))
        elif self.storage.reopening(partition_directory(self._root, *place)):
            self._stale.setdefault(place, clock.monotonic_ns() + STALE_NS)
            self._held.setdefault(place, []).append(then)
        elif self.tiers is None or not record.policy.reliable:
            super().open(name, then)
        elif place in self._inheriting:
            self._inheriting[place].append(then)
        else:
            self._inheriting[place] = [then]
            self._inherit(self.tiers, record, index)

    def _inherit(self, tiers: Tiers, record: TopicRecord, index: int) -> None:
        """Prepare the partition from the store before it is opened: another host may have owned it."""
        place, name = (record.topic_id, index), record.physical_name(index)
        epoch, known = self._owning.log_epoch(place), self._directory.reservation(*place)
        fields = {
            "topic_id": record.topic_id, "partition": index, "topic": record.topic, "epoch": epoch,
            "directory": str(partition_directory(self._root, record.topic_id, index)),
            "log_id": log_id_of_topic(record),
            "broker_id": self._directory.broker_id, "owner_epoch": epoch // LOG_EPOCHS,
            "incarnation": self._incarnation, "lost_before": lost_before(self.unbroken_since, record),
            "reserved_end": known.end, "reserved_broker_id": known.broker_id,
            "reserved_epoch": known.epoch, "closed": known.closed,
        }  # fmt: skip

        def inherited(error: DanubeError | None) -> None:
            thens = self._inheriting.pop(place, [])
            if error is None and self._owning.log_epoch(place) != epoch:
                error = _retryable(self._directory.moved(*place))
            for then in thens:
                if error is not None:
                    then(error)
                else:
                    Shard.open(self, name, then)

        tiers.inherit(fields, inherited)

    def _ahead(self, record: TopicRecord, index: int) -> OffsetJump | None:
        """Return the jump for a log that is on this host only.

        Offsets of other logs are reserved, and inheritance continues behind the reservation.
        """
        epoch = self._owning.log_epoch((record.topic_id, index))
        if self.tiers is not None or epoch < 2 * LOG_EPOCHS:  # the first owner has no older log
            return None
        return after_cut(self.unbroken_since, record, None, first_epoch=ANY_EPOCH)

    def _opened(self, name: str, done: Any) -> None:
        """Announce the partition only after a reservation allows it to give offsets."""
        hosted = None if done.exception() is not None else done.result()
        if hosted is None or hosted.budget is None:
            super()._opened(name, done)
            return

        def reserved(error: DanubeError | None) -> None:
            if error is not None:  # the refused reservation may be granted later; the log stays closed
                _log.warning("a partition is not opened", partition=name, why=str(error))
                self._owning.lose((hosted.topic_id, hosted.index))
            super(ClusterShard, self)._opened(name, done)

        self._reserving.look(hosted, reserved)

    def _budget_of(self, record: TopicRecord, index: int) -> OffsetBudget | None:
        if self.tiers is None or not record.policy.reliable:
            return None
        place = record.topic_id, index
        return self._reserving.budget(place, self._owning.log_epoch(place) // LOG_EPOCHS)

    def _open_hosted(self, name: str, then: Then) -> None:
        """Open the partition; if it is being given away, hold the request until the new owner is known."""
        hosted = self.partitions.get(name)
        if hosted is not None and hosted.silent:
            self._held.setdefault((hosted.topic_id, hosted.index), []).append(then)
        else:
            super().open(name, then)

    def reopen_ended(self, hosted: HostedPartition) -> None:
        place = hosted.topic_id, hosted.index
        if place in self._stale:
            self._release_held(place, None)

    def _release_held(self, place: Place, error: DanubeError | None) -> None:
        """Answer held requests with the error; without one, open the partition for them."""
        name = self._name(place)
        self._stale.pop(place, None)
        for then in self._held.pop(place, ()):
            if error is not None:
                then(error)
            elif name is None:
                then(TopicNotFound("the topic was deleted"))
            else:
                self.open(name, then)

    def _epoch_of(self, record: TopicRecord, index: int) -> int:
        epoch = self._owning.log_epoch((record.topic_id, index))
        if epoch % LOG_EPOCHS or not epoch:
            broken("a partition is opened that is not owned", topic=record.topic, partition=index)
        if self.storage.reopening(partition_directory(self._root, record.topic_id, index)):
            broken("a log is opened twice at a time", topic=record.topic, partition=index)
        return epoch

    def _adopt(self, hosted: HostedPartition) -> HostedPartition | DanubeError:
        place = hosted.topic_id, hosted.index
        if self._owning.log_epoch(place) == hosted.core.epoch:
            _log.info("partition opened", partition=hosted.name, epoch=hosted.core.epoch)
            record = self._asked.pop(place, None)
            if record is not None:
                self._leaving[place] = Leaving(hosted, record, self)
            return super()._adopt(hosted)
        moved = _retryable(self._directory.moved(*place))  # another broker got it during the opening
        self.counters.add("partitions_open")
        self._depart(hosted, moved)
        return moved

    def _reply_when_stored(
        self, hosted: HostedPartition, session: Session, correlation: int, reply: bytes
    ) -> None:
        if hosted.silent:  # its cursors may already have been sent to the next owner
            raise OwnerMoved(f"{hosted.name} moves to another broker", hint="ask again")
        super()._reply_when_stored(hosted, session, correlation, reply)


def _retryable(error: DanubeError | None) -> DanubeError:
    return error or Unavailable("the partition is opened anew", hint="ask again")
