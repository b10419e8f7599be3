"""``danube-cli produce``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from danube.cli.terminal import arguments
from danube.cli.upstream.calls import call
from danube.cli.upstream.root import Outside, Wrong, content_of, say
from danube.cli.upstream.routes import Route, Routes
from danube.errors import DanubeError, InvalidArgument
from danube.host import clock
from danube.server.proto import DanubeApi_pb2 as pb

INTERVAL_MS_MIN = 100


class Producer:
    """One producer of one topic or partition, made at the topic's broker."""

    def __init__(
        self, routes: Routes, topic: str, name: str, schema: pb.SchemaReference | None, reliable: bool
    ) -> None:
        self._routes = routes
        self._topic = topic
        self._name = name
        self._schema = schema
        self._reliable = reliable
        self._route, self._producer_id = self._create()

    def _create(self) -> tuple[Route, int]:
        """Make the producer, or find it again by its name."""

        def attempt(route: Route) -> Any:
            return call(
                route.channel,
                "ProducerService/CreateProducer",
                request_id=self._routes.request_id(),
                producer_name=self._name,
                topic_name=self._topic,
                schema_ref=self._schema,
                producer_access_mode=pb.Shared,
                dispatch_strategy=pb.Reliable if self._reliable else pb.NonReliable,
            )

        route, made = self._routes.retrying(self._topic, attempt)
        return route, made.producer_id

    def send(self, payload: bytes, attributes: dict[str, str], schema: tuple[int, int] | None) -> int:
        """Send one message and return its request id; a broker that went away is looked for again."""
        tried = 0
        while True:
            tried += 1
            try:
                return self._send(payload, attributes, schema)
            except DanubeError as error:
                self._routes.pause_after(error, tried)
                self._route, self._producer_id = self._create()

    def _send(self, payload: bytes, attributes: dict[str, str], schema: tuple[int, int] | None) -> int:
        place = pb.MsgID(
            producer_id=self._producer_id, topic_name=self._topic, broker_addr=self._route.broker_url
        )
        schema_id, version = schema or (None, None)
        answer = call(
            self._route.channel,
            "ProducerService/SendMessage",
            request_id=self._routes.request_id(),
            msg_id=place,
            payload=payload,
            publish_time=clock.wall_us() // 1_000,
            producer_name=self._name,
            attributes=attributes,
            schema_id=schema_id,
            schema_version=version,
        )
        return int(answer.request_id)


@click.command()
@click.option("-s", "--service-addr", required=True, help="The broker, for example http://127.0.0.1:6650.")
@click.option("-n", "--producer-name", default="test_producer", show_default=True)
@click.option("-t", "--topic", default="/default/test_topic", show_default=True)
@click.option("-m", "--message", help="What to send; needed unless --file is given.")
@click.option("-f", "--file", type=click.Path(path_type=Path), help="Send its bytes.")
@click.option("--schema-subject", help="A subject that is registered.")
@click.option("--schema-version", type=click.IntRange(1, (1 << 32) - 1), help="Exactly this version.")
@click.option(
    "--schema-min-version", type=click.IntRange(1, (1 << 32) - 1), help="This version or a later one."
)
@click.option("--schema-file", type=click.Path(path_type=Path), help="Register it first.")
@click.option("--schema-type", type=click.Choice(["json_schema", "avro", "protobuf"]))
@click.option("-a", "--attributes", type=arguments.attributes, default=None, help="key:value,key:value")
@click.option("-p", "--partitions", type=click.IntRange(1, 1024))
@click.option("-c", "--count", type=click.IntRange(min=0), default=1, show_default=True)
@click.option("-i", "--interval", type=click.IntRange(min=0), default=500, show_default=True, help="ms")
@click.option("--reliable", is_flag=True, help="Messages are stored before they are acknowledged.")
@click.pass_obj
def produce(
    outside: Outside,
    service_addr: str,
    producer_name: str,
    topic: str,
    message: str | None,
    file: Path | None,
    schema_subject: str | None,
    schema_version: int | None,
    schema_min_version: int | None,
    schema_file: Path | None,
    schema_type: str | None,
    attributes: dict[str, str] | None,
    partitions: int | None,
    count: int,
    interval: int,
    reliable: bool,
) -> None:
    """Send messages to a topic."""
    if message is None and file is None:
        raise click.UsageError("Give --message or --file.")
    if schema_version is not None and schema_min_version is not None:
        raise Wrong("Give --schema-version or --schema-min-version, not both.")
    if interval < INTERVAL_MS_MIN:
        raise Wrong(f"The interval must be at least {INTERVAL_MS_MIN} ms.")
    payload = content_of(file) if file is not None else (message or "").encode()
    routes = Routes(outside, service_addr)
    try:
        if schema_file is not None:
            if schema_type is None:
                raise Wrong("--schema-file needs --schema-type.")
            schema_subject = schema_subject or subject_of(topic)
            register(routes, schema_subject, schema_type, content_of(schema_file))
        reference = reference_to(schema_subject, schema_version, schema_min_version)
        names = [(topic, producer_name)]
        if partitions is not None:
            names = [(f"{topic}-part-{number}", f"{producer_name}-{number}") for number in range(partitions)]
        producers = [Producer(routes, place, name, reference, reliable) for place, name in names]
        say(f"✅ Producer '{producer_name}' created successfully")
        schema = resolve(routes, reference) if reference is not None else None
        _send_all(outside, producers, payload, attributes or {}, schema, count, interval)
    finally:
        routes.close()


