"""A copy that was put back begins a new history: no offset of what came after the copy is given again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from danube.broker.partition.opening import ahead_of
from danube.broker.processes.copied import FILE_NAME as PLACE
from danube.broker.processes.copied import copied, note_place, settle_place
from danube.broker.processes.data_dir import DataDir
from danube.cluster.log.local_log import LocalLog
from danube.core.metadata.commands import CreateTopic
from danube.core.partition.policy import TopicPolicy
from danube.core.placement.recovered import (
    HISTORIES_SINCE_US,
    INCARNATIONS_AHEAD,
    OFFSETS_AHEAD,
    History,
    offset_ahead,
    recovered,
    recovery_of,
)
from danube.errors import Damage
from danube.host import files
from danube.wal.log.log import Log
from danube.wal.segments.holes import HoleKind
from danube.wal.segments.local_holes import FILE_NAME, LocalHoles, OffsetJump, holes_in
from danube.wal.segments.segment import file_name
from danube.wal.tier.manifest import EntryFlag, Manifest, SegmentEntry
from danube.wal.tier.uploader import adding
from danube.wal.verify.bytes import FindingKind
from danube.wal.verify.state import read_holes
from danube.wal.verify.tree import Verified, verify_partition
from tests.unit.wal_samples import IDENTITY, SMALL, append, read_all, sync

AHEAD = OffsetJump(first_epoch=512, since_us=HISTORIES_SINCE_US, why="put back")


def opened(directory: Path, epoch: int, ahead: OffsetJump | None = None) -> Log:
    return Log.open(directory, IDENTITY, epoch, SMALL, ahead=ahead)


def lived(directory: Path, count: int = 10, *, clean: bool = True) -> None:
    """A log of an older history."""
    log = opened(directory, 256)
    for _ in range(count):
        append(log, b"old")
    log.write()
    sync(log)
    if clean:
        log.close()
    else:
        log.abandon()


def entry_at(start: int, end: int) -> SegmentEntry:
    return SegmentEntry(
        base_offset=start, end_offset=end, size_bytes=4_000, data_end=3_000, record_count=end - start,
        batch_count=1, first_append_us=1, last_append_us=2, content_hash=start.to_bytes(16, "big"),
        previous_hash=bytes(16), chain_hash=start.to_bytes(16, "big"), epoch=512, flags=0, uploaded_us=1,
    )  # fmt: skip


def everything(log: Log) -> list[int]:
    return sorted(read_all(log)[0])


@pytest.mark.parametrize("clean", [True, False])
def test_an_older_log_goes_on_far_ahead_behind_a_hole_that_is_no_damage(tmp_path: Path, clean: bool) -> None:
    lived(tmp_path, clean=clean)
    log = opened(tmp_path, 512, AHEAD)
    ahead = 10 + OFFSETS_AHEAD
    assert (log.start, log.log_end, log.synced_end) == (0, ahead, ahead)
    append(log, b"new")
    log.write()
    sync(log)
    found, damaged = read_all(log)
    assert (sorted(found), damaged) == ([*range(10), ahead], [])
    (hole,) = log.holes
    assert (hole.start, hole.end, hole.kind) == (10, ahead, HoleKind.UNUSED)
    chunk = log.read(10, log.log_end)
    assert (chunk.next_offset, chunk.hole, chunk.damage) == (ahead, HoleKind.UNUSED, ())
    assert log.recovery.damaged == () and log.damage.count == 0
    log.close()
    again = opened(tmp_path, 768, AHEAD)
    assert again.log_end == ahead + 1, "once in a history"
    assert everything(again) == [*range(10), ahead] and again.recovery.damaged == ()
    again.close()


def test_a_log_that_is_of_this_history_goes_on_where_it_ends(tmp_path: Path) -> None:
    log = opened(tmp_path, 512, AHEAD)
    assert log.log_end == OFFSETS_AHEAD, "nothing is here, but something may have been"
    log.close()
    shutil.rmtree(tmp_path)
    fresh = opened(tmp_path, 512)
    append(fresh, b"x")
    fresh.close()
    again = opened(tmp_path, 513, AHEAD)
    assert again.log_end == 1 and not again.holes
    again.close()


def test_an_empty_log_is_not_put_ahead_at_every_opening(tmp_path: Path) -> None:
    lived(tmp_path)
    ends = []
    for epoch in (512, 513, 514):
        log = opened(tmp_path, epoch, AHEAD)
        ends.append(log.log_end)
        log.abandon()
    assert ends == [10 + OFFSETS_AHEAD] * 3


def test_each_history_goes_ahead_and_holes_stay_told(tmp_path: Path) -> None:
    lived(tmp_path)
    log = opened(tmp_path, 512, AHEAD)
    append(log, b"second")
    log.close()
    later = OffsetJump(1024, HISTORIES_SINCE_US + 1_000_000, "again")
    log = opened(tmp_path, 1024, later)
    first = 10 + OFFSETS_AHEAD
    assert [hole[:2] for hole in log.holes] == [(10, first), (first + 1, first + 1 + OFFSETS_AHEAD)]
    assert everything(log) == [*range(10), first]
    log.close()


@pytest.mark.parametrize("call", ["fdatasync", "rename", "unlink", "fsync_directory"])
def test_a_crash_in_between_leaves_a_log_that_goes_ahead_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Every call that fails, one after the other, until none does."""
    real, number, refused = getattr(files, call), 0, -1
    calls = [0]

    def failing(*given: object) -> object:
        calls[0] += 1
        if calls[0] == refused:
            raise OSError(5, "cut off")
        return real(*given)

    while True:
        number += 1
        directory = tmp_path / f"{number}"
        lived(directory, clean=False)
        with monkeypatch.context() as patch:
            patch.setattr(files, call, failing)
            calls[0], refused = 0, number
            try:
                opened(directory, 512, AHEAD).abandon()
            except Exception:
                pass
        log = opened(directory, 513, AHEAD)
        assert log.log_end == 10 + OFFSETS_AHEAD and everything(log) == [*range(10)]
        assert log.recovery.damaged == ()
        log.close()
        if calls[0] < number:
            break
    assert number > 1


