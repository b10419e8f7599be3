"""Staged objects: made of a partition's objects by a job, and the checks before they take their place.

A job compacts objects of a store and stages the results as objects that no manifest names.  Only the owner's
mover writes manifests.  It checks every claim of a job that can be checked:

    objection()       what speaks against one in the manifest as it is; asked again when it is installed
    examine_staged()  reads the object: batches, hashes, footer, and that it follows from its sources

If no record was removed the object must hold its sources' batches byte for byte.  Hashes prove this without
reading the sources: a source's content hash covers its 64 bytes of header and its batches, which follow each
other here.  The list of records that a key compaction removed cannot be checked.  So it is accepted only for
topics with compaction, and for records and tombstones that the policy allows to remove.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

from danube.core.batch.checksum import content_hasher
from danube.errors import Damage, InvalidArgument, ObjectMissing
from danube.limits import GIB
from danube.wal.segments.index import SparseIndex
from danube.wal.segments.merge import Original, SealedRange, opened, runs_of
from danube.wal.segments.segment import (
    HASH_BYTES,
    HEADER_BYTES,
    SUMMARY_BYTES,
    file_name,
    read_summary,
    split_footer,
)
from danube.wal.tier.keys import segment_key
from danube.wal.tier.manifest import EntryFlag, Manifest, SegmentEntry, entry_of
from danube.wal.tier.sealed_files import emptied

if TYPE_CHECKING:
    from danube.wal.tier.uploader import Uploader

SOURCES_MAX: Final = 4_096
OBJECT_BYTES_MAX: Final = 8 * GIB
_TIME_WORD: Final = 2  # of the append time in a batch, in words of 8 bytes
_FLAGS: Final = int(EntryFlag.MERGED | EntryFlag.COMPACTED)

Row = tuple[int, int, int, int, int, int, int, int, int, int, int, bytes, bytes, bytes]


class Staged(msgspec.Struct, frozen=True, array_like=True):
    """``row`` is an entry that may take the place of those with the content hashes ``sources``, in order.

    ``keys``: of each key only the latest record was kept; ``removed`` records are not in it, and among them
    may be tombstones that were appended before ``tombstones_before_us`` (0: none).  Then what lies before it
    must have been compacted with it: ``after`` is the content hash of that, unless nothing lies there.
    """

    row: Row
    sources: list[bytes]
    source_bytes: int = 0
    removed: int = 0
    keys: bool = False
    tombstones_before_us: int = 0
    after: bytes = b""

    @property
    def made(self) -> SegmentEntry:
        return SegmentEntry._make(self.row)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Staged])


def encode_staged(objects: Sequence[Staged]) -> bytes:
    return _encoder.encode(objects)


def decode_staged(data: bytes) -> list[Staged]:
    """InvalidArgument for bytes that are no such list."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise InvalidArgument("the list of staged objects cannot be read", why=str(error)) from None


def staged(
    entry: SegmentEntry, sources: Sequence[SegmentEntry], *, removed: int = 0, keys: bool = False,
    tombstones_before_us: int = 0, after: bytes = b"",
) -> Staged:  # fmt: skip
    """Describe an object made of ``sources``, for the owner that decides about it."""
    hashes = [source.content_hash for source in sources]
    size = sum(source.size_bytes for source in sources)
    return Staged(entry[:14], hashes, size, removed, keys, tombstones_before_us, after)


class Rules(NamedTuple):
    """Rules beside the manifest for staged objects.  Records below ``trim_offset`` are being removed.

    ``tombstone_retention_ms``: None if the topic is not compacted.  ``lag_us``: records that are younger
    are not compacted yet.
    """

    now_us: int
    trim_offset: int = 0
    tombstone_retention_ms: int | None = None
    lag_us: int = 0


def names(manifest: Manifest, one: Staged) -> bool:
    """Whether the manifest has the staged object."""
    made = one.made
    index = manifest.find(made.base_offset)
    return index < len(manifest) and manifest.entry(index).content_hash == made.content_hash


def sources_of(manifest: Manifest, one: Staged) -> list[SegmentEntry]:
    """The entries that it would replace; none where the manifest does not name all of them any more."""
    first = manifest.find(one.made.base_offset)
    stop = min(first + len(one.sources), len(manifest))
    found = [manifest.entry(index) for index in range(first, stop)]
    return found if [entry.content_hash for entry in found] == one.sources else []