def _send_all(
    outside: Outside,
    producers: list[Producer],
    payload: bytes,
    attributes: dict[str, str],
    schema: tuple[int, int] | None,
    count: int,
    interval_ms: int,
) -> None:
    """Send round robin over the partitions; failures are counted and do not end the command."""
    sent = 0
    for number in range(count):
        if number:
            outside.sleep(interval_ms / 1_000)
        try:
            request_id = producers[number % len(producers)].send(payload, attributes, schema)
        except DanubeError as error:
            click.echo(f"❌ Failed to send message {number + 1}/{count}: {error}", err=True)
            continue
        sent += 1
        say(f"📤 Message {number + 1}/{count} sent successfully (ID: {request_id})")
    say("📊 Summary:", f"   ✅ Success: {sent}")
    if sent < count:
        say(f"   ❌ Errors: {count - sent}")


def subject_of(topic: str) -> str:
    """The subject that belongs to a topic: ``/default/orders`` is ``default-orders``."""
    return topic.removeprefix("/").replace("/", "-")


def register(routes: Routes, subject: str, schema_type: str, definition: bytes) -> None:
    say("Auto-registering schema...")
    made = call(
        routes.entry,
        "SchemaRegistry/RegisterSchema",
        subject=subject,
        schema_type=schema_type,
        schema_definition=definition,
        created_by="danube-cli",
    )
    say(f"Schema registered with ID: {made.schema_id}")


def reference_to(subject: str | None, pinned: int | None, least: int | None) -> pb.SchemaReference | None:
    """The reference that a producer is made with; raises Wrong for a version without a subject."""
    if subject is None:
        if pinned is not None or least is not None:
            raise Wrong("A schema version needs --schema-subject.")
        return None
    if pinned is not None:
        return pb.SchemaReference(subject=subject, pinned_version=pinned)
    if least is not None:
        return pb.SchemaReference(subject=subject, min_version=least)
    return pb.SchemaReference(subject=subject, use_latest=True)


def resolve(routes: Routes, reference: pb.SchemaReference) -> tuple[int, int]:
    """Schema id and version that go with every message."""
    latest = call(routes.entry, "SchemaRegistry/GetLatestSchema", subject=reference.subject)
    choice = reference.WhichOneof("version_ref")
    if choice == "min_version" and latest.version < reference.min_version:
        raise InvalidArgument(
            f"subject {reference.subject!r} has no version {reference.min_version} or later",
            why=f"its latest is {latest.version}",
        )
    if choice != "pinned_version" or reference.pinned_version == latest.version:
        return latest.schema_id, latest.version
    version = reference.pinned_version
    found = call(routes.entry, "SchemaRegistry/GetSchema", schema_id=latest.schema_id, version=version)
    return found.schema_id, found.version
