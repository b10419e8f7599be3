"""The cluster's part of the metadata machine: the order itself, keys, leases, brokers, ownership."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from danube.cluster.log.local_log import LocalLog
from danube.core.cluster import agreement, brokers, leases, ownership
from danube.core.cluster import keys as key_space
from danube.core.cluster import state as cluster_state
from danube.core.cluster.agreement import AgreedTime
from danube.core.cluster.commands import (
    Agreed,
    AllocateId,
    AnyClusterCommand,
    AssignPartitions,
    BrokerChanged,
    BrokerForgotten,
    CompareAndSet,
    DeleteKey,
    DeletePrefix,
    ExpireLeases,
    ForgetBroker,
    GrantLease,
    IdAllocated,
    KeyDeleted,
    KeyPut,
    LeaseEnded,
    LeaseKept,
    Ownership,
    OwnershipChanged,
    PutKey,
    RegisterBroker,
    ReleasePartitions,
    RenewLease,
    ReserveOffsets,
    RevokeLease,
    SetBrokerMode,
    Skipped,
    UnloadPartitions,
)
from danube.core.metadata.commands import (
    AddPartitions,
    Change,
    Command,
    CreateTopic,
    DeleteTopic,
    TopicDeleted,
    decode_commands,
    encode_command,
    in_full,
    join_commands,
)
from danube.core.metadata.machine import Metadata
from danube.core.metadata.outcomes import outcome_of
from danube.core.partition.policy import TopicPolicy
from danube.errors import (
    CallerError,
    Conflict,
    Damage,
    Fenced,
    InvalidArgument,
    InvalidName,
    LimitExceeded,
    NotFound,
    StorageIncompatible,
    TopicNotFound,
    WrongState,
)
from danube.limits import (
    LEASE_TTL_MS_MAX,
    METADATA_ENTRY_BYTES_MAX,
    METADATA_VALUE_BYTES_MAX,
    PARTITIONS_PER_COMMAND_MAX,
)
from tests.golden import metadata_cases

MS = 1_000  # microseconds

COMMANDS: list[AnyClusterCommand] = [
    Agreed(index=7, term=3, now_us=11, origin="o", sequence=5, origins_max=9),
    PutKey(key="/a", value=bytes(range(256)), lease_id=4),
    PutKey(key="/a", value=b"", ttl_ms=4, now_us=5),
    DeleteKey(key="/a"),
    DeletePrefix(prefix="/a/"),
    CompareAndSet(key="/a", value=None, revision=4),
    CompareAndSet(key="/a", value=b"", expected=b"\n"),
    AllocateId(counter="/c"),
    GrantLease(lease_id=(1 << 63) - 1, ttl_ms=5, now_us=1),
    RenewLease(lease_id=1, now_us=2),
    RevokeLease(lease_id=1),
    ExpireLeases(leases=((1, 2), (-3, 4)), now_us=3),
    RegisterBroker(broker_id=(1 << 64) - 1, lease_id=1, native_address="h:1", mode="drained", reason="r"),
    SetBrokerMode(broker_id=1, mode="draining"),
    ForgetBroker(broker_id=1),
    AssignPartitions(broker_id=1, partitions=((1, 0, 0), (1, 1, 4)), epoch_floor=3),
    UnloadPartitions(partitions=((1, 0, 1),), reason="rebalance", to_broker_id=2),
    ReleasePartitions(broker_id=1, partitions=((1, 0, 1),), reason="dead"),
    ReserveOffsets(broker_id=1, partitions=((1, 0, 1, 1 << 62),), last=True),
]


def propose(machine: Metadata, command: Command) -> list[Change]:
    if not machine.check(command):
        return []
    changes = machine.apply(machine.version + 1, command)
    assert Metadata.restore(machine.snapshot()).snapshot() == machine.snapshot()
    return changes


def agree(machine: Metadata, now_us: int, term: int = 1) -> None:
    index = machine.cluster.agreement.index + 1
    assert propose(machine, Agreed(index=index, term=term, now_us=now_us)) == []


def cluster_of(*broker_ids: int, topics: int = 1, partitions: int = 3) -> Metadata:
    """A machine with topics /default/1 .. and brokers that are there."""
    machine = Metadata()
    for number in range(1, topics + 1):
        topic = CreateTopic(
            topic=f"/default/{number}", partitions=partitions, policy=TopicPolicy(), created_us=1
        )
        propose(machine, topic)
    for broker_id in broker_ids:
        join(machine, broker_id)
    return machine


def join(machine: Metadata, broker_id: int, lease_id: int = 0, mode: str = "") -> list[Change]:
    lease_id = lease_id or 1_000 + broker_id
    propose(machine, GrantLease(lease_id=lease_id, ttl_ms=100))
    register = RegisterBroker(
        broker_id=broker_id, lease_id=lease_id, native_address=f"host{broker_id}:7400", mode=mode
    )
    return propose(machine, register)


def owner(machine: Metadata, partition: int = 0, topic_id: int = 1) -> tuple[int, int]:
    record = machine.cluster.owners.of(topic_id, partition)
    return record.broker_id, record.epoch


def refused(machine: Metadata, command: Command, error: type[CallerError]) -> CallerError:
    """``command`` is refused by check and, where it would break the machine, by apply as well."""
    before = machine.snapshot()
    with pytest.raises(error) as caught:
        machine.check(command)
    assert machine.snapshot() == before
    return caught.value


def refused_by_apply(machine: Metadata, command: Command, error: type[CallerError]) -> None:
    refused(machine, command, error)
    after = machine.copy()
    with pytest.raises(error):
        after.apply(machine.version + 1, command)
    assert after.version == machine.version + 1 and after.changes_since(machine) == []


# Bytes


def test_commands_survive_their_bytes_and_are_stored_in_full() -> None:
    joined = join_commands([encode_command(command) for command in COMMANDS])
    assert decode_commands(joined) == COMMANDS
    for command, stored in zip(COMMANDS, msgspec.msgpack.decode(joined), strict=True):
        assert set(stored) == {"kind", *command.__struct_fields__}


def test_what_cannot_be_stored_is_the_caller_s_error() -> None:
    with pytest.raises(InvalidName):
        encode_command(PutKey(key="/\udc80", value=b""))
    for number in (1 << 64, -(1 << 63) - 1):
        with pytest.raises(InvalidArgument):
            encode_command(RevokeLease(lease_id=number))


def test_the_largest_commands_fit_an_entry_together_with_who_agreed() -> None:
    value = bytes(METADATA_VALUE_BYTES_MAX)
    largest = CompareAndSet(key="/" + "k" * 1_023, value=value, expected=value, ttl_ms=1, now_us=1 << 60)
    agreed = Agreed(index=1 << 60, term=1 << 60, now_us=1 << 60, origin="o" * 256, sequence=1 << 60)
    entry = join_commands([encode_command(agreed), encode_command(largest)])
    assert len(entry) <= METADATA_ENTRY_BYTES_MAX
    with pytest.raises(LimitExceeded):
        encode_command(CompareAndSet(key="/a", value=value + value, expected=value))
    for command in (
        AssignPartitions(
            broker_id=(1 << 64) - 1,
            partitions=tuple((1 << 50, 1_023, (1 << 32) - n) for n in range(PARTITIONS_PER_COMMAND_MAX)),
        ),
        ExpireLeases(leases=tuple((1 << 62, 1 << 60) for _ in range(500)), now_us=1 << 60),
    ):
        assert encode_command(command)


def test_a_machine_without_a_cluster_keeps_the_format_that_others_read() -> None:
    machine = cluster_of()
    assert machine.snapshot()[:4] == b"DNM1" and not machine.cluster.used
    propose(machine, PutKey(key="/a", value=b""))
    assert machine.snapshot()[:4] == b"DNM3"
    propose(machine, DeleteKey(key="/a"))
    assert machine.snapshot()[:4] == b"DNM1"


def test_every_flipped_bit_and_every_cut_of_a_cluster_s_snapshot_is_found() -> None:
    machine = cluster_of(1)
    propose(machine, PutKey(key="/a", value=b"1"))
    propose(machine, AssignPartitions(broker_id=1, partitions=((1, 0, 0),)))
    snapshot = machine.snapshot()
    for bit in range(len(snapshot) * 8):
        flipped = bytearray(snapshot)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises((Damage, StorageIncompatible)):
            Metadata.restore(bytes(flipped))
    for cut in range(len(snapshot)):
        with pytest.raises(Damage):
            Metadata.restore(snapshot[:cut])


def test_what_was_agreed_stays_applicable_when_limits_get_tighter(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (key_space, "METADATA_KEYS_MAX"),
        (key_space, "METADATA_KEY_BYTES_MAX"),
        (key_space, "METADATA_VALUE_BYTES_MAX"),
        (key_space, "METADATA_VALUES_BYTES_MAX"),
        (key_space, "COUNTERS_MAX"),
        (leases, "LEASES_MAX"),
        (leases, "LEASE_TTL_MS_MAX"),
        (cluster_state, "LEASES_PER_COMMAND_MAX"),
        (brokers, "BROKERS_MAX"),
        (brokers, "MODES"),
        (ownership, "PARTITIONS_PER_COMMAND_MAX"),
        (ownership, "REASONS"),
        (ownership, "EPOCH_MAX"),
        (agreement, "AGREED_ORIGINS_MAX"),
    ):
        monkeypatch.setattr(module, name, () if isinstance(getattr(module, name), tuple) else 0)
    machine = Metadata()
    for command in metadata_cases.CLUSTER:
        machine.apply(machine.version + 1, command)
    assert machine.snapshot() == (metadata_cases.FOLDER / "cluster.snapshot").read_bytes()


# The order


def test_the_machine_knows_which_entry_it_has_come_to_and_what_time_it_is() -> None:
    machine = Metadata()
    propose(machine, Agreed(index=4, term=2, now_us=500))
    propose(machine, Agreed(index=4, term=2, now_us=400, origin="a", sequence=1))  # the same entry
    known = machine.cluster.agreement
    assert (known.index, known.term, known.now_us) == (4, 2, 500)
    for earlier in (Agreed(index=3, term=2, now_us=1), Agreed(index=5, term=1, now_us=1)):
        refused_by_apply(machine, earlier, WrongState)
    refused_by_apply(Metadata(), Agreed(index=0, term=1, now_us=1), WrongState)
    refused_by_apply(Metadata(), Agreed(index=1, term=0, now_us=1), WrongState)


def test_a_proposal_that_comes_again_is_known() -> None:
    machine = Metadata()
    propose(machine, Agreed(index=1, term=1, now_us=1, origin="a", sequence=3))
    assert machine.cluster.agreement.repeated("a", 3) and machine.cluster.agreement.repeated("a", 2)
    assert not machine.cluster.agreement.repeated("a", 4) and not machine.cluster.agreement.repeated("b", 1)
    refused_by_apply(machine, Agreed(index=2, term=1, now_us=1, origin="a", sequence=3), WrongState)
    propose(machine, Agreed(index=2, term=1, now_us=1, origin="a", sequence=4))
    assert machine.cluster.agreement.last_sequence("a") == 4
    assert not machine.cluster.agreement.repeated("", 0)


def test_the_origin_heard_of_longest_ago_is_forgotten() -> None:
    machine = Metadata()
    for index, origin in enumerate(["a", "b", "a", "c"], 1):
        propose(machine, Agreed(index=index, term=1, now_us=1, origin=origin, sequence=index, origins_max=2))
    assert machine.cluster.agreement.origins() == [("a", 3), ("c", 4)]
    refused(machine, Agreed(index=9, term=1, now_us=1, origins_max=0), InvalidArgument)
    refused(machine, Agreed(index=9, term=1, now_us=1, origin="\n"), InvalidName)


def test_a_leader_s_time_goes_on_from_the_agreed_one_whatever_the_clocks_say() -> None:
    time = AgreedTime()
    assert time.now_us(0, 1_000_000_000, 77) == 77
    assert time.now_us(77, 1_000_001_000, 1) == 78
    assert time.now_us(500, 1_000_002_000, 1) == 500
    assert time.now_us(500, 1_000_003_000, 1) == 501
    assert AgreedTime().now_us(500, 9_000_000_000, 1 << 60) == 500


def test_in_a_cluster_only_the_leader_s_time_counts() -> None:
    machine = Metadata()
    agree(machine, 1_000 * MS)
    propose(machine, GrantLease(lease_id=1, ttl_ms=10, now_us=9_000_000 * MS))
    assert machine.cluster.leases.lease(1).expires_us == 1_010 * MS
    late = ExpireLeases(leases=((1, machine.version),), now_us=9_000_000 * MS)
    assert machine.check(late) is False
    agree(machine, 1_010 * MS)
    assert LeaseEnded in map(type, propose(machine, late))


# Keys


def test_a_deletion_of_nothing_is_no_change() -> None:
    machine = Metadata()
    for nothing in (
        DeleteKey(key="/a"),
        DeletePrefix(prefix="/a/"),
        CompareAndSet(key="/a", value=None, revision=0),
    ):
        assert machine.check(nothing) is False
        assert machine.apply(machine.version + 1, nothing) == []
        assert outcome_of(machine, nothing, []) is None


def test_what_is_no_key_or_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Metadata()
    refused(machine, PutKey(key="a", value=b""), InvalidName)
    refused(machine, DeletePrefix(prefix="/a"), InvalidName)
    refused(machine, PutKey(key="/a", value=bytes(METADATA_VALUE_BYTES_MAX + 1)), LimitExceeded)
    refused(machine, PutKey(key="/a", value=b"", ttl_ms=-1), InvalidArgument)
    refused(machine, PutKey(key="/a", value=b"", ttl_ms=LEASE_TTL_MS_MAX + 1), InvalidArgument)
    refused(machine, PutKey(key="/a", value=b"", ttl_ms=1, lease_id=1), InvalidArgument)
    refused_by_apply(machine, PutKey(key="/a", value=b"", lease_id=1), NotFound)
    monkeypatch.setattr(key_space, "METADATA_KEYS_MAX", 1)
    monkeypatch.setattr(key_space, "METADATA_VALUES_BYTES_MAX", 12)
    monkeypatch.setattr(key_space, "COUNTERS_MAX", 1)
    propose(machine, PutKey(key="/a", value=b"0123456789"))
    refused(machine, PutKey(key="/b", value=b""), LimitExceeded)
    refused(machine, PutKey(key="/a", value=b"0123456789+"), LimitExceeded)
    propose(machine, PutKey(key="/a", value=b"9876543210"))
    propose(machine, AllocateId(counter="/c"))
    propose(machine, AllocateId(counter="/c"))
    refused(machine, AllocateId(counter="/d"), LimitExceeded)


def test_a_key_that_is_not_as_expected_is_refused_with_its_revision() -> None:
    machine = Metadata()
    propose(machine, PutKey(key="/a", value=b"1"))
    for command in (
        CompareAndSet(key="/a", value=b"", revision=0),
        CompareAndSet(key="/a", value=b"", revision=7),
        CompareAndSet(key="/a", value=b"", expected=b"2"),
        CompareAndSet(key="/a", value=None, expected=b"2"),
    ):
        assert refused(machine, command, WrongState).facts["revision"] == 1
        refused_by_apply(machine, command, WrongState)
    assert refused(machine, CompareAndSet(key="/b", value=b"", revision=1), WrongState).facts["revision"] == 0


def test_the_outcome_of_a_command_is_its_record() -> None:
    machine = cluster_of(1)
    outcomes: list[object] = []
    for command in (
        PutKey(key="/a", value=b"1", ttl_ms=5),
        PutKey(key="/a", value=b"2"),
        DeleteKey(key="/a"),
        AllocateId(counter="/c"),
        RenewLease(lease_id=1_001),
        SetBrokerMode(broker_id=1, mode="drained"),
        DeletePrefix(prefix="/"),
    ):
        changes = propose(machine, command)
        outcomes.append(outcome_of(machine, command, changes))
    names = ["KeyRecord", "KeyRecord", "KeyRecord", "Allocated", "Lease", "BrokerRecord", "NoneType"]
    assert [type(outcome).__name__ for outcome in outcomes] == names
    again = SetBrokerMode(broker_id=1, mode="drained")
    assert outcome_of(machine, again, propose(machine, again)) == machine.cluster.brokers.find(1)


# Leases


def test_a_renewal_in_between_wins() -> None:
    machine = Metadata()
    propose(machine, GrantLease(lease_id=1, ttl_ms=10))
    propose(machine, GrantLease(lease_id=2, ttl_ms=10))
    due = machine.cluster.leases.due(10 * MS)
    assert due == [(1, 1), (2, 2)]
    propose(machine, RenewLease(lease_id=1, now_us=9 * MS))
    changes = propose(machine, ExpireLeases(leases=tuple(due), now_us=20 * MS))
    assert [change.record.lease_id for change in changes if isinstance(change, LeaseEnded)] == [2]
    assert machine.cluster.leases.due(19 * MS, 5) == [(1, 3)]


def test_a_lease_that_is_named_twice_or_not_due_or_gone_ends_once_or_not() -> None:
    machine = Metadata()
    propose(machine, GrantLease(lease_id=1, ttl_ms=10))
    assert machine.check(ExpireLeases(leases=((1, 1), (5, 5)), now_us=10 * MS - 1)) is False
    assert len(propose(machine, ExpireLeases(leases=((1, 1), (1, 1), (5, 5)), now_us=10 * MS))) == 1
    assert machine.apply(machine.version + 1, ExpireLeases(leases=((1, 1),), now_us=10 * MS)) == []
    refused(machine, ExpireLeases(leases=((1, 1),) * 501), LimitExceeded)


def test_leases_are_refused_that_exist_or_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Metadata()
    propose(machine, GrantLease(lease_id=1, ttl_ms=10))
    refused_by_apply(machine, GrantLease(lease_id=1, ttl_ms=10), Conflict)
    for lease_id in (0, -1, 1 << 63):
        refused_by_apply(machine, GrantLease(lease_id=lease_id, ttl_ms=10), InvalidArgument)
    for ttl_ms in (0, -1, LEASE_TTL_MS_MAX + 1):
        refused(machine, GrantLease(lease_id=2, ttl_ms=ttl_ms), InvalidArgument)
    refused_by_apply(machine, RenewLease(lease_id=2), NotFound)
    refused_by_apply(machine, RevokeLease(lease_id=2), NotFound)
    propose(machine, PutKey(key="/a", value=b"", ttl_ms=10))
    own = machine.cluster.leases.records()[0].lease_id
    assert own < 0
    for command in (
        RenewLease(lease_id=own),
        RevokeLease(lease_id=own),
        PutKey(key="/b", value=b"", lease_id=own),
    ):
        refused_by_apply(machine, command, InvalidArgument)
    monkeypatch.setattr(leases, "LEASES_MAX", 2)
    refused(machine, GrantLease(lease_id=3, ttl_ms=10), LimitExceeded)
    refused(machine, PutKey(key="/c", value=b"", ttl_ms=10), LimitExceeded)


def test_a_key_s_own_lease_goes_with_it() -> None:
    machine = Metadata()
    for change_it in (
        PutKey(key="/a", value=b""),
        DeleteKey(key="/a"),
        DeletePrefix(prefix="/"),
        CompareAndSet(key="/a", value=None, expected=b"1"),
        CompareAndSet(key="/a", value=b"2", expected=b"1"),
    ):
        propose(machine, PutKey(key="/a", value=b"1", ttl_ms=10))
        assert len(machine.cluster.leases) == 1
        assert isinstance(propose(machine, change_it)[-1], LeaseEnded)
        assert len(machine.cluster.leases) == 0


# Brokers


def test_a_broker_is_there_as_long_as_its_lease() -> None:
    machine = cluster_of(1, 2)
    first = machine.cluster.brokers.broker(1)
    assert first.alive and first.mode == "active"
    changes = propose(machine, RevokeLease(lease_id=1_001))
    gone = msgspec.structs.replace(first, lease_id=0)
    assert changes[0] == BrokerChanged(gone) and not gone.alive
    assert [broker.alive for broker in machine.cluster.brokers.records()] == [False, True]
    assert join(machine, 1, lease_id=5)[0] == BrokerChanged(msgspec.structs.replace(first, lease_id=5))


def test_registering_again_ends_the_former_registration_and_keeps_the_mode() -> None:
    machine = cluster_of(1)
    propose(machine, PutKey(key="/load/1", value=b"", lease_id=1_001))
    propose(machine, SetBrokerMode(broker_id=1, mode="drained", reason="by hand"))
    changes = join(machine, 1, lease_id=5)
    assert [type(change) for change in changes] == [BrokerChanged, KeyDeleted, LeaseEnded]
    record = machine.cluster.brokers.broker(1)
    assert (record.mode, record.reason, record.lease_id) == ("drained", "by hand", 5)
    refused(machine, RenewLease(lease_id=1_001), NotFound)
    join(machine, 1, lease_id=6, mode="active")
    assert machine.cluster.brokers.broker(1).mode == "active"


def test_brokers_are_refused_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = cluster_of(1)
    good = RegisterBroker(broker_id=2, lease_id=1_001, native_address="h:1")
    for wrong, error in (
        ({"broker_id": 0}, InvalidArgument),
        ({"broker_id": 1 << 64}, InvalidArgument),
        ({"lease_id": 7}, NotFound),
        ({"native_address": ""}, InvalidName),
        ({"version": "\n"}, InvalidName),
        ({"mode": "asleep"}, InvalidArgument),
        ({"reason": "\n"}, InvalidName),
    ):
        refused(machine, msgspec.structs.replace(good, **wrong), error)
    refused(machine, SetBrokerMode(broker_id=1, mode=""), InvalidArgument)
    refused(machine, SetBrokerMode(broker_id=9, mode="active"), NotFound)
    refused_by_apply(machine, ForgetBroker(broker_id=9), NotFound)
    refused_by_apply(machine, ForgetBroker(broker_id=1), WrongState)
    monkeypatch.setattr(brokers, "BROKERS_MAX", 1)
    refused(machine, good, LimitExceeded)


def test_a_broker_is_forgotten_when_it_is_gone_and_owns_nothing() -> None:
    machine = cluster_of(1)
    propose(machine, AssignPartitions(broker_id=1, partitions=((1, 0, 0),)))
    propose(machine, RevokeLease(lease_id=1_001))
    refused_by_apply(machine, ForgetBroker(broker_id=1), WrongState)
    propose(machine, ReleasePartitions(broker_id=1, partitions=((1, 0, 1),), reason="dead"))
    [change] = propose(machine, ForgetBroker(broker_id=1))
    assert isinstance(change, BrokerForgotten) and machine.cluster.brokers.find(1) is None


# Ownership


def test_a_partition_goes_from_owner_to_owner_with_ever_higher_epochs() -> None:
    machine = cluster_of(1, 2)
    assert owner(machine) == (0, 0)
    [change] = propose(machine, AssignPartitions(broker_id=1, partitions=((1, 0, 0),)))
    assert change == OwnershipChanged(Ownership(1, 0, 1, 1))
    [change] = propose(machine, UnloadPartitions(partitions=((1, 0, 1),), reason="rebalance", to_broker_id=2))
    assert change == OwnershipChanged(Ownership(1, 0, 1, 1, "rebalance", 1, 2))
    assert (
        machine.check(UnloadPartitions(partitions=((1, 0, 1),), reason="rebalance", to_broker_id=2)) is False
    )
    [change] = propose(machine, ReleasePartitions(broker_id=1, partitions=((1, 0, 1),)))
    assert change == OwnershipChanged(Ownership(1, 0, 0, 1, "rebalance", 1, 2))
    [change] = propose(machine, AssignPartitions(broker_id=2, partitions=((1, 0, 1),)))
    assert change == OwnershipChanged(Ownership(1, 0, 2, 2))
    propose(machine, AssignPartitions(broker_id=2, partitions=((1, 0, 2),)))
    assert owner(machine) == (2, 3)
    propose(machine, ReleasePartitions(broker_id=2, partitions=((1, 0, 3),)))
    assert machine.cluster.owners.of(1, 0).reason == "stop"


def test_epochs_are_above_those_of_logs_that_are_older_than_the_cluster() -> None:
    machine = cluster_of(1)
    propose(machine, AssignPartitions(broker_id=1, partitions=((1, 0, 0),), epoch_floor=5_000))
    assert owner(machine) == (1, 5_001)
    propose(machine, AssignPartitions(broker_id=1, partitions=((1, 0, 5_001), (1, 1, 0))))
    assert (owner(machine, 0), owner(machine, 1)) == ((1, 5_002), (1, 1))
    for floor in (-1, (1 << 32) - 1):
        refused(
            machine, AssignPartitions(broker_id=1, partitions=((1, 2, 0),), epoch_floor=floor), LimitExceeded
        )


def test_a_partition_is_taken_only_from_nobody_or_oneself() -> None:
    machine = cluster_of(1, 2)
    propose(machine, AssignPartitions(broker_id=1, partitions=((1, 0, 0),)))
    refused_by_apply(machine, AssignPartitions(broker_id=2, partitions=((1, 0, 1),)), WrongState)
    for command in (
        AssignPartitions(broker_id=2, partitions=((1, 0, 0),)),
        AssignPartitions(broker_id=1, partitions=((1, 1, 0), (1, 0, 2))),
        ReleasePartitions(broker_id=1, partitions=((1, 0, 0),)),
        UnloadPartitions(partitions=((1, 0, 7),), reason="unload"),
    ):
        refused_by_apply(machine, command, Fenced)
    assert (
        refused(machine, ReleasePartitions(broker_id=1, partitions=((1, 0, 9),)), Fenced).facts["epoch"] == 1
    )
    assert (owner(machine, 0), owner(machine, 1)) == ((1, 1), (0, 0))


def test_only_the_owner_of_the_epoch_releases() -> None:
    machine = cluster_of(1, 2)
    propose(machine, AssignPartitions(broker_id=1, partitions=((1, 0, 0),)))
    refused_by_apply(machine, ReleasePartitions(broker_id=2, partitions=((1, 0, 1),)), WrongState)
    refused_by_apply(
        machine, ReleasePartitions(broker_id=1, partitions=((1, 0, 1),), reason="dead"), WrongState
    )
    propose(machine, RevokeLease(lease_id=1_001))
    refused_by_apply(
        machine, ReleasePartitions(broker_id=2, partitions=((1, 0, 1),), reason="dead"), WrongState
    )
    propose(machine, ReleasePartitions(broker_id=1, partitions=((1, 0, 1),), reason="dead"))
    assert machine.cluster.owners.of(1, 0) == Ownership(1, 0, 0, 1, "dead", 1)
    refused_by_apply(machine, ReleasePartitions(broker_id=1, partitions=((1, 0, 1),)), WrongState)
    refused_by_apply(machine, UnloadPartitions(partitions=((1, 0, 1),), reason="unload"), WrongState)


def test_a_broker_that_is_not_there_or_not_active_gets_no_partition() -> None:
    machine = cluster_of(1)
    first, second = ((1, 0, 0),), ((1, 1, 0),)
    refused_by_apply(machine, AssignPartitions(broker_id=9, partitions=first), NotFound)
    propose(machine, AssignPartitions(broker_id=1, partitions=first))
    propose(machine, SetBrokerMode(broker_id=1, mode="draining"))
    refused(machine, AssignPartitions(broker_id=1, partitions=second), WrongState)
    assert machine.check(AssignPartitions(broker_id=1, partitions=((1, 0, 1),)))  # its own, again
    propose(machine, SetBrokerMode(broker_id=1, mode="active"))
    propose(machine, RevokeLease(lease_id=1_001))
    refused(machine, AssignPartitions(broker_id=1, partitions=second), WrongState)


def test_ownership_commands_that_are_not_sound_are_refused() -> None:
    machine = cluster_of(1)
    assign = AssignPartitions(broker_id=1, partitions=((1, 0, 0),))
    propose(machine, assign)
    for partitions, error in (
        ((), LimitExceeded),
        (tuple((1, number, 0) for number in range(PARTITIONS_PER_COMMAND_MAX + 1)), LimitExceeded),
        (((1, 1, 0), (1, 1, 0)), InvalidArgument),
        (((1, 3, 0),), TopicNotFound),
        (((1, -1, 0),), TopicNotFound),
        (((2, 0, 0),), TopicNotFound),
    ):
        refused(machine, msgspec.structs.replace(assign, partitions=partitions), error)
    for reason in ("", "because"):
        refused(machine, UnloadPartitions(partitions=((1, 0, 1),), reason=reason), InvalidArgument)
    refused(machine, ReleasePartitions(broker_id=1, partitions=((1, 0, 1),), reason="no"), InvalidArgument)
    refused(machine, UnloadPartitions(partitions=((1, 0, 1),), reason="unload", to_broker_id=9), NotFound)


def test_a_deleted_topic_takes_its_ownership_and_a_new_one_of_its_name_starts_anew() -> None:
    machine = cluster_of(1)
    propose(machine, AddPartitions(topic="/default/1", partitions=4))
    propose(machine, AssignPartitions(broker_id=1, partitions=((1, 0, 0), (1, 3, 0))))
    changes = propose(machine, DeleteTopic(topic="/default/1"))
    assert [type(change) for change in changes] == [TopicDeleted, OwnershipChanged, OwnershipChanged]
    assert changes[2] == OwnershipChanged(Ownership(1, 3, 0, 1, "deleted", 1))
    assert len(machine.cluster.owners) == 0
    refused_by_apply(machine, ReleasePartitions(broker_id=1, partitions=((1, 0, 1),)), TopicNotFound)
    propose(machine, CreateTopic(topic="/default/1", policy=TopicPolicy(), created_us=1))
    propose(machine, AssignPartitions(broker_id=1, partitions=((2, 0, 0),)))
    assert owner(machine, topic_id=2) == (1, 1)


# Copies and readers


def busy() -> Metadata:
    machine = cluster_of(1, 2, topics=2)
    agree(machine, 50 * MS)
    for command in (
        PutKey(key="/a", value=b"1", lease_id=1_001),
        PutKey(key="/b", value=b"2", ttl_ms=10),
        PutKey(key="/c", value=b"3"),
        AllocateId(counter="/n"),
        AssignPartitions(broker_id=1, partitions=((1, 0, 0), (1, 1, 0), (2, 0, 0))),
        AssignPartitions(broker_id=2, partitions=((1, 2, 0),)),
    ):
        propose(machine, command)
    return machine


def test_copies_go_their_own_ways_and_equal_machines_give_equal_bytes() -> None:
    machine = busy()
    before = machine.snapshot()
    other = machine.copy()
    assert other.snapshot() == before and other.changes_since(machine) == []
    propose(other, RevokeLease(lease_id=1_001))
    propose(other, DeleteTopic(topic="/default/1"))
    propose(other, AllocateId(counter="/n"))
    assert machine.snapshot() == before != other.snapshot()


def test_a_reader_that_skipped_learns_where_everything_came_to() -> None:
    machine = busy()
    later = machine.copy()
    for command in (
        PutKey(key="/c", value=b"4"),
        PutKey(key="/d", value=b"5"),
        AllocateId(counter="/n"),
        RevokeLease(lease_id=1_001),
        ReleasePartitions(broker_id=1, partitions=((1, 0, 1),), reason="dead"),
        ReleasePartitions(broker_id=1, partitions=((1, 1, 1), (2, 0, 1)), reason="dead"),
        ForgetBroker(broker_id=1),
        DeleteTopic(topic="/default/2"),
        GrantLease(lease_id=7, ttl_ms=5),
    ):
        propose(later, command)
    changes = Metadata.restore(later.snapshot()).changes_since(machine)
    kinds = [type(change) for change in changes]
    assert kinds == [
        TopicDeleted, Skipped, KeyDeleted, KeyPut, KeyPut, IdAllocated, LeaseEnded, LeaseKept,
        BrokerForgotten, OwnershipChanged, OwnershipChanged, OwnershipChanged,
    ]  # fmt: skip
    assert changes[1] == Skipped(later.version)
    assert OwnershipChanged(Ownership(2, 0, 0, 1, "deleted", 1)) in changes


def test_a_process_reads_what_another_one_committed_also_over_a_compaction(tmp_path: Path) -> None:
    with LocalLog(tmp_path, compact_bytes_min=1) as writer, LocalLog(tmp_path) as reader:
        writer.propose(PutKey(key="/a", value=b"1"))
        assert [type(change) for change in reader.refresh()] == [KeyPut]
        for number in range(50):
            writer.propose(PutKey(key=f"/{number}", value=bytes(100)))
        assert writer.compaction_count > 0
        seen = reader.refresh()
        assert Skipped in map(type, seen)
        assert reader.state.snapshot() == writer.state.snapshot()
        assert {change.record.key for change in seen if isinstance(change, KeyPut)} == {
            f"/{number}" for number in range(50)
        }


@pytest.mark.parametrize(
    "command",
    [
        PutKey(key="/a", value=b"\xff" * 300, ttl_ms=1, now_us=2**40),
        CompareAndSet(key="/a", value=None, revision=-1),
        Agreed(index=1, term=2, now_us=3, origin="o", sequence=4),
        ExpireLeases(leases=((1, 2),), now_us=3),
    ],
    ids=lambda command: type(command).__name__,
)
def test_a_command_is_stored_with_all_its_fields_whichever_way_it_is_encoded(command: Command) -> None:
    encoded = encode_command(command)
    assert encoded == msgspec.msgpack.encode(in_full(command))
    assert set(command.__struct_fields__) < set(msgspec.msgpack.decode(encoded))


def test_a_key_that_lasts_for_a_time_is_kept_alive_although_there_is_no_room_for_more_leases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Metadata()
    kept = PutKey(key="/a", value=b"1", ttl_ms=100)
    propose(machine, kept)
    monkeypatch.setattr(leases, "LEASES_MAX", 1)
    propose(machine, kept)
    propose(machine, CompareAndSet(key="/a", value=b"2", expected=b"1", ttl_ms=100))
    refused(machine, PutKey(key="/b", value=b"", ttl_ms=100), LimitExceeded)
    propose(machine, PutKey(key="/a", value=b""))
    assert len(machine.cluster.leases) == 0
    propose(machine, PutKey(key="/b", value=b"", ttl_ms=100))
    refused(machine, kept, LimitExceeded)
