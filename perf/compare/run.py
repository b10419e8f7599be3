"""Who is compared with whom, and the turns: A B C A B C, the first of each thrown away."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from perf.compare.model import GROUPS, Failed, Row, Turn, Work, group_of, refuse_unfair, summary

from perf.compare.model import Client, Product, Running, Setting  # isort: skip
from perf.machine import touch
from perf.turns import GIB
from tests.broker_process import BrokerFailed
from tests.child_process import ChildFailed

TURN_S = 4.0  # what a turn lasts at scale 1
BYTES_MAX = GIB  # what a turn writes at most at scale 1
FIRST_COUNT = {100: 2_000, 1_024: 2_000, 65_536: 200}
CALIBRATIONS = 6  # short turns say little about long ones
GROWTH = 32  # from one to the next
LATENCY_RATE = 1_000
LATENCY_LEAST = 20
WARM_BYTES = 2 * GIB
WORKLOADS = {
    "publish": "records/s sent and acknowledged by one producer, as many in flight as suits its client",
    "latency": "one acknowledged send at a time, 1,000 a second: microseconds to the acknowledgement",
    "e2e": "records/s from one producer to one reader that runs beside it and whose place is kept",
    "replay": "stored records/s from the start of the log to a new reader",
    "lone": "messages/s of one after another, each published, received and acknowledged before the next",
}
SIZES = {
    "publish": (100, 1_024, 65_536),
    "latency": (1_024,),
    "e2e": (100, 1_024),
    "replay": (100, 1_024),
    "lone": (100,),
}
EXPECTED = (Failed, ChildFailed, BrokerFailed, OSError)
PLAIN = str.maketrans(" /.=", "----")


@dataclass(frozen=True)
class Skip:
    """Something that is not measured, and why."""

    what: str
    why: str
    failed: bool = False

    def __str__(self) -> str:
        return f"{'FAILED' if self.failed else 'skipped'}: {self.what}: {self.why}"


@dataclass
class Member:
    """One row while it is measured."""

    workload: str
    size: int
    product: Product
    running: Running
    client: Client
    count: int = 0  # of records in its next turn
    turns: list[Turn] = field(default_factory=list)

    @property
    def setting(self) -> Setting:
        return self.running.setting

    @property
    def who(self) -> str:
        return f"{self.setting.name} ({self.client.name})"

    def row(self) -> Row:
        """What its turns come to."""
        return Row(
            workload=self.workload, size=self.size, group=group_of(self.setting.level),
            product=self.product.name, setting=self.setting.name, level=self.setting.level,
            promise=self.setting.promise, client=self.client.name, kind=self.client.kind,
            ours=self.product.ours, version=self.product.version(), **summary(self.turns),
        )  # fmt: skip


@dataclass(kw_only=True)
class Comparison:
    """One run: yields a row for each that was measured; what was not is in ``skips``."""

    directory: Path
    products: Sequence[Product]
    workloads: Sequence[str] = tuple(WORKLOADS)
    sizes: Sequence[int] = ()  # () is those of each workload
    only: Sequence[str] = ()  # names of products or settings; () is all
    rounds: int = 5
    scale: float = 1.0
    note: Callable[[str], None] = lambda text: None
    skips: list[Skip] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def turn_s(self) -> float:
        return TURN_S * self.scale

    def rows(self) -> Iterator[Row]:
        touch(self.directory, int(WARM_BYTES * self.scale))
        for group in GROUPS:
            with ExitStack() as stack:
                started = list(self._start(group, stack))
                for workload in self.workloads:
                    for size in self.sizes or SIZES[workload]:
                        yield from self._measure(group, list(self._members(workload, size, started)))

    def skip(self, what: str, why: str, failed: bool = False) -> None:
        """Note, once, what is not measured."""
        found = Skip(what, why, failed)
        if found not in self.skips:
            self.skips.append(found)
            self.note(str(found))

    def _start(self, group: str, stack: ExitStack) -> Iterator[tuple[Product, Running]]:
        """The servers of a group; they stay idle while it is another's turn."""
        for product in self.products:
            for setting in product.settings:
                wanted = not self.only or not {product.name, setting.name}.isdisjoint(self.only)
                if group_of(setting.level) != group or not wanted:
                    continue
                if reason := product.missing(setting):
                    self.skip(setting.name, reason)
                    continue
                directory = self.directory / setting.name.translate(PLAIN)
                directory.mkdir()
                stack.callback(shutil.rmtree, directory, ignore_errors=True)
                try:
                    running = product.start(setting, directory)
                except EXPECTED as error:
                    self.skip(setting.name, f"it did not start: {error}", failed=True)
                    continue
                stack.callback(running.stop)
                yield product, running

    def _members(
        self, workload: str, size: int, started: Sequence[tuple[Product, Running]]
    ) -> Iterator[Member]:
        for product, running in started:
            for client in product.clients(running.setting):
                if (workload == "lone") is not client.lone:
                    continue
                if reason := client.missing(running.setting, workload):
                    self.skip(f"{client.name}, {workload}", reason)
                else:
                    yield Member(workload, size, product, running, client)

    def _measure(self, group: str, members: list[Member]) -> Iterator[Row]:
        refuse_unfair(group, [member.row() for member in members])
        for number in range(self.rounds + 1):
            for member in list(members):
                try:
                    self._turn(member, number)
                except EXPECTED as error:
                    what = f"{member.who}, {member.workload} {member.size}"
                    self.skip(what, str(error), failed=True)
                    members.remove(member)
        for member in members:
            yield member.row()

    def _turn(self, member: Member, number: int) -> None:
        """One turn; the first finds out how much work is enough, and counts only when it is the only one."""
        turn = self._done(member) if number else self._calibrate(member)
        os.sync()  # what this turn left to be written is nobody else's burden
        if number or not self.rounds:
            member.turns.append(turn)
            figure = f"p50 {turn.p50_us:,.0f} us" if turn.p50_us is not None else f"{turn.rate:,.0f}/s"
            what = f"{member.workload} {member.size} B, round {number}"
            self.note(f"{what}: {member.who}: {figure} ({member.setting.level.label})")

    def _done(self, member: Member) -> Turn:
        """The next turn of a member; topics for replays keep their name."""
        topic = f"{member.workload}-{member.size}"
        if member.workload != "replay":
            topic += f"-{next(self.numbers)}"
        stored = min(int(member.product.stored_max * self.scale), self._count_max(member.size))
        work = Work(
            workload=member.workload, size=member.size, count=member.count, topic=topic,
            stored=max(1, stored), seconds=self.turn_s, rate=LATENCY_RATE,
        )  # fmt: skip
        return member.client.turn(member.running, work)

    def _calibrate(self, member: Member) -> Turn:
        if member.workload == "latency":
            member.count = max(LATENCY_LEAST, int(LATENCY_RATE * self.turn_s))
            return self._done(member)
        member.count = min(FIRST_COUNT.get(member.size, 1_000), self._count_max(member.size))
        before, turn = None, self._done(member)
        for _ in range(CALIBRATIONS):
            if turn.records <= member.count // 2:  # all that is stored was read
                break
            beginning = self._mostly_beginning(member, turn, before)
            done, member.count = member.count, self._next_count(member, turn, before, beginning)
            if member.count <= done or (not beginning and turn.seconds >= self.turn_s / 2):
                break
            before, turn = turn, self._done(member)
        return turn

    def _mostly_beginning(self, member: Member, turn: Turn, before: Turn | None) -> bool:
        """Whether a turn says little: it is short, or a tool's whose length does not follow its work yet."""
        if member.client.kind == "tool" and (before is None or turn.seconds < 1.5 * before.seconds):
            return True
        return turn.seconds < self.turn_s / 4

    def _next_count(self, member: Member, turn: Turn, before: Turn | None, beginning: bool) -> int:
        """Records that last a turn; of a tool, beside its own start."""
        rate = turn.rate
        if member.client.kind == "tool" and before is not None and not beginning:
            rate = (turn.records - before.records) / (turn.seconds - before.seconds)
        wanted = max(1, int(rate * self.turn_s), 4 * member.count if beginning else 0)
        return min(self._count_max(member.size), wanted, GROWTH * member.count)

    def _count_max(self, size: int) -> int:
        return max(20, int(BYTES_MAX * self.scale) // size)
