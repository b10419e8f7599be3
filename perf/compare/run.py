"""Who is compared with whom, and the turns: A B C A B C, the first of each thrown away."""

from __future__ import annotations

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
Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run compares and how long it takes over it."""

    directory: Path
    products: Sequence[Product]
    workloads: Sequence[str] = tuple(WORKLOADS)
    sizes: Sequence[int] = ()  # () is those of each workload
    only: Sequence[str] = ()  # names of products or settings; () is all
    rounds: int = 5
    scale: float = 1.0

    @property
    def turn_s(self) -> float:
        return TURN_S * self.scale


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

    product: Product
    running: Running
    client: Client
    count: int = 0
    turns: list[Turn] = field(default_factory=list)

    @property
    def setting(self) -> Setting:
        return self.running.setting

    @property
    def who(self) -> str:
        return f"{self.setting.name} ({self.client.name})"

    def row(self, group: str, workload: str, size: int) -> Row:
        """What its turns come to."""
        return Row(
            workload=workload, size=size, group=group, product=self.product.name, setting=self.setting.name,
            level=self.setting.level, promise=self.setting.promise, client=self.client.name,
            kind=self.client.kind, ours=self.product.ours, version=self.product.version(),
            **summary(self.turns),
        )  # fmt: skip


class Comparison:
    """One run: yields a row for each that was measured; what was not is in ``skips``."""

    def __init__(self, options: Options, note: Note = lambda text: None) -> None:
        self.options = options
        self.skips: list[Skip] = []
        self._note = note
        self._numbers = 0

    def rows(self) -> Iterator[Row]:
        touch(self.options.directory, int(WARM_BYTES * self.options.scale))
        for group in GROUPS:
            with ExitStack() as stack:
                started = list(self._start(group, stack))
                for workload in self.options.workloads:
                    for size in self.options.sizes or SIZES[workload]:
                        yield from self._measure(group, workload, size, started)

    def skip(self, what: str, why: str, failed: bool = False) -> None:
        """Note, once, what is not measured."""
        found = Skip(what, why, failed)
        if found not in self.skips:
            self.skips.append(found)
            self._note(str(found))

    def _start(self, group: str, stack: ExitStack) -> Iterator[tuple[Product, Running]]:
        """The servers of a group; they stay idle while it is another's turn."""
        only = self.options.only
        for product in self.options.products:
            for setting in product.settings:
                if group_of(setting.level) != group or (
                    only and not {product.name, setting.name} & set(only)
                ):
                    continue
                if reason := product.missing(setting):
                    self.skip(setting.name, reason)
                    continue
                directory = self.options.directory / setting.name.translate(PLAIN)
                directory.mkdir()
                stack.callback(shutil.rmtree, directory, ignore_errors=True)
                try:
                    running = product.start(setting, directory)
                except EXPECTED as error:
                    self.skip(setting.name, f"it did not start: {error}", failed=True)
                    continue
                stack.callback(running.stop)
                yield product, running

    def _measure(
        self, group: str, workload: str, size: int, started: Sequence[tuple[Product, Running]]
    ) -> Iterator[Row]:
        members = list(self._members(workload, started))
        refuse_unfair(group, [member.row(group, workload, size) for member in members])
        for number in range(self.options.rounds + 1):
            for member in list(members):
                try:
                    self._turn(member, workload, size, number)
                except EXPECTED as error:
                    self.skip(f"{member.who}, {workload} {size}", str(error), failed=True)
                    members.remove(member)
        for member in members:
            yield member.row(group, workload, size)

    def _members(self, workload: str, started: Sequence[tuple[Product, Running]]) -> Iterator[Member]:
        for product, running in started:
            for client in product.clients(running.setting):
                if (workload == "lone") is not client.lone:
                    continue
                if reason := client.missing(running.setting, workload):
                    self.skip(f"{client.name}, {workload}", reason)
                else:
                    yield Member(product, running, client)

    def _turn(self, member: Member, workload: str, size: int, number: int) -> None:
        """One turn; the first finds out how much work is enough, and counts only when it is the only one."""
        if not number:
            turn = self._calibrate(member, workload, size)
        else:
            turn = member.client.turn(member.running, self.work(member, workload, size))
        os.sync()  # what this turn left to be written is nobody else's burden
        if number or not self.options.rounds:
            member.turns.append(turn)
            figure = f"p50 {turn.p50_us:,.0f} us" if turn.p50_us is not None else f"{turn.rate:,.0f}/s"
            level = member.setting.level.label
            self._note(f"{workload} {size} B, round {number}: {member.who}: {figure} ({level})")

    def _calibrate(self, member: Member, workload: str, size: int) -> Turn:
        if workload == "latency":
            member.count = max(LATENCY_LEAST, int(LATENCY_RATE * self.options.turn_s))
            return member.client.turn(member.running, self.work(member, workload, size))
        member.count = min(FIRST_COUNT.get(size, 1_000), self._count_max(size))
        before, turn = None, member.client.turn(member.running, self.work(member, workload, size))
        for _ in range(CALIBRATIONS):
            if turn.records <= member.count // 2:  # all that is stored was read
                break
            beginning = self._mostly_beginning(member, turn, before)
            done, member.count = member.count, self._next_count(member, size, turn, before, beginning)
            if member.count <= done or (not beginning and turn.seconds >= self.options.turn_s / 2):
                break
            before, turn = turn, member.client.turn(member.running, self.work(member, workload, size))
        return turn

    def _mostly_beginning(self, member: Member, turn: Turn, before: Turn | None) -> bool:
        """Whether a turn says little: it is short, or a tool's whose length does not follow its work yet."""
        if member.client.kind == "tool" and (before is None or turn.seconds < 1.5 * before.seconds):
            return True
        return turn.seconds < self.options.turn_s / 4

    def _next_count(self, member: Member, size: int, turn: Turn, before: Turn | None, beginning: bool) -> int:
        """Records that last a turn; of a tool, beside its own start."""
        rate = turn.rate
        if member.client.kind == "tool" and before is not None and not beginning:
            rate = (turn.records - before.records) / (turn.seconds - before.seconds)
        wanted = max(1, int(rate * self.options.turn_s), 4 * member.count if beginning else 0)
        return min(self._count_max(size), wanted, GROWTH * member.count)

    def _count_max(self, size: int) -> int:
        return max(20, int(BYTES_MAX * self.options.scale) // size)

    def work(self, member: Member, workload: str, size: int) -> Work:
        """What a member does in its next turn; topics for replays keep their name."""
        self._numbers += 1
        topic = f"replay-{size}" if workload == "replay" else f"{workload}-{size}-{self._numbers}"
        stored = min(int(member.product.stored_max * self.options.scale), self._count_max(size))
        return Work(
            workload=workload, size=size, count=member.count, topic=topic, stored=max(1, stored),
            seconds=self.options.turn_s, rate=LATENCY_RATE,
        )  # fmt: skip
