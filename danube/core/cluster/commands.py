"""Commands, records and changes of the cluster's part of the metadata.

Plain values only; the rules are in the parts that :mod:`danube.core.cluster.state` lists.  This module never
reads a clock: ``Agreed`` carries the leader's time.  On a single host, which has no leader, a command about
leases carries its proposer's time as ``now_us``.
"""

from __future__ import annotations

import msgspec


class KeyRecord(msgspec.Struct, frozen=True, array_like=True):
    """One key as it is now.  A *revision* is the index of a command, ``version`` counts from 1.

    ``lease_id`` 0: the key stays until it is deleted; below 0: the key has its own lease.
    """

    key: str
    value: bytes
    version: int
    create_revision: int
    mod_revision: int
    lease_id: int = 0


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """Keeps keys and a broker's registration until ``expires_us`` of the agreed time.

    ``revision`` is the index of the command that granted or renewed it last.
    """

    lease_id: int
    ttl_ms: int
    expires_us: int
    revision: int


class Allocated(msgspec.Struct, frozen=True, array_like=True):
    """``number`` was taken from a counter, which counts from 1 and gives no number twice."""

    counter: str
    number: int


class BrokerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One broker of the cluster.  ``lease_id`` 0: its registration has ended, only its mode is kept.

    Addresses are ``host:port``; ``mode`` is active, draining or drained, ``reason`` says why.
    """

    broker_id: int
    native_address: str
    grpc_address: str = ""
    admin_address: str = ""
    metrics_address: str = ""
    version: str = ""
    mode: str = "active"
    reason: str = ""
    lease_id: int = 0

    @property
    def alive(self) -> bool:
        return self.lease_id != 0


class Ownership(msgspec.Struct, frozen=True, array_like=True):
    """Owner of a partition, which alone may append.  ``broker_id`` 0: no broker; ``epoch`` is the last given.

    ``reason`` says why the owner is asked to release the partition, or why it has no owner.
    ``to_broker_id`` is the broker that shall get it next (0: any), ``from_broker_id`` the one that had it.
    """

    topic_id: int
    partition: int
    broker_id: int
    epoch: int
    reason: str = ""
    from_broker_id: int = 0
    to_broker_id: int = 0


class Reservation(msgspec.Struct, frozen=True, array_like=True):
    """Offsets of a partition below ``end`` may have been given, by this broker in this epoch or before.

    ``closed``: the broker has stopped, and its log ends exactly at ``end``. ``broker_id`` 0 with an end: any
    owner up to that epoch, because commands were lost (:mod:`danube.core.placement.recovered`).
    """

    topic_id: int
    partition: int
    end: int
    broker_id: int
    epoch: int
    closed: bool = False


class ClusterCommand(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all commands of this module; they share no field."""


class Agreed(ClusterCommand, frozen=True, kw_only=True, tag="agreed", tag_field="kind"):
    """Marks the commands behind it as agreed: entry ``index`` of ``term``, at the leader's time ``now_us``.

    An ``Agreed`` stands before the commands of each origin in the entry.  ``origin`` is the incarnation
    of the proposer ("": the leader itself) and ``sequence`` its own counter, from 1.  A sequence that is
    not above the last one of its origin is a repetition.  Beyond ``origins_max`` origins the one that has
    been silent longest is forgotten; the command carries this bound, so that all versions agree on it.
    """

    index: int
    term: int
    now_us: int
    origin: str = ""
    sequence: int = 0
    origins_max: int = 1_024


class PutKey(ClusterCommand, frozen=True, kw_only=True, tag="put_key", tag_field="kind"):
    """Set a key.

    It ends with the lease ``lease_id``, or after ``ttl_ms``; with neither it stays, whatever lease it had.
    """

    key: str
    value: bytes
    lease_id: int = 0
    ttl_ms: int = 0
    now_us: int = 0


class DeleteKey(ClusterCommand, frozen=True, kw_only=True, tag="delete_key", tag_field="kind"):
    """Delete a key, if it is there."""

    key: str


class DeletePrefix(ClusterCommand, frozen=True, kw_only=True, tag="delete_prefix", tag_field="kind"):
    """Delete all keys below ``prefix``, which ends in a slash."""

    prefix: str


class CompareAndSet(ClusterCommand, frozen=True, kw_only=True, tag="compare_and_set", tag_field="kind"):
    """As PutKey (without a value: DeleteKey), where the key is as expected, else refused.

    Expected is a revision (0: the key is absent) or, where ``revision`` is -1, ``expected``.
    """

    key: str
    value: bytes | None
    revision: int = -1
    expected: bytes = b""
    lease_id: int = 0
    ttl_ms: int = 0
    now_us: int = 0


class AllocateId(ClusterCommand, frozen=True, kw_only=True, tag="allocate_id", tag_field="kind"):
    """Take the next number of a counter, which is made where it is missing."""

    counter: str


class GrantLease(ClusterCommand, frozen=True, kw_only=True, tag="grant_lease", tag_field="kind"):
    """Make a lease whose id, 1 .. 2**63 - 1, the proposer has chosen."""

    lease_id: int
    ttl_ms: int
    now_us: int = 0


class RenewLease(ClusterCommand, frozen=True, kw_only=True, tag="renew_lease", tag_field="kind"):
    """Let a lease last for its time again from now on."""

    lease_id: int
    now_us: int = 0


