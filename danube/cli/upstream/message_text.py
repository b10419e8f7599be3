"""How ``danube-cli consume`` prints a message."""

from __future__ import annotations

import json
from typing import Any, Final

import click

from danube.cli.upstream.root import say
from danube.cli.upstream.routes import Routes, ask_registry
from danube.errors import DanubeError
from danube.server.proto import DanubeApi_pb2 as pb
from danube.server.proto import SchemaRegistry_pb2 as registry

_TEXT_BYTES_MAX: Final = 1024  # a longer payload of a stored message is not printed
_JSON_TYPES: Final = ("json_schema", "avro")


class MessagePrinter:
    """Prints messages one after the other; keeps what it read of schemas and how far each topic came.

    A message whose offset is above the last one of its topic is printed as stored; others, and the very
    first offset 0, as not stored: official scripts look for these lines.
    """

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._type_by_id: dict[int, str] = {}
        self._last_by_topic: dict[str, int] = {}
        self._total_bytes = 0

    def show(self, message: pb.StreamMessage) -> bool:
        """Print it; False where its schema says JSON and the payload is none: then it must not be acked."""
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
        topic, offset = message.msg_id.topic_name, message.msg_id.topic_offset
        if offset > self._last_by_topic.get(topic, 0):
            self._last_by_topic[topic] = offset
            self._say_stored(message, text if len(payload) <= _TEXT_BYTES_MAX else "[binary data]")
        else:
            say(f"Received message: {text}")
            say(f"Size: {len(payload)} bytes, Total received: {self._total_bytes} bytes")
        if message.attributes:
            listed = ", ".join(f"{name}={value}" for name, value in sorted(message.attributes.items()))
            say(f"Attributes: {listed}")
        return True

    def _say_stored(self, message: pb.StreamMessage, text: str) -> None:
        say(f'Received reliable message: "{text}"')
        say(
            f"Topic offset: {message.msg_id.topic_offset}, Size: {len(message.payload)} bytes,"
            f" Total received: {self._total_bytes} bytes"
        )
        say(f"Producer: {message.producer_name}, Topic: {message.msg_id.topic_name}")

    def _schema_type(self, schema_id: int) -> str:
        """The type of a schema, asked for once; empty where the broker does not tell."""
        known = self._type_by_id.get(schema_id)
        if known is not None:
            return known
        request = registry.GetSchemaRequest(schema_id=schema_id)
        found: Any = None
        try:
            found = ask_registry(self._routes.entry, "GetSchema", request, registry.GetSchemaResponse)
        except DanubeError as error:
            click.echo(f"⚠️ schema {schema_id} cannot be loaded: {error}", err=True)
        self._type_by_id[schema_id] = "" if found is None else found.schema_type
        if found is not None:
            say(f"✅ Loaded schema: {found.subject} (version {found.version}, type {found.schema_type})")
        return self._type_by_id[schema_id]
