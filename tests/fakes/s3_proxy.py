"""A proxy in front of an S3 server that fails by a script, and remembers every request.

It runs in threads of the test's process, speaks HTTP/1.1 with kept connections and passes requests
through unchanged, the Host header included, so that signatures hold.  A :class:`Fault` says which
requests meet which failure, how often and how many times; the first one that fits wins.

    proxy = S3Proxy("127.0.0.1", server.port, client=server.client()).start()
    proxy.add(Fault("status", status=503, code="SlowDown", rate=0.3))
    proxy.add(Fault("hang_after", matches=lambda request: request.method == "PUT", times=1))
    proxy.refuse()       # nobody listens any more
    proxy.resume()

With a context it speaks TLS; what the context loads holds for connections from then on.
"""

from __future__ import annotations

import http.client
import random
import re
import socket
import socketserver
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO
from urllib.parse import parse_qs, unquote, urlsplit

HANG_S = 600.0
KINDS = {
    "status": "answer with this status and code, and do not ask the server",
    "reset": "close at once, before the request is read",
    "blackhole": "read the request and never answer",
    "hang_after": "let the server do it, and never answer",
    "close_after": "let the server do it, and close without an answer",
    "cut_request": "pass on half of the request's body and close",
    "truncate": "send half of the answer's body and close",
    "damage": "flip a bit of the answer's body",
    "damage_stored": "let the server do it, then flip a bit of what it stored",
    "swap": "answer with the body of the request before",
    "hide": "leave the keys for which `hidden` is true out of a list",
    "slow": "send the answer's body at `bytes_per_s`",
    "slow_request": "pass on the request's body at `bytes_per_s`",
    "delay": "wait `seconds` before the answer",
}


@dataclass
class Request:
    """One request; ``fault`` and ``status`` are known once it was answered."""

    at: float  # time.monotonic()
    method: str
    path: str  # /bucket/key, unquoted
    query: dict[str, str]
    headers: dict[str, str]
    size: int
    fault: str = ""
    status: int = 0

    @property
    def listing(self) -> bool:
        return self.method == "GET" and self.query.get("list-type") == "2"

    @property
    def part(self) -> int:
        """Number of the part that is put, or 0."""
        return int(self.query.get("partNumber", 0)) if self.method == "PUT" else 0


@dataclass
class Fault:
    """What happens to the requests that match: each with probability ``rate``, ``times`` of them at most."""

    kind: str
    matches: Callable[[Request], bool] = lambda request: True
    rate: float = 1.0
    times: int | None = None
    status: int = 500
    code: str = "InternalError"
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    bytes_per_s: float = 1e6
    hidden: Callable[[str], bool] = lambda key: True
    met: int = 0

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind


