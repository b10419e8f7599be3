"""Peers that break the rules, are slow, or speak something else on the gRPC ports (rows J4, J6, J7, J13)."""

from __future__ import annotations

import random
import select
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest
from google.protobuf.message import Message

from danube.server.proto import DanubeAdmin_pb2, DanubeApi_pb2, SchemaRegistry_pb2
from tests.broker_process import BrokerProcess
from tests.e2e.grpc_parts import DanubeCalls, pb
from tests.grpc_client import Disconnected, GrpcError, Stream

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, RST_STREAM, WINDOW_UPDATE, GOAWAY, CONTINUATION, HEADERS = 4, 6, 3, 8, 7, 9, 1
TOPIC = "/default/hostile"


def frame(kind: int, flags: int = 0, stream: int = 0, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + body


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    directory: Path = tmp_path_factory.mktemp("hostile")
    environment = {"DANUBE_LIMITS__HANDSHAKE_TIMEOUT": "1s"}
    with BrokerProcess(directory / "data", workers=1, environment=environment) as process:
        yield process


def raw(process: BrokerProcess, first: bytes = PREFACE + frame(SETTINGS)) -> socket.socket:
    host, port = process.grpc_address.split(":")
    connection = socket.create_connection((host, int(port)), 10)
    connection.sendall(first)
    return connection


def read_to_end(connection: socket.socket, timeout_s: float = 20.0) -> bytes:
    """All that comes until the server closes; TimeoutError when it does not."""
    connection.settimeout(timeout_s)
    data = b""
    with suppress(ConnectionError):
        while chunk := connection.recv(1 << 16):
            data += chunk
    connection.close()
    return data


def last_goaway(data: bytes) -> int:
    """The code of a GOAWAY anywhere in the end of an output, -1 without one."""
    at = data.rfind(b"\x07\0\0\0\0\0")
    return int.from_bytes(data[at + 10 : at + 14], "big") if at >= 0 else -1


def still_serves(process: BrokerProcess) -> None:
    with DanubeCalls(process.grpc_address) as calls:
        number = calls.create(TOPIC)
        calls.send(TOPIC, number, b"still here")


# -- other protocols ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\0" * 64, b"PRI * HTTP/1"],
    ids=["http1", "tls", "zeros", "almost"],
)  # fmt: skip
def test_another_protocol_is_closed_and_told_in_the_log(served: BrokerProcess, first: bytes) -> None:
    read_to_end(raw(served, first))
    assert "connection refused" in served.output_tail(20_000)
    still_serves(served)


def test_a_native_client_on_the_grpc_port_is_told_so(served: BrokerProcess) -> None:
    from danube import sync
    from danube.errors import ConnectionFailed, ProtocolError

    with (
        pytest.raises((ConnectionFailed, ProtocolError)) as caught,
        sync.connect(f"danube://{served.grpc_address}"),
    ):
        pass
    assert "gRPC" in str(caught.value) + caught.value.hint


def test_slow_headers_are_given_up(served: BrokerProcess) -> None:
    heads = (b"", PREFACE[:10], PREFACE, PREFACE + frame(SETTINGS) + frame(HEADERS, 0, 1, b"\x82")[:9])
    began = time.monotonic()
    for connection in [raw(served, first) for first in heads]:  # all wait at the same time
        read_to_end(connection, 30)
        assert time.monotonic() - began < 8
    still_serves(served)


# -- floods -------------------------------------------------------------------------------------------


def flood(process: BrokerProcess, pieces: Iterator[bytes]) -> int:
    """Send pieces, reading what comes, until the server has had enough; the code of its GOAWAY."""
    connection = raw(process)
    connection.setblocking(False)
    received, piece = b"", b""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        piece = piece or next(pieces, b"")
        readable, writable, _ = select.select([connection], [connection] if piece else [], [], 1)
        try:
            if readable:
                chunk = connection.recv(1 << 16)
                if not chunk:
                    break
                received = (received + chunk)[-(1 << 16) :]
            if writable:
                piece = piece[connection.send(piece) :]
        except ConnectionError:
            break
    else:
        raise TimeoutError("the flood was never ended")
    connection.close()
    return last_goaway(received)


def head(process: BrokerProcess) -> bytes:
    """A header block of a call, without any indexing."""
    block = b"\x83\x86"  # :method POST, :scheme http
    fields = [(b":path", b"/danube.HealthCheck/HealthCheck"), (b":authority", b"x"), (b"te", b"trailers"),
              (b"content-type", b"application/grpc")]  # fmt: skip
    for name, value in fields:
        block += b"\x10" + bytes((len(name),)) + name + bytes((len(value),)) + value
    return block


