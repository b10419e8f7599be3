"""``danube produce``: records from the command line, a file or standard input to a topic."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import click

from danube.cli.terminal import arguments
from danube.cli.terminal.addressing import Address, address_option, topic_name
from danube.cli.terminal.output import output_option
from danube.cli.terminal.services import Services
from danube.cli.topics.schema_source import schema_choice, schema_options

DEFAULT_TOPIC = "/default/test_topic"  # as upstream's command line
BATCH_RECORDS = 1_000


@click.command(short_help="Send records to a topic.")
@click.argument("topic_argument", metavar="[TOPIC]", required=False, type=topic_name)
@address_option()
@click.option("-t", "--topic", type=topic_name, metavar="TOPIC", help=f"Topic.  [{DEFAULT_TOPIC}]")
@click.option(
    "-n", "--producer-name", help="Name of the producer; a second one with the same name takes over."
)
@click.option("-m", "--message", help="Payload of the record.")
@click.option(
    "-f", "--file", type=click.Path(), help="A file as one record; - reads lines of standard input."
)
@click.option("--lines", is_flag=True, help="Each line of the input is a record.")
@click.option("--ndjson", is_flag=True, help="Each line is a record as `consume -o json` prints it.")
@click.option("-k", "--key", help="Routing key: records of one key go to one partition, in order.")
@click.option("-a", "--attributes", type=arguments.attributes, metavar="K:V,K:V", help="Attributes.")
@click.option("-c", "--count", type=click.IntRange(min=1), default=1, help="Number of times to send it.")
@click.option(
    "-i", "--interval", type=arguments.interval_ms, default="0", help="Pause between: 500 (ms), 2s."
)
@click.option(
    "-p", "--partitions", type=click.IntRange(min=0), default=0, help="Partitions, if it is created."
)
@click.option("--reliable/--non-reliable", default=None, help="Delivery the topic must have.")
@click.option("--durability", type=click.Choice(["memory", "written", "fsync"]), help="Level it must have.")
@click.option("--batch", type=click.IntRange(1, 65_536), default=BATCH_RECORDS, help="Records per batch.")
@schema_options
@output_option("text", "json", default="text")
@click.pass_obj
def produce(
    services: Services,
    /,
    topic_argument: str | None,
    service_addr: Address,
    topic: str | None,
    message: str | None,
    file: str | None,
    lines: bool,
    ndjson: bool,
    producer_name: str | None,
    partitions: int,
    reliable: bool | None,
    durability: str | None,
    key: str | None,
    attributes: dict[str, str] | None,
    schema_subject: str | None,
    schema_version: int | None,
    schema_min_version: int | None,
    schema_file: str | None,
    schema_type: str | None,
    **sending: Any,
) -> None:
    """Send records to a topic, which is created if need be.

    \b
    danube produce orders -m '{"id": 1}' -k eu-1 -a source:shop
    danube produce -t /default/orders -f picture.png
    seq 1000000 | danube produce orders
    danube consume orders --until-end -o json | danube produce copy --ndjson

    An acknowledged record is stored as the topic's durability says.  Exit code 9: some records were
    sent and others were not.  With --schema-subject or --schema-file the records name a schema; their
    bytes are sent as they are.
    """
    from danube.cli.records.sending import Target, send_all
    from danube.cli.records.sources import Record
    from danube.cli.terminal.eventloop import run

    target = Target(
        service_addr=service_addr,
        topic=topic_argument or topic or DEFAULT_TOPIC,
        producer_name=producer_name or f"cli-{socket.gethostname()}-{os.getpid()}"[:200],
        partitions=partitions,
        reliable=reliable,
        durability=durability or "",
        schema=schema_choice(schema_subject, schema_version, schema_min_version, schema_file, schema_type),
    )
    with ExitStack() as stack:
        source = _source(services, stack, message, file, lines or ndjson)
        template = Record(source if isinstance(source, bytes) else b"", key, attributes)
        stream = None if isinstance(source, bytes) else source
        run(send_all(services, target, template, stream, ndjson=ndjson, **sending))


def _source(
    services: Services, stack: ExitStack, message: str | None, file: str | None, by_line: bool
) -> bytes | BinaryIO:
    """The payload, or the stream whose lines are payloads; ``--file`` wins over ``--message``."""
    if file == "-" or (file is None and message is None and not services.can_ask()):
        return sys.stdin.buffer
    if file is not None:
        if by_line:
            return stack.enter_context(_open(file))
        with _open(file) as opened:
            return _one_record(opened, file)
    if message is None:
        raise click.UsageError("Give --message or --file, or pipe lines into it.")
    return message.encode("utf-8", "surrogateescape")


def _open(file: str) -> BinaryIO:
    try:
        return Path(file).open("rb")
    except OSError as error:
        raise click.UsageError(f"{file}: {error.strerror or error}") from None


def _one_record(opened: BinaryIO, file: str) -> bytes:
    from danube.errors import RecordTooLarge
    from danube.limits import RECORD_BYTES_MAX

    payload = opened.read(RECORD_BYTES_MAX + 1)
    if len(payload) > RECORD_BYTES_MAX:
        raise RecordTooLarge(
            f"{file} is larger than {RECORD_BYTES_MAX} bytes",
            why="that is the largest record",
            hint="try --lines",
        )
    return payload
