"""The log's promises in the absence of faults: what is appended is read back, at its offsets, for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from danube.core.batch.format import read_header
from danube.errors import Fenced, InvariantBroken, OffsetOutOfRange, StorageFailed
from danube.wal.log.log import Chunk, Log, LogOptions
from danube.wal.segments.segment import file_name
from tests.unit.wal_samples import IDENTITY, SMALL, START_US, append, batch_of, open_log, read_all, roll, sync


def fill(log: Log, count: int, size: int = 40) -> dict[int, bytes]:
    expected = {}
    for _ in range(count):
        payload = log.log_end.to_bytes(4, "big") * (size // 4)
        expected[log.log_end] = payload
        append(log, payload)
    log.write()
    return expected


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_an_idle_log_has_no_segment_file(tmp_path: Path) -> None:
    log = open_log(tmp_path / "a" / "b")
    assert (log.start, log.log_end, log.written_end, log.synced_end) == (0, 0, 0, 0)
    assert log.sync_job() is None and names(tmp_path / "a" / "b") == []
    log.close()


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, b"a", b"b")
    append(log, b"c")
    assert (log.log_end, log.written_end) == (3, 0) and log.pending_bytes > 0
    assert log.write() == 3
    assert log.written_end > log.synced_end and log.pending_bytes == 0
    sync(log)
    assert log.synced_end == log.written_end == 3 and log.sync_job() is None
    assert read_all(log) == ({0: b"a", 1: b"b", 2: b"c"}, [])
    log.close()


def test_a_read_starts_with_the_batch_that_contains_the_offset_and_stops_below_the_end(
    tmp_path: Path,
) -> None:
    log = open_log(tmp_path)
    for _ in range(10):
        append(log, b"x", b"y", b"z")
    log.write()
    chunk = log.read(4, 30)
    assert (chunk.first_offset, chunk.next_offset) == (3, 30)
    assert log.read(4, 10)[1:3] == (3, 12)
    assert log.read(4, 9)[1:3] == (3, 9)
    assert log.read(9, 9) == Chunk(b"", 9, 9)
    assert log.read(30, 99) == Chunk(b"", 30, 30)
    small = log.read(7, 30, bytes_max=8)
    assert small[1:3] == (6, 9)
    with pytest.raises(OffsetOutOfRange):
        log.read(31, 99)
    log.close()


def test_a_batch_larger_than_the_chunk_is_read_whole(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, bytes(300_000))
    append(log, b"after")
    log.write()
    chunk = log.read(0, 2, bytes_max=1000)
    assert chunk.next_offset == 1 and len(chunk.data) > 300_000
    assert log.read(1, 2).next_offset == 2
    log.close()


def test_more_batches_than_one_vectored_write_takes_are_written_in_order(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    expected = fill(log, 2500, size=8)
    assert read_all(log) == (expected, [])
    log.close()


def test_a_batch_that_does_not_continue_the_log_stops_the_owner(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    batch = batch_of([b"x"], 5)
    with pytest.raises(InvariantBroken):
        log.append(batch, read_header(batch))
    log.close()


def test_segments_roll_and_are_read_as_one_log(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    expected: dict[int, bytes] = {}
    for _ in range(5):
        while not log.should_roll:
            expected |= fill(log, 7)
        roll(log, b"snapshot")
    expected |= fill(log, 3)
    assert sum(segment.sealed for segment in log._segments) == 5
    assert read_all(log) == (expected, [])
    assert read_all(log, bytes_max=500) == (expected, [])
    log.close(b"last")
    again = open_log(tmp_path, epoch=2)
    assert again.log_end == len(expected) and again.recovery.scanned_bytes == 0
    assert again.recovery.producer_snapshot == b"last" and list(again.recovery.headers) == []
    assert read_all(again) == (expected, [])
    again.close()


def test_a_clean_reopen_continues_the_offsets_in_a_new_file(tmp_path: Path) -> None:
    for epoch in range(1, 5):
        log = open_log(tmp_path, epoch=epoch)
        assert log.log_end == 2 * (epoch - 1)
        append(log, b"x", b"y")
        log.close()
    log = open_log(tmp_path, epoch=9)
    assert log.log_end == 8 and len(read_all(log)[0]) == 8 and log.recovery.damaged == ()
    log.close()
    assert len([name for name in names(tmp_path) if name.endswith(".seg")]) == 4


def test_an_older_owner_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    log = open_log(tmp_path, epoch=7)
    fill(log, 3)
    log.abandon()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(Fenced):
        open_log(tmp_path, epoch=6)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_an_abandoned_log_keeps_all_that_was_written(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    expected = fill(log, 5)
    sync(log)
    expected |= fill(log, 4)
    append(log, b"never written")
    log.abandon()
    again = open_log(tmp_path, epoch=2)
    assert read_all(again) == (expected, [])
    assert again.recovery.carried_bytes > 0 and again.recovery.damaged == ()
    assert [header.base_offset for header in again.recovery.headers] == list(range(9))
    assert names(tmp_path) == [file_name(0), file_name(5), "mark"]
    again.close()


def test_bytes_above_the_sync_mark_are_carried_into_a_file_of_the_new_epoch(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 6)
    log.abandon()
    inode = (tmp_path / file_name(0)).stat().st_ino
    again = open_log(tmp_path, epoch=2)
    assert (tmp_path / file_name(0)).stat().st_ino != inode
    expected = read_all(again)[0]
    append(again, b"next")
    again.write()
    assert read_all(again)[0] == expected | {6: b"next"}
    again.abandon()
    third = open_log(tmp_path, epoch=3)
    assert read_all(third) == (expected | {6: b"next"}, [])
    third.close()


def test_a_trusted_end_truncates_what_was_never_acknowledged(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    expected = fill(log, 5)
    sync(log)
    fill(log, 4)
    log.abandon()
    again = open_log(tmp_path, epoch=2, trusted_end=5)
    assert again.log_end == 5 and read_all(again) == (expected, [])
    append(again, b"other")
    again.close()
    third = open_log(tmp_path, epoch=3)
    assert read_all(third) == (expected | {5: b"other"}, [])
    third.close()


def test_a_trusted_end_also_cuts_segments_that_were_rolled_and_sealed_above_it(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    expected = fill(log, 5)
    sync(log)
    fill(log, 5)
    roll(log, b"knows too much")
    fill(log, 5)
    log.abandon()
    again = open_log(tmp_path, epoch=2, trusted_end=5)
    # What a sync has confirmed meanwhile is kept: the mark says so.
    assert again.log_end == 10
    assert {offset: read_all(again)[0][offset] for offset in range(5)} == expected
    again.close()


def test_a_newer_owner_in_the_same_process_takes_the_file_over(tmp_path: Path) -> None:
    old = open_log(tmp_path)
    fill(old, 3)
    new = open_log(tmp_path, epoch=2)
    append(old, b"late")
    with pytest.raises(StorageFailed):
        old.write()
    assert old.log_end == 3
    append(new, b"x")
    assert new.write() == 4
    old.abandon()
    new.close()
    third = open_log(tmp_path, epoch=3)
    assert read_all(third)[0][3] == b"x" and third.log_end == 4
    third.close()


def test_time_finds_the_first_offset_appended_at_or_after_it(tmp_path: Path) -> None:
    log = open_log(tmp_path, options=LogOptions(segment_bytes=150_000))
    for number in range(3000):
        append(log, bytes(100), time_us=START_US + number // 2 * 1000)
        if number % 100 == 0:
            log.write()
            if log.should_roll:
                roll(log)
    log.write()
    for number in (0, 1, 2, 499, 500, 1357, 2999):
        assert log.offset_at_time(START_US + number // 2 * 1000) == number // 2 * 2
        assert log.offset_at_time(START_US + number // 2 * 1000 - 1) == number // 2 * 2
    assert log.offset_at_time(0) == 0
    assert log.offset_at_time(START_US + 10**9) == 3000
    log.close()


def fill_segments(directory: Path, count: int, options: LogOptions = SMALL) -> Log:
    log = open_log(directory, options=options)
    for number in range(count):
        fill(log, 30)
        roll(log, b"snapshot %d" % number)
    return log


def test_retention_by_size_deletes_whole_segments_from_the_front(tmp_path: Path) -> None:
    log = fill_segments(tmp_path, 5)
    size = log.local_bytes
    deleted = log.retain(0, 0, size // 2)
    assert [tuple(item) for item in deleted] == [(0, 30), (30, 60)]
    assert log.start == 60 and log.local_bytes <= size * 3 // 5 + 1
    assert not (tmp_path / file_name(0)).exists()
    with pytest.raises(OffsetOutOfRange) as caught:
        log.read(59, 150)
    assert caught.value.facts["start"] == 60
    assert sorted(read_all(log)[0]) == list(range(60, 150))
    log.close()


def test_numbering_and_producers_survive_when_everything_has_expired(tmp_path: Path) -> None:
    log = fill_segments(tmp_path, 2)
    later_us = START_US + 10**12
    assert len(log.retain(later_us, 1000, 0)) == 2
    assert (log.start, log.log_end) == (60, 60)
    log.close()
    for epoch in (2, 3):
        log = open_log(tmp_path, epoch=epoch)
        assert (log.start, log.log_end, log.recovery.damaged) == (60, 60, ())
        assert log.recovery.producer_snapshot == b"snapshot 1"
        log.abandon()
    (tmp_path / "mark").unlink()
    log = open_log(tmp_path, epoch=4)
    assert append(log, b"next").base_offset == 60
    log.write()
    log.abandon()
    log = open_log(tmp_path, epoch=5)
    assert (log.start, log.log_end) == (60, 61) and read_all(log)[0] == {60: b"next"}
    log.close()


def test_an_idle_active_segment_is_rolled_by_age_and_then_expires(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 3)
    sync(log)
    assert log.retain(START_US + 1000, 1_000_000, 0) == [] and not log.should_roll
    later_us = START_US + 2 * 10**12
    assert log.retain(later_us, 1_000_000, 0) == [] and log.should_roll
    roll(log, b"s")
    assert log.retain(later_us, 1_000_000, 0) == [(0, 3)]
    append(log, b"y")
    log.write()
    assert read_all(log)[0] == {3: b"y"}
    log.close()


def test_a_checkpoint_spares_the_next_recovery_the_headers(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 5)
    log.abandon()
    log = open_log(tmp_path, epoch=2)
    assert len(log.recovery.headers) == 5
    log.checkpoint(b"five")
    fill(log, 2)
    log.abandon()
    log = open_log(tmp_path, epoch=3)
    assert log.recovery.producer_snapshot == b"five"
    assert {5, 6} <= {header.base_offset for header in log.recovery.headers}
    log.close()


def test_many_sealed_segments_open_without_being_scanned(tmp_path: Path) -> None:
    log = fill_segments(tmp_path, 40)
    log.close()
    again = open_log(tmp_path, epoch=2)
    assert again.recovery.scanned_bytes == 0 and again.recovery.carried_bytes == 0
    assert sorted(read_all(again)[0]) == list(range(1200))
    again.close()


def test_a_segment_that_is_being_sealed_is_read_and_followed_by_appends(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    expected = fill(log, 10)
    job = log.roll(b"s")
    assert job is not None
    expected |= fill(log, 10)
    assert read_all(log) == (expected, [])
    job.run(set())
    expected |= fill(log, 1)
    assert read_all(log) == (expected, [])
    log.sealed(job)
    sync(log)
    assert read_all(log) == (expected, []) and log.synced_end == 21
    log.close()


def test_identity_names_the_directory_by_ids_only() -> None:
    assert IDENTITY.directory_name == "0000000000001234-3"


def test_segments_that_are_all_gone_are_reported(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, b"a", b"b")
    log.write()
    sync(log)
    log.abandon()
    for path in tmp_path.glob("*.seg"):
        path.unlink()
    again = open_log(tmp_path, epoch=2)
    (told,) = again.recovery.damaged
    assert (told.start, told.end, again.log_end) == (0, 2, 2) and "no segment" in told.why
    again.abandon()
    assert not open_log(tmp_path, epoch=3).recovery.damaged


def test_a_mark_that_is_too_long_is_damage_and_the_log_opens(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, b"a")
    log.write()
    sync(log)
    log.abandon()
    with (tmp_path / "mark").open("ab") as file:
        file.write(bytes(5_000))
    again = open_log(tmp_path, epoch=2)
    assert [one.file for one in again.recovery.damaged] == ["mark"] and read_all(again)[0] == {0: b"a"}
    again.abandon()
