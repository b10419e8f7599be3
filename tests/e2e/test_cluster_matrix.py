"""The doors of three brokers obey the matrix: at the owner of the topics, and at a broker that owns none.

What is asked, and the reviewed file, are those of test_authority_doors.py.  Besides its callers there are
those who say that they are a broker: by a certificate, by a header, or by what brokers tell each other.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from danube.core.protocol import native as wire
from danube.core.protocol.native import FrameDecoder, Kind
from danube.core.security.operations import ADMIN_ROWS
from danube.errors import ConnectionFailed, NotAuthenticated
from danube.host.tls import PEER_NAME, TlsFiles
from danube.server.proto import DanubeAdmin_pb2 as admin_pb
from tests.broker_process import BrokerProcess
from tests.e2e.authority_cluster import NAMES, ClusterSite, ask, token_of
from tests.e2e.authority_matrix import (
    NAMED,
    Cell,
    build,
    grpc_cells,
    grpc_marks,
    native_cells,
    native_marks,
    of_port,
    told,
)
from tests.e2e.authority_site import token
from tests.e2e.grpc_parts import pb
from tests.golden.authority_cases import TARGETS
from tests.grpc_client import Disconnected

TOPICS = [target.topic for target in (TARGETS[0], TARGETS[2])]
BROKER_HEADERS = [
    ("x-danube-internal-broker", "1"),
    ("x-danube-forwarded", "1"),
    ("x-danube-on-behalf", "user:root"),
]
ANSWER_S = 60.0


class Site(ClusterSite):
    """The site of the matrix."""

    doors: dict[str, BrokerProcess]

    def build(self) -> None:
        with self.administrator() as client:
            build(partial(ask, client), client.admin.create_topic)
        owners = [self.cluster.owner(topic) for topic in TOPICS]
        another = next(broker for broker in self.brokers if broker not in owners)
        self.doors = {"owner": owners[0], "another": another}
        self.wait_known()

    def topics(self) -> list[str]:
        with self.administrator() as client:
            return sorted(one.topic for one in client.admin.list_topics())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("cluster-matrix"))
    with made.cluster:
        made.build()
        yield made
        assert made.topics() == sorted(TOPICS), "what was refused was carried out"


@pytest.fixture(params=["owner", "another"])
def door(request: pytest.FixtureRequest, site: Site) -> BrokerProcess:
    return site.doors[request.param]


# -- the callers of the matrix ------------------------------------------------------------------------


@pytest.mark.parametrize("caller", NAMED)
def test_the_native_door_obeys_the_matrix(site: Site, door: BrokerProcess, caller: str) -> None:
    wanted = native_cells(caller)
    with site.connect(door, token_of(caller)) as client:
        assert told(wanted, native_marks(client, wanted)) == []


@pytest.mark.parametrize("caller", [*NAMED, "nobody"])
def test_the_grpc_doors_obey_the_matrix(site: Site, door: BrokerProcess, caller: str) -> None:
    credential = "" if caller == "nobody" else token_of(caller)
    assert at_grpc_doors(site, door, caller, credential) == []


def at_grpc_doors(
    site: Site,
    door: BrokerProcess,
    caller: str,
    credential: str,
    shown: TlsFiles | None = None,
    fields: Sequence[tuple[str, str]] = (),
) -> list[str]:
    """Where the two gRPC ports say something else than the file."""
    wanted, wrong = grpc_cells(caller), []
    for address, administration in ((door.admin_address, True), (door.grpc_address, False)):
        ours = of_port(wanted, administration=administration)
        with site.calls(address, credential, shown) as calls:
            calls.fields += fields
            wrong += told(ours, grpc_marks(calls, ours))
    return wrong


def test_lookups_tell_that_the_owner_speaks_tls(site: Site, door: BrokerProcess) -> None:
    """The official Rust client speaks TLS to https alone."""
    with site.calls(door.grpc_address, token_of("admin")) as calls:
        found = calls.unary("Discovery/TopicLookup", pb.TopicLookupRequest(request_id=1, topic=TOPICS[0]))
    assert found.connect_url == found.broker_url == f"https://{site.doors['owner'].grpc_address}"
    with site.calls(door.admin_address, token_of("admin")) as calls:
        listed = calls.admin("BrokerAdmin/ListBrokers", admin_pb.Empty()).brokers
    assert {one.broker_addr for one in listed} == {f"https://{one.grpc_address}" for one in site.brokers}
    assert {one.admin_addr for one in listed} == {f"https://{one.admin_address}" for one in site.brokers}


# -- without a credential -----------------------------------------------------------------------------


class Stranger:
    """A connection at the native door that sends what it likes."""

    def __init__(self, site: Site, door: BrokerProcess, shown: TlsFiles | None = None) -> None:
        context = ssl.create_default_context(cafile=site.server.ca_file)
        if shown is not None:
            context.load_cert_chain(shown.cert_file, shown.key_file)
        plain = socket.create_connection(("127.0.0.1", door.port), ANSWER_S)
        self._socket = context.wrap_socket(plain, server_hostname="127.0.0.1")

    def send(self, frames: Sequence[bytes]) -> None:
        self._socket.sendall(b"".join(frames))

    def answers(self) -> list[str]:
        """All that comes until the broker closes the connection: kinds of frames, and names of errors."""
        received = bytearray()
        while data := self._socket.recv(1 << 16):
            received += data
        self._socket.close()
        view = memoryview(received)
        found = []
        for frame in FrameDecoder().frames(view, 0, len(view)):
            error = frame.kind == Kind.ERROR
            body = view[frame.start : frame.end]
            found.append(type(wire.decode_error(body)).__name__ if error else Kind(frame.kind).name)
        return found


def frames_of(cells: Sequence[Cell]) -> list[bytes]:
    found = []
    for number, cell in enumerate(cells, 1):
        kind = Kind[cell.row.name] if cell.row.name in Kind.__members__ else Kind.ADMIN
        found.append(wire.control_frame(kind, cell.request, number, 0 if kind is Kind.LOOKUP else number))
    return found


def test_nothing_is_carried_out_for_who_shows_no_credential(site: Site, door: BrokerProcess) -> None:
    cells = native_cells("nobody")
    assert {cell.mark for cell in cells} == {"?"}
    strangers = []
    for row in {cell.row.name: None for cell in cells}:
        stranger = Stranger(site, door)
        asked = frames_of([cell for cell in cells if cell.row.name == row])
        stranger.send([wire.control_frame(Kind.HELLO, wire.Hello(client="nobody")), *asked])
        strangers.append((row, stranger))
    told = {row: one.answers() for row, one in strangers}
    assert {row: said for row, said in told.items() if said != ["NotAuthenticated"]} == {}


def test_the_first_frame_is_a_greeting(site: Site, door: BrokerProcess) -> None:
    stranger = Stranger(site, door)
    stranger.send(frames_of(native_cells("nobody")[:3]))
    assert stranger.answers() == ["ProtocolError"]


# -- who says that it is another broker ---------------------------------------------------------------


def test_a_certificate_that_names_a_node_opens_no_door_of_clients(site: Site, door: BrokerProcess) -> None:
    pretender = site.servers.sign("pretender", "URI:danube:node:1")
    with pytest.raises(NotAuthenticated):
        site.connect(door, "", pretender).open()
    assert at_grpc_doors(site, door, "nobody", "", pretender) == []


def test_a_broker_s_own_certificate_opens_no_door_of_clients(site: Site, door: BrokerProcess) -> None:
    with pytest.raises(ConnectionFailed):
        site.connect(door, "", site.node).open()
    for address in (door.admin_address, door.grpc_address):
        with pytest.raises((OSError, Disconnected)), site.calls(address, "", site.node) as calls:
            calls.wait(lambda: False, ANSWER_S)


def test_no_token_names_a_broker(site: Site, door: BrokerProcess) -> None:
    with pytest.raises(NotAuthenticated):
        site.connect(door, token("1", "broker_internal")).open()


@pytest.mark.parametrize("caller", ["nobody", "viewer"])
def test_headers_make_nobody_a_broker(site: Site, door: BrokerProcess, caller: str) -> None:
    credential = "" if caller == "nobody" else token_of(caller)
    assert at_grpc_doors(site, door, caller, credential, fields=BROKER_HEADERS) == []


@pytest.mark.parametrize("claims", [{"forwarded": True}, {"on_behalf": "user:root"}], ids=str)
@pytest.mark.parametrize("caller", ["other", "admin"])
def test_what_brokers_tell_each_other_is_refused_from_clients(
    site: Site, door: BrokerProcess, caller: str, claims: dict[str, Any]
) -> None:
    operations = [cell for cell in native_cells(caller) if cell.row in ADMIN_ROWS]
    with site.connect(door, token_of(caller)) as client:
        assert set(native_marks(client, operations, **claims)) == {"-"}


def test_the_door_of_brokers_is_closed_without_their_certificate(site: Site, door: BrokerProcess) -> None:
    pretender = site.servers.sign("pretender-at-peers", f"URI:danube:node:1,{NAMES},DNS:{PEER_NAME}")
    for shown in (None, pretender):
        with pytest.raises(ConnectionFailed):
            site.connect_as_broker(door, shown).open()


def test_another_broker_may_ask_all(site: Site, door: BrokerProcess) -> None:
    cells = native_cells("broker")
    assert {cell.mark for cell in cells} == {"+"}
    with site.connect_as_broker(door, site.node) as client:
        assert told(cells, native_marks(client, cells)) == []


@pytest.mark.parametrize("caller", NAMED)
def test_another_broker_asks_for_who_asked_it(site: Site, door: BrokerProcess, caller: str) -> None:
    operations = [cell for cell in native_cells(caller) if cell.row in ADMIN_ROWS]
    with site.connect_as_broker(door, site.node) as client:
        marks = native_marks(client, operations, forwarded=True, on_behalf=f"user:{caller}")
    assert told(operations, marks) == []
