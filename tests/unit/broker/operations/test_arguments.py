"""Arguments of operations are what their rows say, or the request is refused in one way."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from danube.broker.operations.arguments import arguments_of
from danube.core.protocol.native import Admin
from danube.core.security.arguments import NewTopic, Page, SubscriptionChange
from danube.core.security.operations import ADMIN_ROWS, Row
from danube.errors import InvalidArgument

ROWS = pytest.mark.parametrize("row", ADMIN_ROWS, ids=lambda row: row.name)


def refusal(op: str, **args: Any) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as refused:
        arguments_of(Admin(op, "", args))
    return refused.value


def given(row: Row) -> dict[str, Any]:
    """A value for every argument that must be there."""
    values: dict[Any, Any] = {str: "x", int: 1, bytes: b"x", tuple[str, ...]: ["x"]}
    return {one.name: values.get(one.type, 1) for one in msgspec.structs.fields(row.args) if one.required}


@ROWS
def test_every_argument_has_a_type(row: Row) -> None:
    args = given(row)
    assert isinstance(arguments_of(Admin(row.name, "", args)), row.args)
    for one in msgspec.structs.fields(row.args):
        error = refusal(row.name, **{**args, one.name: 1.5})
        assert f"$.{one.name}" in error.why and row.name in error.what
        assert one.name in error.hint, "it says what the operation takes"


@ROWS
def test_what_must_be_there_is_named(row: Row) -> None:
    args = given(row)
    for name in args:
        left = {one: value for one, value in args.items() if one != name}
        assert f"`{name}`" in refusal(row.name, **left).why
        assert f"`{name}`" in refusal(row.name, **left, **{name: None}).why, "nil counts as missing"


def test_arguments_of_newer_clients_are_ignored() -> None:
    args = {"topic": "/default/t", "from_the_future": 1, "partitions": None, "ensure": True}
    assert arguments_of(Admin("create_topic", "", args)) == NewTopic("/default/t", ensure=True)
    assert arguments_of(Admin("roles")) == Page()


def test_nil_is_a_value_where_it_takes_something_away() -> None:
    args = {"topic": "/default/t", "subscription": "s"}
    kept = arguments_of(Admin("set_subscription_settings", "", args))
    assert kept == SubscriptionChange("/default/t", "s") and kept.failure is msgspec.UNSET
    assert arguments_of(Admin("set_subscription_settings", "", {**args, "failure": None})).failure is None
    assert "$.max_unacked" in refusal("set_subscription_settings", **args, max_unacked=None).why
    assert "$.value" in refusal("seek", subscription="s", value=None).why


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("list_topics", {"limit": -1}),
        ("list_topics", {"limit": True}),
        ("create_topic", {"topic": "/default/t", "ensure": 1}),
        ("schema.register", {"subject": "s", "schema_type": "avro", "definition": "dGV4dA=="}),
        ("put_tenant", {"name": "t", "namespaces": "a"}),
        ("unload_broker", {"broker_id": 1}),
    ],
)
def test_values_are_not_taken_for_what_they_look_like(op: str, args: dict[str, Any]) -> None:
    refusal(op, **args)


def test_an_operation_that_is_not_there_has_no_arguments() -> None:
    assert "is not known" in refusal("dance").what
