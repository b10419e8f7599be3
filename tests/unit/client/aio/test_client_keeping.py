"""What keeps a client's connection: where it ends, all who wait are told; and how dialling can fail."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

import danube
import danube.sync
from danube.client.aio.connection import Connection
from danube.client.machine.address import Address, refused
from danube.client.machine.session import Session
from danube.core.protocol.native import Kind, Lookup
from danube.errors import ConnectionFailed, TopicNotFound
from danube.host import tcp
from tests.fakes.broker import FakeBroker
from tests.unit.asynchronous import asynchronous

TOPIC = "/default/t"
LONG = "a" * 64 + ".example"


async def keeping(client: danube.Client) -> asyncio.Task[None]:
    assert client._connection is not None and client._connection._keeper is not None
    await asyncio.sleep(0)
    return client._connection._keeper


@pytest.mark.parametrize("how", ["cancelled", "an error", "cancelled while it dials"])
@asynchronous
async def test_a_keeper_that_ends_fails_the_client_and_all_who_wait(
    fake: FakeBroker, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await danube.connect(fake.url).open()
    producer = await client.producer(TOPIC).open()
    consumer = await client.consumer(TOPIC, "s").open()
    keeper = await keeping(client)
    fake.hold()
    waiting = [asyncio.ensure_future(one) for one in (consumer.receive(), producer.send(b"x"))]
    await asyncio.sleep(0)
    if how == "an error":

        async def broken() -> None:
            raise RuntimeError("met by nobody")

        assert client._connection is not None
        monkeypatch.setattr(client._connection, "_dial_until_connected", broken)
        fake.drop_connections()
    elif how == "cancelled":
        keeper.cancel()
    else:
        fake.stop()
        while client.connected:
            await asyncio.sleep(0.002)
        keeper.cancel()
    for task in waiting:
        with pytest.raises(ConnectionFailed, match=r"task that keeps.*(cancelled|met by nobody)"):
            await task
    with pytest.raises(ConnectionFailed, match="task that keeps"):
        await producer.send(b"later")
    with pytest.raises(ConnectionFailed, match="task that keeps"):
        await client.admin.status()
    await asyncio.to_thread(fake.wait_for, lambda: not fake.connections)
    fake.release()
    await client.close()


@asynchronous
async def test_closing_a_client_is_no_failure_of_its_keeper(fake: FakeBroker) -> None:
    client = await danube.connect(fake.url).open()
    keeper = await keeping(client)
    await client.close()
    assert keeper.done() and "closed" in str(client._session.failure)


@asynchronous
async def test_an_owner_whose_keeper_ends_sends_all_home(fake: FakeBroker) -> None:
    with FakeBroker() as owner:
        async with danube.connect(fake.url) as client:
            home = client._session
            session = home.brokers.at(f"127.0.0.1:{owner.port}")
            assert session is not home and client._connection is not None
            connection = client._connection._owners[session]
            request = session.request(Kind.LOOKUP, Lookup("/default/none"))
            while not session.ready:
                await asyncio.sleep(0.002)
            assert connection._keeper is not None
            connection._keeper.cancel()
            with pytest.raises((ConnectionFailed, TopicNotFound)):
                await client._connection.wait(request)
            while client._connection._owners:
                await asyncio.sleep(0.002)
            await asyncio.to_thread(owner.wait_for, lambda: not owner.connections)
            assert home.failure is None


@asynchronous
async def test_a_timer_that_fails_keeps_no_other_from_coming(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        session = client._session
        raised: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))

        def fail() -> None:
            raise RuntimeError("unforeseen")

        came = asyncio.Event()
        session.call_at(session.now_ns(), fail)
        session.call_at(session.now_ns() + 1, came.set)
        await came.wait()
        assert len(raised) == 1


@pytest.mark.parametrize("host", [LONG, "a..b", "\udcff"])
def test_a_host_that_is_no_name_is_told_as_a_failed_connection(host: str) -> None:
    with pytest.raises(ConnectionFailed, match="no name of a host"):
        danube.sync.connect(f"danube://{host}:1").open()

    async def dial() -> None:
        with pytest.raises(ConnectionFailed, match="no name of a host"):
            await danube.connect(f"danube://{host}:1").open()

    asyncio.run(dial())


@asynchronous
async def test_a_broker_of_such_a_name_ends_no_keeper(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        client._session.brokers.known = [Address(LONG, 1)]
        keeper = await keeping(client)
        fake.drop_connections()
        while client.statistics()["connections"] < 2:
            await asyncio.sleep(0.002)
        assert not keeper.done()


def test_an_error_of_dialling_says_why() -> None:
    assert "no name" in refused(Address("x", 1), UnicodeError("label too long")).why


def test_a_socket_that_is_gone_again_is_left_as_it_is() -> None:
    raw = socket.socket()
    raw.close()
    assert tcp.tune(raw)


@asynchronous
async def test_a_session_without_addresses_says_so() -> None:
    connection = Connection(Session(), [], 1.0)
    with pytest.raises(ConnectionFailed, match="no broker address"):
        await connection.open()
