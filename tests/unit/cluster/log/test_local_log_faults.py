"""The local metadata log when system calls fail, the writer dies between two, or the power goes."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from danube.cluster.log import local_log, log_file
from danube.cluster.log import local_log as acceptance
from danube.cluster.log import local_log as lock_count
from danube.cluster.log.local_log import RESERVE_BYTES, LocalLog
from danube.core.metadata.commands import CreateNamespace, CreateTopic, DeleteTopic, TopicRecord
from danube.core.partition.policy import TopicPolicy
from danube.errors import ClosedError, Damage, DanubeError, StorageFailed, StorageFull, TopicExists
from tests.unit.faulty_os import FaultyOs, Killed, fail_with

CHANGING_CALLS = ("open", "pwrite", "fdatasync", "fsync", "rename", "unlink", "ftruncate", "makedirs")
READING_CALLS = ("pread", "fstat")


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    def install(module: Any) -> None:
        monkeypatch.setattr(local_log, "os", module)
        monkeypatch.setattr(lock_count, "os", module)
        monkeypatch.setattr(log_file, "os", module)

    yield install
    install(os)


def create(name: str) -> CreateTopic:
    return CreateTopic(topic=f"/default/{name}", policy=TopicPolicy(), created_us=7)


def topics(log: LocalLog) -> set[str]:
    return {record.topic for record in log.state.topics()}


def work(directory: Path, answered: list[str]) -> None:
    """Open, create, delete and compact, noting what was answered."""
    with LocalLog(directory, compact_bytes_min=900) as log:
        for number in range(6):
            record = log.propose(create(f"n{number}"))
            assert record.topic_id == number + 1
            answered.append(record.topic)
        log.refresh()
        assert log.compaction_count >= 1


def prove_whole(directory: Path, answered: list[str]) -> None:
    """Everything answered is there, at most one more is, and the log goes on."""
    with LocalLog(directory) as log, LocalLog(directory) as other:
        present = topics(log)
        assert set(answered) <= present
        assert len(present) <= len(answered) + 1
        ids = [record.topic_id for record in log.state.topics()]
        assert len(ids) == len(set(ids))
        assert log.propose(create("after")).topic_id > max(ids, default=0)
        other.refresh()
        assert other.state.snapshot() == log.state.snapshot()


def count_calls(directory: Path, inject: Callable[[Any], None], calls: tuple[str, ...]) -> int:
    counting = FaultyOs(calls)
    inject(counting)
    work(directory, [])
    inject(os)
    return counting.count


@pytest.mark.parametrize("after", [False, True], ids=["before the call", "after the call"])
def test_a_writer_that_dies_at_any_call_loses_nothing_that_was_answered(
    tmp_path: Path, inject: Callable[[Any], None], after: bool
) -> None:
    def die(faulty: FaultyOs, name: str, arguments: tuple[Any, ...]) -> Any:
        if after:
            with contextlib.suppress(FileNotFoundError):
                getattr(os, name)(*arguments)
        faulty.die()

    total = count_calls(tmp_path / "dry", inject, CHANGING_CALLS)
    assert total > 20
    for when in range(1, total + 1):
        answered: list[str] = []
        inject(FaultyOs(CHANGING_CALLS, when, die))
        with pytest.raises(Killed):
            work(tmp_path / str(when), answered)
        inject(os)
        prove_whole(tmp_path / str(when), answered)


def test_a_write_that_stops_half_way_is_cut_by_the_next(
    tmp_path: Path, inject: Callable[[Any], None]
) -> None:
    def die_in_write(faulty: FaultyOs, name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "pwrite" and len(arguments[1]) > 16:
            descriptor, content, position = arguments
            os.pwrite(descriptor, content[: len(content) // 2], position)
        faulty.die()

    total = count_calls(tmp_path / "dry", inject, CHANGING_CALLS)
    for when in range(1, total + 1):
        answered: list[str] = []
        inject(FaultyOs(CHANGING_CALLS, when, die_in_write))
        with pytest.raises(Killed):
            work(tmp_path / str(when), answered)
        inject(os)
        prove_whole(tmp_path / str(when), answered)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_a_call_that_fails_is_an_honest_error_and_the_log_goes_on(
    tmp_path: Path, inject: Callable[[Any], None], number: int
) -> None:
    calls = CHANGING_CALLS + READING_CALLS
    total = count_calls(tmp_path / "dry", inject, calls)
    kinds: set[type] = set()
    for when in range(1, total + 1):
        faulty = FaultyOs(calls, when, fail_with(number))
        inject(faulty)
        directory = tmp_path / str(when)
        answered: list[str] = []
        try:
            log = LocalLog(directory, compact_bytes_min=900)
        except (StorageFailed, StorageFull) as error:
            kinds.add(type(error))
            log = LocalLog(directory, compact_bytes_min=900)
        with log:
            for index in range(6):
                try:
                    answered.append(log.propose(create(f"n{index}")).topic)
                except (StorageFailed, StorageFull) as error:
                    kinds.add(type(error))
                    answered.append(log.propose(create(f"again{index}")).topic)
            assert faulty.fired or when > faulty.count
            assert set(answered) <= topics(log)
        inject(os)
        prove_whole(directory, answered)
    assert kinds == {StorageFull if number == errno.ENOSPC else StorageFailed}


def test_short_writes_are_continued(tmp_path: Path, inject: Callable[[Any], None]) -> None:
    faulty = FaultyOs()

    def pwrite(descriptor: int, content: bytes, position: int) -> int:
        return os.pwrite(descriptor, content[:7], position)

    faulty.pwrite = pwrite
    inject(faulty)
    answered: list[str] = []
    work(tmp_path / "short", answered)
    inject(os)
    prove_whole(tmp_path / "short", answered)
    assert len(answered) == 6


def test_a_descriptor_whose_sync_failed_is_never_synced_again(
    tmp_path: Path, inject: Callable[[Any], None]
) -> None:
    failed: list[int] = []
    alive: dict[int, int] = {}
    with LocalLog(tmp_path) as log:

        def sync(descriptor: int) -> None:
            alive[descriptor] = alive.get(descriptor, 0) + 1
            assert descriptor not in failed, "synced again after a failure"
            if len(failed) < 2:
                failed.append(descriptor)
                raise OSError(errno.EIO, "input/output error")
            os.fdatasync(descriptor)

        def reopen(*arguments: Any) -> int:
            # Descriptor numbers are used again; a new description is a new descriptor.
            descriptor = os.open(*arguments)
            while descriptor in failed:
                descriptor = os.dup(descriptor)
            return descriptor

        faulty = FaultyOs()
        faulty.fdatasync, faulty.open = sync, reopen
        inject(faulty)
        for name in ("a", "b"):
            with pytest.raises(StorageFailed):
                log.propose(create(name))
        assert log.propose(create("c")).topic_id == 1
        inject(os)
    with LocalLog(tmp_path) as log:
        assert topics(log) == {"/default/c"}


def test_full_while_many_are_proposed_fails_those_and_keeps_the_rest(
    tmp_path: Path, inject: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "METADATA_COMMANDS_PER_ENTRY_MAX", 2)

    with LocalLog(tmp_path) as log:
        inject(FaultyOs(("fdatasync",), 2, fail_with(errno.ENOSPC)))
        commands = [create("a"), create("b"), create("c"), create("a"), create("d"), create("e")]
        results = log.propose_many(commands)
        inject(os)
        kinds = [type(result) for result in results]
        assert kinds == [TopicRecord, TopicRecord, StorageFull, TopicExists, TopicRecord, TopicRecord]
        assert topics(log) == {"/default/a", "/default/b", "/default/d", "/default/e"}
        state = log.state.snapshot()
    with LocalLog(tmp_path) as log:
        assert log.state.snapshot() == state


def test_a_failed_descriptor_that_cannot_be_replaced_at_once_is_replaced_before_the_next_sync(
    tmp_path: Path, inject: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "METADATA_COMMANDS_PER_ENTRY_MAX", 1)
    calls: list[str] = []
    faulty = FaultyOs()

    def sync(descriptor: int) -> None:
        calls.append("sync")
        if len(calls) == 1:
            raise OSError(errno.EIO, "input/output error")
        os.fdatasync(descriptor)

    def reopen(*arguments: Any) -> int:
        calls.append("open")
        if len(calls) == 2:
            raise OSError(errno.EMFILE, "too many open files")
        return os.open(*arguments)

    with LocalLog(tmp_path) as log:
        faulty.fdatasync, faulty.open = sync, reopen
        inject(faulty)
        lost, kept = log.propose_many([create("longer-name-than-the-next"), create("b")])
        inject(os)
        assert calls == ["sync", "open", "open", "sync"]
        assert isinstance(lost, StorageFailed) and isinstance(kept, TopicRecord)
    with LocalLog(tmp_path) as log:
        assert topics(log) == {"/default/b"}


def test_a_compaction_that_fails_costs_nothing_but_the_compaction(
    tmp_path: Path, inject: Callable[[Any], None]
) -> None:
    with LocalLog(tmp_path, compact_bytes_min=900) as log:
        inject(FaultyOs(("rename",), 1, fail_with(errno.ENOSPC)))
        for number in range(12):
            log.propose(create(f"n{number}"))
        assert log.compaction_failure_count == 1 and log.compaction_count >= 1
        inject(os)
        assert len(topics(log)) == 12


def test_nothing_is_stored_under_a_name_that_is_not_durable(
    tmp_path: Path, inject: Callable[[Any], None]
) -> None:
    trace: list[str] = []
    faulty = FaultyOs()

    def rename(*arguments: Any) -> None:
        trace.append("rename")
        os.rename(*arguments)

    def fsync(descriptor: int) -> None:
        trace.append("sync directory" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "sync new file")
        os.fsync(descriptor)

    def fdatasync(descriptor: int) -> None:
        trace.append("sync entry")
        os.fdatasync(descriptor)

    faulty.rename, faulty.fsync, faulty.fdatasync = rename, fsync, fdatasync
    with LocalLog(tmp_path), LocalLog(tmp_path) as other:
        inject(faulty)
        work(tmp_path / "new", [])
        assert trace[:4] == ["sync directory", "sync new file", "rename", "sync directory"]
        for before, call, after in zip(trace, trace[1:], trace[2:], strict=False):
            if call == "rename":
                assert (before, after) == ("sync new file", "sync directory")
        trace.clear()
        other.propose(create("a"))
        assert trace == ["sync directory", "sync entry"], "the maker may have died before it synced the name"


def test_a_propose_that_is_interrupted_closes_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: LocalLog, command: object) -> None:
        raise KeyboardInterrupt

    log = LocalLog(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(LocalLog, "_apply", interrupt)
        with pytest.raises(KeyboardInterrupt):
            log.propose(create("a"))
    with pytest.raises(ClosedError):
        log.propose(create("b"))
    with LocalLog(tmp_path) as again:
        assert topics(again) == {"/default/a"}


def test_an_older_file_put_in_place_is_damage_not_deletion(tmp_path: Path) -> None:
    with LocalLog(tmp_path, compact_bytes_min=900) as log:
        older = (tmp_path / "metadata.log").read_bytes()
        for number in range(4):
            log.propose(create(f"n{number}"))
        (tmp_path / "older").write_bytes(older)
        (tmp_path / "older").rename(tmp_path / "metadata.log")
        log_changes = log.version
        with pytest.raises(Damage):
            log.refresh()
        assert len(topics(log)) == log_changes == 4


class PowerCut:
    """Records writes to the log file since its last sync, and builds files as a power cut may leave them."""

    def __init__(self, path: Path) -> None:
        self.path, self.synced, self.pending = path, path.read_bytes(), list[tuple[int, bytes]]()

    def pwrite(self, descriptor: int, content: bytes, position: int) -> int:
        if os.path.samestat(os.fstat(descriptor), self.path.stat()):
            self.pending.append((position, bytes(content)))
        return os.pwrite(descriptor, content, position)

    def fdatasync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)
        self.synced, self.pending = self.path.read_bytes(), []

    def image(self, choose: random.Random) -> bytes:
        """What was synced, and of each later 512-byte sector either the old or the new content."""
        content = bytearray(self.synced)
        for position, written in self.pending:
            for start in range(position - position % 512, position + len(written), 512):
                if choose.random() < 0.5:
                    low, high = max(start, position), min(start + 512, position + len(written))
                    content.extend(bytes(max(0, high - len(content))))
                    content[low:high] = written[low - position : high - position]
        return bytes(content)


def test_a_sync_makes_the_former_mark_durable_although_another_sync_dropped_it(
    tmp_path: Path, inject: Callable[[Any], None]
) -> None:
    with LocalLog(tmp_path) as log:
        power = PowerCut(tmp_path / "metadata.log")
        faulty = FaultyOs()
        dropped: list[bool] = []

        def sync(descriptor: int) -> None:
            if not dropped and len(power.pending) > 2:
                # The kernel reports the error once and from then on takes the lost pages for written.
                dropped.append(True)
                power.pending.clear()
                raise OSError(errno.EIO, "input/output error")
            content = bytearray(power.synced)
            for position, written in power.pending:
                content.extend(bytes(max(0, position - len(content))))
                content[position : position + len(written)] = written
            power.synced, power.pending = bytes(content), []

        faulty.pwrite, faulty.fdatasync = power.pwrite, sync
        inject(faulty)
        log.propose(create("a"))
        with pytest.raises(StorageFailed):
            log.propose(create("b"))
        mark = log_file.pack_mark((tmp_path / "metadata.log").stat().st_size)
        log.propose(create("c"))
        inject(os)
        assert dropped and power.synced[24:40] == mark


def test_after_a_power_cut_everything_answered_is_there(
    tmp_path: Path, inject: Callable[[Any], None], seed: int
) -> None:
    choose = random.Random(seed)
    with LocalLog(tmp_path / "live") as log:
        power = PowerCut(tmp_path / "live" / "metadata.log")
        faulty = FaultyOs()
        images: list[tuple[int, bytes]] = []
        answered = 0

        def watched(call: Callable[..., Any]) -> Callable[..., Any]:
            def watch(*arguments: Any) -> Any:
                result = call(*arguments)
                images.extend((answered, power.image(choose)) for _ in range(4))
                return result

            return watch

        faulty.pwrite, faulty.fdatasync = watched(power.pwrite), watched(power.fdatasync)
        inject(faulty)
        for number in range(12):
            results = log.propose_many([create(f"n{number}-{part}") for part in range(1 + number % 4)])
            assert not any(isinstance(result, DanubeError) for result in results)
            answered += len(results)
        inject(os)
    directory = tmp_path / "image"
    with LocalLog(directory):
        pass
    for answered, image in images:
        (directory / "metadata.log").write_bytes(image)
        with LocalLog(directory) as log:
            assert answered <= log.state.topic_count <= answered + 4
            log.propose(create("after"))


def creator(directory: Path, name: str, count: int, answers: Connection) -> None:
    """Create topics, delete every tenth again, and report each answer."""
    with LocalLog(directory, compact_bytes_min=30_000, lock_timeout_s=60) as log:
        for number in range(count):
            record = log.propose(create(f"{name}-{number}"))
            answers.send((record.topic, record.topic_id, False))
            if number % 10 == 9:
                log.propose(DeleteTopic(topic=record.topic))
                answers.send((record.topic, record.topic_id, True))
            log.refresh()


class Creators:
    """Processes at work on one log, and what they were answered."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.context = multiprocessing.get_context("fork")
        self.running: dict[str, tuple[Any, Connection]] = {}
        self.answered: dict[str, int] = {}
        self.deleted: set[str] = set()
        self.exit_codes: list[int | None] = []

    def start(self, name: str, count: int) -> None:
        receiving, sending = self.context.Pipe(duplex=False)
        child = self.context.Process(target=creator, args=(self.directory, name, count, sending), daemon=True)
        child.start()
        sending.close()
        self.running[name] = child, receiving

    def drain(self) -> None:
        """Take in all answers; see off who has ended."""
        for name, (child, receiving) in list(self.running.items()):
            try:
                while receiving.poll(0.001):
                    topic, topic_id, gone = receiving.recv()
                    self.answered[topic] = topic_id
                    if gone:
                        self.deleted.add(topic)
            except (EOFError, OSError):
                child.join(timeout=30)
                self.exit_codes.append(child.exitcode)
                receiving.close()
                del self.running[name]

    def kill(self, name: str) -> None:
        child, _ = self.running[name]
        os.kill(child.pid, signal.SIGKILL)


