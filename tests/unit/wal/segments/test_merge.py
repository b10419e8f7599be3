"""Merged segments: every read equals the originals', and a crash leaves no half of one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from danube.errors import Damage, InvalidArgument
from danube.host import files
from danube.wal.segments.merge import SealedRange, merge
from danube.wal.segments.reading import offset_at_time, read_segment
from danube.wal.segments.segment import HEADER_BYTES, file_name, read_summary
from danube.wal.verify.bytes import BytesSource
from danube.wal.verify.segment import read_segment as read_independently
from tests.log_oracle import verify
from tests.unit.failing_files import FailingFiles, Killed
from tests.unit.merge_samples import opened_segment, random_segments, records_of, sealed_log, stored_records
from tests.unit.wal_samples import IDENTITY, START_US, memory_directory


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with memory_directory(tmp_path) as directory:
        yield directory


def made(tmp_path: Path, seed: int = 1) -> list[SealedRange]:
    return sealed_log(tmp_path / "log", random_segments(seed))


def target_of(tmp_path: Path) -> Path:
    (tmp_path / "merged").mkdir(exist_ok=True)
    return tmp_path / "merged" / file_name(0)


@pytest.mark.parametrize("seed", range(12))
def test_every_read_equals_that_of_the_originals(tmp_path: Path, seed: int) -> None:
    sources = made(tmp_path, seed)
    result = merge(sources, target_of(tmp_path))
    originals = [opened_segment(source.path) for source in sources]
    merged = opened_segment(target_of(tmp_path))
    assert merged.end_offset == originals[-1].end_offset and result.size_bytes == merged.size_bytes
    chance = random.Random(seed)
    for _ in range(60):
        offset = chance.randrange(merged.end_offset)
        end = chance.randrange(offset + 1, merged.end_offset + 1)
        bytes_max = chance.choice([1, 300, 1 << 20])
        holder = next(one for one in originals if one.end_offset > offset)
        there = read_segment(merged, offset, end, bytes_max).chunk
        before = read_segment(holder, offset, end, bytes_max).chunk
        assert there.first_offset == before.first_offset and there.data[: len(before.data)] == before.data
        assert there.damage == before.damage == ()
    for step in range(merged.end_offset + 2):
        time_us = START_US + step * 1000 - 500
        expected = next(
            (found for one in originals if (found := offset_at_time(one, time_us)) is not None), None
        )
        assert offset_at_time(merged, time_us) == expected


@pytest.mark.parametrize("seed", range(12))
def test_the_footer_tells_of_the_first_and_the_last(tmp_path: Path, seed: int) -> None:
    sources = made(tmp_path, seed)
    result = merge(sources, target_of(tmp_path))
    data = target_of(tmp_path).read_bytes()
    first, last = sources[0].path.read_bytes(), sources[-1].path.read_bytes()
    assert data[:HEADER_BYTES] == first[:HEADER_BYTES]
    held = [read_summary(source.path.read_bytes()[-144:], source.path.stat().st_size) for source in sources]
    assert held[0] is not None and held[-1] is not None
    summary = result.summary
    assert summary == read_summary(data[-144:], len(data)) and summary.identity == IDENTITY
    assert (summary.base_offset, summary.end_offset) == (held[0].base_offset, held[-1].end_offset)
    assert summary.epoch == held[-1].epoch and summary.previous_hash == held[0].previous_hash
    assert summary.record_count == sum(one.record_count for one in held if one is not None)
    assert (summary.first_append_us, summary.last_append_us) == (
        held[0].first_append_us,
        held[-1].last_append_us,
    )
    assert result.chain_hash == held[-1].content_hash and summary.chained and not summary.compacted
    assert (
        opened_segment(target_of(tmp_path)).load_snapshot()
        == opened_segment(sources[-1].path).load_snapshot()
    )
    found = read_independently(BytesSource(data), 0)
    assert not found.problems and found.chain_hash == result.chain_hash
    assert found.snapshot_size == len(b"producers 0") and last[-8:] == data[-8:]


def test_merging_merged_segments_is_merging_the_originals(tmp_path: Path) -> None:
    sources = made(tmp_path, 5)
    assert len(sources) >= 3
    whole = merge(sources, target_of(tmp_path))
    half = tmp_path / "half.seg"
    merge(sources[:2], half)
    again = merge([SealedRange(half), *sources[2:]], tmp_path / "again.seg")
    assert (tmp_path / "again.seg").read_bytes() == target_of(tmp_path).read_bytes()
    assert again == whole


def test_ranges_of_a_larger_file_are_sources_too(tmp_path: Path) -> None:
    sources = made(tmp_path, 5)
    packed, ranges = bytearray(b"\0" * 8), []
    for source in sources:
        data = source.path.read_bytes()
        ranges.append(SealedRange(tmp_path / "packed", len(packed), len(packed) + len(data)))
        packed += data
        packed += bytes(-len(packed) % 8)
    (tmp_path / "packed").write_bytes(packed)
    merge(ranges, tmp_path / "one.seg")
    merge(sources, target_of(tmp_path))
    assert (tmp_path / "one.seg").read_bytes() == target_of(tmp_path).read_bytes()
    with pytest.raises(Damage, match="too short"):
        merge([SealedRange(tmp_path / "packed", 8, 100)], tmp_path / "one.seg")
    with pytest.raises(Damage, match="too short"):
        merge([SealedRange(tmp_path / "packed", 8, 1 << 40)], tmp_path / "one.seg")


def test_a_merged_file_may_take_the_place_of_its_first_source(tmp_path: Path) -> None:
    sources = made(tmp_path, 5)
    before = records_of(sources)
    merge(sources[:2], sources[0].path)
    sources[1].path.unlink()
    report = verify(tmp_path / "log")
    assert report.sound, report
    assert records_of([sources[0], *sources[2:]]) == before
    assert stored_records(
        b"".join(read_segment(opened_segment(sources[0].path), 0, 1 << 40, 1 << 30).chunk[:1])
    ) == {offset: record for offset, record in before.items() if offset < report.files[0].end_offset}


def test_what_is_not_adjacent_is_refused(tmp_path: Path) -> None:
    sources = made(tmp_path, 5)
    for wrong, why in (
        ([], "no segment"),
        ([sources[0], sources[2]], "not adjacent"),
        ([sources[1], sources[0]], "not adjacent"),
        ([sources[0], sources[0]], "not adjacent"),
    ):
        with pytest.raises(InvalidArgument, match=why):
            merge(wrong, target_of(tmp_path))
    other = tmp_path / "log" / file_name(1)
    other.write_bytes(sources[1].path.read_bytes()[:-8])
    with pytest.raises(InvalidArgument, match="not sealed"):
        merge([SealedRange(other)], target_of(tmp_path))
    assert list(target_of(tmp_path).parent.iterdir()) == []


def test_every_flipped_bit_of_a_source_is_refused(tmp_path: Path) -> None:
    sources = sealed_log(tmp_path / "log", [[[(b"k", b"a")]], [[(b"k", b"b")]]])
    path = sources[1].path
    whole = path.read_bytes()
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        with pytest.raises((Damage, InvalidArgument)):
            merge(sources, target_of(tmp_path))
        assert list(target_of(tmp_path).parent.iterdir()) == [], position


def test_segments_of_another_partition_or_another_history_are_refused(tmp_path: Path) -> None:
    from danube.wal.log.log import Log, LogIdentity
    from tests.unit.wal_samples import SMALL, append, roll

    sources = sealed_log(tmp_path / "log", [[[(b"k", b"a")]], [[(b"k", b"b")]]])
    other = sealed_log(tmp_path / "other", [[[(b"k", b"z")]], [[(b"k", b"b")]]])
    with pytest.raises(Damage, match="another one"):
        merge([sources[0], other[1]], target_of(tmp_path))
    log = Log.open(tmp_path / "third", LogIdentity(9, 9), 1, SMALL)
    append(log, b"a")
    log.write()
    roll(log)
    append(log, b"b")
    log.write()
    roll(log)
    log.abandon()
    with pytest.raises(InvalidArgument, match="different partitions"):
        merge([sources[0], SealedRange(tmp_path / "third" / file_name(1))], target_of(tmp_path))


@pytest.mark.parametrize("kind", ["killed", "killed after", "short"])
@pytest.mark.parametrize("replacing", [False, True])
def test_a_crash_at_any_step_leaves_all_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replacing: bool, kind: str
) -> None:
    sources = made(tmp_path, 5)
    target = sources[0].path if replacing else target_of(tmp_path)
    before = target.read_bytes() if replacing else b""
    merge(sources, tmp_path / "whole.seg")
    whole = (tmp_path / "whole.seg").read_bytes()
    disk = FailingFiles(monkeypatch)
    disk.arm(1 << 30, kind)
    steps = 0
    while True:
        disk.arm(steps, kind, lasting=kind != "short")
        try:
            merge(sources, target)
        except Killed:
            assert disk.fired
        present = target.read_bytes() if target.exists() else b""
        assert present in (before, whole), steps
        if kind == "short" or not disk.fired:
            assert present == whole and not (target.parent / (target.name + ".new")).exists()
        disk.disarm()
        if before:
            target.write_bytes(before)
        else:
            target.unlink(missing_ok=True)
        steps += 1
        if len(disk.calls) < steps:
            break
    assert steps > 8


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = made(tmp_path, 5)

    def full(fd: int, data: bytes, position: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_all", full)
    with pytest.raises(OSError, match="No space"):
        merge(sources, target_of(tmp_path))
    assert list(target_of(tmp_path).parent.iterdir()) == []


def test_large_segments_are_merged_and_verified_in_little_memory(tmp_path: Path) -> None:
    import tracemalloc

    from danube.wal.log.log import Log, LogOptions
    from danube.wal.verify.bytes import FileSource
    from tests.unit.wal_samples import append, roll

    log = Log.open(tmp_path / "log", IDENTITY, 1, LogOptions())
    for number in range(2):
        for _ in range(12):
            append(log, b"%d" % number * (4 << 20))
            log.write()
        roll(log)
    log.abandon()
    sources = [SealedRange(tmp_path / "log" / file_name(start)) for start in (0, 12)]
    tracemalloc.start()
    merge(sources, target_of(tmp_path))
    with FileSource(target_of(tmp_path)) as source:
        found = read_independently(source, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.size > 96 << 20 and not found.problems and found.record_count == 24
    assert peak < 40 << 20
