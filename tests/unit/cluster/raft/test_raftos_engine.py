"""The engine on a real loop and real files: its life, its refusals, groups of one to five in one process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("raftos", reason="a cluster needs raftos; scripts/setup installs it")

from danube.cluster.raft import raftos_engine
from danube.cluster.raft.engine import Engine, EngineStatus, Members
from danube.cluster.raft.entry import size_of
from danube.cluster.raft.messages import AppendRequest, ElectNow, decode, encode
from danube.cluster.raft.proposals import Proposals
from danube.cluster.raft.raftos_engine import INSTALL, LeaderRole, RaftosEngine
from danube.errors import (
    ConfigInvalid,
    Damage,
    DanubeError,
    InvalidArgument,
    NotFound,
    NotLeader,
    OutcomeUnknown,
    Overloaded,
    StorageFailed,
    StorageFull,
)
from danube.host import files
from danube.limits import RAFT_ENTRY_BYTES_MAX
from tests.unit.wal_samples import memory_directory


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    with memory_directory(tmp_path) as memory:
        yield memory


class Lines:
    """A machine: all that was ever applied."""

    def __init__(self) -> None:
        self.applied_index = 0
        self.lines: list[bytes] = []

    def apply(self, index: int, term: int, entry: bytes) -> int:
        self.applied_index = index
        self.lines.append(entry)
        return len(self.lines)

    def freeze(self) -> Callable[[], bytes]:
        lines = self.lines.copy()
        return lambda: b"\n".join(lines)

    def stored(self, snapshot: bytes) -> None:
        self.stored_snapshot = snapshot

    def thaw(self, snapshot: bytes) -> list[bytes]:
        return snapshot.split(b"\n")

    def restore(self, index: int, snapshot: bytes, thawed: object) -> None:
        assert thawed == snapshot.split(b"\n")
        self.applied_index, self.lines = index, self.thaw(snapshot)


class Group:
    """Members of one process; what they send arrives one turn later."""

    def __init__(self, directory: Path, size: int, **options: Any) -> None:
        self.directory, self.options = directory, options
        self.members = Members({f"m{number}": "" for number in range(size)})
        self.engines: dict[str, RaftosEngine] = {}
        self.machines: dict[str, Lines] = {}
        self.failures: list[BaseException] = []
        self.roles: list[tuple[str, str]] = []
        for name in self.members.voters:
            self.start(name, self.members)

    def start(self, name: str, bootstrap: Members | None, machine: Lines | None = None) -> RaftosEngine:
        self.machines[name] = machine or Lines()
        engine = RaftosEngine(
            name,
            self.directory / name,
            self.machines[name],
            Host(self, name),
            bootstrap=bootstrap,
            heartbeat_ms=10,
            cluster_id="test",
            **self.options,
        )
        engine.start()
        self.engines[name] = engine
        return engine

    def stop(self) -> None:
        for engine in self.engines.values():
            engine.stop()

    def hand(self, source: str, target: str, message: bytes) -> None:
        if target in self.engines:
            self.engines[target].receive(source, message)

    async def leader(self) -> RaftosEngine:
        while True:
            for engine in self.engines.values():
                if engine.status.role == "leader":
                    try:
                        await engine.read_barrier()
                    except DanubeError:
                        continue
                    return engine
            await asyncio.sleep(0.005)

    async def level(self) -> None:
        while len({tuple(machine.lines) for machine in self.machines.values()}) > 1:
            await asyncio.sleep(0.005)


class Host:
    def __init__(self, group: Group, name: str) -> None:
        self.group, self.name = group, name

    def send(self, node_id: str, message: bytes) -> None:
        asyncio.get_running_loop().call_soon(self.group.hand, self.name, node_id, message)

    def role_changed(self, status: EngineStatus) -> None:
        self.group.roles.append((status.node_id, status.role))

    def members_changed(self, members: Members) -> None:
        self.group.members = members

    def failed(self, error: BaseException) -> None:
        self.group.failures.append(error)


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 20))


def test_it_is_an_engine(directory: Path) -> None:
    async def story() -> None:
        group = Group(directory, 1)
        engine: Engine = group.engines["m0"]
        assert await engine.propose(b"one") == 1
        assert await engine.read_barrier() == engine.status.applied_index
        assert engine.status.leader_id == "m0" and engine.status.members == Members({"m0": ""})
        assert group.roles[-1] == ("m0", "leader")
        group.stop()
        with pytest.raises(NotLeader):
            await engine.propose(b"two")
        engine.stop()

    run(story)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_a_group_agrees_and_is_there_again_after_a_restart(directory: Path, size: int) -> None:
    async def story() -> None:
        group = Group(directory, size)
        leader = await group.leader()
        results = await asyncio.gather(*(leader.propose(b"%d" % number) for number in range(50)))
        assert results == list(range(1, 51))
        await group.level()
        group.stop()
        group = Group(directory, size)
        leader = await group.leader()
        assert await leader.propose(b"last") == 51
        await group.level()
        assert not group.failures
        leaders = [engine for engine in group.engines.values() if isinstance(engine.role, LeaderRole)]
        assert leaders == [leader]  # no state of raftos' classes is shared
        group.stop()

    run(story)


def test_a_group_goes_on_without_its_leader(directory: Path) -> None:
    async def story() -> None:
        group = Group(directory, 3)
        first = await group.leader()
        await first.propose(b"one")
        name = first.status.node_id
        del group.engines[name], group.machines[name]
        first.stop()
        second = await group.leader()
        assert second is not first
        assert await second.propose(b"two") == 2
        group.start(name, None)
        await group.level()
        group.stop()

    run(story)


def test_a_member_joins_and_is_promoted(directory: Path) -> None:
    async def story() -> None:
        group = Group(directory, 1, snapshot_bytes=500)
        leader = group.engines["m0"]
        for number in range(100):
            await leader.propose(b"%d" % number)
        while "snapshots_taken" not in leader.statistics():  # by another thread: else its log has all of it
            await asyncio.sleep(0.005)
        group.start("m9", Members({}, {"m9": "m9:1"}))
        await leader.change_members(Members({"m0": ""}, {"m9": "m9:1"}))
        await group.level()
        await asyncio.sleep(0.05)
        await leader.change_members(Members({"m0": "", "m9": "m9:1"}))
        assert await leader.propose(b"both") == 101
        await group.level()
        assert group.members == Members({"m0": "", "m9": "m9:1"})
        assert group.engines["m9"].statistics()["snapshots_installed"] >= 1
        group.stop()

    run(story)


def test_a_machine_that_kept_its_state_gets_only_what_it_lacks(directory: Path) -> None:
    async def story() -> None:
        group = Group(directory, 1)
        for number in range(10):
            await group.engines["m0"].propose(b"%d" % number)
        kept = group.machines["m0"]
        group.stop()
        engine = group.start("m0", None, kept)
        await engine.read_barrier()
        assert len(kept.lines) == 10
        group.stop()
        kept.applied_index = 10_000
        with pytest.raises(Damage, match="lacks entries"):
            group.start("m0", None, kept)

    run(story)


def test_the_journal_stays_small_and_restarts_from_its_snapshot(directory: Path) -> None:
    async def story() -> None:
        group = Group(directory, 1, snapshot_bytes=20_000)
        engine = group.engines["m0"]
        for _ in range(40):
            await asyncio.gather(*(engine.propose(b"%d" % (number % 7)) for number in range(100)))
        while engine.status.snapshot_index < 3_500:  # snapshots are made beside this
            await engine.propose(b"7")
            await asyncio.sleep(0.002)
        assert (directory / "m0" / "raft.log").stat().st_size < 80_000
        lines = group.machines["m0"].lines
        group.stop()
        engine = group.start("m0", None)
        await engine.read_barrier()
        assert group.machines["m0"].lines == lines
        group.stop()

    run(story)


class Slow(Lines):
    """Snapshots take as long as the test wants, to make and to read."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.read = threading.Event(), threading.Event()

    def freeze(self) -> Callable[[], bytes]:
        encode_lines = super().freeze()

        def wait() -> bytes:
            assert self.made.wait(10)
            return encode_lines()

        return wait

    def thaw(self, snapshot: bytes) -> list[bytes]:
        assert self.read.wait(10)
        return super().thaw(snapshot)


