"""A machine that goes on without its last commands gives nothing that they may have given."""

from __future__ import annotations

import msgspec
import pytest

from danube.core.cluster.commands import (
    AllocateId,
    AssignPartitions,
    IdAllocated,
    Ownership,
    PutKey,
    ReleasePartitions,
    Reservation,
    ReserveOffsets,
    RevokeLease,
)
from danube.core.metadata.commands import AddPartitions, CreateTopic, DeleteTopic, RegisterSchema
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import TopicPolicy
from danube.core.placement.balance import BalanceSettings
from danube.core.placement.duties import Duties
from danube.core.placement.recovered import (
    COMMANDS_AHEAD,
    EPOCH_END,
    EPOCHS_AHEAD,
    IDS_AHEAD,
    KEY,
    OFFSETS_AHEAD,
    SCHEMA_VERSIONS_AHEAD,
    History,
    epoch_floor,
    may_be_lost,
    recovered,
    recovery_of,
    reservation_of,
)
from danube.errors import Damage, LimitExceeded
from tests.unit.core.cluster.test_cluster_metadata import cluster_of, propose

FIRST = History("first", 0)


def lived() -> Metadata:
    """Two brokers, three topics of three partitions, one of them deleted; the first partition was served."""
    machine = cluster_of(1, 2, topics=3)
    propose(machine, AssignPartitions(broker_id=1, partitions=((1, 0, 0), (1, 1, 0))))
    propose(machine, ReserveOffsets(broker_id=1, partitions=((1, 0, 1, 500),)))
    propose(machine, DeleteTopic(topic="/default/2", topic_id=2))
    propose(machine, AllocateId(counter="/c"))
    propose(machine, register("s", "a"))
    return machine


def register(subject: str, fingerprint: str, revision: int = 0) -> RegisterSchema:
    return RegisterSchema(
        subject=subject, schema_type="string", definition=b"", compiled=b"", fingerprint=fingerprint,
        description="", created_by="", tags=(), created_us=1, compatibility="none", after_revision=revision,
    )  # fmt: skip


def test_what_was_there_is_there_and_the_machine_before_is_as_it_was() -> None:
    machine = lived()
    before = machine.snapshot()
    after = recovered(machine, FIRST)
    assert machine.snapshot() == before
    assert [one.topic for one in after.topics()] == [one.topic for one in machine.topics()]
    assert after.cluster.brokers.records() == machine.cluster.brokers.records()
    assert after.cluster.leases.records() == machine.cluster.leases.records()
    assert Metadata.restore(after.snapshot()).snapshot() == after.snapshot()


def test_every_counter_goes_ahead() -> None:
    machine = lived()
    after = recovered(machine, FIRST)
    assert after.version == machine.version + COMMANDS_AHEAD
    propose(after, CreateTopic(topic="/default/new", policy=TopicPolicy(), created_us=1))
    assert after.topic("/default/new").topic_id == machine.next_topic_id + IDS_AHEAD
    assert propose(after, AllocateId(counter="/c"))[0].record.number == 2 + IDS_AHEAD  # type: ignore[union-attr]
    assert isinstance(propose(after, AllocateId(counter="/other"))[0], IdAllocated)
    revision = after.registry.subject("s").revision
    propose(after, register("s", "b", revision))
    assert [one.number for one in after.registry.subject("s").versions] == [1, 2 + SCHEMA_VERSIONS_AHEAD]
    propose(after, register("t", "c"))
    assert after.registry.subject("t").schema_id == 2 + IDS_AHEAD
    propose(after, PutKey(key="/k", value=b""))
    record = after.cluster.keys.find("/k")
    assert record is not None and record.mod_revision > machine.version + COMMANDS_AHEAD


def test_owners_stay_with_epochs_that_nobody_had() -> None:
    after = recovered(lived(), FIRST)
    assert after.cluster.owners.of(1, 0) == Ownership(1, 0, 1, 1 + EPOCHS_AHEAD)
    for broker_id in (1, 2):
        broker = after.cluster.brokers.broker(broker_id)
        propose(after, RevokeLease(lease_id=broker.lease_id))
    propose(
        after, ReleasePartitions(broker_id=1, partitions=((1, 0, 1 + EPOCHS_AHEAD),), reason="dead")
    )  # as after an outage of all
    assert after.cluster.owners.of(1, 0).broker_id == 0


