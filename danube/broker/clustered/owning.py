"""The epochs under which a worker may open the partitions of its broker.

Granted:  an epoch that the leader gave while this worker ran and the lease held, unasked or by request.  No
          record was appended under it.  Epochs from before the worker's start belong to its predecessor.
Taken:    the worker requests another epoch for a partition that the broker owns: after its own restart,
          and after the broker's lease had ended.  Without a lease it requests none.
Lost:     another broker owns the partition, or none does.

The log's epoch is the ownership's epoch times LOG_EPOCHS, plus one for each time that the same
worker opens the log anew.  So it grows with every owner, every worker and every reopening.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, Protocol

from danube.core.cluster.commands import AssignPartitions, ReleasePartitions
from danube.core.cluster.ownership import EPOCH_MAX
from danube.core.placement.recovered import LOG_EPOCHS
from danube.core.placement.workers import owner_of
from danube.errors import DanubeError, LimitExceeded, Unavailable
from danube.host import clock, telemetry
from danube.limits import PARTITIONS_PER_COMMAND_MAX

if TYPE_CHECKING:
    from danube.broker.clustered.directory import Directory
    from danube.cluster.log.local_log import LocalLog
    from danube.core.cluster.commands import Ownership
    from danube.core.metadata.commands import Command, Outcome

TAKE_NS: Final = 10_000_000_000
WITHOUT_LEASE_NS: Final = 1_000_000_000
RETRY_NS: Final = 200_000_000

Place = tuple[int, int]  # topic id, partition
Taken = Callable[[DanubeError | None], None]

_log = telemetry.events("owning")


class Submit(Protocol):
    def __call__(self, command: Command, then: Callable[[Outcome], None]) -> None: ...


class _Taking:
    """A partition whose next epoch is requested, and the callbacks that wait for it."""

    def __init__(self, deadline_ns: int) -> None:
        self.thens: list[Taken] = []
        self.deadline_ns = deadline_ns
        self.asked = False
        self.try_ns = 0  # time of the next request


class Owning:
    """Epochs of one worker's partitions; all methods run on its loop."""

    def __init__(
        self, worker: tuple[int, int], metadata: LocalLog, directory: Directory, submit: Submit
    ) -> None:
        self._worker, self._workers = worker
        self._metadata = metadata
        self._directory = directory
        self._submit = submit
        self._asking = False  # whether the lease holds, so that epochs may be requested
        self._epochs: dict[Place, int] = {}
        self._taking: dict[Place, _Taking] = {}

    def here(self, topic_id: int, partition: int) -> bool:
        """Return whether this worker is responsible for the partition on this host."""
        return owner_of(topic_id, partition, self._workers) == self._worker

    def owned(self, topic_id: int, partition: int) -> bool:
        """Return whether the broker owns the partition."""
        owners = self._metadata.state.cluster.owners
        return owners.of(topic_id, partition).broker_id == self._directory.broker_id

    def places(self) -> list[Place]:
        """Return the partitions that the broker owns and this worker serves."""
        records = self._metadata.state.cluster.owners.of_broker(self._directory.broker_id)
        return [place for record in records if self.here(*(place := (record.topic_id, record.partition)))]

    # -- epochs -----------------------------------------------------------------------------------

    def granted(self, place: Place) -> bool:
        """Return whether the partition may be opened."""
        return place in self._epochs

    def log_epoch(self, place: Place) -> int:
        """Return the first epoch of a log that is opened now; 0 if it may not be opened."""
        return self._epochs.get(place, 0) * LOG_EPOCHS

    def grant(self, place: Place, epoch: int) -> None:
        """Note that the broker became the owner, or got another epoch.

        The grant may arrive before this worker knows that the lease holds.  Such an epoch is requested again
        (:meth:`begin`), because until then no turn would write the records of the partition.
        """
        if not self._asking:
            return
        error: DanubeError | None = None
        if epoch < EPOCH_MAX // LOG_EPOCHS:
            self._epochs[place] = epoch
        else:
            error = LimitExceeded("the partition had too many owners", epoch=epoch)
        self._settle(place, error)

    def lose(self, place: Place) -> None:
        """Forget the epoch of a partition that another broker owns, or none."""
        self._epochs.pop(place, None)
        self._settle(place, self._directory.moved(*place))

    def forget(self) -> None:
        """Drop all epochs, because the lease is over: they must be taken again."""
        self._asking = False
        self._epochs.clear()
        deadline_ns = clock.monotonic_ns() + WITHOUT_LEASE_NS
        for taking in self._taking.values():
            taking.deadline_ns = min(taking.deadline_ns, deadline_ns)
            taking.asked = False  # the result of that request no longer counts

    def begin(self) -> None:
        """Take all partitions of the broker, because the lease holds."""
        self._asking = True
        self.take_all(self.places())

    def release(self, record: Ownership, then: Taken) -> None:
        """Propose the release of a partition, to which this owner appends no more."""
        command = ReleasePartitions(
            broker_id=self._directory.broker_id,
            partitions=((record.topic_id, record.partition, record.epoch),),
        )
        try:
            self._submit(command, lambda outcome: then(outcome if isinstance(outcome, DanubeError) else None))
        except DanubeError as error:
            then(error)

    # -- taking -----------------------------------------------------------------------------------

    def take(self, place: Place, then: Taken | None = None) -> None:
        """Request an epoch for a partition of the broker.

        ``then`` gets None when it is granted, or the error.
        """
        taking = self._taking.get(place)
        if taking is None:
            wait_ns = TAKE_NS if self._asking else WITHOUT_LEASE_NS
            taking = self._taking[place] = _Taking(clock.monotonic_ns() + wait_ns)
        if then is not None:
            taking.thens.append(then)
        self.step()

    def take_all(self, places: Iterable[Place]) -> None:
        """Request epochs for all partitions that have none, together."""
        deadline_ns = clock.monotonic_ns() + TAKE_NS
        for place in places:
            if place not in self._epochs:
                self._taking.setdefault(place, _Taking(deadline_ns))
        self.step()

    def step(self) -> None:
        """Request due epochs while the lease holds; give up requests whose time is over."""
        now_ns = clock.monotonic_ns()
        over = [place for place, taking in self._taking.items() if taking.deadline_ns <= now_ns]
        for place in over:
            self._settle(place, Unavailable("the partition cannot be opened now", hint="ask again"))
        if not self._asking:
            return
        due = [one for one, taking in self._taking.items() if not taking.asked and taking.try_ns <= now_ns]
        for start in range(0, len(due), PARTITIONS_PER_COMMAND_MAX):
            self._ask(due[start : start + PARTITIONS_PER_COMMAND_MAX])

    def _ask(self, places: list[Place]) -> None:
        owned = [place for place in places if self.owned(*place)]
        for place in set(places).difference(owned):
            self._settle(place, self._directory.moved(*place))
        if not owned:
            return
        owners = self._metadata.state.cluster.owners
        wanted = tuple((*place, owners.of(*place).epoch) for place in owned)
        for taking in [self._taking[place] for place in owned if place in self._taking]:
            taking.asked = True
        command = AssignPartitions(broker_id=self._directory.broker_id, partitions=wanted)
        try:
            self._submit(command, lambda outcome: self._asked(owned, outcome))
        except DanubeError as error:
            self._asked(owned, error)

    def _asked(self, places: list[Place], outcome: Outcome) -> None:
        """Take the outcome of a request; on success :meth:`grant` was called, and one conflict fails all."""
        if not isinstance(outcome, DanubeError):
            return
        _log.limited("epochs not taken", source="take", why=str(outcome), count=len(places))
        try_ns = clock.monotonic_ns() + (RETRY_NS if len(places) == 1 else 0)
        for place in places:
            taking = self._taking.get(place)
            if taking is not None:
                taking.asked = False
                taking.try_ns = try_ns
        if len(places) > 1:
            for place in [place for place in places if place in self._taking]:
                self._ask([place])

    def _settle(self, place: Place, error: DanubeError | None) -> None:
        taking = self._taking.pop(place, None)
        if taking is not None:
            for then in taking.thens:
                then(error)
