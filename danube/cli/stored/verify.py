"""``danube verify``: read all stored data and report faults."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from danube.cli.broker.here import Here, pass_here
from danube.cli.stored.places import directory_at, reading, remote, store_at, store_options, told
from danube.cli.terminal.output import line, note, output_option, show

if TYPE_CHECKING:
    from danube.wal.verify.bytes import Finding
    from danube.wal.verify.tree import LocalPartition, Verified

EXIT_FINDINGS = 10
_ROWS_MAX = 1_000
_COUNTED = ("partitions", "segments", "objects", "records", "bytes")


@click.command(short_help="Check stored data: every segment, manifest and object.")
@click.argument("places", metavar="DIR|URL...", nargs=-1, required=True)
@click.option("--topic", help="Only this topic; a name without a namespace is in /default.")
@store_options
@output_option()
@pass_here
def verify(here: Here, places: tuple[str, ...], topic: str | None, s3_endpoint: str | None) -> int:
    """Read all stored data and report every gap, overlap, bad checksum, orphan and missing object.

    \b
    danube verify ./data                           a broker's data directory
    danube verify s3://bucket/prefix               an object store
    danube verify ./data s3://bucket/prefix        both, and that they agree

    No file is changed, and a broker may be running.  Exit code 0: clean; 10: faults were found; 12: the
    storage cannot be read.
    """
    from danube.wal.verify.tree import Verified

    verified = Verified()
    topic = _full_name(topic)
    with reading():
        found = _verify(here, places, topic, s3_endpoint, verified)
    if topic and not found:
        from danube.errors import TopicNotFound

        raise TopicNotFound(f"nothing of topic {topic!r} is stored here")
    report = _report(verified, places)
    if here.output == "json":
        show(report, here.output)
    else:
        _print(report, verified.findings)
    return EXIT_FINDINGS if verified.findings else 0


def _full_name(topic: str | None) -> str | None:
    return topic if topic is None or topic.startswith("/") else f"/default/{topic}"


def _verify(
    here: Here, places: tuple[str, ...], topic: str | None, endpoint: str | None, verified: Verified
) -> bool:
    """Directories first, since stores are compared with them; returns whether anything was there."""
    from danube.host.clock import wall_us
    from danube.wal.verify.store import verify_store

    def progress(name: str) -> None:
        if here.services.shows_progress():
            note(f"reading {name}")

    stores = [place for place in places if remote(place)]
    local: list[LocalPartition] = []
    ids: set[int] = set()
    for place in places:
        if remote(place):
            continue
        directory, store = directory_at(place)
        if store:
            stores.append(store)
        else:
            local += _verify_directory(directory, topic, ids, verified, progress)
    for place in stores:
        verify_store(
            store_at(here, place, endpoint),
            wall_us(),
            verified,
            local,
            lambda identity, name: topic is None or name == topic or identity[0] in ids,
            progress,
        )
    return bool(verified.partitions)


def _verify_directory(
    directory: Path, topic: str | None, ids: set[int], verified: Verified, progress: Any
) -> list[LocalPartition]:
    from danube.errors import TopicNotFound
    from danube.wal.verify.tree import every_partition, topic_id_of, verify_tree

    if topic is None:
        return verify_tree(directory, verified, every_partition, progress)
    try:
        ids.add(topic_id_of(directory, topic))
    except TopicNotFound:
        return []
    return verify_tree(directory, verified, lambda identity: identity[0] in ids, progress)


def _report(verified: Verified, places: tuple[str, ...]) -> dict[str, Any]:
    return {
        "clean": not verified.findings,
        "places": list(places),
        **{name: getattr(verified, name) for name in _COUNTED},
        "findings": [{"kind": one.kind.value, "where": one.where} | told(one) for one in verified.findings],
        "remarks": verified.remarks,
    }


def _print(report: dict[str, Any], findings: list[Finding]) -> None:
    for remark in report["remarks"]:
        note(f"note: {remark}")
    for finding in findings[:_ROWS_MAX]:
        place = finding.where + (f" byte {finding.position}" if finding.position >= 0 else "")
        span = f" (offsets {finding.start} to {finding.end})" if finding.end > finding.start else ""
        line(f"{finding.kind.value}: {place}: {finding.what}{span}")
    if len(findings) > _ROWS_MAX:
        line(f"and {len(findings) - _ROWS_MAX} more; -o json lists all of them")
    counts = ", ".join(f"{report[name]} {name}" for name in _COUNTED)
    line(f"{'clean' if report['clean'] else f'{len(findings)} findings'}: {counts}")
