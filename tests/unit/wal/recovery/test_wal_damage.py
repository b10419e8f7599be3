"""Damaged files: every cut and every flipped bit is detected or changes nothing; nothing wrong is read."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from danube.core.batch.columns import encode
from danube.core.batch.format import read_header, stamp
from danube.errors import StorageIncompatible
from danube.host import files
from danube.wal.log.log import Log, RecoveryReport
from danube.wal.recovery.damage import DamageRegister
from danube.wal.segments.segment import HEADER_BYTES, LogIdentity, SegmentHeader, file_name, pack_header
from tests.unit.wal_samples import (
    IDENTITY,
    START_US,
    append,
    memory_directory,
    open_log,
    read_all,
    roll,
    sync,
)

COUNT = 5


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with memory_directory(tmp_path) as directory:
        yield directory


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of openings: what a sync means is tested in test_wal_faults."""
    monkeypatch.setattr(files, "fdatasync", lambda fd: None)
    monkeypatch.setattr(files, "fsync_directory", lambda directory: None)


def payload_of(offset: int) -> bytes:
    return b"record %d" % offset


def build(directory: Path, *, synced: int = 0, sealed: bool = False, count: int = COUNT) -> Log:
    """One segment of ``count`` one-record batches, the first ``synced`` of them below the mark."""
    log = open_log(directory)
    for offset in range(count):
        append(log, payload_of(offset))
        log.write()
        if offset + 1 == synced:
            sync(log)
    if sealed:
        roll(log, b"snapshot")
    log.abandon()
    return log


class Restored:
    """A directory that is put back to its first state before each experiment."""

    def __init__(self, template: Path, work: Path) -> None:
        self.work = work
        self.content = {path.name: path.read_bytes() for path in template.iterdir()}

    def __call__(self, **changed: bytes | None) -> Path:
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        for name, data in (
            self.content | {key.replace("_", "."): value for key, value in changed.items()}
        ).items():
            if data is not None:
                (self.work / name).write_bytes(data)
        return self.work

    def with_file(self, name: str, data: bytes) -> Path:
        work = self()
        (work / name).write_bytes(data)
        return work


def check(directory: Path, *, acknowledged: int, epoch: int = 2) -> tuple[set[int], int, RecoveryReport]:
    """Open, read everything and append: no wrong record, no silent loss below ``acknowledged``."""
    log = open_log(directory, epoch=epoch)
    found, damage = read_all(log)
    damage += [(record.start, record.end) for record in log.recovery.damaged]
    lost = {offset for start, end in damage for offset in range(start, end)}
    for offset, payload in found.items():
        assert payload == payload_of(offset)
    assert log.log_end >= acknowledged
    missing = set(range(acknowledged)) - set(found)
    assert missing <= lost, f"{missing - lost} vanished silently"
    assert not lost & set(found)
    if lost:
        assert log.recovery.damaged or log.damage.count
    end = log.log_end
    append(log, payload_of(end))
    log.write()
    log.abandon()
    again = open_log(directory, epoch=epoch + 1)
    assert again.log_end == end + 1
    later = read_all(again)[0]
    assert later == found | {end: payload_of(end)}
    again.abandon()
    return set(found), end, log.recovery


def data_end(data: bytes) -> int:
    position = HEADER_BYTES
    while data[position : position + 4] == b"DNB1":
        position += read_header(data, position).size
    return position


@pytest.mark.parametrize("synced", [0, 3, COUNT])
def test_every_truncation_keeps_what_is_whole_and_reports_what_was_synced(
    tmp_path: Path, synced: int
) -> None:
    build(tmp_path / "template", synced=synced)
    restored = Restored(tmp_path / "template", tmp_path / "work")
    name = file_name(0)
    whole = restored.content[name]
    ends = [HEADER_BYTES]
    while whole[ends[-1] : ends[-1] + 4] == b"DNB1":
        ends.append(ends[-1] + read_header(whole, ends[-1]).size)
    for size in range(ends[-1] + 1):
        found, log_end, report = check(restored.with_file(name, whole[:size]), acknowledged=synced)
        kept = max(0, sum(end <= size for end in ends) - 1)
        assert found == set(range(kept))
        assert log_end == max(kept, synced)
        if kept >= synced and size > HEADER_BYTES:
            assert report.torn_bytes == len(whole[ends[kept] : size].rstrip(b"\0"))


@pytest.mark.parametrize("sealed", [False, True])
def test_every_flipped_bit_of_a_segment_is_found_or_changes_nothing(tmp_path: Path, sealed: bool) -> None:
    build(tmp_path / "template", synced=3, sealed=sealed, count=3)
    restored = Restored(tmp_path / "template", tmp_path / "work")
    name = file_name(0)
    whole = restored.content[name]
    size = len(whole) if sealed else data_end(whole) + 64
    for position in range(size):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << bit
            work = restored.with_file(name, bytes(flipped))
            log = open_log(work, epoch=2)
            found, damage = read_all(log)
            assert all(payload == payload_of(offset) for offset, payload in found.items())
            lost = {offset for start, end in damage for offset in range(start, end)}
            assert set(range(3)) - set(found) == lost and log.log_end == 3
            if HEADER_BYTES <= position < data_end(whole):
                assert len(lost) == 1, "exactly the record whose batch was hit"
            else:
                assert not lost
            if position < data_end(whole):
                assert log.recovery.damaged or log.damage.count
            log.abandon()