class S3Proxy:
    """``endpoint`` is what a store is told; it stays the same over refuse() and resume()."""

    def __init__(
        self, host: str, port: int, *, client: Any = None, seed: int = 0, listens: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        self.requests: list[Request] = []
        self._target = (host, port)
        self._address = listens
        self._tls = tls
        self._client = client  # a bare client of the server, for damage_stored
        self._faults: list[Fault] = []
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closing = threading.Event()
        self._port = 0
        self._server: _Server | None = None
        self.last_body = b""

    @property
    def endpoint(self) -> str:
        return f"{'https' if self._tls else 'http'}://{self._address}:{self._port}"

    def start(self) -> S3Proxy:
        self._closing.clear()
        self._server = _Server(self, self._address, self._port)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    resume = start

    def refuse(self) -> None:
        """Stop listening and cut what is open, until resume()."""
        self._closing.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        with self._lock:
            cut = list(self._open)
        for connection in cut:
            reset(connection)

    stop = refuse

    def add(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """No faults from now on; those that hang are let go with a closed connection."""
        with self._lock:
            self._faults.clear()
        self._closing.set()
        self._closing = threading.Event()

    @contextmanager
    def meeting(self, fault: Fault) -> Iterator[Fault]:
        self.add(fault)
        try:
            yield fault
        finally:
            with self._lock:
                self._faults.remove(fault)

    def count(self, matches: Callable[[Request], bool] = lambda request: True) -> int:
        with self._lock:
            return sum(matches(request) for request in self.requests)

    def choose(self, request: Request) -> Fault | None:
        with self._lock:
            self.requests.append(request)
            for fault in self._faults:
                if fault.times is not None and fault.met >= fault.times:
                    continue
                if fault.matches(request) and self._random.random() < fault.rate:
                    fault.met += 1
                    request.fault = fault.kind
                    return fault
        return None

    def flip(self, data: bytes) -> bytes:
        """The data with one bit changed."""
        if not data:
            return data
        with self._lock:
            place = self._random.randrange(len(data))
        return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]

    def damage_stored(self, path: str) -> None:
        """Replace an object by itself with one bit flipped, as a server with bad memory would."""
        from io import BytesIO

        _, bucket, key = path.split("/", 2)
        response = self._client.get_object(bucket, key)
        data = self.flip(response.read())
        response.close()
        self._client.put_object(bucket, key, BytesIO(data), len(data))

    def serve(self, connection: socket.socket) -> None:
        if self._tls is not None:
            try:
                connection = self._tls.wrap_socket(connection, server_side=True)
            except OSError:
                return  # the client did not take the certificate
        with self._lock:
            self._open.add(connection)
        upstream = http.client.HTTPConnection(*self._target, timeout=HANG_S)
        try:
            stream = connection.makefile("rb", 262_144)
            while not self._closing.is_set() and self._one(connection, stream, upstream):
                pass
        except (OSError, http.client.HTTPException, ValueError):
            pass  # either side is gone: that is what this proxy is for
        finally:
            upstream.close()
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _one(self, client: socket.socket, stream: BinaryIO, upstream: http.client.HTTPConnection) -> bool:
        """Read, pass on and answer one request; False when the connection is done."""
        line = stream.readline(65_537)
        if not line:
            return False
        method, target, _ = line.decode("latin-1").split(" ", 2)
        headers = {}
        while (text := stream.readline(65_537).decode("latin-1").strip()) != "":
            name, _, value = text.partition(":")
            headers[name.strip().lower()] = value.strip()
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        size = int(headers.get("content-length", 0))
        request = Request(time.monotonic(), method, unquote(url.path), query, headers, size)
        fault = self.choose(request)
        kind = fault.kind if fault is not None else ""
        if kind == "reset":
            reset(client)
            return False
        if headers.get("expect", "").lower() == "100-continue":
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = _exactly(stream, size)
        if kind == "blackhole":
            return self._hang()
        if kind == "status":
            assert fault is not None
            return self._answer_fault(client, request, fault)
        if kind == "cut_request":
            self._cut(target, headers, body)
            return False
        return self._pass(client, upstream, request, fault, target, body)

    def _pass(
        self, client: socket.socket, upstream: http.client.HTTPConnection, request: Request,
        fault: Fault | None, target: str, body: bytes,
    ) -> bool:  # fmt: skip
        kind = fault.kind if fault is not None else ""
        upstream.putrequest(request.method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.items():
            if name not in ("connection", "expect"):
                upstream.putheader(name, value)
        upstream.endheaders()
        if kind == "slow_request" and fault is not None:
            for piece in self._paced(body, fault.bytes_per_s):
                upstream.send(piece)
        else:
            upstream.send(body)
        response = upstream.getresponse()
        data = response.read()
        request.status = response.status
        if kind == "damage_stored" and response.status == 200:
            self.damage_stored(request.path)
        if kind == "hang_after":
            return self._hang()
        if kind == "close_after":
            return False
        if kind == "delay" and fault is not None:
            self._closing.wait(fault.seconds)
        return self._relay(client, request, fault, response, data)

    def _relay(
        self, client: socket.socket, request: Request, fault: Fault | None,
        response: http.client.HTTPResponse, data: bytes,
    ) -> bool:  # fmt: skip
        kind = fault.kind if fault is not None else ""
        previous, self.last_body = self.last_body, data if request.method == "GET" else self.last_body
        if kind == "damage":
            data = self.flip(data)
        elif kind == "swap":
            data = (previous * (len(data) // max(1, len(previous)) + 1))[: len(data)]
        elif kind == "hide" and fault is not None:
            data = _without(data, fault.hidden)
        length = response.getheader("Content-Length", "0") if request.method == "HEAD" else str(len(data))
        names = ("content-length", "transfer-encoding", "connection")
        kept = [(name, value) for name, value in response.getheaders() if name.lower() not in names]
        head = f"HTTP/1.1 {response.status} {response.reason}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in [*kept, ("Content-Length", length)])
        client.sendall(head.encode("latin-1") + b"\r\n")
        if request.method == "HEAD" or response.status in (204, 304):
            return True
        if kind == "truncate":
            client.sendall(data[: len(data) // 2])
            return False
        if kind == "slow" and fault is not None:
            for piece in self._paced(data, fault.bytes_per_s):
                client.sendall(piece)
        else:
            client.sendall(data)
        return True

    def _answer_fault(self, client: socket.socket, request: Request, fault: Fault) -> bool:
        request.status = fault.status
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f"<Error><Code>{fault.code}</Code><Message>scripted</Message>"
            f"<AWSAccessKeyId>{self._access_key(request)}</AWSAccessKeyId></Error>"
        ).encode()
        head = f"HTTP/1.1 {fault.status} Scripted\r\nContent-Type: application/xml\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in fault.headers.items())
        shown = b"" if request.method == "HEAD" else body
        client.sendall(head.encode() + f"Content-Length: {len(shown)}\r\n\r\n".encode() + shown)
        return True

    @staticmethod
    def _access_key(request: Request) -> str:
        """What real servers repeat in a refusal, and no log of ours may."""
        match = re.search(r"Credential=([^/]+)/", request.headers.get("authorization", ""))
        return match[1] if match else ""

    def _hang(self) -> bool:
        self._closing.wait(HANG_S)
        return False

    def _cut(self, target: str, headers: dict[str, str], body: bytes) -> None:
        with socket.create_connection(self._target, timeout=10) as half:
            head = f"PUT {target} HTTP/1.1\r\n" + "".join(f"{n}: {v}\r\n" for n, v in headers.items())
            half.sendall(head.encode("latin-1") + b"\r\n" + body[: len(body) // 2])

    def _paced(self, data: bytes, bytes_per_s: float) -> Iterator[bytes]:
        step = max(1, int(bytes_per_s / 20))
        for place in range(0, len(data), step):
            if self._closing.wait(len(data[place : place + step]) / bytes_per_s):
                return
            yield data[place : place + step]


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, proxy: S3Proxy, address: str, port: int) -> None:
        self.proxy = proxy
        super().__init__((address, port), _Connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        raise  # a bug in the proxy is told by the thread's own report


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.proxy.serve(self.request)  # type: ignore[attr-defined]


def reset(connection: socket.socket) -> None:
    """Close with RST, whoever reads from it."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    connection.close()


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size) if size else b""
    if len(data) < size:
        raise OSError("the client went away")
    return data


def _without(data: bytes, hidden: Callable[[str], bool]) -> bytes:
    def kept(match: re.Match[bytes]) -> bytes:
        key = re.search(rb"<Key>(.*?)</Key>", match[0])
        return b"" if key and hidden(unquote(key[1].decode())) else match[0]

    return re.sub(rb"<Contents>.*?</Contents>", kept, data, flags=re.DOTALL)
