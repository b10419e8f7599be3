"""The independent reader of manifests and of object names: ``docs/formats/manifest.md`` and nothing else."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from danube.core.batch.checksum import crc32c
from danube.limits import MIB
from danube.wal.stores.objects import ObjectStore
from danube.wal.verify.bytes import Content, Damage, FindingKind, Problem, outside
from danube.wal.verify.state import Identity

MANIFEST_MAGIC: Final = b"DANUBMAN"
HOLE_BEFORE: Final = 1
COMPACTED: Final = 2
MERGED: Final = 4
_HEADER: Final = struct.Struct("<8sHHIQQQIIHHIHHI")
_ENTRY: Final = struct.Struct("<QQQQQQqqqII16s16s16s")
_HOLE: Final = struct.Struct("<QQQIIqq")
_HOLE_WORDS: Final = ("records may come back", "no record was ever there", "given up")
_FLAGS_KNOWN: Final = HOLE_BEFORE | COMPACTED | MERGED
_OFFSET_MAX: Final = 2**63 - 1
_HOLES_MAX: Final = 65_536
_TRAILER: Final = struct.Struct("<II")
_PARTITION: Final = re.compile(r"partitions/([0-9a-f]{16})-(\d{1,10})/(.+)\Z")
_SEGMENT: Final = re.compile(r"(\d{20})-(\d{20})-([0-9a-f]{16})\.seg\Z")
_NUMBERED: Final = re.compile(r"(manifest|cursors)-(\d{10})-(\d{10})\Z")
_OWNER: Final = re.compile(r"owner-(\d{10})\Z")
_RETURNED: Final = re.compile(r"returned-(\d{20})-(\d{10})\Z")
_METADATA: Final = re.compile(r"metadata/(\d{20})\Z")


class Name(NamedTuple):
    """Parts of a key; ``kind``: store, metadata, segment, manifest, cursors, owner, returned or unknown."""

    kind: str
    identity: Identity = (-1, -1)
    numbers: tuple[int, int] = (0, 0)  # base and end offset, or epoch and generation; a version


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


class NamedHole(NamedTuple):
    """Offsets that no object holds, and why."""

    start: int
    end: int
    broker_id: int
    epoch: int
    kind: int
    since_us: int
    settled_us: int

    @property
    def words(self) -> str:
        why = _HOLE_WORDS[self.kind] if self.kind < len(_HOLE_WORDS) else "of an unknown kind"
        whose = f" from broker {self.broker_id}" if self.kind == 0 else ""
        return f"offsets {self.start} to {self.end} are a hole: {why}{whose}"


@dataclass
class ManifestFacts(Content):
    topic: str = ""
    identity: Identity = (-1, -1)
    epoch: int = 0
    generation: int = 0
    start_offset: int = 0
    entries: list[Entry] = field(default_factory=list)
    holes: list[NamedHole] = field(default_factory=list)

    @property
    def originals(self) -> dict[tuple[int, int], bytes]:
        """Content hashes by offsets, of objects that hold what one segment held."""
        entries = [one for one in self.entries if not one.flags & (COMPACTED | MERGED)]
        return {(one.base_offset, one.end_offset): one.content_hash for one in entries}

    @property
    def uploaded_end(self) -> int:
        last = [entry.end_offset for entry in self.entries[-1:]] + [hole.end for hole in self.holes[-1:]]
        return max([self.start_offset, *last])


def name_of(key: str) -> Name:
    """Return the parts of ``key``."""
    if key == "store.json":
        return Name("store")
    if metadata := _METADATA.match(key):
        return Name("metadata", numbers=(int(metadata[1]), 0))
    place = _PARTITION.match(key)
    if place is None:
        return Name("unknown")
    identity = (int(place[1], 16), int(place[2]))
    if segment := _SEGMENT.match(place[3]):
        return Name("segment", identity, (int(segment[1]), int(segment[2])))
    if numbered := _NUMBERED.match(place[3]):
        return Name(numbered[1], identity, (int(numbered[2]), int(numbered[3])))
    if owner := _OWNER.match(place[3]):
        return Name("owner", identity, (int(owner[1]), 0))
    if returned := _RETURNED.match(place[3]):
        return Name("returned", identity, (int(returned[1]), int(returned[2])))
    return Name("unknown", identity)


def key_of(identity: Identity, entry: Entry) -> str:
    name = f"{entry.base_offset:020d}-{entry.end_offset:020d}-{entry.content_hash[:8].hex()}.seg"
    return f"partitions/{identity[0]:016x}-{identity[1]}/{name}"


def read_manifest(data: bytes) -> ManifestFacts:
    """Everything in a manifest's bytes; a damaged one as far as it goes."""
    facts = ManifestFacts()
    if len(data) < _HEADER.size + _TRAILER.size or data[:8] != MANIFEST_MAGIC:
        facts.note(FindingKind.CHECKSUM, "this is not a manifest", 0)
        return facts
    fields = _HEADER.unpack_from(data)
    _, version, header_size, partition, topic_id, start, count, epoch, generation, name_size, entry_size = (
        fields[:11]
    )
    hole_count, hole_size, zero, header_crc = fields[11:]
    if header_crc != crc32c(data[:60]):
        facts.note(FindingKind.CHECKSUM, "the manifest's header is damaged", 0)
    elif version not in (1, 2):
        facts.note(FindingKind.VERSION, f"the manifest has version {version}", 8)
        return facts
    holed = 0 < hole_count <= _HOLES_MAX and hole_size == _HOLE.size
    sound = holed if version == 2 else hole_count == hole_size == 0
    if (header_size, entry_size, zero) != (64, _ENTRY.size, 0) or not sound or start > _OFFSET_MAX:
        facts.note(FindingKind.CHECKSUM, "the header has sizes or a start that cannot be", 10)
        return facts
    facts.identity, facts.epoch, facts.generation = (topic_id, partition), epoch, generation
    facts.start_offset = start
    name = data[64 : 64 + name_size]
    facts.topic = name.decode("utf-8", "backslashreplace")
    begin = 64 + (name_size + 7 & ~7)
    holes_begin = begin + count * _ENTRY.size
    if holes_begin + hole_count * _HOLE.size + _TRAILER.size != len(data):
        what = f"{count} entries and {hole_count} holes do not fit {len(data)} bytes"
        facts.note(FindingKind.TRUNCATED, what, len(data))
    elif _TRAILER.unpack_from(data, len(data) - _TRAILER.size) != (crc32c(data[: -_TRAILER.size]), 0):
        facts.note(FindingKind.CHECKSUM, "the manifest fails its checksum", -1)
    elif facts.topic.encode() != name:
        facts.note(FindingKind.CHECKSUM, "the topic's name is not UTF-8", 64)
    whole = max(0, min(count, (len(data) - begin) // _ENTRY.size))
    body = data[begin : begin + whole * _ENTRY.size]
    facts.entries = [Entry._make(row) for row in _ENTRY.iter_unpack(body)]
    if not facts.problems:
        holes = data[holes_begin : holes_begin + hole_count * _HOLE.size]
        facts.holes = [NamedHole._make(row) for row in _HOLE.iter_unpack(holes)]
        _check_holes(facts, holes_begin)
        _check_entries(facts, begin)
    return facts


def _check_holes(facts: ManifestFacts, begin: int) -> None:
    """Check the holes by themselves and against the entries."""
    spans = sorted([(hole.start, hole.end) for hole in facts.holes] + [
        (entry.base_offset, entry.end_offset) for entry in facts.entries
    ])  # fmt: skip
    overlaps = {after for before, after in pairwise(spans) if after[0] < before[1]}
    overlaps |= {before for before, after in pairwise(spans) if after[0] < before[1]}
    last_end = 0
    for number, hole in enumerate(facts.holes):
        span, position = (hole.start, hole.end), begin + number * _HOLE.size
        empty = not max(hole.start, facts.start_offset) < hole.end <= _OFFSET_MAX
        if empty or hole.kind >= len(_HOLE_WORDS) or hole.epoch > facts.epoch or hole.start < last_end:
            what = f"hole {number} cannot be"
            facts.note(FindingKind.DISAGREEMENT, what, position, *span)
        elif span in overlaps:
            what = f"hole {number} lies where records are"
            facts.note(FindingKind.OVERLAP, what, position, *span)
        last_end = hole.end


def _check_entries(facts: ManifestFacts, begin: int) -> None:
    """Check the entries by themselves and against each other."""
    expected, before = facts.start_offset, None
    for number, entry in enumerate(facts.entries):
        position = begin + number * _ENTRY.size
        span = (entry.base_offset, entry.end_offset)
        stated = bool(entry.flags & HOLE_BEFORE)
        if entry.end_offset <= entry.base_offset or entry.end_offset <= facts.start_offset:
            what = f"entry {number} holds no offset above the start"
            facts.note(FindingKind.DISAGREEMENT, what, position, *span)
        if before is not None and entry.base_offset < before.end_offset:
            what = f"entry {number} overlaps the one before"
            facts.note(FindingKind.OVERLAP, what, position, entry.base_offset, before.end_offset)
        if entry.base_offset > expected:
            what = f"offsets are missing before entry {number}" + (
                "" if stated else ", and it does not say so"
            )
            named = [(hole.start, hole.end) for hole in facts.holes] if stated else []
            gaps = outside(named, expected, entry.base_offset)
            fault = Damage.OFFSETS_MISSING if stated else ""
            facts.problems += [Problem(FindingKind.GAP, what, position, *gap, fault) for gap in gaps]
        elif stated:
            what = f"entry {number} states a hole that is not there"
            facts.note(FindingKind.DISAGREEMENT, what, position, *span)
        if (
            before is not None
            and any(entry.previous_hash)
            and entry.previous_hash not in (before.chain_hash, before.content_hash)
            and not stated
        ):
            what = f"the previous hash of entry {number} is not the hash of the one before"
            facts.note(FindingKind.CHAIN, what, position, *span)
        if entry.flags & ~_FLAGS_KNOWN or entry.end_offset > _OFFSET_MAX:
            what = f"entry {number} has unknown flags, or offsets beyond every log"
            facts.note(FindingKind.DISAGREEMENT, what, position, *span)
        if entry.epoch > facts.epoch:
            what = f"entry {number} is of epoch {entry.epoch}, later than the manifest"
            facts.note(FindingKind.IDENTITY, what, position, *span)
        expected, before = entry.end_offset, entry


class ObjectSource:
    """An object, read in ranges; raises the errors of the store."""

    piece_bytes: Final = 8 * MIB

    def __init__(self, store: ObjectStore, key: str, size: int) -> None:
        self._store = store
        self._key = key
        self.size = size

    def read(self, position: int, size: int) -> bytes:
        end = min(position + size, self.size)
        return self._store.get(self._key, position, end) if end > position else b""

    def read_into(self, target: memoryview, position: int) -> int:
        part = self.read(position, len(target))
        target[: len(part)] = part
        return len(part)
