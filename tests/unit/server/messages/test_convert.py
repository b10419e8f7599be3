"""Enums of the data protos, and numbers that no enum has."""

from __future__ import annotations

import pytest

from danube.core.dispatch.grants import Mode
from danube.errors import InvalidArgument
from danube.server.messages.convert import mode_of, reliable_of, subscription_type_of
from danube.server.proto.DanubeApi_pb2 import ConsumerRequest, ProducerRequest


@pytest.mark.parametrize(
    ("number", "mode"),
    [(0, Mode.EXCLUSIVE), (1, Mode.SHARED), (2, Mode.FAILOVER), (3, Mode.KEY_SHARED)],
)
def test_subscription_types(number: int, mode: Mode) -> None:
    request = ConsumerRequest.FromString(ConsumerRequest(subscription_type=number).SerializeToString())  # type: ignore[arg-type]
    assert mode_of(request.subscription_type) == mode.label
    assert subscription_type_of(mode.label) == number


@pytest.mark.parametrize("number", [4, -1, 2**31 - 1])
def test_an_unknown_subscription_type_is_refused(number: int) -> None:
    request = ConsumerRequest.FromString(ConsumerRequest(subscription_type=number).SerializeToString())  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=f"subscription type {number} is not known"):
        mode_of(request.subscription_type)


@pytest.mark.parametrize(
    ("number", "reliable"), [(0, False), (1, True), (2, False), (-1, False), (2**31 - 1, False)]
)
def test_dispatch_strategies(number: int, reliable: bool) -> None:
    request = ProducerRequest.FromString(ProducerRequest(dispatch_strategy=number).SerializeToString())  # type: ignore[arg-type]
    assert reliable_of(request.dispatch_strategy) is reliable
