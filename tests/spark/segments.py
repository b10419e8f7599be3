"""Data directories made of sealed segments, as a broker would have written them, at the speed of the disk.

Each segment repeats one encoded batch with new stamps, so a gigabyte takes seconds.  Used by the
benchmarks of Spark and by tests that need more segments than a broker writes in a test's time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from danube.cluster.log.local_log import LocalLog
from danube.core.batch.builder import EncodedBatch, encode
from danube.core.batch.checksum import content_hasher
from danube.core.batch.format import Compression, stamp
from danube.core.metadata.commands import CreateTopic
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import TopicPolicy
from danube.wal.segments.index import SparseIndex
from danube.wal.segments.segment import (
    HEADER_BYTES,
    NO_HASH,
    SUMMARY_BYTES,
    LogIdentity,
    SegmentHeader,
    Summary,
    file_name,
    pack_footer,
    pack_header,
    read_summary,
)
from danube.wal.tier.keys import manifest_key, metadata_key, segment_key
from danube.wal.tier.manifest import Manifest, entry_of

MOMENT_US = 1_790_000_000_000_000
EPOCH = 3
TOPIC = "/default/bench"
STORE_SEGMENT_BYTES = 64 << 20


@dataclass(frozen=True)
class Shape:
    """What the records are like: payload and key sizes in bytes, records in a batch."""

    payload_bytes: int = 1024
    batch_records: int = 500
    key_bytes: int = 8
    compression: Compression = Compression.NONE
    attributes: bool = False
    seed: int = 1


def make_directory(root: Path, topic: str = TOPIC, partitions: int = 0) -> LogIdentity:
    """A data directory with one empty topic; returns the identity of its partition 0."""
    with LocalLog(root / "metadata") as log:
        log.propose(
            CreateTopic(topic=topic, policy=TopicPolicy(), created_us=MOMENT_US, partitions=partitions)
        )
        log.refresh()
        topic_id = log.state.topic(topic).topic_id
    return LogIdentity(topic_id, 0)


def fill_partition(
    root: Path, identity: LogIdentity, shape: Shape, *, segments: int, segment_bytes: int, base: int = 0
) -> int:
    """Write sealed segments one behind the other; returns the offset behind the last record."""
    directory = root / "partitions" / identity.directory_name
    directory.mkdir(parents=True, exist_ok=True)
    previous = NO_HASH
    for number in range(segments):
        content, end, previous = sealed_segment(identity, shape, segment_bytes, base, previous, number)
        (directory / file_name(base)).write_bytes(content)
        base = end
    return base


def make_store(root: Path, shape: Shape, total_bytes: int) -> int:
    """Write a store with the one topic TOPIC; returns the bytes of its segments."""
    identity, metadata = LogIdentity(1, 0), Metadata()
    metadata.apply(1, CreateTopic(topic=TOPIC, policy=TopicPolicy(), created_us=MOMENT_US))
    _put(root / metadata_key(1), metadata.snapshot())
    _put(root / "store.json", b'{"format": 1, "store_id": "bench", "created_us": 1}\n')
    manifest, offset, previous, size = Manifest.empty(TOPIC, identity, EPOCH), 0, NO_HASH, 0
    while size < total_bytes:
        segment_bytes = min(STORE_SEGMENT_BYTES, total_bytes)
        data, offset, previous = sealed_segment(identity, shape, segment_bytes, offset, previous)
        summary = read_summary(data[-SUMMARY_BYTES:], len(data))
        if summary is None:
            raise RuntimeError("the segment has no footer")
        entry = entry_of(summary, len(data), MOMENT_US)
        _put(root / segment_key(identity, entry), data)
        manifest, size = manifest.with_added(entry), size + len(data)
    _put(root / manifest_key(identity, EPOCH, manifest.generation), manifest.encode())
    return size


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def sealed_segment(
    identity: LogIdentity,
    shape: Shape,
    segment_bytes: int,
    base: int,
    previous: bytes = NO_HASH,
    number: int = 0,
) -> tuple[bytes, int, bytes]:
    """The bytes of a sealed segment, the offset behind it, and its content hash."""
    template = bytearray(batch_of(shape, number).to_bytes())
    moment = MOMENT_US + base
    parts = [pack_header(SegmentHeader(identity, EPOCH, base, moment))]
    index, position, offset, batches = SparseIndex(), HEADER_BYTES, base, 0
    while position < segment_bytes:
        stamp(template, offset, EPOCH, MOMENT_US + offset)
        index.add(offset, position, MOMENT_US + offset)
        parts.append(bytes(template))
        position += len(template)
        offset += shape.batch_records
        batches += 1
    hasher = content_hasher()
    for part in parts:
        hasher.update(part)
    last = MOMENT_US + offset - shape.batch_records
    summary = Summary(
        identity, EPOCH, base, offset, offset - base, batches, moment, last, position,
        bytes(hasher.digest()), previous, 0, 0, False, 0, 0,
    )  # fmt: skip
    return b"".join([*parts, pack_footer(summary, index.pack(), None)]), offset, summary.content_hash


def batch_of(shape: Shape, number: int = 0) -> EncodedBatch:
    """One encoded batch of random records; the same shape and number give the same bytes."""
    source = random.Random(shape.seed * 1_000_003 + number)
    count = shape.batch_records
    payloads = [source.randbytes(shape.payload_bytes) for _ in range(count)]
    keys = [source.randbytes(shape.key_bytes) for _ in range(count)] if shape.key_bytes else None
    attributes = [{"number": str(row), "kind": "bench"} for row in range(count)] if shape.attributes else None
    return encode(
        payloads, producer_name="bench", keys=keys, attributes=attributes, publish_time_us=MOMENT_US,
        compression=shape.compression,
    )  # fmt: skip
