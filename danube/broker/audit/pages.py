"""Audit lines in pages, for administrators that ask over the network.

A page reads a bounded part of the files, in a thread.  Lines of all workers of a host come by time, as in
:func:`danube.broker.audit.trail.trail`; ``after`` of an answer names the place in each worker's chain.
"""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from danube.broker.audit.trail import AuditFile, TrailReader, list_files, size_of
from danube.errors import InvalidArgument, LimitExceeded
from danube.limits import PAGE_BYTES, PAGE_ENTRIES_MAX

if TYPE_CHECKING:
    from danube.core.security.arguments import AuditLines

NEWEST_BYTES: Final = 256 * 1024  # of each worker's chain
READ_BYTES: Final = 8 * 1024 * 1024  # a page ends there, also where no line fits
_PLACE: Final = re.compile(r"(\d{1,6})-(\d{1,12})-(\d{1,15})\Z")
_EXACT: Final = ("principal", "operation", "resource", "outcome")


def page(directory: Path, asked: AuditLines) -> list[Any] | dict[str, Any]:
    """The lines that fit, at most ``limit``; ``newest`` of them ignores ``after``.

    Raises InvalidArgument for an ``after`` that no answer had, LimitExceeded if there is no ``limit`` and the
    lines do not fit an answer, and StorageFailed if a file cannot be read.
    """
    limit = min(asked.limit or PAGE_ENTRIES_MAX, PAGE_ENTRIES_MAX)
    reader = TrailReader(directory, _of_text(asked.after))
    if asked.newest:
        lines, after = _newest(directory, asked, limit), None
    else:
        lines, after = _forward(reader, asked, limit)
    if asked.limit:
        return {"entries": lines, "after": after}
    if after is not None:
        raise LimitExceeded(
            f"there are more than {len(lines)} audit lines, too many for one answer",
            hint="ask for pages: limit and after",
        )
    return lines


def _forward(reader: TrailReader, asked: AuditLines, limit: int) -> tuple[list[dict[str, Any]], str | None]:
    lines: list[dict[str, Any]] = []
    size, begun = 0, -1  # a first part of each chain is read before the first line comes
    for fields in reader.lines():
        begun = reader.read_bytes if begun < 0 else begun
        if _fits(fields, asked):
            lines.append(fields)
            size += len(str(fields))
        if len(lines) == limit or size >= PAGE_BYTES or reader.read_bytes - begun >= READ_BYTES:
            return lines, _to_text(reader.places)
    return lines, None


def _newest(directory: Path, asked: AuditLines, limit: int) -> list[dict[str, Any]]:
    """The last lines that fit, of the last part of each chain."""
    chains: dict[int, list[AuditFile]] = {}
    for file in list_files(directory):
        chains.setdefault(file.worker, []).append(file)
    places = {}
    for worker, chain in chains.items():
        last = next((one for one in reversed(chain) if size_of(one.path) >= NEWEST_BYTES), chain[0])
        places[worker] = (last.number, max(0, size_of(last.path) - NEWEST_BYTES))
    return list(deque((one for one in TrailReader(directory, places).lines() if _fits(one, asked)), limit))


def _fits(fields: dict[str, Any], asked: AuditLines) -> bool:
    if asked.until and fields["time"] >= asked.until:
        return False
    exact = all(not (value := getattr(asked, name)) or fields.get(name) == value for name in _EXACT)
    return exact and fields["time"] >= asked.since and str(fields.get("resource")).startswith(asked.prefix)


def _to_text(places: dict[int, tuple[int, int]]) -> str:
    return ",".join(f"{worker}-{number}-{at}" for worker, (number, at) in sorted(places.items()))


def _of_text(text: str) -> dict[int, tuple[int, int]]:
    found = {}
    for one in text.split(",") if text else ():
        if (match := _PLACE.match(one)) is None:
            raise InvalidArgument(
                f"after {text[:80]!r} is no place in audit files", hint="give what the page before answered"
            )
        found[int(match[1])] = (int(match[2]), int(match[3]))
    return found