class RevokeLease(ClusterCommand, frozen=True, kw_only=True, tag="revoke_lease", tag_field="kind"):
    """End a lease now, with its keys and registration."""

    lease_id: int


class ExpireLeases(ClusterCommand, frozen=True, kw_only=True, tag="expire_leases", tag_field="kind"):
    """End those of the leases whose time is over and that are still at the revision seen: (id, revision).

    One that was renewed meanwhile stays.
    """

    leases: tuple[tuple[int, int], ...]
    now_us: int = 0


class RegisterBroker(ClusterCommand, frozen=True, kw_only=True, tag="register_broker", tag_field="kind"):
    """A broker is there as long as its lease.  Its former registration ends, with that one's lease.

    An empty ``mode`` keeps the one that it had; a new broker is active.
    """

    broker_id: int
    lease_id: int
    native_address: str
    grpc_address: str = ""
    admin_address: str = ""
    metrics_address: str = ""
    version: str = ""
    mode: str = ""
    reason: str = ""


class SetBrokerMode(ClusterCommand, frozen=True, kw_only=True, tag="set_broker_mode", tag_field="kind"):
    broker_id: int
    mode: str
    reason: str = ""


class ForgetBroker(ClusterCommand, frozen=True, kw_only=True, tag="forget_broker", tag_field="kind"):
    """Forget a broker whose registration has ended and that owns nothing."""

    broker_id: int


class AssignPartitions(ClusterCommand, frozen=True, kw_only=True, tag="assign_partitions", tag_field="kind"):
    """Make a broker the owner of partitions: (topic id, partition, epoch that the proposer saw, 0 for none).

    ``epoch_floor`` is for logs that were written before there was a cluster.  Each partition gets its next
    epoch, above all that it had and above ``epoch_floor``. A partition must have no owner, or be the broker's
    own; then it only gets another epoch.
    """

    broker_id: int
    partitions: tuple[tuple[int, int, int], ...]
    epoch_floor: int = 0


class UnloadPartitions(ClusterCommand, frozen=True, kw_only=True, tag="unload_partitions", tag_field="kind"):
    """Ask the owners of partitions, (topic id, partition, epoch), to release them; it is noted with each."""

    partitions: tuple[tuple[int, int, int], ...]
    reason: str
    to_broker_id: int = 0


class ReleasePartitions(
    ClusterCommand, frozen=True, kw_only=True, tag="release_partitions", tag_field="kind"
):
    """The owner of partitions, (topic id, partition, epoch), has stopped appending to them.

    An empty ``reason`` keeps the reason of the request.  With reason ``dead`` the leader proposes the command
    for a broker whose registration has ended.
    """

    broker_id: int
    partitions: tuple[tuple[int, int, int], ...]
    reason: str = ""


class ReserveOffsets(ClusterCommand, frozen=True, kw_only=True, tag="reserve_offsets", tag_field="kind"):
    """The owner of partitions, (topic id, partition, epoch, end), appends to them below ``end`` only.

    With ``last`` it has stopped, ``end`` is where its log ends, and nothing more is reserved in that epoch.
    """

    broker_id: int
    partitions: tuple[tuple[int, int, int, int], ...]
    last: bool = False


class KeyPut(msgspec.Struct, frozen=True):
    record: KeyRecord


class KeyDeleted(msgspec.Struct, frozen=True):
    """``record`` as it was, ``revision`` the index of the command that deleted it."""

    record: KeyRecord
    revision: int


class IdAllocated(msgspec.Struct, frozen=True):
    record: Allocated


class LeaseKept(msgspec.Struct, frozen=True):
    """Granted or renewed."""

    record: Lease


class LeaseEnded(msgspec.Struct, frozen=True):
    """A lease was revoked or has expired; keys and registrations that ended with it have earlier changes."""

    record: Lease


class BrokerChanged(msgspec.Struct, frozen=True):
    record: BrokerRecord


class BrokerForgotten(msgspec.Struct, frozen=True):
    record: BrokerRecord


class OwnershipChanged(msgspec.Struct, frozen=True):
    """Also for each partition of a topic that is deleted: then ``record`` has no owner and reason deleted."""

    record: Ownership


class OffsetsReserved(msgspec.Struct, frozen=True):
    """Forgotten with its partition, without a change of its own."""

    record: Reservation


class Skipped(msgspec.Struct, frozen=True):
    """The changes that follow lead to revision ``revision`` at once, without those in between."""

    revision: int


KeyCommand = PutKey | DeleteKey | DeletePrefix | CompareAndSet | AllocateId
LeaseCommand = GrantLease | RenewLease | RevokeLease | ExpireLeases
BrokerCommand = RegisterBroker | SetBrokerMode | ForgetBroker
OwnershipCommand = AssignPartitions | UnloadPartitions | ReleasePartitions
AnyClusterCommand = Agreed | KeyCommand | LeaseCommand | BrokerCommand | OwnershipCommand | ReserveOffsets

ClusterRecord = KeyRecord | Allocated | Lease | BrokerRecord
ClusterChange = (
    KeyPut
    | KeyDeleted
    | IdAllocated
    | LeaseKept
    | LeaseEnded
    | BrokerChanged
    | BrokerForgotten
    | OwnershipChanged
    | OffsetsReserved
    | Skipped
)
