"""Which heads are requests, which are malformed, and which are fair but no gRPC."""

from __future__ import annotations

import pytest

from danube.core.http2.request import request_head, trailers_fault
from tests.unit.http2_parts import FIELDS


def without(name: str) -> list[tuple[str, str]]:
    return [field for field in FIELDS if field[0] != name]


def test_a_grpc_request() -> None:
    head = request_head(FIELDS)
    assert (head.method, head.scheme, head.path, head.authority) == (
        "POST",
        "http",
        "/danube.Topic/Ask",
        "localhost:6650",
    )
    assert head.fields == {"te": "trailers", "content-type": "application/grpc"}
    assert (head.malformed, head.problem, head.http_status, head.content_length) == ("", "", 0, -1)
    assert not head.unusual


def test_a_head_never_changes() -> None:
    with pytest.raises(AttributeError):
        request_head(FIELDS).path = "/other"  # type: ignore[misc]


def test_host_stands_in_for_the_authority() -> None:
    assert request_head([*without(":authority"), ("host", "a:1")]).authority == "a:1"
    assert request_head([*FIELDS, ("host", "LOCALHOST:6650")]).malformed == ""


def test_repeated_fields_are_joined() -> None:
    more = [
        ("x-a", "1"),
        ("x-a", "2"),
        ("cookie", "a=1"),
        ("cookie", "b=2"),
        ("t-bin", "AA"),
        ("t-bin", "BB"),
    ]
    fields = request_head(FIELDS + more).fields
    assert (fields["x-a"], fields["cookie"], fields["t-bin"]) == ("1,2", "a=1; b=2", "AA,BB")


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ([], "missing"),
        (without(":method"), ":method missing"),
        (without(":scheme"), ":scheme missing"),
        (without(":path"), ":path missing"),
        ([*without(":path"), (":path", "")], "after a regular"),
        ([(":path", ""), *without(":path")], ":path missing"),
        ([FIELDS[0], *FIELDS], "twice"),
        ([(":status", "200"), *FIELDS], "pseudo"),
        ([(":protocol", "websocket"), *FIELDS], "pseudo"),
        ([*FIELDS, (":authority", "x")], "after a regular"),
        ([*FIELDS, ("X-A", "1")], "field name"),
        ([*FIELDS, ("", "1")], "field name"),
        ([*FIELDS, ("a b", "1")], "field name"),
        ([*FIELDS, ("a\xe9", "1")], "field name"),
        ([*FIELDS, ("a", "1\r\nb: 2")], "control"),
        ([*FIELDS, ("a", "\x00")], "control"),
        ([*FIELDS, ("a", " 1")], "space"),
        ([*FIELDS, ("a", "1\t")], "space"),
        ([(":path", "/\n"), *without(":path")], "control"),
        ([*FIELDS, ("connection", "close")], "HTTP/1"),
        ([*FIELDS, ("keep-alive", "1")], "HTTP/1"),
        ([*FIELDS, ("proxy-connection", "1")], "HTTP/1"),
        ([*FIELDS, ("transfer-encoding", "chunked")], "HTTP/1"),
        ([*FIELDS, ("upgrade", "h2c")], "HTTP/1"),
        ([*without("te"), ("te", "gzip")], "te is not"),
        ([*FIELDS, ("content-length", "-1")], "content-length"),
        ([*FIELDS, ("content-length", "9" * 19)], "content-length"),
        ([*FIELDS, ("content-length", "1"), ("content-length", "2")], "content-length"),
        ([*FIELDS, ("host", "other")], "host differs"),
        ([(":method", "CONNECT"), *without(":method")], "CONNECT"),
    ],
)
def test_a_malformed_head(fields: list[tuple[str, str]], fault: str) -> None:
    head = request_head(fields)
    assert fault in head.malformed
    assert head.unusual
    assert head.content_length == -1


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ([(":method", "GET"), *without(":method")], 405),
        ([(":method", "CONNECT"), (":authority", "a:1")], 405),
        (without("content-type"), 415),
        ([*without("content-type"), ("content-type", "application/grpc-web")], 415),
        ([*without("content-type"), ("content-type", "text/html")], 415),
        ([*without("content-type"), ("content-type", "application/grpc+proto")], 0),
        ([*without("content-type"), ("content-type", "application/grpc;charset=utf-8")], 0),
        (without("te"), 0),
        ([*FIELDS, ("content-length", "7"), ("content-length", "7")], 0),
    ],
)
def test_a_fair_request_that_may_be_no_grpc(fields: list[tuple[str, str]], status: int) -> None:
    head = request_head(fields)
    assert head.malformed == ""
    assert head.http_status == status
    assert bool(head.problem) == bool(status)


def test_a_head_whose_rest_was_dropped_has_that_problem_alone() -> None:
    head = request_head(FIELDS[:2], oversize="the header fields take more than 16384 bytes")
    assert (head.malformed, head.http_status) == ("", 431)
    assert "16384" in head.problem


def test_trailers_of_a_client_have_regular_fields_only() -> None:
    assert trailers_fault([("x-a", "1")]) == ""
    assert "pseudo" in trailers_fault([("x-a", "1"), (":path", "/")])
    assert "pseudo" in trailers_fault([(":status", "200")])
