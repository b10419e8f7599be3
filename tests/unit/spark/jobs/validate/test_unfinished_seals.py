"""Footers as power cuts leave them: no record is missing and no damage is told."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from danube.host import files
from danube.wal.log.log import Log
from danube.wal.segments.segment import FOOTER_MAGIC, SUMMARY_BYTES, file_name
from danube.wal.verify.tree import Verified, verify_tree
from tests.unit.wal_samples import IDENTITY, append, memory_directory, open_log, read_all, roll, sync

SECTOR = 512


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    with memory_directory(tmp_path) as directory:
        yield directory / IDENTITY.directory_name


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "fdatasync", lambda fd: None)
    monkeypatch.setattr(files, "fsync_directory", lambda directory: None)


class Cut:
    """Two sealed segments and an active one; the second one's footer is as a cut left it."""

    def __init__(self, directory: Path, *, more: bool, marked: bool, pad: int = 0) -> None:
        self.directory = directory
        self.snapshot = random.Random(3).randbytes(1_900)
        log = open_log(directory)
        for number in range(4):
            append(log, b"record %d" % number, b"x" * pad)
            log.write()
            if number == 1:
                roll(log, b"first")
        sync(log)
        job = log.roll(self.snapshot)
        assert job is not None
        if more:
            append(log, b"record 4", b"x" * pad)
            log.write()
        if marked:
            sync(log)
        job.run(set())
        log.abandon()
        self.records = {
            number: b"record %d" % (number // 2) if number % 2 == 0 else b"x" * pad
            for number in range(10 if more else 8)
        }
        self.path = directory / file_name(4)
        self.whole = self.path.read_bytes()
        self.begin = self.whole.rindex(FOOTER_MAGIC)

    def leave(self, kept: list[bool], reserved: int = 0) -> None:
        """Sectors of the footer that the cut kept; the file's length may be the one of before the seal."""
        data = bytearray(self.whole)
        for number, (start, end) in enumerate(self.sectors()):
            if not kept[number]:
                data[start:end] = bytes(end - start)
        self.path.write_bytes(data + bytes(reserved))

    def sectors(self) -> list[tuple[int, int]]:
        cuts = [self.begin, *range(self.begin // SECTOR * SECTOR + SECTOR, len(self.whole), SECTOR)]
        return list(zip(cuts, [*cuts[1:], len(self.whole)], strict=True))

    def open(self, epoch: int = 2) -> Log:
        return open_log(self.directory, epoch=epoch)


def verified(directory: Path) -> Verified:
    found = Verified()
    verify_tree(directory, found)
    return found


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("reserved", [0, 4096])
def test_whatever_sectors_of_a_footer_are_missing_no_damage_is_told(
    directory: Path, more: bool, marked: bool, reserved: int
) -> None:
    cut = Cut(directory, more=more, marked=marked)
    places = range(len(cut.sectors()))
    states = [[one <= number for one in places] for number in (-1, *places)]
    states += [[one >= number for one in places] for number in places[1:]]
    states += [[one != number for one in places] for number in places[1:-1]]
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    for kept in states:
        for path in directory.iterdir():
            path.unlink()
        for name, data in before.items():
            (directory / name).write_bytes(data)
        cut.leave(kept, reserved)
        found = verified(directory)
        assert found.findings == [], kept
        torn = any(kept) and (not all(kept) or reserved > 0)
        assert not torn or found.remarks, kept
        log = cut.open()
        assert log.recovery.damaged == () and read_all(log) == (cut.records, []), kept
        recognised = torn and (kept[0] or (kept[-1] and not reserved))  # by its first or its last words
        assert log.recovery.unfinished_seals == ((cut.path.name,) if recognised else ()), kept
        assert log.log_end == len(cut.records)
        log.close(b"last")
        assert verified(directory).findings == [], kept
        again = cut.open(3)
        assert again.recovery.unfinished_seals == () and read_all(again) == (cut.records, [])
        again.abandon()


def test_a_tear_inside_of_the_last_words_is_no_damage(directory: Path) -> None:
    """Whatever part of the summary lies in a sector that is missing."""
    for pad in range(0, 520, 24):
        cut = Cut(directory / f"{pad:016x}-0", more=True, marked=True, pad=pad)
        last = cut.sectors()[-1]
        kept = [True] * len(cut.sectors())
        kept[-2] = False
        if last[1] - last[0] < SUMMARY_BYTES:
            cut.leave(kept)
            log = cut.open()
            assert log.recovery.damaged == () and log.recovery.unfinished_seals == (cut.path.name,), pad
            assert read_all(log) == (cut.records, [])
            log.abandon()


def test_a_flipped_bit_of_the_newest_footer_is_damage(directory: Path) -> None:
    cut = Cut(directory, more=True, marked=True)
    for position in [
        *range(cut.begin, cut.begin + 64, 9),
        *range(len(cut.whole) - SUMMARY_BYTES, len(cut.whole), 5),
    ]:
        flipped = bytearray(cut.whole)
        flipped[position] ^= 1 << position % 8
        cut.path.write_bytes(flipped)
        assert verified(directory).findings, position
    for position in (cut.begin, cut.begin + 700, len(cut.whole) - 100):
        flipped = bytearray(cut.whole)
        flipped[position] ^= 0x10
        cut.path.write_bytes(flipped)
        log = cut.open(position)
        assert log.recovery.damaged and log.recovery.unfinished_seals == (), position
        assert read_all(log)[0] == cut.records
        log.abandon()


@pytest.mark.parametrize("sector", [0, 1, -1])
def test_a_footer_in_front_of_a_sealed_segment_was_finished(directory: Path, sector: int) -> None:
    """Zeros in it are damage, to the log and to the independent reader."""
    cut = Cut(directory, more=True, marked=True)
    cut.open().close(b"last")
    assert verified(directory).findings == []
    data = bytearray(cut.whole)
    start, end = cut.sectors()[sector] if sector >= 0 else (len(data) - SUMMARY_BYTES, len(data) - 40)
    data[start:end] = bytes(end - start)
    cut.path.write_bytes(data)
    assert any(one.where.endswith(cut.path.name) for one in verified(directory).findings)
    log = cut.open(3)
    assert log.recovery.unfinished_seals == () and read_all(log)[0] == cut.records
    assert sector >= 0 or log.recovery.damaged, "the log reads the rest of a footer when it needs it"
    log.abandon()


def test_a_cut_footer_in_front_of_a_sealed_segment_is_damage(directory: Path) -> None:
    cut = Cut(directory, more=True, marked=True)
    cut.open().close(b"last")
    cut.path.write_bytes(cut.whole[:-8])
    assert any("synced" in one.what for one in verified(directory).findings)
    log = cut.open(3)
    assert [one.why for one in log.recovery.damaged] == ["the end of the segment footer is missing"]
    assert log.recovery.unfinished_seals == () and read_all(log) == (cut.records, [])
    log.abandon()


@pytest.mark.parametrize("sector", [1, -1])
def test_spark_s_check_says_the_same(directory: Path, sector: int) -> None:
    from danube.spark.jobs.validate.directory import DirectoryPlan
    from danube.spark.jobs.validate.segment import validate_segment
    from danube.wal.verify.bytes import FileSource

    cut = Cut(directory, more=True, marked=False, pad=184)
    kept = [True] * len(cut.sectors())
    kept[sector if sector >= 0 else -2] = False
    cut.leave(kept)
    for unfinished in (True, False):
        plan, facts = DirectoryPlan(IDENTITY, directory), []
        for expected in plan.work:
            with FileSource(Path(expected.where)) as source:
                facts.append(validate_segment(source, expected))
        plan.judge(facts)
        found = [one.fault for one in plan.part.findings]
        assert found == ([] if unfinished else ["footer_damaged"])
        assert any("seal was never finished" in one for one in plan.part.remarks) == unfinished
        if unfinished:
            cut.path.write_bytes(cut.whole)
            cut.open().close(b"last")
            cut.leave(kept)


def test_records_that_an_unfinished_footer_names_and_the_file_lacks_are_missed(directory: Path) -> None:
    cut = Cut(directory, more=False, marked=False)
    (directory / "mark").unlink()
    data = bytearray(cut.whole)
    start, end = cut.sectors()[1]
    data[start:end] = bytes(end - start)
    batch = data.rindex(b"DNB1", 0, cut.begin)
    data[batch : batch + 8] = bytes(8)
    cut.path.write_bytes(data)
    assert any(one.start == 6 and one.end == 8 for one in verified(directory).findings)
    log = cut.open()
    assert [(one.start, one.end) for one in log.recovery.damaged if one.start < one.end] == [(6, 8)]
    assert log.log_end == 8
    log.abandon()
