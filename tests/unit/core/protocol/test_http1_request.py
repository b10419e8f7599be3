"""One request out of bytes: any cut of the stream, every bound, and what is refused with which status."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.core.protocol.http1 import (
    FIELDS_MAX,
    HEAD_BYTES_MAX,
    TARGET_BYTES_MAX,
    Refusal,
    Request,
    RequestReader,
    answer_head,
)

PROMETHEUS = (
    b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9040\r\nUser-Agent: Prometheus/3.5.0\r\n"
    b"Accept: application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.4,*/*;q=0.2\r\n"
    b"Accept-Encoding: gzip\r\nX-Prometheus-Scrape-Timeout-Seconds: 10\r\n\r\n"
)


def read(data: bytes) -> Request | Refusal | None:
    return RequestReader().feed(data)


def status(data: bytes) -> int:
    found = read(data)
    assert isinstance(found, Refusal), found
    assert found.why and found.why.isprintable()
    return found.status


def with_fields(*fields: bytes) -> bytes:
    return b"\r\n".join([b"GET / HTTP/1.1", b"Host: h", *fields, b"", b""])


def test_any_cut_of_the_stream_gives_the_same_request() -> None:
    for cut in range(len(PROMETHEUS) + 1):
        reader = RequestReader()
        first = reader.feed(PROMETHEUS[:cut])
        found = first if cut == len(PROMETHEUS) else reader.feed(PROMETHEUS[cut:])
        assert (first is None or cut == len(PROMETHEUS)) and found == Request("GET", "/metrics"), cut


def test_byte_by_byte() -> None:
    reader = RequestReader()
    answers = [reader.feed(bytes([byte])) for byte in PROMETHEUS]
    assert answers[-1] == Request("GET", "/metrics") and set(answers[:-1]) == {None}


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/metrics?name[]=up&x", "/metrics"),
        (b"http://broker.test:9040/metrics?x", "/metrics"),
        (b"HTTP://broker.test", ""),
        (b"/%6detrics", "/%6detrics"),
        (b"*", "*"),
        (b"//metrics", "//metrics"),
    ],
)
def test_the_path_is_taken_out_of_the_target_and_nothing_is_decoded(target: bytes, path: str) -> None:
    assert read(b"GET %s HTTP/1.1\r\nHost: h\r\n\r\n" % target) == Request("GET", path)


def test_an_old_client_names_no_host() -> None:
    assert read(b"HEAD / HTTP/1.0\r\n\r\n") == Request("HEAD", "/")


@pytest.mark.parametrize(
    "line",
    [
        b"", b"GET", b"GET /", b"GET  / HTTP/1.1", b"GET / HTTP/1.1 ", b" GET / HTTP/1.1", b"GET / http/1.1",
        b"GET / HTTP/11", b"GET / HTTP/1.x", b"GET /a b HTTP/1.1", b"G\x00T / HTTP/1.1",
        b"GET /\x80 HTTP/1.1", b"GET\t/\tHTTP/1.1", b"\x16\x03\x01\x02\x00\x01",
    ],
)  # fmt: skip
def test_what_is_no_request_line_is_refused_as_soon_as_it_is_there(line: bytes) -> None:
    assert status(line + b"\r\n") == 400
    assert status(line + b"\r\nHost: h\r\n\r\n") == 400


def test_other_versions_are_named_so() -> None:
    assert status(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") == 505
    assert status(b"GET / HTTP/3.0\r\n") == 505


def test_lines_end_with_both_characters() -> None:
    assert status(b"GET / HTTP/1.1\nHost: h\n\n") == 400
    assert status(b"\n") == 400


@pytest.mark.parametrize(
    "field",
    [
        b"X y: 1", b"no colon", b": empty", b" folded: 1", b"\tfolded", b"X : 1", b"X: a\x00b", b"X: a\nb",
        b"Host: second",
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_is_refused(field: bytes) -> None:
    assert status(with_fields(field)) == 400


@pytest.mark.parametrize(
    "field",
    [
        b"Content-Length: 1", b"Content-Length: 0, 0", b"Content-Length: -1", b"Transfer-Encoding: chunked",
        b"transfer-encoding: identity",
    ],
)  # fmt: skip
def test_a_body_is_told_of(field: bytes) -> None:
    assert read(with_fields(field)) == Request("GET", "/", brings_body=True)


def test_a_request_names_its_host() -> None:
    assert status(b"GET / HTTP/1.1\r\nAccept: */*\r\n\r\n") == 400


def test_fields_that_are_harmless_are_taken() -> None:
    assert read(
        with_fields(b"Content-Length: 0", b"X:", b"Y:\t\xfc\t ", b"connection: keep-alive")
    ) == Request("GET", "/")


def test_bounds_are_exact() -> None:
    target = b"/" + b"a" * (TARGET_BYTES_MAX - 1)
    assert read(b"GET %s HTTP/1.0\r\n\r\n" % target) == Request("GET", target.decode())
    assert status(b"GET %sa HTTP/1.0\r\n\r\n" % target) == 414
    assert read(with_fields(*[b"X: 1"] * (FIELDS_MAX - 1))) == Request("GET", "/")
    assert status(with_fields(*[b"X: 1"] * FIELDS_MAX)) == 431
    room = HEAD_BYTES_MAX - len(with_fields(b"X: "))
    assert read(with_fields(b"X: " + b"a" * room)) == Request("GET", "/")
    assert status(with_fields(b"X: " + b"a" * (room + 1))) == 431


@pytest.mark.parametrize(
    ("data", "expected"), [(b"A" * 1_000_000, 414), (b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 200_000, 431)]
)
def test_what_never_ends_is_refused_before_it_costs_memory(data: bytes, expected: int) -> None:
    reader, taken = RequestReader(), 0
    while (found := reader.feed(data[taken : taken + 100])) is None:
        taken += 100
    assert isinstance(found, Refusal) and found.status == expected and taken <= HEAD_BYTES_MAX


@given(st.binary(max_size=300))
def test_no_bytes_raise(data: bytes) -> None:
    for prefix in (b"", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: "):
        read(prefix + data + b"\r\n\r\n")


def test_an_answer_ends_the_connection() -> None:
    head = answer_head(405, 7, {"Allow": "GET, HEAD"}).decode()
    assert head == (
        "HTTP/1.1 405 Method Not Allowed\r\n"
        "Content-Length: 7\r\nConnection: close\r\nAllow: GET, HEAD\r\n\r\n"
    )
