"""A group whose every message is delivered by hand: for scenarios that happen in one order only."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from danube.cluster.raft.engine import Members
from danube.cluster.raft.messages import Message, decode
from danube.cluster.raft.replication import Bounds
from tests.model.raft_world import Client, Node, World

Taken = tuple[str, str, bytes]


class Stage(World):
    """Members a, b, c ...; nothing moves unless it is said."""

    def __init__(self, size: int, *, bounds: Bounds | None = None, snapshot_bytes: int = 1 << 20) -> None:
        super().__init__(
            random.Random(1), 0, snapshot_bytes=snapshot_bytes, bounds=bounds or Bounds(batch_entries=8)
        )
        names = [chr(ord("a") + number) for number in range(size)]
        members = Members({name: f"{name}:1" for name in names})
        for name in names:
            self.nodes[name] = Node(self, name, members)
        for name in names:
            self.nodes[name].durable_machine = False
            self.nodes[name].boot()

    def node(self, name: str) -> Any:
        return self.nodes[name]

    def campaign(self, name: str) -> None:
        """A member becomes a candidate, as if its time was up and all had granted it to ask."""
        node = self.nodes[name]
        assert node.engine is not None
        state = node.engine._state
        self.step(node, lambda: state.to_candidate())

    def time_out(self, *names: str) -> None:
        """Let election timers run out, at members that have heard nothing for as long."""
        for node in self.nodes.values():
            node.loop.now += 1.0
        for name in names:
            self.fire(self.nodes[name])

    def among(self, names: str, rounds: int = 50, wanted: Callable[[Message], bool] | None = None) -> None:
        """Deliver what these members send each other until they are quiet; all else is lost.

        What the last round makes them send stays on its way."""
        for _ in range(rounds):
            messages, self.network = self.network, []
            if not messages:
                return
            for _, source, target, message in messages:
                if source in names and target in names and (wanted is None or wanted(decode(message))):
                    self.hand(source, target, message)

    def lose(self) -> None:
        self.network = []

    def take(self, source: str, target: str) -> list[Taken]:
        """What is on its way from one to another; it will not arrive by itself any more."""
        taken = [one for one in self.network if one[1:3] == (source, target)]
        self.network = [one for one in self.network if one not in taken]
        return [one[1:] for one in taken]

    def heartbeat(self, name: str) -> None:
        node = self.nodes[name]
        assert node.engine is not None
        self.step(node, node.engine.role.heartbeat)

    def elect(self, name: str, names: str) -> None:
        self.lose()
        for _ in range(5):
            self.campaign(name)
            self.among(names)
            if self.leads(name):
                return
        raise AssertionError(f"{name} is not elected by {names}")

    def leads(self, name: str) -> bool:
        return self.nodes[name].leads

    def put(self, name: str, names: str = "") -> Client:
        """Write at a member, and deliver among ``names``."""
        call = self.write(self.nodes[name])
        self.among(names)
        return call

    def terms(self, name: str) -> list[int]:
        log = self.nodes[name].log
        assert log is not None
        return [entry.term for entry in log._entries]

    def settle(self, names: str, rounds: int = 3) -> None:
        """Some heartbeats of whoever leads."""
        for _ in range(rounds):
            for name in names:
                if self.leads(name):
                    self.heartbeat(name)
            self.among(names)
