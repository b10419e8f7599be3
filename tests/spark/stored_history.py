"""Sealed history for the tests of jobs, without a broker: a log's directories, and the same as objects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from danube.core.batch.columns import encode
from danube.core.batch.format import read_header, stamp
from danube.core.metadata.commands import Command, CreateTopic
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import TopicPolicy
from danube.wal.log.log import Log, LogOptions
from danube.wal.segments.local_holes import holes_in
from danube.wal.segments.segment import SUMMARY_BYTES, LogIdentity, read_summary
from danube.wal.stores.directory import LocalStore
from danube.wal.stores.objects import ObjectStore
from danube.wal.tier.keys import manifest_key, metadata_key, parse_partition, segment_key
from danube.wal.tier.manifest import EntryFlag, Manifest, entry_of
from danube.wal.tier.uploader import adding

START_US = 1_700_000_000_000_000
STORE_JSON = b'{"format": 1, "store_id": "0b3ff1e6-7d0c-4b44-9a0a-2f6f3a7b7a11", "created_us": 1}\n'


def write_history(
    data: Path, identity: LogIdentity, *, segments: int = 4, batches: int = 5, records: int = 20, **more: Any
) -> int:
    """Sealed segments of one partition; the number of records."""
    directory = data / "partitions" / identity.directory_name
    directory.mkdir(parents=True)
    log = Log.open(directory, identity, 1, LogOptions())
    for _ in range(segments):
        for _ in range(batches):
            append(log, records, **more)
        job = log.roll(b"snapshot")
        assert job is not None
        job.run(set())
        log.sealed(job)
    log.abandon()
    return segments * batches * records


def append(log: Log, records: int, **more: Any) -> None:
    start = log.log_end
    values: dict[str, Any] = {
        "payloads": [b"payload %06d" % number for number in range(start, start + records)],
        "keys": [b"k%d" % (number % 7) for number in range(start, start + records)],
        "publish_time_us": START_US + start,
        "producer_name": "p",
    }
    made = {name: value(start, records) if callable(value) else value for name, value in more.items()}
    batch = bytearray(encode(**(values | made)).to_bytes())
    stamp(batch, start, log.epoch, START_US + start * 1_000)
    log.append(bytes(batch), read_header(batch))
    log.write()


def metadata_of(*commands: Command) -> Metadata:
    """The machine after these commands."""
    metadata = Metadata()
    for number, command in enumerate(commands, 1):
        metadata.apply(number, command)
    return metadata


def put_history(
    store: ObjectStore, data: Path, metadata: Metadata | None = None, topic: str = "/default/stored"
) -> None:
    """Everything that is sealed in a data directory, with manifests and metadata."""
    store.put("store.json", STORE_JSON)
    if metadata is not None:
        store.put(metadata_key(metadata.version), metadata.snapshot())
    for directory in sorted((data / "partitions").iterdir()):
        identity = parse_partition(directory.name)
        assert identity is not None
        put_partition(store, identity, directory, topic)


def put_partition(store: ObjectStore, identity: LogIdentity, directory: Path, topic: str) -> Manifest:
    """The sealed files that the store's manifest does not name yet; the manifest that does."""
    manifest = Manifest.empty(topic, identity, 1)
    for info in store.list(f"partitions/{directory.name}/manifest-"):
        manifest = Manifest.decode(store.get(info.key))
    added = []
    for path in sorted(directory.glob("*.seg")):
        data = path.read_bytes()
        summary = read_summary(data[-SUMMARY_BYTES:], len(data))
        if summary is None or summary.end_offset <= manifest.uploaded_end:
            continue
        flags = EntryFlag.COMPACTED if summary.compacted else 0
        entry = entry_of(summary, len(data), START_US, flags=int(flags))
        store.put(segment_key(identity, entry), data)
        added.append(entry)
    if added:
        epoch = max(manifest.epoch, *(entry.epoch for entry in added))
        after = adding(added, holes_in(directory))(replace(manifest, epoch=epoch))
        assert after is not None
        manifest = after
        store.put(manifest_key(identity, manifest.epoch, manifest.generation), manifest.encode())
    return manifest


def stored_topic(folder: Path, topic: str, segments: int = 4) -> Path:
    """A store below ``folder`` with one topic of one partition, 100 records in each segment."""
    root = folder / "store"
    root.mkdir()
    write_history(folder / "data", LogIdentity(1, 0), segments=segments)
    created = CreateTopic(topic=topic, policy=TopicPolicy(), created_us=1)
    put_history(LocalStore(root), folder / "data", metadata_of(created), topic)
    return root
