"""``danube-cli consume``: one subscription over all partitions of a topic, printed and acked in turn.

How ``danube-cli consume`` prints a message.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any, Final

import click

from danube.cli.upstream.calls import call
from danube.cli.upstream.grpc_channel import RETRIED, status_of
from danube.cli.upstream.root import Outside, Stream, say
from danube.cli.upstream.routes import RETRIES, Route, Routes
from danube.errors import DanubeError
from danube.load.links.inbox import Inbox
from danube.server.proto import DanubeApi_pb2 as pb

_TEXT_BYTES_MAX: Final = 1024  # a longer payload of a stored message is not printed
_JSON_TYPES: Final = ("json_schema", "avro")


class MessagePrinter:
    """Prints messages one after the other; caches schemas, and keeps the last offset of each topic.

    A message whose offset is above the last one of its topic is printed as stored; others, and the very
    first offset 0, as not stored: official scripts look for these lines.
    """

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._type_by_id: dict[int, str] = {}
        self._last_by_topic: dict[str, int] = {}
        self._total_bytes = 0

    def show(self, message: pb.StreamMessage) -> bool:
        """Print it; False if its schema says JSON and the payload is none: then it must not be acked."""
        schema_type = self._schema_type(message.schema_id) if message.HasField("schema_id") else ""
        payload = message.payload
        text = payload.decode("utf-8", "replace")
        if schema_type in _JSON_TYPES:
            try:
                text = json.dumps(json.loads(payload), ensure_ascii=False)
            except (ValueError, RecursionError) as error:
                click.echo(f"❌ The payload is not JSON, as its schema asks: {error}", err=True)
                return False
        self._total_bytes += len(payload)
        sizes = f"Size: {len(payload)} bytes, Total received: {self._total_bytes} bytes"
        topic, offset = message.msg_id.topic_name, message.msg_id.topic_offset
        if offset > self._last_by_topic.get(topic, 0):
            self._last_by_topic[topic] = offset
            shown = text if len(payload) <= _TEXT_BYTES_MAX else "[binary data]"
            say(
                f'Received reliable message: "{shown}"',
                f"Topic offset: {offset}, {sizes}",
                f"Producer: {message.producer_name}, Topic: {topic}",
            )
        else:
            say(f"Received message: {text}", sizes)
        if message.attributes:
            listed = ", ".join(f"{name}={value}" for name, value in sorted(message.attributes.items()))
            say(f"Attributes: {listed}")
        return True

    def _schema_type(self, schema_id: int) -> str:
        """Return the type of a schema, requested once; empty if the broker does not tell."""
        if schema_id not in self._type_by_id:
            self._type_by_id[schema_id] = ""
            try:
                found = call(self._routes.entry, "SchemaRegistry/GetSchema", schema_id=schema_id)
            except DanubeError as error:
                click.echo(f"⚠️ schema {schema_id} cannot be loaded: {error}", err=True)
            else:
                self._type_by_id[schema_id] = found.schema_type
                say(f"✅ Loaded schema: {found.subject} (version {found.version}, type {found.schema_type})")
        return self._type_by_id[schema_id]


_TYPES: Final = {
    "exclusive": pb.ConsumerRequest.Exclusive,
    "shared": pb.ConsumerRequest.Shared,
    "fail-over": pb.ConsumerRequest.Failover,
    "key-shared": pb.ConsumerRequest.KeyShared,
}
_WAITING_MAX: Final = 256  # messages that were received and not printed yet

Received = tuple[Route, pb.StreamMessage]


class PartitionConsumer:
    """One consumer at one partition: subscribes, receives, and does both again when the broker went away."""

    def __init__(self, routes: Routes, topic: str, **asked: Any) -> None:
        self._routes = routes
        self._asked = {"topic_name": topic, **asked}
        self._route: Route | None = None
        self._consumer_id = 0
        self._stream: Stream | None = None
        self._closed = threading.Event()

    def subscribe(self) -> Route:
        def attempt(route: Route) -> Any:
            method, request_id = "ConsumerService/Subscribe", self._routes.request_id()
            return call(route.channel, method, request_id=request_id, **self._asked)

        self._route, made = self._routes.retrying(self._asked["topic_name"], attempt)
        self._consumer_id = made.consumer_id
        return self._route

    def messages(self) -> Iterator[Received]:
        """Messages until close; raises the error after which another try cannot help.

        A stream that ends is opened again with the same number, one that breaks after subscribing again.
        """
        failures = ends = 0
        while not self._closed.is_set():
            try:
                for one in self._receive():
                    failures = ends = 0
                    yield one
            except DanubeError as error:
                if self._closed.is_set():
                    return
                failures += 1
                if failures > RETRIES or status_of(error) not in RETRIED | {"NOT_FOUND"}:
                    raise
                self._route = None
                self._routes.pause(failures)
            else:
                ends = min(ends + 1, RETRIES)
                self._routes.pause(ends)

    def _receive(self) -> Iterator[Received]:
        route = self._route or self.subscribe()
        request = pb.ReceiveRequest(request_id=self._routes.request_id(), consumer_id=self._consumer_id)
        method = "/danube.ConsumerService/ReceiveMessages"
        self._stream = route.channel.stream(method, request, pb.StreamMessage)
        for message in self._stream:
            yield route, message

    def close(self) -> None:
        self._closed.set()
        if self._stream is not None:
            self._stream.cancel()


def fill(inbox: Inbox, consumer: PartitionConsumer) -> None:
    """Put the messages of a partition into the inbox, and the error that ends them; its stream blocks."""
    try:
        for received in consumer.messages():
            if not inbox.put(received):
                return
    except DanubeError as error:
        inbox.put(error)


@click.command()
@click.option("-s", "--service-addr", required=True, help="The broker, for example http://127.0.0.1:6650.")
@click.option("-t", "--topic", default="/default/test_topic", show_default=True)
@click.option("-n", "--consumer", default="consumer_pubsub", show_default=True, help="Name of the consumer.")
@click.option("-m", "--subscription", required=True)
@click.option(
    "--sub-type", "subscription_type", type=click.Choice(list(_TYPES)), default="shared", show_default=True
)
@click.pass_obj
def consume(
    outside: Outside, service_addr: str, topic: str, consumer: str, subscription: str, subscription_type: str
) -> None:
    """Receive messages of a topic, print and acknowledge them, until interrupted."""
    routes = Routes(outside, service_addr)
    inbox = Inbox(_WAITING_MAX)
    consumers: list[PartitionConsumer] = []
    try:
        for partition in routes.partitions(topic):
            one = PartitionConsumer(
                routes,
                partition,
                consumer_name=consumer,
                subscription=subscription,
                subscription_type=_TYPES[subscription_type],
            )
            consumers.append(one)
            one.subscribe()
        for one in consumers:
            threading.Thread(target=fill, args=(inbox, one), daemon=True).start()
        printer = MessagePrinter(routes)
        while True:
            route, message = inbox.get()
            if printer.show(message):
                _ack(route, message, subscription)
    finally:
        inbox.close()
        for one in consumers:
            one.close()
        routes.close()


def _ack(route: Route, message: pb.StreamMessage, subscription: str) -> None:
    """Ack a message; a failure is only reported, as the broker delivers an unacked message again."""
    asked = {"request_id": message.request_id, "msg_id": message.msg_id, "subscription_name": subscription}
    try:
        call(route.channel, "ConsumerService/Ack", **asked)
    except DanubeError as error:
        click.echo(f"could not ack offset {message.msg_id.topic_offset}: {error}", err=True)
