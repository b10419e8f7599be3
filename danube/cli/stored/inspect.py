"""``danube inspect``: describes one stored file or object."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from danube.cli.broker.here import Here, pass_here
from danube.cli.stored.places import reading, remote, split_key, store_at, store_options, told
from danube.cli.stored.verify import EXIT_FINDINGS
from danube.cli.terminal.output import facts, instant, line, output_option, show, table

if TYPE_CHECKING:
    from danube.wal.inspection import Inspection

_ROWS_MAX = 50


@click.command(short_help="Describe one stored file or object.")
@click.argument("place", metavar="FILE|URL")
@store_options
@output_option()
@pass_here
def inspect(here: Here, place: str, s3_endpoint: str | None) -> int:
    """Describe a segment, manifest, cursor file, mark or metadata file; a damaged one up to its damage.

    \b
    danube inspect data/partitions/0000000000000001-0/00000000000000000000.seg
    danube inspect s3://bucket/prefix/partitions/0000000000000001-0/manifest-0000000001-0000000007

    Exit code 0: whole; 10: damaged; 12: it cannot be read.
    """
    found = _remote(here, place, s3_endpoint) if remote(place) else _local(place)
    if not found.kind:
        from danube.errors import InvalidArgument

        raise InvalidArgument(
            f"{place} is {found.words}", hint="name a segment, manifest, cursor, mark or metadata file"
        )
    _show(found, here.output)
    return EXIT_FINDINGS if found.problems else 0


def _local(place: str) -> Inspection:
    from danube.errors import NotFound, StorageFailed
    from danube.wal.inspection import inspect_source
    from danube.wal.verify.bytes import FileSource

    try:
        with FileSource(Path(place)) as source:
            return inspect_source(place, source)
    except FileNotFoundError:
        raise NotFound(f"there is no file {place}") from None
    except OSError as error:
        raise StorageFailed(f"{place} cannot be read", why=error.strerror or str(error)) from error


def _remote(here: Here, place: str, endpoint: str | None) -> Inspection:
    from danube.errors import ObjectMissing
    from danube.wal.inspection import inspect_source
    from danube.wal.verify.objects import ObjectSource

    address, key = split_key(place)
    with reading():
        store = store_at(here, address, endpoint)
        info = store.head(key)
        if info is None:
            raise ObjectMissing(f"there is no object {key} in {store.name}")
        return inspect_source(key, ObjectSource(store, key, info.size))


def _show(found: Inspection, output: str) -> None:
    problems = [told(problem) for problem in found.problems]
    plain = {name: _plain(name, value) for name, value in found.facts.items()}
    rows = {
        title: [{name: _plain(name, value) for name, value in row.items()} for row in some]
        for title, some in found.rows.items()
    }
    if output == "json":
        show({"kind": found.kind, "words": found.words, **plain, **rows, "problems": problems}, output)
        return
    line(found.words)
    if plain:
        line(facts(plain))
    for title, some in rows.items():
        if some:
            line(f"{title}")
            line("\n".join(f"  {row}" for row in table(some[:_ROWS_MAX]).splitlines()))
        if len(some) > _ROWS_MAX:
            line(f"  and {len(some) - _ROWS_MAX} more; -o json lists all of them")
    for problem in problems:
        byte = f" at byte {problem['byte']}" if problem["byte"] is not None else ""
        line(f"problem: {problem['kind']}{byte}: {problem['what']}")


def _plain(name: str, value: Any) -> Any:
    """Instants as text; a time that was never set as nothing."""
    if name.endswith("_us") and isinstance(value, int):
        try:
            return instant(value) if value else None
        except (OverflowError, ValueError, OSError):
            return value
    return value
