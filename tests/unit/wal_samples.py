"""Batches and logs for the tests of danube.wal: small, deterministic, made through the real encoder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from danube.core.batch.columns import BatchView, encode
from danube.core.batch.format import BatchHeader, read_header, stamp
from danube.wal.log.log import Log, LogIdentity, LogOptions

IDENTITY = LogIdentity(topic_id=0x1234, partition=3)
SMALL = LogOptions(segment_bytes=4096, preallocate_first=4096, preallocate_step_max=8192)
START_US = 1_700_000_000_000_000


@contextmanager
def memory_directory(other: Path) -> Iterator[Path]:
    """A directory in memory where there is one, for tests that make thousands of files; else ``other``."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield other
        return
    with tempfile.TemporaryDirectory(prefix="danube-test-", dir=memory) as name:
        yield Path(name)


def batch_of(payloads: list[bytes], base_offset: int, epoch: int = 1, time_us: int | None = None) -> bytes:
    """A stamped batch."""
    encoded = bytearray(encode(payloads, publish_time_us=0).to_bytes())
    stamp(encoded, base_offset, epoch, START_US + base_offset * 1000 if time_us is None else time_us)
    return bytes(encoded)


def append(log: Log, *payloads: bytes, time_us: int | None = None) -> BatchHeader:
    batch = batch_of(list(payloads), log.log_end, log.epoch, time_us)
    header = read_header(batch)
    log.append(batch, header)
    return header


def sync(log: Log) -> None:
    job = log.sync_job()
    if job is not None:
        job.run(set())
        log.synced(job)
        log.store_mark()


def roll(log: Log, snapshot: bytes = b"") -> None:
    job = log.roll(snapshot)
    assert job is not None
    job.run(set())
    log.sealed(job)
    sync(log)


def open_log(
    directory: Path, epoch: int = 1, options: LogOptions = SMALL, trusted_end: int | None = None
) -> Log:
    return Log.open(directory, IDENTITY, epoch, options, trusted_end=trusted_end)


def records_in(data: bytes) -> list[tuple[int, bytes]]:
    """``(offset, payload)`` of every record of stored batches."""
    records: list[tuple[int, bytes]] = []
    position = 0
    while position < len(data):
        view = BatchView(data, position=position)
        for number in range(view.record_count):
            records.append((view.header.base_offset + number, bytes(view.payload(number))))
        position += view.header.size
    return records


def read_all(log: Log, bytes_max: int = 1 << 20) -> tuple[dict[int, bytes], list[tuple[int, int]]]:
    """All records below written_end by offset, and the damaged ranges met on the way."""
    found: dict[int, bytes] = {}
    damage: list[tuple[int, int]] = []
    offset = log.start
    while offset < log.written_end:
        chunk = log.read(offset, log.written_end, bytes_max)
        damage += [tuple(item) for item in chunk.damage]
        for number, payload in records_in(chunk.data):
            assert number not in found
            found[number] = payload
        assert chunk.next_offset > offset
        offset = chunk.next_offset
    return found, damage
