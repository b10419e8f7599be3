"""``danube bench``: throughput and latency against a running broker."""

from __future__ import annotations

import secrets
from typing import Any

import click

from danube.cli.terminal import arguments
from danube.cli.terminal.addressing import Address, address_option, explaining, topic_name
from danube.cli.terminal.lazy import LazyGroup
from danube.cli.terminal.output import output_option, show
from danube.cli.terminal.services import Services


@click.group(cls=LazyGroup)
def bench() -> None:
    """Measure throughput and latency against a running broker.

    Each producer and consumer is a process of its own.  The result includes the durability level, because a
    figure without it is meaningless.  The topic is made for the run and deleted after it, unless -t names
    one.

    \b
    danube bench publish --size 100 --count 5000000 --durability fsync -o json
    danube bench e2e --non-reliable --consumers 4
    danube bench latency --rate 1000
    """


_common_options = arguments.together(
    address_option(),
    click.option("-t", "--topic", type=topic_name, metavar="TOPIC", help="Use this topic and keep it."),
    click.option("--size", type=arguments.size_bytes, default="100", show_default=True, metavar="BYTES"),
    click.option("-p", "--partitions", type=click.IntRange(min=0), default=0, help="0: not partitioned."),
    click.option("--reliable/--non-reliable", default=True, show_default=True),
    click.option("--durability", type=click.Choice(["memory", "written", "fsync"]), help="[written]"),
    output_option(),
)


_volume_options = arguments.together(
    click.option("-c", "--count", type=click.IntRange(min=1), default=1_000_000, show_default=True),
    click.option(
        "--batch",
        type=click.IntRange(1, 65_536),
        default=1_000,
        show_default=True,
        help="Records per batch; 1: each by itself.",
    ),
    click.option("--producers", type=click.IntRange(1, 64), default=1, show_default=True),
    click.option("--rate", type=click.IntRange(min=0), default=0, help="Records/s in all; 0: no bound."),
)


_consumers_option = click.option(
    "--consumers",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Each has its own subscription, so each receives every record.",
)


@bench.command("publish", short_help="Records sent and acknowledged per second.")
@_volume_options
@_common_options
@click.pass_obj
def publish(services: Services, /, **options: Any) -> None:
    """Send --count records and wait for every acknowledgement."""
    _run(services, "publish", consumers=0, **options)


@bench.command("consume", short_help="Stored records received per second.")
@_consumers_option
@_volume_options
@_common_options
@click.pass_obj
def consume(services: Services, /, **options: Any) -> None:
    """Store --count records, then receive and acknowledge them from the start."""
    if not options["reliable"]:
        raise click.UsageError("A non-reliable topic stores nothing to be received later; use e2e.")
    _run(services, "consume", **options)


@bench.command("e2e", short_help="Records from producers to consumers per second.")
@_consumers_option
@_volume_options
@_common_options
@click.pass_obj
def e2e(services: Services, /, **options: Any) -> None:
    """Send and receive at the same time."""
    _run(services, "e2e", **options)


@bench.command("latency", short_help="Time to an acknowledgement, and to a consumer.")
@click.option("-c", "--count", type=click.IntRange(min=1), default=10_000, show_default=True)
@click.option("--rate", type=click.IntRange(1, 100_000), default=1_000, show_default=True, help="Records/s.")
@_common_options
@click.pass_obj
def latency(services: Services, /, **options: Any) -> None:
    """Send single records on a schedule; report microseconds at p50, p99 and p999.

    If an acknowledgement is late, the latency of delayed records counts from the time they were due.
    """
    if options["size"] < 8:
        raise click.UsageError("--size is at least 8 here: a record carries the time it was sent.")
    _run(services, "latency", batch=1, producers=1, consumers=1, **options)


def _run(
    services: Services,
    workload: str,
    *,
    service_addr: Address,
    topic: str | None,
    reliable: bool,
    durability: str | None,
    output: str,
    **options: Any,
) -> None:
    from danube.cli.records.bench_run import Plan, measure

    level = durability or ("written" if reliable else "memory")
    if reliable == (level == "memory"):
        raise click.UsageError("Reliable topics are written or fsync; non-reliable ones are memory.")
    plan = Plan(
        workload=workload,
        address=service_addr.url,
        topic=topic or f"/default/bench-{secrets.token_hex(4)}",
        temporary=topic is None,
        reliable=reliable,
        durability=level,
        **options,
    )
    with explaining(service_addr):
        show(measure(services, plan), output)
