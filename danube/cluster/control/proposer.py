"""The leader's side of proposals: checks them in order, joins the waiting ones into one entry, answers.

One entry is under way at a time, and it carries all waiting proposals.  So a command is checked against all
stored commands, and many commands cost one round.  No command is checked before the leader has applied all
entries of its predecessors.  Refusals, and successes without a change, are answered only when this member has
shown that it still leads: by the entry of the same round, or by a barrier.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from danube.cluster.log.applied_log import AppliedLog
from danube.cluster.raft.engine import Engine
from danube.core.cluster.agreement import AgreedTime
from danube.core.cluster.commands import Agreed, ExpireLeases
from danube.core.metadata.commands import (
    Command,
    CreateTopic,
    Outcome,
    TopicCommand,
    encode_command,
    join_commands,
)
from danube.core.metadata.machine import Metadata
from danube.core.metadata.outcomes import outcome_of
from danube.errors import (
    CallerError,
    DanubeError,
    InvalidArgument,
    LimitExceeded,
    NotLeader,
    OutcomeUnknown,
    Overloaded,
)
from danube.host import clock
from danube.ids import check_label
from danube.limits import METADATA_COMMANDS_PER_ENTRY_MAX, METADATA_ENTRY_BYTES_MAX, RAFT_ENTRY_BYTES_MAX

WAITING_MAX: Final = 10_000
APPLY_POLL_S: Final = 0.002
AGREED_BYTES: Final = 512  # an Agreed, and what stamping adds to it
ENTRY_BYTES_MAX: Final = RAFT_ENTRY_BYTES_MAX - 16  # the engine's limit is below that of the copy's readers

# Commands of one proposal take at most this, so each fits an entry together with its Agreed.
PROPOSAL_BYTES_MAX: Final = METADATA_ENTRY_BYTES_MAX - 64 * 1_024
PROPOSAL_COMMANDS_MAX: Final = METADATA_COMMANDS_PER_ENTRY_MAX // 2


@dataclass(slots=True, eq=False)
class _Proposal:
    """Commands of one origin on their way; ``places`` are those that are part of the entry."""

    origin: str
    sequence: int
    commands: Sequence[Command]
    answer: asyncio.Future[list[Outcome]]
    outcomes: list[Outcome] = field(default_factory=list)
    places: list[int] = field(default_factory=list)


class Proposer:
    """Proposals of the leader; all methods run on the member's loop."""

    def __init__(self, engine: Engine, machine: AppliedLog, failed: Callable[[BaseException], None]) -> None:
        self._engine = engine
        self._machine = machine
        self._failed = failed
        self._time = AgreedTime()
        self._waiting: deque[_Proposal] = deque()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def leading(self) -> bool:
        return self._task is not None

    def lead(self) -> None:
        """This member was elected."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._ended)

    def resign(self, leader_id: str) -> None:
        """Refuse all waiting proposals, none of which was stored: this member leads no more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        waiting, self._waiting = self._waiting, deque()
        for proposal in waiting:
            _fail(proposal, NotLeader("another member leads", leader_id=leader_id))

    async def propose(self, origin: str, sequence: int, commands: Sequence[Command]) -> list[Outcome]:
        """Propose commands and return their outcomes.  Raises NotLeader, OutcomeUnknown, Overloaded.

        Raises InvalidName for an origin that the machine would refuse.
        """
        if origin:
            check_label(origin, "origin")
        if self._task is None:
            raise NotLeader("this member does not lead", leader_id=self._engine.status.leader_id)
        if len(self._waiting) >= WAITING_MAX:
            raise Overloaded("too many metadata changes wait", hint="send them more slowly")
        answer: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Proposal(origin, sequence, commands, answer))
        self._changed.set()
        return await answer

    def now_us(self) -> int:
        """The time that this leader gives its commands."""
        agreed_us = self._machine.state.cluster.agreement.now_us
        return self._time.now_us(agreed_us, clock.monotonic_ns(), clock.wall_us())

    # -- rounds -----------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self.barrier()
            while True:
                await self._changed.wait()
                self._changed.clear()
                while self._waiting:
                    await self._round()
        except (NotLeader, OutcomeUnknown):
            pass  # before the first round; the member is told that it leads no more

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)

    async def barrier(self) -> None:
        """Wait until all commands acknowledged before now are applied here, and this member led."""
        index = await self._engine.read_barrier()
        # An entry of the engine's own is applied without a notice.
        while self._engine.status.applied_index < index:  # noqa: ASYNC110
            await asyncio.sleep(APPLY_POLL_S)

    async def _round(self) -> None:
        """Store one entry, or none if no waiting proposal changes the machine."""
        taken, entry = self._gather()
        try:
            if entry:
                outcomes = await self._engine.propose(entry)
                _fill_in(taken, outcomes)
            else:
                await self.barrier()
        except DanubeError as error:  # any refusal of the engine goes to the callers
            for proposal in taken:
                _fail(proposal, error)
            return
        except asyncio.CancelledError:
            for proposal in taken:
                _fail(proposal, OutcomeUnknown("leadership was lost on the way"))
            raise
        for proposal in taken:
            if not proposal.answer.done():
                proposal.answer.set_result(proposal.outcomes)

    def _gather(self) -> tuple[list[_Proposal], bytes]:
        """The proposals of this round and the entry that they make; b"" if nothing is to be stored."""
        ahead = self._ahead()
        taken: list[_Proposal] = []
        parts: list[bytes] = []
        bytes_left, count_left = ENTRY_BYTES_MAX, METADATA_COMMANDS_PER_ENTRY_MAX
        known: set[tuple[str, int]] = set()
        for _ in range(len(self._waiting)):
            proposal = self._waiting[0]
            if (proposal.origin, proposal.sequence) in known:
                break  # it may repeat a command of this entry, so it is answered after the entry
            stored = self._accept(ahead, proposal, bytes_left, count_left)
            if stored is None:
                break
            self._waiting.popleft()
            taken.append(proposal)
            known.add((proposal.origin, proposal.sequence))
            parts += stored
            bytes_left -= sum(map(len, stored)) + AGREED_BYTES
            count_left -= len(stored)
            if ahead is self._machine.state:
                break
        return taken, join_commands(parts) if parts else b""

    def _ahead(self) -> Metadata:
        """Later commands may depend on earlier ones that are not stored yet, so a copy runs ahead."""
        state = self._machine.state
        first = self._waiting[0]
        alone = len(self._waiting) == 1 and len(first.commands) == 1
        return state if alone and not isinstance(first.commands[0], ExpireLeases) else state.copy()

    def _accept(
        self, ahead: Metadata, proposal: _Proposal, bytes_left: int, count_left: int
    ) -> list[bytes] | None:
        """Return the commands of a proposal to store, its Agreed first; None if they do not fit any more."""
        if self._machine.state.cluster.agreement.repeated(proposal.origin, proposal.sequence):
            proposal.outcomes = self._outcomes_again(proposal)
            return []
        if ahead.cluster.agreement.repeated(proposal.origin, proposal.sequence):
            proposal.outcomes = [OutcomeUnknown("its proposer has gone on")] * len(proposal.commands)
            return []
        encoded, errors = _encoded(proposal.commands)
        needed = sum(map(len, encoded)) + AGREED_BYTES
        if needed > ENTRY_BYTES_MAX or len(encoded) >= METADATA_COMMANDS_PER_ENTRY_MAX:
            proposal.outcomes = [_too_large(len(encoded), needed)] * len(encoded)
            return []
        if needed > bytes_left or len(encoded) >= count_left:
            return None
        agreed = self._agreed(ahead, proposal)
        if ahead is not self._machine.state:
            ahead.apply(ahead.version + 1, agreed)
        parts: list[bytes] = []
        proposal.outcomes, proposal.places = [], []
        for place, command in enumerate(proposal.commands):
            outcome = errors.get(place) or self._check(ahead, command)
            proposal.outcomes.append(None if outcome is _CHANGES else outcome)
            if outcome is _CHANGES:
                proposal.places.append(place)
                parts.append(encoded[place])
        return [encode_command(agreed), *parts] if parts else []

    def _agreed(self, ahead: Metadata, proposal: _Proposal) -> Agreed:
        """Its index and term are stamped when the entry is applied; here they only must not go back."""
        agreement = ahead.cluster.agreement
        status = self._engine.status
        return Agreed(
            index=max(status.last_index + 1, agreement.index),
            term=max(status.term, agreement.term),
            now_us=self.now_us(),
            origin=proposal.origin,
            sequence=proposal.sequence,
        )

    def _check(self, ahead: Metadata, command: Command) -> Outcome:
        """The outcome of a command that is not to be stored; _CHANGES where it is."""
        if isinstance(command, Agreed):
            return InvalidArgument("what was agreed on is said by the leader alone")
        try:
            if not ahead.check(command):
                return outcome_of(ahead, command, [])
            if ahead is not self._machine.state:
                ahead.apply(ahead.version + 1, command)
        except CallerError as error:
            return error
        return _CHANGES

    # -- repetitions ------------------------------------------------------------------------------

    def _outcomes_again(self, proposal: _Proposal) -> list[Outcome]:
        """Return the outcomes of a proposal that was agreed on before, if they are known."""
        stored = self._machine.remembered(proposal.origin, proposal.sequence)
        if stored is None:
            return [self._found(command, len(proposal.commands) == 1) for command in proposal.commands]
        _, errors = _encoded(proposal.commands)
        outcomes: list[Outcome] = []
        following = deque(stored)
        for place, command in enumerate(proposal.commands):
            if place not in errors and following and following[0].command == command:
                outcomes.append(following.popleft().outcome)
            else:
                outcomes.append(errors.get(place) or self._refused_again(command))
        return outcomes

    def _found(self, command: Command, alone: bool) -> Outcome:
        """Return the outcome of a repeated command from the state that it asks for, or OutcomeUnknown."""
        state = self._machine.state
        if isinstance(command, CreateTopic):
            record = state.find_topic(command.topic)
            if record is not None and record.created_us == command.created_us:
                return record
        if alone and isinstance(command, TopicCommand):
            return state.find_topic(command.topic)
        return OutcomeUnknown("the command was agreed on before, and what it came to is not known any more")

    def _refused_again(self, command: Command) -> Outcome:
        """A command that was not stored the first time: why, or nothing if there was nothing to do."""
        state = self._machine.state
        try:
            if not state.check(command):
                return outcome_of(state, command, [])
        except CallerError as error:
            return error
        return OutcomeUnknown("the command was refused when it was sent first", why="the reason is not known")


