"""What is taken back ends on three brokers, also where a controller was killed a moment ago, and stays away.

Each broker owns a topic of its own.  A principal has a native producer, a native consumer and a gRPC stream
open on each of them, all with one credential.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from danube import sync
from danube.core.security.principals import Principal
from danube.errors import Unavailable
from danube.host import clock
from danube.server.proto import DanubeAdmin_pb2 as admin_pb
from tests.broker_process import BrokerProcess, wait_until
from tests.e2e.authority_cluster import ClusterSite, ask, bind, token_of
from tests.e2e.authority_site import CREDENTIALS, ENDS, ended
from tests.e2e.grpc_parts import DENIED, UNAUTHENTICATED, UNAVAILABLE, DanubeCalls
from tests.grpc_client import Disconnected, GrpcError, Stream

GENEROUS_S = 60.0  # a right ends within 5 s; a slow machine, or one without a controller, gets more
TOPICS_MAX = 12
CUT_OFF = "this broker cannot tell who may do what"
CONTROLLER = "danube-controller"[:15].removeprefix("danube-")  # as far as the kernel keeps a name


class Site(ClusterSite):
    """The cluster, with a topic of each broker."""

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.topics: list[str] = []  # by the places of the brokers
        self.taken: dict[str, str] = {}  # credentials by their principals

    def make_topics(self) -> None:
        owned: dict[int, str] = {}
        with self.administrator() as client:
            for number in range(TOPICS_MAX):
                topic = f"/default/taken-{number}"
                client.admin.create_topic(topic)
                owned.setdefault(self.brokers.index(self.cluster.owner(topic)), topic)
                if len(owned) == len(self.brokers):
                    break
        self.topics = [owned[place] for place in range(len(self.brokers))]

    def leader(self) -> int:
        """The place of the broker whose controller decides."""
        with self.administrator() as client:
            decides = int(ask(client, "deciding_broker")["broker_id"])
        return self.brokers.index(self.cluster.broker(decides))

    def kill_controller(self, place: int) -> Callable[[], bool]:
        """Kill it now; return a test of whether its successor runs."""
        broker = self.brokers[place]
        killed = broker.processes()[CONTROLLER]
        os.kill(killed, signal.SIGKILL)
        return lambda: broker.processes().get(CONTROLLER, killed) != killed


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("taken-back"))
    with made.cluster:
        made.make_topics()
        yield made


class Open(NamedTuple):
    """What is open on one topic."""

    client: sync.Client
    producer: sync.Producer
    consumer: sync.Consumer
    calls: DanubeCalls
    stream: Stream


def opened(site: Site, place: int, name: str, credential: str) -> Open:
    """All handles on the topic of one broker; the native client came by another broker."""
    topic = site.topics[place]
    client = site.connect(site.brokers[(place + 1) % 3], credential, timeout_s=GENEROUS_S).open()
    producer = client.producer(topic).open()
    consumer = client.consumer(topic, f"native-{name}", start="latest").open()
    calls = site.calls(site.brokers[place].grpc_address, credential)
    stream = calls.receive(calls.subscribe(topic, f"grpc-{name}"))
    producer.send(b"before")
    assert consumer.receive(timeout=GENEROUS_S).payload == b"before"
    assert stream.next(GENEROUS_S).payload == b"before"
    return Open(client, producer, consumer, calls, stream)


def stream_ended(held: Open) -> bool:
    """Whether the stream is over: by a refusal, or with its broker's connections while that has no lease."""
    try:
        held.calls.receive_some(0.05)
    except Disconnected:
        return True
    return held.stream.ended


# -- what is taken back -------------------------------------------------------------------------------

Take = Callable[[Site, str], None]
TAKEN: dict[str, Take] = {
    "token": lambda site, name: site.ask("revoke", kind="token", value=f"id-{name}"),
    "role": lambda site, name: site.ask("put_role", name=f"role-{name}", permissions=["Lookup"]),
    "binding": lambda site, name: site.ask(
        "delete_binding", id=name, scope="namespace", resource_name="default"
    ),
    "key": lambda site, name: site.ask("delete_api_key", id=f"key-{name}"),
}


def credential_of(site: Site, kind: str, name: str) -> str:
    if kind == "key":
        with site.administrator() as client:
            return str(client.admin.create_api_key(f"service_account:{name}", name=f"key-{name}")["key"])
    principal = Principal("service_account", name)
    return CREDENTIALS.sign(principal, 3_600, clock.wall_us(), jti=f"id-{name}")


def given(site: Site, kind: str, name: str) -> str:
    """The credential of a principal that may publish and consume, which all brokers know."""
    site.ask("put_role", name=f"role-{name}", permissions=["Produce", "Consume", "Lookup"])
    site.ask(
        "put_binding", id=name, principal_type="service_account", principal_name=name,
        role_names=[f"role-{name}"], scope="namespace", resource_name="default",
    )  # fmt: skip
    credential = credential_of(site, kind, name)
    site.wait_known()
    return credential


def wait_all_ended(held: list[Open]) -> None:
    tests: dict[str, Callable[[Open], bool]] = {
        "it has a stream": stream_ended,
        "it publishes": lambda one: ended(lambda: one.producer.send(b"refused soon")),
        "it receives": lambda one: ended(lambda: one.consumer.receive(timeout=0.05)),
    }
    for what, test in tests.items():
        for one in held:
            wait_until(partial(test, one), GENEROUS_S, what)


def nothing_came_later(site: Site, held: list[Open]) -> None:
    """What is published afterwards reaches none of these handles."""
    before = [len(one.stream.messages) for one in held]
    with site.administrator() as client:
        for topic in site.topics:
            with client.producer(topic) as producer:
                producer.send(b"after")
    for one, count in zip(held, before, strict=True):
        assert ended(lambda one=one: one.consumer.receive(timeout=0.5)), "a record was delivered afterwards"
        assert stream_ended(one) and len(one.stream.messages) == count


