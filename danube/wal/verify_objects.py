"""The independent reader of manifests and of object names: ``docs/formats/manifest.md`` and nothing else."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from danube.core.checksum import crc32c
from danube.wal.objects import ObjectStore
from danube.wal.verify_bytes import FindingKind
from danube.wal.verify_segment import Problem
from danube.wal.verify_state import Identity

MANIFEST_MAGIC: Final = b"DANUBMAN"
HOLE_BEFORE: Final = 1
COMPACTED: Final = 2
MERGED: Final = 4
_HEADER: Final = struct.Struct("<8sHHIQQQIIHHQI")
_ENTRY: Final = struct.Struct("<QQQQQQqqqII16s16s16s")
_TRAILER: Final = struct.Struct("<II")
_PARTITION: Final = re.compile(r"partitions/([0-9a-f]{16})-(\d{1,10})/(.+)\Z")
_SEGMENT: Final = re.compile(r"(\d{20})-(\d{20})-([0-9a-f]{16})\.seg\Z")
_NUMBERED: Final = re.compile(r"(manifest|cursors)-(\d{10})-(\d{10})\Z")
_OWNER: Final = re.compile(r"owner-(\d{10})\Z")
_METADATA: Final = re.compile(r"metadata/(\d{20})\Z")


class Name(NamedTuple):
    """What a key says; ``kind`` is store, metadata, segment, manifest, cursors, owner or unknown."""

    kind: str
    identity: Identity = (-1, -1)
    numbers: tuple[int, int] = (0, 0)  # base and end offset, or epoch and generation; a version
    hash_prefix: str = ""


class Entry(NamedTuple):
    base_offset: int
    end_offset: int
    record_count: int
    batch_count: int
    size_bytes: int
    data_end: int
    first_append_us: int
    last_append_us: int
    uploaded_us: int
    epoch: int
    flags: int
    content_hash: bytes
    previous_hash: bytes
    chain_hash: bytes


@dataclass
class ManifestFacts:
    """What a manifest says, as far as it can be read, and what is wrong with it."""

    topic: str = ""
    identity: Identity = (-1, -1)
    epoch: int = 0
    generation: int = 0
    start_offset: int = 0
    entries: list[Entry] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def uploaded_end(self) -> int:
        return max([self.start_offset, *(entry.end_offset for entry in self.entries[-1:])])


def name_of(key: str) -> Name:
    """What ``key`` is by its name."""
    if key == "store.json":
        return Name("store")
    if metadata := _METADATA.match(key):
        return Name("metadata", numbers=(int(metadata[1]), 0))
    place = _PARTITION.match(key)
    if place is None:
        return Name("unknown")
    identity = (int(place[1], 16), int(place[2]))
    if segment := _SEGMENT.match(place[3]):
        return Name("segment", identity, (int(segment[1]), int(segment[2])), segment[3])
    if numbered := _NUMBERED.match(place[3]):
        return Name(numbered[1], identity, (int(numbered[2]), int(numbered[3])))
    if owner := _OWNER.match(place[3]):
        return Name("owner", identity, (int(owner[1]), 0))
    return Name("unknown", identity)


def key_of(identity: Identity, entry: Entry) -> str:
    name = f"{entry.base_offset:020d}-{entry.end_offset:020d}-{entry.content_hash[:8].hex()}.seg"
    return f"partitions/{identity[0]:016x}-{identity[1]}/{name}"


def read_manifest(data: bytes) -> ManifestFacts:
    """Everything in a manifest's bytes; a damaged one as far as it goes."""
    facts = ManifestFacts()
    if len(data) < _HEADER.size + _TRAILER.size or data[:8] != MANIFEST_MAGIC:
        facts.problems.append(Problem(FindingKind.CHECKSUM, "this is not a manifest", 0))
        return facts
    fields = _HEADER.unpack_from(data)
    _, version, header_size, partition, topic_id, start, count, epoch, generation, name_size, entry_size = (
        fields[:11]
    )
    if fields[12] != crc32c(data[:60]):
        facts.problems.append(Problem(FindingKind.CHECKSUM, "the manifest's header is damaged", 0))
    elif version != 1:
        facts.problems.append(Problem(FindingKind.VERSION, f"the manifest has version {version}", 8))
        return facts
    if (header_size, entry_size) != (64, _ENTRY.size):
        facts.problems.append(Problem(FindingKind.CHECKSUM, "the header has sizes that cannot be", 10))
        return facts
    facts.identity, facts.epoch, facts.generation = (topic_id, partition), epoch, generation
    facts.start_offset = start
    facts.topic = data[64 : 64 + name_size].decode("utf-8", "backslashreplace")
    begin = 64 + (name_size + 7 & ~7)
    if begin + count * _ENTRY.size + _TRAILER.size != len(data):
        what = f"{count} entries do not fit {len(data)} bytes"
        facts.problems.append(Problem(FindingKind.TRUNCATED, what, len(data)))
    elif _TRAILER.unpack_from(data, len(data) - _TRAILER.size) != (crc32c(data[: -_TRAILER.size]), 0):
        facts.problems.append(Problem(FindingKind.CHECKSUM, "the manifest fails its checksum", -1))
    whole = max(0, min(count, (len(data) - begin) // _ENTRY.size))
    body = data[begin : begin + whole * _ENTRY.size]
    facts.entries = [Entry._make(row) for row in _ENTRY.iter_unpack(body)]
    if not facts.problems:
        _check_entries(facts, begin)
    return facts


def _check_entries(facts: ManifestFacts, begin: int) -> None:
    """What the entries say about themselves and each other."""
    expected, before = facts.start_offset, None
    for number, entry in enumerate(facts.entries):
        position = begin + number * _ENTRY.size
        span = (entry.base_offset, entry.end_offset)
        stated = bool(entry.flags & HOLE_BEFORE)
        if entry.end_offset <= entry.base_offset or entry.end_offset <= facts.start_offset:
            what = f"entry {number} holds no offset above the start"
            facts.problems.append(Problem(FindingKind.DISAGREEMENT, what, position, *span))
        if before is not None and entry.base_offset < before.end_offset:
            what = f"entry {number} overlaps the one before"
            facts.problems.append(
                Problem(FindingKind.OVERLAP, what, position, entry.base_offset, before.end_offset)
            )
        if entry.base_offset > expected:
            what = f"offsets are missing before entry {number}" + (
                "" if stated else ", and it does not say so"
            )
            facts.problems.append(Problem(FindingKind.GAP, what, position, expected, entry.base_offset))
        elif stated:
            what = f"entry {number} states a hole that is not there"
            facts.problems.append(Problem(FindingKind.DISAGREEMENT, what, position, *span))
        if (
            before is not None
            and any(entry.previous_hash)
            and entry.previous_hash not in (before.chain_hash, before.content_hash)
            and not stated
        ):
            what = f"the previous hash of entry {number} is not the hash of the one before"
            facts.problems.append(Problem(FindingKind.CHAIN, what, position, *span))
        if entry.epoch > facts.epoch:
            what = f"entry {number} is of epoch {entry.epoch}, later than the manifest"
            facts.problems.append(Problem(FindingKind.IDENTITY, what, position, *span))
        expected, before = entry.end_offset, entry


class ObjectSource:
    """An object, read in ranges; raises what the store raises."""

    def __init__(self, store: ObjectStore, key: str, size: int) -> None:
        self._store = store
        self._key = key
        self.size = size

    def read(self, position: int, size: int) -> bytes:
        end = min(position + size, self.size)
        return self._store.get(self._key, position, end) if end > position else b""