def test_what_was_reserved_is_nobody_s_and_goes_far_ahead() -> None:
    after = recovered(lived(), FIRST)
    assert reservation_of(after, 1, 0) == Reservation(1, 0, 500 + OFFSETS_AHEAD, 0, 1 + EPOCHS_AHEAD)
    propose(after, AssignPartitions(broker_id=1, partitions=((1, 0, 1 + EPOCHS_AHEAD),)))
    end = 600 + OFFSETS_AHEAD
    propose(after, ReserveOffsets(broker_id=1, partitions=((1, 0, 2 + EPOCHS_AHEAD, end),)))
    assert reservation_of(after, 1, 0) == Reservation(1, 0, end, 1, 2 + EPOCHS_AHEAD)


def test_partitions_without_a_record_of_before_go_ahead_as_well() -> None:
    """Their first owner, or they themselves, may be in the commands that are lost."""
    after = recovered(lived(), FIRST)
    propose(after, AddPartitions(topic="/default/1", partitions=5))
    for partition in (1, 2, 4):
        assert reservation_of(after, 1, partition) == Reservation(
            1, partition, OFFSETS_AHEAD, 0, EPOCHS_AHEAD
        )
    propose(after, CreateTopic(topic="/default/new", policy=TopicPolicy(), created_us=1))
    new = after.topic("/default/new").topic_id
    assert reservation_of(after, new, 0) == Reservation(new, 0, 0, 0, 0)
    assert epoch_floor(after) == EPOCHS_AHEAD and epoch_floor(lived()) == 0


def test_the_leader_gives_epochs_above_all_that_are_lost() -> None:
    after = recovered(lived(), FIRST)
    duties = Duties(1, BalanceSettings())
    duties.begin(after, 1)
    given: set[tuple[int, int]] = set()
    for _ in range(3):
        for command in duties.turn(after, 1):
            changes = propose(after, command)
            duties.changed(changes)
            if isinstance(command, AssignPartitions):
                given |= {place[:2] for place in command.partitions}
    assert given == {(1, 2), (3, 0), (3, 1), (3, 2)}
    assert all(after.cluster.owners.of(*place).epoch > EPOCHS_AHEAD for place in given)


def test_twice_goes_ahead_twice() -> None:
    once = recovered(lived(), FIRST)
    twice = recovered(once, FIRST)
    assert recovery_of(twice).count == 2
    assert twice.next_topic_id == once.next_topic_id + IDS_AHEAD
    assert twice.cluster.owners.of(1, 0).epoch == 1 + 2 * EPOCHS_AHEAD
    assert reservation_of(twice, 1, 0).end == 500 + 2 * OFFSETS_AHEAD
    assert reservation_of(twice, 3, 2) == Reservation(3, 2, 2 * OFFSETS_AHEAD, 0, 2 * EPOCHS_AHEAD)


def test_ids_of_topics_that_may_be_lost_are_known() -> None:
    machine = lived()
    assert not may_be_lost(machine, 2) and not may_be_lost(machine, machine.next_topic_id)
    after = recovered(recovered(machine, FIRST), FIRST)
    assert not may_be_lost(after, 1) and not may_be_lost(after, 2), "that one was deleted"
    assert may_be_lost(after, machine.next_topic_id) and may_be_lost(after, after.next_topic_id - 1)
    assert not may_be_lost(after, after.next_topic_id)


def test_no_epochs_left_is_refused() -> None:
    machine = cluster_of(1)
    floor = EPOCH_END - EPOCHS_AHEAD
    propose(machine, AssignPartitions(broker_id=1, partitions=((1, 0, 0),), epoch_floor=floor))
    with pytest.raises(LimitExceeded, match="no epochs left"):
        recovered(machine, FIRST)


def test_a_record_of_recoveries_that_cannot_be_read_is_damage() -> None:
    machine = cluster_of(1)
    propose(machine, PutKey(key=KEY, value=b"{"))
    with pytest.raises(Damage, match="cannot be read"):
        recovery_of(machine)


def test_a_machine_of_a_single_host_goes_ahead_too() -> None:
    machine = Metadata()
    propose(machine, CreateTopic(topic="/default/t", policy=TopicPolicy(), created_us=1))
    after = recovered(machine, FIRST)
    assert after.topic("/default/t").topic_id == 1
    assert msgspec.json.decode(after.cluster.keys.find(KEY).value) == {  # type: ignore[union-attr]
        "lost_topic_ids": [[2, 2 + IDS_AHEAD]],
        "histories": [{"history_id": "first", "since_us": 0, "first_epoch": 0, "why": ""}],
    }
