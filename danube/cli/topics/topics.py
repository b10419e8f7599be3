"""``danube topics``: list, create, describe, update, delete, seal, unload and accept-loss.

It also waits until sealed segments are in the object store.
"""

from __future__ import annotations

from time import sleep
from typing import Any, Final

import click

from danube.cli.terminal import arguments
from danube.cli.terminal.addressing import page_options, topic_name
from danube.cli.terminal.asking import Broker, broker_command
from danube.cli.terminal.confirming import yes_option
from danube.cli.terminal.lazy import LazyGroup
from danube.cli.terminal.output import plain
from danube.core.partition.policy import FailurePolicy
from danube.errors import NotSupported, OperationTimeout
from danube.host.clock import monotonic_ns

COLUMNS = ("topic", "partition_count", "reliable", "durability", "max_record_bytes")
_topic = click.argument("topic", type=topic_name, metavar="TOPIC")


@click.group(cls=LazyGroup, aliases={"ls": "list", "rm": "delete", "show": "describe"})
def topics() -> None:
    """List, create, describe, update and delete topics.

    \b
    danube topics create orders --partitions 4 --durability fsync --retention-time 30d
    danube topics list -o json
    """


_duration, _size = arguments.duration_ms, arguments.size_bytes
# Of a topic's policy; one left out keeps the default, in update the present value.
_policy_options = arguments.together(
    click.option("--durability", type=click.Choice(["memory", "written", "fsync"])),
    click.option(
        "--retention-time", "retention_ms", type=_duration, help="Delete older records; 0 keeps all."
    ),
    click.option("--retention-size", "retention_bytes", type=_size, help="Per partition; 0: no bound."),
    click.option("--retention-segments", type=click.IntRange(min=0), help="Sealed segments; 0: no bound."),
    click.option(
        "--cleanup",
        type=click.Choice(["delete", "compact", "compact_delete"]),
        help="delete: by retention; compact: keep the latest record of each key; or both.",
    ),
    click.option(
        "--tombstone-retention",
        "tombstone_retention_ms",
        type=_duration,
        help="Keep a key's empty record this long when compacting.",
    ),
    click.option("--max-record-size", "max_record_bytes", type=_size),
    click.option("--max-unacked", type=click.IntRange(min=1), help="Records in flight per subscription."),
    click.option(
        "--max-dispatch-rate", type=click.IntRange(min=0), help="Records a second per subscription."
    ),
    click.option("--max-publish-rate", type=click.IntRange(min=0), help="Records a second; 0: no limit."),
    click.option("--max-publish-bytes", type=_size, help="Bytes a second; 0: no limit."),
    click.option("--ack-timeout", "ack_timeout_ms", type=_duration, help="Redeliver after this long."),
    click.option("--max-redelivery-count", type=click.IntRange(min=0), help="Then --poison decides."),
    click.option("--base-redelivery-delay", "base_redelivery_delay_ms", type=_duration),
    click.option("--max-redelivery-delay", "max_redelivery_delay_ms", type=_duration),
    click.option("--backoff", type=click.Choice(["fixed", "exponential"])),
    click.option("--poison", type=click.Choice(["block", "drop", "dead_letter"])),
    click.option("--dead-letter-topic", type=topic_name),
)


def policy_fields(given: dict[str, Any]) -> dict[str, Any]:
    """The policy's fields that were given; the failure policy's are in ``failure``."""
    chosen = {name: value for name, value in given.items() if value is not None}
    failure = {name: chosen.pop(name) for name in FailurePolicy.__struct_fields__ if name in chosen}
    return chosen | ({"failure": failure} if failure else {})


@broker_command(topics, "list", "List topics.", columns=COLUMNS)
@click.option("--namespace", help="Only this namespace.")
@page_options
def list_topics(broker: Broker, namespace: str | None, **page: Any) -> Any:
    """List topics with their delivery mode and durability, by name."""
    start = "" if namespace is None else f"/{namespace.strip('/')}/"
    if not page["prefix"].startswith("/"):
        page["prefix"] = (
            start + page["prefix"] if start or not page["prefix"] else f"/default/{page['prefix']}"
        )
    elif not page["prefix"].startswith(start):
        raise click.BadParameter(f"--prefix {page['prefix']} is not in namespace {namespace}")
    return [topic_object(entry) for entry in broker.admin.list_topics(**page)]


@broker_command(topics, "create", "Create a topic.")
@_topic
@click.option("-p", "--partitions", type=click.IntRange(min=0), default=0, help="0: not partitioned.")
@click.option("--reliable/--non-reliable", default=None, help="Non-reliable topics store nothing.")
@_policy_options
def create(broker: Broker, topic: str, partitions: int, **policy: Any) -> Any:
    """Create a topic; exit code 4 when it exists."""
    return topic_object(broker.admin.create_topic(topic, partitions=partitions, **policy_fields(policy)))


