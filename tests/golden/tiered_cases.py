"""The manifests that the golden vectors pin, and what a reader must see in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from danube.wal.segments.holes import Hole, HoleKind
from danube.wal.segments.segment import NO_HASH, LogIdentity
from danube.wal.tier.keys import manifest_key, segment_key
from danube.wal.tier.manifest import EntryFlag, Manifest, SegmentEntry

FOLDER = Path(__file__).resolve().parent / "tiered"
TIME_US = 1_700_000_000_000_000
IDENTITY = LogIdentity(0xFEDC_BA98_7654_3210, 7)


def hash_number(number: int) -> bytes:
    """A hash that ends in a zero byte, which must not be lost."""
    return bytes([number]) * 15 + b"\0"


def entry(base_offset: int, end_offset: int, number: int, **changed: Any) -> SegmentEntry:
    """A plausible entry; its hashes are made of ``number``."""
    values: dict[str, Any] = {
        "base_offset": base_offset,
        "end_offset": end_offset,
        "record_count": end_offset - base_offset,
        "batch_count": 1,
        "size_bytes": 4096 + number,
        "data_end": 2048,
        "first_append_us": TIME_US + base_offset,
        "last_append_us": TIME_US + end_offset - 1,
        "uploaded_us": TIME_US + 1_000_000,
        "epoch": 3,
        "flags": 0,
        "content_hash": hash_number(number),
        "previous_hash": hash_number(number - 1) if number > 1 else NO_HASH,
        "chain_hash": hash_number(number),
    }
    return SegmentEntry(**(values | changed))


def _cases() -> dict[str, Manifest]:
    empty = Manifest.empty("/default/orders", IDENTITY, 3)
    three = empty.with_added(entry(0, 10, 1), entry(10, 1000, 2), entry(1000, 2**40, 3))
    lossy = three.with_added(
        entry(2**40 + 5, 2**40 + 6, 4, flags=EntryFlag.HOLE_BEFORE, previous_hash=NO_HASH)
    )
    merged = three.with_replaced(
        0, 1, entry(0, 1000, 9, flags=EntryFlag.MERGED, previous_hash=NO_HASH, chain_hash=hash_number(2))
    )
    compacted = merged.with_replaced(
        0, 0,
        entry(0, 1000, 8, flags=EntryFlag.MERGED | EntryFlag.COMPACTED, previous_hash=NO_HASH,
              record_count=17, batch_count=2, chain_hash=hash_number(2)),
    )  # fmt: skip
    waiting = three.with_holes([Hole(2**40, 2**40 + 2**25, 2**64 - 1, 2, HoleKind.OPEN, TIME_US)])
    settled = waiting.with_holes(
        [
            Hole(2**40, 2**40 + 4, 2**64 - 1, 2, HoleKind.GIVEN_UP, TIME_US, TIME_US + 5),
            Hole(2**40 + 9, 2**40 + 2**25, 2**64 - 1, 2, HoleKind.UNUSED, TIME_US, TIME_US + 7),
            Hole(2**40 + 2**25 + 1, 2**41, 1, 3, HoleKind.OPEN, -1),
        ],
        [entry(2**40 + 4, 2**40 + 9, 4), entry(2**40 + 2**25, 2**40 + 2**25 + 1, 5, previous_hash=NO_HASH)],
    )
    return {
        "hole-open": waiting,
        "hole-alone": Manifest.empty("/default/orders", IDENTITY, 3, 7).with_holes([Hole(7, 9, 0, 3)]),
        "holes-settled": settled,
        "holes-trimmed": settled.trimmed(2**40 + 2**24),
        "empty": empty,
        "three": three,
        "hole": lossy,
        "merged": merged,
        "compacted": compacted,
        "trimmed": lossy.trimmed(2**40 + 1),
        "taken-over": compacted.trimmed(500).taken_over(4_294_967_295),
        "name": Manifest.empty("/default/größe", IDENTITY, 1, 77),
    }


def vectors() -> dict[str, bytes]:
    return {name: manifest.encode() for name, manifest in _cases().items()}


def describe(data: bytes) -> dict[str, Any]:
    """Everything that a reader sees, as JSON; hashes are in hexadecimal."""
    manifest = Manifest.decode(data)
    entries = [manifest.entry(index) for index in range(len(manifest))]
    return {
        "topic": manifest.topic,
        "topic_id": f"{manifest.topic_id:016x}",
        "partition": manifest.partition,
        "epoch": manifest.epoch,
        "generation": manifest.generation,
        "start_offset": manifest.start_offset,
        "uploaded_end": manifest.uploaded_end,
        "key": manifest_key(manifest.identity, manifest.epoch, manifest.generation),
        "entries": [
            {
                name: value.hex() if isinstance(value, bytes) else value
                for name, value in one._asdict().items()
            }
            | {"key": segment_key(manifest.identity, one)}
            for one in entries
        ],
    } | ({"holes": [hole.described() for hole in manifest.all_holes()]} if len(manifest.holes) else {})
