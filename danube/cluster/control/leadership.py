"""Duties of a member while it leads: answers proposals and barriers, changes members, places partitions.

A request that reaches a member that does not lead is refused with the leader's id, if that is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from danube.cluster.control.calls import (
    Answer,
    Barrier,
    Change,
    Changed,
    Propose,
    Proposed,
    Reached,
    Request,
    encode_outcomes,
)
from danube.cluster.control.duty_rounds import DutyRounds
from danube.cluster.control.proposer import APPLY_POLL_S, Proposer
from danube.cluster.links.addresses import split_address
from danube.cluster.log.applied_log import AppliedLog
from danube.cluster.log.node_files import check_node_id
from danube.cluster.raft.engine import Engine, Members
from danube.core.metadata.commands import decode_commands
from danube.core.placement.balance import BalanceSettings
from danube.core.placement.duties import Placing
from danube.errors import (
    ConfigInvalid,
    Conflict,
    DanubeError,
    InvalidArgument,
    NotFound,
    NotLeader,
    NotSupported,
    OutcomeUnknown,
    WrongState,
)
from danube.host import telemetry

_log = telemetry.events("cluster.leader")


class Leadership:
    """The leader's part of a member; idle in a follower."""

    def __init__(
        self,
        engine: Engine,
        machine: AppliedLog,
        failed: Callable[[BaseException], None],
        *,
        balance: BalanceSettings | None = None,
    ) -> None:
        self._engine = engine
        self._machine = machine
        self._failed = failed
        self._proposer = Proposer(engine, machine, failed)
        self._duties = DutyRounds(
            int(engine.status.node_id), balance or BalanceSettings(), machine, self._proposer, self._barrier
        )
        self._deciding: asyncio.Task[None] | None = None

    @property
    def leading(self) -> bool:
        return self._proposer.leading

    @property
    def placing(self) -> Placing | None:
        """How partitions are placed, as far as this member decides it."""
        return self._duties.placing() if self.leading else None

    def lead(self) -> None:
        if not self.leading:
            self._proposer.lead()
            self._deciding = asyncio.get_running_loop().create_task(self._duties.run())
            self._deciding.add_done_callback(self._decided)

    def resign(self, leader_id: str) -> None:
        self._proposer.resign(leader_id)
        if self._deciding is not None:
            self._deciding.cancel()
            self._deciding = None

    def _decided(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)

    def follow_time(self) -> None:
        """Follow the agreed time of an applied entry, from which the next leader goes on."""
        if not self.leading and self._machine.state.cluster.agreement.now_us:
            self._proposer.now_us()

    async def answer(self, request: Request) -> Answer:
        """Answer a request that only the leader answers; raises NotLeader, OutcomeUnknown, and refusals."""
        if not self.leading:
            raise NotLeader("this member does not lead", leader_id=self._engine.status.leader_id)
        match request:
            case Propose():
                commands = decode_commands(request.commands)
                outcomes = await self._proposer.propose(request.origin, request.sequence, commands)
                return Proposed(self._machine.version, encode_outcomes(outcomes))
            case Barrier():
                return await self._barrier()
            case Change():
                return Changed(await self._change(request))
        raise NotSupported("a member may not ask this")

    async def _barrier(self) -> Reached:
        await self._proposer.barrier()
        return Reached(self._machine.version)

    # -- members ----------------------------------------------------------------------------------

    async def _change(self, change: Change) -> Members:
        before = self._engine.status.members
        after = changed_members(before, change)
        if after == before:
            await self._settled()
        else:
            _log.info("members change", what=change.what, node_id=change.node_id, address=change.address)
            await self._engine.change_members(after)
        return after

    async def _settled(self) -> None:
        """Wait until the whole log is agreed on: a requested change may be under way already."""
        begun = self._engine.status
        while await self._engine.read_barrier() < begun.last_index:  # noqa: ASYNC110
            await asyncio.sleep(APPLY_POLL_S)
        if self._engine.status.term != begun.term:
            raise OutcomeUnknown("leadership was lost before the change was agreed on")

    async def note_move(self, node_id: str, address: str) -> None:
        """A member is reached at another address for good: have it agreed on."""
        try:
            await self.answer(Change("move", node_id, address))
        except DanubeError as error:
            _log.warning("a member's new address is not agreed on yet", node_id=node_id, why=str(error))


def changed_members(before: Members, change: Change) -> Members:
    """The members after one change; the same where it is so already.  Raises a CallerError."""
    voters, learners = dict(before.voters), dict(before.learners)
    node_id, address = change.node_id, change.address
    match change.what:
        case "add":
            _check_new(before, node_id, address)
            if node_id not in voters:
                learners[node_id] = address
        case "promote":
            if node_id not in voters:
                if node_id not in learners:
                    raise NotFound(f"node {node_id} is no learner", hint="add it first")
                voters[node_id] = learners.pop(node_id)
        case "remove":
            if node_id not in voters and node_id not in learners and not change.repeated:
                raise NotFound(f"node {node_id} is no member")
            if list(voters) == [node_id]:
                raise WrongState("the last voter cannot be removed", hint="promote another one first")
            voters.pop(node_id, None)
            learners.pop(node_id, None)
        case "move":
            _check_address(address)
            for part in (voters, learners):
                if node_id in part:
                    part[node_id] = address
        case _:
            raise InvalidArgument(f"a member cannot be changed by {change.what[:40]!r}")
    return Members(voters, learners)


def _check_address(address: str) -> None:
    """Raise InvalidArgument for an address that cannot be reached: members would dial it for good."""
    try:
        split_address(address)
    except ConfigInvalid as error:
        raise InvalidArgument(error.what, why=error.why, hint=error.hint) from None


def _check_new(before: Members, node_id: str, address: str) -> None:
    check_node_id(node_id)
    _check_address(address)
    for other, taken in {**before.learners, **before.voters}.items():
        if taken == address and other != node_id:
            raise Conflict(
                f"node {other} is at {address} already",
                hint=f"if its data is gone, `danube cluster remove-node --node-id {other}` at a member;"
                " a node that was started with --join or --seed-nodes is added by itself then",
            )
