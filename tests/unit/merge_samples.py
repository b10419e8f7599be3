"""Sealed segments for the tests of merging and compaction, and plain readers of what is made of them."""

from __future__ import annotations

import random
from pathlib import Path

from danube.core.batch.columns import BatchView, encode
from danube.core.batch.format import Compression, read_header, stamp
from danube.wal.log.log import Log
from danube.wal.segments.merge import SealedRange
from danube.wal.segments.segment import NO_LOG, SUMMARY_BYTES, file_name, read_summary
from danube.wal.segments.stored_segment import StoredSegment
from tests.unit.wal_samples import IDENTITY, SMALL, START_US, open_log, roll, sync

Record = tuple[bytes | None, bytes]  # key, payload


def append_keyed(
    log: Log, records: list[Record], compression: Compression = Compression.NONE, time_us: int | None = None
) -> None:
    """Append one batch and write it."""
    keys = [key for key, _ in records]
    payloads = [payload for _, payload in records]
    batch = bytearray(
        encode(payloads, keys=keys, publish_time_us=0, producer_name="p", compression=compression).to_bytes()
    )
    stamp(batch, log.log_end, log.epoch, START_US + log.log_end * 1000 if time_us is None else time_us)
    log.append(bytes(batch), read_header(batch))
    log.write()


def sealed_log(
    directory: Path, segments: list[list[list[Record]]], log_id: bytes = NO_LOG
) -> list[SealedRange]:
    """A log of sealed segments, each a list of batches; every footer has a producer snapshot."""
    log = open_log(directory, options=SMALL._replace(log_id=log_id))
    starts = []
    for number, batches in enumerate(segments):
        starts.append(log.log_end)
        for records in batches:
            append_keyed(log, records)
        roll(log, b"producers %d" % number)
    sync(log)
    log.abandon()
    return [SealedRange(directory / file_name(start)) for start in starts]


def random_segments(seed: int, keys: int = 6) -> list[list[list[Record]]]:
    """Some segments of some batches of some records, with few keys, none at all, and tombstones."""
    chance = random.Random(seed)

    def record() -> Record:
        key = b"key-%d" % chance.randrange(keys) if chance.random() < 0.85 else None
        return key, b"" if chance.random() < 0.1 else chance.randbytes(chance.randrange(1, 40))

    return [
        [[record() for _ in range(chance.randrange(1, 6))] for _ in range(chance.randrange(1, 8))]
        for _ in range(chance.randrange(1, 5))
    ]


def stored_records(data: bytes) -> dict[int, Record]:
    """All records of stored batches by offset."""
    found: dict[int, Record] = {}
    position = 0
    while position < len(data):
        view = BatchView(data, position=position)
        view.check()
        rows = zip(view.offsets.tolist(), view.keys(), view.payloads(), strict=True)
        for offset, key, payload in rows:
            assert offset not in found
            found[offset] = (key, payload)
        position += view.header.size
    return found


def records_of(sources: list[SealedRange]) -> dict[int, Record]:
    """All records of sealed segment files, read from their bytes alone."""
    found: dict[int, Record] = {}
    for source in sources:
        data = source.path.read_bytes()[source.start : source.end]
        data_end = int.from_bytes(data[-80:-72], "little")
        found |= stored_records(data[64:data_end])
    return found


def opened_segment(path: Path) -> StoredSegment:
    """The file as the log knows a sealed segment; it must carry the name of its base offset."""
    data = path.read_bytes()
    summary = read_summary(data[-SUMMARY_BYTES:], len(data))
    assert summary is not None and summary.identity == IDENTITY
    return StoredSegment.of_summary(path.parent, summary, len(data))
