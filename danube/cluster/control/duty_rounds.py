"""Carries out the leader's duties: takes decisions from the pure part and proposes their commands.

Duties begin when a barrier of this leadership has shown that all earlier entries are applied here, so no
decision uses an older state.  All work is on the member's loop.  Only the large table of partitions is made
in a thread, from a copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from danube.core.cluster.commands import (
    AnyClusterCommand,
    AssignPartitions,
    ReleasePartitions,
    SetBrokerMode,
    UnloadPartitions,
)
from danube.core.metadata.commands import Change, Command
from danube.core.placement.duties import Duties, Placing
from danube.core.placement.partition_table import PartitionTable
from danube.errors import DanubeError
from danube.host import telemetry

if TYPE_CHECKING:
    from danube.cluster.control.proposer import Proposer
    from danube.cluster.log.applied_log import AppliedLog
    from danube.core.placement.balance import BalanceSettings

LOOK_S: Final = 0.1
COMMANDS_AT_ONCE: Final = 100

_log = telemetry.events("cluster.duties")


class DutyRounds:
    """One for each member; ``run`` is a task for each leadership."""

    def __init__(
        self,
        broker_id: int,
        settings: BalanceSettings,
        machine: AppliedLog,
        proposer: Proposer,
        barrier: Callable[[], Awaitable[object]],
    ) -> None:
        self._duties = Duties(broker_id, settings)
        self._machine = machine
        self._proposer = proposer
        self._barrier = barrier
        self._missed: list[Change] | None = None  # while the table is made
        self._wake = asyncio.Event()

    def placing(self) -> Placing | None:
        """How things stand; None before this leadership has begun to decide."""
        if self._machine.changed is None or self._missed is not None:
            return None
        return self._duties.placing(self._machine.state, self._proposer.now_us())

    async def run(self) -> None:
        """Run until cancelled, when this member leads no more."""
        try:
            while True:
                try:
                    await self._lead()
                except DanubeError as error:
                    # No majority is reached: it leads on, or is told soon that it does not.
                    _log.lasting("nothing can be decided", source="lead", why=str(error))
                    await asyncio.sleep(LOOK_S)
        finally:
            self._machine.changed = None

    async def _lead(self) -> None:
        await self._barrier()
        await self._begin()
        while True:
            await self._turn()

    async def _begin(self) -> None:
        state = self._machine.state
        self._missed = []
        self._machine.changed = self._changed
        table = await asyncio.to_thread(PartitionTable.of, state.copy())
        missed, self._missed = self._missed, None
        self._duties.begin(state, self._proposer.now_us(), table)
        self._duties.changed(missed)

    def _changed(self, changes: list[Change]) -> None:
        if self._missed is not None:
            self._missed += changes
            return
        self._duties.changed(changes)
        if self._duties.pressing:
            self._wake.set()

    async def _turn(self) -> None:
        """Propose the decided commands, and repeat as long as all of them were accepted."""
        self._wake.clear()
        commands = self._duties.turn(self._machine.state, self._proposer.now_us())
        if commands and await self._agree(commands):
            return
        try:
            async with asyncio.timeout(LOOK_S):
                if commands:  # something was refused: not again at once
                    await asyncio.sleep(LOOK_S)
                await self._wake.wait()
        except TimeoutError:
            pass  # look again

    async def _agree(self, commands: list[AnyClusterCommand]) -> bool:
        """Whether all were taken."""
        refused = 0
        for start in range(0, len(commands), COMMANDS_AT_ONCE):
            some: list[Command] = list(commands[start : start + COMMANDS_AT_ONCE])
            for command, outcome in zip(some, await self._proposer.propose("", 0, some), strict=True):
                if isinstance(outcome, DanubeError):
                    refused += 1
                    kind = type(command).__name__
                    _log.limited("a decision was overtaken", source=kind, what=kind, why=str(outcome))
                else:
                    _tell(command)
        return not refused


def _tell(command: Command) -> None:
    match command:
        case ReleasePartitions():
            _log.warning(
                "released what a dead broker owned",
                broker_id=command.broker_id,
                partitions=len(command.partitions),
            )
        case UnloadPartitions():
            _log.info(
                "partitions are to move",
                why=command.reason,
                to_broker_id=command.to_broker_id,
                partitions=len(command.partitions),
            )
        case SetBrokerMode():
            _log.info("broker mode", broker_id=command.broker_id, mode=command.mode, why=command.reason)
        case AssignPartitions():
            _log.debug("assigned", broker_id=command.broker_id, partitions=len(command.partitions))
