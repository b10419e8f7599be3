"""Calls by name: the description of a service says what is asked and what is answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf.message_factory import GetMessageClass

from danube.cli.upstream.root import Channel
from danube.server.proto import DanubeAdmin_pb2, DanubeApi_pb2, SchemaRegistry_pb2

_LABELS: Final = {
    "subject": "Subject",
    "schema_id": "Schema ID",
    "version": "Version",
    "schema_type": "Type",
    "compatibility_mode": "Compatibility Mode",
    "description": "Description",
    "created_by": "Created by",
    "tags": "Tags",
    "fingerprint": "Fingerprint",
}
_SERVICES: Final = {
    name: service
    for module in (DanubeAdmin_pb2, DanubeApi_pb2, SchemaRegistry_pb2)
    for name, service in module.DESCRIPTOR.services_by_name.items()
}


def call(channel: Channel, method: str, timeout_s: float | None = None, /, **fields: Any) -> Any:
    """Call ``Service/Method`` with the fields of its request, of which None is not set."""
    service_name, _, name = method.partition("/")
    service = _SERVICES[service_name]
    described = service.methods_by_name[name]
    request, reply = GetMessageClass(described.input_type), GetMessageClass(described.output_type)
    return channel.call(f"/{service.full_name}/{name}", request(**fields), reply, timeout_s)


def fields_of(message: Any, *names: str) -> dict[str, Any]:
    """The named fields as JSON takes them; what is repeated becomes a list."""
    found = {name: getattr(message, name) for name in names}
    return {
        name: value if isinstance(value, str | float | int) else list(value) for name, value in found.items()
    }


def labelled(found: Mapping[str, Any], *names: str) -> list[str]:
    """Lines of a schema's fields, each behind its label."""
    texts = {name: ", ".join(found[name]) if name == "tags" else found[name] for name in names}
    return [f"{_LABELS[name]}: {text}" for name, text in texts.items()]
