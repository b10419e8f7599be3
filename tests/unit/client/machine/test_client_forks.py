"""A client in the child of a fork: it is at its end there, and the parent's connection is none the wiser."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import danube
import danube.sync
from danube.client.machine.address import let_go
from danube.core.protocol.native import Kind
from danube.errors import ClosedError
from tests.fakes.broker import FakeBroker
from tests.unit.asynchronous import asynchronous

TOPIC = "/default/orders"


def in_child(work: Callable[[], None]) -> None:
    """Run ``work`` in a child of this process; it must end well and within ten seconds."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            threading.Timer(10.0, os._exit, (2,)).start()
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def refused(call: Callable[[], Any]) -> None:
    with pytest.raises(ClosedError, match="fork"):
        call()


async def refused_soon(call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    with pytest.raises(ClosedError, match="fork"):
        async with asyncio.timeout(5):
            await call()


def connections() -> set[str]:
    """The sockets that this process has open, as the system names them."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return {one for one in found if one.startswith("socket:")}


def name_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


async def gone_over(client: danube.Client, producer: danube.Producer, consumer: danube.Consumer) -> None:
    """Every call of the asyncio client, made in a child."""
    for call in (
        lambda: producer.send(b"child"),
        lambda: producer.send(b"child", key="k"),
        lambda: producer.send_many([b"child"]),
        producer.ready,
        producer.flush,
        consumer.receive,
        consumer.flush,
        lambda: anext(aiter(consumer)),
        lambda: anext(aiter(consumer.batches())),
        client.admin.status,
        client.schemas.subjects,
        client.open,
    ):
        await refused_soon(call)
    refused(lambda: producer.send_nowait(b"child"))
    refused(lambda: client.producer(TOPIC))
    refused(lambda: client.consumer(TOPIC, "s"))
    await producer.close()
    await consumer.close()
    await client.close()


@asynchronous
async def test_an_asyncio_client_is_at_its_end_in_a_child(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        async with client.producer(TOPIC) as producer, client.consumer(TOPIC, "s") as consumer:
            await producer.send(b"parent")
            await consumer.receive()
            waiting = asyncio.ensure_future(consumer.receive())
            gathered = producer.send_nowait(b"gathered")
            await asyncio.sleep(0)
            frames = len(fake.frames_seen)
            assert client._connection is not None and client._connection._link is not None
            ours = name_of(client._connection._link.socket.fileno())

            def child() -> None:
                assert ours not in connections()
                asyncio.run(gone_over(client, producer, consumer))
                refused(gathered.result)

            in_child(child)
            await producer.flush()
            await gathered
            assert (await producer.send(b"parent again")).offset == 2
            assert (await waiting).payload == b"gathered"
            assert client.statistics()["connections"] == 1
            assert fake.seen(Kind.CLOSE_PRODUCER) == fake.seen(Kind.CLOSE_CONSUMER) == 0
            assert len(fake.frames_seen) > frames
    assert fake.payloads(TOPIC) == [b"parent", b"gathered", b"parent again"]


def test_a_loop_that_goes_on_in_a_child_tells_who_waits_there(fake: FakeBroker) -> None:
    loop = asyncio.new_event_loop()

    async def begin() -> tuple[danube.Client, danube.Producer, asyncio.Task[Any]]:
        client = await danube.connect(fake.url).open()
        producer = await client.producer(TOPIC).open()
        consumer = await client.consumer(TOPIC, "s").open()
        waiting = asyncio.create_task(consumer.receive())
        await producer.send(b"first")
        assert (await waiting).payload == b"first"
        waiting = asyncio.create_task(consumer.receive())
        await asyncio.sleep(0)
        return client, producer, waiting

    client, producer, waiting = loop.run_until_complete(begin())

    def child() -> None:
        with pytest.raises(ClosedError, match="fork"):
            loop.run_until_complete(asyncio.wait_for(waiting, 5))
        loop.run_until_complete(refused_soon(lambda: producer.send(b"child")))
        loop.run_until_complete(client.close())

    in_child(child)

    async def finish() -> None:
        await producer.send(b"second")
        assert (await asyncio.wait_for(waiting, 5)).payload == b"second"
        await client.close()

    loop.run_until_complete(finish())
    loop.close()
    assert fake.payloads(TOPIC) == [b"first", b"second"]


def test_a_blocking_client_is_at_its_end_in_a_child(fake: FakeBroker) -> None:
    with danube.sync.connect(fake.url) as client:
        with client.producer(TOPIC) as producer, client.consumer(TOPIC, "s") as consumer:
            producer.send(b"parent")
            consumer.receive()
            gathered = producer.send_nowait(b"gathered")
            sock = client._connection._home.socket
            assert sock is not None
            ours = name_of(sock.fileno())

            def child() -> None:
                assert ours not in connections()
                for call in (
                    lambda: producer.send(b"child"),
                    lambda: producer.send_nowait(b"child"),
                    lambda: producer.send_many([b"child"]),
                    gathered.result,
                    producer.ready,
                    producer.flush,
                    consumer.receive,
                    consumer.flush,
                    lambda: next(iter(consumer)),
                    lambda: next(iter(consumer.batches())),
                    client.admin.status,
                    client.schemas.subjects,
                    client.open,
                    lambda: client.producer(TOPIC),
                    lambda: client.consumer(TOPIC, "s"),
                ):
                    refused(call)
                producer.close()
                consumer.close()
                client.close()

            in_child(child)
            assert gathered.result().offset == 1
            assert producer.send(b"parent again").offset == 2
            assert client.statistics()["connections"] == 1
            assert fake.seen(Kind.CLOSE_PRODUCER) == fake.seen(Kind.CLOSE_CONSUMER) == 0
    assert fake.payloads(TOPIC) == [b"parent", b"gathered", b"parent again"]


def test_a_child_does_not_wait_for_a_thread_that_it_has_not(fake: FakeBroker) -> None:
    """Other threads of the parent hold the lock and read at the moment of the fork."""
    with danube.sync.connect(fake.url) as client, client.producer(TOPIC) as producer:
        consumer = client.consumer(TOPIC, "s").open()
        reader = threading.Thread(target=consumer.receive)
        reader.start()
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with client._connection.lock:
                held.set()
                done.wait(10)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(10)

        def child() -> None:
            refused(lambda: producer.send_nowait(b"child"))
            refused(lambda: producer.send(b"child"))
            client.close()

        in_child(child)
        done.set()
        holder.join(10)
        producer.send(b"parent")
        reader.join(10)
        assert not reader.is_alive()


def test_a_client_that_was_not_open_at_the_fork_refuses_to_open_in_the_child(fake: FakeBroker) -> None:
    blocking = danube.sync.connect(fake.url)
    awaited = danube.connect(fake.url)

    def child() -> None:
        refused(blocking.open)
        asyncio.run(refused_soon(awaited.open))

    in_child(child)
    blocking.open().close()


def test_a_socket_that_is_let_go_stays_open_for_others() -> None:
    ours, peer = socket.socketpair()
    others = ours.dup()
    before = name_of(ours.fileno())
    let_go(ours.fileno())
    assert name_of(ours.fileno()) != before == name_of(others.fileno())
    assert ours.recv(1) == b""  # at its end
    with pytest.raises(OSError):
        ours.send(b"x")
    others.sendall(b"still here")
    assert peer.recv(100) == b"still here"
    for one in (ours, others, peer):
        one.close()


def test_without_a_free_descriptor_a_socket_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, peer = socket.socketpair()
    number = ours.detach()

    def none_left() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", none_left)
    let_go(number)
    with pytest.raises(OSError):
        os.fstat(number)
    assert stat.S_ISSOCK(os.fstat(peer.fileno()).st_mode) and peer.recv(1) == b""
    peer.close()