def refused_everywhere(site: Site, name: str, credential: str) -> bool:
    """Whether each broker refuses it, by the native door and by gRPC; False where one cannot say now."""
    return all(refused(site, place, name, credential) for place in range(3))


def refused(site: Site, place: int, name: str, credential: str) -> bool:
    broker, topic, said = site.brokers[place], site.topics[place], []
    try:
        with site.connect(broker, credential, timeout_s=5) as client:
            client.producer(topic).open()
        raise AssertionError(f"{name} publishes at broker {place} again")
    except ENDS:
        said.append(True)
    except Unavailable:
        said.append(False)
    try:
        with site.calls(broker.grpc_address, credential) as calls:
            calls.subscribe(topic, f"again-{name}")
        raise AssertionError(f"{name} subscribes at broker {place} again")
    except GrpcError as error:
        assert error.code in (DENIED, UNAUTHENTICATED, UNAVAILABLE), error
        said.append(error.code != UNAVAILABLE)
    except (OSError, Disconnected):
        said.append(False)
    return all(said)


def wait_refused(site: Site, name: str, credential: str) -> None:
    wait_until(lambda: refused_everywhere(site, name, credential), GENEROUS_S, f"{name} is refused by all")


def close(held: list[Open]) -> None:
    for one in held:
        one.client.close()
        one.calls.close()


@pytest.mark.parametrize("kind", TAKEN)
def test_everything_open_ends_on_every_broker(site: Site, kind: str) -> None:
    """One broker is asked to take it back; the handles are on all three."""
    name = f"quiet-{kind}"
    credential = given(site, kind, name)
    held = [opened(site, place, name, credential) for place in range(3)]
    TAKEN[kind](site, name)
    wait_all_ended(held)
    nothing_came_later(site, held)
    wait_refused(site, name, credential)
    close(held)


# -- beside controllers that are killed ---------------------------------------------------------------

KILLED: dict[str, Callable[[Site], list[int]]] = {
    "token": lambda site: [site.leader()],
    "role": lambda site: [0],  # of the broker that is asked
    "binding": lambda site: [1],
    "key": lambda site: [0, 1, 2],
}


@pytest.mark.parametrize("kind", TAKEN)
def test_everything_open_ends_where_a_controller_was_just_killed(site: Site, kind: str) -> None:
    """Its successor brings nothing back, nor do those of all controllers, killed once it has ended."""
    name = f"killed-{kind}"
    credential = given(site, kind, name)
    held = [opened(site, place, name, credential) for place in range(3)]
    replaced = [site.kill_controller(place) for place in KILLED[kind](site)]
    TAKEN[kind](site, name)
    wait_all_ended(held)
    stays_refused(site, {name: credential}, lambda: all(one() for one in replaced))
    again = [site.kill_controller(place) for place in range(3)]
    stays_refused(site, {name: credential}, lambda: all(one() for one in again))
    nothing_came_later(site, held)
    site.taken[name] = credential
    close(held)


def stays_refused(site: Site, taken: dict[str, str], condition: Callable[[], bool]) -> None:
    """Ask until the condition holds, and once more when all brokers have heard of something that is new."""
    until_s = time.monotonic() + GENEROUS_S
    while not condition():
        assert time.monotonic() < until_s, "a controller is not replaced"
        for name, credential in taken.items():
            refused_everywhere(site, name, credential)
    site.wait_known()
    for name, credential in taken.items():
        wait_refused(site, name, credential)


def test_nothing_comes_back_with_brokers_that_were_killed(site: Site) -> None:
    """First one of them returns to the others, then all return together."""
    assert len(site.taken) == len(TAKEN)
    for killed in ([site.brokers[2]], site.brokers):
        for broker in killed:
            broker.kill()
        site.cluster.start(killed)
        stays_refused(site, site.taken, lambda: True)


def test_a_broker_that_is_cut_off_lets_in_super_admins_alone(site: Site) -> None:
    """It does not hear what is taken back, so it believes for some seconds only what it knows of rights."""
    with site.administrator() as client:
        bind(client, "looks", "viewer", "cluster", "")
    site.wait_known()
    alone, others = site.brokers[2], site.brokers[:2]
    for broker in others:
        broker.kill()
    answered: list[DanubeCalls] = []
    wait_until(lambda: _looks(site, alone, answered) == CUT_OFF, GENEROUS_S, "it lets nobody in")
    with pytest.raises(Disconnected):  # who was let in the moment before
        answered[-1].wait(lambda: False, GENEROUS_S)
    with pytest.raises(Unavailable):
        site.connect(alone, token_of("looks"), timeout_s=2).open()
    with site.administrator(alone) as client:
        assert ask(client, "status")
    site.cluster.start(others)
    wait_until(lambda: _looks(site, alone, answered) == "", GENEROUS_S, "it lets in whom it let in before")
    answered[-1].close()


def _looks(site: Site, broker: BrokerProcess, answered: list[DanubeCalls]) -> str:
    """What a viewer is told at the administration port; "" for an answer, and the connection is kept."""
    try:
        calls = site.calls(broker.admin_address, token_of("looks"))
    except OSError as error:
        return str(error)
    try:
        calls.admin("BrokerAdmin/ListNamespaces", admin_pb.Empty())
    except (GrpcError, Disconnected) as error:
        calls.close()
        assert isinstance(error, Disconnected) or error.code == UNAVAILABLE, error
        return getattr(error, "message", "").partition(":")[0] or "disconnected"
    for earlier in answered:
        earlier.close()
    answered[:] = [calls]
    return ""