def test_processes_that_create_and_die_at_any_moment_agree(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    creators = Creators(tmp_path)
    kills = 12
    with LocalLog(tmp_path, lock_timeout_s=60) as reader:
        for number in range(3):
            creators.start(f"steady{number}", 200)
        for number in range(kills):
            victim = f"victim{number}"
            creators.start(victim, 1_000_000)
            while f"/default/{victim}-0" not in creators.answered:
                creators.drain()
            time.sleep(choose.random() * 0.02)
            creators.kill(victim)
            reader.refresh()
        while creators.running:
            creators.drain()
            reader.refresh()
        assert sorted(creators.exit_codes) == [-signal.SIGKILL] * kills + [0] * 3
        reader.propose(create("last"))
        with LocalLog(tmp_path) as other:
            assert other.state.snapshot() == reader.state.snapshot()
    present = {record.topic: record.topic_id for record in reader.state.topics()}
    kept = {topic: topic_id for topic, topic_id in creators.answered.items() if topic not in creators.deleted}
    # A killed process may have deleted its last topic without getting to say so.
    unsaid = [topic for topic in kept if topic not in present]
    assert len(unsaid) <= kills and all("victim" in topic and topic.endswith("9") for topic in unsaid)
    assert all(present.get(topic, topic_id) == topic_id for topic, topic_id in kept.items())
    assert not creators.deleted & set(present)
    ids = creators.answered | present
    assert len(set(ids.values())) == len(ids) >= 3 * 200 + kills, "an id is used once"
    # One that was created without an answer for each kill, and the last.
    assert len(set(present) - set(creators.answered)) <= kills + 1


def test_room_for_more_entries_is_reserved_behind_the_last(tmp_path: Path) -> None:
    """A full disk takes some more, for instance the deletion that makes room."""
    with LocalLog(tmp_path) as log:
        path = tmp_path / "metadata.log"
        for number in range(300):
            log.propose(CreateNamespace(namespace=f"n{number}"))
            status = path.stat()
            assert status.st_blocks * 512 >= status.st_size + RESERVE_BYTES // 2 - 4096
        with path.open("ab") as file:
            file.write(b"torn")
    with LocalLog(tmp_path) as log:
        log.propose(CreateNamespace(namespace="after"))
        status = path.stat()
        assert status.st_blocks * 512 >= status.st_size + RESERVE_BYTES // 2 - 4096
