"""A broker that refuses a connection and closes it before the client has greeted."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

import danube
from danube import sync
from danube.core.protocol import native as wire
from danube.errors import ConnectionFailed, DanubeError, LimitExceeded
from danube.host import local_socket
from tests.fakes.broker import FakeBroker

FULL = wire.error_frame(LimitExceeded("this worker holds 3 connections already", hint="close some"))


def closed_after(*sent: bytes) -> Callable[[str, int], socket.socket]:
    """Dial peers that have sent these bytes, one after the other, and are gone: the first write fails."""
    peers = iter(sent)

    def dial(host: str, port: int) -> socket.socket:
        here, there = socket.socketpair()
        there.sendall(next(peers))
        there.close()
        here.setblocking(False)
        return here

    return dial


def connect_blocking() -> None:
    with sync.connect("danube://127.0.0.1:1", timeout=5) as client:
        client.admin.list_topics()


def connect_on(factory: Callable[[], Any]) -> Callable[[], None]:
    async def connect() -> None:
        async with danube.connect("danube://127.0.0.1:1", timeout=5):
            pass

    def run() -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(connect())

    return run


CLIENTS = [
    pytest.param(connect_blocking, id="blocking"),
    pytest.param(connect_on(asyncio.new_event_loop), id="asyncio"),
    pytest.param(connect_on(uvloop.new_event_loop), id="uvloop"),
]


@pytest.mark.parametrize("connect", CLIENTS)
@pytest.mark.parametrize(
    ("sent", "raised"),
    [
        pytest.param([FULL], LimitExceeded, id="said"),
        pytest.param([b"", b""], ConnectionFailed, id="silent"),
        pytest.param([FULL[:-1], FULL[:-1]], ConnectionFailed, id="cut"),
        pytest.param([b"", FULL], LimitExceeded, id="said to the second connection"),
    ],
)
def test_the_client_raises_what_the_broker_said_and_not_that_its_write_failed(
    connect: Callable[[], None], sent: list[bytes], raised: type[DanubeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_socket, "dial", closed_after(*sent))
    with pytest.raises(DanubeError) as caught:
        connect()
    assert type(caught.value) is raised, caught.value


def test_a_second_connection_that_is_greeted_serves(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one ends without a word."""

    async def connect() -> None:
        async with danube.connect(fake.url) as client, client.producer("/default/t") as producer:
            assert (await producer.send(b"asyncio")).offset == 0

    def ends_one() -> None:
        ends = iter([closed_after(b"")])
        monkeypatch.setattr(local_socket, "dial", lambda host, port: next(ends, dial)(host, port))

    dial = local_socket.dial
    ends_one()
    asyncio.run(connect())
    ends_one()
    with sync.connect(fake.url) as client, client.producer("/default/t") as producer:
        assert producer.send(b"blocking").offset == 1
