"""``danube-admin topics``: topics themselves; their subscriptions and schemas are in the neighbours."""

from __future__ import annotations

from typing import Any

import click

from danube.cli.upstream.admin_line import AdminLine, topic_argument
from danube.cli.upstream.missing import check_broker_exists, check_namespace_exists, check_topic_exists
from danube.cli.upstream.root import json_output, quoted, say, show_json
from danube.cli.upstream.topic_policies import get_failure_policy, set_failure_policy
from danube.cli.upstream.topic_schemas import configure_schema, get_schema_config, set_validation_policy
from danube.server.proto import DanubeAdmin_pb2 as pb

_RELIABLE = ("reliable", "reliable_dispatch", "reliable-dispatch")


@click.group()
def topics() -> None:
    """Topics, subscriptions and their policies."""


for _command in (
    set_failure_policy, get_failure_policy, configure_schema, set_validation_policy, get_schema_config,
):  # fmt: skip
    topics.add_command(_command)


@topics.command("list")
@click.option("--namespace", help="Topics of this namespace.")
@click.option("--broker", help="Topics of the broker with this id.")
@json_output
@click.pass_obj
def list_topics(line: AdminLine, namespace: str | None, broker: str | None, output: str | None) -> None:
    """List topics of a namespace or of a broker."""
    if (namespace is None) == (broker is None):
        raise click.UsageError("Give either --namespace or --broker.")
    if broker is not None:
        by_broker = pb.BrokerRequest(broker_id=broker)
        found = line.ask("TopicAdmin/ListBrokerTopics", by_broker, pb.TopicInfoListResponse).topics
        if not found:
            check_broker_exists(line, broker)
    else:
        by_namespace = pb.NamespaceRequest(name=namespace)
        found = line.ask("TopicAdmin/ListNamespaceTopics", by_namespace, pb.TopicInfoListResponse).topics
        if not found:
            check_namespace_exists(line, str(namespace))
    if output:
        show_json([{"name": one.name, "broker_id": one.broker_id, "delivery": one.delivery} for one in found])
        return
    for one in found:
        where = f"broker_id: {one.broker_id}, " if one.broker_id else ""
        say(f"Topic: {one.name} ({where}delivery: {one.delivery})")


@topics.command("create")
@topic_argument
@click.option("--partitions", type=click.IntRange(0, (1 << 32) - 1), help="Make a partitioned topic.")
@click.option("--schema-subject")
@click.option(
    "--dispatch-strategy",
    default="non_reliable",
    show_default=True,
    help="non_reliable or reliable.",
)
@click.pass_obj
def create(
    line: AdminLine,
    topic: str,
    namespace: str | None,
    partitions: int | None,
    schema_subject: str | None,
    dispatch_strategy: str,
) -> None:
    """Create a topic."""
    strategy = pb.Reliable if dispatch_strategy.lower() in _RELIABLE else pb.NonReliable
    if partitions is None:
        request = pb.NewTopicRequest(name=topic, schema_subject=schema_subject, dispatch_strategy=strategy)
        line.ask("TopicAdmin/CreateTopic", request, pb.TopicResponse)
        say(f"✅ Topic created: {topic}")
    else:
        partitioned = pb.PartitionedTopicRequest(
            base_name=topic, partitions=partitions, schema_subject=schema_subject, dispatch_strategy=strategy
        )
        line.ask("TopicAdmin/CreatePartitionedTopic", partitioned, pb.TopicResponse)
        say(f"✅ Partitioned topic created: {topic}")
    if schema_subject:
        say(f"   Schema subject: {schema_subject}")
    if partitions is not None:
        say(f"   Partitions: {partitions}")


@topics.command("delete")
@topic_argument
@click.pass_obj
def delete(line: AdminLine, topic: str, namespace: str | None) -> None:
    """Delete a topic with all its partitions."""
    done = line.ask("TopicAdmin/DeleteTopic", pb.TopicRequest(name=topic), pb.TopicResponse)
    say(f"Topic Deleted: {str(done.success).lower()}")


@topics.command("unload")
@topic_argument
@click.pass_obj
def unload(line: AdminLine, topic: str, namespace: str | None) -> None:
    """Move a topic to another broker."""
    done = line.ask("TopicAdmin/UnloadTopic", pb.TopicRequest(name=topic), pb.TopicResponse)
    say(f"Topic Unloaded: {str(done.success).lower()}")


@topics.command("subscriptions")
@topic_argument
@json_output
@click.pass_obj
def subscriptions(line: AdminLine, topic: str, namespace: str | None, output: str | None) -> None:
    """List the subscriptions of a topic."""
    request = pb.TopicRequest(name=topic)
    names = list(line.ask("TopicAdmin/ListSubscriptions", request, pb.SubscriptionListResponse).subscriptions)
    if not names:
        check_topic_exists(line, topic)
    if output:
        show_json(names)
    else:
        say(f"Subscriptions: {quoted(names)}")


@topics.command("unsubscribe")
@topic_argument
@click.option("-s", "--subscription", required=True)
@click.pass_obj
def unsubscribe(line: AdminLine, topic: str, namespace: str | None, subscription: str) -> None:
    """Delete a subscription."""
    request = pb.SubscriptionRequest(topic=topic, subscription=subscription)
    done = line.ask("TopicAdmin/Unsubscribe", request, pb.SubscriptionResponse)
    say(f"Unsubscribed: {str(done.success).lower()}")


@topics.command("describe")
@topic_argument
@json_output
@click.pass_obj
def describe(line: AdminLine, topic: str, namespace: str | None, output: str | None) -> None:
    """Show a topic's delivery mode, schema and subscriptions."""
    request = pb.DescribeTopicRequest(name=topic)
    found = line.ask("TopicAdmin/DescribeTopic", request, pb.DescribeTopicResponse)
    if not (found.broker_id or found.subscriptions or found.HasField("schema_subject")):
        check_topic_exists(line, topic)
    names = ("schema_subject", "schema_id", "schema_version", "schema_type", "compatibility_mode")
    schema: dict[str, Any] = {name: getattr(found, name) if found.HasField(name) else None for name in names}
    if output:
        about = {"topic": found.name, "broker_id": found.broker_id, "delivery": found.delivery}
        show_json({**about, **schema, "subscriptions": list(found.subscriptions)})
        return
    say(f"Topic: {found.name}", f"Broker ID: {found.broker_id}", f"Delivery: {found.delivery}")
    if schema["schema_subject"] is None:
        say("Schema: none")
    else:
        labels = ("Subject", "Schema ID", "Version", "Type", "Compatibility")
        say("Schema:", *(f"  {label}: {schema[name]}" for label, name in zip(labels, names, strict=True)))
    say(f"Subscriptions: {quoted(list(found.subscriptions))}")
