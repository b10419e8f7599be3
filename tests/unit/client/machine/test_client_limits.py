"""Fields of policies and quotas: those that the broker knows, checked before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

from danube.client.machine.admin import LimitKeywords, limit_fields
from danube.core.metadata.policies import NamespacePolicy
from danube.errors import InvalidArgument


def test_a_client_names_every_limit() -> None:
    assert tuple(LimitKeywords.__annotations__) == NamespacePolicy.__struct_fields__


def test_fields_that_are_left_out_are_not_sent() -> None:
    assert limit_fields({"max_topics": 0, "auto_create": None, "schema_required": False}, "quota") == {
        "max_topics": 0, "schema_required": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    "fields, told",
    [
        ({"max_birds": 1}, "quota has no field 'max_birds'"),
        ({"max_topics": "x"}, "NamespacePolicy is not valid"),
        ({"max_topics": -1}, "max_topics must be 0"),
    ],
)
def test_what_no_broker_takes_is_refused_at_once(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        limit_fields(fields, "quota")