@broker_command(topics, "describe", "Show a topic's policy and partitions.", _topic)
def describe(broker: Broker, topic: str) -> Any:
    """Show a topic's policy, partitions, offsets and subscriptions."""
    return topic_object(broker.admin.describe_topic(topic))


@broker_command(topics, "update", "Change a topic's policy.", _topic, _policy_options)
def update(broker: Broker, topic: str, **policy: Any) -> Any:
    """Change the given parts of a topic's policy; stored records stay."""
    fields = policy_fields(policy)
    if not fields:
        raise click.UsageError("Give at least one option to change.")
    if "failure" in fields:
        present = plain(broker.admin.describe_topic(topic))
        fields["failure"] = present["topic"]["policy"].get("failure", {}) | fields["failure"]
    return topic_object(broker.admin.update_topic(topic, **fields))


@broker_command(topics, "delete", "Delete a topic and everything in it.", _topic, yes_option)
def delete(broker: Broker, topic: str, yes: bool) -> Any:
    """Delete a topic, its records and its subscriptions."""
    broker.confirm(topic, f"topic {topic}, its records and its subscriptions will be deleted", yes)
    broker.admin.delete_topic(topic)
    return {"topic": topic, "deleted": True}


@broker_command(topics, "seal", "Seal all written records, so that they can be uploaded.")
@_topic
@click.option("--wait", is_flag=True, help="Wait until the records are in the object store.")
@click.option("--timeout", type=arguments.duration_ms, default="60s", help="How long to wait.  [60s]")
def seal(broker: Broker, topic: str, wait: bool, timeout: int) -> Any:
    """End the active segment of every partition now, instead of when it is full or old."""
    ends = broker.admin.seal(topic)
    if wait:
        wait_uploaded(broker.client, topic, ends, timeout)
    return {"topic": topic, "sealed_ends": ends, "uploaded": wait}


@broker_command(topics, "unload", "Move a topic to other brokers of the cluster.", _topic)
def unload(broker: Broker, topic: str) -> Any:
    """Ask the owners of a topic's partitions to release them; a name like orders-part-3 means that one."""
    return broker.admin.cluster("unload_topic", topic=topic)


@broker_command(topics, "accept-loss", "Give up records that only a lost disk had.", _topic, yes_option)
def accept_loss(broker: Broker, topic: str, yes: bool) -> Any:
    """Stop waiting for the disks of brokers that will not come back; see holes in `danube topics describe`.

    Subscriptions go on.  Records that come back later are not delivered.  The command prints the number of
    offsets given up; the number of records may be smaller, because a hole also has reserved offsets without a
    record.
    """
    waiting = [one for one in broker.admin.open_holes(topic) if one["holes"]]
    ends = {one["partition"]: one["holes"][-1]["end"] for one in waiting}
    offsets = sum(hole["end"] - hole["start"] for one in waiting for hole in one["holes"])
    if ends:
        brokers = ", ".join(sorted({str(hole["broker_id"]) for one in waiting for hole in one["holes"]}))
        what = f"up to {offsets} records of {topic} that only the disks of brokers {brokers} may have"
        broker.confirm(topic, f"{what} will be given up", yes)
        broker.admin.accept_loss(ends)
    return {"topic": topic, "given_up_offsets": offsets, "partitions": waiting}


def topic_object(entry: Any) -> dict[str, Any]:
    """Return a topic as one flat object for printing; a description includes each partition."""
    found: dict[str, Any] = plain(entry)
    if isinstance(found.get("topic"), dict):
        found = {**found["topic"], "partitions": found["partitions"]}
    partitions = found.pop("partitions", [])
    return {**found, "partition_count": len(partitions), "partitions": partitions}


_POLL_S: Final = 0.2


def wait_uploaded(client: Any, topic: str, ends: list[int], timeout_ms: int) -> None:
    """Ask until every partition is uploaded up to its place in ``ends``.

    Raises OperationTimeout, with the reason where there is one, and NotSupported where nothing is tiered.
    """
    deadline_ns = monotonic_ns() + timeout_ms * 1_000_000
    while True:
        partitions = plain(client.admin.describe_topic(topic))["partitions"]
        late = [one for one, end in zip(partitions, ends, strict=True) if one["uploaded_end"] < end]
        if not late:
            return
        status = client.admin.storage_status(topic)
        if not status["tiered"]:
            raise NotSupported("storage is local: nothing is uploaded", hint="set storage.url")
        if monotonic_ns() >= deadline_ns:
            why = next((row["error"] for row in status["topics"] if row["error"]), "")
            raise OperationTimeout(f"{len(late)} partitions of {topic} are not uploaded yet", why=why)
        sleep(_POLL_S)
