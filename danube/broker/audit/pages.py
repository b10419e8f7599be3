"""Audit lines in pages, for administrators that ask over the network.

A page reads a bounded part of the files, in a thread.  Lines of all workers of a host come by time, as in
:func:`danube.broker.audit.trail.trail`; ``after`` of an answer names the place in each worker's chain.
"""

from __future__ import annotations

import json
import re
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from danube.broker.audit.trail import AuditFile, list_files, read_part, size_of
from danube.errors import InvalidArgument, LimitExceeded
from danube.limits import PAGE_BYTES, PAGE_ENTRIES_MAX

if TYPE_CHECKING:
    from danube.core.security.arguments import AuditLines

PART_BYTES: Final = 256 * 1024  # read at once of each worker's chain
READ_BYTES: Final = 8 * 1024 * 1024  # a page ends there, also where no line fits
_PLACE: Final = re.compile(r"(\d{1,6})-(\d{1,12})-(\d{1,15})\Z")
_EXACT: Final = ("principal", "operation", "resource", "outcome")
Positions = dict[int, tuple[int, int]]  # by worker: a file's number, and a byte in it


class _Read(NamedTuple):
    """A line that was read: what it is sorted by, its fields, and the place behind it."""

    key: tuple[str, int, int]
    fields: dict[str, Any]
    behind: tuple[int, int]


def page(directory: Path, asked: AuditLines) -> list[Any] | dict[str, Any]:
    """The lines that fit, at most ``limit``; ``newest`` of them ignores ``after``.

    Raises InvalidArgument for an ``after`` that no answer had, LimitExceeded if there is no ``limit`` and the
    lines do not fit an answer, and StorageFailed if a file cannot be read.
    """
    limit = min(asked.limit or PAGE_ENTRIES_MAX, PAGE_ENTRIES_MAX)
    positions = _of_text(asked.after)
    if asked.newest:
        lines, after = _newest(directory, asked, limit), None
    else:
        lines, after = _forward(directory, asked, positions, limit)
    if asked.limit:
        return {"entries": lines, "after": after}
    if after is not None:
        raise LimitExceeded(
            f"there are more than {len(lines)} audit lines, too many for one answer",
            hint="ask for pages: limit and after",
        )
    return lines


def _forward(
    directory: Path, asked: AuditLines, positions: Positions, limit: int
) -> tuple[list[dict[str, Any]], str | None]:
    lines: list[dict[str, Any]] = []
    size = read = 0
    while True:
        ready, part_bytes = _turn(directory, positions)
        if not part_bytes:
            return lines, None
        read += part_bytes
        for one in ready:
            positions[one.key[1]] = one.behind
            if _fits(one.fields, asked):
                lines.append(one.fields)
                size += len(str(one.fields))
                if len(lines) == limit or size >= PAGE_BYTES:
                    return lines, _to_text(positions)
        if read >= READ_BYTES:
            return lines, _to_text(positions)


def _newest(directory: Path, asked: AuditLines, limit: int) -> list[dict[str, Any]]:
    """The last lines that fit, of the last part of each chain."""
    positions: Positions = {}
    own: dict[int, list[AuditFile]] = {}
    for file in list_files(directory):
        own.setdefault(file.worker, []).append(file)
    for worker, chain in own.items():
        last = next((one for one in reversed(chain) if size_of(one.path) >= PART_BYTES), chain[0])
        positions[worker] = (last.number, max(0, size_of(last.path) - PART_BYTES))
    found: deque[dict[str, Any]] = deque(maxlen=limit)
    while True:
        ready, part_bytes = _turn(directory, positions)
        if not part_bytes:
            return list(found)
        for one in ready:
            positions[one.key[1]] = one.behind
            if _fits(one.fields, asked):
                found.append(one.fields)


def _fits(fields: dict[str, Any], asked: AuditLines) -> bool:
    if asked.until and fields["time"] >= asked.until:
        return False
    exact = all(not (value := getattr(asked, name)) or fields.get(name) == value for name in _EXACT)
    return exact and fields["time"] >= asked.since and str(fields.get("resource")).startswith(asked.prefix)


def _turn(directory: Path, positions: Positions) -> tuple[list[_Read], int]:
    """The next lines in order, up to where one chain is not known any further, and how much was read.

    A chain whose part holds no line moves on; nothing read means that all are at their end.
    """
    chains: dict[int, list[AuditFile]] = {}
    for file in list_files(directory):
        chains.setdefault(file.worker, []).append(file)
    found: list[_Read] = []
    bounds, read = [], 0
    for chain in chains.values():
        lines, more, part_bytes = _part(chain, positions)
        read += part_bytes
        found += lines
        if more and lines:
            bounds.append(lines[-1].key)
    bound = min(bounds, default=None)
    return sorted(one for one in found if bound is None or one.key <= bound), read


def _part(chain: list[AuditFile], positions: Positions) -> tuple[list[_Read], bool, int]:
    """Lines of the next part of a chain, whether it may have more, and how many bytes were read."""
    worker, read = chain[0].worker, 0
    number, position = positions.get(worker, (0, 0))
    left = [one for one in chain if one.number >= number]
    for at, file in enumerate(left):
        start = position if file.number == number else 0
        raw = read_part(file.path, start, PART_BYTES)
        whole = raw.rfind(b"\n") + 1
        if not whole and len(raw) == PART_BYTES:
            whole = len(raw)  # no line is that long: verify tells what it is
        if whole:
            read += whole
            lines = _lines(worker, file.number, start, raw[:whole])
            positions.setdefault(worker, (file.number, start))
            if lines:
                last = lines[-1]
                lines[-1] = last._replace(behind=(file.number, start + whole))
                return lines, len(raw) == PART_BYTES or at + 1 < len(left), read
            positions[worker] = (file.number, start + whole)
            return [], True, read
    return [], False, read


def _lines(worker: int, number: int, start: int, raw: bytes) -> list[_Read]:
    found: list[_Read] = []
    behind, latest = start, ""
    for text in raw.splitlines(keepends=True):
        behind += len(text)
        try:
            fields = json.loads(text)
            latest = max(latest, str(fields["time"]))  # a clock that was set back moves no line
            fields = {"worker": worker, **fields, "time": str(fields["time"])}
        except (ValueError, TypeError, KeyError, RecursionError):
            continue  # verify tells about it
        found.append(_Read((latest, worker, behind), fields, (number, behind)))
    return found


def _to_text(positions: Positions) -> str:
    return ",".join(f"{worker}-{number}-{at}" for worker, (number, at) in sorted(positions.items()))


def _of_text(text: str) -> Positions:
    found: Positions = {}
    for one in text.split(",") if text else ():
        if (match := _PLACE.match(one)) is None:
            raise InvalidArgument(
                f"after {text[:80]!r} is no place in audit files", hint="give what the page before answered"
            )
        found[int(match[1])] = (int(match[2]), int(match[3]))
    return found
