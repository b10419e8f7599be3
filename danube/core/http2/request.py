"""Header fields of a request, read by the rules of RFC 9113, 8 and of gRPC over HTTP/2.

``malformed`` is a breach of HTTP/2 by the peer and resets the stream; no layer above sees such a head.
``problem`` is a valid HTTP/2 request that is no gRPC request; the door answers it with ``http_status``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

Field = tuple[str, str]

_PSEUDO: Final = frozenset({":method", ":scheme", ":path", ":authority"})
_OF_THE_CONNECTION: Final = frozenset(
    {"connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"}
)
_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9a-z]+")
_VALUE: Final = re.compile(r"(?:[^\x00\r\n \t](?:[^\x00\r\n]*[^\x00\r\n \t])?)?")
_CONTENT_LENGTH: Final = re.compile(r"[0-9]{1,18}")


class RequestHead(NamedTuple):
    """The head of a request, shared by every stream whose fields are the same.

    ``fields`` has the regular fields by lower-case name; repeated ones are joined by a comma, binary
    ones (``-bin``) stay base64 text; nobody changes it.  ``content_length`` is -1 when the peer named
    none.  ``unusual``: malformed, or with a content length that DATA must agree with.
    """

    method: str
    scheme: str
    path: str
    authority: str
    fields: dict[str, str]
    content_length: int
    malformed: str
    problem: str
    http_status: int
    unusual: bool

    def with_field(self, name: str, value: str) -> RequestHead:
        """Return this head with one more regular field, which is known to be well-formed and new."""
        method, scheme, path, authority, fields, length, malformed, problem, status, unusual = self
        fields = {**fields, name: value}
        return RequestHead(
            method, scheme, path, authority, fields, length, malformed, problem, status, unusual
        )


def _grpc_problem(method: str, fields: dict[str, str]) -> tuple[str, int]:
    """(why this is no gRPC request, HTTP status), or ("", 0).

    A missing ``te`` is let pass as other servers do: it tells of a proxy, not of the request.
    """
    content_type = fields.get("content-type", "")
    if method != "POST":
        return f"gRPC calls are POST requests, this is {method or 'none'}", 405
    if content_type.startswith("application/grpc") and content_type[16:17] in ("", "+", ";"):
        return "", 0
    return f"the content-type is {content_type or 'missing'}, gRPC has application/grpc", 415


def request_head(fields: Sequence[Field], *, oversize: str = "") -> RequestHead:
    """Judge the fields of a request in their order.

    ``oversize``: some fields were dropped because there were too many.  They cannot be checked, so the head
    has only that problem.
    """
    pseudo: dict[str, str] = {}
    regular: dict[str, str] = {}
    malformed = ""
    for name, value in fields:
        if name in _PSEUDO:
            fault = _pseudo_fault(name, value, pseudo, regular)
            pseudo[name] = value
        else:
            fault = field_fault(name, value)
            if not fault:
                fault = _keep(regular, name, value)
        malformed = malformed or fault
    if not malformed and not oversize:
        malformed = _whole_fault(pseudo, regular)
    problem, status = (oversize, 431) if oversize else _grpc_problem(pseudo.get(":method", ""), regular)
    length = "" if malformed else regular.get("content-length", "")
    return RequestHead(
        method=pseudo.get(":method", ""),
        scheme=pseudo.get(":scheme", ""),
        path=pseudo.get(":path", ""),
        authority=pseudo.get(":authority") or regular.get("host", ""),
        fields=regular,
        content_length=int(length) if length else -1,
        malformed=malformed,
        problem=problem,
        http_status=status,
        unusual=bool(malformed or length),
    )


def trailers_fault(fields: Sequence[Field]) -> str:
    """Why the fields after a request's body are malformed, or an empty string."""
    return next((fault for name, value in fields if (fault := field_fault(name, value))), "")


def field_fault(name: str, value: str) -> str:
    """Why a regular field is malformed (RFC 9113, 8.2), or an empty string."""
    if not _NAME.fullmatch(name):
        return f"no pseudo-header field {name!r} exists here" if name[:1] == ":" else f"field name {name!r}"
    if not _VALUE.fullmatch(value):
        return f"the value of {name} has a control character or space around it"
    if name in _OF_THE_CONNECTION:
        return f"{name} belongs to a connection of HTTP/1"
    if name == "te" and value != "trailers":
        return "te is not trailers"
    return ""


def _pseudo_fault(name: str, value: str, pseudo: dict[str, str], regular: dict[str, str]) -> str:
    if regular:
        return f"{name} comes after a regular field"
    if name in pseudo:
        return f"{name} comes twice"
    if not _VALUE.fullmatch(value):
        return f"the value of {name} has a control character or space around it"
    return ""


def _keep(regular: dict[str, str], name: str, value: str) -> str:
    if name == "content-length":
        if not _CONTENT_LENGTH.fullmatch(value) or regular.get(name, value) != value:
            return "content-length is no number, or two"
        regular[name] = value
    elif name in regular:
        regular[name] = f"{regular[name]}{'; ' if name == 'cookie' else ','}{value}"
    else:
        regular[name] = value
    return ""


def _whole_fault(pseudo: dict[str, str], regular: dict[str, str]) -> str:
    if pseudo.get(":method") == "CONNECT":
        alone = ":scheme" not in pseudo and ":path" not in pseudo and pseudo.get(":authority")
        return "" if alone else "CONNECT has an authority and neither scheme nor path"
    missing = [name for name in (":method", ":scheme", ":path") if not pseudo.get(name)]
    if missing:
        return f"{' and '.join(missing)} missing"
    authority, host = pseudo.get(":authority"), regular.get("host")
    if authority and host and authority.lower() != host.lower():
        return "host differs from :authority"
    return ""
