"""``danube consume``: records of a topic to standard output."""

from __future__ import annotations

import os
import secrets
import socket
from typing import Any

import click

from danube.cli.records.produce import DEFAULT_TOPIC
from danube.cli.terminal import arguments
from danube.cli.terminal.addressing import address_option, topic_name
from danube.cli.terminal.output import output_option
from danube.cli.terminal.services import Services

DEFAULT_CONSUMER = "consumer_pubsub"  # as upstream's command line


@click.command(short_help="Receive records of a topic.")
@click.argument("topic_argument", metavar="[TOPIC]", required=False, type=topic_name)
@address_option()
@click.option("-t", "--topic", type=topic_name, metavar="TOPIC", help=f"Topic.  [{DEFAULT_TOPIC}]")
@click.option("-n", "--consumer", default=DEFAULT_CONSUMER, show_default=True, help="Name of the consumer.")
@click.option("-m", "--subscription", help="Subscription; without it a temporary one, gone at the end.")
@click.option(
    "--sub-type",
    type=click.Choice(arguments.MODES),
    default="shared",
    show_default=True,
    help="How its consumers share the records.",
)
@click.option(
    "--from",
    "start",
    type=arguments.position,
    metavar="WHERE",
    help="Where a new subscription begins: earliest, latest, offset:N, N, a time or -1h.  [latest]",
)
@click.option("-c", "--count", type=click.IntRange(min=1), help="Exit after this many records.")
@click.option("--until-end", is_flag=True, help="Exit at the end that the log had at the start.")
@click.option(
    "--timeout", "timeout_ms", type=arguments.duration_ms, help="Exit when no record arrived for this time."
)
@click.option("--no-ack", is_flag=True, help="Acknowledge no record.")
@click.option("--filter", "filters", multiple=True, help="Keys to receive, as a glob (key-shared).")
@click.option("--delimiter", default="\n", help="Text after each payload with -o raw.  [newline]")
@output_option("text", "json", "raw", default="text")
@click.pass_obj
def consume(
    services: Services,
    /,
    topic_argument: str | None,
    topic: str | None,
    subscription: str | None,
    sub_type: str,
    no_ack: bool,
    delimiter: str,
    output: str,
    **asked: Any,
) -> None:
    """Receive records of a topic and acknowledge each one after it was printed.

    \b
    danube consume orders                                follow new records
    danube consume orders --from earliest --until-end    all records, then exit
    danube consume orders -m billing --sub-type key-shared -o json
    danube consume orders --from -1h --no-ack -c 10      look at ten records, acknowledge none

    Opening the topic is given --timeout, but 5 s at the least.
    Without -m no other subscription's progress changes.  Exit code 7: --count records, or all up to the end
    with --until-end, did not arrive within --timeout; 12: the broker cannot read them, and says why.
    """
    from danube.cli.records.printing import Printer
    from danube.cli.records.receiving import Wish, receive_all
    from danube.cli.terminal.eventloop import run

    mode = sub_type.replace("-", "_").replace("fail_over", "failover")
    if asked["filters"] and mode != "key_shared":
        raise click.UsageError("--filter goes with --sub-type key-shared.")
    wish = Wish(
        topic=topic_argument or topic or DEFAULT_TOPIC,
        subscription=subscription or _temporary_name(),
        temporary=subscription is None,
        mode=mode,
        acknowledge=not no_ack,
        **asked,
    )
    run(receive_all(services, wish, Printer(wish.topic, output, delimiter.encode())))


def _temporary_name() -> str:
    return f"cli-{socket.gethostname()[:100]}-{os.getpid()}-{secrets.token_hex(3)}"
