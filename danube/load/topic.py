"""The topic and subscriptions of a run: made before the first record, taken away at the end."""

from __future__ import annotations

import secrets
import socket
from typing import Final

import danube.sync
from danube.client.machine.address import Address, refused
from danube.client.machine.admin import TopicInfo
from danube.core.batch.payloads import larger_record_hint
from danube.errors import DanubeError, InvalidArgument, PolicyMismatch, TopicNotFound
from danube.host.telemetry import events
from danube.limits import GIB, RECORD_BYTES_DEFAULT
from danube.load.links.links import Place
from danube.load.plan import Plan, size_label

RETENTION_BYTES: Final = 4 * GIB  # of a partition of a topic that is made: a long run must not fill the disk
REDELIVERIES_MAX: Final = 1_000_000  # a slow consumer must not block its subscription
CONNECT_TIMEOUT_S: Final = 10.0
_telemetry = events("load")


def new_run() -> str:
    """16 hexadecimal digits that no other run has."""
    return secrets.token_hex(8)


def subscription_name(run: str, protocol: str, mode: str) -> str:
    return f"load-{run}-{protocol}-{mode}"


def subscriptions(plan: Plan, run: str) -> dict[str, tuple[str, str]]:
    """Name of each subscription of a run, with its protocol and mode."""
    return {subscription_name(run, *both): both for both in plan.consumer_counts()}


def connect(plan: Plan) -> danube.sync.Client:
    return danube.sync.connect(
        plan.broker,
        name="danube-load",
        connect_timeout=CONNECT_TIMEOUT_S,
        reconnect_timeout=CONNECT_TIMEOUT_S,
    )


def check(client: danube.sync.Client, plan: Plan) -> None:
    """Raise DanubeError if the topic that the plan names cannot be used; make it where it is missing."""
    if plan.topic:
        check_fits(plan, _find_or_make(client, plan, plan.topic))


def check_port(address: str) -> None:
    """Raise ConnectionFailed if nothing listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    place = Address(host.strip("[]"), int(port))
    try:
        socket.create_connection(place, CONNECT_TIMEOUT_S).close()
    except OSError as error:
        failure = refused(place, error)
        failure.what = f"cannot reach the broker's gRPC port at {place}"
        failure.hint = "give its address with --grpc-broker"
        raise failure from None


def prepare(plan: Plan, run: str) -> Place:
    """Find or make the topic and every subscription; raises DanubeError if that cannot be done."""
    with connect(plan) as client:
        info = _find_or_make(client, plan, plan.topic or f"/default/load-{run}")
        check_fits(plan, info)
        for name, (_, mode) in subscriptions(plan, run).items():
            # The first record comes later, so this is where the subscription has to begin.
            with client.consumer(info.topic, name, mode, start="latest", prefetch_records=1):
                pass
    return Place(info.topic, tuple(info.partitions), info.durability)


def _find_or_make(client: danube.sync.Client, plan: Plan, topic: str) -> TopicInfo:
    try:
        return client.admin.topic(topic)
    except TopicNotFound:
        pass
    return client.admin.create_topic(
        topic,
        partitions=plan.partitions,
        reliable=plan.durability != "memory",
        durability=plan.durability or "written",
        retention_bytes=RETENTION_BYTES,
        max_record_bytes=max(plan.size_max, RECORD_BYTES_DEFAULT),
        failure={"max_redelivery_count": REDELIVERIES_MAX},
    )


def check_fits(plan: Plan, info: TopicInfo) -> None:
    """Raise if an existing topic does not fit the plan."""
    if plan.durability and plan.durability != info.durability:
        raise PolicyMismatch(
            f"topic {info.topic} has durability {info.durability}",
            why=f"--durability {plan.durability} was asked for",
            hint="leave --durability out to take the topic as it is",
        )
    if info.max_record_bytes and plan.size_max > info.max_record_bytes:
        raise InvalidArgument(
            f"records of {size_label(plan.size_max)} are too large for topic {info.topic}",
            why=f"its limit is {info.max_record_bytes} bytes",
            hint=f"give smaller --sizes, or {larger_record_hint(plan.size_max, info.topic)}",
        )


def discard(plan: Plan, run: str, place: Place) -> None:
    """Delete the run's topic and subscriptions; failures are named in the log."""
    try:
        with connect(plan) as client:
            if not plan.topic:
                client.admin.delete_topic(place.topic)
                return
            for name in subscriptions(plan, run):
                client.admin.delete_subscription(place.topic, name)
    except DanubeError as error:
        _telemetry.warning("left behind", topic=place.topic, run=run, reason=str(error))
