"""Whatever is served has exactly one row in the table of operations, and no row stands for nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
import pytest

from danube.broker.routing.router import _OPERATIONS
from danube.broker.shard.admin import OWNER_OPERATIONS
from danube.core.metadata.roles import PERMISSIONS
from danube.core.protocol.native import Kind
from danube.core.security.operations import ADMIN_ROWS, GRPC_ROWS, NATIVE_ROWS, OPEN, SIGNED_IN, Effect, Row
from danube.core.security.results import RESULTS
from danube.server.proto import (
    DanubeAdmin_pb2,
    DanubeApi_pb2,
    SchemaRegistry_pb2,
    health_pb2,
    reflection_v1_pb2,
    reflection_v1alpha,
)
from tests.golden.authority_cases import OPERATIONS_PAGE, operations_page

ROWS: list[Row] = [*ADMIN_ROWS, *NATIVE_ROWS, *GRPC_ROWS]
SERVED = (
    DanubeAdmin_pb2, DanubeApi_pb2, SchemaRegistry_pb2, health_pb2, reflection_v1_pb2, reflection_v1alpha,
)  # fmt: skip
FROM_CLIENTS = range(1, 32)


def methods() -> Iterable[str]:
    for module in SERVED:
        for service in module.DESCRIPTOR.services_by_name.values():
            yield from (f"/{service.full_name}/{method.name}" for method in service.methods)


@pytest.mark.parametrize(
    ("served", "rows"),
    [
        ([*_OPERATIONS, *OWNER_OPERATIONS], ADMIN_ROWS),
        ([kind.name for kind in Kind if kind in FROM_CLIENTS], NATIVE_ROWS),
        (methods(), GRPC_ROWS),
    ],
    ids=["operations", "frames", "methods"],
)
def test_each_is_served_and_has_one_row(served: Iterable[str], rows: tuple[Row, ...]) -> None:
    assert Counter(served) == Counter(row.name for row in rows), "add a row to core/security/operations.py"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_row_says_what_it_needs(row: Row) -> None:
    assert row.permission in {*PERMISSIONS, OPEN, SIGNED_IN}
    assert isinstance(row.effect, Effect) and row.says
    assert bool(row.needs) == bool(row.where) == (row.permission in PERMISSIONS), "a row without a permission"


def test_only_reading_is_open_to_everybody() -> None:
    assert {row.effect for row in ROWS if row.permission in (OPEN, SIGNED_IN)} == {Effect.READ}
    assert {row.name for row in ROWS if row.permission == OPEN} == {
        "HELLO", "PING", "/danube.AuthService/Authenticate",
        *(f"/grpc.health.v1.Health/{name}" for name in ("Check", "List", "Watch")),
    }  # fmt: skip


def test_each_operation_has_the_struct_of_its_arguments() -> None:
    for row in ADMIN_ROWS:
        assert issubclass(row.args, msgspec.Struct), row.name
        assert all(one.name == one.encode_name for one in msgspec.structs.fields(row.args)), row.name


def test_each_operation_has_the_type_of_its_answer() -> None:
    assert RESULTS.keys() == {row.name for row in ADMIN_ROWS}
    for row in ADMIN_ROWS:
        assert row.result is None or msgspec.json.schema(row.result), row.name


def test_a_route_and_a_tool_are_those_of_one_operation() -> None:
    for named in ([row.http for row in ADMIN_ROWS], [row.mcp for row in ADMIN_ROWS]):
        assert [one for one, count in Counter(filter(None, named)).items() if count > 1] == []
    for row in ADMIN_ROWS:
        if row.http:
            method, path = row.http
            assert (method == "GET") == (row.effect is Effect.READ) or row.name == "schema.check"
            assert path.startswith("/v1/"), path


def test_the_page_is_the_table() -> None:
    text = OPERATIONS_PAGE.read_text(encoding="utf-8")
    assert text == operations_page(), "python -m tests.golden.write_authority writes it anew"
