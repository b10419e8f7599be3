"""Numbered batches that a quota refuses: each is sent again under its own number, or the work ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import danube.sync
from danube.client.blocking.numbered import NumberedProducer
from danube.client.machine.numbered import NumberedPartition
from danube.client.machine.publishing import Outgoing
from danube.core.protocol.native import Kind
from danube.errors import ConnectionFailed, OperationTimeout, QuotaExceeded, SequenceGap, StorageFull
from tests.broker_process import BrokerProcess
from tests.unit.client.machine.test_client_quotas import GAP, over
from tests.unit.client.machine.test_client_session import SECOND_NS, Peer, send

TOPIC = "/default/paced"


def opened(stored: int = 0, timeout_s: int = 30) -> tuple[Peer, NumberedPartition]:
    """A partition that holds so many records of the round."""
    peer = Peer()
    peer.connect()
    partition = NumberedPartition(peer.session, "job", "/default/t", 0, timeout_s * SECOND_NS, 0)
    partition.start()
    peer.open(partition.producer_id, 1)  # the asking one
    asked = peer.open(partition.producer_id, partition.epoch, stored)
    assert partition.opened.settled and asked.epoch == partition.epoch
    return peer, partition


def sent(peer: Peer) -> list[tuple[int, int, bytes]]:
    """Number, epoch and payload of each batch that went out."""
    return [(number, view.header.producer_epoch, view.payload(0)) for number, _, view in peer.published()]


def test_it_and_those_behind_it_are_sent_again_under_their_numbers() -> None:
    peer, partition = opened(stored=7)
    outgoing = [send(partition, bytes([one]), count=2) for one in range(3)]
    published = peer.published()
    assert [number for number, _, _ in published] == [7, 9, 11]
    peer.refuse(published[0][1], over(1_500))
    assert partition.next_sequence == 13, "two are out still, and the first is not"
    peer.refuse(published[1][1], GAP)
    assert partition.next_sequence == 13
    peer.refuse(published[2][1], GAP)
    outgoing.append(send(partition, b"\x03", count=2))
    assert partition.next_sequence == 15
    peer.pass_time(1.49)
    assert sent(peer) == []
    peer.pass_time(0.01)
    again = peer.published()
    epoch = partition.epoch
    assert [(number, view.header.producer_epoch, view.payload(0)) for number, _, view in again] == [
        (7, epoch, b"\x00"), (9, epoch, b"\x01"), (11, epoch, b"\x02"), (13, epoch, b"\x03"),
    ]  # fmt: skip
    for number, frame, _ in again:
        peer.acknowledge(frame, number, 2)
    assert [one.result().offset for one in outgoing] == [7, 9, 11, 13]
    assert partition.next_sequence == 15 and partition.failure is None


def test_a_batch_that_may_not_wait_so_long_ends_the_work_before_another_takes_its_number() -> None:
    peer, partition = opened(timeout_s=5)
    first = send(partition, b"a")
    peer.pass_time(1)
    second = send(partition, b"b")
    published = peer.published()
    peer.refuse(published[0][1], over(4_000))
    peer.refuse(published[1][1], GAP)
    assert isinstance(first.error, QuotaExceeded) and isinstance(second.error, QuotaExceeded)
    assert isinstance(partition.failure, QuotaExceeded)
    peer.pass_time(6)
    assert sent(peer) == []


def test_one_that_was_never_sent_in_time_ends_it_too() -> None:
    peer, partition = opened(timeout_s=5)
    peer.lose()
    first = send(partition, b"a")
    peer.pass_time(4)
    second = send(partition, b"b")
    peer.pass_time(1)
    assert isinstance(first.error, OperationTimeout) and isinstance(second.error, OperationTimeout)
    peer.pass_time(1)
    assert isinstance(partition.failure, OperationTimeout)
    assert not any(kind == Kind.PUBLISH for kind in (frame.kind for frame, _ in peer.sent()))


def test_one_whose_sender_gave_up_is_not_replaced_by_the_next() -> None:
    peer, partition = opened(timeout_s=5)
    first = send(partition, b"a")
    [(_, frame, _)] = peer.published()
    peer.pass_time(3)
    held = send(partition, b"b")
    [(_, behind, _)] = peer.published()
    peer.pass_time(2)
    assert isinstance(first.error, OperationTimeout) and partition.failure is None
    peer.refuse(frame, over(100))
    peer.refuse(behind, GAP)
    peer.pass_time(1)
    assert held.settled and partition.failure is not None and sent(peer) == []


def test_a_connection_that_is_lost_in_the_pause_keeps_the_numbers() -> None:
    peer, partition = opened()
    outgoing = [send(partition, bytes([one])) for one in range(3)]
    published = peer.published()
    peer.refuse(published[1][1], over(1_000))
    peer.refuse(published[2][1], GAP)
    peer.lose()
    peer.connect()
    asked = peer.open(partition.producer_id, partition.epoch, 1)
    assert asked.epoch == partition.epoch
    again = peer.published()
    assert [number for number, _, _ in again] == [0, 1, 2]
    for number, frame, _ in again:
        peer.acknowledge(frame, number)
    assert [one.result().offset for one in outgoing] == [0, 1, 2]


@pytest.mark.parametrize("error", [StorageFull("no space"), GAP])
def test_any_other_refusal_ends_it(error: Exception) -> None:
    peer, partition = opened()
    outgoing = [send(partition, bytes([one])) for one in range(2)]
    peer.refuse(peer.published()[0][1], error)
    assert all(type(one.error) is type(error) for one in outgoing)
    assert isinstance(partition.failure, StorageFull | SequenceGap)


def test_the_end_of_the_session_is_told_once() -> None:
    peer, partition = opened()
    outgoing = send(partition, b"a")
    settled: list[object] = []
    partition.when_settled = settled.append
    peer.session.fail(ConnectionFailed("gone"))
    assert settled == [outgoing] and isinstance(partition.failure, ConnectionFailed)


@pytest.mark.e2e
@pytest.mark.slow
def test_a_job_beyond_the_rate_of_its_topic_stores_each_record_once(
    broker: Callable[..., BrokerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[Outgoing] = []
    rest = NumberedPartition._refused_for_now

    def noted(partition: NumberedPartition, outgoing: Outgoing, error: QuotaExceeded) -> None:
        refused.append(outgoing)
        rest(partition, outgoing, error)

    monkeypatch.setattr(NumberedPartition, "_refused_for_now", noted)
    process = broker(workers=1)
    payloads = [b"%d" % number for number in range(400)]
    with danube.sync.connect(process.address) as client, danube.sync.connect(process.address) as other:
        client.admin.create_topic(TOPIC, max_publish_rate=500)
        with other.producer(TOPIC) as neighbour:
            neighbour.send_many([b"other"] * 2_000)  # owes three seconds
        with NumberedProducer(client, TOPIC, "job") as producer:
            for number in range(0, 400, 100):
                producer.send(0, number, payloads[number : number + 100])
            producer.flush()
            assert refused, "otherwise nothing is shown"
        with NumberedProducer(client, TOPIC, "job") as again:
            assert again.stored(0) == 400
        with client.consumer(TOPIC, "check", start="earliest") as consumer:
            found = [consumer.receive(timeout=30).payload for _ in range(2_400)]
    assert [payload for payload in found if payload != b"other"] == payloads
