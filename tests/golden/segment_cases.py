"""The sealed segments that the golden vectors pin: plain, merged and compacted."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec

from danube.wal.segments.key_compaction import LatestKeys, compact
from danube.wal.segments.merge import merge
from danube.wal.segments.segment import log_id_of
from danube.wal.verify.bytes import BytesSource
from danube.wal.verify.segment import read_segment
from tests.unit.merge_samples import Record, sealed_log

LOG_ID = log_id_of("/default/orders", 7, 1_000)
_NOT_PINNED = {"begun_seal", "claimed_end", "first_epoch", "left_out", "log_id", "where"}
FOLDER = Path(__file__).resolve().parent / "segments"
BATCHES: list[list[list[Record]]] = [
    [[(b"a", b"1"), (b"b", b"2"), (None, b"3")], [(b"a", b"4")]],
    [[(b"b", b"5"), (b"c", b"")]],
]


def vectors() -> dict[str, bytes]:
    """Bytes of each segment, made through the log's own path."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        sources = sealed_log(directory / "log", BATCHES)
        made = {"first": sources[0].path.read_bytes(), "second": sources[1].path.read_bytes()}
        merge(sources, directory / "merged")
        latest = LatestKeys()
        latest.add(sources)
        compact(sources, latest, directory / "compacted")
        compact(sources, latest, directory / "emptied", tombstones_before_us=1 << 60)
        named = sealed_log(directory / "named log", BATCHES, LOG_ID)
        made["named"] = named[0].path.read_bytes()
        merge(named, directory / "named-merged")
        made["named-merged"] = (directory / "named-merged").read_bytes()
        return made | {name: (directory / name).read_bytes() for name in ("merged", "compacted", "emptied")}


def describe(data: bytes) -> dict[str, Any]:
    """What the independent reader sees, as JSON; hashes are in hexadecimal."""
    batches: list[list[Any]] = []
    segment = read_segment(
        BytesSource(data), 0 if data[24:32] == bytes(8) else 4, lambda batch, _: batches.append(list(batch))
    )
    values = {
        name: value.hex() if isinstance(value, bytes) else value
        for name, value in msgspec.structs.asdict(segment).items()
        if name not in _NOT_PINNED
    }
    return values | {"batches": batches}
