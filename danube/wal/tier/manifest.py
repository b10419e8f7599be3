"""The manifest: the objects that hold a partition's records, from its start to its uploaded end.

Little-endian, all parts 8-aligned.

    position      part
          0       header, 64 bytes
         64       topic name, UTF-8, padded to 8
                  entries, 128 bytes each, in the order of their offsets
                  holes, 48 bytes each, in the order of their offsets; see holes
    size - 8      trailer: u32 CRC32C of all bytes before it, u32 zero

    header                                 entry
     0   8  magic       b"DANUBMAN"         0   8  base_offset
     8   2  version     1, or 2 with holes  8   8  end_offset
    10   2  header size 64                 16   8  record_count
    12   4  partition                      24   8  batch_count
    16   8  topic_id                       32   8  size_bytes      of the object
    24   8  start_offset                   40   8  data_end        where its footer begins
    32   8  entry count                    48   8  first_append_us signed
    40   4  epoch                          56   8  last_append_us  signed
    44   4  generation                     64   8  uploaded_us     signed
    48   2  bytes of the topic name        72   4  epoch
    50   2  entry size  128                76   4  flags           see EntryFlag
    52   4  hole count                     80  16  content_hash
    56   2  hole size   48, or 0 without   96  16  previous_hash
    58   2  zero                          112  16  chain_hash
    60   4  CRC32C of bytes 0 .. 60

A manifest without holes is of version 1, and of that alone, byte for byte.

A manifest is written once under a name of its own and never changed; see manifest_keys.  What each
field promises stands in docs/formats/manifest.md.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntFlag
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from danube.core.batch.checksum import crc32c
from danube.core.batch.format import padded
from danube.errors import Damage, InvalidArgument, StorageIncompatible
from danube.wal.segments.holes import HOLE, HOLE_BYTES, NO_HOLES, Hole, flaw_in, hole_of, rows_of
from danube.wal.segments.segment import LogIdentity, Summary

VERSION: Final = 1
VERSION_HOLES: Final = 2
MAGIC: Final = b"DANUBMAN"
HEADER_BYTES: Final = 64
ENTRY_BYTES: Final = 128
TRAILER_BYTES: Final = 8
SEGMENT_ENTRY: Final = np.dtype(
    [
        ("base_offset", "<u8"),
        ("end_offset", "<u8"),
        ("record_count", "<u8"),
        ("batch_count", "<u8"),
        ("size_bytes", "<u8"),
        ("data_end", "<u8"),
        ("first_append_us", "<i8"),
        ("last_append_us", "<i8"),
        ("uploaded_us", "<i8"),
        ("epoch", "<u4"),
        ("flags", "<u4"),
        ("content_hash", "V16"),
        ("previous_hash", "V16"),
        ("chain_hash", "V16"),
    ]
)
_HEADER: Final = struct.Struct("<8sHHIQQQIIHHIHH")
_CRC: Final = struct.Struct("<I")
_TRAILER: Final = struct.Struct("<II")
_OFFSET_MAX: Final = 2**63 - 1
_U32: Final = 0xFFFF_FFFF

if (_HEADER.size, SEGMENT_ENTRY.itemsize) != (HEADER_BYTES - 4, ENTRY_BYTES):
    raise ImportError("the table above is the format")


class EntryFlag(IntFlag):
    """Flags of an entry; any other bit is damage."""

    HOLE_BEFORE = 1  # the records between the entry before (or the start) and this one are lost
    COMPACTED = 2  # records are missing inside on purpose: only the latest of each key is kept
    MERGED = 4  # made from several segments; chain_hash is the content hash of the last of them


_FLAGS_KNOWN: Final = 7


class SegmentEntry(NamedTuple):
    """One row of a manifest as plain values; offsets in records, sizes in bytes, times in µs of 1970."""

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


def entry_of(
    summary: Summary, size_bytes: int, uploaded_us: int, *, flags: int = 0, chain_hash: bytes = b""
) -> SegmentEntry:
    """The entry of a sealed segment; ``chain_hash`` is the content hash unless a merge gave another."""
    return SegmentEntry(
        summary.base_offset, summary.end_offset, summary.record_count, summary.batch_count, size_bytes,
        summary.data_end, summary.first_append_us, summary.last_append_us, uploaded_us, summary.epoch, flags,
        summary.content_hash, summary.previous_hash, chain_hash or summary.content_hash,
    )  # fmt: skip


NO_ENTRIES: Final = np.zeros(0, SEGMENT_ENTRY)


@dataclass(frozen=True, eq=False)
class Manifest:
    """One generation of a partition's manifest.  A change makes a new manifest; none is changed in place.

    ``entries``: read-only array of SEGMENT_ENTRY, ascending and without overlap.  Where one does
    not begin at the end of the one before (the first: above ``start_offset``) it has HOLE_BEFORE.
    ``start_offset``: records below it have expired; the first entry may begin before it.
    ``holes``: what is known of offsets that no entry has; read-only array of HOLE
    (:mod:`danube.wal.segments.holes`).
    """

    topic: str
    topic_id: int
    partition: int
    epoch: int
    generation: int
    start_offset: int
    entries: NDArray[np.void]
    holes: NDArray[np.void] = field(default_factory=lambda: NO_HOLES)

    def __post_init__(self) -> None:
        for name in ("entries", "holes"):
            rows: NDArray[np.void] = getattr(self, name)
            if rows.flags.writeable:
                rows = rows.copy()
                rows.flags.writeable = False
                object.__setattr__(self, name, rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self.encode() == other.encode()

    def __hash__(self) -> int:
        return hash((self.topic_id, self.partition, self.epoch, self.generation))

    @classmethod
    def empty(cls, topic: str, identity: LogIdentity, epoch: int, start_offset: int = 0) -> Manifest:
        """Return the manifest of a partition without uploads: generation 0, which is never stored."""
        return cls(topic, *identity, epoch, 0, start_offset, NO_ENTRIES)

    def __len__(self) -> int:
        return len(self.entries)

    def __bool__(self) -> bool:
        return True  # also without entries: it may have holes, and a start

    @property
    def identity(self) -> LogIdentity:
        return LogIdentity(self.topic_id, self.partition)

    @property
    def name(self) -> str:
        """For people: which one it is of its partition's."""
        return f"{self.epoch}.{self.generation}"

    @property
    def uploaded_end(self) -> int:
        """Offset behind the last uploaded record or hole; the start where nothing is held."""
        return max(self.start_offset, self.named_end)

    @property
    def named_end(self) -> int:
        """Offset behind the last entry or hole; 0 if there is none."""
        entries_end = int(self.entries["end_offset"][-1]) if len(self) else 0
        return max(entries_end, int(self.holes["end"][-1])) if len(self.holes) else entries_end

    @property
    def size_bytes(self) -> int:
        """Bytes of all objects together."""
        return int(self.entries["size_bytes"].sum())

    def entry(self, index: int) -> SegmentEntry:
        values: Any = self.entries[index]
        return SegmentEntry._make(values.item())

    def all_holes(self) -> list[Hole]:
        """In order; few."""
        return [hole_of(row) for row in self.holes]

    @property
    def open_start(self) -> int:
        """Where the first open hole begins; behind everything where there is none."""
        return next((hole.start for hole in self.all_holes() if hole.open), _OFFSET_MAX)

    def hole_at(self, offset: int) -> Hole | None:
        """The hole that ``offset`` lies in."""
        number = int(np.searchsorted(self.holes["end"], np.uint64(max(offset, 0)), "right"))
        found = hole_of(self.holes[number]) if number < len(self.holes) else None
        return found if found is not None and found.start <= offset else None

    def find(self, offset: int) -> int:
        """Index of the entry that holds ``offset``, else of the next one behind it; ``len`` behind all."""
        ends = self.entries["end_offset"]
        return int(np.searchsorted(ends, np.uint64(min(max(offset, 0), _OFFSET_MAX)), "right"))

    def at_time(self, time_us: int) -> int:
        """Index of the first entry with a record appended at or after ``time_us``; ``len`` when none has."""
        newest = np.maximum.accumulate(self.entries["last_append_us"])
        return int(np.searchsorted(newest, np.int64(min(max(time_us, -(2**63)), 2**63 - 1)), "left"))

    def plan(self, offset: int, end_offset: int) -> range:
        """Indexes of the entries that hold records ``offset .. end_offset``."""
        if end_offset <= offset:
            return range(0)
        bases = self.entries["base_offset"]
        stop = int(np.searchsorted(bases, np.uint64(min(max(end_offset, 0), _OFFSET_MAX)), "left"))
        return range(min(self.find(offset), stop), stop)

    def with_added(self, *added: SegmentEntry) -> Manifest:
        """The next generation with segments behind the last one.

        InvalidArgument if one does not follow the one before, unless it says HOLE_BEFORE.
        """
        return self._with(np.concatenate([self.entries, _rows(added)]))

    def with_replaced(self, first: int, last: int, merged: SegmentEntry) -> Manifest:
        """The next generation with ``merged`` in the place of the entries first .. last, both included.

        It must cover the same offsets and, unless it is compacted, hold as many records.
        """
        if not 0 <= first <= last < len(self):
            raise InvalidArgument(f"there are no entries {first} to {last}", why=f"there are {len(self)}")
        replaced = self.entries[first : last + 1]
        covered = (int(replaced["base_offset"][0]), int(replaced["end_offset"][-1]))
        if (merged.base_offset, merged.end_offset) != covered:
            raise InvalidArgument(
                f"a segment of offsets {merged.base_offset} to {merged.end_offset} cannot take the place of "
                f"{covered[0]} to {covered[1]}"
            )
        compacted = bool(merged.flags & EntryFlag.COMPACTED)
        held = int(replaced["record_count"].sum())
        if merged.record_count > held or (merged.record_count < held and not compacted):
            raise InvalidArgument(f"the merged segment holds {merged.record_count} records instead of {held}")
        hole = int(replaced["flags"][0]) & EntryFlag.HOLE_BEFORE
        row = _rows((merged._replace(flags=merged.flags & ~EntryFlag.HOLE_BEFORE | hole),))
        return self._with(np.concatenate([self.entries[:first], row, self.entries[last + 1 :]]))

    def with_holes(self, holes: list[Hole], added: Sequence[SegmentEntry] = ()) -> Manifest:
        """The next generation with other holes, and with segments where holes were.

        InvalidArgument if they do not fit.
        """
        entries = np.concatenate([self.entries, _rows(tuple(added))])
        entries = entries[np.argsort(entries["base_offset"], kind="stable")]
        if len(entries):
            before = np.concatenate([np.array([self.start_offset], np.uint64), entries["end_offset"][:-1]])
            gap = entries["base_offset"] > before
            entries["flags"] = entries["flags"] & ~np.uint32(EntryFlag.HOLE_BEFORE) | gap * np.uint32(1)
        return self._with(entries, holes=rows_of(holes))

    def trimmed(self, start_offset: int) -> Manifest:
        """Return the next generation without entries and holes wholly below ``start_offset``."""
        start_offset = max(start_offset, self.start_offset)
        entries = self.entries[self.find(start_offset) :].copy()
        if len(entries):
            entries["flags"][0] &= ~np.uint32(EntryFlag.HOLE_BEFORE)
            if int(entries["base_offset"][0]) > start_offset:
                entries["flags"][0] |= np.uint32(EntryFlag.HOLE_BEFORE)
        holes = [
            hole._replace(start=max(hole.start, start_offset))
            for hole in self.all_holes()
            if hole.end > start_offset
        ]
        return self._with(entries, start_offset, rows_of(holes))

    def taken_over(self, epoch: int) -> Manifest:
        """The next generation, of a new owner; a lower epoch is refused."""
        if epoch < self.epoch:
            raise InvalidArgument(f"epoch {epoch} cannot follow epoch {self.epoch}")
        return replace(self, epoch=epoch, generation=self.generation + 1)

    def _with(
        self,
        entries: NDArray[np.void],
        start_offset: int | None = None,
        holes: NDArray[np.void] | None = None,
    ) -> Manifest:
        after = replace(
            self, generation=self.generation + 1, entries=entries,
            start_offset=self.start_offset if start_offset is None else start_offset,
            holes=self.holes if holes is None else holes,
        )  # fmt: skip
        flaw = _flaw(after)
        if flaw:
            raise InvalidArgument("the manifest would not be valid", why=flaw)
        return after

    def encode(self) -> bytes:
        """The object's bytes."""
        name = self.topic.encode()
        if len(name) > 0xFFFF or not 0 <= self.generation <= _U32:
            raise InvalidArgument("the manifest cannot be written", why="its name or generation is too large")
        version, size = (VERSION_HOLES, HOLE_BYTES) if len(self.holes) else (VERSION, 0)
        head = _HEADER.pack(
            MAGIC, version, HEADER_BYTES, self.partition, self.topic_id, self.start_offset, len(self),
            self.epoch, self.generation, len(name), ENTRY_BYTES, len(self.holes), size, 0,
        )  # fmt: skip
        body = b"".join(
            (
                head,
                _CRC.pack(crc32c(head)),
                name,
                bytes(padded(len(name)) - len(name)),
                self.entries.tobytes(),
                self.holes.tobytes(),
            )
        )
        return body + _TRAILER.pack(crc32c(body), 0)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Read and check a manifest; Damage where it differs, StorageIncompatible for a newer version."""
        fields = _read_head(data)
        _, _, _, partition, topic_id, start_offset, count, epoch, generation, name_size, *_ = fields
        hole_count = fields[11]
        begin = HEADER_BYTES + padded(name_size)
        holes_begin = begin + count * ENTRY_BYTES
        if holes_begin + hole_count * HOLE_BYTES + TRAILER_BYTES != len(data):
            raise Damage("manifest is cut or too long", size=len(data), entries=count)
        if _TRAILER.unpack_from(data, len(data) - TRAILER_BYTES) != (crc32c(data[:-TRAILER_BYTES]), 0):
            raise Damage("manifest fails its checksum")
        try:
            topic = data[HEADER_BYTES : HEADER_BYTES + name_size].decode()
        except UnicodeDecodeError as error:
            raise Damage("manifest names a topic that is not UTF-8") from error
        entries = np.frombuffer(data, SEGMENT_ENTRY, count, begin)
        holes = np.frombuffer(data, HOLE, hole_count, holes_begin) if hole_count else NO_HOLES
        manifest = cls(topic, topic_id, partition, epoch, generation, start_offset, entries, holes)
        flaw = _flaw(manifest)
        if flaw:
            raise Damage("manifest contradicts itself", why=flaw)
        return manifest


def _read_head(data: bytes) -> tuple[Any, ...]:
    if len(data) < HEADER_BYTES + TRAILER_BYTES or data[:8] != MAGIC:
        raise Damage("manifest header is missing")
    if _CRC.unpack_from(data, HEADER_BYTES - 4)[0] != crc32c(data[: HEADER_BYTES - 4]):
        raise Damage("manifest header fails its checksum")
    fields = _HEADER.unpack_from(data)
    if fields[1] not in (VERSION, VERSION_HOLES):
        raise StorageIncompatible(
            f"manifest has format version {fields[1]}",
            why=f"this program reads versions {VERSION} and {VERSION_HOLES}",
            hint="start the newer Danube that wrote it; nothing was touched",
            version=fields[1],
        )
    if (fields[2], fields[10]) != (HEADER_BYTES, ENTRY_BYTES):
        raise Damage("manifest header has sizes that cannot be")
    holes = fields[11:]
    if holes != (0, 0, 0) if fields[1] == VERSION else holes[1:] != (HOLE_BYTES, 0) or not holes[0]:
        raise Damage("manifest header has sizes that cannot be")
    return fields


def _rows(entries: tuple[SegmentEntry, ...]) -> NDArray[np.void]:
    rows = np.zeros(len(entries), SEGMENT_ENTRY)
    for index, entry in enumerate(entries):
        try:
            rows[index] = entry
        except OverflowError as error:
            raise InvalidArgument("a segment's numbers do not fit a manifest", why=str(error)) from None
    return rows


def _flaw(manifest: Manifest) -> str:
    """Return the first breach of the format in a manifest; empty if there is none."""
    entries = manifest.entries
    if manifest.start_offset > _OFFSET_MAX:
        return "the start offset is too large"
    return _flaw_in_entries(manifest) or flaw_in(
        manifest.holes, entries, manifest.start_offset, manifest.epoch
    )


def _flaw_in_entries(manifest: Manifest) -> str:
    entries = manifest.entries
    if not len(entries):
        return ""
    bases, ends, flags = entries["base_offset"], entries["end_offset"], entries["flags"]
    if ends.max() > _OFFSET_MAX or (bases >= ends).any():
        return "a segment ends where it begins, or before"
    if (bases[1:] < ends[:-1]).any():
        return "segments overlap"
    if int(ends[0]) <= manifest.start_offset:
        return "a segment lies below the start offset"
    if (flags & ~np.uint32(_FLAGS_KNOWN)).any():
        return "a segment has an unknown flag"
    before = np.concatenate([np.array([manifest.start_offset], np.uint64), ends[:-1]])
    if ((bases > before) != ((flags & EntryFlag.HOLE_BEFORE) != 0)).any():
        return "a hole between segments is not stated, or one is stated that is not there"
    if (entries["record_count"] > ends - bases).any() or (
        entries["batch_count"] > entries["record_count"]
    ).any():
        return "a segment holds more than its offsets have room for"
    if (entries["data_end"] < HEADER_BYTES).any() or (entries["size_bytes"] <= entries["data_end"]).any():
        return "a segment's data does not fit its object"
    if entries["epoch"].max() > manifest.epoch:
        return "a segment is of a later epoch than the manifest"
    if ((entries["content_hash"] != entries["chain_hash"]) & ((flags & EntryFlag.MERGED) == 0)).any():
        return "a segment that was not merged has another chain hash"
    return ""
