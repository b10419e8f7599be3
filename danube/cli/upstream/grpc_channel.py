"""The only door to grpcio: a channel to a broker, calls by method path, and errors as ours.

Used by the compatibility commands ``danube-admin`` and ``danube-cli`` alone.

gRPC statuses as errors, and which of them are worth another try.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeVar

import grpc

from danube.cli.upstream.endpoint import Endpoint
from danube.errors import (
    Conflict,
    ConnectionFailed,
    DanubeError,
    InvalidArgument,
    NotFound,
    NotSupported,
    OperationTimeout,
    Overloaded,
    WrongState,
)

_CLASSES: Final[dict[str, type[DanubeError]]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "NOT_FOUND": NotFound,
    "ALREADY_EXISTS": Conflict,
    "FAILED_PRECONDITION": WrongState,
    "UNIMPLEMENTED": NotSupported,
    "UNAVAILABLE": ConnectionFailed,
    "DEADLINE_EXCEEDED": OperationTimeout,
    "RESOURCE_EXHAUSTED": Overloaded,
}
_UNREACHABLE: Final = "failed to connect"  # grpcio's words
RETRIED: Final = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"})


def status_error(status: str, message: str) -> DanubeError:
    """The error of a call that ended with this status; ``facts["status"]`` keeps its name."""
    what = f"status {status}: {message}" if message else f"status {status}"
    hint = "is a broker running there, and is this its gRPC port?" if _UNREACHABLE in message else ""
    return _CLASSES.get(status, DanubeError)(what, hint=hint, status=status)


def status_of(error: DanubeError) -> str:
    """Name of the status behind an error that came from a call; empty for any other."""
    return str(error.facts.get("status", ""))


Reply = TypeVar("Reply")

_OPTIONS: Final = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),  # a broker is reached directly, whatever the environment says of the web
]


class GrpcStream:
    """Messages of one streaming call; ends with StopIteration or one of our errors."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._call
        except grpc.RpcError as error:
            raise _known(error) from None

    def cancel(self) -> None:
        self._call.cancel()


class GrpcChannel:
    """Calls of one address; the connection is made by the first one."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._metadata = [("authorization", f"Bearer {endpoint.token}")] if endpoint.token else []
        options = list(_OPTIONS)
        if endpoint.tls:
            if endpoint.domain:
                options.append(("grpc.ssl_target_name_override", endpoint.domain))  # type: ignore[arg-type]
            credentials = grpc.ssl_channel_credentials(
                root_certificates=endpoint.authority_certificate or None,
                private_key=endpoint.private_key or None,
                certificate_chain=endpoint.certificate or None,
            )
            self._channel = grpc.secure_channel(endpoint.target, credentials, options)
        else:
            self._channel = grpc.insecure_channel(endpoint.target, options)

    def call(self, method: str, request: Any, reply: type[Reply], timeout_s: float | None) -> Reply:
        """Make a unary call of ``/package.Service/Method``; raises the error of its status."""
        ask = self._channel.unary_unary(method, _bytes, reply.FromString)  # type: ignore[attr-defined]
        try:
            answer: Reply = ask(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _known(error) from None
        return answer

    def stream(self, method: str, request: Any, reply: type[Any]) -> GrpcStream:
        """One call that answers with many messages."""
        ask = self._channel.unary_stream(method, _bytes, reply.FromString)
        return GrpcStream(ask(request, metadata=self._metadata))

    def close(self) -> None:
        self._channel.close()


def open_channel(endpoint: Endpoint) -> GrpcChannel:
    return GrpcChannel(endpoint)


def _bytes(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded


def _known(error: Any) -> Exception:
    return status_error(error.code().name, error.details() or "")
