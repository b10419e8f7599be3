"""Headers that claim something about the caller change no byte of any answer, on both gRPC ports.

Every unary method is called as it is, again, and with headers that name brokers, other principals, addresses
and certificates, and with the administrator's token in every place but its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
from google.protobuf.message_factory import GetMessageClass

from danube.core.security.operations import GRPC, Effect, Row
from danube.server.proto import DanubeAdmin_pb2, DanubeApi_pb2, SchemaRegistry_pb2, health_pb2
from danube.server.proto.pool import POOL
from tests.broker_process import Brokers
from tests.e2e.authority_matrix import ASKED_AT_ONCE, SLOW_S, build
from tests.e2e.authority_site import ENVIRONMENT, Site, root, token
from tests.e2e.grpc_parts import DanubeCalls
from tests.golden.authority_cases import TARGETS, grpc_request
from tests.grpc_client import Stream

MODULES = (DanubeAdmin_pb2, DanubeApi_pb2, SchemaRegistry_pb2, health_pb2)
Fields = list[tuple[str, str]]
WHO: Final = ("user:root", "broker_internal:broker")
NAMES: Final = (
    "x-danube-internal-broker", "x-danube-internal", "x-danube-broker", "x-danube-principal",
    "x-danube-identity", "x-danube-on-behalf", "x-danube-forwarded", "x-danube-groups", "x-danube-roles",
    "x-danube-token", "x-danube-source", "danube-internal-broker", "principal", "on-behalf", "on-behalf-of",
    "x-principal", "x-user", "x-remote-user", "remote-user", "x-authenticated-user", "x-auth-request-user",
    "x-auth-request-groups", "x-webauth-user", "x-goog-authenticated-user-email", "x-forwarded-user",
    "x-forwarded-groups", "x-forwarded-email", "x-api-key", "api-key", "x-auth-token", "token",
    "proxy-authorization", "x-authorization", "x-original-authorization", "cookie",
    "x-client-cert", "x-ssl-client-cert", "x-ssl-client-verify", "ssl-client-verify", "ssl-client-s-dn",
    "x-ssl-client-s-dn", "x-client-verify",
)  # fmt: skip
PLACES: Final = (
    ("x-forwarded-for", "127.0.0.1"), ("x-forwarded-host", "localhost:1"), ("x-forwarded-proto", "https"),
    ("x-real-ip", "::1"), ("forwarded", "for=127.0.0.1;by=broker;host=localhost:1;proto=https"),
    ("via", "1.1 broker"), ("x-original-url", "/grpc.health.v1.Health/Check"), ("x-host", "localhost:1"),
    ("x-forwarded-client-cert", 'Subject="CN=broker";URI=spiffe://danube/broker/1'),
    ("x-envoy-internal", "true"), ("x-envoy-external-address", "127.0.0.1"), ("x-cluster-client-ip", "::1"),
)  # fmt: skip


def forgeries() -> list[Fields]:
    """Sets of headers, each sent with every call."""
    given = root()
    said = (*WHO, f"Bearer {given}")
    return [*([(name, text) for name in NAMES] for text in said), [*PLACES, ("cookie", f"token={given}")]]


def unary() -> list[Row]:
    """The rows of all unary methods, those first that change the least."""
    methods = [
        f"/{service.full_name}/{method.name}"
        for module in MODULES
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if not (method.client_streaming or method.server_streaming)
    ]
    return sorted((GRPC[name] for name in methods), key=lambda row: [*Effect].index(row.effect))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    brokers = Brokers(tmp_path_factory.mktemp("headers"))
    patient = ENVIRONMENT | {"DANUBE_AUTH__FAILURES_PER_MINUTE": "100000"}
    made = Site(lambda **options: brokers.make(**{**options, "environment": patient}), workers=1)
    try:
        build(made.ask, made.admin.admin.create_topic)
        yield made
    finally:
        made.close()
        brokers.kill()


class Bytes:
    """A message that is left as it came."""

    FromString = bytes


class Asking:
    """One caller's connections to both ports."""

    def __init__(self, site: Site, credential: str) -> None:
        self.fields = [("authorization", f"Bearer {credential}")] if credential else []
        self._data = DanubeCalls(site.process.grpc_address)
        self._administration = DanubeCalls(site.process.admin_address)
        for calls in (self._data, self._administration):  # greeted, before either waits for its turn
            calls.call("/grpc.health.v1.Health/Check", b"", Bytes)

    def start(self, row: Row, forged: Fields) -> Stream:
        calls = self._administration if row.name.startswith("/danube_admin.") else self._data
        calls.fields = [*self.fields, *forged]
        request = grpc_request(row, TARGETS[0], {})
        if request is None:
            service, _, method = row.name[1:].partition("/")
            request = GetMessageClass(POOL.FindServiceByName(service).methods_by_name[method].input_type)()
        return calls.start(row.name, request, Bytes)

    def close(self) -> None:
        self._data.close()
        self._administration.close()


