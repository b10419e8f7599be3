"""Stored cursors: the newest state of each subscription survives; damage falls back and is reported."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube.errors import Damage, StorageFailed, StorageFull, StorageIncompatible
from danube.host import files
from danube.wal.log.cursors import FILE_BYTES_MAX, FILE_NAMES, RESERVE_FIRST, RESERVE_GROWN, CursorStore
from danube.wal.segments.segment import LogIdentity
from tests.unit.failing_files import FailingFiles, Killed
from tests.unit.wal_samples import IDENTITY, memory_directory


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with memory_directory(tmp_path) as directory:
        yield directory


def opened(directory: Path) -> CursorStore:
    store = CursorStore(directory, IDENTITY)
    store.load()
    return store


def loaded(directory: Path) -> dict[str, bytes]:
    store = CursorStore(directory, IDENTITY)
    states = store.load()
    store.close()
    return states


def sync(store: CursorStore) -> None:
    job = store.sync_job()
    if job is not None:
        job.run(set())
        store.synced(job)


def test_a_partition_without_subscriptions_has_no_cursor_file(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write()
    assert store.sync_job() is None and list(tmp_path.iterdir()) == []
    store.close()


def test_the_last_state_of_each_name_is_loaded(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.store("a", b"1")
    store.store("b", b"2")
    store.write()
    store.store("a", b"3")
    store.store("ü name", b"")
    store.remove("b")
    store.store("never written", b"x")
    store.remove("never written")
    store.write()
    store.store("a", b"noted only")
    store.close()
    assert loaded(tmp_path) == {"a": b"3", "ü name": b""}


def test_many_writes_stay_within_a_bound_and_keep_every_state(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in range(20_000):
        store.store(f"s{number % 7}", number.to_bytes(8, "big") * 2)
        store.write()
        if number % 1000 == 0:
            sync(store)
    store.close()
    assert loaded(tmp_path) == {f"s{n % 7}": n.to_bytes(8, "big") * 2 for n in range(19_993, 20_000)}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * RESERVE_GROWN


def test_states_larger_than_the_reserve_are_kept(tmp_path: Path) -> None:
    store = opened(tmp_path)
    states = {f"s{number}": bytes([number]) * 300_000 for number in range(5)}
    for _ in range(4):
        for name, blob in states.items():
            store.store(name, blob)
            store.write()
    store.close()
    assert loaded(tmp_path) == states


def test_acks_are_stored_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    store.store("s", bytes(16))
    store.write()

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(files, "fallocate", full)
    monkeypatch.setattr(files, "open_new", full)
    for number in range(3000):
        store.store("s", number.to_bytes(16, "big"))
        store.write()
    store.close()
    assert loaded(tmp_path) == {"s": (2999).to_bytes(16, "big")}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 2 * RESERVE_FIRST


@pytest.mark.parametrize("step", ["first file", "its room", "second file", "its room as well"])
def test_a_file_that_a_full_disk_left_empty_has_room_before_a_cursor_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    at = ["first file", "its room", "second file", "its room as well"].index(step)
    store = opened(tmp_path)
    store.store("s", bytes(16))
    failing = FailingFiles(monkeypatch, ("open_new", "fallocate"))
    failing.arm(at, errno.ENOSPC)
    with pytest.raises(StorageFull):
        store.write()
    assert failing.fired == 1
    failing.disarm()
    store.write()
    failing.arm(0, errno.ENOSPC, lasting=True)
    for number in range(3000):
        store.store("s", number.to_bytes(16, "big"))
        store.write()
    store.close()
    assert loaded(tmp_path) == {"s": (2999).to_bytes(16, "big")}


def test_a_state_that_does_not_fit_a_full_disk_stays_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    store.store("s", b"old")
    store.write()
    failing = FailingFiles(monkeypatch)
    failing.arm(0, errno.ENOSPC, lasting=True)
    store.store("s", bytes(50_000))
    with pytest.raises(StorageFull):
        store.write()
    assert store.dirty and loaded(tmp_path) == {"s": b"old"}
    failing.disarm()
    store.write()
    store.close()
    assert loaded(tmp_path) == {"s": bytes(50_000)}


class Names:
    """A run of stores and removals; ``states`` after each write that returned."""

    def __init__(self) -> None:
        self.states: dict[str, bytes] = {}
        self.older: list[dict[str, bytes]] = [{}]

    def run(self, store: CursorStore, rounds: int = 20) -> None:
        for number in range(rounds):
            changed: dict[str, bytes | None] = {f"s{number % 3}": b"%d" % number * (300 + 90 * number)}
            if number % 4 == 3:
                changed[f"s{number % 2}"] = None
            for name, blob in changed.items():
                if blob is None:
                    store.remove(name)
                else:
                    store.store(name, blob)
            states = {**self.states, **changed}
            self.older.append({name: blob for name, blob in states.items() if blob is not None})
            store.write()
            self.states = self.older[-1]
            if number % 3 == 0:
                sync(store)


@pytest.mark.parametrize("kind", ["killed", "killed after"])
def test_a_crash_at_any_call_keeps_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    failing = FailingFiles(monkeypatch)
    failing.arm(10**9, errno.EIO)
    (tmp_path / "dry").mkdir()
    Names().run(opened(tmp_path / "dry"))
    count = len(failing.calls)
    assert count > 25
    for at in range(count):
        directory = tmp_path / str(at)
        directory.mkdir()
        store, names = opened(directory), Names()
        failing.arm(at, kind)
        with pytest.raises(Killed):
            names.run(store)
        failing.disarm()
        store.close()
        again = CursorStore(directory, IDENTITY)
        assert again.load() in (names.states, names.older[-1])
        again.store("later", b"x")
        again.write()
        again.close()
        assert loaded(directory)["later"] == b"x"


@pytest.mark.parametrize("kind", [errno.EIO, errno.ENOSPC, "short", "short and full"])
def test_a_failure_of_any_call_keeps_the_state_and_the_next_write_stores_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int | str
) -> None:
    failing = FailingFiles(monkeypatch)
    for at in range(60):
        directory = tmp_path / str(at)
        directory.mkdir()
        store, names = opened(directory), Names()
        failing.arm(at, kind)
        try:
            names.run(store)
        except (StorageFailed, StorageFull, OSError):
            failing.disarm()
            assert loaded(directory) in (names.states, names.older[-1])
            again = opened(directory)
            again.close()
            store.close()
            store = CursorStore(directory, IDENTITY)
            store.load()
        failing.disarm()
        store.store("later", b"x")
        store.write()
        sync(store)
        store.close()
        assert loaded(directory) == {**names.older[-1], "later": b"x"} or loaded(directory) == {
            **names.states, "later": b"x",
        }  # fmt: skip


def test_a_file_whose_sync_failed_is_replaced_and_never_synced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = FailingFiles(monkeypatch)
    store = opened(tmp_path)
    store.store("a", b"1")
    store.write()
    sync(store)
    store.store("a", b"2")
    store.write()
    job = store.sync_job()
    assert job is not None
    failing.arm(0, errno.EIO)
    with pytest.raises(OSError):
        job.run(set())
    failed = os.fstat(failing.calls[0][1][0]).st_ino
    failing.disarm()
    inodes: list[int] = []
    monkeypatch.setattr(files, "fdatasync", lambda fd: inodes.append(os.fstat(fd).st_ino))
    store.store("a", b"3")
    store.write()
    sync(store)
    assert inodes and failed not in inodes
    store.close()
    assert loaded(tmp_path) == {"a": b"3"}


def test_every_cut_of_the_file_in_force_gives_an_earlier_state(tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.mkdir()
    store = opened(template)
    states = [{}]
    for number in range(5):
        store.store(f"s{number % 2}", b"state %d" % number)
        store.write()
        states.append({**states[-1], f"s{number % 2}": b"state %d" % number})
    store.close()
    name = next(name for name in FILE_NAMES if (template / name).read_bytes()[:8] == b"DANUBCUR")
    whole = (template / name).read_bytes().rstrip(b"\0")
    best = -1
    for size in range(64, len(whole) + 8):
        work = tmp_path / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(template, work)
        (work / name).write_bytes((template / name).read_bytes()[:size])
        found = loaded(work)
        assert found in states and states.index(found) >= best
        best = states.index(found)
    assert best == 5


def test_every_flipped_bit_is_found_and_never_moves_a_cursor_ahead(tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.mkdir()
    store = opened(template)
    for number in range(4):
        store.store(f"s{number % 2}", b"%d" % number)
        store.write()
    store.close()
    name = next(name for name in FILE_NAMES if (template / name).read_bytes()[:8] == b"DANUBCUR")
    whole = (template / name).read_bytes()
    used = len(whole.rstrip(b"\0")) + 16
    allowed = {"s0": {b"0", b"2"}, "s1": {b"1", b"3"}}
    for position in range(used):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << bit
            (template / name).write_bytes(flipped)
            store = CursorStore(template, IDENTITY)
            states = store.load()
            assert all(blob in allowed[key] for key, blob in states.items())
            assert store.damage, "a flipped bit is reported"
            if position >= 64:
                assert len(states) == 2 or len([key for key in allowed if key not in states]) == 1
            store.close()


def test_a_damaged_entry_falls_back_to_its_last_good_earlier_one(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in range(3):
        store.store("s", b"state %d" % number)
        store.store("other", b"other %d" % number)
        store.write()
    store.close()
    path = next(path for path in tmp_path.iterdir() if b"state 2" in path.read_bytes())
    path.write_bytes(path.read_bytes().replace(b"state 2", b"state 9"))
    store = CursorStore(tmp_path, IDENTITY)
    assert store.load() == {"s": b"state 1", "other": b"other 2"}
    assert len(store.damage) == 1
    store.store("other", b"other 3")
    store.write()
    store.close()
    assert loaded(tmp_path) == {"s": b"state 1", "other": b"other 3"}


def decode_known(blob: bytes) -> None:
    if blob.startswith(b"?"):
        raise Damage("no state")


@pytest.mark.parametrize("switched", [False, True], ids=["same file", "other file"])
def test_a_state_that_cannot_be_decoded_falls_back_to_the_one_before(tmp_path: Path, switched: bool) -> None:
    store = opened(tmp_path)
    for name in ("s", "other", "removed"):
        store.store(name, b"good")
    store.write()
    store.remove("removed")
    store.store("s", b"better")
    store.write()
    if switched:
        store._switch = True
    store.store("s", b"? unknown")
    store.store("lost", b"? from the first")
    store.store("other", b"newer")
    store.write()
    store.close()
    again = CursorStore(tmp_path, IDENTITY, decode_known)
    assert again.load() == {"s": b"better", "other": b"newer"}
    assert sorted(found.why.split("'")[1] for found in again.damage) == ["lost", "s"]
    assert all("no state" in found.why for found in again.damage)
    again.store("other", b"newest")
    again.write()
    again.close()
    last = CursorStore(tmp_path, IDENTITY, decode_known)
    assert last.load() == {"s": b"better", "other": b"newest"}
    last.close()


def test_states_are_decoded_once_unless_one_is_refused(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in range(50):
        store.store("s", b"%d" % number)
        store.write()
    store.close()
    seen: list[bytes] = []
    again = CursorStore(tmp_path, IDENTITY, seen.append)
    assert again.load() == {"s": b"49"} and seen == [b"49"] and not again.damage
    again.close()


def test_another_partitions_file_is_not_believed_and_a_newer_version_is_refused(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.store("s", b"x")
    store.write()
    store.close()
    foreign = CursorStore(tmp_path, LogIdentity(1, 1))
    assert foreign.load() == {} and foreign.damage
    foreign.close()
    from danube.core.batch.checksum import crc32c

    path = next(path for path in tmp_path.iterdir() if path.read_bytes()[:8] == b"DANUBCUR")
    data = bytearray(path.read_bytes())
    data[8] = 2
    data[60:64] = crc32c(bytes(data[:60])).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(StorageIncompatible):
        CursorStore(tmp_path, IDENTITY).load()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "store", "store", "remove", "write", "sync", "reopen"]),
            st.sampled_from(["a", "b", "c" * 200]),
            st.binary(max_size=4000),
        ),
        max_size=40,
    )
)
def test_any_order_of_calls_equals_a_dictionary(steps: list[tuple[str, str, bytes]]) -> None:
    with tempfile.TemporaryDirectory(prefix="danube-test-") as name:
        directory = Path(name)
        store, written, noted = opened(directory), {}, {}
        for step, key, blob in steps:
            if step == "store":
                store.store(key, blob)
                noted[key] = blob
            elif step == "remove":
                store.remove(key)
                noted.pop(key, None)
            elif step == "write":
                store.write()
                written = dict(noted)
            elif step == "sync":
                sync(store)
            else:
                store.close()
                store = CursorStore(directory, IDENTITY)
                noted = dict(written)
                assert store.load() == written and not store.damage
        store.close()
        assert loaded(directory) == written


def test_an_entry_that_only_the_older_file_still_holds_is_taken_from_there(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.store("quiet", b"quiet state")
    while store._generation < 2:
        store.store("busy", bytes(1000))
        store.write()
        if store._generation < 2 and store._capacity >= RESERVE_GROWN // 2:
            store._switch = True
    store.close()
    newer = max((tmp_path / name for name in FILE_NAMES), key=lambda path: path.read_bytes()[24:32])
    data = newer.read_bytes()
    assert data.count(b"quiet state") == 1
    newer.write_bytes(data.replace(b"quiet state", b"other state"))
    store = CursorStore(tmp_path, IDENTITY)
    assert store.load() == {"quiet": b"quiet state", "busy": bytes(1000)}
    assert store.damage
    store.close()


def test_the_file_in_force_is_on_disk_before_the_other_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    store.store("s", b"x")
    store.write()
    failing = FailingFiles(monkeypatch)
    for number in range(4):
        before = store._generation
        failing.arm(10**9, errno.EIO)
        store.store("s", bytes([number]) * 100)
        store.write()
        in_force = os.fstat(failing.calls[-1][1][0]).st_ino
        store._switch = True
        failing.arm(10**9, errno.EIO)
        store.store("s", bytes([number]) * 50)
        store.write()
        assert store._generation == before + 1
        order = [(name, os.fstat(args[0]).st_ino) for name, args in failing.calls]
        assert order[0] == ("fdatasync", in_force)
        assert all(inode != in_force for name, inode in order[1:] if name == "pwritev")
    store.close()


@pytest.mark.parametrize("gone", [("cursors-a",), ("cursors-b",), ("cursors-a", "cursors-b")])
@pytest.mark.parametrize("proof", [True, False])
def test_cursor_files_that_vanish_are_missed(tmp_path: Path, gone: tuple[str, ...], proof: bool) -> None:
    """Who subscribes anew then begins at the earliest record, never at the latest."""
    store = CursorStore(tmp_path, IDENTITY)
    assert store.load() == {} and store.damage == ()
    store.store("s", b"state")
    store.write()
    store.close()
    again = CursorStore(tmp_path, IDENTITY)
    assert again.load() == {"s": b"state"} and again.damage == ()
    again.close()
    if not proof:  # a directory of before, which is opened once
        (tmp_path / "subscribed").unlink()
        older = CursorStore(tmp_path, IDENTITY)
        assert older.load() == {"s": b"state"} and older.damage == ()
        older.close()
    for name in gone:
        (tmp_path / name).unlink()
    lost = CursorStore(tmp_path, IDENTITY)
    lost.load()
    assert {one.file for one in lost.damage} == set(gone)
    lost.store("t", b"new")
    lost.write()
    lost.close()
    assert all((tmp_path / name).exists() for name in ("cursors-a", "cursors-b"))


def in_force(directory: Path) -> Path:
    return max((directory / name for name in FILE_NAMES), key=lambda path: path.read_bytes()[24:32])


@pytest.mark.parametrize("size", [9 << 30, 3 << 30])
@pytest.mark.parametrize("tail", [b"", b"x"], ids=["zeros", "a byte at its end"])
def test_an_overlong_file_harms_nobody(tmp_path: Path, size: int, tail: bytes) -> None:
    store = opened(tmp_path)
    store.store("s", b"kept" + bytes(3000))
    store.write()
    store.close()
    path = in_force(tmp_path)
    with path.open("r+b") as file:
        file.truncate(size)
        file.seek(size - len(tail))
        file.write(tail)
    again = CursorStore(tmp_path, IDENTITY)
    assert again.load() == {"s": b"kept" + bytes(3000)}
    told = [found.file for found in again.damage]
    assert told == [path.name] * (size > FILE_BYTES_MAX or bool(tail))
    for number in range(2000):  # the file is taken into use again, as small as any
        again.store("s", number.to_bytes(1000, "big"))
        again.write()
    again.close()
    assert loaded(tmp_path) == {"s": (1999).to_bytes(1000, "big")}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4 * RESERVE_GROWN
    assert not opened(tmp_path).damage


def test_an_overlong_file_that_was_not_begun_is_told(tmp_path: Path) -> None:
    with (tmp_path / FILE_NAMES[0]).open("wb") as file:
        file.truncate(FILE_BYTES_MAX + 1)
    store = CursorStore(tmp_path, IDENTITY)
    assert store.load() == {} and [found.file for found in store.damage] == [FILE_NAMES[0]]
    store.store("s", b"new")
    store.write()
    store.close()
    assert loaded(tmp_path) == {"s": b"new"}


@pytest.mark.parametrize("name", FILE_NAMES)
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_put_aside_and_harms_only_what_it_alone_would_hold(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    store = opened(tmp_path)
    store.store("a", b"1")
    store.write()
    store.close()
    (tmp_path / name).unlink()
    make(tmp_path / name)
    make(tmp_path / f"{name}.aside")  # of an earlier time
    store = CursorStore(tmp_path, IDENTITY)
    in_force = name == FILE_NAMES[1]
    assert store.load() == ({} if in_force else {"a": b"1"})
    why = f"this is no file; it is kept as {name}.aside+"
    assert [(one.file, one.why) for one in store.damage] == [(name, why)]
    assert not (tmp_path / f"{name}.aside+").is_file() and (tmp_path / f"{name}.aside+").exists()
    for value in (b"2", b"3"):
        store.store("a", value)
        store.write()
        sync(store)
    store.close()
    again = CursorStore(tmp_path, IDENTITY)
    assert again.load() == {"a": b"3"} and not again.damage
    again.close()


def test_a_file_that_the_disk_does_not_read_now_keeps_the_partition_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold acks.  Going on without it would deliver again, and the next write would replace it."""
    store = opened(tmp_path)
    store.store("a", b"1")
    store.write()
    store.close()

    def fail(fd: int, size: int, position: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(files, "pread", fail)
        with pytest.raises(StorageFailed, match="Input/output") as raised:
            opened(tmp_path)
    assert "begin at the earliest record" in raised.value.hint
    assert loaded(tmp_path) == {"a": b"1"}
