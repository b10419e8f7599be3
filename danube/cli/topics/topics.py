"""``danube topics``: list, create, describe, update, delete, seal, unload and accept-loss.

Waiting until what was sealed is in the object store.
"""

from __future__ import annotations

from collections.abc import Callable
from time import sleep
from typing import Any, Final

import click

from danube.cli.terminal import arguments
from danube.cli.terminal.addressing import Address, address_option, explaining, page_options, topic_name
from danube.cli.terminal.confirming import confirm, yes_option
from danube.cli.terminal.lazy import LazyGroup
from danube.cli.terminal.output import output_option, plain, show
from danube.cli.terminal.services import Services
from danube.errors import NotSupported, OperationTimeout
from danube.host.clock import monotonic_ns

COLUMNS = ("topic", "partition_count", "reliable", "durability", "max_record_bytes")
_FAILURE_FIELDS = (
    "max_redelivery_count",
    "ack_timeout_ms",
    "base_redelivery_delay_ms",
    "max_redelivery_delay_ms",
    "backoff",
    "poison",
    "dead_letter_topic",
)
_topic_argument = click.argument("topic", type=topic_name, metavar="TOPIC")


@click.group(cls=LazyGroup, aliases={"ls": "list", "rm": "delete", "show": "describe"})
def topics() -> None:
    """List, create, describe, update and delete topics.

    \b
    danube topics create orders --partitions 4 --durability fsync --retention-time 30d
    danube topics list -o json
    """


