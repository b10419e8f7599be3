"""What tells readers of the local metadata log, without a system call, that there may be something new."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube.cluster.log import local_log
from danube.cluster.log import local_log as lock_count
from danube.cluster.log.local_log import LocalLog, LockCount
from danube.core.metadata.commands import CreateTopic, TopicCreated
from danube.core.partition.policy import TopicPolicy
from danube.errors import StorageFailed, StorageFull
from tests.unit.faulty_os import FaultyOs, fail_with


def create(name: str) -> CreateTopic:
    return CreateTopic(topic=f"/default/{name}", policy=TopicPolicy(), created_us=7)


def created(changes: Any) -> list[str]:
    return [change.record.topic for change in changes if isinstance(change, TopicCreated)]


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def test_a_number_is_odd_while_the_lock_is_held_and_another_even_one_afterwards(descriptor: int) -> None:
    own, other = LockCount(descriptor), LockCount(descriptor)
    seen = {other.number}
    for _ in range(5):
        own.begin()
        assert other.number & 1
        own.end()
        assert not other.number & 1 and other.number not in seen
        seen.add(other.number)
    own.close()
    other.close()


def test_a_holder_that_died_leaves_an_odd_number_until_the_next_one_is_done(descriptor: int) -> None:
    count = LockCount(descriptor)
    before = count.number
    count.begin()
    left = count.number
    count.begin()  # the next holder
    assert count.number & 1 and count.number != left
    count.end()
    assert not count.number & 1 and count.number not in (before, left)
    count.close()


@pytest.mark.parametrize("held", [(1 << 64) - 1, (1 << 64) - 2])
def test_after_the_last_number_comes_the_first(descriptor: int, held: int) -> None:
    count = LockCount(descriptor)
    count._write(held)
    count.begin()
    assert count.number & 1 and count.number != held
    count.end()
    assert not count.number & 1 and count.number < 4
    count.close()


def test_a_number_that_is_there_is_kept_and_half_of_one_is_made_whole(descriptor: int) -> None:
    os.pwrite(descriptor, b"\x04", 0)
    count = LockCount(descriptor)
    assert count.number == 4
    LockCount(descriptor).close()
    assert count.number == 4 and os.fstat(descriptor).st_size == 8
    count.close()


def test_nothing_new_takes_no_system_call_and_news_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalLog(tmp_path) as writer, LocalLog(tmp_path) as reader:
        reader.refresh()
        calls = FaultyOs(("fstat", "pread", "pwrite"))
        monkeypatch.setattr(local_log, "os", calls)
        monkeypatch.setattr(local_log.log_file, "os", calls)
        assert reader.refresh() == [] and not reader.changed and calls.count == 0
        writer.propose(create("a"))
        calls.count = 0
        assert reader.changed and writer.changed and calls.count == 0
        assert created(reader.refresh()) == ["/default/a"] and calls.count > 0
        calls.count = 0
        assert reader.refresh() == [] and not reader.changed and calls.count == 0
    assert reader.changed, "refresh() tells that it is closed"


def test_readers_look_for_themselves_until_the_next_holder_after_a_dead_one(tmp_path: Path) -> None:
    with LocalLog(tmp_path) as writer, LocalLog(tmp_path) as reader:
        locks = writer._locks
        assert locks is not None
        writer.propose(create("a"))
        locks.begin()  # as if it had been killed before the end
        assert created(reader.refresh()) == ["/default/a"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LockCount, "begin", lambda self: None)
            patch.setattr(LockCount, "end", lambda self: None)
            writer.propose(create("b"))
        assert locks.number & 1 and reader.changed
        assert created(reader.refresh()) == ["/default/b"]
        writer.propose(create("c"))
        assert not locks.number & 1
        assert created(reader.refresh()) == ["/default/c"]


def test_what_could_not_be_read_is_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalLog(tmp_path) as writer, LocalLog(tmp_path) as reader:
        writer.propose(create("a"))
        monkeypatch.setattr(local_log, "os", FaultyOs(("fstat",), 1, fail_with(errno.EIO)))
        with pytest.raises(StorageFailed):
            reader.refresh()
        assert created(reader.refresh()) == ["/default/a"]


def test_nothing_is_changed_where_readers_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalLog(tmp_path) as writer, LocalLog(tmp_path) as reader:
        before = (tmp_path / "metadata.log").read_bytes()
        monkeypatch.setattr(lock_count, "os", FaultyOs(("pwrite",), 1, fail_with(errno.ENOSPC)))
        with pytest.raises(StorageFull):
            writer.propose(create("a"))
        assert (tmp_path / "metadata.log").read_bytes() == before
        reader.propose(create("a"))  # the lock was given back
        assert created(writer.refresh()) == ["/default/a"]


def test_where_the_end_cannot_be_told_readers_look_for_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalLog(tmp_path) as writer, LocalLog(tmp_path) as reader:
        reader.refresh()
        monkeypatch.setattr(lock_count, "os", FaultyOs(("pwrite",), 2, fail_with(errno.EIO)))
        writer.propose(create("a"))
        assert created(reader.refresh()) == ["/default/a"]
        writer.propose(create("b"))
        assert created(reader.refresh()) == ["/default/b"]
