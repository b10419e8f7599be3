"""Output of commands: plain objects first, and tables made from those same objects.

Ids with 64 bits are strings in JSON (JavaScript would round them); instants are RFC 3339 UTC.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import click

from danube.cli.terminal.failure import OutputClosed

Command = Callable[..., Any]
WIDTH_MAX = 110


def output_option(*choices: str, default: str = "table") -> Callable[[Command], Command]:
    """``-o/--output``; JSON is the object, the other forms are rendered from it."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice([*choices] or ["table", "json"]),
        default=default,
        show_default=True,
        help="Form of the output.",
    )


def instant(microseconds: int) -> str:
    """RFC 3339 UTC of microseconds since 1970."""
    whole, rest = divmod(microseconds, 1_000_000)
    text = datetime.fromtimestamp(whole, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{rest:06d}Z"


def plain(value: Any, name: str = "") -> Any:
    """``value`` as JSON types: dataclasses and structs become objects, ids strings, instants text."""
    if value is None or (isinstance(value, bool | float | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Enum):
        return getattr(value, "label", value.name.lower())
    if isinstance(value, int):
        return _plain_integer(value, name)
    if isinstance(value, bytes | bytearray | memoryview):
        return text_or_base64(bytes(value))
    if isinstance(value, datetime):
        return instant(round(value.timestamp() * 1_000_000))
    if isinstance(value, Mapping):
        return {str(key): plain(inner, str(key)) for key, inner in value.items()}
    if is_dataclass(value):
        return {one.name: plain(getattr(value, one.name), one.name) for one in fields(value)}
    if hasattr(value, "__struct_fields__"):
        return {one: plain(getattr(value, one), one) for one in value.__struct_fields__}
    if isinstance(value, Iterable):
        return [plain(inner, name) for inner in value]
    return str(value)


def _plain_integer(value: int, name: str) -> Any:
    if name.endswith("_id") or name == "id":
        return str(value)
    if name.endswith(("_time", "_time_us", "_at", "_at_us")) and value > 0:
        return instant(value)
    return value


def text_or_base64(payload: bytes) -> str:
    try:
        return payload.decode("utf-8")
    except UnicodeDecodeError:
        return base64.b64encode(payload).decode("ascii")


def write(data: bytes) -> None:
    """Write bytes to standard output at once; OutputClosed when its reader is gone."""
    try:
        stream = sys.stdout.buffer
        stream.write(data)
        stream.flush()
    except (BrokenPipeError, ValueError):
        raise OutputClosed from None


def line(text: str) -> None:
    write(text.encode("utf-8", "backslashreplace") + b"\n")


def json_line(value: Any) -> None:
    """One JSON document on one line, flushed: a stream of these is NDJSON."""
    line(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def note(text: str) -> None:
    """A remark for people, on standard error."""
    from danube.host.telemetry import escape

    click.echo(escape(text), err=True)


def show(value: Any, output: str, columns: Sequence[str] = ()) -> None:
    """Print an object or a list of them as JSON or as a table; columns that no row has are left out."""
    if output == "json":
        line(json.dumps(value, ensure_ascii=False, indent=2))
    elif isinstance(value, list):
        line(table(value, columns) if value else "(none)")
    else:
        line(facts(value))


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Rows under their column names; numbers stand right."""
    names = [name for name in columns if any(name in row for row in rows)]
    names = names or list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    numeric = [all(isinstance(row.get(name), int | float | None) for row in rows) for name in names]
    widths = [max(len(name), *(len(row[at]) for row in cells)) for at, name in enumerate(names)]
    lines = [[name.upper() for name in names], *cells]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in lines
    )


def facts(value: Mapping[str, Any]) -> str:
    """One object as name and value lines; inner objects and lists of objects are indented below."""
    return "\n".join(_facts(value, ""))


def _facts(value: Mapping[str, Any], indent: str) -> Iterator[str]:
    simple = [name for name, inner in value.items() if not _nested(inner)]
    width = max((len(name) for name in simple), default=0)
    yield from (f"{indent}{name.ljust(width)}  {_cell(value[name])}".rstrip() for name in simple)
    for name, inner in value.items():
        if _nested(inner):
            yield f"{indent}{name}"
            below = _facts if isinstance(inner, Mapping) else _rows
            yield from below(inner, indent + "  ")


def _rows(rows: list[Mapping[str, Any]], indent: str) -> Iterator[str]:
    """Rows as a table, or one below the other where that would be too wide to read."""
    drawn = table(rows).splitlines()
    if max(map(len, drawn)) <= WIDTH_MAX:
        yield from (indent + row for row in drawn)
        return
    for number, row in enumerate(rows):
        yield f"{indent}[{number}]"
        yield from _facts(row, indent + "  ")


def _nested(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) for one in value)


def _cell(value: Any) -> str:
    from danube.host.telemetry import escape

    if value is None or value == "" or value == [] or value == {}:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    if isinstance(value, list):
        return escape(", ".join(str(one) for one in value))
    if isinstance(value, Mapping):
        return escape(json.dumps(value, ensure_ascii=False))
    return escape(str(value))
