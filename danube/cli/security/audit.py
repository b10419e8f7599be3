"""``danube audit``: read and check what a broker of this host wrote about who asked for what."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from danube.cli.broker.config import config_file_option
from danube.cli.terminal.lazy import LazyGroup
from danube.cli.terminal.output import json_line, line, note, output_option, show
from danube.cli.terminal.services import Services

if TYPE_CHECKING:
    from danube.broker.audit.lines import Place
    from danube.broker.audit.trail import TrailReader

EXIT_FINDINGS: Final = 10
COLUMNS: Final = ("time", "principal", "source", "operation", "resource", "outcome", "code")
_HEAD: Final = re.compile(r"(\d{1,6}):(\d{1,15}):([0-9a-f]{64})\Z")
_FOLLOW_S: Final = 0.5


@click.group(cls=LazyGroup)
def audit() -> None:
    """Show, search, verify and export the audit files of this host's broker.  A broker may be running.

    \b
    danube audit tail
    danube audit find --principal user:ann --since 2026-11-28T08:00Z
    danube audit verify
    """


def _place_options(command: Callable[..., Any]) -> Callable[..., Any]:
    command = config_file_option(command)
    return click.option(
        "--data-dir",
        type=click.Path(path_type=Path),
        help="Data directory of the broker; default as for start.",
    )(command)


def _directory(services: Services, data_dir: Path | None, file: Path | None) -> Path:
    from danube.config.loading import load

    return load(file, services.environ, {"data_dir": data_dir}).config.audit_directory


def _lines(directory: Path) -> Iterator[dict[str, Any]]:
    return _reader(directory).lines()


def _reader(directory: Path) -> TrailReader:
    from danube.broker.audit.trail import TrailReader, list_files, verify

    if not list_files(directory):
        verify(directory)  # its error says why there is nothing
    return TrailReader(directory)


@audit.command("tail", short_help="Show the newest lines.")
@click.option("-n", "count", type=click.IntRange(1), default=20, show_default=True, help="How many.")
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines, until Ctrl-C.")
@_place_options
@output_option("table", "json")
@click.pass_obj
def tail(
    services: Services, /, count: int, follow: bool, data_dir: Path | None, file: Path | None, output: str
) -> None:
    """Show the newest lines of all workers by time."""
    reader = _reader(_directory(services, data_dir, file))
    last = list(deque(reader.lines(), count))
    if not follow:
        _print(last, output)
        return
    while True:
        for one in last:
            json_line(one)
        time.sleep(_FOLLOW_S)
        last = list(reader.lines())


def _print(rows: list[dict[str, Any]], output: str) -> None:
    show(rows, output, COLUMNS)


def _instant(context: click.Context, parameter: click.Parameter, text: str | None) -> str:
    if text is None:
        return ""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no instant; write 2026-11-28T08:00Z") from None
    when = when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
    return when.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _filters(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--until", callback=_instant, metavar="TIME", help="Only lines before it."),
        click.option("--since", callback=_instant, metavar="TIME", help="Only lines from then on."),
        click.option("--outcome", type=click.Choice(["allowed", "denied", "failed"])),
        click.option("--resource", help="Only this topic, namespace or name."),
        click.option("--operation", help="Only this operation."),
        click.option("--principal", help="Only this one, as user:ann."),
    ):
        command = option(command)
    return command


def _chosen(
    rows: Iterator[dict[str, Any]], since: str, until: str, **wanted: str | None
) -> Iterator[dict[str, Any]]:
    exact = {name: value for name, value in wanted.items() if value is not None}
    for row in rows:
        if until and row["time"] >= until:
            continue
        if row["time"] >= since and all(row.get(name) == value for name, value in exact.items()):
            yield row


@audit.command("find", short_help="Show the lines of a principal, an operation or a resource.")
@_filters
@_place_options
@output_option("table", "json")
@click.pass_obj
def find(
    services: Services, /, data_dir: Path | None, file: Path | None, output: str, since: str, until: str,
    **wanted: str | None,
) -> None:  # fmt: skip
    """Show all lines that fit, by time; exit code 3 if none does."""
    rows = list(_chosen(_lines(_directory(services, data_dir, file)), since, until, **wanted))
    if not rows:
        from danube.errors import NotFound

        raise NotFound("no line fits", hint="`danube audit tail` shows the newest ones")
    _print(rows, output)


@audit.command("export", short_help="Print lines as JSON, one a line.")
@_filters
@_place_options
@click.pass_obj
def export(
    services: Services, /, data_dir: Path | None, file: Path | None, since: str, until: str,
    **wanted: str | None,
) -> None:  # fmt: skip
    """Print all lines that fit as they are stored, with their hashes and the number of their worker."""
    for row in _chosen(_lines(_directory(services, data_dir, file)), since, until, **wanted):
        json_line(row)


def _read_head(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[int, Place]:
    from danube.broker.audit.lines import Place

    found = {}
    for text in texts:
        match = _HEAD.match(text)
        if match is None:
            raise click.BadParameter(
                f"{text[:100]!r} is no head; write WORKER:SEQ:HASH, as `verify` prints it"
            )
        found[int(match[1])] = Place(int(match[2]), match[3])
    return found


@audit.command("verify", short_help="Find every change: flipped, cut, moved, made up.")
@click.option(
    "--head", "heads", multiple=True, callback=_read_head, metavar="WORKER:SEQ:HASH",
    help="A head that was kept elsewhere, from an earlier run or the broker's log.",
)  # fmt: skip
@_place_options
@output_option()
@click.pass_obj
def verify(
    services: Services, /, heads: dict[int, Place], data_dir: Path | None, file: Path | None, output: str
) -> int:
    """Read every chain from its beginning to its head; exit code 10 if anything was changed.

    The heads lie beside the files.  Whoever may write there can make a whole new chain, so keep the heads
    that this prints on another host, or the lines `audit head` of the broker's log, and give them the next
    time with --head.
    """
    from danube.broker.audit.trail import verify as verify_files

    verified = verify_files(_directory(services, data_dir, file), heads)
    told = [f"{worker}:{place.number}:{place.hash}" for worker, place in verified.heads.items()]
    findings = [{"file": str(one.path), "line": one.line, "what": one.what} for one in verified.findings]
    if output == "json":
        show({"lines": verified.lines, "findings": findings, "notes": verified.notes, "heads": told}, output)
    else:
        for one in findings:
            line(f"{one['file']}:{one['line']}: {one['what']}")
        line(f"{verified.lines} lines, {len(findings)} findings")
        for head in told:
            line(f"head {head}")
    for remark in verified.notes:
        note(remark)
    return EXIT_FINDINGS if findings else 0
