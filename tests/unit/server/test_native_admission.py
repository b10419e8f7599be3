"""The native door where everybody is asked who he is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from danube.broker.admission import Admission
from danube.broker.worker.guests import LOCAL_PLACES, Guests
from danube.broker.worker.places import Places
from danube.core.metadata.machine import Metadata
from danube.core.protocol import native as wire
from danube.core.protocol.native import Authenticate, Expiring, Hello, Kind, Welcome
from danube.core.security.principals import Identity, Principal
from danube.errors import DanubeError, IssuerUnavailable, NotAuthenticated, Overloaded, TokenExpired
from danube.host.credentials import Credentials, secret_key
from danube.server.native import NativeConnection, NativeServer
from tests.unit.broker_parts import Received, frames_in
from tests.unit.native_door import Door, FakeTransport

NOW_US = 1_700_000_000_000_000
CREDENTIALS = Credentials([secret_key("", b"a secret of thirty-two bytes, or more")])


class Asking(Door):
    """A door that asks, with a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.now_us = NOW_US
        machine = Metadata()
        admission = Admission(
            CREDENTIALS, lambda: machine.access, failures_per_minute=10, now_us=lambda: self.now_us
        )
        self.server.admission = admission
        self.server._expiries._leeway_us = admission.leeway_us


class Client:
    def __init__(self, door: Asking) -> None:
        self.transport = FakeTransport()
        self.connection: NativeConnection = door.server.factory()
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]
        self._door = door

    def send(self, frame: bytes) -> list[Received]:
        """Have the door take a frame, and return what it answers in this turn."""
        room = self.connection.get_buffer(len(frame))
        room[: len(frame)] = frame
        self.connection.buffer_updated(len(frame))
        return self.take()

    def take(self) -> list[Received]:
        self._door.server.flush()
        written, self.transport.written = self.transport.written, b""
        return frames_in(written)


def token(name: str = "app", ttl_s: int = 1_000) -> str:
    return CREDENTIALS.sign(Principal("service_account", name), ttl_s, NOW_US)


def hello(text: str) -> bytes:
    return wire.control_frame(Kind.HELLO, Hello(token=text), 1)


async def refusal(client: Client) -> DanubeError:
    for _ in range(100):
        found = client.take()
        if found:
            assert client.transport.closed
            return wire.decode_error(found[0].body)
        await asyncio.sleep(0.02)
    raise AssertionError("it was not refused")


def test_welcome_names_the_principal() -> None:
    async def run() -> None:
        client = Client(Asking())
        (frame,) = client.send(hello(token()))
        welcome = msgspec.msgpack.decode(frame.body, type=Welcome)
        assert (welcome.principal, welcome.expires_s) == ("service_account:app", 1_000)
        assert client.connection.identity.principal.name == "app"

    asyncio.run(run())


@pytest.mark.parametrize(("text", "error"), [("", NotAuthenticated), ("x", NotAuthenticated)])
def test_a_refusal_comes_late_and_nothing_is_taken_meanwhile(text: str, error: type[DanubeError]) -> None:
    async def run() -> None:
        door = Asking()
        client = Client(door)
        assert client.send(hello(text) + wire.control_frame(Kind.PING, None, 2)) == []
        assert not client.transport.reading and not client.transport.closed
        assert isinstance(await refusal(client), error)
        assert door.router.taken == []

    asyncio.run(run())


def test_a_principal_s_connections_are_bounded_and_freed() -> None:
    async def run() -> None:
        door = Asking()
        counts: Counter[str] = Counter()
        counted = SimpleNamespace(
            add=lambda name, amount: counts.update({name: amount}), total=lambda name: counts[name]
        )
        guests = Guests(counted, per_address=0, per_principal=LOCAL_PLACES, per_second=0)
        door.server._places, door.server._connections_max = Places(1_000, guests=guests), 100
        clients = [Client(door) for _ in range(LOCAL_PLACES)]
        for client in clients:
            (frame,) = client.send(hello(token()))
            assert frame.kind == Kind.WELCOME
        late, other = Client(door), Client(door)
        (frame,) = late.send(hello(token()))
        error = wire.decode_error(frame.body)
        assert isinstance(error, Overloaded) and error.facts["quota"] == "connections_per_principal"
        assert late.transport.closed
        (frame,) = other.send(hello(token("another")))
        assert frame.kind == Kind.WELCOME
        late.connection.connection_lost(None)
        clients[0].connection.connection_lost(None)
        assert counts["principal service_account:app"] == LOCAL_PLACES - 1
        (frame,) = Client(door).send(hello(token()))
        assert frame.kind == Kind.WELCOME

    asyncio.run(run())


def test_a_newer_token_of_the_same_principal() -> None:
    async def run() -> None:
        door = Asking()
        client = Client(door)
        client.send(hello(token(ttl_s=100)))
        (frame,) = client.send(wire.control_frame(Kind.AUTHENTICATE, Authenticate(token(ttl_s=5_000)), 2))
        assert wire.decode_result(frame.body) == 5_000
        door.now_us += 300_000_000
        door.server.sweep(0)
        assert client.take() == [] and not client.transport.closed

    asyncio.run(run())