def test_a_leader_goes_on_while_its_snapshot_is_made(directory: Path) -> None:
    async def story() -> None:
        group = Group(directory, 3, snapshot_bytes=2_000)
        leader = await group.leader()
        slow = Slow()
        slow.lines = group.machines[leader.status.node_id].lines
        leader._member.machine = slow
        before, round_before = leader.status, leader.role.replication.round
        while leader.statistics()["journal_bytes"] < 10_000:
            await leader.propose(b"x" * 50)
        while leader.role.replication.round < round_before + 20:
            await asyncio.sleep(0.002)
        assert leader.status.snapshot_index == before.snapshot_index
        assert (leader.status.role, leader.status.term) == ("leader", before.term), "heartbeats went on"
        slow.made.set()
        while leader.status.snapshot_index == before.snapshot_index:
            await asyncio.sleep(0.002)
        assert await leader.propose(b"after") == len(slow.lines)
        assert not group.failures
        group.stop()

    run(story)


def test_a_follower_answers_heartbeats_while_it_reads_a_snapshot(directory: Path) -> None:
    """With the third member down the leader would step down otherwise."""

    async def story() -> None:
        group = Group(directory, 3, snapshot_bytes=500)
        leader = await group.leader()
        behind, third = (name for name in group.engines if name != leader.status.node_id)
        group.engines.pop(behind).stop()
        for number in range(200):
            await leader.propose(b"%d" % number)
        while leader.status.snapshot_index < 150:
            await leader.propose(b"more")
            await asyncio.sleep(0.002)
        slow = Slow()
        slow.made.set()
        engine = group.start(behind, None, slow)
        while not engine._member.installing:
            await asyncio.sleep(0.002)
        group.engines.pop(third).stop()
        term, round_before = leader.status.term, leader.role.replication.round
        while leader.role.replication.round < round_before + 20:
            await asyncio.sleep(0.002)
        assert (leader.status.role, leader.status.term) == ("leader", term)
        assert engine._member.installing and not slow.lines
        slow.read.set()
        assert await leader.propose(b"last")
        while slow.lines[-1:] != [b"last"]:
            await asyncio.sleep(0.002)
        assert not group.failures
        group.stop()

    run(story)


