"""Batches that a quota refuses: sent again after the time that was told, in order, and stored once."""

from __future__ import annotations

from typing import Any

import pytest

import danube
import danube.sync
from danube.core.protocol.native import Kind
from danube.errors import ClosedError, OperationTimeout, QuotaExceeded, SequenceGap, StorageFull
from tests.fakes.broker import FakeBroker
from tests.unit.asynchronous import asynchronous
from tests.unit.client.machine.test_client_acks import TOPIC
from tests.unit.client.machine.test_client_session import Peer, open_pair, send

GAP = SequenceGap("expected another one")


def over(retry_after_ms: Any) -> QuotaExceeded:
    return QuotaExceeded("too much", retry_after_ms=retry_after_ms)


def payloads(peer: Peer) -> list[tuple[int, bytes]]:
    return [(sequence, view.payload(0)) for sequence, _, view in peer.published()]


def test_a_refused_batch_and_those_behind_it_are_sent_again_after_the_time_that_was_told() -> None:
    peer, producer = open_pair()
    outgoing = [send(producer, bytes([one])) for one in range(4)]
    published = peer.published()
    peer.refuse(published[1][1], over(1_500))
    late = send(producer, bytes([4]))
    peer.refuse(published[2][1], GAP)
    peer.refuse(published[3][1], GAP)
    peer.pass_time(1.49)
    assert peer.published() == [] and peer.session.credit.take(1, producer)
    peer.pass_time(0.01)
    assert peer.published() == [], "the first batch is not answered"
    peer.acknowledge(published[0][1], 0)
    again = peer.published()
    assert [(sequence, view.header.producer_epoch, view.payload(0)) for sequence, _, view in again] == [
        (1, 3, b"\x01"), (2, 3, b"\x02"), (3, 3, b"\x03"), (4, 3, b"\x04"),
    ]  # fmt: skip
    for sequence, frame, _ in again:
        peer.acknowledge(frame, sequence)
    assert [one.result().offset for one in (*outgoing, late)] == [0, 1, 2, 3, 4]
    assert peer.session.statistics.send_failures == 0


@pytest.mark.parametrize("told", [0, -1, "soon", None])
def test_without_a_time_that_can_be_waited_for_it_is_a_second(told: Any) -> None:
    peer, producer = open_pair()
    send(producer, b"a")
    peer.refuse(peer.published()[0][1], over(told))
    peer.pass_time(0.99)
    assert peer.published() == []
    peer.pass_time(0.01)
    assert payloads(peer) == [(0, b"a")]


def test_a_batch_that_may_not_wait_so_long_fails_at_once_and_leaves_no_hole() -> None:
    peer = Peer()
    peer.connect()
    producer = peer.producer(timeout_s=5)
    peer.open(7, 3)
    first = send(producer, b"a")
    peer.pass_time(1)
    second = send(producer, b"b")
    published = peer.published()
    peer.refuse(published[0][1], over(4_000))
    peer.refuse(published[1][1], GAP)
    assert isinstance(first.error, QuotaExceeded) and not second.settled
    peer.pass_time(0)
    assert payloads(peer) == [(0, b"b")], "the number of the first one is free"


def test_what_waits_behind_a_refused_batch_until_it_is_too_late_fails_by_the_quota() -> None:
    peer = Peer()
    peer.connect()
    producer = peer.producer(timeout_s=5)
    peer.open(7, 3)
    first, second = send(producer, b"a"), send(producer, b"b")
    published = peer.published()
    peer.pass_time(3)
    peer.refuse(published[0][1], over(1_999))
    peer.refuse(published[1][1], GAP)
    peer.pass_time(1.999)
    [(_, frame, _), _] = peer.published()
    third = send(producer, b"c")
    peer.refuse(frame, over(5_000))
    assert isinstance(first.error, QuotaExceeded)
    peer.pass_time(0.5)
    assert isinstance(second.error, OperationTimeout), "it was out: whether it is stored is not known"
    assert not third.settled


def test_unsent_batches_that_a_quota_held_back_name_it() -> None:
    peer = Peer()
    peer.connect()
    producer = peer.producer(timeout_s=5)
    peer.open(7, 3)
    first = send(producer, b"a")
    [(_, frame, _)] = peer.published()
    held = send(producer, b"b")
    [(_, behind, _)] = peer.published()
    peer.pass_time(0.5)
    peer.refuse(frame, over(4_400))  # and no answer to the other one
    peer.pass_time(4.4)
    assert peer.published() == []
    peer.pass_time(0.2)
    assert isinstance(first.error, QuotaExceeded), "it waits for the answer, and its time is over"
    assert isinstance(held.error, OperationTimeout)
    peer.refuse(behind, GAP)
    peer.pass_time(0)
    assert payloads(peer) == [], "who sent them was told that they failed"
    send(producer, b"c")
    assert payloads(peer) == [(0, b"c")]


