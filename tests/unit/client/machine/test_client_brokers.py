"""A client's sessions with the brokers of a cluster, driven by hand: who is asked, and what follows whom."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

import danube
import danube.sync
from danube.client.machine.address import Address
from danube.client.machine.publishing import Outgoing, PartitionProducer
from danube.client.machine.session import Session
from danube.client.machine.subscribing import PartitionConsumer
from danube.core.batch.columns import encode
from danube.core.dispatch.consumer_window import ConsumerWindow
from danube.core.protocol import native as wire
from danube.core.protocol.native import Frame, FrameFlag, Kind
from danube.errors import ConnectionFailed, DanubeError, OwnerMoved, Unavailable
from tests.fakes.broker import FakeBroker

SECOND_NS = 1_000_000_000
ONE, TWO = "one:6660", "two:6660"


class Site:
    """Home, and the owners that it was told to dial; the test speaks for the brokers."""

    def __init__(self) -> None:
        self.time_ns = 0
        self.home = Session(now_ns=lambda: self.time_ns, jitter=lambda: 1.0)
        self.dialled: list[tuple[Session, Address]] = []
        self.dropped: list[Session] = []
        self.home.brokers.dial = lambda session, address: self.dialled.append((session, address))
        self.home.brokers.drop = self.dropped.append
        self.connect(self.home, "home:6660")

    def connect(self, session: Session, address: str = "") -> None:
        session.connected()
        self.sent(session)
        feed(session, wire.control_frame(Kind.WELCOME, wire.Welcome(address=address)))

    def sent(self, session: Session) -> list[tuple[Frame, bytes]]:
        stream = b"".join(session.take_output())
        frames = wire.FrameDecoder().frames(stream, 0, len(stream))
        return [(one, stream[one.start : one.end]) for one in frames]

    def asked(self, session: Session, kind: Kind) -> Frame:
        """The request of this kind that was sent last."""
        return [frame for frame, _ in self.sent(session) if frame.kind == kind][-1]

    def pass_time(self, seconds: float) -> None:
        self.time_ns += int(seconds * SECOND_NS)
        for session in [self.home, *self.home.brokers.owners]:
            session.on_time()

    def producer(self) -> PartitionProducer:
        producer = PartitionProducer(self.home, "p", "/default/t", 0, 30 * SECOND_NS)
        producer.start()
        return producer


def feed(session: Session, *frames: bytes) -> None:
    stream = b"".join(frames)
    session.received(memoryview(bytearray(stream)), 0, len(stream))


def refuse(session: Session, frame: Frame, error: DanubeError) -> None:
    feed(session, wire.error_frame(error, frame.correlation))


def moved(address: str) -> OwnerMoved:
    return OwnerMoved("it is served elsewhere", address=address)


def opened(session: Session, frame: Frame, epoch: int = 1, next_sequence: int = 0) -> None:
    body = wire.ProducerOpened(7, epoch, next_sequence)
    feed(session, wire.control_frame(Kind.PRODUCER_OPENED, body, frame.correlation, frame.handle))


def send(producer: PartitionProducer, payload: bytes) -> Outgoing:
    batch = encode([payload], producer_name="p", publish_time_us=1)
    outgoing = Outgoing(producer, batch)
    producer.send(outgoing, 0, 0, producer.next_sequence)
    return outgoing


def test_a_producer_goes_where_it_is_sent_and_sends_again_what_was_not_answered() -> None:
    site = Site()
    producer = site.producer()
    refuse(site.home, site.asked(site.home, Kind.OPEN_PRODUCER), moved(ONE))
    [(one, address)] = site.dialled
    assert address == Address("one", 6660) and producer.session is one
    site.connect(one)
    site.pass_time(0)
    opened(one, site.asked(one, Kind.OPEN_PRODUCER))
    first, second = send(producer, b"a"), send(producer, b"b")
    frames = [frame for frame, _ in site.sent(one) if frame.kind == Kind.PUBLISH]
    answer = wire.published_frame(frames[0].correlation, frames[0].handle, 0, 1, 1, 1)
    feed(one, answer)
    assert first.settled and not second.settled
    feed(one, wire.error_frame(moved(TWO), 0, frames[0].handle))  # it moves
    two = site.dialled[1][0]
    site.connect(two)
    site.pass_time(0.1)
    frame = site.asked(two, Kind.OPEN_PRODUCER)
    opened(two, frame, next_sequence=2)  # the second was stored, only its answer was lost
    [again] = [one for one, _ in site.sent(two) if one.kind == Kind.PUBLISH]
    feed(
        two,
        wire.published_frame(again.correlation, again.handle, 1, 2, 1, 1, int(FrameFlag.DUPLICATE)),
    )
    assert second.value.offset == 1 and second.value.duplicate
    assert not one.in_use and two.in_use


def test_a_lost_owner_sends_everything_home_and_home_says_where_it_is() -> None:
    site = Site()
    producer = site.producer()
    refuse(site.home, site.asked(site.home, Kind.OPEN_PRODUCER), moved(ONE))
    one = site.dialled[0][0]
    site.connect(one)
    site.pass_time(0)
    opened(one, site.asked(one, Kind.OPEN_PRODUCER))
    outgoing = send(producer, b"a")
    one.disconnected(ConnectionFailed("the host is gone"))
    site.home.brokers.lost(one, ConnectionFailed("the host is gone"))
    assert producer.session is site.home and site.dropped == [one] and one.failure is not None
    site.pass_time(0.5)
    frame = site.asked(site.home, Kind.OPEN_PRODUCER)
    refuse(site.home, frame, Unavailable("nobody owns it"))
    assert producer.session is site.home and not outgoing.settled
    site.pass_time(0.5)
    refuse(site.home, site.asked(site.home, Kind.OPEN_PRODUCER), moved("home:6660"))
    assert producer.session is site.home and len(site.dialled) == 1, "home is not dialled a second time"


def test_a_consumer_keeps_its_acks_on_the_way() -> None:
    site = Site()
    body = wire.Subscribe("/default/t", "s", "c", credit_records=10, credit_bytes=1_000)
    consumer = PartitionConsumer(site.home, body, 0, True, ConsumerWindow(10, least=10, most=10))
    consumer.start()
    frame = site.asked(site.home, Kind.SUBSCRIBE)
    feed(site.home, wire.control_frame(Kind.SUBSCRIBED, wire.Subscribed(), frame.correlation, frame.handle))
    consumer.ack(4)
    feed(site.home, wire.error_frame(moved(ONE), 0, frame.handle))
    one = site.dialled[0][0]
    site.connect(one)
    site.pass_time(0.1)
    frame = site.asked(one, Kind.SUBSCRIBE)
    feed(one, wire.control_frame(Kind.SUBSCRIBED, wire.Subscribed(), frame.correlation, frame.handle))
    assert [frame.kind for frame, _ in site.sent(one)] == [Kind.ACK]


def test_a_broker_that_is_alone_is_never_left() -> None:
    site = Site()
    producer = site.producer()
    refuse(site.home, site.asked(site.home, Kind.OPEN_PRODUCER), OwnerMoved("it started again"))
    site.pass_time(1)
    assert producer.session is site.home and not site.dialled
    assert site.asked(site.home, Kind.OPEN_PRODUCER)


@pytest.mark.parametrize("address", ["", "no port:x", 7, "a/b"])
def test_an_address_that_is_none_leaves_everything_at_home(address: Any) -> None:
    site = Site()
    assert site.home.brokers.after(site.home, OwnerMoved("there", address=address)) is site.home


def test_a_lookup_tells_owners_and_other_brokers() -> None:
    site = Site()
    view = wire.TopicView("/default/t", 1, ["a", "b", "c"], True, "written", 1, ["", ONE], [ONE, TWO])
    brokers = site.home.brokers
    brokers.learn(view)
    assert brokers.serving(view, 0) is site.home and brokers.serving(view, 2) is site.home
    assert brokers.serving(view, 1) is site.dialled[0][0]
    assert brokers.known == [Address("one", 6660), Address("two", 6660)]


def view_of(*owners: str) -> wire.TopicView:
    names = [f"/default/t-part-{index}" for index in range(len(owners))]
    return wire.TopicView("/default/t", 1, names, True, "written", 1, list(owners), [ONE, TWO])


def test_what_is_not_used_is_dropped_and_all_ends_with_home() -> None:
    site = Site()
    brokers = site.home.brokers
    one = brokers.at(ONE)
    site.connect(one)
    brokers.learn(view_of(TWO))
    two = brokers.serving(view_of(TWO), 0)
    assert site.dropped == [one] and brokers.owners == [two]
    site.home.fail(ConnectionFailed("over"))
    assert two.failure is not None and site.dropped == [one, two] and not brokers.owners
    assert brokers.at(ONE) is site.home


def test_an_owner_that_was_idle_serves_one_partition_while_another_owner_is_dialled_for_the_next() -> None:
    site = Site()
    brokers = site.home.brokers
    one = brokers.at(ONE)
    site.connect(one)
    view = view_of(ONE, TWO)
    brokers.learn(view)
    assert brokers.serving(view, 0) is one
    assert brokers.serving(view, 1) is site.dialled[-1][0] is not one
    assert site.dropped == [] and one.failure is None


def test_home_is_looked_for_behind_the_broker_where_it_was() -> None:
    """That one may have let go of its clients because it reaches no other broker."""
    brokers = Site().home.brokers
    one, two, three = (Address(name, 6660) for name in ("one", "two", "three"))
    assert brokers.homes([one]) == [one]
    brokers.found(one)
    assert brokers.homes([one]) == [one], "alone"
    brokers.learn(wire.TopicView("/default/t", 1, ["t"], True, "written", 1, [], [ONE, TWO, "three:6660"]))
    assert brokers.homes([one]) == [two, three, one]
    brokers.found(three)
    assert brokers.homes([one]) == [one, two, three]
    brokers.found(two)
    assert brokers.homes([one]) == [three, one, two]


@pytest.fixture
def beside_a_silent_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBroker]:
    """A broker that names another one: it takes connections, as a stopped process does, and says nothing."""
    monkeypatch.setattr("danube.client.machine.brokers.SILENCE_NS", SECOND_NS // 4)
    with FakeBroker() as fake, socket.create_server(("127.0.0.1", 0)) as silent:
        lookup = fake.lookup

        def naming(asked: wire.Lookup) -> wire.TopicView:
            view = lookup(asked)
            view.brokers = [fake.url.partition("://")[2], f"127.0.0.1:{silent.getsockname()[1]}"]
            return view

        monkeypatch.setattr(fake, "lookup", naming)
        yield fake


def test_a_broker_that_never_greets_is_left_as_early_as_one_that_falls_silent(
    beside_a_silent_one: FakeBroker,
) -> None:
    fake = beside_a_silent_one
    with danube.sync.connect(fake.url) as client, client.producer("/default/t") as producer:
        producer.send(b"a")
        fake.drop_connections()
        began_s = time.monotonic()
        producer.send(b"b")
        assert 0.4 < time.monotonic() - began_s < 5.0
    assert fake.payloads("/default/t") == [b"a", b"b"]


def test_the_asyncio_client_leaves_it_as_early(beside_a_silent_one: FakeBroker) -> None:
    fake = beside_a_silent_one

    async def told() -> float:
        async with danube.connect(fake.url) as client, client.producer("/default/t") as producer:
            await producer.send(b"a")
            fake.drop_connections()
            began_s = time.monotonic()
            await producer.send(b"b")
            return time.monotonic() - began_s

    assert 0.4 < asyncio.run(told()) < 5.0
    assert fake.payloads("/default/t") == [b"a", b"b"]


CONNECT_TIMEOUT_S = 0.25
CONNECTS = [
    pytest.param(danube.sync.connect, id="blocking"),
    pytest.param(danube.connect, id="asyncio"),
]


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a socket that takes connections, as a stopped process does, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def send_one(client: Any) -> None:
    if isinstance(client, danube.sync.Client):
        with client, client.producer("/default/t") as producer:
            producer.send(b"a")
    else:
        async with client, client.producer("/default/t") as producer:
            await producer.send(b"a")


@pytest.mark.parametrize("connect", CONNECTS)
def test_the_time_to_connect_bounds_the_greeting_as_well(connect: Any, silent: str) -> None:
    client = connect(f"danube://{silent}", connect_timeout=CONNECT_TIMEOUT_S)
    began_s = time.monotonic()
    with pytest.raises(ConnectionFailed, match="did not greet"):
        asyncio.run(send_one(client))
    assert CONNECT_TIMEOUT_S <= time.monotonic() - began_s < 5.0


@pytest.mark.parametrize("connect", CONNECTS)
def test_it_bounds_the_greeting_of_an_owner(
    connect: Any, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("danube.client.machine.brokers.SILENCE_NS", 10 * SECOND_NS)
    with FakeBroker() as fake:
        lookup = fake.lookup

        def naming(asked: wire.Lookup) -> wire.TopicView:
            view = lookup(asked)
            view.owners = [silent]
            return view

        monkeypatch.setattr(fake, "lookup", naming)
        client = connect(fake.url, connect_timeout=CONNECT_TIMEOUT_S)
        began_s = time.monotonic()
        asyncio.run(send_one(client))
        assert CONNECT_TIMEOUT_S <= time.monotonic() - began_s < 5.0
        assert fake.payloads("/default/t") == [b"a"]
