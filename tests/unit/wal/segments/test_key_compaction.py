"""Key compaction against a dictionary: the latest of each key stays, with its offset, and reads find it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from danube.core.batch.columns import BatchView
from danube.core.batch.format import BatchHeader, Compression, Flag, read_header
from danube.core.batch.selection import compressed
from danube.errors import Damage, InvalidArgument
from danube.wal.log.log import Log
from danube.wal.segments.key_compaction import LatestKeys, compact
from danube.wal.segments.merge import SealedRange, merge
from danube.wal.segments.reading import offset_at_time, read_segment
from danube.wal.segments.segment import HEADER_BYTES, file_name
from danube.wal.verify.bytes import BytesSource, FindingKind
from danube.wal.verify.segment import read_segment as read_independently
from tests.log_oracle import verify
from tests.stored_batches import check_stored
from tests.unit.merge_samples import (
    Record,
    append_keyed,
    opened_segment,
    random_segments,
    records_of,
    sealed_log,
    stored_records,
)
from tests.unit.wal_samples import IDENTITY, START_US, memory_directory, open_log, read_all, roll, sync


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with memory_directory(tmp_path) as directory:
        yield directory


def target_of(tmp_path: Path) -> Path:
    (tmp_path / "compacted").mkdir(exist_ok=True)
    return tmp_path / "compacted" / file_name(0)


def keys_of(sources: list[SealedRange], keys_max: int = 1000) -> LatestKeys:
    latest = LatestKeys(keys_max)
    latest.add(sources)
    return latest


def expected_of(
    records: dict[int, Record], end: int | None = None, tombstones: bool = True
) -> dict[int, Record]:
    """The latest record of each key and all without one; ``end``: what lies at or above it is not written."""
    latest = {key: offset for offset, (key, _) in sorted(records.items()) if key is not None}
    return {
        offset: (key, payload)
        for offset, (key, payload) in records.items()
        if (key is None or latest[key] == offset)
        and (end is None or offset < end)
        and (tombstones or key is None or payload)
    }


def read_through(path: Path, bytes_max: int) -> dict[int, Record]:
    """All records of a segment, read from its base to its end in steps."""
    segment = opened_segment(path)
    found: dict[int, Record] = {}
    offset = segment.base_offset
    while offset < segment.end_offset:
        chunk = read_segment(segment, offset, segment.end_offset, bytes_max).chunk
        assert chunk.damage == () and chunk.next_offset > offset
        found |= stored_records(chunk.data)
        assert all(one < chunk.next_offset for one in found)
        offset = chunk.next_offset
    assert offset == segment.end_offset
    return found


def headers_of(path: Path) -> list[BatchHeader]:
    """Headers of all batches of a sealed file."""
    data, position = path.read_bytes(), HEADER_BYTES
    headers: list[BatchHeader] = []
    while position < int.from_bytes(data[-80:-72], "little"):
        headers.append(read_header(data, position))
        position += headers[-1].size
    return headers


@pytest.mark.parametrize("seed", range(30))
def test_the_latest_record_of_each_key_stays(tmp_path: Path, seed: int) -> None:
    sources = sealed_log(tmp_path / "log", random_segments(seed))
    before = records_of(sources)
    result = compact(sources, keys_of(sources), target_of(tmp_path))
    expected = expected_of(before)
    assert records_of([SealedRange(target_of(tmp_path))]) == expected
    assert read_through(target_of(tmp_path), 1) == read_through(target_of(tmp_path), 1 << 20) == expected
    summary = result.merged.summary
    assert summary.compacted and summary.record_count == len(expected)
    assert result.removed_count == len(before) - len(expected) and result.tombstones_removed == 0
    found = read_independently(BytesSource(target_of(tmp_path).read_bytes()), 0)
    assert not found.problems and not found.gaps and found.compacted
    assert (found.record_count, found.end_offset) == (len(expected), len(before))


@pytest.mark.parametrize("seed", range(15))
def test_reads_from_any_offset_and_time_find_what_comes_next(tmp_path: Path, seed: int) -> None:
    sources = sealed_log(tmp_path / "log", random_segments(seed))
    compact(sources, keys_of(sources), target_of(tmp_path))
    expected = records_of([SealedRange(target_of(tmp_path))])
    segment = opened_segment(target_of(tmp_path))
    headers = headers_of(target_of(tmp_path))
    chance = random.Random(seed)
    for offset in range(segment.end_offset):
        end = chance.randrange(offset + 1, segment.end_offset + 1)
        seen: dict[int, Record] = {}
        place = offset
        while place < end:
            chunk = read_segment(segment, place, end, chance.choice([1, 200, 1 << 20])).chunk
            assert chunk.next_offset > place and chunk.damage == ()
            seen |= stored_records(chunk.data)
            place = chunk.next_offset
        wanted = {one: record for one, record in expected.items() if offset <= one < end}
        assert {one: record for one, record in seen.items() if offset <= one < end} == wanted
        time_us = START_US + offset * 1000
        newer = [header.base_offset for header in headers if header.append_time_us >= time_us]
        assert offset_at_time(segment, time_us) == (newer[0] if newer else None)


@pytest.mark.parametrize("seed", range(10))
def test_parts_can_be_written_with_the_keys_of_the_whole(tmp_path: Path, seed: int) -> None:
    sources = sealed_log(tmp_path / "log", [*random_segments(seed), *random_segments(seed + 100)])
    before = records_of(sources)
    latest = LatestKeys()
    for source in sources:
        latest.add([source])
    part = compact(sources[:1], latest, target_of(tmp_path))
    end = part.merged.summary.end_offset
    assert records_of([SealedRange(target_of(tmp_path))]) == expected_of(before, end)
    again = compact([SealedRange(target_of(tmp_path)), *sources[1:]], latest, tmp_path / "all.seg")
    assert records_of([SealedRange(tmp_path / "all.seg")]) == expected_of(before)
    assert again.merged.chain_hash == opened_segment(sources[-1].path).content_hash
    merge([SealedRange(target_of(tmp_path)), *sources[1:]], tmp_path / "merged.seg")
    held = records_of([SealedRange(target_of(tmp_path)), *sources[1:]])
    assert records_of([SealedRange(tmp_path / "merged.seg")]) == held
    found = read_independently(BytesSource((tmp_path / "merged.seg").read_bytes()), 0)
    assert found.compacted and not found.problems


def test_tombstones_go_when_they_are_old(tmp_path: Path) -> None:
    batches: list[list[Record]] = [
        [(b"a", b"1"), (b"b", b"1"), (None, b"")],
        [(b"a", b""), (b"b", b"2")],
        [(b"c", b"")],
    ]
    sources = sealed_log(tmp_path / "log", [batches])
    before = records_of(sources)
    compact(sources, keys_of(sources), target_of(tmp_path))
    assert records_of([SealedRange(target_of(tmp_path))]) == expected_of(before)
    result = compact(sources, keys_of(sources), target_of(tmp_path), tombstones_before_us=START_US + 5 * 1000)
    assert result.tombstones_removed == 1
    assert records_of([SealedRange(target_of(tmp_path))]) == {
        2: (None, b""), 4: (b"b", b"2"), 5: (b"c", b""),
    }  # fmt: skip


def test_nothing_left_is_a_segment_without_batches(tmp_path: Path) -> None:
    sources = sealed_log(tmp_path / "log", [[[(b"a", b"")]], [[(b"a", b"")]]])
    result = compact(sources, keys_of(sources), target_of(tmp_path), tombstones_before_us=1 << 60)
    summary = result.merged.summary
    assert (summary.batch_count, summary.record_count, summary.end_offset) == (0, 0, 2)
    assert (summary.first_append_us, summary.last_append_us) == (START_US, START_US + 1000)
    assert read_through(target_of(tmp_path), 1 << 20) == {}
    assert not read_independently(BytesSource(target_of(tmp_path).read_bytes()), 0).problems
    assert offset_at_time(opened_segment(target_of(tmp_path)), 0) is None


def test_a_full_table_removes_only_what_it_knows(tmp_path: Path) -> None:
    batches: list[list[Record]] = [[(b"a", b"1"), (b"b", b"1")], [(b"a", b"2"), (b"b", b"2")]]
    sources = sealed_log(tmp_path / "log", [batches])
    latest = keys_of(sources, keys_max=1)
    assert latest.overflowed and len(latest) == 1
    compact(sources, latest, target_of(tmp_path))
    assert records_of([SealedRange(target_of(tmp_path))]) == {
        1: (b"b", b"1"), 2: (b"a", b"2"), 3: (b"b", b"2"),
    }  # fmt: skip


def test_whole_batches_stay_as_they_are_and_others_keep_their_compression(tmp_path: Path) -> None:
    pytest.importorskip("lz4.frame")
    log = open_log(tmp_path / "log")
    rows: list[Record] = [(b"key-%d" % number, b"payload " * 20) for number in range(50)]
    append_keyed(log, rows, Compression.LZ4)
    append_keyed(log, [(b"other", b"x"), (None, b"y")], Compression.LZ4)
    append_keyed(log, rows[:3])
    roll(log, b"producers")
    log.abandon()
    sources = [SealedRange(tmp_path / "log" / file_name(0))]
    before = records_of(sources)
    compact(sources, keys_of(sources), target_of(tmp_path))
    assert records_of([SealedRange(target_of(tmp_path))]) == expected_of(before)
    old, new = sources[0].path.read_bytes(), target_of(tmp_path).read_bytes()
    first, kept = read_header(old, HEADER_BYTES), read_header(new, HEADER_BYTES)
    assert kept.flags == first.flags | Flag.SELECTED and kept.flags & 7 == Compression.LZ4
    assert (kept.base_offset, kept.append_time_us, kept.epoch) == first[2:5]
    check_stored(new[HEADER_BYTES : HEADER_BYTES + kept.size])
    assert kept.size < first.size + 300
    assert old[HEADER_BYTES + first.size :][:200] == new[HEADER_BYTES + kept.size :][:200]


def test_a_selection_that_does_not_shrink_is_stored_plain(tmp_path: Path) -> None:
    pytest.importorskip("lz4.frame")
    log = open_log(tmp_path / "log")
    append_keyed(log, [(b"k", random.Random(1).randbytes(500))])
    stored = log.read(0, 1).data
    log.abandon()
    assert compressed(stored, Compression.LZ4) == stored == compressed(stored, Compression.NONE)


def test_what_cannot_be_compacted_is_refused(tmp_path: Path) -> None:
    sources = sealed_log(tmp_path / "log", [[[(b"a", b"1")]], [[(b"a", b"2")]]])
    with pytest.raises(InvalidArgument, match="were not read"):
        compact(sources, keys_of(sources[:1]), target_of(tmp_path))
    latest = keys_of(sources[:1])
    with pytest.raises(InvalidArgument, match="do not follow"):
        latest.add(sources[:1])
    log = open_log(tmp_path / "bare")
    append_keyed(log, [(b"a", b"1")])
    roll(log)
    log.abandon()
    bare = [SealedRange(tmp_path / "bare" / file_name(0))]
    with pytest.raises(InvalidArgument, match="no producer snapshot"):
        compact(bare, keys_of(bare), target_of(tmp_path))
    assert list(target_of(tmp_path).parent.iterdir()) == []


def test_keys_that_cannot_be_read_are_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from danube.errors import ProtocolError

    sources = sealed_log(tmp_path / "log", [[[(b"a", b"1")]]])

    def malformed(view: BatchView) -> list[bytes | None]:
        raise ProtocolError("offsets of a column do not ascend")

    monkeypatch.setattr(BatchView, "keys", malformed)
    with pytest.raises(Damage, match="keys of a stored batch"):
        keys_of(sources)


def compacted_log(directory: Path, seed: int) -> dict[int, Record]:
    """A log whose first segments were compacted in place, with some records behind; returns what it holds."""
    sources = sealed_log(directory, random_segments(seed))
    compact(sources, keys_of(sources), sources[0].path)
    for source in sources[1:]:
        source.path.unlink()
    log = open_log(directory, epoch=2)
    assert log.recovery.damaged == () and log.recovery.producer_snapshot is not None
    append_keyed(log, [(b"later", b"1"), (b"later", b"2")])
    sync(log)
    log.close(b"producers")
    return records_of(sources[:1])


def all_read(log: Log, bytes_max: int) -> dict[int, Record]:
    found: dict[int, Record] = {}
    offset = log.start
    while offset < log.written_end:
        chunk = log.read(offset, log.written_end, bytes_max)
        assert chunk.damage == () and chunk.next_offset > offset
        found |= stored_records(chunk.data)
        offset = chunk.next_offset
    return found


@pytest.mark.parametrize("seed", range(10))
def test_a_log_is_opened_and_read_over_a_compacted_segment(tmp_path: Path, seed: int) -> None:
    held = compacted_log(tmp_path, seed)
    log = open_log(tmp_path, epoch=3)
    end = log.log_end
    expected = held | {end - 2: (b"later", b"1"), end - 1: (b"later", b"2")}
    assert all_read(log, 1) == all_read(log, 1 << 20) == expected
    assert log.damage.count == 0 and log.recovery.damaged == ()
    log.close()
    report = verify(tmp_path)
    assert report.sound and report.record_count == len(expected)


def test_headers_of_a_compacted_segment_are_read_where_no_snapshot_helps(tmp_path: Path) -> None:
    compacted_log(tmp_path, 3)
    segment = opened_segment(tmp_path / file_name(0))
    log = open_log(tmp_path, epoch=3)
    log.abandon()
    from danube.wal.recovery.recovery import Recovery

    headers = list(Recovery(tmp_path, IDENTITY, 4, None)._read_headers(segment))
    assert len(headers) == segment.batch_count > 0


def test_damage_in_a_compacted_segment_is_told_and_skipped(tmp_path: Path) -> None:
    rows: list[list[Record]] = [[(b"k%d" % number, b"%d" % number), (b"k", b"x")] for number in range(9)]
    sources = sealed_log(tmp_path, [rows])
    compact(sources, keys_of(sources), sources[0].path)
    whole = sources[0].path.read_bytes()
    expected = records_of(sources)
    position, places = HEADER_BYTES, []
    while position < int.from_bytes(whole[-80:-72], "little"):
        places.append(position)
        position += read_header(whole, position).size
    for place in places:
        header = read_header(whole, place)
        for at in (place + 4, place + 60, place + header.size - 20):
            flipped = bytearray(whole)
            flipped[at] ^= 1
            sources[0].path.write_bytes(flipped)
            log = open_log(tmp_path, epoch=2)
            found: dict[int, Record] = {}
            damage: list[tuple[int, int]] = []
            offset = 0
            while offset < log.written_end:
                chunk = log.read(offset, log.written_end)
                assert chunk.next_offset > offset
                damage += chunk.damage
                found |= stored_records(chunk.data)
                offset = chunk.next_offset
            log.abandon()
            for name in ("damage.json", "mark"):
                (tmp_path / name).unlink(missing_ok=True)
            lost = set(expected) - set(found)
            assert found.items() <= expected.items() and lost and damage
            assert all(any(start <= one < end for start, end in damage) for one in lost)
            if at != place + 4:
                assert lost == set(BatchView(whole, position=place).offsets.tolist())
            kinds = {problem.kind for problem in read_independently(BytesSource(bytes(flipped)), 0).problems}
            assert FindingKind.CHECKSUM in kinds


def test_batches_that_go_back_in_a_compacted_segment_are_not_read(tmp_path: Path) -> None:
    from danube.wal.segments.walk import Place, read_run

    log = open_log(tmp_path / "log")
    append_keyed(log, [(b"a", b"1")])
    append_keyed(log, [(b"b", b"2"), (b"c", b"3")])
    first, second = log.read(0, 1).data, log.read(1, 3).data
    log.abandon()
    path = tmp_path / "raw"
    path.write_bytes(second + first)
    with path.open("rb") as source:
        size = len(first) + len(second)
        run = read_run(source.fileno(), 0, size, 0, 1 << 20, Place(size, 3))
        assert run is not None and run.batches.stop == len(second) and run.offset_end == 3
        assert read_run(source.fileno(), len(second), size, 1, 1 << 20, Place(size, 3)) is None


def test_a_plain_log_still_takes_no_selection(tmp_path: Path) -> None:
    sources = sealed_log(tmp_path, random_segments(1))
    assert read_all(open_log(tmp_path, epoch=2))[1] == []
    compact(sources, keys_of(sources), sources[0].path)
    data = bytearray(sources[0].path.read_bytes())
    start = data.rindex(b"DANUBFTR")
    del data[start:]
    found = read_independently(BytesSource(bytes(data)), 0)
    assert any("not compacted" in problem.what for problem in found.problems)


@pytest.mark.parametrize("seed", range(8))
def test_a_compacted_object_is_read_through_the_cache(tmp_path: Path, seed: int) -> None:
    from danube.wal.cold.segment import ColdSegment, Missing
    from tests.unit.store_samples import entry_for

    sources = sealed_log(tmp_path / "log", random_segments(seed))
    compact(sources, keys_of(sources), target_of(tmp_path))
    data = target_of(tmp_path).read_bytes()
    expected = records_of([SealedRange(target_of(tmp_path))])
    chance = random.Random(seed)
    for bytes_max in (1, 1 << 20):
        cache = tmp_path / f"cache-{bytes_max}"
        cache.write_bytes(bytes(len(data)))
        segment = ColdSegment(cache, IDENTITY, entry_for(data), "key")
        found: dict[int, Record] = {}
        offset = 0
        while offset < segment.end_offset:
            end = chance.randrange(offset + 1, segment.end_offset + 1)
            reading = segment.read(offset, end, bytes_max)
            if isinstance(reading, Missing):
                with cache.open("r+b") as file:
                    file.seek(reading.start)
                    file.write(data[reading.start : reading.end])
                segment.take(reading.start, reading.end)
                continue
            assert reading.chunk.damage == () and reading.chunk.next_offset > offset
            found |= stored_records(reading.chunk.data)
            offset = reading.chunk.next_offset
        assert found == expected
