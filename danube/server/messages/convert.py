"""Enums of the data protos and the words of the core.

A proto3 enum may have any number.  An unknown dispatch strategy means NonReliable, which promises the least.
An unknown subscription type is refused, because a guess could deliver records to the wrong consumers.
"""

from __future__ import annotations

from typing import Final

from danube.core.dispatch.grants import Mode
from danube.errors import InvalidArgument
from danube.server.proto.DanubeApi_pb2 import ConsumerRequest, Reliable

_MODES: Final = {
    int(ConsumerRequest.Exclusive): Mode.EXCLUSIVE.label,
    int(ConsumerRequest.Shared): Mode.SHARED.label,
    int(ConsumerRequest.Failover): Mode.FAILOVER.label,
    int(ConsumerRequest.KeyShared): Mode.KEY_SHARED.label,
}
_TYPES: Final = {label: number for number, label in _MODES.items()}


def reliable_of(dispatch_strategy: int) -> bool:
    """Whether a topic made with this strategy keeps its records."""
    return dispatch_strategy == Reliable


def mode_of(subscription_type: int) -> str:
    """The label of a Mode; raises InvalidArgument for a number that is none of the four."""
    label = _MODES.get(subscription_type)
    if label is None:
        raise InvalidArgument(
            f"subscription type {subscription_type} is not known",
            hint="use Exclusive (0), Shared (1), Failover (2) or KeyShared (3)",
        )
    return label


def subscription_type_of(mode: str) -> int:
    """The number of a Mode's label, as ConsumerRequest.SubscriptionType counts."""
    return _TYPES[mode]
