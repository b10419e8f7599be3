"""Offsets are given once: what is reserved only grows, by its owner, and says whose disk may hold records."""

from __future__ import annotations

import random

import pytest

from danube.core.cluster.commands import (
    AssignPartitions,
    OffsetsReserved,
    ReleasePartitions,
    Reservation,
    ReserveOffsets,
    RevokeLease,
)
from danube.core.metadata.commands import DeleteTopic
from danube.core.metadata.machine import Metadata
from danube.core.partition.partition import STEP, Duplicate, OffsetBudget, ReservedPartition
from danube.core.partition.policy import TopicPolicy
from danube.errors import (
    Fenced,
    InvalidArgument,
    InvariantBroken,
    LimitExceeded,
    Overloaded,
    OwnerMoved,
    TopicNotFound,
    WrongState,
)
from danube.limits import PARTITIONS_PER_COMMAND_MAX
from tests.unit.core.cluster.test_cluster_metadata import cluster_of, propose, refused, refused_by_apply
from tests.unit.core.partition.test_partition import header


def owned() -> Metadata:
    machine = cluster_of(1, 2)
    propose(machine, AssignPartitions(broker_id=1, partitions=((1, 0, 0),)))
    return machine


def reserve(machine: Metadata, end: int, *, broker: int = 1, epoch: int = 1, last: bool = False) -> object:
    [change] = propose(machine, ReserveOffsets(broker_id=broker, partitions=((1, 0, epoch, end),), last=last))
    return change


def test_a_reservation_grows_by_its_owner_alone() -> None:
    machine = owned()
    assert machine.cluster.reservations.of(1, 0).end == 0
    assert reserve(machine, 100) == OffsetsReserved(Reservation(1, 0, 100, 1, 1))
    same = ReserveOffsets(broker_id=1, partitions=((1, 0, 1, 100),))
    assert machine.check(same) is False
    assert reserve(machine, 150) == OffsetsReserved(Reservation(1, 0, 150, 1, 1))
    refused_by_apply(machine, ReserveOffsets(broker_id=1, partitions=((1, 0, 1, 149),)), WrongState)
    refused_by_apply(machine, ReserveOffsets(broker_id=2, partitions=((1, 0, 1, 200),)), Fenced)
    refused_by_apply(machine, ReserveOffsets(broker_id=1, partitions=((1, 0, 2, 200),)), Fenced)
    refused_by_apply(machine, ReserveOffsets(broker_id=1, partitions=((1, 9, 0, 200),)), TopicNotFound)


def test_the_next_owner_begins_where_a_dead_one_may_have_come_to() -> None:
    machine = owned()
    reserve(machine, 100)
    propose(machine, RevokeLease(lease_id=1_001))
    propose(machine, ReleasePartitions(broker_id=1, partitions=((1, 0, 1),), reason="dead"))
    propose(machine, AssignPartitions(broker_id=2, partitions=((1, 0, 1),)))
    assert machine.cluster.reservations.of(1, 0) == Reservation(1, 0, 100, 1, 1), "whose disk it is stays"
    refused_by_apply(machine, ReserveOffsets(broker_id=1, partitions=((1, 0, 1, 200),)), Fenced)
    assert reserve(machine, 200, broker=2, epoch=2) == OffsetsReserved(Reservation(1, 0, 200, 2, 2))


def test_a_clean_release_says_where_the_log_ends_and_is_final_in_its_epoch() -> None:
    machine = owned()
    reserve(machine, 100)
    above = ReserveOffsets(broker_id=1, partitions=((1, 0, 1, 101),), last=True)
    refused_by_apply(machine, above, WrongState)
    assert reserve(machine, 40, last=True) == OffsetsReserved(Reservation(1, 0, 40, 1, 1, True))
    for end, last in ((40, False), (100, False), (39, True)):
        command = ReserveOffsets(broker_id=1, partitions=((1, 0, 1, end),), last=last)
        refused_by_apply(machine, command, WrongState)
    assert machine.check(ReserveOffsets(broker_id=1, partitions=((1, 0, 1, 40),), last=True)) is False
    propose(machine, AssignPartitions(broker_id=1, partitions=((1, 0, 1),)))
    refused(machine, ReserveOffsets(broker_id=1, partitions=((1, 0, 2, 40),), last=True), WrongState)
    assert reserve(machine, 90, epoch=2) == OffsetsReserved(Reservation(1, 0, 90, 1, 2))


