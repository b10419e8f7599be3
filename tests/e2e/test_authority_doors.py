"""The doors of a broker obey the matrix: what it refuses is refused, and what it lets read is read.

The matrix is judged in full, without a broker, against tests/golden/authority.txt.  Here each row that names
something is asked of a real broker.  Allowed requests are sent only where they change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from danube import sync
from danube.core.metadata.machine import Metadata
from danube.core.protocol.native import Kind
from danube.core.security.authority import Authority
from danube.core.security.operations import ADMIN_ROWS, GRPC_ROWS, NATIVE_ROWS, Effect, Row
from danube.core.security.principals import Identity
from danube.errors import DanubeError, NotAllowed
from danube.server.proto.pool import POOL
from tests.broker_process import Brokers
from tests.e2e.authority_site import Site, token
from tests.e2e.grpc_parts import DENIED, DanubeCalls
from tests.golden.authority_cases import (
    CALLERS,
    TARGETS,
    Target,
    admin_request,
    grpc_request,
    identity_of,
    native_request,
    outcome,
    site,
)

ASKED_AT_ONCE = 50
OPENING = ("LOOKUP", "OPEN_PRODUCER", "SUBSCRIBE")
NAMED = [name for name, held in CALLERS.items() if not isinstance(held, Identity)]
Case = tuple[Row, Target, Any, str]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The site of the matrix, as a real broker; its topics and bindings."""
    brokers = Brokers(tmp_path_factory.mktemp("doors"))
    made = Site(brokers.make, workers=1)  # a right that was given is known at once
    for target in (TARGETS[0], TARGETS[2]):
        made.namespace(target.namespace)
        made.admin.admin.create_topic(target.topic)
        made.ask("schema.register", subject=target.subject, schema_type="string", definition=b"")
        made.ask("schema.configure_topic", topic=target.topic, subject=target.subject)
    for name in NAMED:
        role, scope, resource = CALLERS[name]
        made.ask("put_binding", id=name, principal_type="user", principal_name=name, role_names=[role],
                 scope=scope, resource_name=resource)  # fmt: skip
    yield made
    made.close()
    brokers.kill()


@pytest.fixture(scope="module")
def machine() -> Metadata:
    return site()


def cases(machine: Metadata, caller: str, rows: tuple[Row, ...], request_of: Any) -> list[Case]:
    """What this caller is to be told, for each row and target that can be asked without changing anything."""
    authority, found = Authority(lambda: machine.access), []
    for row in rows:
        for target in TARGETS if row.needs else ():
            request = request_of(row, target, {})
            mark = outcome(authority, machine, row, identity_of(caller), request)
            if request is not None and (mark == "-" or row.effect is Effect.READ):
                found.append((row, target, request, mark))
    return found


def told(wanted: list[Case], marks: list[str]) -> list[str]:
    """Where a door says something else than the matrix."""
    pairs = zip(wanted, marks, strict=True)
    return [f"{row.name} {target.says}: {mark}" for (row, target, _, asked), mark in pairs if mark != asked]


@pytest.mark.parametrize("caller", NAMED)
def test_the_native_door_obeys_the_matrix(broker: Site, machine: Metadata, caller: str) -> None:
    wanted = cases(machine, caller, ADMIN_ROWS, admin_request)
    frames = tuple(row for row in NATIVE_ROWS if row.name in OPENING)
    wanted += cases(machine, caller, frames, native_request)
    assert len(wanted) > 100 or caller == "admin"
    marks = []
    with sync.connect(broker.process.address, token=token(caller, "user"), timeout=60) as client:
        for number, (row, _, request, _) in enumerate(wanted, 1):
            connection, session = client._connection, client._session
            with connection.lock:
                if row in NATIVE_ROWS:
                    handle = 0 if row.name == "LOOKUP" else 1_000_000 + number
                    reply = session.request(Kind[row.name], request, repeatable=False, handle=handle)
                else:
                    reply = session.admin(row.name, request.partition, repeatable=False, **request.args)
            try:
                connection.wait(reply)
                marks.append("+")
            except NotAllowed:
                marks.append("-")
            except DanubeError:
                marks.append("+")
    assert told(wanted, marks) == []


@pytest.mark.parametrize("caller", NAMED)
def test_the_grpc_doors_obey_the_matrix(broker: Site, machine: Metadata, caller: str) -> None:
    wanted = [one for one in cases(machine, caller, GRPC_ROWS, grpc_request) if "Receive" not in one[0].name]
    addresses = (broker.process.admin_address, broker.process.grpc_address)
    for address, kinds in zip(addresses, (True, False), strict=True):
        ours = [one for one in wanted if one[0].name.startswith("/danube_admin.") == kinds]
        calls, marks = DanubeCalls(address), []
        calls.fields = [("authorization", f"Bearer {token(caller, 'user')}")]
        try:
            for start in range(0, len(ours), ASKED_AT_ONCE):
                streams = [
                    calls.start(row.name, request, _answer(row))
                    for row, _, request, _ in ours[start : start + ASKED_AT_ONCE]
                ]
                for stream in streams:
                    calls.wait(lambda stream=stream: stream.ended, 60)
                    marks.append("-" if stream.error().code == DENIED else "+")
        finally:
            calls.close()
        assert told(ours, marks) == []


def _answer(row: Row) -> Any:
    from google.protobuf.message_factory import GetMessageClass

    service, _, method = row.name[1:].partition("/")
    return GetMessageClass(POOL.FindServiceByName(service).methods_by_name[method].output_type)
