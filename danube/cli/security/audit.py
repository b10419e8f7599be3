"""``danube audit``: read and check what a broker of this host wrote about who asked for what."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from danube.cli.broker.here import Here, config_file_option, data_dir_option, pass_here
from danube.cli.terminal.arguments import together
from danube.cli.terminal.lazy import LazyGroup
from danube.cli.terminal.output import json_line, line, note, output_option, show

if TYPE_CHECKING:
    from danube.broker.audit.heads import KnownHeads
    from danube.broker.audit.lines import Place
    from danube.broker.audit.trail import TrailReader
    from danube.config.loading import BrokerConfig

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
    danube audit heads --broker 2
    """


_place_options = together(
    data_dir_option("Data directory of the broker; default as for start."), config_file_option
)


def _reader(here: Here) -> TrailReader:
    from danube.broker.audit.trail import TrailReader, list_files, verify

    directory = here.config.audit_directory
    if not list_files(directory):
        verify(directory)  # its error says why there is nothing
    return TrailReader(directory)


@audit.command("tail", short_help="Show the newest lines.")
@click.option("-n", "count", type=click.IntRange(1), default=20, show_default=True, help="How many.")
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines, until Ctrl-C.")
@_place_options
@output_option("table", "json")
@pass_here
def tail(here: Here, count: int, follow: bool) -> None:
    """Show the newest lines of all workers by time."""
    reader = _reader(here)
    last = list(deque(reader.lines(), count))
    if not follow:
        show(last, here.output, COLUMNS)
        return
    while True:
        for one in last:
            json_line(one)
        time.sleep(_FOLLOW_S)
        last = list(reader.lines())


def _instant(context: click.Context, parameter: click.Parameter, text: str | None) -> str:
    if text is None:
        return ""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no instant; write 2026-11-28T08:00Z") from None
    when = when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
    return when.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


_filters = together(
    click.option("--principal", help="Only this one, as user:ann."),
    click.option("--operation", help="Only this operation."),
    click.option("--resource", help="Only this topic, namespace or name."),
    click.option("--outcome", type=click.Choice(["allowed", "denied", "failed"])),
    click.option("--since", callback=_instant, metavar="TIME", help="Only lines from then on."),
    click.option("--until", callback=_instant, metavar="TIME", help="Only lines before it."),
)


def _chosen(here: Here, since: str, until: str, **wanted: str | None) -> Iterator[dict[str, Any]]:
    exact = {name: value for name, value in wanted.items() if value is not None}
    for row in _reader(here).lines():
        if until and row["time"] >= until:
            continue
        if row["time"] >= since and all(row.get(name) == value for name, value in exact.items()):
            yield row


@audit.command("find", short_help="Show the lines of a principal, an operation or a resource.")
@_filters
@_place_options
@output_option("table", "json")
@pass_here
def find(here: Here, **wanted: Any) -> None:
    """Show all lines that fit, by time; exit code 3 if none does."""
    rows = list(_chosen(here, **wanted))
    if not rows:
        from danube.errors import NotFound

        raise NotFound("no line fits", hint="`danube audit tail` shows the newest ones")
    show(rows, here.output, COLUMNS)


@audit.command("export", short_help="Print lines as JSON, one a line.")
@_filters
@_place_options
@pass_here
def export(here: Here, **wanted: Any) -> None:
    """Print all lines that fit as they are stored, with their hashes and the number of their worker."""
    for row in _chosen(here, **wanted):
        json_line(row)


