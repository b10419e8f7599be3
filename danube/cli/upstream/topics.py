"""``danube-admin topics``: topics themselves; their subscriptions and schemas are in the neighbours.

``danube-admin topics set-failure-policy`` and ``get-failure-policy``.

``danube-admin topics`` and the schema that a topic keeps to.
"""

from __future__ import annotations

from typing import Any, Final

import click

from danube.cli.upstream.admin_line import AdminLine, topic_argument
from danube.cli.upstream.missing import check_broker_exists, check_namespace_exists, check_topic_exists
from danube.cli.upstream.root import json_output, quoted, say, show_json
from danube.errors import NotFound
from danube.server.proto import DanubeAdmin_pb2 as pb
from danube.server.proto import SchemaRegistry_pb2 as registry

_POLICIES: Final = click.Choice(["none", "warn", "enforce"], case_sensitive=False)


@click.command("configure-schema")
@topic_argument
@click.option("--subject", required=True)
@click.option("--validation-policy", type=_POLICIES, default="none", show_default=True)
@click.option("--enable-payload-validation", is_flag=True)
@click.pass_obj
def configure_schema(
    line: AdminLine,
    topic: str,
    namespace: str | None,
    subject: str,
    validation_policy: str,
    enable_payload_validation: bool,
) -> None:
    """Set a topic's schema subject and what becomes of messages that break it."""
    request = registry.ConfigureTopicSchemaRequest(
        topic_name=topic,
        schema_subject=subject,
        validation_policy=validation_policy.upper(),
        enable_payload_validation=enable_payload_validation,
    )
    line.ask("SchemaRegistry/ConfigureTopicSchema", request, registry.ConfigureTopicSchemaResponse)
    say(f"Schema configuration set for topic '{topic}'", f"  Subject: {subject}")
    say(*_validation(validation_policy, enable_payload_validation))


@click.command("set-validation-policy")
@topic_argument
@click.option("--policy", type=_POLICIES, required=True)
@click.option("--enable-payload-validation", is_flag=True)
@click.pass_obj
def set_validation_policy(
    line: AdminLine, topic: str, namespace: str | None, policy: str, enable_payload_validation: bool
) -> None:
    """Change what becomes of messages that break the topic's schema."""
    request = registry.UpdateTopicValidationPolicyRequest(
        topic_name=topic,
        validation_policy=policy.upper(),
        enable_payload_validation=enable_payload_validation,
    )
    line.ask(
        "SchemaRegistry/UpdateTopicValidationPolicy", request, registry.UpdateTopicValidationPolicyResponse
    )
    say(f"Validation policy updated for topic '{topic}'", *_validation(policy, enable_payload_validation))


@click.command("get-schema-config")
@topic_argument
@json_output
@click.pass_obj
def get_schema_config(line: AdminLine, topic: str, namespace: str | None, output: str | None) -> None:
    """Show the schema that a topic keeps to."""
    request = registry.GetTopicSchemaConfigRequest(topic_name=topic)
    found = line.ask("SchemaRegistry/GetTopicSchemaConfig", request, registry.GetTopicSchemaConfigResponse)
    if output:
        show_json(
            {
                "topic": topic,
                "schema_subject": found.schema_subject,
                "validation_policy": found.validation_policy.upper(),
                "enable_payload_validation": found.enable_payload_validation,
                "schema_id": found.schema_id,
            }
        )
        return
    say(f"Topic: {topic}", f"  Schema Subject: {found.schema_subject or 'none'}")
    say(*_validation(found.validation_policy, found.enable_payload_validation))
    say(f"  Schema ID: {found.schema_id}")


def _validation(policy: str, payload: bool) -> list[str]:
    state = "ENABLED" if payload else "DISABLED"
    return [f"  Validation Policy: {policy.upper()}", f"  Payload Validation: {state}"]


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