def test_a_token_of_another_ends_the_connection() -> None:
    async def run() -> None:
        client = Client(Asking())
        client.send(hello(token()))
        client.send(wire.control_frame(Kind.AUTHENTICATE, Authenticate(token("other")), 2))
        assert client.transport.closed and client.connection.identity.principal.name == "app"

    asyncio.run(run())


@pytest.mark.parametrize(("groups", "judged"), [(("a",), 0), (("b",), 1)], ids=["the same", "others"])
def test_other_groups_of_a_newer_token_are_looked_at_at_once(groups: tuple[str, ...], judged: int) -> None:
    async def run() -> None:
        door = Asking()
        client = Client(door)
        identities = [Identity(Principal("user", "ada"), "token", groups=one) for one in (("a",), groups)]
        door.server.admission = cast(Any, SimpleNamespace(
            admit=lambda *_: identities.pop(0), now_us=lambda: NOW_US, revoked=lambda _: False,
        ))  # fmt: skip
        client.send(hello("first"))
        looks: list[int] = []
        door.server.router.judging = SimpleNamespace(again=lambda session: looks.append(1) or 1)
        client.send(wire.control_frame(Kind.AUTHENTICATE, Authenticate("second"), 2))
        assert len(looks) == judged and client.connection.identity.groups == groups

    asyncio.run(run())


def test_an_issuer_that_is_away_is_told_late_and_may_be_tried_again() -> None:
    async def run() -> None:
        door = Asking()
        client = Client(door)
        assert door.server.admission is not None
        away = IssuerUnavailable("read again")
        door.server.admission.credentials = cast(Any, SimpleNamespace(check=_raising(away)))
        assert client.send(hello("x")) == []
        error = await refusal(client)
        assert isinstance(error, IssuerUnavailable) and error.retryable

    asyncio.run(run())


def _raising(error: DanubeError) -> Callable[..., Any]:
    def check(*_: Any) -> Any:
        raise error

    return check


def test_the_end_is_announced_and_comes() -> None:
    async def run() -> None:
        door = Asking()
        client = Client(door)
        client.send(hello(token(ttl_s=1_000)))
        door.now_us += 800_000_000
        door.server.sweep(0)
        (frame,) = client.take()
        assert frame.kind == Kind.EXPIRING
        assert msgspec.msgpack.decode(frame.body, type=Expiring).seconds == 200
        door.now_us += 260_000_000
        door.server.sweep(0)
        assert isinstance(await refusal(client), TokenExpired)

    asyncio.run(run())


def test_without_admission_a_token_means_nothing() -> None:
    async def run() -> None:
        door = Asking()
        door.server.admission = None
        client = Client(door)
        (frame,) = client.send(hello("whatever"))
        assert msgspec.msgpack.decode(frame.body, type=Welcome).principal == ""
        (frame,) = client.send(wire.control_frame(Kind.AUTHENTICATE, Authenticate("x"), 2))
        assert wire.decode_result(frame.body) == 0

    asyncio.run(run())


def test_a_passed_connection_is_known_to_the_other_worker() -> None:
    async def run() -> None:
        identity = CREDENTIALS.check(token(), NOW_US)
        server: NativeServer = Asking().server
        connection = server.arrived(b"", 0, msgspec.msgpack.encode(identity))
        assert connection.identity == identity
        transport = FakeTransport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        assert not transport.closed and server.connections

    asyncio.run(run())


def test_a_connection_whose_key_went_while_it_was_passed_on_is_refused() -> None:
    async def run() -> None:
        server: NativeServer = Asking().server
        identity = CREDENTIALS.check(token(), NOW_US)._replace(key_fingerprint=b"another")
        connection = server.arrived(b"", 0, msgspec.msgpack.encode(identity))
        transport = FakeTransport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        (frame,) = frames_in(transport.written)
        assert isinstance(wire.decode_error(frame.body), NotAuthenticated)
        assert transport.closed and not server.connections

    asyncio.run(run())


def test_a_revoked_credential_ends_its_connection() -> None:
    async def run() -> None:
        door = Asking()
        client = Client(door)
        client.send(hello(token()))
        assert door.server.admission is not None
        door.server.admission.revoked = lambda identity: True  # type: ignore[method-assign]
        assert client.connection.judge_again() == 1
        assert isinstance(await refusal(client), NotAuthenticated)

    asyncio.run(run())


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(NativeServer.abort_entered, id="nobody is known any more"),
        pytest.param(NativeServer.silence, id="the lease is over"),
    ],
)
def test_a_connection_that_has_not_greeted_stays(end: Callable[[NativeServer], None]) -> None:
    async def run() -> None:
        door = Asking()
        greeted, silent = Client(door), Client(door)
        greeted.send(hello(token()))
        end(door.server)
        assert greeted.transport.aborted
        assert not silent.transport.closed
        (frame,) = silent.send(hello(token("late")))
        assert msgspec.msgpack.decode(frame.body, type=Welcome).principal == "service_account:late"

    asyncio.run(run())
