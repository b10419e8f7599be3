"""``danube-admin topics``: topics themselves; their subscriptions and schemas are in the neighbours.

``danube-admin topics set-failure-policy`` and ``get-failure-policy``.

``danube-admin topics`` and the schema that a topic keeps to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import click

from danube.cli.upstream.admin_line import (
    AdminLine,
    check_broker_exists,
    check_namespace_exists,
    check_topic_exists,
    topic_argument,
)
from danube.cli.upstream.calls import fields_of
from danube.cli.upstream.root import Shown, json_output, quoted, upstream_command
from danube.errors import NotFound
from danube.server.proto import DanubeAdmin_pb2 as pb

_POLICIES: Final = click.Choice(["none", "warn", "enforce"], case_sensitive=False)
_POISONS: Final = {
    "dead_letter": pb.DeadLetter, "dead-letter": pb.DeadLetter, "block": pb.Block, "drop": pb.Drop
}  # fmt: skip
_BACKOFFS: Final = {"fixed": pb.Fixed, "exponential": pb.Exponential}
_RELIABLE: Final = ("reliable", "reliable_dispatch", "reliable-dispatch")
_U32 = click.IntRange(0, (1 << 32) - 1)
_U64 = click.IntRange(0, (1 << 64) - 1)
_subscription = click.option("-s", "--subscription", required=True)
_payload_validation = click.option("--enable-payload-validation", is_flag=True)


@click.group()
def topics() -> None:
    """Topics, subscriptions and their policies."""


@upstream_command(topics, "set-failure-policy")
@topic_argument
@_subscription
@click.option("--max-redelivery-count", type=_U32, required=True)
@click.option("--ack-timeout-ms", type=_U64, required=True)
@click.option("--base-redelivery-delay-ms", type=_U64, required=True)
@click.option("--max-redelivery-delay-ms", type=_U64, required=True)
@click.option("--backoff-strategy", type=click.Choice(list(_BACKOFFS)), default="fixed", show_default=True)
@click.option("--dead-letter-topic")
@click.option("--poison-policy", type=click.Choice(list(_POISONS)), required=True)
def set_failure_policy(
    line: AdminLine, topic: str, subscription: str, backoff_strategy: str, poison_policy: str, **fields: Any
) -> list[str]:
    """Set the treatment of messages that are nacked or not acked in time."""
    policy = pb.SubscriptionFailurePolicy(
        backoff_strategy=_BACKOFFS[backoff_strategy], poison_policy=_POISONS[poison_policy], **fields
    )
    method = "TopicAdmin/SetSubscriptionFailurePolicy"
    line.ask(method, topic=topic, subscription=subscription, failure_policy=policy)
    return [f"✅ Failure policy updated for topic '{topic}' subscription '{subscription}'"]


@upstream_command(topics, "get-failure-policy", topic_argument, _subscription, json_output)
def get_failure_policy(line: AdminLine, topic: str, subscription: str) -> Shown:
    """Show a subscription's failure policy."""
    method = "TopicAdmin/GetSubscriptionFailurePolicy"
    found = line.ask(method, topic=topic, subscription=subscription)
    if not found.HasField("failure_policy"):
        raise NotFound(
            f"subscription {subscription!r} of topic {topic} has no failure policy",
            hint="set one with `topics set-failure-policy`",
        )
    policy = found.failure_policy
    numbers = (
        "max_redelivery_count", "ack_timeout_ms", "base_redelivery_delay_ms", "max_redelivery_delay_ms"
    )  # fmt: skip
    shown = {
        "topic": topic,
        "subscription": subscription,
        **fields_of(policy, *numbers),
        "backoff_strategy": "exponential" if policy.backoff_strategy == pb.Exponential else "fixed",
        "dead_letter_topic": policy.dead_letter_topic if policy.HasField("dead_letter_topic") else None,
        "poison_policy": {pb.DeadLetter: "dead_letter", pb.Block: "block"}.get(policy.poison_policy, "drop"),
    }
    return Shown(shown, [f"{name}: {'none' if value is None else value}" for name, value in shown.items()])


@upstream_command(topics, "configure-schema")
@topic_argument
@click.option("--subject", required=True)
@click.option("--validation-policy", type=_POLICIES, default="none", show_default=True)
@_payload_validation
def configure_schema(
    line: AdminLine, topic: str, subject: str, validation_policy: str, enable_payload_validation: bool
) -> list[str]:
    """Set a topic's schema subject and the treatment of messages that break it."""
    method, payload = "SchemaRegistry/ConfigureTopicSchema", enable_payload_validation
    validation = _set_validation(line, method, topic, validation_policy, payload, schema_subject=subject)
    return [f"Schema configuration set for topic '{topic}'", f"  Subject: {subject}", *validation]


@upstream_command(topics, "set-validation-policy")
@topic_argument
@click.option("--policy", type=_POLICIES, required=True)
@_payload_validation
def set_validation_policy(
    line: AdminLine, topic: str, policy: str, enable_payload_validation: bool
) -> list[str]:
    """Change the treatment of messages that break the topic's schema."""
    method = "SchemaRegistry/UpdateTopicValidationPolicy"
    validation = _set_validation(line, method, topic, policy, enable_payload_validation)
    return [f"Validation policy updated for topic '{topic}'", *validation]


