"""One HTTP/1.1 request without a body, out of a stream in any pieces; and the head of its answer.

For doors that answer one request on a connection and close it.  Input that is no valid request becomes a
Refusal: bytes of a peer never raise.  Strict where tolerance would only help an attacker: lines end with
CRLF, nothing is folded, a request has one Host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

HEAD_BYTES_MAX: Final = 8 * 1024  # request line and header fields together
TARGET_BYTES_MAX: Final = 2 * 1024
FIELDS_MAX: Final = 64

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_LINE: Final = re.compile(rb"(%s) ([!-~]+) HTTP/([0-9])\.([0-9])\Z" % _TOKEN)
_FIELD: Final = re.compile(rb"(%s):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)\Z" % _TOKEN)
_ABSOLUTE: Final = re.compile(r"https?://[^/?#]*", re.IGNORECASE)

REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    414: "URI Too Long",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}


class Request(NamedTuple):
    """``path`` has no query, and nothing of it is decoded; a body that comes with it is left unread."""

    method: str
    path: str
    brings_body: bool = False


class Refusal(NamedTuple):
    """A status, and why in words that may be shown to the client."""

    status: int
    why: str


class RequestReader:
    """Feed it until it answers; then it takes no more."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen = bytearray()

    def feed(self, data: bytes) -> Request | Refusal | None:
        """The request or why it is none; None: more bytes are needed."""
        seen = self._seen
        looked = max(0, len(seen) - 3)
        seen += data
        end = seen.find(b"\r\n\r\n", looked, HEAD_BYTES_MAX)
        if end < 0:
            return self._unfinished()
        first, *fields = bytes(seen[:end]).split(b"\r\n")
        line = _request_line(first)
        return line if isinstance(line, Refusal) else _checked(*line, fields)

    def _unfinished(self) -> Refusal | None:
        """Return the refusal of a head that is wrong already, however it goes on; else None."""
        seen = self._seen
        line_end = seen.find(b"\n", 0, HEAD_BYTES_MAX)
        if line_end >= 0 and seen[line_end - 1 : line_end] != b"\r":
            return Refusal(400, "lines end with CR LF")
        if line_end >= 0:
            line = _request_line(bytes(seen[: line_end - 1]))
            if isinstance(line, Refusal):
                return line
        elif len(seen) > TARGET_BYTES_MAX + 64:
            return Refusal(414, f"a target has at most {TARGET_BYTES_MAX} bytes")
        if len(seen) >= HEAD_BYTES_MAX:
            return Refusal(431, f"a request's head has at most {HEAD_BYTES_MAX} bytes")
        return None


def _request_line(line: bytes) -> tuple[Request, bool] | Refusal:
    """The request, and whether it must name its host (HTTP/1.1)."""
    found = _LINE.match(line)
    if found is None:
        return Refusal(400, "the request line is not METHOD TARGET HTTP/1.1")
    method, target, major, minor = found.groups()
    if major != b"1":
        return Refusal(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")
    if len(target) > TARGET_BYTES_MAX:
        return Refusal(414, f"a target has at most {TARGET_BYTES_MAX} bytes")
    path = (
        _ABSOLUTE.sub("", target.decode("ascii"), count=1) if not target.startswith(b"/") else target.decode()
    )
    return Request(method.decode("ascii"), path.partition("?")[0]), minor != b"0"


def _checked(request: Request, names_host: bool, fields: list[bytes]) -> Request | Refusal:
    if len(fields) > FIELDS_MAX:
        return Refusal(431, f"a request has at most {FIELDS_MAX} header fields")
    hosts, body = 0, False
    for field in fields:
        found = _FIELD.match(field)
        if found is None:
            return Refusal(400, "a header field is not NAME: VALUE")
        name = found[1].lower()
        hosts += name == b"host"
        body |= name == b"transfer-encoding" or (name == b"content-length" and found[2].strip() != b"0")
    if hosts > 1 or (names_host and not hosts):
        return Refusal(400, "a request names its Host once")
    return request._replace(brings_body=body)


def answer_head(status: int, size_bytes: int, fields: Mapping[str, str]) -> bytes:
    """Status line and header fields of an answer after which the connection ends."""
    lines = [f"HTTP/1.1 {status} {REASONS[status]}", f"Content-Length: {size_bytes}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