def test_a_connection_that_is_lost_in_the_pause_keeps_epoch_and_numbers() -> None:
    peer, producer = open_pair()
    outgoing = [send(producer, bytes([one])) for one in range(4)]
    published = peer.published()
    peer.refuse(published[1][1], over(60))
    peer.refuse(published[2][1], GAP)  # the first and the last one are not answered
    peer.lose()
    peer.connect()
    asked = peer.open(7, 3, next_sequence=1)
    assert (asked.producer_id, asked.epoch) == (7, 3), "the first one may be stored"
    again = peer.published()
    assert [sequence for sequence, _, _ in again] == [0, 1, 2, 3]
    for sequence, frame, _ in again:
        peer.acknowledge(frame, sequence)
    assert [one.result().offset for one in outgoing] == [0, 1, 2, 3]
    peer.pass_time(1)
    assert peer.published() == []


def test_numbers_are_right_when_only_what_followed_the_refused_batch_is_out() -> None:
    peer, producer = open_pair()
    for one in range(3):
        send(producer, bytes([one]))
    published = peer.published()
    peer.acknowledge(published[0][1], 0)
    peer.refuse(published[1][1], over(60))
    peer.lose()
    peer.connect()
    peer.open(7, 3, next_sequence=1)
    assert payloads(peer) == [(1, b"\x01"), (2, b"\x02")]


def test_a_batch_that_fails_for_good_in_the_pause_begins_a_new_epoch() -> None:
    peer, producer = open_pair()
    outgoing = [send(producer, bytes([one])) for one in range(3)]
    published = peer.published()
    peer.refuse(published[1][1], over(5_000))
    peer.refuse(published[0][1], StorageFull("no space"))
    peer.refuse(published[2][1], over(1_000))
    assert peer.open(7, 4).producer_id == 0
    assert payloads(peer) == [(0, b"\x01"), (1, b"\x02")]
    assert isinstance(outgoing[0].error, StorageFull)
    peer.pass_time(5)
    assert peer.published() == []


def test_a_producer_is_closed_in_the_pause() -> None:
    peer, producer = open_pair()
    outgoing = send(producer, b"a")
    peer.refuse(peer.published()[0][1], over(1_000))
    producer.close()
    assert isinstance(outgoing.error, ClosedError)
    assert [frame.kind for frame, _ in peer.sent()] == [Kind.CLOSE_PRODUCER]
    peer.pass_time(2)
    assert peer.published() == []


def test_what_is_taken_back_in_the_pause_is_not_sent() -> None:
    peer, producer = open_pair()
    outgoing, other = send(producer, b"a"), send(producer, b"b")
    published = peer.published()
    peer.refuse(published[0][1], over(1_000))
    peer.refuse(published[1][1], GAP)
    assert producer.withdraw(outgoing) and not other.settled
    peer.pass_time(1)
    assert payloads(peer) == [(0, b"b")]


@asynchronous
async def test_an_asyncio_producer_waits_and_sends_again() -> None:
    with FakeBroker() as fake:
        async with danube.connect(fake.url) as client:
            await client.admin.create_topic(TOPIC)
            async with client.producer(TOPIC) as producer:
                fake.refuse(Kind.PUBLISH, over(30), over(30))
                sends = [producer.send_nowait(b"%d" % number) for number in range(3)]
                assert [(await one).offset for one in sends] == [0, 1, 2]
                fake.refuse(Kind.PUBLISH, over(30))
                assert (await producer.send_many([b"x", b"y"]))[0].offset == 3
                fake.refuse(Kind.PUBLISH, over(10_000_000))
                with pytest.raises(QuotaExceeded):
                    await producer.send(b"too late")
                assert (await producer.send(b"z")).offset == 5


def test_a_blocking_producer_waits_and_sends_again() -> None:
    with FakeBroker() as fake, danube.sync.connect(fake.url) as client:
        client.admin.create_topic(TOPIC)
        with client.producer(TOPIC) as producer:
            fake.refuse(Kind.PUBLISH, over(30), over(30))
            assert producer.send(b"a").offset == 0
            fake.refuse(Kind.PUBLISH, over(30))
            assert producer.send_many([b"x", b"y"])[0].offset == 1
            fake.refuse(Kind.PUBLISH, over(10_000_000))
            with pytest.raises(QuotaExceeded):
                producer.send(b"too late")
            fake.refuse(Kind.PUBLISH, over(30))
            waiting = producer.send_nowait(b"z")
            producer.flush()
            assert waiting.result().offset == 3