def _policy_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a topic's policy; one left out keeps the default, in update the present value."""
    duration, size = arguments.duration_ms, arguments.size_bytes
    options = [
        click.option("--durability", type=click.Choice(["memory", "written", "fsync"])),
        click.option(
            "--retention-time", "retention_ms", type=duration, help="Delete older; 0 keeps for ever."
        ),
        click.option("--retention-size", "retention_bytes", type=size, help="Per partition; 0: no bound."),
        click.option(
            "--retention-segments", type=click.IntRange(min=0), help="Sealed segments; 0: no bound."
        ),
        click.option(
            "--cleanup",
            type=click.Choice(["delete", "compact", "compact_delete"]),
            help="delete: by retention; compact: keep the latest record of each key; or both.",
        ),
        click.option(
            "--tombstone-retention",
            "tombstone_retention_ms",
            type=duration,
            help="Keep a key's empty record this long when compacting.",
        ),
        click.option("--max-record-size", "max_record_bytes", type=size),
        click.option("--max-unacked", type=click.IntRange(min=1), help="Records in flight per subscription."),
        click.option(
            "--max-dispatch-rate",
            type=click.IntRange(min=0),
            help="Records a second per subscription.",
        ),
        click.option("--ack-timeout", "ack_timeout_ms", type=duration, help="Redeliver after this long."),
        click.option("--max-redelivery-count", type=click.IntRange(min=0), help="Then --poison decides."),
        click.option("--base-redelivery-delay", "base_redelivery_delay_ms", type=duration),
        click.option("--max-redelivery-delay", "max_redelivery_delay_ms", type=duration),
        click.option("--backoff", type=click.Choice(["fixed", "exponential"])),
        click.option("--poison", type=click.Choice(["block", "drop", "dead_letter"])),
        click.option("--dead-letter-topic", type=topic_name),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def policy_fields(given: dict[str, Any]) -> dict[str, Any]:
    """The policy's fields that were given; the failure policy's are in ``failure``."""
    chosen = {name: value for name, value in given.items() if value is not None}
    failure = {name: chosen.pop(name) for name in _FAILURE_FIELDS if name in chosen}
    return chosen | ({"failure": failure} if failure else {})


@topics.command("list", short_help="List topics.")
@address_option()
@click.option("--namespace", help="Only this namespace.")
@page_options
@output_option()
@click.pass_obj
def list_topics(
    services: Services, /, service_addr: Address, namespace: str | None, output: str, **page: Any
) -> None:
    """List topics with their delivery mode and durability, by name."""
    start = "" if namespace is None else f"/{namespace.strip('/')}/"
    if not page["prefix"].startswith("/"):
        page["prefix"] = (
            start + page["prefix"] if start or not page["prefix"] else f"/default/{page['prefix']}"
        )
    elif not page["prefix"].startswith(start):
        raise click.BadParameter(f"--prefix {page['prefix']} is not in namespace {namespace}")
    with explaining(service_addr), services.connect(service_addr.url) as client:
        entries = [topic_object(entry) for entry in client.admin.list_topics(**page)]
    show(entries, output, COLUMNS)


@topics.command("create", short_help="Create a topic.")
@_topic_argument
@address_option()
@click.option("-p", "--partitions", type=click.IntRange(min=0), default=0, help="0: not partitioned.")
@click.option("--reliable/--non-reliable", default=None, help="Non-reliable topics store nothing.")
@_policy_options
@output_option()
@click.pass_obj
def create(
    services: Services,
    /,
    topic: str,
    service_addr: Address,
    partitions: int,
    reliable: bool | None,
    output: str,
    **policy: Any,
) -> None:
    """Create a topic; exit code 4 when it exists."""
    fields = policy_fields({"reliable": reliable, **policy})
    with explaining(service_addr), services.connect(service_addr.url) as client:
        made = client.admin.create_topic(topic, partitions=partitions, **fields)
    show(topic_object(made), output)


@topics.command("describe", short_help="Show a topic's policy and partitions.")
@_topic_argument
@address_option()
@output_option()
@click.pass_obj
def describe(services: Services, /, topic: str, service_addr: Address, output: str) -> None:
    """Show a topic's policy, partitions, offsets and subscriptions."""
    with explaining(service_addr), services.connect(service_addr.url) as client, suggesting(client):
        described = client.admin.describe_topic(topic)
    show(topic_object(described), output)


@topics.command("update", short_help="Change a topic's policy.")
@_topic_argument
@address_option()
@_policy_options
@output_option()
@click.pass_obj
def update(services: Services, /, topic: str, service_addr: Address, output: str, **policy: Any) -> None:
    """Change the given parts of a topic's policy; what it stored stays."""
    fields = policy_fields(policy)
    if not fields:
        raise click.UsageError("Give at least one option to change.")
    with explaining(service_addr), services.connect(service_addr.url) as client, suggesting(client):
        if "failure" in fields:
            present = plain(client.admin.describe_topic(topic))
            fields["failure"] = present["topic"]["policy"].get("failure", {}) | fields["failure"]
        changed = client.admin.update_topic(topic, **fields)
    show(topic_object(changed), output)


@topics.command("delete", short_help="Delete a topic and everything in it.")
@_topic_argument
@address_option()
@yes_option
@output_option()
@click.pass_obj
def delete(services: Services, /, topic: str, service_addr: Address, yes: bool, output: str) -> None:
    """Delete a topic, its records and its subscriptions."""
    confirm(services, topic, f"topic {topic}, its records and its subscriptions will be deleted", yes)
    with explaining(service_addr), services.connect(service_addr.url) as client, suggesting(client):
        client.admin.delete_topic(topic)
    show({"topic": topic, "deleted": True}, output)


@topics.command("seal", short_help="Seal what is written, so that it can be uploaded.")
@_topic_argument
@address_option()
@click.option("--wait", is_flag=True, help="Until it is in the object store, too.")
@click.option("--timeout", type=arguments.duration_ms, default="60s", help="How long to wait.  [60s]")
@output_option()
@click.pass_obj
def seal(
    services: Services, /, topic: str, service_addr: Address, wait: bool, timeout: int, output: str
) -> None:
    """End the active segment of every partition now, instead of when it is full or old."""
    from danube.cli.topics.topics import wait_uploaded

    with explaining(service_addr), services.connect(service_addr.url) as client, suggesting(client):
        ends = client.admin.seal(topic)
        if wait:
            wait_uploaded(client, topic, ends, timeout)
    show({"topic": topic, "sealed_ends": ends, "uploaded": wait}, output)


@topics.command("unload", short_help="Let other brokers of a cluster take a topic over.")
@_topic_argument
@address_option()
@output_option()
@click.pass_obj
def unload(services: Services, /, topic: str, service_addr: Address, output: str) -> None:
    """Ask the owners of a topic's partitions to release them; a name like orders-part-3 means that one."""
    with explaining(service_addr), services.connect(service_addr.url) as client, suggesting(client):
        answer = client.admin.cluster("unload_topic", topic=topic)
    show(answer, output)


@topics.command("accept-loss", short_help="Give up records that only a lost disk had.")
@_topic_argument
@address_option()
@yes_option
@output_option()
@click.pass_obj
def accept_loss(services: Services, /, topic: str, service_addr: Address, yes: bool, output: str) -> None:
    """Stop waiting for the disks of brokers that will not come back; see holes in `danube topics describe`.

    Subscriptions go on, and what comes back later stays where it is.  Tells how many offsets are given up: at
    most so many records, as a hole also has offsets that were reserved and never given to one.
    """
    with explaining(service_addr), services.connect(service_addr.url) as client, suggesting(client):
        waiting = [one for one in client.admin.open_holes(topic) if one["holes"]]
        ends = {one["partition"]: one["holes"][-1]["end"] for one in waiting}
        offsets = sum(hole["end"] - hole["start"] for one in waiting for hole in one["holes"])
        if ends:
            brokers = ", ".join(sorted({str(hole["broker_id"]) for one in waiting for hole in one["holes"]}))
            what = f"up to {offsets} records of {topic} that only the disks of brokers {brokers} may have"
            confirm(services, topic, f"{what} will be given up", yes)
            client.admin.accept_loss(ends)
    show({"topic": topic, "given_up_offsets": offsets, "partitions": waiting}, output)


def topic_object(entry: Any) -> dict[str, Any]:
    """Return a topic as it is printed: one flat object, in a description with what each partition says."""
    found: dict[str, Any] = plain(entry)
    if isinstance(found.get("topic"), dict):
        found = {**found["topic"], "partitions": found["partitions"]}
    partitions = found.pop("partitions", [])
    return {**found, "partition_count": len(partitions), "partitions": partitions}


class suggesting:  # noqa: N801 - reads as a word in a with statement
    """Adds a did-you-mean to TopicNotFound, from the topics that the broker has."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from danube.cli.terminal.addressing import suggest_topic
        from danube.errors import DanubeError, TopicNotFound

        if isinstance(error, TopicNotFound):
            try:
                suggest_topic(error, [plain(one)["topic"] for one in self._client.admin.list_topics()])
            except DanubeError:
                pass  # the first error is the one to tell


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
