"""Nodes that may connect, with their addresses: the agreed members, and later news.

A member that was absent may be dialled by a node that was added meanwhile.  It queries the members that it
knows, and accepts the node if one of them names it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from danube.cluster.control.calls import Introduce, Introduction, decode_answer, encode
from danube.cluster.links.transport import Transport
from danube.cluster.raft.engine import Members
from danube.errors import DanubeError
from danube.host import telemetry

ASK_TIMEOUT_S: Final = 1.0

_log = telemetry.events("cluster.roster")


class Roster:
    """Feeds the transport with addresses by node id."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._agreed: dict[str, str] = {}
        self._learned: dict[str, str] = {}
        self._told = Members({})
        self._moved: dict[str, str] = {}
        self._asking: asyncio.Task[None] | None = None

    @property
    def addresses(self) -> dict[str, str]:
        """All that is known, this node left out."""
        own_id = self._transport.identity.node_id
        merged = {**self._learned, **self._agreed, **self._moved}
        return {node_id: address for node_id, address in merged.items() if node_id != own_id}

    @property
    def members(self) -> Members:
        """Return the members that were learned before anything was agreed on."""
        return self._told

    def agreed(self, members: Members) -> None:
        """Take the members of this member's own log; before its first entry there are none."""
        if not members.voters:
            return
        former, self._agreed = self._agreed, {**members.learners, **members.voters}
        self._learned = {}
        self._moved = {
            node_id: address
            for node_id, address in self._moved.items()
            if self._agreed.get(node_id) == former.get(node_id, self._agreed.get(node_id))
            and self._agreed.get(node_id) not in (None, address)
        }
        self._transport.set_members(self.addresses)

    def learn(self, members: Members) -> None:
        """Take the members that another member names."""
        self._told = members
        self._learned.update({**members.learners, **members.voters})
        self._transport.set_members(self.addresses)

    def moved(self, node_id: str, address: str) -> None:
        """A member says itself that it is reached at another address now."""
        if self.addresses.get(node_id) != address:
            _log.info("a member has moved", node_id=node_id, address=address)
            self._moved[node_id] = address
            self._transport.set_members(self.addresses)

    def ask_about(self, node_id: str) -> None:
        """An unknown node of this cluster has knocked."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._ask(node_id))

    async def ask_all(self) -> dict[str, Members]:
        """Return, by node id, the members that each known node names in its answer."""
        addresses = self.addresses

        async def ask(node_id: str) -> tuple[str, Members] | None:
            with suppress(DanubeError):
                address = addresses[node_id]
                _, body = await self._transport.call_address(address, encode(Introduce()), ASK_TIMEOUT_S)
                answer = decode_answer(body)
                if isinstance(answer, Introduction) and answer.node_id == node_id:
                    return node_id, answer.members
            return None

        return dict(one for one in await asyncio.gather(*map(ask, addresses)) if one is not None)

    async def _ask(self, node_id: str) -> None:
        for known in list(self.addresses):
            try:
                answer = decode_answer(await self._transport.call(known, encode(Introduce()), ASK_TIMEOUT_S))
            except DanubeError:
                continue
            if not isinstance(answer, Introduction):
                continue
            named = {**answer.members.learners, **answer.members.voters}
            if node_id in named:
                self._learned[node_id] = named[node_id]
                self._transport.set_members(self.addresses)
                return
