"""``danube-admin topics set-failure-policy`` and ``get-failure-policy``."""

from __future__ import annotations

from typing import Final

import click

from danube.cli.upstream.admin_line import AdminLine, topic_argument
from danube.cli.upstream.root import json_output, say, show_json
from danube.errors import NotFound
from danube.server.proto import DanubeAdmin_pb2 as pb

_POISONS: Final = {
    "dead_letter": pb.DeadLetter, "dead-letter": pb.DeadLetter, "block": pb.Block, "drop": pb.Drop
}  # fmt: skip
_BACKOFFS: Final = {"fixed": pb.Fixed, "exponential": pb.Exponential}
_U32 = click.IntRange(0, (1 << 32) - 1)
_U64 = click.IntRange(0, (1 << 64) - 1)


@click.command("set-failure-policy")
@topic_argument
@click.option("-s", "--subscription", required=True)
@click.option("--max-redelivery-count", type=_U32, required=True)
@click.option("--ack-timeout-ms", type=_U64, required=True)
@click.option("--base-redelivery-delay-ms", type=_U64, required=True)
@click.option("--max-redelivery-delay-ms", type=_U64, required=True)
@click.option("--backoff-strategy", type=click.Choice(list(_BACKOFFS)), default="fixed", show_default=True)
@click.option("--dead-letter-topic")
@click.option("--poison-policy", type=click.Choice(list(_POISONS)), required=True)
@click.pass_obj
def set_failure_policy(
    line: AdminLine,
    topic: str,
    namespace: str | None,
    subscription: str,
    max_redelivery_count: int,
    ack_timeout_ms: int,
    base_redelivery_delay_ms: int,
    max_redelivery_delay_ms: int,
    backoff_strategy: str,
    dead_letter_topic: str | None,
    poison_policy: str,
) -> None:
    """Say what becomes of messages that are nacked or not acked in time."""
    policy = pb.SubscriptionFailurePolicy(
        max_redelivery_count=max_redelivery_count,
        ack_timeout_ms=ack_timeout_ms,
        base_redelivery_delay_ms=base_redelivery_delay_ms,
        max_redelivery_delay_ms=max_redelivery_delay_ms,
        backoff_strategy=_BACKOFFS[backoff_strategy],
        dead_letter_topic=dead_letter_topic,
        poison_policy=_POISONS[poison_policy],
    )
    request = pb.SetSubscriptionFailurePolicyRequest(
        topic=topic, subscription=subscription, failure_policy=policy
    )
    line.ask("TopicAdmin/SetSubscriptionFailurePolicy", request, pb.SubscriptionResponse)
    say(f"✅ Failure policy updated for topic '{topic}' subscription '{subscription}'")


@click.command("get-failure-policy")
@topic_argument
@click.option("-s", "--subscription", required=True)
@json_output
@click.pass_obj
def get_failure_policy(
    line: AdminLine, topic: str, namespace: str | None, subscription: str, output: str | None
) -> None:
    """Show a subscription's failure policy."""
    request = pb.GetSubscriptionFailurePolicyRequest(topic=topic, subscription=subscription)
    found = line.ask(
        "TopicAdmin/GetSubscriptionFailurePolicy", request, pb.GetSubscriptionFailurePolicyResponse
    )
    if not found.HasField("failure_policy"):
        raise NotFound(
            f"subscription {subscription!r} of topic {topic} has no failure policy",
            hint="set one with `topics set-failure-policy`",
        )
    policy = found.failure_policy
    shown = {
        "topic": topic,
        "subscription": subscription,
        "max_redelivery_count": policy.max_redelivery_count,
        "ack_timeout_ms": policy.ack_timeout_ms,
        "base_redelivery_delay_ms": policy.base_redelivery_delay_ms,
        "max_redelivery_delay_ms": policy.max_redelivery_delay_ms,
        "backoff_strategy": "exponential" if policy.backoff_strategy == pb.Exponential else "fixed",
        "dead_letter_topic": policy.dead_letter_topic if policy.HasField("dead_letter_topic") else None,
        "poison_policy": {pb.DeadLetter: "dead_letter", pb.Block: "block"}.get(policy.poison_policy, "drop"),
    }
    if output:
        show_json(shown)
    else:
        say(*(f"{name}: {'none' if value is None else value}" for name, value in shown.items()))
