"""Calls by name: the description of a service says what is asked and what is answered."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.message_factory import GetMessageClass

from danube.cli.upstream.root import Channel
from danube.server.proto import DanubeAdmin_pb2, SchemaRegistry_pb2

_SERVICES: Final = {
    name: service
    for module in (DanubeAdmin_pb2, SchemaRegistry_pb2)
    for name, service in module.DESCRIPTOR.services_by_name.items()
}


def call(channel: Channel, method: str, timeout_s: float | None, fields: dict[str, Any]) -> Any:
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
