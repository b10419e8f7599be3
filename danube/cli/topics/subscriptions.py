"""``danube subscriptions``: list, describe, seek, unblock and delete."""

from __future__ import annotations

from typing import Any

import click

from danube.cli.terminal import arguments
from danube.cli.terminal.addressing import page_options, topic_name
from danube.cli.terminal.asking import Broker, broker_command
from danube.cli.terminal.confirming import yes_option
from danube.cli.terminal.lazy import LazyGroup
from danube.cli.terminal.output import plain

COLUMNS = ("subscription", "mode", "consumer_count", "lag_records", "in_flight")
_topic = click.argument("topic", type=topic_name, metavar="TOPIC")
_subscription = click.argument("subscription", metavar="SUBSCRIPTION")


@click.group(cls=LazyGroup, aliases={"ls": "list", "rm": "delete", "show": "describe"})
def subscriptions() -> None:
    """List, describe, seek, unblock and delete the subscriptions of a topic.

    \b
    danube subscriptions list orders
    danube subscriptions seek orders billing --to -1h
    """


@broker_command(subscriptions, "list", "List a topic's subscriptions.", _topic, page_options, columns=COLUMNS)
def list_subscriptions(broker: Broker, topic: str, **page: Any) -> Any:
    """List a topic's subscriptions with their consumers and lag."""
    return plain(broker.admin.list_subscriptions(topic, **page))


@broker_command(subscriptions, "describe", "Show a subscription's progress and consumers.")
@_topic
@_subscription
def describe(broker: Broker, topic: str, subscription: str) -> Any:
    """Show a subscription's cursor, lag, consumers and why it waits."""
    return plain(broker.admin.describe_subscription(topic, subscription))


@broker_command(subscriptions, "seek", "Move a subscription to another place.")
@_topic
@_subscription
@click.option(
    "--to",
    "where",
    type=arguments.position,
    required=True,
    metavar="WHERE",
    help="earliest, latest, offset:N, N, a time or -1h.",
)
def seek(broker: Broker, topic: str, subscription: str, where: arguments.Position) -> Any:
    """Move a subscription: records from there on are delivered, again or for the first time.

    Prints the position before and after, so that you can seek back.
    """
    before = plain(broker.admin.describe_subscription(topic, subscription))
    broker.admin.seek(topic, subscription, arguments.start_argument(where))
    after = plain(broker.admin.describe_subscription(topic, subscription))
    return {"topic": topic, "subscription": subscription, "before": _places(before), "after": _places(after)}


@broker_command(subscriptions, "unblock", "Let a blocked subscription continue.", _topic, _subscription)
def unblock(broker: Broker, topic: str, subscription: str) -> Any:
    """Deliver the records that block a subscription (poison policy `block`) once more."""
    broker.admin.unblock(topic, subscription)
    return {"topic": topic, "subscription": subscription, "unblocked": True}


@broker_command(subscriptions, "delete", "Delete a subscription and its progress.")
@_topic
@_subscription
@yes_option
def delete(broker: Broker, topic: str, subscription: str, yes: bool) -> Any:
    """Delete a subscription and its progress; the records stay."""
    lost = f"subscription {subscription} of {topic} and its progress will be deleted"
    broker.confirm(subscription, lost, yes)
    broker.admin.delete_subscription(topic, subscription)
    return {"topic": topic, "subscription": subscription, "deleted": True}


def _places(described: Any) -> Any:
    kept = ("partition", "ack_floor", "lag")
    return [{name: row[name] for name in kept if name in row} for row in described["partitions"]]
