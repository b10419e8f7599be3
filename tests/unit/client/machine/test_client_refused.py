"""Partitions that cannot be opened: who waits for their records, or sends to them, is told why."""

from __future__ import annotations

from typing import Any

import pytest

import danube
import danube.sync
from danube.client.machine import subscribing
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import OperationTimeout, OwnerMoved, StorageFailed, StorageIncompatible
from tests.fakes.broker import FakeBroker
from tests.unit.asynchronous import asynchronous
from tests.unit.client.machine.test_client_acks import TOPIC, Site
from tests.unit.client.machine.test_client_session import open_pair, send

REASON = StorageFailed("the log cannot be opened", why="Input/output error")


def refuse(site: Site, error: Any, seconds: float = 0.0) -> None:
    frame = site.last(Kind.SUBSCRIBE)
    site.feed(wire.error_frame(error, frame.correlation, frame.handle))
    site.pass_time(seconds)


def again() -> Site:
    """A consumer that was open, and whose broker came back."""
    site = Site()
    site.lose()
    site.connect()
    return site


def test_a_consumer_whose_partition_is_not_opened_again_says_why_until_it_is() -> None:
    site = again()
    refuse(site, REASON, 0.5)
    assert site.consumer.waiting is None, "an owner that restarts refuses for a moment"
    refuse(site, REASON, 0.6)
    refuse(site, OwnerMoved("the worker restarts"), 2)
    assert str(site.consumer.waiting) == str(REASON)
    refuse(site, StorageFailed("another reason"), 2)
    assert str(site.consumer.waiting) == "another reason" and site.consumer.failure is None
    site.subscribe()
    assert site.consumer.waiting is None and site.consumer.last_error is None
    site.lose()
    site.connect()
    refuse(site, OwnerMoved("it is elsewhere"), 0.1)
    assert site.consumer.waiting is None, "what was before counts no more"


def test_a_partition_that_can_never_be_opened_ends_its_consumer() -> None:
    site = again()
    refuse(site, StorageIncompatible("segment has format version 2"))
    assert isinstance(site.consumer.failure, StorageIncompatible)


def test_records_for_a_partition_that_cannot_be_opened_fail_with_the_reason() -> None:
    peer, producer = open_pair()
    peer.lose()
    peer.connect()
    outgoing = send(producer, b"late")
    for _ in range(2):
        frame = next(one for one, _ in reversed(peer.sent()) if one.kind == Kind.OPEN_PRODUCER)
        peer.refuse(frame, REASON)
        peer.pass_time(16)
    assert isinstance(outgoing.error, OperationTimeout) and str(REASON) in str(outgoing.error)


def lose_the_partition(fake: FakeBroker) -> None:
    """As a broker that comes back and finds that a partition cannot be opened."""
    fake.refuse(Kind.SUBSCRIBE, *[REASON] * 50)
    fake.drop_connections()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscribing, "REFUSED_NS", 0)


@asynchronous
async def test_an_asyncio_consumer_names_the_reason(soon: None) -> None:
    with FakeBroker() as fake:
        async with danube.connect(fake.url) as client:
            await client.admin.create_topic(TOPIC)
            async with client.consumer(TOPIC, subscription="s") as consumer:
                lose_the_partition(fake)
                with pytest.raises(OperationTimeout, match="Input/output error") as told:
                    await consumer.receive(timeout=0.5)
                assert isinstance(told.value.__cause__, StorageFailed)
                assert str(consumer.waits_for) == str(REASON)


def test_a_blocking_consumer_names_the_reason(soon: None) -> None:
    with FakeBroker() as fake, danube.sync.connect(fake.url) as client:
        client.admin.create_topic(TOPIC)
        with client.consumer(TOPIC, subscription="s") as consumer:
            lose_the_partition(fake)
            with pytest.raises(OperationTimeout, match="Input/output error"):
                consumer.receive(timeout=0.5)
            assert str(consumer.waits_for) == str(REASON)
