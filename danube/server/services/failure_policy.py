"""The failure policy as the admin messages spell it, to and from the core's."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from danube.core.partition.policy import DAY_MS, FailurePolicy
from danube.errors import InvalidArgument
from danube.ids import check_topic_name
from danube.server.messages.convert import subscription_type_of
from danube.server.proto import DanubeAdmin_pb2 as pb

_BACKOFFS: Final = {pb.Fixed: "fixed", pb.Exponential: "exponential"}
_POISONS: Final = {pb.DeadLetter: "dead_letter", pb.Block: "block", pb.Drop: "drop"}
_DURATION_MS_MAX: Final = 3_650 * DAY_MS  # in ns this is far below what 64 bits hold
_DURATIONS: Final = ("ack_timeout_ms", "base_redelivery_delay_ms", "max_redelivery_delay_ms")


def read_failure_policy(policy: pb.SubscriptionFailurePolicy) -> FailurePolicy:
    """The policy of a request; raises InvalidArgument or InvalidName (dead letter topic)."""
    if policy.backoff_strategy not in _BACKOFFS:
        raise InvalidArgument(
            f"backoff_strategy {policy.backoff_strategy} is not known",
            hint="use Fixed (0) or Exponential (1)",
        )
    if policy.poison_policy not in _POISONS:
        raise InvalidArgument(
            f"poison_policy {policy.poison_policy} is not known",
            hint="use DeadLetter (0), Block (1) or Drop (2)",
        )
    for name in _DURATIONS:
        if getattr(policy, name) > _DURATION_MS_MAX:
            raise InvalidArgument(f"{name} is {getattr(policy, name)}", why="the most is 3650 days")
    found = FailurePolicy(
        max_redelivery_count=policy.max_redelivery_count,
        ack_timeout_ms=policy.ack_timeout_ms,
        base_redelivery_delay_ms=policy.base_redelivery_delay_ms,
        max_redelivery_delay_ms=policy.max_redelivery_delay_ms,
        backoff=_BACKOFFS[policy.backoff_strategy],
        poison=_POISONS[policy.poison_policy],
        dead_letter_topic=policy.dead_letter_topic,
    )
    found.check()
    if found.dead_letter_topic:
        check_topic_name(found.dead_letter_topic)
    return found


def show_failure_policy(policy: FailurePolicy) -> pb.SubscriptionFailurePolicy:
    backoff = pb.Fixed if policy.backoff == "fixed" else pb.Exponential
    poison = {"dead_letter": pb.DeadLetter, "block": pb.Block}.get(policy.poison, pb.Drop)
    shown = pb.SubscriptionFailurePolicy(
        max_redelivery_count=min(policy.max_redelivery_count, (1 << 32) - 1),
        ack_timeout_ms=policy.ack_timeout_ms,
        base_redelivery_delay_ms=policy.base_redelivery_delay_ms,
        max_redelivery_delay_ms=policy.max_redelivery_delay_ms,
        backoff_strategy=backoff,
        poison_policy=poison,
    )
    if policy.dead_letter_topic:
        shown.dead_letter_topic = policy.dead_letter_topic
    return shown


def stored_failure_policy(fields: dict[str, Any]) -> FailurePolicy:
    """The policy that an operation answered as a map."""
    return msgspec.convert(fields, FailurePolicy)


def mode_number(mode: str | None) -> int:
    """The subscription type as a number; 0 where the subscription was never made."""
    return subscription_type_of(mode) if mode is not None else 0
