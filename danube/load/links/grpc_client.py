"""The door to grpcio: one channel, blocking calls by method path, errors as ours; also under gevent.

There grpcio waits in threads of gevent's pool: a channel that streams takes one, and each call that is under
way another.  So the pool grows with the channels; as it is by default ten streams would stop all.
grpcio must not be imported before a process forks, so everything here is imported by the first user.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc

from danube.client.machine.tls import TlsOptions
from danube.errors import (
    ClosedError,
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

Reply = TypeVar("Reply")
THREADS_PER_CHANNEL: Final = 4
AGAIN: Final = (ConnectionFailed, OperationTimeout, Overloaded)  # the call may be made again
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
OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),  # a broker is reached directly, whatever the environment says of the web
)
_OF_A_USER: Final = (
    *OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),  # each user is a connection, as each application is
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


def status_error(status: str, message: str) -> DanubeError:
    """The error of a call that ended with this status; ``facts["status"]`` keeps its name."""
    what = f"status {status}: {message}" if message else f"status {status}"
    hint = "is a broker running there, and is this its gRPC port?" if _UNREACHABLE in message else ""
    return _CLASSES.get(status, DanubeError)(what, hint=hint, status=status)


class GrpcAnswer:
    """The answer of a call that is under way."""

    def __init__(self, call: Any) -> None:
        self._call = call

    @property
    def done(self) -> bool:
        return bool(self._call.done())

    def result(self) -> Any:
        """Wait for it; raises DanubeError."""
        try:
            return self._call.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            raise _known(error) from None


class GrpcStream:
    """Messages of one streaming call; ends, or raises DanubeError."""

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

    def __init__(self, channel: grpc.Channel, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self._channel = channel
        self._metadata = metadata
        self._methods: dict[str, Any] = {}

    def call(self, method: str, request: Any, reply: type[Reply], timeout_s: float | None) -> Reply:
        """Make a unary call of ``/package.Service/Method``; raises the error of its status."""
        try:
            answer: Reply = self._method(method, reply)(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _known(error) from None
        return answer

    def begin(self, method: str, request: Any, reply: type[Any], timeout_s: float) -> GrpcAnswer:
        """Begin a call without waiting for its answer."""
        return GrpcAnswer(
            self._method(method, reply).future(request, timeout=timeout_s, metadata=self._metadata)
        )

    def _method(self, method: str, reply: type[Any]) -> Any:
        found = self._methods.get(method)
        if found is None:
            found = self._methods[method] = self._channel.unary_unary(method, _bytes, reply.FromString)
        return found

    def stream(self, method: str, request: Any, reply: type[Any]) -> GrpcStream:
        """One call that answers with many messages."""
        ask = self._channel.unary_stream(method, _bytes, reply.FromString)
        return GrpcStream(ask(request, metadata=self._metadata))

    def close(self) -> None:
        self._channel.close()


@cache
def _under_gevent() -> Any:
    """Tell grpcio that it runs under gevent; gevent's pool of threads, None if nothing is patched."""
    from gevent import get_hub
    from gevent.monkey import is_module_patched

    if not is_module_patched("socket"):
        return None
    from grpc.experimental import gevent as grpc_gevent

    grpc_gevent.init_gevent()
    return get_hub().threadpool


def _secure_channel(address: str, tls: TlsOptions) -> grpc.Channel:
    """Raises InvalidArgument for a file that cannot be read."""
    named = (("grpc.ssl_target_name_override", tls.server_name),) if tls.server_name else ()
    credentials = grpc.ssl_channel_credentials(*map(_content, (tls.ca_file, tls.key_file, tls.cert_file)))
    return grpc.secure_channel(address, credentials, (*_OF_A_USER, *named))


def _content(file: str) -> bytes | None:
    try:
        return Path(file).read_bytes() if file else None
    except OSError as error:
        raise InvalidArgument(f"{file} cannot be read", why=error.strerror or str(error)) from None


class GrpcCalls(GrpcChannel):
    """The connection of one user.  Every call blocks the greenlet that makes it and no other."""

    def __init__(self, address: str, tls: TlsOptions | None = None, token: str = "") -> None:
        """``tls`` None: a plain connection."""
        metadata = [("authorization", f"Bearer {token}")] if token else []
        channel = grpc.insecure_channel(address, _OF_A_USER) if tls is None else _secure_channel(address, tls)
        self._pool = _under_gevent()
        if self._pool is not None:
            self._pool.maxsize += THREADS_PER_CHANNEL
        super().__init__(channel, metadata)

    def close(self) -> None:
        super().close()
        if self._pool is not None:
            self._pool, pool = None, self._pool
            pool.maxsize -= THREADS_PER_CHANNEL


def _bytes(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded


def _known(error: Any) -> DanubeError:
    if isinstance(error, grpc.FutureCancelledError):
        return ClosedError("the call was cancelled")
    return status_error(error.code().name, error.details() or "")