def test_holes_that_cannot_be_read_are_told_and_what_they_name_is_missing(tmp_path: Path) -> None:
    lived(tmp_path)
    log = opened(tmp_path, 512, AHEAD)
    append(log, b"new")
    log.close()
    content = bytearray((tmp_path / FILE_NAME).read_bytes())
    content[20] ^= 1
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(Damage) as caught:
        holes_in(tmp_path)
    assert caught.value.facts["file"] == str(tmp_path / FILE_NAME)
    log = opened(tmp_path, 513, AHEAD)
    assert log.log_end == 11 + OFFSETS_AHEAD
    assert {record.file for record in log.recovery.damaged} >= {FILE_NAME}
    assert [(record.start, record.end) for record in log.recovery.damaged if record.start] == [
        (10, 10 + OFFSETS_AHEAD)
    ]
    log.close()


def test_a_file_of_holes_that_is_longer_than_any_harms_only_itself(tmp_path: Path) -> None:
    lived(tmp_path)
    opened(tmp_path, 512, AHEAD).close()
    os.truncate(tmp_path / FILE_NAME, 17 << 20)
    log = opened(tmp_path, 513)
    assert (FILE_NAME, "more than any") in [(found.file, found.why[-13:]) for found in log.recovery.damaged]
    assert len(read_all(log)[0]) == 10
    log.abandon()


def test_holes_decode_to_what_was_written(tmp_path: Path) -> None:
    holes = LocalHoles.load(tmp_path)
    assert not holes and holes.end == 0 and holes.at(3) is None
    holes.add(3, 7, 512, AHEAD)
    holes.add(9, 2**62, 768, OffsetJump(768, AHEAD.since_us + 1, "ä"))
    assert list(LocalHoles.load(tmp_path)) == list(holes) and LocalHoles.load(tmp_path).end == 2**62
    assert [holes.at(offset) is None for offset in (2, 3, 6, 7, 8, 9)] == [
        True,
        False,
        False,
        True,
        True,
        False,
    ]
    assert list(holes.uncovered(0, 2**62 + 1)) == [(0, 3), (7, 9), (2**62, 2**62 + 1)]
    assert list(holes.uncovered(4, 6)) == []


