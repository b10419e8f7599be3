"""Formation of a cluster: a node's membership by its disk, else by the answers of other nodes.

    a journal is here          restart: it knows everything
    a seed is in a cluster     join that one, as a learner; or as the voter that it was made and never was
    all seeds are new          the one with the lowest id makes the cluster, of all seeds as voters
    anything less              wait

Nothing is decided on half of the seeds, so no two of them can each make a cluster of its own.  With
``join`` instead of seeds a node never makes one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from danube.cluster.control.calls import (
    Changed,
    Failed,
    Introduce,
    Introduction,
    decode_answer,
    encode,
    received_error,
)
from danube.cluster.links.transport import Transport
from danube.cluster.log.node_files import NodeRecord, check_node_id
from danube.cluster.log.waiting import Waiting
from danube.cluster.raft.engine import Members
from danube.errors import (
    ConfigInvalid,
    ConnectionFailed,
    DanubeError,
    InvalidArgument,
    ProtocolError,
    Unavailable,
)
from danube.host import telemetry
from danube.host.clock import wall_us

ASK_INTERVAL_S: Final = 0.2
ASK_TIMEOUT_S: Final = 2.0

_ANEW: Final = "start it with an empty data directory and cluster.join to take part in that cluster"

_log = telemetry.events("cluster.formation")
_random = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class Formed:
    """The cluster that this node is part of."""

    cluster_id: str
    members: Members  # as far as they are known
    joining: bool = False  # it has to be added first


class Formation:
    """Asks around until it is clear which cluster this node belongs to."""

    def __init__(
        self, transport: Transport, record: NodeRecord, *, seeds: Sequence[str], join: Sequence[str]
    ) -> None:
        self._transport = transport
        self._record = record
        self._seeds = seeds
        self._asked = [*seeds, *(address for address in join if address not in seeds)]
        self._since_us = wall_us()
        self._problem: tuple[str, str] | None = None  # why no decision is possible, and what helps
        self.waiting: Waiting | None = None

    async def find(self) -> Formed:
        """Wait until the cluster is found; raises ConfigInvalid if there is no node to ask."""
        if not self._asked:
            raise ConfigInvalid("a member needs cluster.seed_nodes or cluster.join, to find the others")
        while True:
            introductions = await self._ask_all()
            self._problem = None
            formed = self._decide(introductions)
            if formed is not None:
                return formed
            missing = [address for address in self._asked if address not in introductions]
            if missing:
                _log.lasting("waiting for other nodes", source="seeds", level=logging.INFO, missing=missing)
            self.waiting = self._wait_for(missing)
            await asyncio.sleep(ASK_INTERVAL_S * (0.5 + _random.random()))

    def _wait_for(self, missing: list[str]) -> Waiting:
        why, hint = self._problem or ("the node with the lowest id makes the cluster", "")
        if self._problem is None and missing:
            why = f"{', '.join(missing)} {'does' if len(missing) == 1 else 'do'} not answer"
            hint = "start the brokers there; `danube cluster status` tells who is reached"
            if self._seeds:
                hint += "; a cluster is made only when all seed nodes are there"
        return Waiting(why, hint, self._since_us, missing)

    def _note(self, event: str, hint: str, **facts: Any) -> None:
        """Log a problem that must be solved before anything can be decided."""
        _log.lasting(event, source="seeds", hint=hint, **facts)
        told = ", ".join(f"{name} {value}" for name, value in facts.items())
        self._problem = f"{event} ({told})", hint

    async def _ask_all(self) -> dict[str, Introduction]:
        """Return the introductions of nodes that answer, by address."""
        answers = await asyncio.gather(*map(self._ask, self._asked))
        return {
            address: answer
            for address, answer in zip(self._asked, answers, strict=True)
            if answer is not None
        }

    async def _ask(self, address: str) -> Introduction | None:
        try:
            _, answer = await self._transport.call_address(address, encode(Introduce()), ASK_TIMEOUT_S)
            introduction = decode_answer(answer)
        except (Unavailable, ProtocolError) as error:
            _log.lasting("a seed does not answer", source=address, why=str(error))
            return None
        return introduction if isinstance(introduction, Introduction) else None

    def _decide(self, introductions: dict[str, Introduction]) -> Formed | None:
        own_id = self._record.node_id
        clusters = {one.cluster_id: one for one in introductions.values() if one.cluster_id}
        if len(clusters) > 1:
            hint = "name only nodes of one cluster in cluster.seed_nodes and cluster.join"
            self._note("the seeds belong to different clusters", hint, clusters=sorted(clusters))
            return None
        for cluster_id, one in clusters.items():
            if cluster_id in self._record.left:
                self._note("this node let go of that cluster", _ANEW, cluster_id=cluster_id)
                return None
            if self._record.cluster_id not in ("", cluster_id):
                self._note("the seeds belong to another cluster", _ANEW, cluster_id=cluster_id)
                return None
            known = own_id in one.members.voters or own_id in one.members.learners
            return Formed(cluster_id, one.members, joining=not known)
        answered = [seed for seed in self._seeds if seed in introductions]
        new = {introductions[seed].node_id: seed for seed in answered}
        if not self._sound(new, answered):
            return None
        complete = len(new) == len(self._seeds) and own_id in new
        if not complete or min(new, key=int) != own_id:
            return None
        members = Members(new)
        cluster_id = self._record.cluster_id or secrets.token_hex(8)
        _log.info("all seeds are here: this node makes the cluster", cluster_id=cluster_id, voters=len(new))
        return Formed(cluster_id, members)

    def _sound(self, new: dict[str, str], answered: Sequence[str]) -> bool:
        """Whether the seeds that answered are different nodes with valid ids; logs it if not."""
        for node_id, seed in new.items():
            try:
                check_node_id(node_id)
            except InvalidArgument as error:
                hint = "is that a broker of this cluster? check cluster.seed_nodes"
                self._note("a seed says no node id", hint, seed=seed, why=str(error))
                return False
        if len(new) < len(answered):
            same = [seed for seed in answered if seed not in new.values()]
            hint = "name each node once in cluster.seed_nodes, and give each its own data directory"
            self._note("two seeds are one node", hint, seeds=same)
        return len(new) == len(answered)


async def ask_to_join(
    transport: Transport, request: bytes, addresses: Sequence[str], timeout_s: float
) -> Members | DanubeError:
    """Ask members one after the other to add this node; return the members, or why it was not added."""
    refused: DanubeError = ConnectionFailed(
        "no member was asked", hint="cluster.seed_nodes or cluster.join says where they are"
    )
    answered = False  # a member's own word tells more than another one's silence
    for address in dict.fromkeys(addresses):
        try:
            _, body = await transport.call_address(address, request, timeout_s)
            answer = decode_answer(body)
        except DanubeError as error:
            refused = refused if answered else error
            continue
        if isinstance(answer, Changed):
            return answer.members
        if isinstance(answer, Failed):
            answered, refused = True, received_error(answer.error)
    return refused
