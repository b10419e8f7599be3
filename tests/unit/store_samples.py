"""A data directory and a store that agree, small enough to be damaged byte by byte."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from danube.core.dispatch.cursor import CursorState
from danube.core.dispatch.grants import Mode
from danube.core.metadata.machine import Metadata
from danube.wal.log.cursors import CursorStore
from danube.wal.segments.segment import LogIdentity, chain_hash_of, read_summary
from danube.wal.stores.objects import ObjectInfo, ObjectStore
from danube.wal.tier.keys import cursors_key, manifest_key, metadata_key, segment_key
from danube.wal.tier.manifest import EntryFlag, Manifest, SegmentEntry, entry_of
from tests.fakes.memory_store import MemoryStore
from tests.unit.wal_samples import IDENTITY, append, open_log, roll, sync

TOPIC = "/default/orders"
NOW_US = 1_800_000_000_000_000


class AgedStore(MemoryStore):
    """A MemoryStore whose objects are as old as a test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.age_us = 0

    def list(self, prefix: str, after: str = "") -> Iterable[ObjectInfo]:  # type: ignore[override]
        for info in super().list(prefix, after):
            yield info._replace(modified_us=NOW_US - self.age_us)


def partition_directory(data_dir: Path, identity: LogIdentity = IDENTITY) -> Path:
    return data_dir / "partitions" / identity.directory_name


def fill_directory(data_dir: Path, segments: int = 3) -> Path:
    """A partition with sealed files, an active one, a mark and cursors; returns its directory."""
    directory = partition_directory(data_dir)
    log = open_log(directory)
    for number in range(segments):
        append(log, b"record %d" % number, bytes(20 + number))
        append(log, b"more")
        log.write()
        roll(log, b"producers %d" % number)
    append(log, b"active")
    log.write()
    sync(log)
    log.abandon()
    cursors = CursorStore(directory, IDENTITY)
    cursors.load()
    cursors.store("readers", CursorState.at(Mode.SHARED, 4).encode())
    cursors.write()
    cursors.close()
    return directory


def entry_for(data: bytes, uploaded_us: int = NOW_US - 5) -> SegmentEntry:
    """The manifest's entry of a sealed segment's bytes."""
    summary = read_summary(data[-144:], len(data))
    assert summary is not None
    body = data[summary.data_end : len(data) - 144]
    flags = EntryFlag.MERGED * summary.chained | EntryFlag.COMPACTED * summary.compacted
    return entry_of(summary, len(data), uploaded_us, flags=flags, chain_hash=chain_hash_of(body, summary))


def put_manifest(store: ObjectStore, manifest: Manifest) -> str:
    key = manifest_key(manifest.identity, manifest.epoch, manifest.generation)
    store.put(key, manifest.encode())
    return key


def fill_store(store: ObjectStore, directory: Path, count: int = 3) -> Manifest:
    """Put the first sealed segments of a directory, one manifest after each, cursors and metadata."""
    manifest = Manifest.empty(TOPIC, IDENTITY, 1)
    for path in sorted(directory.glob("*.seg"))[:count]:
        data = path.read_bytes()
        entry = entry_for(data)
        store.put(segment_key(IDENTITY, entry), data)
        manifest = manifest.with_added(entry)
        put_manifest(store, manifest)
    cursors = CursorStore(directory, IDENTITY)
    cursors.load()
    store.put(cursors_key(IDENTITY, 1, 1), cursors.copy())
    cursors.close()
    store.put(metadata_key(0), Metadata().snapshot())
    store.put("store.json", b'{"format": 1, "store_id": "x", "created_us": 1}')
    return manifest
