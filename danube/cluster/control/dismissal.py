"""Dismissal of a node: how it learns that it was removed from its cluster, and stops.

Its own log may lack the removal, because the leader sends it nothing more once the removal is agreed on.  So
the node requests the members from its peers when its log does not name it or it has no leader.  It counts as
removed if most of the other voters that it knows name it neither as voter nor as learner, twice in a row.
The members that agreed on its addition cannot all be missing from those.  A node that waits to be added has
no voters in its log yet.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from danube.cluster.raft.engine import Members

ASK_INTERVAL_S: Final = 1.0
ROUNDS: Final = 2
EXIT_DISMISSED: Final = 79  # of the controller: not to be started again


class Node(Protocol):
    """Members of the node that this module uses."""

    @property
    def node_id(self) -> str: ...
    @property
    def members(self) -> Members: ...
    @property
    def leader_id(self) -> str: ...
    async def ask_members(self) -> dict[str, Members]: ...


def named(members: Members, node_id: str) -> bool:
    return node_id in members.voters or node_id in members.learners


def excluded(known: Members, node_id: str, told: dict[str, Members]) -> bool:
    """Return whether most other voters of ``known`` name members without this node."""
    others = [voter for voter in known.voters if voter != node_id]
    without = [
        voter for voter in others
        if (members := told.get(voter)) is not None and members.voters and not named(members, node_id)
    ]  # fmt: skip
    return bool(others) and 2 * len(without) > len(others)


async def dismissed(node: Node, interval_s: float = ASK_INTERVAL_S) -> None:
    """Returns when this node is a member no more."""
    rounds = 0
    while rounds < ROUNDS:
        await asyncio.sleep(interval_s)
        known = node.members
        if not known.voters or (named(known, node.node_id) and node.leader_id):
            rounds = 0
            continue
        gone = excluded(known, node.node_id, await node.ask_members())
        rounds = rounds + 1 if gone else 0