def test_every_flipped_bit_of_the_mark_is_found_and_costs_nothing(tmp_path: Path) -> None:
    log = open_log(tmp_path / "template")
    for offset in range(3):
        append(log, payload_of(offset))
        log.write()
        sync(log)
    log.abandon()
    restored = Restored(tmp_path / "template", tmp_path / "work")
    whole = restored.content["mark"]
    for position in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << bit
            log = open_log(restored.with_file("mark", bytes(flipped)), epoch=2)
            assert len(read_all(log)[0]) == 3
            assert [record.file for record in log.recovery.damaged] == ["mark"]
            log.abandon()


def test_random_bytes_blocks_swaps_and_copies_are_never_served_wrong(tmp_path: Path, seed: int) -> None:
    count = 12
    build(tmp_path / "template", synced=count, count=count)
    restored = Restored(tmp_path / "template", tmp_path / "work")
    name = file_name(0)
    whole = restored.content[name]
    end = data_end(whole)
    dice = random.Random(seed)
    for _ in range(250):
        changed = bytearray(whole)
        first, second = (dice.randrange(HEADER_BYTES, end) for _ in range(2))
        size = dice.randrange(1, 300)
        kind = dice.choice(["zero", "noise", "swap", "copy", "flips"])
        if kind == "zero":
            changed[first : first + size] = bytes(size)
        elif kind == "noise":
            changed[first : first + size] = dice.randbytes(size)
        elif kind == "swap":
            one, other = whole[first : first + 64], whole[second : second + 64]
            changed[first : first + 64], changed[second : second + 64] = other, one
        elif kind == "copy":
            changed[first : first + size] = whole[second : second + size]
        else:
            for _ in range(dice.randrange(1, 6)):
                changed[dice.randrange(HEADER_BYTES, end)] ^= 1 << dice.randrange(8)
        check(restored.with_file(name, bytes(changed[: len(whole)])), acknowledged=count)


def test_batches_behind_two_damaged_places_are_still_read(tmp_path: Path) -> None:
    build(tmp_path / "template", synced=12, count=12)
    restored = Restored(tmp_path / "template", tmp_path / "work")
    whole = bytearray(restored.content[file_name(0)])
    positions = []
    position = HEADER_BYTES
    while whole[position : position + 4] == b"DNB1":
        positions.append(position)
        position += read_header(whole, position).size
    for hit in (3, 4, 8):
        whole[positions[hit] + 5] ^= 1  # the size: the header's own checksum fails
    found, _, _ = check(restored.with_file(file_name(0), bytes(whole)), acknowledged=12)
    assert found == set(range(12)) - {3, 4, 8}


def test_a_lying_length_is_neither_believed_nor_taken_for_the_end(tmp_path: Path) -> None:
    build(tmp_path / "template", synced=COUNT)
    restored = Restored(tmp_path / "template", tmp_path / "work")
    whole = restored.content[file_name(0)]
    second = HEADER_BYTES + read_header(whole, HEADER_BYTES).size
    for size in (0, 8, 2**32 - 1, 2**32 - 8, 12 * 1024 * 1024, len(whole) + 8):
        for honest_checksum in (False, True):
            changed = bytearray(whole)
            changed[second + 4 : second + 8] = size.to_bytes(4, "little")
            if honest_checksum:
                header = read_header(whole, second)
                stamp(memoryview(changed)[second:], header.base_offset, header.epoch, header.append_time_us)
            found, _, _ = check(restored.with_file(file_name(0), bytes(changed)), acknowledged=COUNT)
            assert found == set(range(COUNT)) - {1}


def test_batches_inside_a_payload_are_never_taken_for_the_logs_own(tmp_path: Path) -> None:
    """A log that is stored in a log: when the outer header is damaged the inner batches stay unread."""
    log = open_log(tmp_path / "template")
    append(log, payload_of(0))
    inner = b""
    for offset in (1, 2, 3):
        batch = bytearray(encode([b"forged"], publish_time_us=0).to_bytes())
        stamp(batch, offset, 1, START_US)
        inner += bytes(batch)
    append(log, inner)
    log.write()
    outer = log.read(1, 2).data
    for offset in (2, 3):
        append(log, payload_of(offset))
    log.write()
    sync(log)
    log.abandon()
    restored = Restored(tmp_path / "template", tmp_path / "work")
    whole = restored.content[file_name(0)]
    position = whole.index(outer)
    for hit in (position, position + 5, position + 9, position + 60, position + 90):
        changed = bytearray(whole)
        changed[hit] ^= 4
        found, _, _ = check(restored.with_file(file_name(0), bytes(changed)), acknowledged=4)
        assert found == {0, 2, 3}


