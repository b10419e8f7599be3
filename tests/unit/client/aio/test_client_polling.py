"""A client that does not sleep while it waits for an answer (``busy_poll_us``)."""

from __future__ import annotations

import asyncio

import pytest

import danube
from danube.client.aio.connection import Connection
from danube.errors import InvalidArgument
from danube.limits import BUSY_POLL_US_MAX
from tests.fakes.broker import FakeBroker
from tests.unit.asynchronous import asynchronous

TOPIC = "/default/orders"


def connection_of(client: danube.Client) -> Connection:
    assert client._connection is not None
    return client._connection


@asynchronous
async def test_sends_and_requests_are_answered_and_nothing_polls_afterwards(fake: FakeBroker) -> None:
    async with danube.connect(fake.url, busy_poll_us=BUSY_POLL_US_MAX) as client:
        async with client.producer(TOPIC) as producer:
            assert [(await producer.send(b"x")).offset for _ in range(3)] == [0, 1, 2]
            acks = await asyncio.gather(*(producer.send(b"y") for _ in range(20)))
        assert not connection_of(client)._polling
        assert len(acks) == 20 and len(fake.payloads(TOPIC)) == 23


@asynchronous
async def test_an_answer_that_is_later_than_the_limit_is_waited_for_asleep(fake: FakeBroker) -> None:
    async with danube.connect(fake.url, busy_poll_us=100) as client, client.producer(TOPIC) as producer:
        await producer.send(b"x")
        fake.hold()
        late = asyncio.ensure_future(producer.send(b"late"))
        cancelled = asyncio.ensure_future(producer.send(b"cancelled"))
        while not connection_of(client)._polling:
            await asyncio.sleep(0)
        while connection_of(client)._polling:
            await asyncio.sleep(0)
        assert not late.done()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        fake.release()
        assert (await late).offset == 1


@asynchronous
async def test_a_send_that_is_cancelled_while_it_polls_ends_the_polling(fake: FakeBroker) -> None:
    async with danube.connect(fake.url, busy_poll_us=BUSY_POLL_US_MAX) as client:
        async with client.producer(TOPIC) as producer:
            await producer.send(b"x")
            fake.hold()
            sent = asyncio.ensure_future(producer.send(b"out already"))
            while not connection_of(client)._polling:
                await asyncio.sleep(0)
            sent.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sent
            assert not connection_of(client)._polling
            fake.release()
            assert (await producer.send(b"next")).offset == 2
    assert fake.payloads(TOPIC) == [b"x", b"out already", b"next"]


@asynchronous
async def test_one_who_waits_is_enough(fake: FakeBroker) -> None:
    async with danube.connect(fake.url, busy_poll_us=BUSY_POLL_US_MAX) as client:
        connection = connection_of(client)
        connection._polling = True  # somebody else does
        async with client.producer(TOPIC) as producer:
            assert (await producer.send(b"x")).offset == 0
        assert connection._polling
        connection._polling = False


@pytest.mark.parametrize("limit", [-1, BUSY_POLL_US_MAX + 1])
def test_a_limit_out_of_bounds_is_refused(limit: int) -> None:
    with pytest.raises(InvalidArgument, match=f"busy_poll_us is {limit}") as caught:
        danube.connect(busy_poll_us=limit)
    assert str(BUSY_POLL_US_MAX) in str(caught.value.why)