def test_what_is_not_sound_is_refused() -> None:
    machine = owned()
    many = tuple((1, number, 1, 5) for number in range(PARTITIONS_PER_COMMAND_MAX + 1))
    refused(machine, ReserveOffsets(broker_id=1, partitions=()), LimitExceeded)
    refused(machine, ReserveOffsets(broker_id=1, partitions=many), LimitExceeded)
    refused(machine, ReserveOffsets(broker_id=1, partitions=((1, 0, 1, 5), (1, 0, 1, 6))), InvalidArgument)
    for end in (-1, (1 << 62) + 1):
        refused(machine, ReserveOffsets(broker_id=1, partitions=((1, 0, 1, end),)), LimitExceeded)


def test_a_deleted_topic_takes_its_reservations_and_snapshots_keep_the_others() -> None:
    machine = owned()
    plain = machine.snapshot()
    reserve(machine, 100)
    copy, again = machine.copy(), Metadata.restore(machine.snapshot())
    assert copy.cluster.reservations.of(1, 0).end == again.cluster.reservations.of(1, 0).end == 100
    assert Metadata.restore(plain).cluster.reservations.records() == [], "an older snapshot has none"
    assert OffsetsReserved(Reservation(1, 0, 100, 1, 1)) in again.changes_since(Metadata.restore(plain))
    propose(machine, DeleteTopic(topic=machine.topics(None)[0].topic))
    assert machine.cluster.reservations.records() == [] and len(copy.cluster.reservations) == 1


def test_a_budget_asks_once_when_half_a_step_is_used() -> None:
    budget = OffsetBudget(0)
    assert budget.wanted(0) == STEP
    budget.asked(STEP)
    assert budget.wanted(0) is None
    budget.reserved(STEP)
    assert budget.wanted(STEP // 2) is None
    assert budget.wanted(STEP // 2 + 1) == STEP // 2 + 1 + STEP
    budget.asked(2 * STEP)
    budget.reserved(STEP)  # an older one that came late
    assert budget.end == STEP and budget.wanted(STEP) is None
    budget.refused()
    assert budget.wanted(STEP) == 2 * STEP


def test_a_closed_budget_neither_asks_nor_grows() -> None:
    budget = OffsetBudget(100, step=10)
    with pytest.raises(InvariantBroken):
        budget.close(101)
    assert budget.close(60) == 60
    budget.reserved(500)
    assert (budget.end, budget.wanted(60)) == (60, None)


def test_whatever_is_lost_late_or_refused_a_log_stays_below_what_was_committed(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        committed, log_end, budget = 0, 0, OffsetBudget(0, step=16)
        flying: list[int] = []
        for _ in range(100):
            wanted = budget.wanted(log_end)
            if wanted is not None:
                budget.asked(wanted)
                flying.append(wanted)
            if flying and draw.random() < 0.5:
                end = flying.pop(draw.randrange(len(flying)))
                if draw.random() < 0.3:
                    budget.refused()
                else:
                    committed = max(committed, end)
                    budget.reserved(end)
            log_end = min(log_end + draw.randrange(6), budget.end)
            assert log_end <= budget.end <= committed


def test_a_partition_appends_below_what_is_reserved_and_changes_nothing_where_it_may_not() -> None:
    budget = OffsetBudget(12, step=10)
    orders = ReservedPartition("/default/orders", 1, TopicPolicy(), 5, budget)
    assert orders.admit(header(7, producer_id=9), 1).base_offset == 5
    before = orders.snapshot()
    with pytest.raises(Overloaded):
        orders.admit(header(1, producer_id=9, sequence=7), 1)
    assert orders.log_end == 12 and orders.snapshot() == before
    budget.reserved(13)
    assert not isinstance(orders.admit(header(1, producer_id=9, sequence=7), 1), Duplicate)
    orders.written(13)
    budget.close(13)
    with pytest.raises(OwnerMoved):
        orders.admit(header(1), 1)
