"""Members that agree through a real etcd: who leads, who is overtaken, outages, growth, damage."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from danube.cluster.etcd import engine as etcd_engine
from danube.cluster.etcd.calls import EtcdPlace
from danube.cluster.etcd.engine import EtcdEngine
from danube.cluster.etcd.log import EtcdLog
from danube.cluster.etcd.place import EtcdFormation
from danube.cluster.log.node_files import ETCD, NodeRecord
from danube.cluster.raft.engine import EngineStatus, Members
from danube.errors import (
    ConnectionFailed,
    Damage,
    DanubeError,
    InvalidArgument,
    NotLeader,
    NotSupported,
    OutcomeUnknown,
    StorageFull,
    Unavailable,
)
from danube.limits import RAFT_ENTRY_BYTES_MAX
from tests.cloud_servers import CloudServer
from tests.etcd_server import EtcdServer
from tests.s3_server import NoServer

BOUND_S = 20.0


class ListMachine:
    """A machine that is the list of its entries."""

    def __init__(self) -> None:
        self.entries: list[bytes] = []
        self.renewed = 0

    @property
    def applied_index(self) -> int:
        return len(self.entries)

    def apply(self, index: int, term: int, entry: bytes) -> object:
        assert index == len(self.entries) + 1
        self.entries.append(entry)
        return index

    def freeze(self) -> Callable[[], bytes]:
        entries = list(self.entries)
        return lambda: msgspec.msgpack.encode(entries)

    def stored(self, snapshot: bytes) -> None:
        self.renewed += 1

    def thaw(self, snapshot: bytes) -> object:
        return msgspec.msgpack.decode(snapshot, type=list[bytes])

    def restore(self, index: int, snapshot: bytes, thawed: object) -> None:
        assert isinstance(thawed, list) and len(thawed) == index
        self.entries = thawed


class Member:
    """An engine, its machine and what its host was told."""

    def __init__(self, place: EtcdPlace, node_id: str) -> None:
        self.place, self.node_id = place, node_id
        self.machine = ListMachine()
        self.roles: list[EngineStatus] = []
        self.members = Members({})
        self.failures: list[BaseException] = []
        self.engine: EtcdEngine

    async def start(self, state: str = "") -> Member:
        record = NodeRecord(self.node_id, state=state)
        formation = EtcdFormation(self.place, record, "test", f"h:{self.node_id}", self.machine)
        known = await formation.find()
        self.engine = EtcdEngine(self.node_id, self.machine, self, self.place, known)
        self.engine.start()
        return self

    async def leads(self) -> Member:
        await until(lambda: self.engine.status.role == "leader")
        return self

    def send(self, node_id: str, message: bytes) -> None:
        raise AssertionError("members send each other nothing")

    def role_changed(self, status: EngineStatus) -> None:
        self.roles.append(status)

    def members_changed(self, members: Members) -> None:
        self.members = members

    def failed(self, error: BaseException) -> None:
        self.failures.append(error)


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not reached():
            await asyncio.sleep(0.01)


async def proposed(members: list[Member], entry: bytes) -> Member:
    """Have an entry agreed on at whoever leads; that one."""
    async with asyncio.timeout(BOUND_S):
        while True:
            for member in members:
                try:
                    await member.engine.propose(entry)
                    return member
                except NotLeader:
                    await asyncio.sleep(0.01)


@pytest.fixture
def place(etcd_server: EtcdServer) -> EtcdPlace:
    made: EtcdPlace = etcd_server.place(etcd_server.new_prefix())
    return made


def run(place: EtcdPlace, count: int, story: Callable[[list[Member]], Awaitable[None]]) -> None:
    async def whole() -> None:
        members = [Member(place, str(number)) for number in range(1, count + 1)]
        try:
            for member in members:
                await member.start()
            await story(members)
        finally:
            for member in members:
                if hasattr(member, "engine"):
                    member.engine.stop()

    asyncio.run(whole())


def test_one_leads_all_apply_and_the_next_leads_at_once_when_it_stops(place: EtcdPlace) -> None:
    async def story(members: list[Member]) -> None:
        for number in range(5):
            leader = await proposed(members, b"%d" % number)
        await until(lambda: all(len(one.machine.entries) == 5 for one in members))
        await until(lambda: all(one.engine.status.leader_id == leader.node_id for one in members))
        assert await leader.engine.read_barrier() == 5
        assert set(leader.engine.status.members.voters) == {"1", "2", "3"}
        leader.engine.receive("2", b"")
        others = [one for one in members if one is not leader]
        with pytest.raises(NotLeader):
            await others[0].engine.propose(b"x")
        with pytest.raises(NotLeader):
            await others[0].engine.read_barrier()
        with pytest.raises(NotLeader):
            await others[0].engine.change_members(Members({}))
        leader.engine.stop()
        second = await proposed(others, b"5")
        assert second.engine.status.term > leader.engine.status.term
        assert second.engine.statistics()["entries_stored"] == 1
        await until(lambda: all(one.machine.entries[5:] == [b"5"] for one in others))
        assert not any(one.failures for one in members)

    run(place, 3, story)


def test_a_leader_that_lost_its_lease_acknowledges_nothing(place: EtcdPlace) -> None:
    async def story(members: list[Member]) -> None:
        leader = await proposed(members, b"0")
        [other] = [one for one in members if one is not leader]
        calls = place.calls()
        log = EtcdLog(calls, place.prefix)
        lease = log.read().leader
        assert lease is not None
        # Another one is elected while this one hears nothing.
        leader.engine._watch.stop()
        calls.revoke_lease(lease.lease_id)
        log.read()
        assert log.campaign(other.node_id, calls.grant_lease(60))
        barrier, entry = leader.engine.read_barrier(), leader.engine.propose(b"late")
        for asked in (barrier, entry):
            with pytest.raises((NotLeader, OutcomeUnknown)):
                await asked
        calls.close()
        await proposed(members, b"1")
        await until(lambda: all(one.machine.entries == [b"0", b"1"] for one in members))

    run(place, 2, story)


def test_a_leader_that_comes_back_leads_without_waiting_for_its_former_lease(
    place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(members: list[Member]) -> None:
        [former] = members
        await former.leads()
        term = former.engine.status.term
        for task in former.engine._tasks:  # as kill -9 does: nothing is given back
            task.cancel()
        monkeypatch.setattr(etcd_engine, "LEASE_S", 60)
        again = await Member(place, "1").start(ETCD)
        await again.leads()
        assert again.engine.status.term == term + 1
        again.engine.stop()

    monkeypatch.setattr(etcd_engine, "LEASE_S", 60)
    run(place, 1, story)


def test_a_leader_whose_lease_ended_is_elected_again(place: EtcdPlace) -> None:
    async def story(members: list[Member]) -> None:
        [leader] = members
        await leader.leads()
        term = leader.engine.status.term
        calls = place.calls()
        calls.revoke_lease(leader.engine._lease_id)
        calls.close()
        await until(lambda: leader.engine.status.term > term)
        assert await proposed(members, b"0") is leader and not leader.failures

    run(place, 1, story)


def test_a_change_of_members_that_etcd_does_not_take_is_told(
    place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(members: list[Member]) -> None:
        leader = await proposed(members, b"0")
        await until(lambda: len(leader.engine.status.members.voters) == 2)
        with monkeypatch.context() as patched:
            patched.setattr(EtcdLog, "remove_member", _away)
            with pytest.raises(ConnectionFailed):
                await leader.engine.change_members(Members({leader.node_id: f"h:{leader.node_id}"}))
        await proposed(members, b"1")
        assert len(leader.engine.status.members.voters) == 2 and not leader.failures

    run(place, 2, story)


def _away(*_: object) -> None:
    raise ConnectionFailed("away")


def test_a_snapshot_that_was_replaced_while_it_was_read_is_not_missed(
    place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_engine, "SNAPSHOT_ENTRIES_MAX", 5)
    plain, missed = EtcdLog.snapshot, [1, 2]

    async def story(members: list[Member]) -> None:
        [leader] = members
        await leader.leads()
        for number in range(20):
            await leader.engine.propose(b"%d" % number)
        await until(lambda: leader.engine.status.snapshot_index > 10 and leader.engine._renewing is None)
        await leader.engine.read_barrier()  # what the snapshot holds is deleted
        monkeypatch.setattr(
            EtcdLog, "snapshot", lambda *asked: None if missed and missed.pop() else plain(*asked)
        )
        late = await Member(place, "9").start()
        await until(lambda: late.machine.entries == leader.machine.entries)
        assert not missed and not late.failures
        late.engine.stop()

    run(place, 1, story)


def test_members_are_removed_and_moved_by_the_leader(place: EtcdPlace) -> None:
    async def story(members: list[Member]) -> None:
        leader = await proposed(members, b"0")
        [other] = [one for one in members if one is not leader]
        await until(lambda: len(leader.engine.status.members.voters) == 2)
        with pytest.raises(NotSupported, match="by hand"):
            await leader.engine.change_members(Members({"9": "h:9"}))
        with pytest.raises(InvalidArgument):
            await leader.engine.propose(bytes(RAFT_ENTRY_BYTES_MAX + 1))
        await leader.engine.change_members(Members({leader.node_id: "h:7"}))
        await until(lambda: other.members.voters == {leader.node_id: "h:7"} == leader.members.voters)
        leader.engine.stop()
        await until(lambda: other.engine.status.leader_id == "")
        await asyncio.sleep(0.3)
        assert other.engine.status.role == "follower", "who was removed does not lead"

    run(place, 2, story)


def test_a_snapshot_takes_the_place_of_entries_and_a_late_member_begins_with_it(
    place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_engine, "SNAPSHOT_ENTRIES_MAX", 10)

    async def story(members: list[Member]) -> None:
        leader = await proposed(members, b"first")
        [other] = [one for one in members if one is not leader]
        for number in range(40):
            await leader.engine.propose(b"%d" % number)
        await until(lambda: leader.engine.status.snapshot_index > 20)
        await until(lambda: other.machine.renewed > 0 and len(other.machine.entries) == 41)
        calls = place.calls()
        prefix = f"{place.prefix}entries/".encode()

        def kept() -> int:
            return len(calls.get_range(prefix, prefix[:-1] + b"0", 100)[0])

        await until(lambda: kept() <= 20)
        calls.close()
        late = await Member(place, "9").start()
        await until(lambda: late.machine.entries == leader.machine.entries)
        late.engine.stop()

    run(place, 2, story)


def test_a_snapshot_that_cannot_be_stored_costs_nothing(
    place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_engine, "SNAPSHOT_ENTRIES_MAX", 3)

    def full(*_: object) -> None:
        raise StorageFull("no room")

    async def story(members: list[Member]) -> None:
        [leader] = members
        await leader.leads()
        monkeypatch.setattr(EtcdLog, "put_snapshot", full)
        for number in range(10):
            await leader.engine.propose(b"%d" % number)
        await until(lambda: leader.machine.renewed > 1)
        monkeypatch.setattr(EtcdLog, "append", full)
        with pytest.raises(StorageFull):
            await leader.engine.propose(b"x")
        assert leader.engine.status.role == "leader" and not leader.failures

    run(place, 1, story)


def test_history_is_cut_and_a_refusal_is_only_told(place: EtcdPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_engine, "HISTORY_S", 0.02)
    asked: list[int] = []

    def compact(calls: object, revision: int) -> None:
        asked.append(revision)
        raise Unavailable("etcd refuses", why=("it is compacted", "permission denied")[len(asked) % 2])

    monkeypatch.setattr("danube.cluster.etcd.calls.EtcdCalls.compact_history", compact)

    async def story(members: list[Member]) -> None:
        [leader] = members
        await leader.leads()
        await until(lambda: len(asked) > 2)
        assert not leader.failures and min(asked) > 0

    run(place, 1, story)


class Restarted(EtcdServer):
    """An etcd that any thread may start: it lives as long as the thread that does it in its name."""

    def __init__(self) -> None:
        super().__init__()
        self.starter = ThreadPoolExecutor(1)

    def start(self) -> CloudServer:
        return self.starter.submit(super().start).result()


@pytest.fixture
def own_server() -> Iterator[EtcdServer]:
    try:
        EtcdServer.program()
        server = Restarted()
        server.start()
    except NoServer as error:
        pytest.skip(str(error))
    yield server
    server.stop()
    server.starter.shutdown()


def test_nobody_leads_while_etcd_is_away_and_all_go_on_when_it_is_back(own_server: EtcdServer) -> None:
    place = own_server.place("/d/")

    async def story(members: list[Member]) -> None:
        leader = await proposed(members, b"0")
        assert leader.engine.reached
        await asyncio.to_thread(own_server.kill)
        with pytest.raises(DanubeError):
            await leader.engine.propose(b"lost")
        await until(lambda: all(one.engine.status.leader_id == "" for one in members))
        assert not leader.engine.reached
        await asyncio.to_thread(own_server.start)
        await proposed(members, b"1")
        await until(lambda: all(one.machine.entries == members[0].machine.entries for one in members))
        assert [one for one in members[0].machine.entries if one != b"lost"] == [b"0", b"1"]

    run(place, 2, story)


@pytest.mark.parametrize("what", ["gone", "other", "back", "hole"])
def test_what_is_damaged_ends_the_member(place: EtcdPlace, what: str) -> None:
    async def story(members: list[Member]) -> None:
        [member] = members
        await member.leads()
        await member.engine.propose(b"0")
        calls = place.calls()
        log = EtcdLog(calls, place.prefix)
        head = log.read().head
        end = f"{place.prefix[:-1]}0".encode()
        if what == "gone":
            calls.delete_range(place.prefix.encode(), end)
        else:
            changed = {
                "other": msgspec.structs.replace(head, cluster_id="other"),
                "back": msgspec.structs.replace(head, index=0),
                "hole": msgspec.structs.replace(head, index=5),
            }[what]
            calls.put(f"{place.prefix}head".encode(), msgspec.msgpack.encode(changed))
        calls.close()
        await until(lambda: bool(member.failures))
        assert isinstance(member.failures[0], Damage)

    run(place, 1, story)


def test_a_directory_that_knows_more_than_etcd_waits_and_says_so(place: EtcdPlace, tmp_path: Path) -> None:
    async def story(members: list[Member]) -> None:
        late = Member(place, "2")
        late.machine.entries = [b"x"] * 3
        formation = EtcdFormation(place, NodeRecord("2"), "test", "h:2", late.machine)
        finding = asyncio.create_task(formation.find())
        await until(lambda: formation.waiting is not None)
        assert formation.waiting is not None and "went back" in formation.waiting.why
        finding.cancel()

    run(place, 1, story)
