r"""The bytes of an audit file: JSON lines, each of which names the hash of the line before it.

    {"time":"2026-11-28T08:40:43.000001Z","seq":7,"principal":"user:ann",...,"prev":"<hash>","hash":"<hash>"}

    hash = SHA-256 of the line up to and without ``,"hash":``, as lower-case hexadecimal digits
    prev = hash of the line with seq - 1; 64 zeros for seq 1

Each worker has a chain of its own, over all files of its number.  A changed byte changes a hash, a missing
or moved line breaks ``seq`` and ``prev``.  Nothing in a line is secret, and nothing of a payload is in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

ZERO: Final = "0" * 64
LINE_BYTES_MAX: Final = 16 * 1024
TEXT_CHARACTERS_MAX: Final = 512
_DETAILS_MAX: Final = 64
_LISTS_MAX: Final = 2  # lists within each other; deeper ones are told as text
_MARK: Final = b',"hash":"'
_END: Final = b'"}\n'
_SUFFIX_BYTES: Final = len(_MARK) + 64 + len(_END)
BEGIN: Final = "audit.begin"
REMOVED: Final = "audit.retention"
LOST: Final = "audit.lost"


class Entry(NamedTuple):
    """Content of a line.  ``outcome`` is allowed, denied or failed; ``code`` is an error's, 0 without one."""

    time_us: int
    operation: str
    outcome: str
    principal: str = ""
    how: str = ""
    source: str = ""
    resource: str = ""
    code: int = 0
    request_id: str = ""
    details: Mapping[str, Any] = {}


class Place(NamedTuple):
    """A place in a chain: number and hash of its last line."""

    number: int
    hash: str


START: Final = Place(0, ZERO)


class Line(NamedTuple):
    """A line that was read: its fields, its own place, and the hash of the line before."""

    fields: dict[str, Any]
    place: Place
    prev: str


def encode(entry: Entry, after: Place) -> tuple[bytes, Place]:
    """The line that follows ``after``, and its place."""
    number = after.number + 1
    fields = {
        "time": _instant(entry.time_us),
        "seq": number,
        "principal": _short(entry.principal),
        "how": entry.how,
        "source": _short(entry.source),
        "operation": _short(entry.operation),
        "resource": _short(entry.resource),
        "outcome": entry.outcome,
        "code": entry.code,
        "request_id": _short(entry.request_id),
        "details": {
            _short(name): _bounded(value) for name, value in list(entry.details.items())[:_DETAILS_MAX]
        },
        "prev": after.hash,
    }
    content = json.dumps(fields, separators=(",", ":")).encode("ascii")
    if len(content) > LINE_BYTES_MAX - _SUFFIX_BYTES:
        fields["details"] = {"left_out": len(content)}
        content = json.dumps(fields, separators=(",", ":")).encode("ascii")
    body = content[:-1]  # the closing brace comes behind the hash
    digest = hashlib.sha256(body).hexdigest()
    return body + _MARK + digest.encode("ascii") + _END, Place(number, digest)


def decode(raw: bytes) -> Line:
    """Read a line that ends with its newline; ValueError says what is wrong with it."""
    body, suffix = raw[:-_SUFFIX_BYTES], raw[-_SUFFIX_BYTES:]
    if not suffix.startswith(_MARK) or not suffix.endswith(_END) or not body:
        raise ValueError("it does not end with a hash")
    digest = hashlib.sha256(body).hexdigest()
    if suffix[len(_MARK) : -len(_END)] != digest.encode("ascii"):
        raise ValueError("its hash does not fit: a byte was changed")
    try:
        fields = json.loads(body + b"}")
        return Line(fields, Place(int(fields["seq"]), digest), str(fields["prev"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("it is no line of an audit file, though its hash fits") from None


def follows(line: Line, after: Place) -> str:
    """Why ``line`` is not the one behind ``after``; "" if it is."""
    if line.place.number != after.number + 1:
        return f"line {after.number + 1} of the chain is missing here; this is line {line.place.number}"
    if line.prev != after.hash:
        return f"line {line.place.number} follows another line than the one before it"
    return ""


def _instant(microseconds: int) -> str:
    whole, rest = divmod(microseconds, 1_000_000)
    return f"{datetime.fromtimestamp(whole, UTC):%Y-%m-%dT%H:%M:%S}.{rest:06d}Z"


def _short(text: str) -> str:
    return text if len(text) <= TEXT_CHARACTERS_MAX else text[:TEXT_CHARACTERS_MAX] + "..."


def _bounded(value: Any, deep: int = _LISTS_MAX) -> Any:
    if isinstance(value, list | tuple) and deep:
        return [_bounded(one, deep - 1) for one in value[:_DETAILS_MAX]]
    return value if isinstance(value, int | float | bool) or value is None else text_of(value)


def text_of(value: Any) -> str:
    """A short text of what a peer sent, however deep its lists lie in each other."""
    try:
        return _short(value if isinstance(value, str) else str(value))
    except RecursionError:
        return "..."