def objection(one: Staged, manifest: Manifest, rules: Rules, expected: Container[bytes] = ()) -> str:
    """Return why the object may not replace its sources now; empty if it may.

    ``expected``: content hashes of objects that may be installed before it.
    """
    made = one.made
    if any(len(each) != HASH_BYTES for each in (*one.row[11:], *one.sources)):
        return "a hash in it is none"
    if not 0 < len(one.sources) <= SOURCES_MAX or not 0 < made.size_bytes <= OBJECT_BYTES_MAX:
        return f"it has {len(one.sources)} sources and {made.size_bytes} bytes"
    sources = sources_of(manifest, one)
    if not sources:
        return "its sources are not what the manifest names at its offsets any more"
    if rules.trim_offset >= sources[0].end_offset:
        return "its oldest records have expired"
    if one.keys and made.end_offset > manifest.open_start:
        return "records may come back in a hole before it, which a removed tombstone would have hidden"
    first = manifest.find(made.base_offset)
    before = manifest.entry(first - 1).content_hash if first else b""
    return (
        _unlike(one, sources)
        or _against_policy(one, sources, rules, newest=first + len(sources) == len(manifest))
        or _out_of_order(one, before, expected)
        or _refused(manifest, first, one)
    )


def _unlike(one: Staged, sources: Sequence[SegmentEntry]) -> str:
    """Return the field of the entry that does not follow from its sources; empty if all do."""
    made, first, last = one.made, sources[0], sources[-1]
    held = [source for source in sources if source.batch_count] or [first]
    told = (
        made.base_offset, made.end_offset, made.epoch, made.previous_hash, made.chain_hash,
        made.first_append_us, made.last_append_us, made.record_count + one.removed,
    )  # fmt: skip
    follows = (
        first.base_offset, last.end_offset, last.epoch, first.previous_hash, last.chain_hash,
        held[0].first_append_us, held[-1].last_append_us, sum(source.record_count for source in sources),
    )  # fmt: skip
    if told != follows:
        return "offsets, epoch, times, hashes or the number of records do not follow from its sources"
    if any(before.end_offset != after.base_offset for before, after in pairwise(sources)):
        return "records are missing between its sources, which it would hide"
    if one.removed < 0 or (one.removed and not one.keys):
        return "records are missing in it"
    size = HEADER_BYTES + sum(source.data_end - HEADER_BYTES for source in sources)
    batches = sum(source.batch_count for source in sources)
    if not one.removed and (made.data_end, made.batch_count) != (size, batches):
        return "it has other batches than its sources"
    return ""


def _against_policy(one: Staged, sources: Sequence[SegmentEntry], rules: Rules, *, newest: bool) -> str:
    """Return the rule that the object's flags or its removed records break; empty if none."""
    compacted = [bool(source.flags & EntryFlag.COMPACTED) for source in sources]
    wanted = EntryFlag.MERGED | (EntryFlag.COMPACTED if one.keys or any(compacted) else 0)
    if one.made.flags & _FLAGS != wanted:
        return f"its flags are {one.made.flags}, not {int(wanted)}"
    retention_ms = rules.tombstone_retention_ms
    if not one.keys:
        if any(compacted) and not all(compacted):
            return "it joins compacted records with others, which would count as compacted then"
        return "it removes tombstones and is no key compaction" if one.tombstones_before_us else ""
    if retention_ms is None:
        return "the topic is not to be compacted by key: its policy `cleanup` is delete"
    if newest or sources[-1].last_append_us > rules.now_us - rules.lag_us:
        return "the newest object, and records younger than storage.compact_after, are not compacted yet"
    if one.tombstones_before_us > rules.now_us - retention_ms * 1_000:
        return f"it removes tombstones that are younger than the topic keeps them ({retention_ms} ms)"
    return ""


def _out_of_order(one: Staged, before: bytes, expected: Container[bytes]) -> str:
    """A tombstone that is gone must not uncover an older record of its key that is still there."""
    if not one.tombstones_before_us or not before or one.after == before or one.after in expected:
        return ""
    return "it removes tombstones, and what lies before it was not compacted with it"


def _refused(manifest: Manifest, first: int, one: Staged) -> str:
    try:
        manifest.with_replaced(first, first + len(one.sources) - 1, one.made)
    except InvalidArgument as error:
        return str(error)
    return ""


# -- the object -----------------------------------------------------------------------------------


def examine_staged(uploader: Uploader, one: Staged, sources: Sequence[SegmentEntry], work: Path) -> None:
    """Read the object of a replacement that has no objection; ``sources`` are the entries of its sources.

    ``work``: a directory of this call alone, with room for the object.  Raises ObjectMissing or StoreDamaged
    if it cannot be installed, StorageFailed if the local disk refuses, and errors of the store.
    """
    key = segment_key(uploader.identity, one.made)
    with emptied(work, f"object {key} cannot be installed"):
        _examine(uploader, one, sources, fetched(uploader, one.made, key, work))


