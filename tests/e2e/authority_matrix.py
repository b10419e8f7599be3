"""The matrix of rights asked at real doors: which cells can be asked, and what a door says to each.

The marks are those of tests/golden/authority.txt.  An allowed request is sent only where it changes nothing,
one that is to be refused whatever it would do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from google.protobuf.message_factory import GetMessageClass

from danube import sync
from danube.core.protocol.native import Kind
from danube.core.security.operations import ADMIN, ADMIN_ROWS, GRPC_ROWS, NATIVE_ROWS, Effect, Row
from danube.core.security.principals import Identity
from danube.errors import CallerError, DanubeError, NotAllowed, OwnerMoved
from danube.server.proto.pool import POOL
from tests.answers import fitting
from tests.e2e.grpc_parts import DENIED, INVALID, NOT_FOUND, OK, UNAUTHENTICATED, DanubeCalls
from tests.golden.authority_cases import (
    CALLERS,
    MATRIX,
    TARGETS,
    WITH_MORE,
    Target,
    admin_request,
    grpc_request,
    native_request,
)

ASKED_AT_ONCE: Final = 50
OPENING: Final = ("LOOKUP", "OPEN_PRODUCER", "SUBSCRIBE")
NAMED: Final = [name for name, held in CALLERS.items() if not isinstance(held, Identity)]
FIRST: Final = "first"  # who shows the first token
SLOW_S: Final = 60.0
_GRPC_MARKS: Final = {DENIED: "-", UNAUTHENTICATED: "?", OK: "+", INVALID: "+", NOT_FOUND: "+"}
Ask = Callable[..., Any]


class Cell(NamedTuple):
    """One request, and the mark that the reviewed file has for who asks it."""

    row: Row
    target: Target
    request: Any
    mark: str
    more: bool = False

    def __str__(self) -> str:
        return f"{self.row.name}{' *' if self.more else ''} {self.target.says}"


def reviewed() -> dict[str, dict[str, str]]:
    """The file: the marks of a row by caller, each for the three targets."""
    lines = [line for line in MATRIX.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    callers = lines[0].split()
    found = {}
    for line in lines[1:]:
        words = line.split()
        found[" ".join(words[: -len(callers)])] = dict(zip(callers, words[-len(callers) :], strict=True))
    return found


def build(ask: Ask, create_topic: Callable[[str], object]) -> None:
    """What the matrix is about: two tenants' topics, each with a schema, and the callers' bindings."""
    for target in (TARGETS[0], TARGETS[2]):
        ask("create_namespace", namespace=target.namespace)
        create_topic(target.topic)
        ask("schema.register", subject=target.subject, schema_type="string", definition=b"")
        ask("schema.configure_topic", topic=target.topic, subject=target.subject)
    for name in NAMED:
        role, scope, resource = CALLERS[name]
        ask("put_binding", id=name, principal_type="user", principal_name=name, role_names=[role],
            scope=scope, resource_name=resource)  # fmt: skip


def native_cells(caller: str) -> list[Cell]:
    """All that a native client of this caller is asked for."""
    frames = tuple(row for row in NATIVE_ROWS if row.name in OPENING)
    return [*_cells(caller, ADMIN_ROWS, admin_request), *_cells(caller, frames, native_request)]


def grpc_cells(caller: str) -> list[Cell]:
    cells = [one for one in _cells(caller, GRPC_ROWS, grpc_request) if "Receive" not in one.row.name]
    if caller == FIRST:  # an id of nobody is not found before anybody is judged
        cells = [one for one in cells if "of an id" not in one.row.where]
    return cells


def _cells(caller: str, rows: Sequence[Row], request_of: Any) -> Iterator[Cell]:
    marks = reviewed()
    for row in rows:
        for more in ({}, WITH_MORE.get(row.name)) if row.needs else ():
            if more is None:
                continue
            for place, target in enumerate(TARGETS):
                mark = marks[f"{row.name} *" if more else row.name][caller][place]
                request = request_of(row, target, more)
                if row.name in OPENING[1:]:  # a topic without partitions is its own
                    request.partition = target.topic
                if request is not None and (mark != "+" or harmless(row, more)):
                    yield Cell(row, target, request, mark, bool(more))


def harmless(row: Row, more: dict[str, Any]) -> bool:
    """Whether it may be carried out: a handle ends with its connection."""
    return (row.effect is Effect.READ and not more.get("create")) or row.name in OPENING[1:]


def told(wanted: Sequence[Cell], marks: Sequence[str]) -> list[str]:
    """Where a door says something else than the file."""
    pairs = zip(wanted, marks, strict=True)
    return [f"{cell}: {mark} and not {cell.mark}" for cell, mark in pairs if mark != cell.mark]


def native_marks(client: sync.Client, wanted: Sequence[Cell], **claims: Any) -> list[str]:
    """What the native door says; ``claims`` are further fields of each operation."""
    connection, session, marks = client._connection, client._session, []
    for start in range(0, len(wanted), ASKED_AT_ONCE):
        replies = []
        with connection.lock:
            for number, cell in enumerate(wanted[start : start + ASKED_AT_ONCE], start):
                kind, body, handle = Kind.ADMIN, cell.request, 0
                if cell.row in NATIVE_ROWS:
                    kind = Kind[cell.row.name]
                    handle = 0 if kind is Kind.LOOKUP else 1_000_000 + number
                elif claims:
                    body = type(body)(body.op, body.partition, body.args, **claims)
                replies.append(session.request(kind, body, repeatable=False, handle=handle))
        asked = wanted[start : start + ASKED_AT_ONCE]
        marks += [_mark(connection, one, cell.row) for one, cell in zip(replies, asked, strict=True)]
    return marks


def _mark(connection: Any, reply: Any, row: Row) -> str:
    try:
        answer = connection.wait(reply)
        if row.effect is Effect.READ and row.name in ADMIN:
            fitting(row.name, answer)
    except NotAllowed:
        return "-"
    except (CallerError, OwnerMoved):  # it was let in, and lacks something
        return "+"
    except DanubeError as error:
        return type(error).__name__
    return "+"


def grpc_marks(calls: DanubeCalls, wanted: Sequence[Cell]) -> list[str]:
    """What a gRPC port says."""
    marks = []
    for start in range(0, len(wanted), ASKED_AT_ONCE):
        streams = [
            calls.start(one.row.name, one.request, answer_of(one.row))
            for one in wanted[start : start + ASKED_AT_ONCE]
        ]
        for stream in streams:
            code = stream.wait_ended(SLOW_S).code
            marks.append(_GRPC_MARKS.get(code, f"code {code}"))
    return marks


def of_port(wanted: Sequence[Cell], *, administration: bool) -> list[Cell]:
    """Those cells whose method one of the two gRPC ports serves."""
    return [one for one in wanted if one.row.name.startswith("/danube_admin.") == administration]


def answer_of(row: Row) -> Any:
    service, _, method = row.name[1:].partition("/")
    return GetMessageClass(POOL.FindServiceByName(service).methods_by_name[method].output_type)