def answer(stream: Stream) -> Any:
    """All that a caller is told: head, messages and trailers, byte for byte."""
    stream.wait_ended(SLOW_S)
    return stream.reset_code, stream.headers, list(stream.messages), stream.trailers


def compared(asking: Asking, rows: list[Row], *, at_once: bool) -> tuple[list[str], list[str], list[str]]:
    """The methods whose answers differ with forged headers, those that were compared, and the others.

    Answers are compared where two calls without forged headers are answered alike; one goes before them, and
    makes or takes away what it names.
    """
    wanted: list[Fields] = [[], [], [], *forgeries()]
    found: dict[str, list[Any]] = {}
    if at_once:  # refusals are held back, so many wait at the same time
        asked = [(row, forged) for row in rows for forged in wanted]
        for start in range(0, len(asked), ASKED_AT_ONCE):
            part = asked[start : start + ASKED_AT_ONCE]
            streams = [(row.name, asking.start(row, forged)) for row, forged in part]
            for name, stream in streams:
                found.setdefault(name, []).append(answer(stream))
    else:
        found = {row.name: [answer(asking.start(row, forged)) for forged in wanted] for row in rows}
    same = [name for name, (_, first, second, *_) in found.items() if first == second]
    different = [name for name in same if any(one != found[name][1] for one in found[name][3:])]
    return different, same, [name for name in found if name not in same]


def test_every_method_is_unary_or_a_stream_of_the_table() -> None:
    streams = {name.rpartition("/")[2] for name in GRPC} - {row.name.rpartition("/")[2] for row in unary()}
    assert streams == {"ReceiveMessages", "Watch", "ServerReflectionInfo"}
    assert len(unary()) == len({row.name for row in unary()}) == len(GRPC) - 4


@pytest.mark.parametrize("caller", ["nobody", "viewer"])
def test_forged_headers_change_nothing_for_who_may_do_little(site: Site, caller: str) -> None:
    """Every method is compared: what may be done changes nothing."""
    asking = Asking(site, "" if caller == "nobody" else token(caller, "user"))
    try:
        different, same, _ = compared(asking, unary(), at_once=True)
    finally:
        asking.close()
    assert different == []
    assert len(same) == len(unary()) > 50


def test_forged_headers_change_nothing_for_an_administrator(site: Site) -> None:
    """All but what makes something new each time."""
    asking = Asking(site, root())
    try:
        different, same, others = compared(asking, unary(), at_once=False)
    finally:
        asking.close()
    assert different == []
    assert (len(same), others) == (len(unary()), [])


def test_a_name_in_upper_case_is_no_header_whatever_it_says(site: Site) -> None:
    """HTTP/2 has no such names: the call ends as one with any other name in upper case."""
    asking = Asking(site, "")
    try:
        calls = asking._administration
        calls.h2.config.normalize_outbound_headers = calls.h2.config.validate_outbound_headers = False
        ends = []
        for name in ("X-Anything", *(name.upper() for name in NAMES[:6])):
            stream = asking.start(GRPC["/danube_admin.BrokerAdmin/ListBrokers"], [(name, "user:root")])
            ends.append(answer(stream))
    finally:
        asking.close()
    assert ends[0][0] is not None and ends == [ends[0]] * len(ends)