@upstream_command(topics, "get-schema-config", topic_argument, json_output)
def get_schema_config(line: AdminLine, topic: str) -> Shown:
    """Show the schema that a topic keeps to."""
    found = line.ask("SchemaRegistry/GetTopicSchemaConfig", topic_name=topic)
    about = {
        "topic": topic,
        "schema_subject": found.schema_subject,
        "validation_policy": found.validation_policy.upper(),
        **fields_of(found, "enable_payload_validation", "schema_id"),
    }
    validation = _validation(found.validation_policy, found.enable_payload_validation)
    subject = f"  Schema Subject: {found.schema_subject or 'none'}"
    return Shown(about, [f"Topic: {topic}", subject, *validation, f"  Schema ID: {found.schema_id}"])


def _set_validation(
    line: AdminLine, method: str, topic: str, policy: str, payload: bool, **more: str
) -> list[str]:
    asked = {"validation_policy": policy.upper(), "enable_payload_validation": payload}
    line.ask(method, topic_name=topic, **asked, **more)
    return _validation(policy, payload)


def _validation(policy: str, payload: bool) -> list[str]:
    state = "ENABLED" if payload else "DISABLED"
    return [f"  Validation Policy: {policy.upper()}", f"  Payload Validation: {state}"]


@upstream_command(topics, "list")
@click.option("--namespace", help="Topics of this namespace.")
@click.option("--broker", help="Topics of the broker with this id.")
@json_output
def list_topics(line: AdminLine, namespace: str | None, broker: str | None) -> Shown:
    """List topics of a namespace or of a broker."""
    if (namespace is None) == (broker is None):
        raise click.UsageError("Give either --namespace or --broker.")
    if broker is not None:
        found = line.ask("TopicAdmin/ListBrokerTopics", broker_id=broker).topics
        if not found:
            check_broker_exists(line, broker)
    else:
        found = line.ask("TopicAdmin/ListNamespaceTopics", name=namespace).topics
        if not found:
            check_namespace_exists(line, str(namespace))
    return Shown(
        [fields_of(one, "name", "broker_id", "delivery") for one in found], list(map(_topic_line, found))
    )


def _topic_line(one: Any) -> str:
    where = f"broker_id: {one.broker_id}, " if one.broker_id else ""
    return f"Topic: {one.name} ({where}delivery: {one.delivery})"


@upstream_command(topics, "create")
@topic_argument
@click.option("--partitions", type=_U32, help="Make a partitioned topic.")
@click.option("--schema-subject")
@click.option(
    "--dispatch-strategy",
    default="non_reliable",
    show_default=True,
    help="non_reliable or reliable.",
)
def create(
    line: AdminLine, topic: str, partitions: int | None, schema_subject: str | None, dispatch_strategy: str
) -> Iterator[str]:
    """Create a topic."""
    strategy = pb.Reliable if dispatch_strategy.lower() in _RELIABLE else pb.NonReliable
    facts = {"schema_subject": schema_subject, "dispatch_strategy": strategy}
    if partitions is None:
        line.ask("TopicAdmin/CreateTopic", name=topic, **facts)
        yield f"✅ Topic created: {topic}"
    else:
        line.ask("TopicAdmin/CreatePartitionedTopic", base_name=topic, partitions=partitions, **facts)
        yield f"✅ Partitioned topic created: {topic}"
    if schema_subject:
        yield f"   Schema subject: {schema_subject}"
    if partitions is not None:
        yield f"   Partitions: {partitions}"


@upstream_command(topics, "delete", topic_argument)
def delete(line: AdminLine, topic: str) -> list[str]:
    """Delete a topic with all its partitions."""
    return line.tell_success("Topic Deleted", "TopicAdmin/DeleteTopic", name=topic)


@upstream_command(topics, "unload", topic_argument)
def unload(line: AdminLine, topic: str) -> list[str]:
    """Move a topic to another broker."""
    return line.tell_success("Topic Unloaded", "TopicAdmin/UnloadTopic", name=topic)


@upstream_command(topics, "subscriptions", topic_argument, json_output)
def subscriptions(line: AdminLine, topic: str) -> Shown:
    """List the subscriptions of a topic."""
    names = list(line.ask("TopicAdmin/ListSubscriptions", name=topic).subscriptions)
    if not names:
        check_topic_exists(line, topic)
    return Shown(names, [f"Subscriptions: {quoted(names)}"])


@upstream_command(topics, "unsubscribe", topic_argument, _subscription)
def unsubscribe(line: AdminLine, topic: str, subscription: str) -> list[str]:
    """Delete a subscription."""
    return line.tell_success("Unsubscribed", "TopicAdmin/Unsubscribe", topic=topic, subscription=subscription)


@upstream_command(topics, "describe", topic_argument, json_output)
def describe(line: AdminLine, topic: str) -> Shown:
    """Show a topic's delivery mode, schema and subscriptions."""
    found = line.ask("TopicAdmin/DescribeTopic", name=topic)
    if not (found.broker_id or found.subscriptions or found.HasField("schema_subject")):
        check_topic_exists(line, topic)
    names = ("schema_subject", "schema_id", "schema_version", "schema_type", "compatibility_mode")
    schema: dict[str, Any] = {name: getattr(found, name) if found.HasField(name) else None for name in names}
    subscribed = list(found.subscriptions)
    about = {"topic": found.name, "broker_id": found.broker_id, "delivery": found.delivery}
    lines = [f"Topic: {found.name}", f"Broker ID: {found.broker_id}", f"Delivery: {found.delivery}"]
    if schema["schema_subject"] is None:
        lines.append("Schema: none")
    else:
        labels = ("Subject", "Schema ID", "Version", "Type", "Compatibility")
        lines.append("Schema:")
        lines += [f"  {label}: {schema[name]}" for label, name in zip(labels, names, strict=True)]
    lines.append(f"Subscriptions: {quoted(subscribed)}")
    return Shown({**about, **schema, "subscriptions": subscribed}, lines)
