"""A gRPC client for tests: one blocking socket, the ``h2`` library, no threads.

grpcio keeps threads in the test's process, where other tests fork; this one also shows what is on the
wire: headers, trailers, resets, GOAWAY.
"""

from __future__ import annotations

import base64
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import unquote

import h2.config
import h2.connection
import h2.events
import h2.exceptions

_Message = TypeVar("_Message")
TIMEOUT_S = 60.0  # a slow and loaded machine needed more than 10 s for a call


class GrpcError(Exception):
    """A call that did not end with OK."""

    def __init__(self, code: int, message: str, details: bytes) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.details = details


class Disconnected(ConnectionError):
    """The server closed the connection."""


class Stream:
    """One call: what came for it so far."""

    def __init__(self, client: GrpcClient, stream_id: int, response: Any) -> None:
        self.client = client
        self.stream_id = stream_id
        self.response = response
        self.headers: dict[str, str] | None = None
        self.trailers: dict[str, str] | None = None
        self.reset_code: int | None = None
        self.messages: deque[Any] = deque()
        self._data = bytearray()

    def take(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= 5:
            size = struct.unpack_from(">I", self._data, 1)[0]
            if len(self._data) < 5 + size:
                return
            self.messages.append(self.response.FromString(bytes(self._data[5 : 5 + size])))
            del self._data[: 5 + size]

    @property
    def ended(self) -> bool:
        return self.trailers is not None or self.reset_code is not None

    def next(self, timeout_s: float = TIMEOUT_S) -> Any:
        """The next message; GrpcError when the call ended, StopIteration's place is code 0."""
        self.client.wait(lambda: bool(self.messages) or self.ended, timeout_s)
        if self.messages:
            return self.messages.popleft()
        raise self.error()

    def wait_ended(self, timeout_s: float = TIMEOUT_S) -> GrpcError:
        self.client.wait(lambda: self.ended, timeout_s)
        return self.error()

    def error(self) -> GrpcError:
        if self.trailers is None:
            return GrpcError(-1, f"reset with {self.reset_code}", b"")
        details = self.trailers.get("grpc-status-details-bin", "")
        return GrpcError(
            int(self.trailers.get("grpc-status", "-1")),
            unquote(self.trailers.get("grpc-message", "")),
            base64.b64decode(details + "=" * (-len(details) % 4)),
        )

    def cancel(self) -> None:
        """What a client does that closes a stream: RST_STREAM(CANCEL)."""
        self.client.h2.reset_stream(self.stream_id, 8)
        self.client.flush()


class GrpcClient:
    """Calls by path with protobuf messages."""

    def __init__(
        self,
        address: str,
        *,
        tls: ssl.SSLContext | None = None,
        authority: str | None = None,
        window: int = 0,
    ) -> None:
        host, _, port = address.rpartition(":")
        self.authority = authority or address
        self.socket: socket.socket = socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_S)
        # As gRPC's own: a message of several segments would wait for delayed acknowledgements.
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=host)
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.h2.initiate_connection()
        if window:
            self.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.streams: dict[int, Stream] = {}
        self.fields: list[tuple[str, str]] = []  # of every call, such as its credential
        self.went_away: h2.events.ConnectionTerminated | None = None
        self.reading = True
        self.flush()

    def flush(self) -> None:
        self.socket.sendall(self.h2.data_to_send())

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> GrpcClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- calls ------------------------------------------------------------------------------------

    def open(
        self, path: str, response: Any, metadata: Sequence[tuple[str, str]] = (), *, more: bool = True
    ) -> Stream:
        """Send the head of a call."""
        stream_id = self.h2.get_next_available_stream_id()
        headers = [
            (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", self.authority),
            ("te", "trailers"), ("content-type", "application/grpc"), *self.fields, *metadata,
        ]  # fmt: skip
        self.h2.send_headers(stream_id, headers, end_stream=not more)
        stream = self.streams[stream_id] = Stream(self, stream_id, response)
        return stream

    def start(
        self, path: str, request: Any, response: Any, metadata: Sequence[tuple[str, str]] = ()
    ) -> Stream:
        """Send a whole request, without waiting for anything."""
        data = request if isinstance(request, bytes) else request.SerializeToString()
        stream = self.open(path, response, metadata)
        self.send_bytes(stream, b"\0" + struct.pack(">I", len(data)) + data, end=True)
        return stream

    def send_bytes(self, stream: Stream, data: bytes, *, end: bool = False) -> None:
        """Bytes of a call's body, as windows allow."""
        view = memoryview(data)
        while len(view):
            room = min(self.h2.local_flow_control_window(stream.stream_id), self.h2.max_outbound_frame_size)
            if room <= 0:
                self.flush()
                self.receive_some(TIMEOUT_S)
                if stream.ended:
                    return
                continue
            self.h2.send_data(stream.stream_id, bytes(view[:room]))
            view = view[room:]
        if end:
            self.h2.end_stream(stream.stream_id)
        self.flush()

    def call(
        self, path: str, request: Any, response: type[_Message], metadata: Sequence[tuple[str, str]] = ()
    ) -> _Message:
        """A unary call: the response, or GrpcError."""
        stream = self.start(path, request, response, metadata)
        return self.result(stream)  # type: ignore[no-any-return]

    def result(self, stream: Stream, timeout_s: float = TIMEOUT_S) -> Any:
        self.wait(lambda: stream.ended, timeout_s)
        error = stream.error()
        if error.code != 0:
            raise error
        return stream.messages.popleft()

    # -- events -----------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Read until the condition holds; TimeoutError when it does not in time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("nothing came in time")
            self.receive_some(left)

    def receive_some(self, timeout_s: float) -> None:
        self.socket.settimeout(timeout_s)
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError:
            return
        except OSError as error:
            raise Disconnected(str(error)) from None
        if not data:
            raise Disconnected("the server closed the connection")
        for event in self.h2.receive_data(data):
            self._on_event(event)
        try:
            self.flush()
        except OSError as error:
            raise Disconnected(str(error)) from None

    def _on_event(self, event: Any) -> None:
        if isinstance(event, h2.events.ConnectionTerminated):
            self.went_away = event
            return
        stream = self.streams.get(getattr(event, "stream_id", 0) or 0)
        if stream is None:
            return
        if isinstance(event, h2.events.ResponseReceived):
            fields = dict(event.headers)
            if "grpc-status" in fields:
                stream.trailers = fields
            stream.headers = fields
        elif isinstance(event, h2.events.TrailersReceived):
            stream.trailers = dict(event.headers)
        elif isinstance(event, h2.events.DataReceived):
            stream.take(event.data)
            if self.reading and event.flow_controlled_length:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.StreamReset):
            stream.reset_code = event.error_code
