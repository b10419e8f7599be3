"""``danube subscriptions``: list, describe, seek, unblock and delete."""

from __future__ import annotations

from typing import Any

import click

from danube.cli.terminal import arguments
from danube.cli.terminal.addressing import Address, address_option, explaining, page_options, topic_name
from danube.cli.terminal.confirming import confirm, yes_option
from danube.cli.terminal.lazy import LazyGroup
from danube.cli.terminal.output import output_option, plain, show
from danube.cli.terminal.services import Services
from danube.cli.topics.topics import suggesting

COLUMNS = ("subscription", "mode", "consumer_count", "lag_records", "in_flight")
_topic_argument = click.argument("topic", type=topic_name, metavar="TOPIC")
_subscription_argument = click.argument("subscription", metavar="SUBSCRIPTION")


@click.group(cls=LazyGroup, aliases={"ls": "list", "rm": "delete", "show": "describe"})
def subscriptions() -> None:
    """List, describe, seek, unblock and delete the subscriptions of a topic.

    \b
    danube subscriptions list orders
    danube subscriptions seek orders billing --to -1h
    """


@subscriptions.command("list", short_help="List a topic's subscriptions.")
@_topic_argument
@address_option()
@page_options
@output_option()
@click.pass_obj
def list_subscriptions(
    services: Services, /, topic: str, service_addr: Address, output: str, **page: Any
) -> None:
    """List a topic's subscriptions with their consumers and lag."""
    with explaining(service_addr), services.connect(service_addr.url) as client, suggesting(client):
        rows = plain(client.admin.list_subscriptions(topic, **page))
    show(rows, output, COLUMNS)


@subscriptions.command("describe", short_help="Show a subscription's progress and consumers.")
@_topic_argument
@_subscription_argument
@address_option()
@output_option()
@click.pass_obj
def describe(
    services: Services, /, topic: str, subscription: str, service_addr: Address, output: str
) -> None:
    """Show a subscription's cursor, lag, consumers and why it waits."""
    with explaining(service_addr), services.connect(service_addr.url) as client, suggesting(client):
        found = plain(client.admin.describe_subscription(topic, subscription))
    show(found, output)


@subscriptions.command("seek", short_help="Move a subscription to another place.")
@_topic_argument
@_subscription_argument
@address_option()
@click.option(
    "--to",
    "where",
    type=arguments.position,
    required=True,
    metavar="WHERE",
    help="earliest, latest, offset:N, N, a time or -1h.",
)
@output_option()
@click.pass_obj
def seek(
    services: Services,
    /,
    topic: str,
    subscription: str,
    service_addr: Address,
    where: arguments.Position,
    output: str,
) -> None:
    """Move a subscription: records from there on are delivered, again or for the first time.

    Prints the places before and after, so that the way back is known.
    """
    with explaining(service_addr), services.connect(service_addr.url) as client, suggesting(client):
        before = plain(client.admin.describe_subscription(topic, subscription))
        client.admin.seek(topic, subscription, arguments.start_argument(where))
        after = plain(client.admin.describe_subscription(topic, subscription))
    moved = {"topic": topic, "subscription": subscription, "before": _places(before), "after": _places(after)}
    show(moved, output)


@subscriptions.command("unblock", short_help="Let a blocked subscription go on.")
@_topic_argument
@_subscription_argument
@address_option()
@output_option()
@click.pass_obj
def unblock(services: Services, /, topic: str, subscription: str, service_addr: Address, output: str) -> None:
    """Deliver the records that block a subscription (poison policy `block`) once more."""
    with explaining(service_addr), services.connect(service_addr.url) as client, suggesting(client):
        client.admin.unblock(topic, subscription)
    show({"topic": topic, "subscription": subscription, "unblocked": True}, output)


@subscriptions.command("delete", short_help="Delete a subscription and its progress.")
@_topic_argument
@_subscription_argument
@address_option()
@yes_option
@output_option()
@click.pass_obj
def delete(
    services: Services, /, topic: str, subscription: str, service_addr: Address, yes: bool, output: str
) -> None:
    """Delete a subscription; the records stay, which of them were acknowledged is forgotten."""
    lost = f"subscription {subscription} of {topic} and its progress will be deleted"
    confirm(services, subscription, lost, yes)
    with explaining(service_addr), services.connect(service_addr.url) as client, suggesting(client):
        client.admin.delete_subscription(topic, subscription)
    show({"topic": topic, "subscription": subscription, "deleted": True}, output)


def _places(described: Any) -> Any:
    kept = ("partition", "ack_floor", "lag")
    return [{name: row[name] for name in kept if name in row} for row in described["partitions"]]