def test_holes_that_nobody_wrote_between_stay_until_what_is_behind_them_is_in_the_store(
    tmp_path: Path,
) -> None:
    holes = LocalHoles(tmp_path)
    for start, end in ((0, 100), (100, 200), (210, 300), (300, 400)):
        holes.add(start, end, 7, OffsetJump(7, end, "cut"))
    assert [holes.start_below(offset) for offset in (0, 100, 200, 205, 210, 400, 405)] == [
        0, 0, 0, 205, 210, 210, 405,
    ]  # fmt: skip
    manifest = Manifest.empty("/default/t", IDENTITY, 512, holes.start_below(200))
    first = adding([entry_at(200, 210)], holes)(manifest)
    assert first is not None and [hole[:2] for hole in first.all_holes()] == [(0, 200)]
    holes.forget_below(400)  # what was before them has left the disk, and nothing came before the next cut
    assert [hole[:2] for hole in holes] == [(210, 300), (300, 400)]
    second = adding([entry_at(400, 401)], holes)(first)
    assert second is not None and [hole[:2] for hole in second.all_holes()] == [(0, 200), (210, 400)]
    holes.forget_below(405)
    assert not holes


def test_the_manifest_names_the_hole_with_the_first_segment_behind_it(tmp_path: Path) -> None:
    lived(tmp_path)
    log = opened(tmp_path, 512, AHEAD)
    ahead = 10 + OFFSETS_AHEAD
    manifest = Manifest.empty("/default/t", IDENTITY, 512)
    before = adding([entry_at(0, 10)], log.holes)(manifest)
    assert before is not None and not len(before.holes)
    after = adding([entry_at(ahead, ahead + 1)], log.holes)(before)
    assert after is not None and [hole[:2] for hole in after.all_holes()] == [(10, ahead)]
    assert after.all_holes()[0].kind is HoleKind.UNUSED
    assert after.entry(1).flags & EntryFlag.HOLE_BEFORE
    assert Manifest.decode(after.encode()).all_holes() == after.all_holes()
    assert adding([entry_at(ahead, ahead + 1)], log.holes)(after) is None
    left = adding([], log.holes, left_end=ahead)(before)
    assert left is not None and left.all_holes() == after.all_holes() and left.uploaded_end == ahead
    both = adding([entry_at(0, 10)], log.holes, left_end=ahead)(manifest)
    assert both is not None and both.all_holes() == left.all_holes()
    assert adding([], log.holes, left_end=ahead)(manifest) is None, "what is below it comes first"
    assert adding([], log.holes, left_end=ahead)(left) is None
    assert adding([], log.holes, left_end=ahead + 1)(before) is None, "a segment comes behind it"
    log.close()


def test_histories_that_begin_with_one_copy_never_give_the_same_offset() -> None:
    """A second later is enough, whatever the first one has given since."""
    second, given = 1_000_000, 10_000_000
    first = offset_ahead(100, HISTORIES_SINCE_US + 5 * second)
    other = offset_ahead(100, HISTORIES_SINCE_US + 6 * second)
    assert other > first + given
    assert offset_ahead(first + given, HISTORIES_SINCE_US) >= first + given + OFFSETS_AHEAD
    assert offset_ahead(0, HISTORIES_SINCE_US + 17 * 365 * 86_400 * second) < 1 << 54


def test_verify_knows_the_hole_and_tells_of_its_file_when_that_is_damaged(tmp_path: Path) -> None:
    directory = tmp_path / "partitions" / IDENTITY.directory_name
    lived(directory)
    for epoch in (512, 513):  # the second finds it empty
        log = opened(directory, epoch, AHEAD)
        if epoch == 513:
            append(log, b"new")
        log.close()
        verified = Verified()
        verify_partition(directory, (IDENTITY.topic_id, IDENTITY.partition), verified)
        assert verified.findings == [] and verified.remarks == []
    content = bytearray((directory / FILE_NAME).read_bytes())
    content[-5] ^= 1
    (directory / FILE_NAME).write_bytes(content)
    verified = Verified()
    verify_partition(directory, (IDENTITY.topic_id, IDENTITY.partition), verified)
    assert {Path(one.where).name: one.kind for one in verified.findings} == {
        FILE_NAME: FindingKind.CHECKSUM,
        file_name(10 + OFFSETS_AHEAD): FindingKind.GAP,
    }


