"""After the end of a machine no offset is given twice; after the end of a process none is left out."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import msgspec
import pytest

from danube.broker.processes import unbroken
from danube.broker.processes.unbroken import Since, begin, end
from danube.core.placement.recovered import LOG_EPOCHS
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.host import files
from danube.limits import UNSYNCED_RECORDS_MAX
from danube.wal.segments.local_holes import OffsetJump
from danube.wal.verify.tree import Verified, verify_tree
from tests.unit.broker_parts import TOPIC, Bench, RecordingSession, batch, expected, numbered
from tests.unit.failing_files import FailingFiles

# -- the file -------------------------------------------------------------------------------------


def move(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(unbroken, "place_of", lambda path: place)


def test_a_process_that_was_killed_breaks_nothing(tmp_path: Path) -> None:
    for incarnation in (1, 5, 9):
        assert begin(tmp_path, incarnation) == Since()


def test_another_place_after_an_orderly_stop_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(files, "syncfs", synced.append)
    move(monkeypatch, "one boot")
    begin(tmp_path, 1)
    end(tmp_path)
    assert len(synced) == 1, "also what an earlier process left behind is on the disk then"
    move(monkeypatch, "another")
    assert begin(tmp_path, 5) == Since()


def test_another_place_without_one_breaks_what_was_written_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move(monkeypatch, "one boot")
    begin(tmp_path, 1)
    move(monkeypatch, "another")
    since = begin(tmp_path, 5)
    assert since.incarnation == 5 and since.moment_us > 0
    assert begin(tmp_path, 9) == since, "what was not opened meanwhile is as it was"
    end(tmp_path)
    move(monkeypatch, "a third")
    assert begin(tmp_path, 13) == since
    move(monkeypatch, "a fourth")
    assert begin(tmp_path, 17).incarnation == 17


def test_what_cannot_be_told_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path, 1)
    (tmp_path / "host").write_bytes(b"{" + bytes(511))
    assert begin(tmp_path, 5).incarnation == 5
    move(monkeypatch, "")
    assert begin(tmp_path, 9).incarnation == 9
    assert begin(tmp_path, 13).incarnation == 13


@pytest.mark.parametrize("orderly", [True, False])
def test_a_file_that_vanished_under_a_broker_leaves_nothing_to_trust(tmp_path: Path, orderly: bool) -> None:
    """Offsets that were shown and not synced would be given again after a power cut."""
    begin(tmp_path, 1)
    (tmp_path / "host").unlink()
    if orderly:
        end(tmp_path)
    since = begin(tmp_path, 5)
    assert since.incarnation == 5 and since.moment_us > 0
    assert begin(tmp_path, 9) == since


def test_a_copy_of_the_directory_is_another_place(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    begin(tmp_path / "one", 1)
    (tmp_path / "two" / "host").write_bytes((tmp_path / "one" / "host").read_bytes())
    assert begin(tmp_path / "two", 5).incarnation == 5


def test_a_start_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FailingFiles(monkeypatch)
    disk.arm(0, errno.ENOSPC, lasting=True)
    assert begin(tmp_path, 1) == Since() and not (tmp_path / "host").exists()
    assert begin(tmp_path, 3).incarnation == 3 and not (tmp_path / "host").exists()
    disk.disarm()
    begin(tmp_path, 5)
    inode, size = (tmp_path / "host").stat().st_ino, (tmp_path / "host").stat().st_size
    begin(tmp_path, 9)
    end(tmp_path)
    end(tmp_path / "none")
    status = (tmp_path / "host").stat()
    assert (status.st_ino, status.st_size) == (inode, size) == (inode, 512)


def test_the_place_names_boot_and_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "host").touch()
    assert len(unbroken.place_of(tmp_path / "host").split()) == 4
    assert unbroken.place_of(tmp_path / "none") == ""
    monkeypatch.setattr(files, "_libc", object())
    assert unbroken.place_of(tmp_path / "host") == "", "a library without statx"


# -- a partition ----------------------------------------------------------------------------------


def opened(root: Path, incarnation: int, lost_before: int, **policy: Any) -> Bench:
    """A worker of a later start; what was written before ``lost_before`` may have been lost."""
    bench = Bench(root, **policy)
    bench.shard._epoch = incarnation * LOG_EPOCHS
    bench.shard.unbroken_since = Since(lost_before, lost_before)
    bench.shard.open(TOPIC, lambda outcome: None)
    return bench


def holes(bench: Bench) -> list[tuple[int, int]]:
    return [(hole["start"], hole["end"]) for hole in bench.hosted.statistics()["holes"]]


def filled(root: Path, **policy: Any) -> RecordingSession:
    """A broker that took 20 records, of which a consumer has had 15, and that is gone."""
    session = RecordingSession()
    bench = Bench(root, **policy)
    bench.open_producer(session)
    bench.publish(session, numbered(20))
    bench.turn()
    bench.syncer.step()
    session.take()
    bench.subscribe(session, start="earliest", mode="exclusive", credit_records=15)
    bench.turn()
    assert session.records() == expected(0, 15)
    bench.ack(session, 0, 15)
    bench.shard.store_cursors()
    return session


def test_numbering_goes_on_behind_all_that_may_have_been_seen(tmp_path: Path) -> None:
    filled(tmp_path)
    bench = opened(tmp_path, 5, 5)
    start = 20 + UNSYNCED_RECORDS_MAX
    assert holes(bench) == [(20, start)]
    session = RecordingSession(2)
    bench.open_producer(session)
    bench.publish(session, numbered(2, 20))
    bench.turn()
    assert session.only(Kind.PUBLISHED) and bench.hosted.core.log_end == start + 2
    bench.subscribe(session, start="earliest", mode="exclusive")
    received: list[tuple[int, bytes]] = []
    for _ in range(6):
        bench.turn()
        received += session.records()
        bench.ack(session, 15, 20)
    assert received == [*expected(15, 20), (start, b"20"), (start + 1, b"21")]
    bench.ack(session, 15, start + 2)
    assert bench.hosted.subscriptions["s"].core.ack_floor == start + 2
    bench.shard.close()
    found = Verified()
    verify_tree(tmp_path, found)
    assert not found.findings
    for incarnation in (6, 7):  # once is enough
        bench = opened(tmp_path, incarnation, 5)
        assert bench.hosted.core.log_end == start + 2 and len(holes(bench)) == 1
        bench.shard.close()
    bench = opened(tmp_path, 9, 9)
    assert bench.hosted.core.log_end == start + 2 + UNSYNCED_RECORDS_MAX
    bench.shard.close()


@pytest.mark.parametrize("lost", ["the last file", "all files"])
def test_also_where_the_file_itself_is_lost(tmp_path: Path, lost: str) -> None:
    filled(tmp_path)
    directory = next(tmp_path.glob("*-0"))
    for path in directory.iterdir():
        if path.suffix == ".seg" or lost == "all files":
            path.unlink()
    bench = opened(tmp_path, 5, 5)
    assert bench.hosted.core.log_end >= 20 and bench.hosted.core.log_end >= UNSYNCED_RECORDS_MAX
    bench.shard.close()


def test_a_topic_without_a_record_is_passed_over_by_nobody_after_several_cuts(tmp_path: Path) -> None:
    session = RecordingSession()
    bench = Bench(tmp_path)
    bench.subscribe(session, start="earliest", mode="exclusive")
    bench.turn()
    bench.shard.store_cursors()
    for cut in (5, 6, 7):
        bench = opened(tmp_path, cut, cut)
    end = 3 * UNSYNCED_RECORDS_MAX
    assert holes(bench)[0][0] == 0 and holes(bench)[-1][1] == end == bench.hosted.core.log_end
    session = RecordingSession(2)
    bench.open_producer(session)
    bench.publish(session, numbered(2))
    bench.subscribe(session, start="earliest", mode="exclusive")
    received: list[tuple[int, bytes]] = []
    for _ in range(4):
        bench.turn()
        received += session.records()
    assert received == [(end, b"0"), (end + 1, b"1")]
    counts = bench.hosted.subscriptions["s"].statistics(0)
    assert (counts["expired"], counts["damaged"]) == (0, 0)
    bench.shard.close()


def test_fsync_topics_and_later_topics_leave_nothing_out(tmp_path: Path) -> None:
    filled(tmp_path / "fsync", durability="fsync")
    bench = opened(tmp_path / "fsync", 5, 5, durability="fsync")
    assert bench.hosted.core.log_end == 20 and holes(bench) == []
    bench.shard.close()
    later = Bench(tmp_path / "later")
    later.topics[TOPIC] = msgspec.structs.replace(later.record, created_us=7)
    later.shard.unbroken_since = Since(1 << 20, 7)
    later.shard.open(TOPIC, lambda outcome: None)
    assert later.hosted.core.log_end == 0
    later.shard.close()


def test_a_copy_that_is_put_back_after_a_cut_goes_far_ahead(tmp_path: Path) -> None:
    filled(tmp_path)
    bench = Bench(tmp_path)
    bench.shard._epoch = 7 * LOG_EPOCHS
    bench.shard.unbroken_since = Since(5, 5)
    bench.shard.ahead_of = lambda topic_id: OffsetJump(4 * LOG_EPOCHS, 4, "a copy")
    bench.shard.open(TOPIC, lambda outcome: None)
    assert bench.hosted.core.log_end > 1 << 40
    bench.shard.close()


@pytest.mark.parametrize("step", range(12))
def test_a_crash_while_it_is_opened_gives_no_offset_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """There is no mark, so that the tail is carried over into a file of the new epoch."""
    filled(tmp_path)
    assert not list(tmp_path.glob("*-0/mark"))
    failing = FailingFiles(monkeypatch)
    failing.arm(step, errno.EIO)
    opened_to: list[Any] = []
    bench = Bench(tmp_path)
    bench.shard._epoch = 5 * LOG_EPOCHS
    bench.shard.unbroken_since = Since(5, 5)
    bench.shard.open(TOPIC, opened_to.append)
    failing.disarm()
    again = opened(tmp_path, 6, 5)
    assert again.hosted.core.log_end >= 20 + UNSYNCED_RECORDS_MAX
    assert again.stored()[:20] == expected(0, 20)
    again.shard.close()


def test_resends_are_known_behind_what_was_left_out(tmp_path: Path) -> None:
    bench, session = Bench(tmp_path), RecordingSession()
    made = bench.open_producer(session)
    fields = {"producer_id": made.producer_id, "producer_epoch": made.epoch}
    raw = numbered(2, base_sequence=0, **fields)
    bench.publish(session, raw)
    bench.turn()
    bench.syncer.step()
    again, later = opened(tmp_path, 5, 5), RecordingSession(2)
    again.ask(later, Kind.OPEN_PRODUCER, wire.OpenProducer(TOPIC, "p", made.producer_id, made.epoch), 1)
    later.only(Kind.PRODUCER_OPENED)
    again.publish(later, raw)
    again.publish(later, batch(b"next", base_sequence=2, **fields))
    again.turn()
    assert again.hosted.core.log_end == 2 + UNSYNCED_RECORDS_MAX + 1
    assert again.counters["duplicates"] == 1
    again.shard.close()
