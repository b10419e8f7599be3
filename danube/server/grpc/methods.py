"""The table of a gRPC port: for each path how the call is read, and its handler."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Any, NamedTuple

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from danube.core.security.operations import GRPC, Row

_WORD = re.compile(r"(?<!^)(?=[A-Z])")


class MethodKind(Enum):
    """How a handler is called."""

    DIRECT = auto()  # handler(connection, stream, data) at once; it answers the stream itself, or raises
    UNARY = auto()  # await handler(request, call) -> response
    RECEIVE = auto()  # await handler(connection, stream, request); the stream goes on after it
    SERVER_STREAM = auto()  # handler(request, call) -> async iterator of responses
    BIDIRECTIONAL = auto()  # handler(async iterator of requests, call) -> async iterator of responses


class Method(NamedTuple):
    """One RPC."""

    kind: MethodKind
    request_class: Any
    handler: Callable[..., Any]
    row: Row | None = None  # what it needs, where access is controlled


def snake_case(name: str) -> str:
    """``ListNamespaceTopics`` -> ``list_namespace_topics``."""
    return _WORD.sub("_", name).lower()


def methods_of(service: ServiceDescriptor, servicer: object) -> dict[str, Method]:
    """A method for each RPC of the service; a servicer that lacks one is a bug."""
    return {
        f"/{service.full_name}/{one.name}": method_of(
            one, _kind(one), getattr(servicer, snake_case(one.name))
        )
        for one in service.methods
    }


def method_of(described: MethodDescriptor, kind: MethodKind, handler: Callable[..., Any]) -> Method:
    row = GRPC.get(f"/{described.containing_service.full_name}/{described.name}")
    return Method(kind, GetMessageClass(described.input_type), handler, row)


def _kind(method: MethodDescriptor) -> MethodKind:
    if method.client_streaming:
        return MethodKind.BIDIRECTIONAL
    return MethodKind.SERVER_STREAM if method.server_streaming else MethodKind.UNARY


def services_in(methods: Iterable[str]) -> list[str]:
    """Full names of the services that a table serves, in order."""
    return list(dict.fromkeys(path.split("/")[1] for path in methods))
