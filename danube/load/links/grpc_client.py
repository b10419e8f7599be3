"""The door to grpcio under gevent: one channel, blocking calls by method path, errors as ours.

grpcio waits in threads of gevent's pool: a channel that streams takes one, and each call that is under way
another.  So the pool grows with the channels; with the pool as it is by default ten streams would stop all.
grpcio must not be imported before a process forks, so everything here is imported by the first user.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Final, TypeVar

import grpc

from danube.errors import ClosedError, ConnectionFailed, DanubeError, OperationTimeout, Overloaded

Reply = TypeVar("Reply")
THREADS_PER_CHANNEL: Final = 4
AGAIN: Final = (ConnectionFailed, OperationTimeout, Overloaded)  # the call may be made again
_KNOWN: Final[dict[str, type[DanubeError]]] = {
    "UNAVAILABLE": ConnectionFailed,
    "DEADLINE_EXCEEDED": OperationTimeout,
    "RESOURCE_EXHAUSTED": Overloaded,
}
_OPTIONS: Final = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # each user is a connection, as each application is
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


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


class GrpcCalls:
    """One connection to a broker.  Every call blocks the greenlet that makes it and no other."""

    def __init__(self, address: str) -> None:
        self._pool = _under_gevent()
        if self._pool is not None:
            self._pool.maxsize += THREADS_PER_CHANNEL
        self._channel = grpc.insecure_channel(address, _OPTIONS)
        self._methods: dict[str, Any] = {}

    def call(self, method: str, request: Any, reply: type[Reply], timeout_s: float) -> Reply:
        """One call of ``Service/Method`` in package danube; raises DanubeError."""
        try:
            answer: Reply = self._method(method, reply)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise _known(error) from None
        return answer

    def begin(self, method: str, request: Any, reply: type[Any], timeout_s: float) -> GrpcAnswer:
        """Begin a call without waiting for its answer."""
        return GrpcAnswer(self._method(method, reply).future(request, timeout=timeout_s))

    def _method(self, method: str, reply: type[Any]) -> Any:
        found = self._methods.get(method)
        if found is None:
            found = self._channel.unary_unary(f"/danube.{method}", _bytes, reply.FromString)
            self._methods[method] = found
        return found

    def stream(self, method: str, request: Any, reply: type[Any]) -> GrpcStream:
        """A call that answers with many messages."""
        return GrpcStream(self._channel.unary_stream(f"/danube.{method}", _bytes, reply.FromString)(request))

    def close(self) -> None:
        self._channel.close()
        if self._pool is not None:
            self._pool, pool = None, self._pool
            pool.maxsize -= THREADS_PER_CHANNEL


def _bytes(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded


def _known(error: Any) -> DanubeError:
    if isinstance(error, grpc.FutureCancelledError):
        return ClosedError("the call was cancelled")
    status = error.code().name
    return _KNOWN.get(status, DanubeError)(f"status {status}: {error.details() or 'no reason given'}")
