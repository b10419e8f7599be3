"""What vanished from a partition is missed, because a file outside its directory says what was there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from danube.broker.partition.opening import open_partition
from danube.broker.processes.removing import put_aside, remove_directory
from danube.cluster.log.local_log import LocalLog
from danube.core.metadata.commands import CreateTopic, TopicRecord
from danube.core.partition.partition import OffsetBudget
from danube.core.partition.policy import TopicPolicy
from danube.core.placement.recovered import OFFSETS_AHEAD
from danube.errors import OffsetOutOfRange
from danube.wal.log.cursors import FILE_NAMES, PROOF_NAME, CursorStore
from danube.wal.log.log import Log
from danube.wal.recovery.witness import Witness, witness_path
from danube.wal.segments.segment import LogIdentity, file_name, log_id_of
from danube.wal.verify.broker import read_witness
from danube.wal.verify.bytes import FindingKind
from danube.wal.verify.tree import Verified, verify_tree
from tests.unit.broker_parts import CountingCounters
from tests.unit.wal_samples import SMALL, append, read_all, roll, sync

TOPIC = "/default/orders"
IDENTITY = LogIdentity(1, 0)
LOG_ID = log_id_of(TOPIC, 1, 1_000)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with LocalLog(tmp_path / "metadata") as log:
        log.propose(CreateTopic(topic=TOPIC, policy=TopicPolicy(), created_us=1_000))
    return tmp_path / "partitions" / IDENTITY.directory_name


def opened(directory: Path, epoch: int, *, holds_all: bool = True) -> Log:
    witness = Witness.load(witness_path(directory), LOG_ID, holds_all=holds_all)
    return Log.open(directory, IDENTITY, epoch, SMALL._replace(log_id=LOG_ID), witness=witness)


def lived(directory: Path, *, rolled: int = 3, last: int = 1) -> None:
    """Segments of two records each, and one that was not sealed."""
    log = opened(directory, 1)
    for _ in range(rolled):
        append(log, b"one", b"two")
        log.write()
        sync(log)
        roll(log, b"producers")
    for _ in range(last):
        append(log, b"last")
    log.write()
    sync(log)
    log.store_mark()
    log.abandon()


def found_in(data_dir: Path) -> list[tuple[FindingKind, int, int]]:
    verified = Verified()
    verify_tree(data_dir, verified)
    return [(one.kind, one.start, one.end) for one in verified.findings if one.end or one.start]


def test_an_untouched_log_is_not_missed(directory: Path) -> None:
    for _ in range(2):
        lived(directory, rolled=2) if not directory.exists() else opened(directory, 2).close()
        assert found_in(directory.parents[1]) == []
    log = opened(directory, 3)
    assert not log.recovery.damaged and not log.holes and log.log_end == 5
    log.abandon()


def test_a_directory_that_is_gone_is_named_and_no_offset_is_given_again(directory: Path) -> None:
    lived(directory)
    shutil.rmtree(directory)
    assert found_in(directory.parents[1]) == [(FindingKind.MISSING, 0, 6)]
    log = opened(directory, 2)
    assert log.start == 0 and log.log_end >= OFFSETS_AHEAD
    assert (0, 6) in [(one.start, one.end) for one in log.recovery.damaged]
    assert any("directory is gone" in one.why for one in log.recovery.damaged)
    ((hole_start, hole_end),) = [hole[:2] for hole in log.holes]
    assert (hole_start, hole_end) == (6, log.log_end)
    chunk = log.read(0, log.log_end)
    assert not chunk.data and chunk.next_offset == 6 and chunk.damage
    append(log, b"new")
    log.write()
    first = log.log_end - 1
    log.close()
    again = opened(directory, 3)
    assert list(read_all(again, hole_end)[0]) == [first] and again.log_end == first + 1
    assert [hole[:2] for hole in again.holes] == [(6, first)], "it is told once"
    again.abandon()


@pytest.mark.parametrize("marked", [True, False])
def test_segments_that_are_all_gone_are_named(directory: Path, marked: bool) -> None:
    lived(directory)
    for path in directory.iterdir():
        if path.suffix == ".seg" or not marked:
            path.unlink()
    log = opened(directory, 2)
    assert log.start == 0 and log.log_end >= OFFSETS_AHEAD
    assert (0, 7 if marked else 6) in [(one.start, one.end) for one in log.recovery.damaged]
    log.abandon()


def test_a_log_of_one_segment_that_is_gone_goes_far_ahead(directory: Path) -> None:
    lived(directory, rolled=0)
    shutil.rmtree(directory)
    directory.mkdir()
    log = opened(directory, 2)
    assert log.log_end >= OFFSETS_AHEAD and any("all segments" in one.why for one in log.recovery.damaged)
    log.abandon()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_first_segments_that_are_gone_are_told_to_readers(directory: Path, count: int) -> None:
    lived(directory)
    for number in range(count):
        (directory / file_name(2 * number)).unlink()
    assert found_in(directory.parents[1]) == [(FindingKind.MISSING, 0, 2 * count)]
    for epoch in (2, 3):
        log = opened(directory, epoch)
        assert (log.start, log.log_end) == (0, 7)
        held, damaged = read_all(log)
        assert list(held) == list(range(2 * count, 7)) and (0, 2 * count) in damaged
        assert (0, 2 * count) in [(one.start, one.end) for one in log.recovery.damaged]
        log.abandon()
    assert FindingKind.GAP in [kind for kind, *_ in found_in(directory.parents[1])]


def test_what_retention_deletes_is_not_missed(directory: Path) -> None:
    lived(directory)
    log = opened(directory, 2)
    log.evict(4)
    log.abandon()
    again = opened(directory, 3)
    assert again.start == 4 and not again.recovery.damaged and found_in(directory.parents[1]) == []
    again.evict(7, sealed=False)
    again.abandon()
    last = opened(directory, 4)
    assert last.start == last.log_end == 7 and not last.recovery.damaged and not last.holes
    last.abandon()


def test_the_witness_hears_of_deletions_first(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lived(directory)
    log = opened(directory, 2)

    def fails(*_: object) -> None:
        raise OSError("not deleted")

    monkeypatch.setattr("danube.wal.log.log.remove", fails)
    with pytest.raises(Exception, match="cannot be deleted"):
        log.evict(4)
    assert Witness.load(witness_path(directory), LOG_ID).start == 4
    log.abandon()
    again = opened(directory, 3)
    assert again.start == 0 and not again.recovery.damaged
    again.abandon()


def test_a_log_in_tiers_tells_and_leaves_the_offsets_to_the_store(directory: Path) -> None:
    lived(directory)
    (directory / file_name(0)).unlink()
    log = opened(directory, 2, holds_all=False)
    assert log.start == 2 and [one.why[:14] for one in log.recovery.damaged] == ["the first segm"]
    with pytest.raises(OffsetOutOfRange):
        log.read(0, 7)
    log.abandon()
    shutil.rmtree(directory)
    log = opened(directory, 3, holds_all=False)
    assert log.start == log.log_end >= OFFSETS_AHEAD
    assert [hole[:2] for hole in log.holes] == [(7, log.log_end)]
    log.abandon()


def test_a_directory_without_a_witness_opens_as_before(directory: Path) -> None:
    lived(directory)
    for path in witness_path(directory).parent.iterdir():
        path.unlink()
    (directory / file_name(0)).unlink()
    log = opened(directory, 2)
    assert log.start == 2 and not log.recovery.damaged
    log.abandon()


@pytest.mark.parametrize("content", [b"", b"\0" * 80, b"x", b"00000000 {}\n"])
def test_a_witness_that_cannot_be_read_says_nothing(directory: Path, content: bytes) -> None:
    lived(directory)
    witness_path(directory).write_bytes(content)
    shutil.rmtree(directory)
    log = opened(directory, 2)
    assert log.log_end == 0 and not log.recovery.damaged
    log.abandon()
    assert Witness.load(witness_path(directory), LOG_ID).known


def test_a_strangers_witness_says_nothing(directory: Path) -> None:
    Witness(witness_path(directory), b"x" * 16).note_log(5, 9, began=True)
    log = opened(directory, 1)
    assert log.log_end == 0 and not log.recovery.damaged
    log.abandon()


def test_a_full_disk_keeps_nobody_waiting(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    witness = Witness(witness_path(directory), LOG_ID)

    def full(*_: object) -> None:
        raise OSError(28, "full")

    with monkeypatch.context() as patched:
        patched.setattr("danube.host.files.open_new", full)
        witness.note_log(0, 5, began=True)
    assert not witness_path(directory).exists()
    witness.note_log(0, 5, began=True)
    assert Witness.load(witness_path(directory), LOG_ID).end == 5


def test_the_thread_that_seals_tells_of_a_roll_and_a_closed_log_is_told_of_no_more(directory: Path) -> None:
    path = witness_path(directory)
    log = opened(directory, 1)
    for _ in range(2):
        for payload in (b"x", b"y"):
            append(log, payload)
            log.write()
            sync(log)
        job = log.roll()
        assert job is not None and Witness.load(path, LOG_ID).end < log.log_end, "not on the loop"
        job.run()
        assert Witness.load(path, LOG_ID).end == log.log_end
        log.sealed(job)
    append(log, b"x")
    log.write()
    sync(log)
    job = log.roll()
    assert job is not None
    log.abandon()
    path.unlink()  # as where the topic is deleted
    job.run()
    assert not path.exists()


def test_a_log_that_is_opened_anew_with_its_witness_tells_of_rolls_again(directory: Path) -> None:
    """As after a disk has failed: the worker goes on, under another epoch."""
    log = opened(directory, 1)
    log.abandon()
    log = Log.open(directory, IDENTITY, 2, SMALL._replace(log_id=LOG_ID), witness=log.witness)
    for payload in (b"x", b"y"):
        append(log, payload)
        log.write()
        sync(log)
    job = log.roll()
    assert job is not None
    job.run()
    assert Witness.load(witness_path(directory), LOG_ID).end == log.log_end == 2
    log.sealed(job)
    log.abandon()


def test_the_independent_reader_reads_what_is_written(directory: Path) -> None:
    path = witness_path(directory)
    witness = Witness(path, LOG_ID)
    witness.note_log(3, 9, began=True)
    witness.note_subscriptions(["b", "ä"])
    facts, flaw = read_witness(path.read_bytes())
    assert flaw is None and (facts.start, facts.end, facts.began) == (3, 9, True)
    assert facts.subscriptions == {"b", "ä"} == Witness.load(path, LOG_ID).subscriptions
    data = path.read_bytes()
    for position in range(len(data) - 1):
        assert read_witness(data[:position] + b"?" + data[position + 1 :])[1] is not None
    assert data == GOLDEN


GOLDEN = (
    b'15bebd13 {"format":1,"log_id":"387873aaaa88f2b7e43abbba5563704f","began":true,"start":3,"end":9,'
    b'"subscriptions":["b","\xc3\xa4"]}\n'
)


def test_a_member_of_a_cluster_has_none(directory: Path) -> None:
    lived(directory)
    shutil.rmtree(directory)
    (directory.parents[1] / "raft").mkdir()
    assert found_in(directory.parents[1]) == []
    record = TopicRecord(TOPIC, 1, 0, TopicPolicy(), 1_000)
    budget = OffsetBudget(1 << 20)
    opened_here = open_partition(directory.parent, TOPIC, record, 0, 256, SMALL, CountingCounters(), budget)
    assert not witness_path(directory).exists()
    assert opened_here.log is not None and opened_here.log.witness is None
    opened_here.log.abandon()


@pytest.mark.parametrize("way", ["removed", "half removed", "put aside"])
def test_a_partition_that_is_no_more_has_no_witness(directory: Path, way: str) -> None:
    lived(directory)
    if way == "half removed":
        directory.rename(directory.with_name(directory.name + ".removed"))
        remove_directory(directory.with_name(directory.name + ".removed"))
    elif way == "removed":
        remove_directory(directory)
    else:
        put_aside(directory, directory.parents[1])
    assert not directory.exists() and not witness_path(directory).exists()
    put_aside(directory, directory.parents[1])


# -- subscriptions ---------------------------------------------------------------------------------


def cursors(directory: Path) -> CursorStore:
    directory.mkdir(parents=True, exist_ok=True)
    store = CursorStore(directory, IDENTITY, witness=Witness.load(witness_path(directory), LOG_ID))
    store.load()
    return store


def stored(store: CursorStore) -> None:
    store.write()
    job = store.sync_job()
    assert job is not None
    job.run()
    store.synced(job)


def test_a_lost_cursor_is_named_until_it_comes_back_or_is_dropped(directory: Path) -> None:
    store = cursors(directory)
    for name in ("back", "dropped", "kept away"):
        store.store(name, b"1")
    stored(store)
    store.close()
    for name in (*FILE_NAMES, PROOF_NAME):
        (directory / name).unlink()
    store = cursors(directory)
    assert store.lost == {"back", "dropped", "kept away"}
    store.store("another", b"1")  # makes the files anew
    stored(store)
    store.close()
    store = cursors(directory)
    assert store.lost == {"back", "dropped", "kept away"} and not store.damage
    store.store("back", b"2")
    store.remove("dropped")
    stored(store)
    store.close()
    store = cursors(directory)
    assert store.lost == {"kept away"}
    store.close()
    verified = Verified()
    verify_tree(directory.parents[1], verified)
    assert [one.what.split("'")[1] for one in verified.findings if one.kind is FindingKind.MISSING] == [
        "kept away"
    ]


def test_what_was_removed_or_never_stored_is_not_missed(directory: Path) -> None:
    store = cursors(directory)
    store.store("a", b"1")
    store.store("b", b"1")
    stored(store)
    store.store("c", b"1")
    store.write()  # not synced: a power cut may take it
    assert Witness.load(witness_path(directory), LOG_ID).subscriptions == {"a", "b"}
    store.remove("a")
    assert Witness.load(witness_path(directory), LOG_ID).subscriptions == {"b"}
    store.close()
    store = cursors(directory)  # the removal was never written
    assert store.lost == set() and Witness.load(witness_path(directory), LOG_ID).subscriptions == {
        "a", "b", "c",
    }  # fmt: skip
    store.remove("a")
    store.write()
    Witness.load(witness_path(directory), LOG_ID).note_subscriptions(["a", "b"])  # an older one
    store.close()
    store = cursors(directory)
    assert store.lost == set() and Witness.load(witness_path(directory), LOG_ID).subscriptions == {"b", "c"}
    store.close()