def sealed_segments(directory: Path, count: int) -> Log:
    log = open_log(directory)
    for _ in range(count):
        for _ in range(3):
            append(log, payload_of(log.log_end))
            log.write()
        roll(log, b"s")
    log.close()
    return log


def test_a_missing_segment_is_a_reported_hole(tmp_path: Path) -> None:
    sealed_segments(tmp_path, 4)
    (tmp_path / file_name(3)).unlink()
    found, _, report = check(tmp_path, acknowledged=12)
    assert found == {0, 1, 2, *range(6, 12)}
    assert [(record.start, record.end) for record in report.damaged] == [(3, 6)]


def test_offsets_of_a_missing_last_segment_are_never_given_out_again(tmp_path: Path) -> None:
    sealed_segments(tmp_path, 2)
    (tmp_path / file_name(3)).unlink()
    found, log_end, _ = check(tmp_path, acknowledged=6)
    assert found == {0, 1, 2} and log_end == 6


@pytest.mark.parametrize("kind", ["renamed", "other topic", "other partition"])
def test_a_file_that_belongs_elsewhere_is_set_aside_and_never_served(tmp_path: Path, kind: str) -> None:
    sealed_segments(tmp_path, 2)
    source = tmp_path / "elsewhere"
    identity = {"other topic": LogIdentity(99, 3), "other partition": LogIdentity(IDENTITY.topic_id, 4)}
    log = Log.open(source, identity.get(kind, IDENTITY), 1)
    append(log, b"foreign")
    log.close()
    (source / file_name(0)).rename(tmp_path / file_name(6 if kind == "renamed" else 0))
    found, _, _ = check(tmp_path, acknowledged=3)
    assert found == (set(range(6)) if kind == "renamed" else {3, 4, 5})
    assert [path.name for path in tmp_path.glob("*.aside")] == [
        file_name(6 if kind == "renamed" else 0) + ".aside"
    ]


def test_a_file_that_repeats_offsets_is_set_aside(tmp_path: Path) -> None:
    sealed_segments(tmp_path / "log", 1)
    other = Log.open(tmp_path / "other", IDENTITY, 1)
    other.log_end = other.written_end = 1
    append(other, b"again")
    other.close()
    (tmp_path / "other" / file_name(1)).rename(tmp_path / "log" / file_name(1))
    found, _, _ = check(tmp_path / "log", acknowledged=3)
    assert found == {0, 1, 2}


@pytest.mark.parametrize("target", ["header", "footer", "mark"])
def test_a_newer_format_is_refused_and_nothing_is_touched(tmp_path: Path, target: str) -> None:
    from danube.core.batch.checksum import crc32c

    sealed_segments(tmp_path, 2)
    path = tmp_path / ("mark" if target == "mark" else file_name(3))
    data = bytearray(path.read_bytes())
    ranges = {
        "header": [(0, 60, 8)],
        "footer": [(len(data) - 144, 128, 124)],
        "mark": [(0, 60, 8), (64, 60, 8)],
    }
    for start, size, version in ranges[target]:
        data[start + version] = 2
        data[start + size : start + size + 4] = crc32c(bytes(data[start : start + size])).to_bytes(
            4, "little"
        )
    path.write_bytes(data)
    (tmp_path / "left.new").write_bytes(b"unfinished")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(StorageIncompatible):
        open_log(tmp_path, epoch=9)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_an_extra_empty_file_does_not_move_the_numbering_beyond_what_it_says(tmp_path: Path) -> None:
    sealed_segments(tmp_path, 1)
    (tmp_path / file_name(500)).write_bytes(b"")
    found, log_end, _ = check(tmp_path, acknowledged=3)
    assert found == {0, 1, 2} and log_end == 3


def test_an_empty_segment_with_a_sound_header_keeps_its_numbering(tmp_path: Path) -> None:
    (tmp_path / file_name(77)).write_bytes(pack_header(SegmentHeader(IDENTITY, 1, 77, 0)))
    for epoch in (2, 3):
        log = open_log(tmp_path, epoch=epoch)
        assert (log.start, log.log_end) == (77, 77)
        log.abandon()


def test_damage_found_while_reading_is_recorded_once_and_survives_a_restart(tmp_path: Path) -> None:
    sealed_segments(tmp_path, 2)
    path = tmp_path / file_name(0)
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 100] ^= 1
    path.write_bytes(data)
    log = open_log(tmp_path, epoch=2)
    assert log.recovery.damaged == ()
    for _ in range(3):
        found, damage = read_all(log)
        assert sorted(found) == [1, 2, 3, 4, 5] and damage == [(0, 1)]
    assert log.damage.count == 1
    log.close()
    assert [(record.start, record.end) for record in DamageRegister(tmp_path)] == [(0, 1)]
