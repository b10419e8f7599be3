"""Validation of what records hold: payloads, the schemas that they name, and compressed columns."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from danube.core.batch.checksum import content_hash, crc32c
from danube.core.batch.format import HEADER_BYTES, Compression, read_header
from danube.core.metadata.commands import (
    CreateTopic,
    DeleteSchemaVersion,
    DeleteTopic,
    RegisterSchema,
    UpdatePolicy,
)
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import TopicPolicy
from danube.schema.kinds import examine
from danube.schema.model import SchemaType
from danube.spark.jobs.findings import Damage
from danube.spark.jobs.validate import validate
from danube.wal.segments.segment import SUMMARY_BYTES, LogIdentity, pack_footer, read_summary
from danube.wal.stores.directory import LocalStore
from danube.wal.tier.keys import manifest_key, segment_key
from danube.wal.tier.manifest import Manifest, entry_of
from tests.spark.stored_history import put_history, write_history

TOPIC = "/default/orders"
IDENTITY = LogIdentity(1, 0)
NUMBERED = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}


def registered() -> Metadata:
    """One topic, and a subject whose first version was deleted again."""
    metadata = Metadata()
    made = examine(SchemaType.JSON_SCHEMA, json.dumps(NUMBERED).encode())
    other = examine(SchemaType.JSON_SCHEMA, b'{"type": "object"}')
    metadata.apply(1, CreateTopic(topic=TOPIC, policy=TopicPolicy(), created_us=1))
    for number, one in enumerate((other, made), 2):
        metadata.apply(
            number,
            RegisterSchema(
                subject="orders", schema_type="json_schema", definition=one.text, compiled=one.compiled,
                fingerprint=one.fingerprint, created_us=1, compatibility="none",
                after_revision=0 if number == 2 else 2,
            ),
        )  # fmt: skip
    metadata.apply(4, DeleteSchemaVersion(subject="orders", version=1))
    return metadata


def payloads(start: int, count: int) -> list[bytes]:
    return [b'{"id": %d}' % n if n != 33 else b'{"id": "none"}' for n in range(start, start + count)]


def stored(tmp_path: Path, **more: Any) -> Path:
    root = tmp_path / "store"
    root.mkdir()
    write_history(tmp_path / "data", IDENTITY, segments=2, **more)
    put_history(LocalStore(root), tmp_path / "data", registered(), TOPIC)
    return root


def run(root: Path, **options: str) -> Any:
    return validate.run({"storage": f"file://{root}", "processes": "1", **options})


def test_a_payload_that_breaks_its_schema_is_named_by_its_offset(tmp_path: Path) -> None:
    root = stored(tmp_path, payloads=payloads, schema_id=1, schema_version=2)
    assert run(root).findings == [], "payloads are looked at when that is asked for"
    (found,) = run(root, payloads="true").findings
    assert (found.kind, found.offset, found.severity) == (Damage.PAYLOAD_INVALID, 33, "warning")
    assert found.byte >= 64 and "id" in found.detail


@pytest.mark.parametrize(("cleanup", "named"), [("delete", [0, 1]), ("compact", [1]), ("", [1])])
def test_a_tombstone_breaks_no_schema(tmp_path: Path, cleanup: str, named: list[int]) -> None:
    """Offset 0 has a key and offset 1 none; a topic that is gone ("") may have been a compacted one."""
    metadata = registered()
    if cleanup:
        metadata.apply(metadata.version + 1, UpdatePolicy(topic=TOPIC, policy=TopicPolicy(cleanup=cleanup)))
    else:
        metadata.apply(metadata.version + 1, DeleteTopic(topic=TOPIC))
    (tmp_path / "store").mkdir()
    write_history(
        tmp_path / "data", IDENTITY, segments=1, batches=1, records=2, payloads=[b"", b""], keys=[b"k", None],
        schema_id=1,
    )  # fmt: skip
    put_history(LocalStore(tmp_path / "store"), tmp_path / "data", metadata, TOPIC)
    found = run(tmp_path / "store", payloads="true").findings
    assert [one.offset for one in found if one.kind == Damage.PAYLOAD_INVALID] == named


def test_the_latest_version_is_meant_where_none_is_named(tmp_path: Path) -> None:
    root = stored(tmp_path, payloads=payloads, schema_id=1)
    assert [one.offset for one in run(root, payloads="true").findings] == [33]


@pytest.mark.parametrize(
    ("named", "known"), [((9, 1), False), ((1, 7), False), ((1, 1), True), ((1, 2), True)]
)
def test_schemas_that_were_never_registered_are_named(
    tmp_path: Path, named: tuple[int, int], known: bool
) -> None:
    root = stored(tmp_path, schema_id=named[0], schema_version=named[1])
    found = run(root).findings
    assert {one.kind for one in found} == (set() if known else {Damage.SCHEMA_UNKNOWN})
    assert len(found) == (0 if known else 2), "once in each segment"


@pytest.mark.parametrize("compression", [Compression.LZ4, Compression.ZSTD])
def test_compressed_columns_are_inflated_when_payloads_are_checked(
    tmp_path: Path, compression: Compression
) -> None:
    pytest.importorskip("lz4" if compression is Compression.LZ4 else "zstandard")
    root = stored(
        tmp_path, compression=compression, schema_id=1, schema_version=2,
        payloads=lambda start, count: [b'{"id": %d, "t": "%0200d"}' % (start + n, n) for n in range(count)],
    )  # fmt: skip
    assert run(root, payloads="true").findings == []
    _spoil_first_batch(root)
    assert run(root).findings == [], "all checksums hold"
    (found,) = run(root, payloads="true").findings
    assert (found.kind, found.byte, found.offset) == (Damage.BATCH_COMPRESSION, 64, 0)


def _spoil_first_batch(root: Path) -> None:
    """A compressed block that cannot be inflated, under checksums, hashes and a manifest that fit it."""
    folder = root / "partitions" / IDENTITY.directory_name
    manifest_path = sorted(folder.glob("manifest-*"))[-1]
    manifest = Manifest.decode(manifest_path.read_bytes())
    path = root / segment_key(IDENTITY, manifest.entry(0))
    data = bytearray(path.read_bytes())
    summary = read_summary(bytes(data[-SUMMARY_BYTES:]), len(data))
    assert summary is not None
    size = read_header(data, 64).size
    begin = 64 + HEADER_BYTES + 8
    data[begin : begin + 8] = b"nonsense"
    struct.pack_into("<I", data, 64 + 28, crc32c(bytes(data[64 + 36 : 64 + size])))
    struct.pack_into("<I", data, 64 + 32, crc32c(bytes(data[64 : 64 + 32])))
    content = bytes(data[: summary.data_end])
    body = bytes(data[summary.data_end : -SUMMARY_BYTES])
    changed = summary._replace(content_hash=content_hash(content))
    made = content + pack_footer(changed, body[16 : 16 + 24 * summary.entry_count], b"snapshot")
    path.unlink()
    entry = entry_of(changed, len(made), 1)
    (root / segment_key(IDENTITY, entry)).write_bytes(made)
    second = manifest.entry(1)
    other = root / segment_key(IDENTITY, second)
    tail = bytearray(other.read_bytes())
    its = read_summary(bytes(tail[-SUMMARY_BYTES:]), len(tail))
    assert its is not None
    its_body = bytes(tail[its.data_end : -SUMMARY_BYTES])
    linked = its._replace(previous_hash=changed.content_hash)
    other.write_bytes(
        bytes(tail[: its.data_end])
        + pack_footer(linked, its_body[16 : 16 + 24 * its.entry_count], b"snapshot")
    )
    entries = Manifest.empty(TOPIC, IDENTITY, 1).with_added(entry, entry_of(linked, len(tail), 1))
    manifest_path.unlink()
    (root / manifest_key(IDENTITY, 1, 1)).write_bytes(entries.encode())
