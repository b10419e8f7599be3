"""HTTP for metrics: one request on a connection, ``GET`` or ``HEAD`` of ``/metrics``, and nothing else.

Bounds: connections, the head of a request, the time until it is complete, and the time that a client takes to
read the answer.  A client that exceeds one gets an error if possible, and its connection is closed.  The
server runs in its own process, so its clients never delay a worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, cast

from danube.core.protocol.http1 import Refusal, Request, RequestReader, answer_head
from danube.host import telemetry

PATH: Final = "/metrics"
CONNECTIONS_MAX: Final = 128
HEAD_MAX_S: Final = 5.0  # from the connection to the end of the request
ANSWER_MAX_S: Final = 10.0  # from then on, for the client to take the answer and close
LATE_BYTES_MAX: Final = 64 * 1024  # that a client may send after its request, unread
_PLAIN: Final = "text/plain; charset=utf-8"

_log = telemetry.events("metrics")


class MetricsServer:
    """``page`` makes the body; concurrent requests may share one of its rounds."""

    def __init__(
        self,
        page: Callable[[], Awaitable[bytes]],
        content_type: str,
        *,
        connections_max: int = CONNECTIONS_MAX,
        head_max_s: float = HEAD_MAX_S,
        answer_max_s: float = ANSWER_MAX_S,
    ) -> None:
        self.page = page
        self.content_type = content_type
        self.connections_max = connections_max
        self.head_max_s = head_max_s
        self.answer_max_s = answer_max_s
        self.connections: set[MetricsConnection] = set()

    def factory(self) -> MetricsConnection:
        return MetricsConnection(self)

    def close(self) -> None:
        """Cut all connections."""
        for connection in list(self.connections):
            connection.abort()


class MetricsConnection(asyncio.Protocol):
    """One connection: reads a request, answers it, and closes, at the latest after a time limit."""

    def __init__(self, server: MetricsServer) -> None:
        self._server = server
        self._reader: RequestReader | None = RequestReader()  # None: the request is complete
        self._late_bytes = 0
        self._sent = self._ended = False  # the answer; the client's side
        self._answering: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        server = self._server
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(server.head_max_s, self._head_is_late)
        server.connections.add(self)
        if len(server.connections) > server.connections_max:
            self._refuse(Refusal(503, f"at most {server.connections_max} connections at a time"))

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self._server.connections.discard(self)
        if self._answering is not None:
            self._answering.cancel()

    def abort(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._reader is None:
            self._late_bytes += len(data)
            if self._late_bytes > LATE_BYTES_MAX:
                self.abort()
            return
        found = self._reader.feed(data)
        if isinstance(found, Refusal):
            self._refuse(found)
        elif found is not None:
            self._take(found)

    def eof_received(self) -> bool:
        """Keep the connection of a client that waits for its answer; close any other."""
        self._ended = True
        return self._reader is None and not self._sent

    def _head_is_late(self) -> None:
        self._refuse(Refusal(408, f"a request is here within {self._server.head_max_s:g} s"))

    def _take(self, request: Request) -> None:
        if request.path != PATH:
            self._refuse(Refusal(404, f"there is only {PATH} here"))
        elif request.method not in ("GET", "HEAD"):
            self._refuse(Refusal(405, "only GET and HEAD"), {"Allow": "GET, HEAD"})
        elif request.brings_body:
            self._refuse(Refusal(400, "a request has no body here"))
        else:
            self._reader = None
            self._limit_answer()
            self._answering = asyncio.get_running_loop().create_task(self._answer(request))
            self._answering.add_done_callback(_raise)

    async def _answer(self, request: Request) -> None:
        body = await self._server.page()
        self._send(200, body, {"Content-Type": self._server.content_type}, shown=request.method == "GET")

    def _refuse(self, refusal: Refusal, fields: dict[str, str] | None = None) -> None:
        if self._reader is None:
            return
        self._reader = None
        self._limit_answer()
        self._send(refusal.status, f"{refusal.why}\n".encode(), {"Content-Type": _PLAIN, **(fields or {})})

    def _limit_answer(self) -> None:
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._server.answer_max_s, self.abort)

    def _send(self, status: int, body: bytes, fields: dict[str, str], *, shown: bool = True) -> None:
        """Send the answer and let the client close.

        Closing first would discard bytes that the client has not read yet.
        """
        if self._transport.is_closing():
            return
        self._sent = True
        self._transport.write(answer_head(status, len(body), fields) + (body if shown else b""))
        if self._ended or not self._transport.can_write_eof():  # TLS ends both sides, after the answer
            self._transport.close()
        else:
            self._transport.write_eof()


def _raise(task: asyncio.Task[None]) -> None:
    """A bug in the page is one of this process."""
    if not task.cancelled():
        task.result()
