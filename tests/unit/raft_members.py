"""Three real members of a cluster in one process: their disks, their ports on loopback, their hosts' sockets.

They vote, or agree through an etcd.  All run on one loop in a thread of its own, so a test may block in a
worker's log meanwhile.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

from danube.cluster.control.cluster_log import ClusterLog
from danube.cluster.control.door import serve_host
from danube.cluster.control.node import METADATA_DIRECTORY, MakeEngine, Node, NodeSettings
from danube.cluster.etcd.calls import EtcdPlace
from danube.cluster.links.transport import bind
from danube.core.cluster.commands import DeletePrefix, RevokeLease
from danube.core.metadata.commands import Change, Command, DeleteNamespace, DeleteTopic
from danube.core.metadata.machine import Metadata

SIZE = 3
HEARTBEAT_MS = 100
START_S = 30.0
STOP_S = 10.0
OWN_NAMESPACES = ("default", "system")


class MemberLog(ClusterLog):
    """A worker's log at any member: it may lag behind the others, so it asks how far they are first."""

    def refresh(self) -> list[Change]:
        self.read_barrier()
        return super().refresh()


class RaftMembers(threading.Thread):
    """A cluster of three; ``log`` opens another worker's log, at the next member each time."""

    def __init__(self, directory: Path, etcd: EtcdPlace | None = None) -> None:
        super().__init__(daemon=True, name="raft-members")
        self.etcd = etcd
        self.directories = [directory / f"n{place}" for place in range(SIZE)]
        self.failures: list[BaseException] = []
        self._turn = count()
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self.start()
        if not self._ready.wait(START_S) or self.failures:
            raise AssertionError(f"no cluster within {START_S} s: {self.failures}")

    def run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self.failures.append(error)
            self._ready.set()

    def log(self) -> MemberLog:
        """A worker's log at one of the members."""
        directory = self.directories[next(self._turn) % SIZE]
        return MemberLog(directory / METADATA_DIRECTORY, address(directory))

    def clear(self) -> None:
        """Take away what a test left; numbers that were given stay given."""
        with self.log() as log:
            log.refresh()
            for command in leftovers(log.state):
                log.propose(command)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self.join(STOP_S)
        assert not self.is_alive() and not self.failures, self.failures

    async def _serve(self) -> None:
        doors = [bind("127.0.0.1", 0) for _ in range(SIZE)]
        seeds = tuple(f"127.0.0.1:{door.getsockname()[1]}" for door in doors)
        make_engine = None if self.etcd is not None else raft_engine()
        nodes, hosts = [], []
        for directory, raft_addr in zip(self.directories, seeds, strict=True):
            settings = NodeSettings(
                data_dir=directory,
                cluster="test",
                raft_addr=raft_addr,
                seeds=() if self.etcd is not None else seeds,
                heartbeat_ms=HEARTBEAT_MS,
                etcd=self.etcd,
            )
            directory.mkdir(parents=True)
            nodes.append(Node(settings, make_engine, self.failures.append))
            hosts.append(await serve_host(listening(address(directory)), nodes[-1].asked))
        try:
            async with asyncio.timeout(START_S):
                await asyncio.gather(*(node.run(door) for node, door in zip(nodes, doors, strict=True)))
                await until(lambda: all(node.status().leader_id for node in nodes))
            self._ready.set()
            await self._ended.wait()
        finally:
            for host in hosts:
                host.close()
            for node in nodes:
                node.stop()


def raft_engine() -> MakeEngine:
    from danube.cluster.raft.raftos_engine import RaftosEngine

    return RaftosEngine


def leftovers(state: Metadata) -> list[Command]:
    """What takes away all that a test can make of keys, leases, topics and namespaces."""
    granted = [
        one.lease_id for one in state.cluster.leases.records() if one.lease_id > 0
    ]  # others go with keys
    commands: list[Command] = [RevokeLease(lease_id=lease_id) for lease_id in granted]
    for name in state.namespaces():
        commands += [DeleteTopic(topic=topic.topic) for topic in state.topics(name)]
        if name not in OWN_NAMESPACES:
            commands.append(DeleteNamespace(namespace=name))
    return [*commands, DeletePrefix(prefix="/")]


def address(directory: Path) -> str:
    return str(directory / "controller.sock")


def listening(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind(path)
    listener.listen()
    return listener


async def until(reached: Callable[[], bool]) -> None:
    """Polls what the members only show; the caller sets the bound."""
    while not reached():
        await asyncio.sleep(0.01)