def test_holes_over_records_are_told(tmp_path: Path) -> None:
    lived(tmp_path)
    LocalHoles.load(tmp_path).add(5, 20, 256, AHEAD)
    verified = Verified()
    verify_partition(tmp_path, (IDENTITY.topic_id, IDENTITY.partition), verified)
    assert [(one.kind, one.start, one.end) for one in verified.findings] == [(FindingKind.OVERLAP, 5, 20)]
    LocalHoles.load(tmp_path).add(8, 30, 256, AHEAD)
    assert [problem.kind for problem in read_holes((tmp_path / FILE_NAME).read_bytes())[1]] == [
        FindingKind.OVERLAP
    ]
    with pytest.raises(Damage, match="overlap"):
        holes_in(tmp_path)


# -- which directory is a copy ------------------------------------------------------------------------


def used(path: Path) -> Path:
    """A data directory with a topic, as a broker has left it."""
    data = DataDir(path)
    data.next_incarnations(3)
    with LocalLog(path / "metadata") as log:
        log.propose(CreateTopic(topic="/default/t", partitions=0, policy=TopicPolicy(), created_us=0))
    assert settle_place(data) is None
    data.close()
    note_place(path)
    return path


def test_where_a_broker_was_before_is_no_copy(tmp_path: Path) -> None:
    used(tmp_path / "data")
    (tmp_path / "data").rename(tmp_path / "moved")
    assert not copied(tmp_path / "moved") and not copied(tmp_path / "nothing")


def test_a_copy_begins_a_history_in_which_older_logs_go_ahead(tmp_path: Path) -> None:
    used(tmp_path / "data")
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    assert copied(tmp_path / "copy") and not copied(tmp_path / "data")
    data = DataDir(tmp_path / "copy")
    history = settle_place(data)
    assert history is not None and settle_place(data) is None
    first = data.next_incarnations(1)
    data.close()
    assert first == 4 + INCARNATIONS_AHEAD and history.first_epoch == first * 256
    with LocalLog(tmp_path / "copy" / "metadata", create=False) as log:
        state = log.state.copy()
    assert recovery_of(state).history_id == history.history_id and state.topic("/default/t").topic_id == 1
    ahead = ahead_of(state, 1)
    assert ahead is not None and ahead.first_epoch == history.first_epoch
    assert ahead_of(state, state.next_topic_id) is None, "a topic of this history has given nothing before"
    assert ahead_of(recovered(state, History("c", 1)), 1) is None, "a cluster has reservations"


def test_a_copy_over_what_is_there_is_known_by_the_next_start(tmp_path: Path) -> None:
    """As ``cp -a`` does: the files stay, their content is an older one."""
    used(tmp_path / "data")
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    note_place(tmp_path / "data")
    (tmp_path / "data" / PLACE).write_bytes((tmp_path / "copy" / PLACE).read_bytes())
    assert copied(tmp_path / "data")


def test_a_place_that_says_nothing_is_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (b"", b"\0\0\0\0"):
        (tmp_path / PLACE).write_bytes(content)
        assert not copied(tmp_path)
    (tmp_path / PLACE).write_bytes(b"something else\nof four words")
    assert copied(tmp_path)
    monkeypatch.setattr(files, "born_ns_of", lambda fd: 0)  # a file system that does not know
    note_place(tmp_path)
    assert not copied(tmp_path)
    os.rename(shutil.copy(tmp_path / PLACE, tmp_path / "other"), tmp_path / PLACE)
    assert copied(tmp_path)


def test_a_full_disk_leaves_what_the_place_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note_place(tmp_path)

    def full(fd: int, data: bytes, position: int) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr(files, "write_all", full)
    note_place(tmp_path)
    assert not copied(tmp_path) and [path.name for path in tmp_path.iterdir()] == [PLACE]