_CHANGES: Final = OutcomeUnknown("the command is to be stored")


def _encoded(commands: Sequence[Command]) -> tuple[list[bytes], dict[int, DanubeError]]:
    """The commands' bytes, b"" for those that are too large, and why."""
    encoded: list[bytes] = []
    errors: dict[int, DanubeError] = {}
    for place, command in enumerate(commands):
        try:
            encoded.append(encode_command(command))
        except CallerError as error:
            errors[place] = error
            encoded.append(b"")
    return encoded, errors


def _too_large(command_count: int, needed_bytes: int) -> LimitExceeded:
    return LimitExceeded(
        "commands that are proposed together are too many or too large for one entry",
        why=f"they are {command_count} and take {needed_bytes} bytes; the limits are"
        f" {METADATA_COMMANDS_PER_ENTRY_MAX - 1} and {ENTRY_BYTES_MAX}",
        hint="propose fewer together",
        limit=ENTRY_BYTES_MAX,
    )


def _fill_in(taken: Sequence[_Proposal], outcomes: Sequence[Outcome]) -> None:
    """Give the outcomes of an entry's commands to the places that they came from."""
    following = iter(outcomes)
    for proposal in taken:
        for place in proposal.places:
            proposal.outcomes[place] = next(following)


def _fail(proposal: _Proposal, error: DanubeError) -> None:
    if not proposal.answer.done():
        proposal.answer.set_exception(error)
