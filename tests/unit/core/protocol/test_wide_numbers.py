"""Numbers that MessagePack or a format cannot carry are refused by name, not by the serializer."""

from __future__ import annotations

import msgspec
import pytest

from danube.client.machine.admin import start_of
from danube.core.partition.policy import FailurePolicy
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import InvalidArgument

FITTING = [0, 1, -1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63)]
TOO_WIDE = [1 << 64, 1 << 70, -(1 << 63) - 1]


def bodies(number: int) -> dict[str, msgspec.Struct]:
    """A body for each place where a number may lie, by the name of its field."""
    return {
        "max_unacked": wire.Subscribe("/default/t", "s", "c", max_unacked=number),
        "start_value": wire.Subscribe("/default/t", "s", "c", start_value=number),
        "max_redelivery_count": wire.Subscribe(
            "/default/t", "s", "c", failure=FailurePolicy(max_redelivery_count=number)
        ),
        "retention_ms": wire.Admin("update_topic", args={"policy": {"retention_ms": number}}),
        "partitions": wire.Admin("create_topic", args={"partitions": number}),
        "versions": wire.Admin("x", args={"versions": [1, 2, number]}),
        "ranges": wire.Nack([(0, 1), (2, number)]),
    }


@pytest.mark.parametrize("number", FITTING)
def test_every_number_of_64_bits_crosses(number: int) -> None:
    for body in bodies(number).values():
        assert wire.control_frame(Kind.ADMIN, body)


@pytest.mark.parametrize("number", TOO_WIDE)
def test_a_wider_number_is_refused_with_the_name_of_its_field(number: int) -> None:
    for name, body in bodies(number).items():
        with pytest.raises(InvalidArgument, match=f"^{name} is out of range") as refused:
            wire.control_frame(Kind.ADMIN, body)
        assert refused.value.facts["field"] == name
        assert "18446744073709551615" in refused.value.why


def test_a_start_is_a_signed_number_of_64_bits() -> None:
    last = (1 << 63) - 1
    assert start_of(last) == ("offset", last) and start_of(("time", last)) == ("time", last)
    for start in (last + 1, ("offset", last + 1), ("time", 1 << 64), ("time", -1), -1):
        with pytest.raises(InvalidArgument, match="is not valid") as refused:
            start_of(start)  # type: ignore[arg-type]
        assert str(last) in refused.value.why