def _read_head(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[int, list[Place]]:
    from danube.broker.audit.lines import Place

    found: dict[int, list[Place]] = {}
    for text in texts:
        match = _HEAD.match(text)
        if match is None:
            raise click.BadParameter(
                f"{text[:100]!r} is no head; write WORKER:SEQ:HASH, as `verify` prints it"
            )
        found.setdefault(int(match[1]), []).append(Place(int(match[2]), match[3]))
    return found


def _own_id(data_dir: Path) -> int:
    """The number under which the metadata keeps this host's heads: 0 outside of a cluster."""
    from danube.cluster.log.node_files import NODE_FILE, load_node

    record = load_node(data_dir) if (data_dir / NODE_FILE).exists() else None
    return int(record.node_id) if record is not None and record.cluster_id else 0


def _known(data_dir: Path, broker_id: int) -> dict[int, KnownHeads]:
    """Heads of a broker by worker, from this host's copy of the metadata; a broker may be running."""
    from danube.broker.audit.heads import heads_of
    from danube.broker.processes.directories import METADATA
    from danube.cluster.log.committed import read_committed
    from danube.errors import NotFound, StorageFailed

    path = data_dir / METADATA / "metadata.log"
    try:
        return heads_of(read_committed(path).cluster.keys, broker_id)
    except FileNotFoundError:
        raise NotFound(f"there is no metadata log {path}", hint="give --data-dir") from None
    except OSError as error:
        raise StorageFailed(f"{path} cannot be read", why=error.strerror or str(error)) from None


def _kept(config: BrokerConfig) -> tuple[dict[int, list[Place]], list[str]]:
    """Heads to compare with, by worker, and remarks about what is not compared."""
    from danube.errors import DanubeError

    directory = str(config.audit_directory.resolve())
    try:
        known = _known(config.data_dir, _own_id(config.data_dir))
    except DanubeError as error:
        return {}, [f"not compared with the heads in the metadata: {error}"]
    here = {worker: one for worker, one in known.items() if one.directory == directory}
    remarks = [
        f"the heads of worker {worker} in the metadata are of {one.directory}, and were not compared"
        for worker, one in known.items() if worker not in here
    ]  # fmt: skip
    if not known:
        remarks.append("the metadata knows no heads, so a chain made anew would not be seen")
    return {worker: [head.place for head in one.heads] for worker, one in here.items()}, remarks


@audit.command("verify", short_help="Find every change: flipped, cut, moved, made up.")
@click.option(
    "--head", "heads", multiple=True, callback=_read_head, metavar="WORKER:SEQ:HASH",
    help="A head that was kept elsewhere: from `danube audit heads` of another host, or the broker's log.",
)  # fmt: skip
@_place_options
@output_option()
@pass_here
def verify(here: Here, heads: dict[int, list[Place]]) -> int:
    """Read every chain from its beginning to its head; exit code 10 if anything was changed.

    Who may write beside the files can make a whole new chain.  So the chain is compared with the heads that
    the metadata keeps, as far as this host's copy of it can be read.  Who may change that as well is found by
    the copy of another broker: `danube audit heads --broker ID` there, and --head here.
    """
    from danube.broker.audit.trail import verify as verify_files

    kept, remarks = _kept(here.config)
    verified = verify_files(here.config.audit_directory, heads, kept)
    verified.notes += remarks
    told = [f"{worker}:{place.number}:{place.hash}" for worker, place in verified.heads.items()]
    findings = [{"file": str(one.path), "line": one.line, "what": one.what} for one in verified.findings]
    if here.output == "json":
        show({"lines": verified.lines, "findings": findings, "notes": verified.notes, "heads": told}, "json")
    else:
        for one in findings:
            line(f"{one['file']}:{one['line']}: {one['what']}")
        line(f"{verified.lines} lines, {len(findings)} findings")
        for head in told:
            line(f"head {head}")
    for remark in verified.notes:
        note(remark)
    return EXIT_FINDINGS if findings else 0


@audit.command("heads", short_help="Show the heads of chains that the metadata keeps.")
@click.option("--broker", type=click.IntRange(0), help="Of this broker of the cluster; default: this host's.")
@_place_options
@output_option("table", "json")
@pass_here
def heads(here: Here, broker: int | None) -> None:
    """Show what this host's copy of the metadata knows of the audit of a broker, oldest first.

    Each line of the column `head` can be given to `danube audit verify --head`.
    """
    from danube.errors import NotFound

    known = _known(here.data_dir, _own_id(here.data_dir) if broker is None else broker)
    rows = [
        {
            "time": datetime.fromtimestamp(head.time_us / 1e6, UTC).isoformat(timespec="seconds"),
            "directory": one.directory,
            "head": f"{worker}:{head.number}:{head.place.hash}",
        }
        for worker, one in known.items() for head in one.heads
    ]  # fmt: skip
    if not rows:
        raise NotFound(
            "the metadata knows no heads of that broker",
            hint="they are kept each minute where audit.mode is on; --broker names another broker",
        )
    show(rows, here.output, ("time", "directory", "head"))
