"""Directory of a cluster: the broker that serves each partition, for routers and doors.

A partition of another broker is *elsewhere*: OwnerMoved with the owner's address, or Unavailable while it has
no owner or its owner is absent.  The metadata may be outdated; a wrong broker then answers the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from danube.core.placement.recovered import reservation_of
from danube.errors import DanubeError, OwnerMoved, Unavailable

if TYPE_CHECKING:
    from danube.cluster.log.local_log import LocalLog
    from danube.core.cluster.commands import BrokerRecord, Ownership, Reservation
    from danube.core.cluster.state import ClusterState
    from danube.core.metadata.commands import TopicRecord
    from danube.core.protocol.native import TopicView

WAITED_FOR = "the client waits and asks again"


class Directory:
    """Directory of one worker; ``read`` applies newly committed metadata."""

    def __init__(self, broker_id: int, metadata: LocalLog, read: Callable[[], None]) -> None:
        self.broker_id = broker_id
        self._metadata = metadata
        self._read = read

    @property
    def _state(self) -> ClusterState:
        return self._metadata.state.cluster

    @property
    def version(self) -> int:
        """Return the version of the metadata that this process has read."""
        return self._metadata.version

    @property
    def address(self) -> str:
        """Return the address at which native clients reach this broker; "" before it is registered."""
        broker = self._state.brokers.find(self.broker_id)
        return broker.native_address if broker is not None else ""

    def ownership(self, topic_id: int, partition: int) -> Ownership:
        """Return the current owner of a partition, or its last one."""
        return self._state.owners.of(topic_id, partition)

    def reservation(self, topic_id: int, partition: int) -> Reservation:
        """Return the reservation: how far the partition's owners may have assigned offsets."""
        return reservation_of(self._metadata.state, topic_id, partition)

    def name(self, topic_id: int, partition: int) -> str | None:
        """Return the physical name of a partition; None if its topic was deleted."""
        record = self._metadata.state.topic_with_id(topic_id)
        return None if record is None else record.physical_name(partition)

    def broker(self, broker_id: int) -> BrokerRecord | None:
        """Return a broker; None if it is absent."""
        found = self._state.brokers.find(broker_id)
        return found if found is not None and found.alive else None

    def owner(self, topic_id: int, partition: int) -> BrokerRecord | None:
        """Return the owner of a partition; None without one, or if the owner is absent."""
        broker_id = self._state.owners.of(topic_id, partition).broker_id
        return self.broker(broker_id) if broker_id else None

    def elsewhere(self, topic_id: int, partition: int) -> DanubeError | None:
        """Return the error for a request about a partition of another broker; None for one of this broker."""
        owners = self._state.owners
        if owners.of(topic_id, partition).broker_id == self.broker_id:
            return None
        self._read()
        return self.moved(topic_id, partition)

    def moved(self, topic_id: int, partition: int) -> DanubeError | None:
        """Like elsewhere(), but does not read new metadata first."""
        record = self._state.owners.of(topic_id, partition)
        if record.broker_id == self.broker_id:
            return None
        owner = self.broker(record.broker_id) if record.broker_id else None
        if owner is not None:
            return OwnerMoved(
                f"the partition is served by broker {owner.broker_id}", hint="ask there",
                address=owner.native_address, broker_id=str(owner.broker_id), epoch=record.epoch,
            )  # fmt: skip
        if record.broker_id:
            why = f"broker {record.broker_id} owns it and is not there"
            return Unavailable("the partition cannot be reached now", why=why, hint=WAITED_FOR)
        return Unavailable("the partition has no owner yet", why=record.reason, hint=WAITED_FOR)

    def describe(self, record: TopicRecord, view: TopicView) -> TopicView:
        """Return the view with the addresses of each partition's broker and of all brokers."""
        brokers = self._state.brokers.records()
        view.brokers = [broker.native_address for broker in brokers if broker.alive]
        owners = (self.owner(record.topic_id, index) for index in range(len(view.partitions)))
        view.owners = [
            "" if owner is None or owner.broker_id == self.broker_id else owner.native_address
            for owner in owners
        ]
        return view
