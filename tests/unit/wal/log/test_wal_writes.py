"""How much of a log goes to the kernel with one call, and what a failure between two calls leaves."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.core.batch.format import read_header
from danube.errors import StorageFailed, StorageFull
from danube.host import files
from danube.limits import MIB, WRITE_BYTES_MAX
from danube.wal.log.log import LogOptions
from danube.wal.segments.stored_segment import StoredSegment
from danube.wal.segments.writer import footer_room
from tests.log_oracle import verify as verify_directory
from tests.unit.wal_samples import IDENTITY, append, batch_of, open_log, read_all

LARGE = LogOptions(segment_bytes=64 * MIB, preallocate_first=MIB, preallocate_step_max=MIB)


class Writes:
    """What each pwritev was asked to write; number ``failing`` fails, and ``halved`` writes half of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.counts: list[int] = []
        self.failing = self.halved = -1
        self._real = files.pwritev
        monkeypatch.setattr(files, "pwritev", self._write)

    def _write(self, fd: int, buffers: Sequence[bytes | bytearray | memoryview], position: int) -> int:
        number = len(self.sizes)
        self.sizes.append(sum(map(len, buffers)))
        self.counts.append(len(buffers))
        if number == self.failing:
            raise OSError(errno.ENOSPC, "full")
        if number == self.halved:
            return self._real(fd, [b"".join(buffers)[: self.sizes[-1] // 2]], position)
        return self._real(fd, buffers, position)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    return Writes(monkeypatch)


def payload(number: int, size: int) -> bytes:
    return bytes([number]) * size


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        ([300_000] * 3, [4]),  # with the segment's header
        ([500_000] * 5, [3, 2, 1]),
        ([3 * MIB], [1, 1]),
        ([1000, 2 * MIB, 1000, 1000], [2, 1, 2]),
    ],
)
def test_no_call_takes_more_than_a_mebibyte_but_for_one_batch_that_does(
    tmp_path: Path, writes: Writes, sizes: list[int], counts: list[int]
) -> None:
    log = open_log(tmp_path, options=LARGE)
    expected = {number: payload(number, size) for number, size in enumerate(sizes)}
    for one in expected.values():
        append(log, one)
    writes.counts.clear()
    log.write()
    assert writes.counts == counts
    assert all(
        size <= WRITE_BYTES_MAX for size, count in zip(writes.sizes, counts, strict=False) if count > 1
    )
    assert read_all(log, 8 * MIB) == (expected, []) and verify_directory(tmp_path).sound
    log.close()


def test_many_small_buffers_are_as_few_calls_as_the_kernel_allows(
    tmp_path: Path, writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "IOV_MAX", 4)
    log = open_log(tmp_path, options=LARGE)
    for number in range(9):
        append(log, payload(number, 10))
    log.write()
    assert writes.counts == [4, 4, 2]
    assert read_all(log)[0] == {number: payload(number, 10) for number in range(9)}
    log.close()


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failure_between_two_calls_leaves_nothing_of_either(
    tmp_path: Path, writes: Writes, failing: int
) -> None:
    log = open_log(tmp_path, options=LARGE)
    append(log, b"kept")
    log.write()
    for number in range(5):
        append(log, payload(number, 500_000))
    writes.failing = len(writes.sizes) + failing
    with pytest.raises(StorageFull):
        log.write()
    assert log.log_end == log.written_end == 1 and verify_directory(tmp_path).end == 1
    append(log, b"next")
    log.write()
    assert read_all(log) == ({0: b"kept", 1: b"next"}, [])
    log.close()
    assert verify_directory(tmp_path).sound


def test_what_a_short_write_left_over_comes_before_the_next_call(tmp_path: Path, writes: Writes) -> None:
    log = open_log(tmp_path, options=LARGE)
    expected = {number: payload(number, 500_000) for number in range(5)}
    for one in expected.values():
        append(log, one)
    writes.halved = len(writes.sizes) + 1
    log.write()
    assert read_all(log, 8 * MIB) == (expected, [])
    log.close()
    assert verify_directory(tmp_path).sound


@given(turns=st.lists(st.lists(st.integers(1, 90_000), min_size=1, max_size=6), min_size=1, max_size=12))
def test_batches_of_a_turn_are_counted_as_if_one_at_a_time(turns: list[list[int]]) -> None:
    together, alone = (StoredSegment(Path("/nowhere"), IDENTITY, 5, 1) for _ in range(2))
    offset = 5
    for sizes in turns:
        headers = []
        for size in sizes:
            batch = batch_of([b"x" * (size % 7), bytes(size)], offset)
            headers.append(read_header(batch))
            offset += 2
        for header in headers:
            alone.count(header.base_offset, header.end_offset, alone.data_end, header.append_time_us)
            alone.data_end += header.size
        together.count_written(headers, sum(header.size for header in headers))
        for field in (
            "data_end", "end_offset", "record_count", "batch_count", "first_append_us", "last_append_us",
        ):  # fmt: skip
            assert getattr(together, field) == getattr(alone, field), field
        one, other = together.load_index(), alone.load_index()
        assert (one.offsets, one.positions, one.times) == (other.offsets, other.positions, other.times)


@pytest.mark.parametrize("step", [0, 4096, 1 << 20])
def test_there_is_always_room_for_a_footer_behind_what_is_written(tmp_path: Path, step: int) -> None:
    log = open_log(tmp_path, options=LogOptions(64 * MIB, step, step))
    for number in range(300):
        append(log, payload(number % 256, 10 + number * 397 % 70_000))
        log.write()
        active = log.active
        assert active is not None and active.index is not None
        size = (tmp_path / active.name).stat().st_size
        assert active.size_bytes == size
        if step:
            assert size >= active.data_end + footer_room(len(active.index.positions))
    log.close()


def test_a_file_that_was_taken_over_is_not_written_any_more_though_it_is_open(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, b"a")
    log.write()
    active = log.active
    assert active is not None and active.file.pins == 1
    active.file.lost = True
    append(log, b"b")
    with pytest.raises(StorageFailed):
        log.write()
    assert log.fenced and log.written_end == 1
    log.abandon()
