"""Consumers that clients know by a number: the numbers, who is forgotten, and what a snapshot keeps."""

from __future__ import annotations

import msgspec
import pytest

from danube.core.metadata import known_consumers
from danube.core.metadata.commands import (
    CreateTopic,
    DeleteTopic,
    ForgetSubscription,
    KnowConsumer,
    KnownConsumer,
    encode_command,
)
from danube.core.metadata.known_consumers import consumer_identity, producer_identity
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import TopicPolicy
from danube.errors import CallerError, Conflict, InvalidArgument, InvalidName, LimitExceeded, TopicNotFound


def machine_with_topics() -> Metadata:
    machine = Metadata()
    for name, partitions in (("one", 0), ("many", 3)):
        command = CreateTopic(
            topic=f"/default/{name}", partitions=partitions, policy=TopicPolicy(), created_us=1
        )
        machine.apply(machine.version + 1, command)
    return machine


def consumer(
    name: str, topic_id: int = 1, partition: int = 0, subscription: str = "s", **fields: object
) -> KnownConsumer:
    number = consumer_identity(topic_id, partition, subscription, name)
    given = {"consumer_id": number, "mode": "shared", **fields}
    return KnownConsumer(
        topic_id=topic_id, partition=partition, subscription=subscription, name=name, **given
    )  # type: ignore[arg-type]


def know(machine: Metadata, one: KnownConsumer, known_max: int = 100) -> bool:
    command = KnowConsumer(consumer=one, known_max=known_max)
    needed = machine.check(command)
    if needed:
        machine.apply(machine.version + 1, command)
    return needed


def test_a_number_is_the_same_everywhere_and_fits_a_signed_word() -> None:
    # Pinned: clients keep these over upgrades of the broker.
    assert consumer_identity(1, 0, "s", "c") == 583681739036689762
    assert producer_identity(1, 0, "p") == 3538829615491769960
    numbers = {
        consumer_identity(topic_id, partition, subscription, name, salt)
        for topic_id in (1, 2)
        for partition in (0, 1)
        for subscription, name in (("ab", "c"), ("a", "bc"), ("", "abc"), ("ü", "\ud800"))
        for salt in (0, 1)
    }
    assert len(numbers) == 32 and all(0 < number < 1 << 63 for number in numbers)
    assert producer_identity(1, 0, "c") != consumer_identity(1, 0, "", "c")


def test_zero_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_consumers, "key_hash", lambda key: 1 << 63)
    assert consumer_identity(1, 0, "s", "c") == 1


def test_a_consumer_is_kept_with_all_that_it_asked_for() -> None:
    machine = machine_with_topics()
    one = consumer("c", 2, 2, filters=("a*", "b"), mode="key_shared")
    assert know(machine, one)
    assert not know(machine, one), "it is known already"
    for held in (machine, machine.copy(), Metadata.restore(machine.snapshot())):
        assert held.consumers.find(one.consumer_id) == one
        assert held.consumers.of(2, 2, "s", "c") == one and held.consumers.of(2, 1, "s", "c") is None
        assert held.consumers.free_identity(2, 2, "s", "c") == one.consumer_id
    other = msgspec.structs.replace(one, mode="shared", filters=())
    assert know(machine, other) and machine.consumers.find(one.consumer_id) == other
    assert len(machine.consumers) == 1


def test_the_one_that_was_kept_first_is_forgotten_first() -> None:
    machine = machine_with_topics()
    a, b, c = (consumer(name) for name in "abc")
    know(machine, a, 2)
    know(machine, b, 2)
    know(machine, msgspec.structs.replace(a, mode="failover"), 2)
    machine = Metadata.restore(machine.snapshot())
    know(machine, c, 2)
    assert [one.name for one in machine.consumers] == ["a", "c"]
    assert machine.consumers.find(b.consumer_id) is None
    assert machine.consumers.ids_of(1) == [a.consumer_id, c.consumer_id]
    know(machine, b, 1)
    assert [one.name for one in machine.consumers] == ["b"]


def test_numbers_go_with_their_topic_and_subscription() -> None:
    machine = machine_with_topics()
    everyone = [
        consumer("c", 1), consumer("c", 2, 0), consumer("c", 2, 1), consumer("d", 2, 1),
        consumer("c", 2, 1, "t"),
    ]  # fmt: skip
    for one in everyone:
        know(machine, one)
    machine.apply(
        machine.version + 1, ForgetSubscription(topic="/default/many", subscription="s", partition=1)
    )
    assert list(machine.consumers) == [everyone[0], everyone[1], everyone[4]]
    again = ForgetSubscription(topic="/default/many", subscription="s", partition=1)
    assert not machine.check(again), "nothing of it is left"
    machine.apply(machine.version + 1, ForgetSubscription(topic="/default/many", subscription="s"))
    assert list(machine.consumers) == [everyone[0], everyone[4]]
    machine.apply(machine.version + 1, DeleteTopic(topic="/default/many"))
    assert list(machine.consumers) == [everyone[0]]
    with pytest.raises(TopicNotFound):
        machine.check(ForgetSubscription(topic="/default/one", subscription="s", topic_id=9))


def test_a_number_that_is_taken_is_salted_the_same_way_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machine_with_topics()
    numbers = iter([5, 5, 6])
    monkeypatch.setattr(known_consumers, "consumer_identity", lambda *_: next(numbers))
    first = machine.consumers.free_identity(1, 0, "s", "a")
    know(machine, consumer("a", consumer_id=first))
    second = machine.consumers.free_identity(1, 0, "s", "b")
    assert (first, second) == (5, 6)
    with pytest.raises(Conflict):
        know(machine, consumer("b", consumer_id=5))
    with pytest.raises(Conflict):
        machine.apply(machine.version + 1, KnowConsumer(consumer=consumer("a", consumer_id=7), known_max=9))
    monkeypatch.setattr(known_consumers, "consumer_identity", lambda *_: 5)
    with pytest.raises(Conflict, match="no number"):
        machine.consumers.free_identity(1, 0, "s", "z")


@pytest.mark.parametrize(
    "one, known_max, error",
    [
        (consumer("c", 9), 10, TopicNotFound),
        (consumer("c", 1, 1), 10, TopicNotFound),
        (consumer("c", 2, 3), 10, TopicNotFound),
        (consumer("", 1), 10, InvalidName),
        (consumer("c", 1, 0, "a\tb"), 10, InvalidName),
        (consumer("c", mode="sometimes"), 10, InvalidArgument),
        (consumer("c", consumer_id=0), 10, InvalidArgument),
        (consumer("c", consumer_id=1 << 63), 10, InvalidArgument),
        (consumer("c", filters=("*",) * 101), 10, InvalidArgument),
        (consumer("c", filters=("x" * 257,)), 10, InvalidArgument),
        (consumer("c"), 0, InvalidArgument),
        (consumer("c"), 20_001, InvalidArgument),
    ],
)
def test_what_cannot_be_known_is_refused(
    one: KnownConsumer, known_max: int, error: type[CallerError]
) -> None:
    machine = machine_with_topics()
    with pytest.raises(error):
        know(machine, one, known_max)
    assert len(machine.consumers) == 0


def test_filters_are_bounded_by_the_command_that_carries_them() -> None:
    many = consumer("c", filters=("x" * 256,) * 100)
    with pytest.raises(LimitExceeded):
        encode_command(KnowConsumer(consumer=many, known_max=10))
