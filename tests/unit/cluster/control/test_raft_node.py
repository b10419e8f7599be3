"""One node on its way into a cluster: whatever ended it in between, it goes on with what it has on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from danube.cluster.control.calls import Answer, Propose, Request, encode
from danube.cluster.control.node import (
    JOURNAL_DIRECTORY,
    JOURNAL_FILE,
    LEADERLESS_NS,
    LEADERLESS_WAIT_MS,
    METADATA_DIRECTORY,
    SHOW_POLL_S,
    Node,
    NodeSettings,
)
from danube.cluster.links.transport import bind
from danube.cluster.log.local_log import LocalLog
from danube.cluster.log.node_files import MEMBER, NodeRecord, store_node
from danube.cluster.raft.engine import Engine, EngineStatus, Host, Machine, Members
from danube.cluster.raft.raftos_engine import RaftosEngine
from danube.core.metadata.commands import CreateNamespace
from danube.errors import Unavailable, WrongState
from danube.host.clock import elapsed_ns
from tests.fakes.raft_engine import FakeEngine

HEARTBEAT_MS = 40


def settings(
    directory: Path, address: str, *, seeds: tuple[str, ...] = (), join: tuple[str, ...] = ()
) -> NodeSettings:
    return NodeSettings(
        data_dir=directory,
        cluster="test",
        raft_addr=address,
        seeds=seeds,
        join=join,
        heartbeat_ms=HEARTBEAT_MS,
    )


async def until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


class BehindEngine(FakeEngine):
    """A member that was restarted: its journal holds more than it knows to be agreed on."""

    last_index = 9

    @property
    def status(self) -> EngineStatus:
        return msgspec.structs.replace(
            super().status, role="follower", leader_id="7", last_index=self.last_index
        )


def test_a_copy_made_anew_is_shown_when_it_holds_all_that_was_ever_shown(tmp_path: Path) -> None:
    """What was agreed on before the restart is in the journal; a leader may be heard before that is known."""

    def make_engine(
        node_id: str, directory: Path, machine: Machine, host: Host, *, cluster_id: str,
        bootstrap: Members | None, heartbeat_ms: int,
    ) -> Engine:  # fmt: skip
        engines.append(BehindEngine(machine, node_id=node_id))
        engines[0].index = 5
        return engines[0]

    async def story() -> None:
        door = bind("127.0.0.1", 0)
        address = f"127.0.0.1:{door.getsockname()[1]}"
        node = Node(settings(tmp_path, address), make_engine, failures.append)
        try:
            await node.run(door)
            await asyncio.sleep(4 * SHOW_POLL_S)
            assert not node.machine.visible
            engines[0].index = 9
            await until(lambda: node.machine.visible)
        finally:
            node.stop()

    engines: list[BehindEngine] = []
    failures: list[BaseException] = []
    store_node(tmp_path, NodeRecord("3", "c1", MEMBER))
    for directory, name in ((JOURNAL_DIRECTORY, JOURNAL_FILE), (METADATA_DIRECTORY, "metadata.log")):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / name).write_bytes(b"damaged")
    asyncio.run(story())
    assert failures == []


@pytest.mark.parametrize("damaged", [False, True])
def test_metadata_of_a_broker_that_was_alone_begins_no_cluster(tmp_path: Path, damaged: bool) -> None:
    async def story() -> None:
        with pytest.raises(WrongState, match="alone"):
            Node(settings(tmp_path, "127.0.0.1:7000"), RaftosEngine, print)

    with LocalLog(tmp_path / METADATA_DIRECTORY) as alone:
        alone.propose(CreateNamespace(namespace="n"))
    path = tmp_path / METADATA_DIRECTORY / "metadata.log"
    if damaged:
        path.write_bytes(bytes(100))
    kept = path.read_bytes()
    asyncio.run(story())
    assert path.read_bytes() == kept


def test_a_node_that_ended_before_it_was_added_asks_again_when_it_is_back(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    async def story() -> None:
        door, other_door = bind("127.0.0.1", 0), bind("127.0.0.1", 0)
        seed, address = (f"127.0.0.1:{one.getsockname()[1]}" for one in (door, other_door))
        first = Node(settings(tmp_path / "1", seed, seeds=(seed,)), RaftosEngine, failures.append)
        await first.run(door)
        await until(lambda: first.status().role == "leader")

        joining = settings(tmp_path / "2", address, join=(seed,))
        second = Node(joining, RaftosEngine, failures.append)
        await second.run(other_door)
        second.stop()  # its journal is there, and nobody was asked to add it yet
        assert (tmp_path / "2" / "raft" / JOURNAL_FILE).exists()
        assert second.node_id not in first.members.learners

        again = Node(joining, RaftosEngine, failures.append)
        try:
            await again.run(bind("127.0.0.1", int(address.rpartition(":")[2])))
            await until(lambda: again.node_id in again.members.learners and bool(again.members.voters))
            await until(lambda: again.leader_id == first.node_id)
        finally:
            again.stop()
            first.stop()
            with suppress(OSError):
                door.close()

    asyncio.run(story())
    assert failures == []


@pytest.mark.parametrize(
    ("leader", "missed_ns", "waits_ms"),
    [("7", 2 * LEADERLESS_NS, 10_000), ("", 0, 10_000), ("", 2 * LEADERLESS_NS, LEADERLESS_WAIT_MS)],
)
def test_a_request_waits_shortly_where_no_leader_was_known_for_long(
    tmp_path: Path, leader: str, missed_ns: int, waits_ms: int
) -> None:
    """An election takes less than five seconds; after that a caller is told soon, and not after ten."""

    class Leader:
        async def ask(self, request: Request) -> Answer:
            asked.append(request)
            raise Unavailable("no leader is known")

    class Elected(FakeEngine):
        @property
        def status(self) -> EngineStatus:
            return msgspec.structs.replace(super().status, leader_id=leader)

    async def story() -> None:
        node = Node(settings(tmp_path, "127.0.0.1:7000"), RaftosEngine, print)
        node._engine, node._to_leader = Elected(node.machine), Leader()  # type: ignore[assignment]
        node._leader_seen_ns = elapsed_ns() - missed_ns
        told = await node.asked(encode(Propose("w1", 1, b"", timeout_ms=10_000)))
        assert b"no leader is known" in told

    asked: list[Request] = []
    asyncio.run(story())
    [request] = asked
    assert isinstance(request, Propose) and request.timeout_ms == waits_ms
