"""Description of one stored file in words: its kind, its content, and how far it can be trusted.

It uses the independent readers, so it describes the bytes and not the broker's view of them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from danube.core.batch.columns import BatchView
from danube.core.batch.format import Compression, Flag, read_header
from danube.core.dispatch.cursor import CursorState
from danube.errors import DanubeError
from danube.wal.verify.bytes import BytesSource, FindingKind, Problem, Source
from danube.wal.verify.journal import looks_like_journal, read_member_journal
from danube.wal.verify.objects import MANIFEST_MAGIC, key_of, read_manifest
from danube.wal.verify.segment import Batch, read_segment
from danube.wal.verify.state import (
    CURSORS_MAGIC,
    MARK_MAGIC,
    METADATA_MAGIC,
    PRODUCERS_MAGIC,
    SNAPSHOT_MAGIC,
    read_cursors,
    read_mark,
    read_metadata_log,
    read_producers,
    read_snapshot,
)
from danube.wal.verify.walk import Segment

SMALL_BYTES_MAX: Final = 2 << 30
_PRODUCERS_SHOWN_MAX: Final = 20
_OFFSETS: Final = re.compile(r"(\d{20})(-\d{20}-[0-9a-f]{16})?\.seg")
_NAMED: Final = (
    ("segment", re.compile(r"\d{20}.*\.seg(\.aside\+*|\.new)?\Z")),
    ("manifest", re.compile(r"manifest(-\d+-\d+)?\Z")),
    ("cursors", re.compile(r"cursors-[ab0-9-]+\Z")),
    ("mark", re.compile(r"mark\Z")),
    ("producers", re.compile(r"producers\Z")),
    ("metadata log", re.compile(r"metadata\.(log|new)\Z")),
    ("metadata snapshot", re.compile(r"\d{20}\Z")),
)
_MAGICS: Final = (
    (b"DANUBSEG", "segment"),
    (MANIFEST_MAGIC, "manifest"),
    (CURSORS_MAGIC, "cursors"),
    (MARK_MAGIC, "mark"),
    (PRODUCERS_MAGIC, "producers"),
    (METADATA_MAGIC, "metadata log"),
    (SNAPSHOT_MAGIC, "metadata snapshot"),
)


@dataclass
class Inspection:
    """``kind`` is empty for a file that is not Danube's.  ``facts`` are plain values, the rows lists of them.

    Names that end in ``_us`` are microseconds since 1970 UTC.
    """

    kind: str
    words: str
    facts: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def inspect_source(name: str, source: Source) -> Inspection:
    """Describe ``source``, a file or object called ``name``. Raises the errors of ``source``."""
    head = source.read(0, 8)
    kind = next((kind for magic, kind in _MAGICS if head.startswith(magic)), "")
    kind = kind or next((kind for kind, pattern in _NAMED if pattern.search(name)), "")
    if kind == "segment":
        return _segment(name, source)
    if not kind and source.size > SMALL_BYTES_MAX:
        return Inspection("", "not one of Danube's files")
    data = source.read(0, min(source.size, SMALL_BYTES_MAX))
    if kind == "metadata log" and looks_like_journal(data):
        return _member_journal(data)
    readers = {
        "manifest": _manifest,
        "cursors": _cursors,
        "mark": _mark,
        "producers": _producers,
        "metadata log": _metadata_log,
        "metadata snapshot": _metadata_snapshot,
    }
    return readers[kind](data) if kind else _text(name, data)


def partition_words(topic_id: int, partition: int) -> str:
    return f"partition {partition} of topic {topic_id:016x}"


class _Census:
    """Counts over the batches of a segment."""

    def __init__(self) -> None:
        self.compressions: Counter[str] = Counter()
        self.producers: Counter[str] = Counter()
        self.keyed = 0
        self.selected = 0
        self.payload_bytes = 0
        self.largest = 0

    def __call__(self, batch: Batch, data: memoryview) -> None:
        self.largest = max(self.largest, batch.size)
        self.selected += batch.selected
        try:
            header = read_header(data)
            name = BatchView(data, header).producer_name
        except DanubeError:
            return
        self.compressions[Compression(header.flags & 7).name.lower() if header.flags & 7 < 3 else "?"] += 1
        self.keyed += bool(header.flags & Flag.KEYS)
        self.payload_bytes += header.payload_bytes
        if name in self.producers or len(self.producers) < _PRODUCERS_SHOWN_MAX:
            self.producers[name] += header.record_count


def _segment(name: str, source: Source) -> Inspection:
    named = _OFFSETS.search(name)
    base_offset = int(named[1]) if named else int.from_bytes(source.read(24, 8), "little")
    census = _Census()
    segment = read_segment(source, base_offset, census)
    state = "sealed" if segment.sealed else "active or unsealed"
    state = f"{'compacted, ' * segment.compacted}{'merged, ' * segment.chained}{state}"
    words = (
        f"{state} segment of {partition_words(segment.topic_id, segment.partition)}: "
        f"{segment.record_count} records in {segment.batch_count} batches, "
        f"offsets {segment.base_offset} to {segment.end_offset}"
    )
    if segment.tail is not None:
        words += f"; {segment.tail[1] - segment.tail[0]} bytes at {segment.tail[0]} are not a whole batch"
    facts = _segment_facts(segment) | {
        "payload_bytes": census.payload_bytes,
        "largest_batch_bytes": census.largest,
        "batches_with_keys": census.keyed,
        "selected_batches": census.selected,
        "compressions": ", ".join(f"{kind}: {count}" for kind, count in sorted(census.compressions.items())),
    }
    producers = [{"producer": one, "records": count} for one, count in census.producers.most_common()]
    return Inspection("segment", words, facts, {"producers": producers}, segment.problems)


def _segment_facts(segment: Segment) -> dict[str, Any]:
    facts = _whose((segment.topic_id, segment.partition)) | _named(
        segment,
        "epoch base_offset end_offset record_count:records batch_count:batches size:size_bytes data_end"
        " sealed compacted chained:merged created_us first_append_us last_append_us",
    )
    if segment.sealed:
        facts |= {
            name: getattr(segment, name).hex() for name in ("content_hash", "previous_hash", "chain_hash")
        }
        facts |= _named(segment, "index_count:index_entries snapshot_size:producer_snapshot_bytes")
    return facts


def _named(source: object, names: str) -> dict[str, Any]:
    """Attributes of ``source`` under their names, or under the one that stands behind a colon."""
    pairs = (name.partition(":") for name in names.split())
    return {told or name: getattr(source, name) for name, _, told in pairs}


def _whose(identity: tuple[int, int]) -> dict[str, Any]:
    return {"topic_id": f"{identity[0]:016x}" if identity[0] >= 0 else "", "partition": identity[1]}


def _manifest(data: bytes) -> Inspection:
    manifest = read_manifest(data)
    entries = manifest.entries
    records = sum(entry.record_count for entry in entries)
    size = sum(entry.size_bytes for entry in entries)
    words = (
        f"manifest {manifest.epoch}-{manifest.generation} of {manifest.topic or 'a topic'}, "
        f"{partition_words(*manifest.identity) if manifest.identity[0] >= 0 else 'unknown partition'}: "
        f"{records} records in {len(entries)} objects of {size} bytes, "
        f"offsets {manifest.start_offset} to {manifest.uploaded_end}"
    )
    rows = [
        _named(
            entry,
            "base_offset end_offset record_count:records size_bytes:bytes epoch last_append_us uploaded_us",
        )
        | {
            "flags": " ".join(
                word
                for bit, word in ((1, "hole-before"), (2, "compacted"), (4, "merged"))
                if entry.flags & bit
            ),
            "key": key_of(manifest.identity, entry).rpartition("/")[2],
        }
        for entry in entries
    ]
    facts = {"topic": manifest.topic} | _whose(manifest.identity)
    facts |= _named(manifest, "epoch generation start_offset uploaded_end")
    facts |= {"objects": len(entries), "holes": len(manifest.holes), "records": records, "bytes": size}
    tables = {"entries": rows}
    if manifest.holes:
        tables["holes"] = [{**hole._asdict(), "words": hole.words} for hole in manifest.holes]
    return Inspection("manifest", words, facts, tables, manifest.problems)


def _cursors(data: bytes) -> Inspection:
    cursors = read_cursors(data)
    rows: list[dict[str, Any]] = []
    for name, state in cursors.states.items():
        row: dict[str, Any] = {"subscription": name}
        if state is None:
            rows.append(row | {"state": "removed"})
            continue
        try:
            found = CursorState.decode(state)
        except DanubeError as error:
            rows.append(row | {"state": str(error)})
            cursors.problems.append(Problem(FindingKind.CHECKSUM, f"the state of {name}: {error}", -1))
            continue
        acked = int((found.acked[:, 1] - found.acked[:, 0]).sum())
        rows.append(
            row
            | {"state": "stored", "mode": found.mode.name.lower(), "ack_floor": found.ack_floor}
            | {"acked_above": acked, "ranges_above": len(found.acked), "max_unacked": found.max_unacked}
        )
    live = sum(row["state"] != "removed" for row in rows)
    words = (
        f"cursors of {partition_words(*cursors.identity)}, generation {cursors.generation}: "
        f"{live} subscriptions"
    )
    if not cursors.generation and not cursors.problems:
        words = "cursors, never written"
    facts = (
        _whose(cursors.identity) | _named(cursors, "generation end:used_bytes") | {"size_bytes": len(data)}
    )
    return Inspection("cursors", words, facts, {"subscriptions": rows}, cursors.problems)


def _mark(data: bytes) -> Inspection:
    mark = read_mark(data)
    words = (
        f"sync mark of {partition_words(*mark.identity)}: every record below offset {mark.synced_end} "
        f"was on disk, byte {mark.position} of segment {mark.base_offset}"
    )
    facts = _whose(mark.identity) | _named(mark, "number synced_end base_offset position epoch")
    return Inspection("mark", words if mark.number else "sync mark, never written", facts, {}, mark.problems)


def _producers(data: bytes) -> Inspection:
    producers = read_producers(data)
    words = (
        f"producer checkpoint of {partition_words(*producers.identity)}: knows the batches below offset "
        f"{producers.end_offset}"
    )
    facts = _whose(producers.identity) | _named(producers, "end_offset snapshot_size:snapshot_bytes")
    return Inspection("producers", words, facts, {}, producers.problems)


def _metadata_log(data: bytes) -> Inspection:
    log = read_metadata_log(data)
    words = (
        f"metadata log, file {log.generation} of its name: a snapshot of command {log.snapshot_version}, "
        f"{len(log.entries)} entries, committed up to command {log.version}"
    )
    facts = _named(log, "generation snapshot_version version") | {"entries": len(log.entries)}
    facts |= _named(log, "committed_end unfinished:unfinished_bytes") | {"size_bytes": len(data)}
    found = Inspection("metadata log", words, facts, {}, log.problems)
    _add_topics(found, log.snapshot, [entry.content for entry in log.entries], log.snapshot_version)
    return found


def _member_journal(data: bytes) -> Inspection:
    journal = read_member_journal(data)
    words = (
        f"journal of node {journal.identity[1] or 'unknown'} in cluster {journal.identity[0] or 'unknown'}: "
        f"{journal.steps} steps, entries up to {journal.last_index}"
    )
    facts = {"cluster_id": journal.identity[0], "node_id": journal.identity[1]}
    facts |= _named(journal, "last_index snapshot_index") | {"snapshot_bytes": len(journal.snapshot)}
    facts |= _named(journal, "committed_end unfinished:unfinished_bytes") | {"size_bytes": len(data)}
    return Inspection("journal", words, facts, {}, journal.problems)


def _metadata_snapshot(data: bytes) -> Inspection:
    version, problems = read_snapshot(data)
    if version is None:
        return Inspection("metadata snapshot", "a metadata snapshot, damaged", {}, {}, problems)
    words = f"metadata snapshot of command {version}"
    found = Inspection(
        "metadata snapshot", words, {"version": version, "size_bytes": len(data)}, {}, problems
    )
    _add_topics(found, data, [], version)
    return found


def _add_topics(found: Inspection, snapshot: bytes, entries: list[bytes], index: int) -> None:
    """The topics that the metadata knows, as far as it can be applied."""
    from danube.core.metadata.commands import decode_commands
    from danube.core.metadata.machine import Metadata

    try:
        state = Metadata.restore(snapshot)
        for content in entries:
            for command in decode_commands(content):
                index += 1
                state.apply(index, command)
    except DanubeError as error:
        if not found.problems:
            found.problems.append(Problem(FindingKind.CHECKSUM, f"it cannot be applied: {error}", -1))
        return
    found.facts["topics"] = state.topic_count
    found.facts["namespaces"] = ", ".join(state.namespaces())
    found.rows["topics"] = [
        {"topic": one.topic, "topic_id": f"{one.topic_id:016x}", "partitions": one.partition_count}
        for one in state.topics()
    ]


def _text(name: str, data: bytes) -> Inspection:
    """store.json and damage.json; anything else is not Danube's."""
    base = name.rpartition("/")[2]
    if base not in ("store.json", "damage.json", "danube.json", "store"):
        return Inspection("", "not one of Danube's files")
    try:
        value = json.loads(data)
    except ValueError:
        problem = Problem(FindingKind.CHECKSUM, "it is not JSON", 0)
        return Inspection(base, f"{base}, damaged", {}, {}, [problem])
    if isinstance(value, list):
        rows = [row for row in value if isinstance(row, dict)]
        return Inspection(base, f"{len(rows)} damaged ranges that were found", {}, {"ranges": rows})
    facts = value if isinstance(value, dict) else {"value": value}
    return Inspection(base, f"{base}: a small record of the broker", facts)


def inspect_bytes(name: str, data: bytes) -> Inspection:
    """inspect_source() of bytes at hand."""
    return inspect_source(name, BytesSource(data))
