"""The leader's task: it begins behind a barrier, looks when something changes, begins anew after errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from danube.cluster.control import duty_rounds
from danube.cluster.control.duty_rounds import DutyRounds
from danube.core.metadata.commands import Change, Command, Outcome
from danube.core.metadata.machine import Metadata
from danube.core.placement.balance import BalanceSettings
from danube.errors import CallerError, NotLeader, OutcomeUnknown
from tests.unit.cluster_site import SECOND_US, Site


class Member:
    """A machine, its proposer and its barrier; ``site`` has brokers that are registered."""

    def __init__(self) -> None:
        self.site = Site(brokers=3)
        self.site.lead()
        self.changed: Callable[[list[Change]], None] | None = None
        self.site.duties.changed = self._tell  # type: ignore[method-assign]
        self.barrier = asyncio.Event()
        self.barriers = 0
        self.failures: list[Exception] = []
        self.proposed: list[Command] = []
        self.rounds = DutyRounds(1, BalanceSettings(strategy="fair"), self, self, self._barrier)  # type: ignore[arg-type]

    @property
    def state(self) -> Metadata:
        return self.site.state

    def now_us(self) -> int:
        return self.site.now_us

    def _tell(self, changes: list[Change]) -> None:
        if self.changed is not None:
            self.changed(changes)

    async def _barrier(self) -> None:
        self.barriers += 1
        await self.barrier.wait()

    async def propose(self, origin: str, sequence: int, commands: list[Command]) -> list[Outcome]:
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        assert len(commands) <= duty_rounds.COMMANDS_AT_ONCE
        self.proposed += commands
        return [self._outcome(command) for command in commands]

    def _outcome(self, command: Command) -> Outcome:
        try:
            self.site.do(command)
        except CallerError as error:
            return error
        return None


def led(scenario: Callable[[Member], Any]) -> Member:
    member = Member()

    async def run() -> None:
        task = asyncio.create_task(member.rounds.run())
        try:
            await scenario(member)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    return member


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.005)


def test_nothing_is_decided_before_the_barrier() -> None:
    async def scenario(member: Member) -> None:
        member.site.topic("orders")
        await asyncio.sleep(0.15)
        assert not member.proposed and member.changed is None
        member.barrier.set()
        await until(lambda: member.site.unowned() == 0)

    assert led(scenario).changed is None, "it follows the machine only while it leads"


def test_a_new_topic_does_not_wait_for_the_next_look(monkeypatch: Any) -> None:
    monkeypatch.setattr(duty_rounds, "LOOK_S", 60.0)

    async def scenario(member: Member) -> None:
        member.barrier.set()
        await until(lambda: bool(member.proposed))
        await asyncio.sleep(0.05)
        member.site.topic("orders", 12)
        await until(lambda: member.site.unowned() == 0)

    led(scenario)


def test_what_changes_while_the_table_is_made_is_part_of_it(monkeypatch: Any) -> None:
    async def scenario(member: Member) -> None:
        made = asyncio.to_thread

        async def late(function: Any, *arguments: Any) -> Any:
            table = await made(function, *arguments)
            member.site.topic("meanwhile")
            return table

        monkeypatch.setattr(duty_rounds.asyncio, "to_thread", late)
        member.site.topic("before")
        member.barrier.set()
        await until(lambda: member.site.state.topic_count == 2 and member.site.unowned() == 0)

    led(scenario)


def test_it_begins_anew_after_a_majority_was_not_reached() -> None:
    async def scenario(member: Member) -> None:
        member.failures = [OutcomeUnknown("no majority"), NotLeader("for a moment")]
        member.barrier.set()
        member.site.topic("orders")
        await until(lambda: member.site.unowned() == 0)
        assert member.barriers == 3

    led(scenario)


def test_a_refused_decision_is_looked_at_again_and_not_at_once() -> None:
    async def scenario(member: Member) -> None:
        member.barrier.set()
        await until(lambda: bool(member.proposed))
        outcome = member._outcome
        refusals: list[float] = []

        def refuse(command: Command) -> Outcome:
            if len(refusals) < 2 and type(command).__name__ == "AssignPartitions":
                refusals.append(asyncio.get_running_loop().time())
                return CallerError("overtaken")
            return outcome(command)

        member._outcome = refuse  # type: ignore[method-assign]
        member.site.topic("orders")
        await until(lambda: member.site.unowned() == 0)
        assert refusals[1] - refusals[0] >= duty_rounds.LOOK_S * 0.9

    led(scenario)


def test_many_decisions_are_proposed_in_parts() -> None:
    async def scenario(member: Member) -> None:
        for number in range(5):
            member.site.topic(f"t{number}", 1_000)
        member.barrier.set()
        await until(lambda: member.site.unowned() == 0)
        member.site.die(3)
        member.site.now_us += 3 * SECOND_US
        member.site.renew(1, 2)
        await until(lambda: member.site.unowned() == 0 and member.site.counts()[3] == 0)

    led(scenario)
