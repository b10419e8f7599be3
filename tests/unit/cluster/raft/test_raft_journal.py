"""A member's journal: what was synced is there again, and nothing else, whatever happens."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from danube.cluster.log import log_file
from danube.cluster.raft.disk import DirectoryDisk
from danube.cluster.raft.engine import Members
from danube.cluster.raft.entries import HardState, RaftLog
from danube.cluster.raft.entry import COMMAND, Entry, members_entry
from danube.cluster.raft.journal import Base, Identity, Journal, Promise, Staged
from danube.errors import (
    ClosedError,
    Damage,
    DanubeError,
    InvariantBroken,
    StorageFailed,
    StorageFull,
    StorageIncompatible,
)
from danube.host import files
from danube.limits import RAFT_ENTRY_BYTES_MAX, RAFT_SNAPSHOT_PART_BYTES
from tests.model.raft_world import MemoryDisk
from tests.unit.failing_files import FailingFiles, Killed
from tests.unit.wal_samples import memory_directory

IDENTITY = Identity("cluster", "a")
MEMBERS = Members({"a": "a:1", "b": "b:1"})
State = tuple[int, str | None, int, bytes, tuple[Entry, ...]]  # term, vote, base, snapshot, entries


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """Thousands of small files: in memory."""
    with memory_directory(tmp_path) as directory:
        yield directory


def entry(number: int, term: int = 1, size: int = 10) -> Entry:
    return Entry(term, COMMAND, bytes([number % 256]) * size)


class Script:
    """A fixed life of a member; ``states`` are what it had been told was stored, one after the other."""

    def __init__(self, disk: Any) -> None:
        self.journal = Journal(disk)
        self.states: list[State | None] = [None]  # the last one may be on its way

    def run(self) -> None:
        recovered = self.journal.recover()
        if recovered is None:
            self._begin((0, None, 0, b"", ()))
            self.journal.create(IDENTITY, MEMBERS)
        self._step(1, "a", [])
        self._step(1, "a", [(1, [entry(1), entry(2), entry(3)])])
        self._step(2, None, [(2, [entry(9, 2)])])
        self._step(2, "b", [(3, [entry(8, 2)]), (4, [entry(7, 2, 5_000)])])
        self._compact(b"snapshot" * 40, 2)
        self._step(3, "b", [(5, [entry(6, 3)])])
        self._step(3, "b", [(3, [entry(5, 3)])])

    def _begin(self, state: State) -> None:
        self.states.append(state)

    def _step(self, term: int, vote: str | None, puts: list[tuple[int, list[Entry]]]) -> None:
        _, _, base, snapshot, entries = self.states[-1] or (0, None, 0, b"", ())
        for first, new in puts:
            entries = (*entries[: first - base - 1], *new)
        self._begin((term, vote, base, snapshot, entries))
        self.journal.promise(term, vote)
        for first, new in puts:
            self.journal.put(first, new)
        self.journal.sync()

    def _compact(self, snapshot: bytes, base: int) -> None:
        term, vote, former, _, entries = self.states[-1] or (0, None, 0, b"", ())
        kept = entries[base - former :]
        self._begin((term, vote, base, snapshot, kept))
        staged = stage(self.journal, Base(base, 2, base, 2, MEMBERS, 0), snapshot)
        self.journal.complete(staged, Promise(term, vote), kept)


def stage(journal: Journal, base: Base, snapshot: bytes) -> Staged:
    """As its owner does: what fails in the other thread ends the journal."""
    try:
        return journal.stage(base, snapshot)
    except BaseException as error:
        told = journal.failed(error)
        if told is error:
            raise
        raise told from error


def state_of(journal: Journal) -> State | None:
    found = journal.recover()
    if found is None:
        return None
    assert found.identity == IDENTITY and found.base.members == MEMBERS
    promise = found.promise
    return promise.term, promise.voted_for, found.base.index, journal.snapshot(), tuple(found.entries)


def reopened(directory: Path) -> State | None:
    journal = Journal(DirectoryDisk(directory))
    try:
        return state_of(journal)
    finally:
        journal.close()


@contextmanager
def lived(directory: Path) -> Iterator[Script]:
    script = Script(DirectoryDisk(directory))
    script.run()
    yield script
    script.journal.close()


def test_what_was_synced_is_there_again(tmp_path: Path) -> None:
    with lived(tmp_path) as script:
        pass
    assert reopened(tmp_path) == script.states[-1]
    assert reopened(tmp_path) == script.states[-1]


def test_what_was_only_noted_is_not(tmp_path: Path) -> None:
    with lived(tmp_path) as script:
        script.journal.promise(9, "z")
        assert script.journal.dirty
    assert reopened(tmp_path) == script.states[-1]


def test_every_bit_flip_is_found_or_changes_nothing(tmp_path: Path) -> None:
    with lived(tmp_path) as script:
        pass
    content = (tmp_path / "raft.log").read_bytes()
    for place in range(len(content) * 8):
        # The large entry is all alike; a few of its bits stand for all.
        if 1_000 < place // 8 < len(content) - 700 and place % 211:
            continue
        disk = MemoryDisk()
        disk.content = bytearray(content)
        disk.content[place // 8] ^= 1 << place % 8
        flipped = bytes(disk.content)
        try:
            assert state_of(Journal(disk)) == script.states[-1], place
        except (Damage, StorageIncompatible) as error:
            assert bytes(disk.content) == flipped, error
            assert isinstance(error, StorageIncompatible) or error.facts["file"] == disk.path
            assert isinstance(error, StorageIncompatible) or "journal is damaged at position" in str(error)


def test_every_cut_below_the_mark_is_damage(tmp_path: Path) -> None:
    with lived(tmp_path):
        pass
    path = tmp_path / "raft.log"
    content = path.read_bytes()
    for size in range(0, len(content), 7):
        path.write_bytes(content[:size])
        with pytest.raises(Damage, match=r"damaged at position|gone"):
            reopened(tmp_path)


def test_every_cut_of_a_step_behind_the_mark_loses_that_step_only(tmp_path: Path) -> None:
    with lived(tmp_path) as script:
        pass
    path = tmp_path / "raft.log"
    content = path.read_bytes()
    mark = len(content)
    whole = (4, "c", *script.states[-1][2:])  # type: ignore[index]
    journal = Journal(DirectoryDisk(tmp_path))
    state_of(journal)
    journal.promise(4, "c")
    journal.sync()
    journal.close()
    longer = bytearray(path.read_bytes())
    longer[24:40] = log_file.pack_mark(mark)  # as after a power cut: the step is synced, the mark is not
    for size in range(mark, len(longer) + 1):
        path.write_bytes(longer[:size])
        expected = whole if size == len(longer) else script.states[-1]
        assert reopened(tmp_path) == expected, size
        assert reopened(tmp_path) == expected, size
        zeros = longer[:size] + bytes(len(longer) - size)  # the file grew, its last sectors did not arrive
        path.write_bytes(zeros)
        assert reopened(tmp_path) == (whole if zeros == longer else expected), size


def test_a_whole_step_after_a_torn_one_is_damage(tmp_path: Path) -> None:
    with lived(tmp_path):
        pass
    path = tmp_path / "raft.log"
    content = bytearray(path.read_bytes())
    mark = len(content)
    for term in (5, 6):
        journal = Journal(DirectoryDisk(tmp_path))
        state_of(journal)
        journal.promise(term, None)
        journal.sync()
        journal.close()
    content = bytearray(path.read_bytes())
    content[24:40] = log_file.pack_mark(mark)
    content[mark + 17] ^= 4
    path.write_bytes(content)
    with pytest.raises(Damage, match="a whole one follows"):
        reopened(tmp_path)


@pytest.mark.parametrize("kind", ["killed", "killed after", "short"])
def test_killed_at_any_call_it_has_what_it_said_or_what_it_was_about_to_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    disk = FailingFiles(monkeypatch)
    for at in range(200):
        directory = tmp_path / str(at)
        directory.mkdir()
        disk.arm(at, kind)
        script = None
        try:
            script = Script(DirectoryDisk(directory))
            script.run()
            script.journal.close()
        except Killed:
            pass
        fired = disk.fired
        disk.disarm()
        if script is not None:
            assert reopened(directory) in script.states[-2:] if fired else [script.states[-1]]
            Script(DirectoryDisk(directory)).run()  # and it can go on
        if not fired and at > len(disk.calls):
            return
    raise AssertionError("the script makes more calls than were tried")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_storage_error_ends_the_journal_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    disk = FailingFiles(monkeypatch)
    expected = StorageFull if number == errno.ENOSPC else StorageFailed
    fired = 0
    for at in range(60):
        directory = tmp_path / str(at)
        directory.mkdir()
        script = Script(DirectoryDisk(directory))
        disk.arm(at, number)
        try:
            script.run()
        except DanubeError as error:
            assert type(error) is expected
            fired += 1
            count = len(disk.calls)
            for action in (script.journal.sync, script.journal.snapshot):
                with pytest.raises(ClosedError):
                    action()
            script.journal.close()
            assert len(disk.calls) == count, "a call after the error"
        disk.disarm()
        script.journal.close()
        assert reopened(directory) in script.states[-2:]
    assert fired > 10


def test_a_journal_that_is_gone_is_not_a_new_member(tmp_path: Path) -> None:
    with lived(tmp_path):
        pass
    (tmp_path / "raft.log").unlink()
    with pytest.raises(Damage, match="journal is gone"):
        reopened(tmp_path)


def test_a_directory_is_one_members_at_a_time(tmp_path: Path) -> None:
    with lived(tmp_path), pytest.raises(StorageFailed, match="running member"):
        DirectoryDisk(tmp_path)


def test_a_leftover_of_a_compaction_is_removed(tmp_path: Path) -> None:
    with lived(tmp_path) as script:
        pass
    (tmp_path / "raft.new").write_bytes(b"half")
    assert reopened(tmp_path) == script.states[-1]
    assert not (tmp_path / "raft.new").exists()


def test_a_snapshot_is_read_in_parts(tmp_path: Path) -> None:
    snapshot = random.Random(3).randbytes(2 * RAFT_SNAPSHOT_PART_BYTES + 77)
    journal = Journal(DirectoryDisk(tmp_path))
    journal.recover()
    journal.create(IDENTITY, MEMBERS)
    journal.complete(journal.stage(Base(5, 1, 5, 1, MEMBERS, 0), snapshot), Promise(1, None), [])
    for _ in range(2):
        assert journal.snapshot() == snapshot
        assert (
            journal.snapshot_part(RAFT_SNAPSHOT_PART_BYTES + 5)
            == snapshot[RAFT_SNAPSHOT_PART_BYTES + 5 : 2 * RAFT_SNAPSHOT_PART_BYTES]
        )
        assert journal.snapshot_part(len(snapshot)) == b""
        journal.close()
        journal = Journal(DirectoryDisk(tmp_path))
        journal.recover()
    journal.close()


def test_the_largest_entries_fit_and_share_no_step(tmp_path: Path) -> None:
    journal = Journal(DirectoryDisk(tmp_path, synced=False))
    journal.recover()
    journal.create(IDENTITY, MEMBERS)
    large = [entry(number, 1, RAFT_ENTRY_BYTES_MAX) for number in range(3)]
    journal.put(1, large)
    journal.sync()
    journal.close()
    assert reopened(tmp_path) == (0, None, 0, b"", tuple(large))


def test_a_file_of_a_newer_format_is_left_alone(tmp_path: Path) -> None:
    with lived(tmp_path):
        pass
    path = tmp_path / "raft.log"
    content = path.read_bytes()
    path.write_bytes(b"DNL9" + content[4:])
    with pytest.raises(StorageIncompatible):
        reopened(tmp_path)


@pytest.mark.parametrize(
    "write",
    [
        lambda journal: journal.put(7, [entry(1)]),  # not next to anything
        lambda journal: journal.promise(0, "z"),  # back to an older term
    ],
)
def test_steps_that_no_member_takes_are_damage(tmp_path: Path, write: Callable[[Journal], None]) -> None:
    journal = Journal(DirectoryDisk(tmp_path))
    journal.recover()
    journal.create(IDENTITY, MEMBERS)
    journal.promise(3, None)
    write(journal)
    journal.sync()
    journal.close()
    with pytest.raises(Damage):
        reopened(tmp_path)


# What lies over it


def opened(directory: Path) -> tuple[Journal, HardState, RaftLog]:
    journal = Journal(DirectoryDisk(directory))
    found = journal.recover() or journal.create(IDENTITY, MEMBERS)
    return journal, HardState(journal, found.promise), RaftLog(journal, found)


def test_a_vote_is_given_once_a_term(tmp_path: Path) -> None:
    journal, storage, _ = opened(tmp_path)
    storage.update({"term": 4})
    storage.update({"voted_for": "a"})
    storage.update({"voted_for": None})  # what raftos asks for at every start
    storage.update({"term": 3})
    assert (storage.term, storage.voted_for) == (4, "a")
    with pytest.raises(InvariantBroken, match="second vote"):
        storage.update({"voted_for": "b"})
    storage.update({"term": 5})
    assert storage.voted_for is None
    journal.close()


def test_members_follow_the_log_and_its_cuts(tmp_path: Path) -> None:
    journal, _, log = opened(tmp_path)
    more = Members({**MEMBERS.voters, "c": "c:1"})
    log.put_from(1, [entry(1), members_entry(1, more), entry(2)])
    assert (log.members, log.members_index) == (more, 2)
    journal.sync()
    log.put_from(2, [entry(3, 2)])
    assert (log.members, log.members_index) == (MEMBERS, 0)
    log.put_from(3, [members_entry(2, more)])
    log.commit_index = log.last_applied = 3
    log.compact(journal.stage(log.plan_snapshot(0), b"state"), Promise(2, None))
    assert log.snapshot_members == log.members == more
    journal.close()
    journal, _, log = opened(tmp_path)
    assert (log.members, log.snapshot_index, log.base_index) == (more, 3, 3)
    with pytest.raises(InvariantBroken, match="committed entry"):
        log.put_from(3, [entry(1)])
    journal.close()


def test_a_received_snapshot_keeps_what_lies_behind_it(tmp_path: Path) -> None:
    journal, _, log = opened(tmp_path)
    log.put_from(1, [entry(1), entry(2), entry(3), entry(4)])
    log.install(journal.stage(Base(2, 1, 2, 1, MEMBERS, 0), b"state"), Promise(1, None))
    assert (log.base_index, log.last_log_index, log.commit_index) == (2, 4, 2)
    log.install(journal.stage(Base(3, 2, 3, 2, MEMBERS, 0), b"other"), Promise(2, None))
    assert (log.base_index, log.last_log_index) == (3, 3)
    with pytest.raises(InvariantBroken, match="undo commits"):
        log.install(journal.stage(Base(3, 2, 3, 2, MEMBERS, 0), b""), Promise(2, None))
    journal.close()


def test_files_are_synced_before_they_get_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = FailingFiles(monkeypatch)
    calls.arm(-1, 0)
    with lived(tmp_path):
        pass
    names = [name for name, _ in calls.calls]
    for place, name in enumerate(names):
        if name == "rename":
            assert names[place - 1] == "fdatasync" and names[place + 1] == "fsync_directory"
    assert files.size_of  # the one door