def fetched(uploader: Uploader, made: SegmentEntry, key: str, work: Path) -> Path:
    """The object in a file of ``work``; ObjectMissing or Damage where it is not of that size."""
    info = uploader.store.head(key)
    if info is None:
        raise ObjectMissing(f"object {key} is not in the store", hint="stage it again")
    if info.size != made.size_bytes:
        raise Damage(f"it has {info.size} bytes instead of {made.size_bytes}")
    path = work / file_name(made.base_offset)
    uploader.fetch(key, made.size_bytes, path)
    return path


def _examine(uploader: Uploader, one: Staged, sources: Sequence[SegmentEntry], path: Path) -> None:
    made = one.made
    with opened([SealedRange(path)]) as [original]:
        summary = original.summary
        shown = entry_of(
            summary, original.size, made.uploaded_us, flags=made.flags, chain_hash=original.chain_hash
        )
        compacted = bool(made.flags & EntryFlag.COMPACTED)
        if shown != made or (summary.identity, summary.compacted) != (uploader.identity, compacted):
            raise Damage("its footer says other things than its entry")
        if original.snapshot is None and compacted:
            raise Damage("it is compacted and holds no state of the producers")
        if original.snapshot != _snapshot(uploader, sources[-1]):
            raise Damage("its state of the producers is not that of its last source")
        entries = split_footer(_footer(path, original), summary)[0]
        reading = _Reading(None if one.removed else _Proof(uploader, sources))
        reading.read(original)
        if (reading.record_count, reading.batch_count) != (made.record_count, made.batch_count):
            raise Damage("it holds other numbers of records or batches than its footer says")
        if reading.index.pack() != entries:
            raise Damage("its index does not lead to its batches")


def _footer(path: Path, original: Original) -> bytes:
    with path.open("rb") as file:
        file.seek(original.summary.data_end)
        return file.read(original.summary.footer_size - SUMMARY_BYTES)


def _snapshot(uploader: Uploader, source: SegmentEntry) -> bytes | None:
    """The state of the producers in a source's footer."""
    key = segment_key(uploader.identity, source)
    data = uploader.store.get(key, source.data_end, source.size_bytes)
    summary = read_summary(data[-SUMMARY_BYTES:], source.size_bytes)
    if summary is None or summary.content_hash != source.content_hash:
        raise Damage("the footer of its last source differs from the manifest")
    return split_footer(data[:-SUMMARY_BYTES], summary)[1]


class _Reading:
    """One pass over all batches; runs_of() verifies checksums, offsets and the content hash."""

    def __init__(self, proof: _Proof | None) -> None:
        self.index = SparseIndex()
        self.record_count = 0
        self.batch_count = 0
        self._proof = proof

    def read(self, original: Original) -> None:
        for run in runs_of(original):
            positions = run.batches.positions
            times = np.frombuffer(run.data, "<i8", len(run.data) // 8)[positions // 8 + _TIME_WORD]
            for place, offset, time_us in zip(
                positions.tolist(), run.batches.base_offsets.tolist(), times.tolist(), strict=True
            ):
                self.index.add(offset, run.position - original.start + place, time_us)
            self.batch_count += len(positions)
            self.record_count += int(run.stored_counts.sum())
            if self._proof is not None:
                self._proof.take(memoryview(run.data)[: run.batches.stop])
        if self._proof is not None:
            self._proof.end()


class _Proof:
    """Finds the sources in the result made of them, one after the other."""

    def __init__(self, uploader: Uploader, sources: Sequence[SegmentEntry]) -> None:
        self._uploader = uploader
        self._sources = iter(sources)
        self._left = 0
        self._source: SegmentEntry | None = None
        self._hasher = content_hasher()

    def take(self, data: memoryview) -> None:
        """Batches, whole ones, in the order of the object."""
        while len(data):
            if not self._left:
                self._next()
            part = data[: self._left]
            self._hasher.update(part)
            self._left -= len(part)
            data = data[len(part) :]

    def end(self) -> None:
        """All batches were taken."""
        while not self._left and self._next(last=True):
            pass
        if self._left:
            raise Damage("it ends before the batches of its sources do")

    def _next(self, *, last: bool = False) -> bool:
        """Compare the hash of the source that ended and begin the next one; False behind the last."""
        if self._source is not None and self._hasher.digest() != self._source.content_hash:
            raise Damage(f"the batches from offset {self._source.base_offset} on are not its source's")
        self._source = next(self._sources, None)
        if self._source is None:
            if not last:
                raise Damage("it goes on behind the batches of its sources")
            return False
        key = segment_key(self._uploader.identity, self._source)
        self._hasher = content_hasher()
        self._hasher.update(self._uploader.store.get(key, 0, HEADER_BYTES))
        self._left = self._source.data_end - HEADER_BYTES
        return True
