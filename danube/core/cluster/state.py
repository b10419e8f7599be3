"""The cluster's part of the metadata machine, and how its parts play together.

===========================  ===================================================
:mod:`~danube.core.cluster.agreement`  the entry it has come to, the agreed time, who proposed what
:mod:`~danube.core.cluster.keys`  keys with values and revisions; counters
:mod:`~danube.core.cluster.leases`     rights that end when they are not renewed
:mod:`~danube.core.cluster.brokers`    who is there
:mod:`~danube.core.cluster.ownership`  who may append to which partition
:mod:`~danube.core.cluster.ownership`  how far its offsets may have been given
===========================  ===================================================

The end of a lease deletes its keys and ends the registration of its broker.  Ownership stays: the leader
releases the partitions of a dead broker, with commands of a bounded size.  On a single host all parts are
empty and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from danube.core.cluster.agreement import Agreement
from danube.core.cluster.brokers import COMMANDS_PREFIX, Brokers, command_level
from danube.core.cluster.commands import (
    Agreed,
    AllocateId,
    AnyClusterCommand,
    AssignPartitions,
    BrokerChanged,
    BrokerCommand,
    BrokerForgotten,
    ClusterChange,
    CompareAndSet,
    DeleteKey,
    DeletePrefix,
    ExpireLeases,
    ForgetBroker,
    GrantLease,
    IdAllocated,
    KeyCommand,
    KeyDeleted,
    KeyPut,
    LeaseCommand,
    LeaseEnded,
    LeaseKept,
    OffsetsReserved,
    OwnershipChanged,
    OwnershipCommand,
    PutKey,
    RegisterBroker,
    ReleasePartitions,
    RenewLease,
    ReserveOffsets,
    RevokeLease,
    SetBrokerMode,
    UnloadPartitions,
)
from danube.core.cluster.keys import KeySpace, check_key, check_prefix
from danube.core.cluster.leases import Leases, check_ttl
from danube.core.cluster.ownership import DEAD, Owners, Reservations
from danube.errors import InvalidArgument, LimitExceeded, TopicNotFound, WrongState
from danube.limits import LEASES_PER_COMMAND_MAX

PartitionCount = Callable[[int], int]  # of a topic id; 0 where there is no such topic


class ClusterState:
    """All parts together."""

    __slots__ = ("agreement", "brokers", "keys", "leases", "owners", "reservations")

    def __init__(self) -> None:
        self.agreement = Agreement()
        self.keys = KeySpace()
        self.leases = Leases()
        self.brokers = Brokers()
        self.owners = Owners()
        self.reservations = Reservations()

    @property
    def used(self) -> bool:
        """Whether there is anything to copy or to store."""
        return bool(
            self.agreement.now_us or self.agreement.index or len(self.keys) or self.keys.counters()
            or len(self.leases) or len(self.brokers) or len(self.owners)
        )  # fmt: skip

    # Check

    def check_known(self, level: int, what: str) -> None:
        """Raise WrongState if a broker would stop at a command of this level of :data:`COMMANDS`."""
        for broker in self.brokers.records():
            told = self.keys.find(f"{COMMANDS_PREFIX}{broker.broker_id}")
            if broker.alive and level > (0 if told is None else command_level(told.value)):
                raise WrongState(
                    f"broker {broker.broker_id} does not know {what}",
                    why=f"it runs an older version, {broker.version or 'which it does not tell'}",
                    hint="bring every broker of the cluster to this version first: danube brokers list",
                )

    def check(self, command: AnyClusterCommand, partition_count: PartitionCount) -> bool:
        """Whether ``command`` would change anything; raises a CallerError if it is not allowed."""
        match command:
            case Agreed():
                return self.agreement.check(command)
            case PutKey() | CompareAndSet() | DeleteKey() | DeletePrefix() | AllocateId():
                return self._check_key(command)
            case GrantLease() | RenewLease() | RevokeLease() | ExpireLeases():
                return self._check_lease(command)
            case RegisterBroker() | SetBrokerMode() | ForgetBroker():
                return self._check_broker(command)
            case AssignPartitions() | UnloadPartitions() | ReleasePartitions():
                return self._check_ownership(command, partition_count)
            case ReserveOffsets():
                needed = self.reservations.check(command)
                self._refuse_reservation(command, partition_count)
                return needed

    def _check_key(self, command: KeyCommand) -> bool:
        match command:
            case DeleteKey(key=key):
                check_key(key)
                return self.keys.find(key) is not None
            case DeletePrefix(prefix=prefix):
                check_prefix(prefix)
                return bool(self.keys.below(prefix, 1))
            case AllocateId():
                self.keys.check_allocate(command)
                return True
        self.keys.check_put(command)
        if command.lease_id and command.ttl_ms:
            raise InvalidArgument("a key goes with a lease or has a time to live of its own, not both")
        if command.ttl_ms:
            check_ttl(command.ttl_ms)
            former = self.keys.find(command.key)
            if former is None or former.lease_id >= 0:  # else it keeps the lease that it has
                self.leases.check_room()
        self._refuse_key(command)
        return isinstance(command, PutKey) or command.value is not None or command.revision != 0

    def _check_lease(self, command: LeaseCommand) -> bool:
        match command:
            case GrantLease():
                self.leases.check_grant(command)
            case ExpireLeases():
                if len(command.leases) > LEASES_PER_COMMAND_MAX:
                    why = f"the limit is {LEASES_PER_COMMAND_MAX}"
                    raise LimitExceeded("too many leases in one command", why=why)
                return bool(self.leases.over(command, self._time_at(command.now_us)))
            case _:
                self._refuse_lease(command)
        return True

    def _check_broker(self, command: BrokerCommand) -> bool:
        if isinstance(command, SetBrokerMode):
            return self.brokers.check_mode(command)
        if isinstance(command, RegisterBroker):
            self.brokers.check_register(command)
        self._refuse_broker(command)
        return True

    def _check_ownership(self, command: OwnershipCommand, partition_count: PartitionCount) -> bool:
        self.owners.check(command)
        self._refuse_ownership(command, partition_count)
        match command:
            case AssignPartitions():
                self._check_assignable(command)
            case UnloadPartitions():
                if command.to_broker_id:
                    self.brokers.broker(command.to_broker_id)
                return any(
                    (record.reason, record.to_broker_id) != (command.reason, command.to_broker_id)
                    for record in (self.owners.of(*place[:2]) for place in command.partitions)
                )
            case _:
                pass
        return True

    def _check_assignable(self, command: AssignPartitions) -> None:
        """Raise WrongState if the broker takes no partitions now, but for those that it owns."""
        broker = self.brokers.broker(command.broker_id)
        if not broker.alive:
            raise WrongState(f"broker {broker.broker_id} is not there", why="its registration has ended")
        if broker.mode != "active" and any(
            self.owners.of(*place[:2]).broker_id != broker.broker_id for place in command.partitions
        ):
            raise WrongState(f"broker {broker.broker_id} takes no partitions", why=f"it is {broker.mode}")

    # What apply refuses as well

    def _refuse_key(self, command: PutKey | CompareAndSet) -> None:
        if isinstance(command, CompareAndSet):
            self.keys.refuse_compare(command)
        if command.lease_id:
            self._refuse_unnamed(command.lease_id)

    def _refuse_unnamed(self, lease_id: int) -> None:
        """Raise where there is no such lease, or it is a key's own."""
        if self.leases.lease(lease_id).lease_id < 0:
            raise InvalidArgument(f"lease {lease_id} belongs to one key", hint="put the key again")

    def _refuse_lease(self, command: LeaseCommand) -> None:
        match command:
            case GrantLease():
                self.leases.refuse_grant(command)
            case RenewLease(lease_id=lease_id) | RevokeLease(lease_id=lease_id):
                self._refuse_unnamed(lease_id)
            case ExpireLeases():
                pass

    def _refuse_broker(self, command: BrokerCommand) -> None:
        if isinstance(command, RegisterBroker):
            self._refuse_unnamed(command.lease_id)
            return
        broker = self.brokers.broker(command.broker_id)
        if not isinstance(command, ForgetBroker):
            return
        if broker.alive:
            raise WrongState(f"broker {broker.broker_id} is there", hint="stop it first")
        owned = len(self.owners.of_broker(broker.broker_id))
        if owned:
            raise WrongState(f"broker {broker.broker_id} owns {owned} partitions", hint="release them first")

    def _refuse_ownership(self, command: OwnershipCommand, partition_count: PartitionCount) -> None:
        for topic_id, partition, _ in command.partitions:
            _refuse_missing(topic_id, partition, partition_count)
        self.owners.refuse(command)
        if isinstance(command, AssignPartitions):
            self.brokers.broker(command.broker_id)
        elif isinstance(command, ReleasePartitions) and command.reason == DEAD:
            broker = self.brokers.find(command.broker_id)
            if broker is not None and broker.alive:
                raise WrongState(f"broker {broker.broker_id} is not dead", why="its registration is held")

    def _refuse_reservation(self, command: ReserveOffsets, partition_count: PartitionCount) -> None:
        for topic_id, partition, _, _ in command.partitions:
            _refuse_missing(topic_id, partition, partition_count)
        self.reservations.refuse(command, self.owners)

    # Apply

    def apply(
        self, index: int, command: AnyClusterCommand, partition_count: PartitionCount
    ) -> list[ClusterChange]:
        """Take a command; raises where ``check`` finds that it would break the machine."""
        match command:
            case Agreed():
                self.agreement.apply(command)
                return []
            case PutKey() | CompareAndSet() | DeleteKey() | DeletePrefix() | AllocateId():
                return self._apply_key(index, command)
            case GrantLease() | RenewLease() | RevokeLease() | ExpireLeases():
                return self._apply_lease(index, command)
            case RegisterBroker() | SetBrokerMode() | ForgetBroker():
                return self._apply_broker(index, command)
            case AssignPartitions() | UnloadPartitions() | ReleasePartitions():
                self._refuse_ownership(command, partition_count)
                return self._apply_ownership(command)
            case ReserveOffsets():
                self._refuse_reservation(command, partition_count)
                return [OffsetsReserved(record) for record in self.reservations.reserve(command)]

    def _apply_key(self, index: int, command: KeyCommand) -> list[ClusterChange]:
        match command:
            case DeleteKey(key=key):
                return self._delete(index, key) if self.keys.find(key) else []
            case DeletePrefix(prefix=prefix):
                found = self.keys.below(prefix)
                return [change for record in found for change in self._delete(index, record.key)]
            case AllocateId():
                return [IdAllocated(self.keys.allocate(command.counter))]
        self._refuse_key(command)
        if command.value is None:
            return self._delete(index, command.key) if self.keys.find(command.key) else []
        self.agreement.pass_own_time(command.now_us)
        return self._put(index, command.key, command.value, command.lease_id, command.ttl_ms)

    def _put(self, index: int, key: str, value: bytes, lease_id: int, ttl_ms: int) -> list[ClusterChange]:
        former = self.keys.find(key)
        former_lease = former.lease_id if former else 0
        changes: list[ClusterChange] = []
        if ttl_ms:
            lease_id = former_lease if former_lease < 0 else -index
            changes.append(LeaseKept(self.leases.keep(index, lease_id, ttl_ms, self.agreement.now_us)))
        changes.append(KeyPut(self.keys.put(index, key, value, lease_id)))
        if former_lease < 0 and former_lease != lease_id:
            changes.append(LeaseEnded(self.leases.end(former_lease)))
        return changes

    def _delete(self, index: int, key: str) -> list[ClusterChange]:
        record = self.keys.delete(key)
        changes: list[ClusterChange] = [KeyDeleted(record, index)]
        if record.lease_id < 0:
            changes.append(LeaseEnded(self.leases.end(record.lease_id)))
        return changes

    def _apply_lease(self, index: int, command: LeaseCommand) -> list[ClusterChange]:
        self._refuse_lease(command)
        if isinstance(command, RevokeLease):
            return self._end_lease(index, command.lease_id)
        self.agreement.pass_own_time(command.now_us)
        now_us = self.agreement.now_us
        if isinstance(command, ExpireLeases):
            over = self.leases.over(command, now_us)
            return [change for lease in over for change in self._end_lease(index, lease.lease_id)]
        ttl_ms = (
            command.ttl_ms if isinstance(command, GrantLease) else self.leases.lease(command.lease_id).ttl_ms
        )
        return [LeaseKept(self.leases.keep(index, command.lease_id, ttl_ms, now_us))]

    def _end_lease(self, index: int, lease_id: int) -> list[ClusterChange]:
        keys = self.keys.of_lease(lease_id)
        brokers = self.brokers.of_lease(lease_id) if lease_id > 0 else []
        return [
            *(KeyDeleted(self.keys.delete(key), index) for key in keys),
            *(BrokerChanged(self.brokers.end(broker.broker_id)) for broker in brokers),
            LeaseEnded(self.leases.end(lease_id)),
        ]

    def _apply_broker(self, index: int, command: BrokerCommand) -> list[ClusterChange]:
        self._refuse_broker(command)
        match command:
            case SetBrokerMode():
                former_mode = self.brokers.broker(command.broker_id)
                record = self.brokers.set_mode(command)
                return [BrokerChanged(record)] if record != former_mode else []
            case ForgetBroker():
                return [BrokerForgotten(self.brokers.forget(command.broker_id))]
        former = self.brokers.find(command.broker_id)
        changes: list[ClusterChange] = [BrokerChanged(self.brokers.register(command))]
        if former is not None and former.lease_id not in (0, command.lease_id):
            changes += self._end_lease(index, former.lease_id)
        return changes

    def _apply_ownership(self, command: OwnershipCommand) -> list[ClusterChange]:
        if isinstance(command, AssignPartitions):
            records = self.owners.assign(command)
        elif isinstance(command, UnloadPartitions):
            records = self.owners.unload(command)
        else:
            records = self.owners.release(command)
        return [OwnershipChanged(record) for record in records]

    def forget_topic(self, topic_id: int, partition_count: int) -> list[ClusterChange]:
        """Drop the owners of a deleted topic's partitions."""
        self.reservations.forget_topic(topic_id, partition_count)
        return [OwnershipChanged(record) for record in self.owners.forget_topic(topic_id, partition_count)]

    def _time_at(self, now_us: int) -> int:
        """The agreed time when a command with this time of its proposer is applied."""
        agreement = self.agreement
        return agreement.now_us if agreement.index else max(agreement.now_us, now_us)

    def copy(self) -> ClusterState:
        """A state that changes on its own from here; records are shared, as they never change."""
        other = ClusterState()
        for name in self.__slots__:
            setattr(other, name, getattr(self, name).copy())
        return other


def _refuse_missing(topic_id: int, partition: int, partition_count: PartitionCount) -> None:
    if not 0 <= partition < partition_count(topic_id):
        raise TopicNotFound(f"topic id {topic_id} has no partition {partition}", why="or it is gone")