BOMB = b"\x40\x01a\x7f\x81\x1f" + b"b" * 4096 + b"\xbe" * 12_000  # one large entry, named again and again
FLOODS: dict[str, Callable[[bytes], Iterator[bytes]]] = {
    "rapid reset": lambda block: (
        frame(HEADERS, 4, n, block) + frame(RST_STREAM, 0, n, b"\0\0\0\x08") for n in range(1, 1_000_000, 2)
    ),
    "ping": lambda block: (frame(PING, 0, 0, bytes(8)) * 100 for _ in range(20_000)),
    "settings": lambda block: (frame(SETTINGS) * 100 for _ in range(20_000)),
    "window": lambda block: (frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\x01") * 100 for _ in range(20_000)),
    "continuation": lambda block: chain(
        [frame(HEADERS, 0, 1, block)], (frame(CONTINUATION, 0, 1, b"") for _ in range(100_000))
    ),
    "header bomb": lambda block: iter([frame(HEADERS, 4, 1, BOMB)] * 9),
    "empty data": lambda block: chain(
        [frame(HEADERS, 4, 1, block)], (frame(0, 0, 1, b"") * 100 for _ in range(20_000))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_is_ended(served: BrokerProcess, name: str) -> None:
    worker = psutil.Process(served.running_workers()[0])
    before_bytes = worker.memory_info().rss
    code = flood(served, FLOODS[name](head(served)))
    assert code > 0, "GOAWAY says why"
    assert worker.memory_info().rss - before_bytes < 64 << 20
    still_serves(served)


def test_a_window_of_one_byte_is_served_and_bounded(served: BrokerProcess) -> None:
    with DanubeCalls(served.grpc_address) as sender:
        number = sender.create(TOPIC)
        with DanubeCalls(served.grpc_address, window=1) as calls:
            consumer = calls.subscribe(TOPIC, "tiny")
            calls.reading = False
            stream = calls.receive(consumer)
            for _ in range(200):
                sender.send(TOPIC, number, bytes(100_000))
            with suppress(TimeoutError):
                stream.next(0.3)
            calls.reading = True
        still_serves(served)


def test_a_reader_that_stops_holds_nobody_up(served: BrokerProcess) -> None:
    worker = psutil.Process(served.running_workers()[0])
    with DanubeCalls(served.grpc_address) as stuck, DanubeCalls(served.grpc_address) as calls:
        number = calls.create(TOPIC + "-stuck")
        stuck.reading = False
        stuck.receive(stuck.subscribe(TOPIC + "-stuck", "slow"))
        stream = calls.receive(calls.subscribe(TOPIC + "-stuck", "quick"))
        before_bytes = worker.memory_info().rss
        for _ in range(300):
            calls.send(TOPIC + "-stuck", number, bytes(200_000))
            calls.ack(stream.next(), "quick")
        assert worker.memory_info().rss - before_bytes < 128 << 20


# -- requests of any content --------------------------------------------------------------------------

MODULES = (DanubeApi_pb2, SchemaRegistry_pb2, DanubeAdmin_pb2)
METHODS = [
    (module, method)
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


def random_message(message: Message, source: random.Random, depth: int = 0) -> None:
    """Fill fields at random: extremes, wrong names, unknown enum values, missing sub-messages."""
    for field in message.DESCRIPTOR.fields:
        if source.random() < 0.4 or (depth > 2 and field.message_type):
            continue
        if field.is_repeated:
            if field.message_type is None and field.type == field.TYPE_STRING:
                getattr(message, field.name).extend(_text(source) for _ in range(source.randrange(3)))
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            random_message(getattr(message, field.name), source, depth + 1)
        else:
            setattr(message, field.name, _value(field, source))


def _text(source: random.Random) -> str:
    return source.choice(
        ["", "x", "/default/hostile", "/default/none", "..", "a\0b", "ü" * 300, "/", "\n", "avro"]
    )


def _value(field: Any, source: random.Random) -> Any:
    if field.type == field.TYPE_STRING:
        return _text(source)
    if field.type == field.TYPE_BYTES:
        return source.randbytes(source.choice([0, 1, 100, 5000]))
    if field.type == field.TYPE_BOOL:
        return source.random() < 0.5
    if field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT):
        return source.random()
    bits = 64 if field.type in (field.TYPE_UINT64, field.TYPE_INT64) else 31
    return source.choice([0, 1, 2, 9, 2 ** (bits - 1) - 1])


@pytest.mark.parametrize(("module", "method"), METHODS, ids=[method.full_name for _, method in METHODS])
def test_no_request_breaks_the_broker(
    served: BrokerProcess, module: Any, method: Any, source: random.Random
) -> None:
    address = served.admin_address if module is DanubeAdmin_pb2 else served.grpc_address
    request_class = getattr(module, method.input_type.name)
    response_class = getattr(module, method.output_type.name)
    lasting = method.name == "ReceiveMessages"  # one that is served goes on: all are waited for at a time
    with DanubeCalls(address) as calls:
        began: list[tuple[bytes, Stream]] = []
        for attempt in range(25):
            if attempt < 3:
                body = (b"", b"\xff\xff", b"\x0a\xff\xff\xff\x7f")[attempt]
            else:
                request = request_class()
                random_message(request, source)
                body = request.SerializeToString()
            path = f"/{method.containing_service.full_name}/{method.name}"
            began.append((body, calls.start(path, body, response_class)))
            if not lasting:
                with suppress(TimeoutError):
                    began[-1][1].wait_ended(10)
        if lasting:
            with suppress(TimeoutError):
                calls.wait(lambda: all(stream.ended for _, stream in began), 2)
        for body, stream in began:
            if stream.ended:
                error = stream.error()
                assert error.code not in (-1, 2, 13), (method.full_name, body, error)
                if error.code:
                    assert len(error.message) > 10, "a sentence"


# -- TLS ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def test_tls_with_http2_by_alpn(broker: Callable[..., BrokerProcess], certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    environment = {
        "DANUBE_GRPC__CERT_FILE": str(cert),
        "DANUBE_GRPC__KEY_FILE": str(key),
        "DANUBE_ADMIN__TLS": "true",
    }
    process = broker(workers=2, environment=environment)
    context = ssl.create_default_context(cafile=str(cert))
    context.set_alpn_protocols(["h2"])
    with DanubeCalls(process.grpc_address, tls=context) as calls:
        assert calls.socket.selected_alpn_protocol() == "h2"  # type: ignore[attr-defined]
        number = calls.create(TOPIC)
        stream = calls.receive(calls.subscribe(TOPIC))
        calls.send(TOPIC, number, bytes(500_000))
        assert len(stream.next().payload) == 500_000
        lookup = calls.unary("Discovery/TopicLookup", pb.TopicLookupRequest(topic=TOPIC))
        assert lookup.connect_url == f"https://{process.grpc_address}"
    for _ in range(6):  # half of them at the worker that does not own it, and TLS cannot be passed on
        with DanubeCalls(process.grpc_address, tls=context) as calls:
            calls.send(TOPIC, number, b"x")
    with DanubeCalls(process.admin_address, tls=context) as calls:
        brokers = calls.admin("BrokerAdmin/ListBrokers", DanubeAdmin_pb2.Empty()).brokers
        assert brokers[0].broker_addr == f"https://{process.grpc_address}"
    with pytest.raises((Disconnected, OSError, GrpcError)), DanubeCalls(process.grpc_address) as plain:
        plain.create(TOPIC)


def test_a_certificate_that_cannot_be_used_stops_the_start(
    broker: Callable[..., BrokerProcess], tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    for cert, key in ((tmp_path / "none.pem", certificate[1]), (certificate[1], certificate[1])):
        environment = {"DANUBE_GRPC__CERT_FILE": str(cert), "DANUBE_GRPC__KEY_FILE": str(key)}
        process = broker(start=False, environment=environment)
        with pytest.raises(Exception, match="TLS cannot use"):
            process.start()
        assert process.exit_code == 11


def test_half_done_handshakes_are_given_up(
    broker: Callable[..., BrokerProcess], certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    environment = {
        "DANUBE_GRPC__CERT_FILE": str(cert),
        "DANUBE_GRPC__KEY_FILE": str(key),
        "DANUBE_LIMITS__HANDSHAKE_TIMEOUT": "1s",
    }
    process = broker(workers=1, environment=environment)
    half = [raw(process, b"\x16\x03\x01\x02\x00\x01\x00") for _ in range(100)]
    for connection in half:
        assert read_to_end(connection, 10) == b""
    context = ssl.create_default_context(cafile=str(cert))
    context.set_alpn_protocols(["h2"])
    with DanubeCalls(process.grpc_address, tls=context) as calls:
        calls.create(TOPIC)