def test_a_snapshot_that_cannot_be_written_ends_the_member(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        group = Group(directory, 1, snapshot_bytes=500)
        leader = await group.leader()
        real = files.open_new

        def full(path: Path) -> int:
            if path.name == "raft.new":
                raise OSError(errno.ENOSPC, "full")
            return real(path)

        with monkeypatch.context() as patch:
            patch.setattr(files, "open_new", full)
            while not group.failures:
                with contextlib.suppress(DanubeError):
                    await leader.propose(b"x" * 50)
                await asyncio.sleep(0.002)
        assert isinstance(group.failures[0], StorageFull)
        with pytest.raises(NotLeader):
            await leader.propose(b"y")
        again = group.start("m0", None)
        await again.read_barrier()
        assert group.machines["m0"].lines
        group.stop()

    run(story)


def test_a_voter_does_not_start_on_an_empty_disk(directory: Path) -> None:
    async def story() -> None:
        with pytest.raises(NotFound, match="no journal"):
            Group(directory, 0).start("m0", None)
        group = Group(directory, 1)
        group.stop()
        (directory / "m0" / "raft.log").unlink()
        with pytest.raises(Damage, match="journal is gone"):
            group.start("m0", Members({"m0": ""}))

    run(story)


def test_a_journal_of_another_member_or_cluster_is_refused(directory: Path) -> None:
    async def story() -> None:
        group = Group(directory, 1)
        group.stop()
        os.rename(directory / "m0", directory / "m1")
        with pytest.raises(ConfigInvalid, match="that of member m0"):
            group.start("m1", group.members)
        group.options["cluster_id"] = "other"

    run(story)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_storage_error_ends_the_member_and_nothing_is_said_any_more(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    async def story() -> None:
        group = Group(directory, 1)
        engine = group.engines["m0"]
        await engine.propose(b"one")
        calls = []

        def fail(*arguments: Any) -> None:
            calls.append(arguments)
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(files, "fdatasync", fail)
        lost = engine.propose(b"two")
        with pytest.raises(OutcomeUnknown):
            await lost
        assert len(group.failures) == 1 and isinstance(group.failures[0], DanubeError)
        with pytest.raises(NotLeader):
            await engine.propose(b"three")
        engine.receive("m1", b"\x09\x91\x09")
        engine.stop()
        await asyncio.sleep(0.1)
        assert len(calls) == 1, "the descriptor was synced again"
        assert group.machines["m0"].lines == [b"one"]

    run(story)


def test_a_storage_error_in_a_call_ends_the_member_too(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        group = Group(directory, 1)
        engine = group.engines["m0"]
        await engine.read_barrier()

        def fail(*arguments: Any) -> None:
            raise OSError(errno.EIO, "input/output error")

        monkeypatch.setattr(files, "fdatasync", fail)
        large = [engine.propose(bytes(RAFT_ENTRY_BYTES_MAX)) for _ in range(2)]
        changed = engine.change_members(Members({"m0": ""}, {"m1": ""}))
        for future in (*large, changed):
            with pytest.raises(DanubeError):
                await future
        assert len(group.failures) == 1

    run(story)


def test_a_storage_error_on_the_way_to_a_role_is_told(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The role has no timer yet that could be stopped."""

    async def story() -> None:
        group = Group(directory, 3)
        leader = await group.leader()
        follower = next(one for one in group.engines.values() if one is not leader)
        error = StorageFailed("gone")

        def fail(*arguments: Any) -> None:
            raise error

        monkeypatch.setattr(follower.role.storage, "update", fail)
        follower.receive("m9", encode(ElectNow(leader.status.term)))
        assert group.failures == [error]
        group.stop()

    run(story)


def note_syncs(monkeypatch: pytest.MonkeyPatch, noted: list[tuple[str, object]]) -> None:
    """Note which member syncs its journal, as it begins."""
    real = files.fdatasync

    def fdatasync(fd: int) -> None:
        noted.append(("sync", Path(os.readlink(f"/proc/self/fd/{fd}")).parent.name))
        real(fd)

    monkeypatch.setattr(files, "fdatasync", fdatasync)


def note_requests(
    monkeypatch: pytest.MonkeyPatch, engine: RaftosEngine, noted: list[tuple[str, object]]
) -> None:
    """Note entries that a leader sends, with the commit that it tells of."""
    host = engine._host
    real = host.send

    def send(node_id: str, message: bytes) -> None:
        content = decode(message)
        if isinstance(content, AppendRequest) and content.entries:
            noted.append(("send", content.commit_index))
        real(node_id, message)

    monkeypatch.setattr(host, "send", send)


def test_peers_store_an_entry_while_its_leader_does(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        group = Group(directory, 3)
        leader = await group.leader()
        await leader.propose(b"first")
        await group.level()
        noted: list[tuple[str, object]] = []
        note_syncs(monkeypatch, noted)
        note_requests(monkeypatch, leader, noted)
        await leader.propose(b"second")
        name = leader.status.node_id
        assert [what for what, _ in noted[:2]] == ["send", "send"], noted
        assert noted[2] == ("sync", name), "each disk takes its time at once with the others"
        group.stop()

    run(story)


def test_an_entry_is_not_committed_by_a_copy_that_is_not_on_disk_yet(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only voter is a majority by itself, but not before its sync."""

    async def story() -> None:
        group = Group(directory, 1)
        leader = await group.leader()
        await leader.propose(b"first")
        noted: list[tuple[str, object]] = []
        members = Members(leader.status.members.voters, {"m1": ""})
        await leader.change_members(members)
        group.start("m1", Members({}, {"m1": ""}))
        await group.level()
        before = leader.status.last_index
        note_syncs(monkeypatch, noted)
        note_requests(monkeypatch, leader, noted)
        await leader.propose(b"second")
        assert noted[:2] == [("send", before), ("sync", "m0")], noted
        assert leader.status.commit_index == before + 1
        group.stop()

    run(story)


def test_a_term_that_is_not_on_disk_yet_is_told_to_nobody(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only voter elects itself in one step, in which its learner must not hear of the new term."""

    async def story() -> None:
        members = Members({"m0": ""}, {"m1": ""})
        group = Group(directory, 1)
        leader = await group.leader()
        await leader.change_members(members)
        group.engines.pop("m0").stop()
        noted: list[tuple[str, object]] = []
        note_syncs(monkeypatch, noted)
        real = Host.send

        def send(host: Host, node_id: str, message: bytes) -> None:
            noted.append(("send", decode(message).term))
            real(host, node_id, message)

        monkeypatch.setattr(Host, "send", send)
        again = group.start("m0", None)
        assert again.status.role == "leader" and again.status.term == 2
        assert noted[0] == ("sync", "m0") and ("send", 2) in noted[1:], noted
        group.stop()

    run(story)


def test_a_second_process_cannot_use_the_directory(directory: Path) -> None:
    async def story() -> None:
        group = Group(directory, 1)
        with pytest.raises(StorageFailed, match="running member"):
            group.start("m0", None)
        group.engines["m0"].stop()

    run(story)


def test_proposals_have_limits(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        group = Group(directory, 1)
        engine = group.engines["m0"]
        await engine.read_barrier()
        with pytest.raises(InvalidArgument, match="too large"):
            await engine.propose(bytes(RAFT_ENTRY_BYTES_MAX + 1))
        assert await engine.propose(bytes(RAFT_ENTRY_BYTES_MAX)) == 1
        monkeypatch.setattr(Proposals, "__len__", lambda self: 1 << 30)
        with pytest.raises(Overloaded):
            await engine.propose(b"one")
        assert size_of
        group.stop()

    run(story)


def test_a_proposal_that_nobody_waits_for_is_made_all_the_same(directory: Path) -> None:
    async def story() -> None:
        group = Group(directory, 1)
        engine = group.engines["m0"]
        await engine.read_barrier()
        engine.propose(b"one").cancel()
        assert await engine.propose(b"two") == 2
        group.stop()

    run(story)


def test_without_raftos_the_error_names_the_command() -> None:
    code = (
        "import sys; sys.modules['raftos'] = sys.modules['raftos.state'] = None\n"
        "from danube.cluster.raft import raftos_engine as engine\n"
        "from danube.errors import ConfigInvalid\n"
        "try: engine.RaftosEngine('a', None, None, None, bootstrap=None)\n"
        "except ConfigInvalid as error: print(error, error.hint)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert INSTALL in said.stdout and said.stderr == ""
    assert INSTALL == "danube cluster install-engine"


def test_importing_it_says_nothing_and_needs_no_cryptography() -> None:
    code = "import sys; sys.modules['cryptography'] = None; "
    code += "from danube.cluster.raft import raftos_engine as engine; print(engine.MISSING)"
    said = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert (said.stdout, said.stderr) == ("\n", "")
    assert not raftos_engine.MISSING
