"""Readers for what users type: durations, sizes, start positions, attributes, subscription types.

Options that several commands have together.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import click

from danube.config.quantities import parse_duration_ms, parse_size_bytes
from danube.host.clock import wall_us

MODES = ("exclusive", "shared", "fail-over", "failover", "key-shared", "key_shared")  # a hyphen is upstream's
COMPATIBILITIES = click.Choice(
    ["none", "backward", "forward", "full", "backward_transitive", "forward_transitive", "full_transitive"],
    case_sensitive=False,
)
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def together(*parameters: Callable[[Any], Any]) -> Decorator:
    """Return one decorator that adds all these options and arguments, in this order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for parameter in reversed(parameters):
            command = parameter(command)
        return command

    return decorate


class Position(NamedTuple):
    """Start position; ``value`` is an offset, or microseconds since 1970, or 0."""

    kind: str  # earliest, latest, offset, time
    value: int = 0


def duration_ms(text: str) -> int:
    """``250ms``, ``5s``, ``1h``; a bare number is refused because its unit is not known."""
    try:
        return parse_duration_ms(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} {error}") from None


def size_bytes(text: str) -> int:
    try:
        return parse_size_bytes(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} {error}") from None


def interval_ms(text: str) -> int:
    """A duration; a bare number is milliseconds, as in upstream's ``--interval 500``."""
    return int(text) if text.isascii() and text.isdigit() else duration_ms(text)


def position(text: str) -> Position:
    """``earliest``, ``latest``, ``now``, ``offset:15``, ``15``, ``2026-11-21T08:00Z`` or ``-1h``."""
    if text in ("earliest", "latest"):
        return Position(text)
    if text == "now":
        return Position("latest")
    number = text.removeprefix("offset:")
    if number.isascii() and number.isdigit() and len(number) <= 18:
        return Position("offset", int(number))
    if text.startswith("-"):
        return Position("time", wall_us() - duration_ms(text[1:]) * 1000)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no position; write earliest, latest, offset:15, 2026-11-21T08:00Z or -1h"
        ) from None
    when = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
    return Position("time", round(when.timestamp() * 1_000_000))


def attributes(text: str) -> dict[str, str]:
    """``k:v,k:v``; the value may hold colons, neither side may hold a comma."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, colon, value = part.partition(":")
        if not colon or not name.strip():
            raise click.BadParameter(f"{part!r} is not name:value")
        if name.strip() in found:
            raise click.BadParameter(f"attribute {name.strip()!r} is given twice")
        found[name.strip()] = value
    return found


def start_argument(where: Position) -> str | int | datetime:
    """Return the start position as the client takes it."""
    if where.kind == "offset":
        return where.value
    if where.kind == "time":
        return datetime.fromtimestamp(where.value / 1_000_000, UTC)
    return where.kind
