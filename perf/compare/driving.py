"""Two ways to drive a product: a Python client of ``clients``, a process for each end, and its own tool."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from perf.compare import places
from perf.compare.model import TURN_TIMEOUT_S, Failed, Level, Running, Setting, Spent, Turn, Work
from perf.compare.processes import Tool as Process
from perf.compare.processes import cpu_seconds
from perf.turns import per_second, seconds
from tests.child_process import Child

WARM_SECONDS_WORTH = 0.05  # of the records, before the clock runs
LAST_ARRIVALS_S = 0.5  # a reader of what is not stored is stopped so long after the last send
UNSTORED = "nothing is stored that could be read again"


def cpu(running: Running, clients: Sequence[Child]) -> Spent:
    """CPU time of server and clients until now; read while the clients still exist."""
    return Spent(server=cpu_seconds(running.pids()), client=cpu_seconds(child.pid for child in clients))


def answer(child: Child) -> dict[str, Any]:
    """A child's result, before it is gone."""
    found: dict[str, Any] = json.loads(child.line(TURN_TIMEOUT_S))
    return found


def turn_of(found: dict[str, Any], spent: Spent) -> Turn:
    """A turn from the moments and the number of records of a load, or from the times of its sends."""
    if "p50_us" not in found:
        return Turn(rate=per_second(found), seconds=seconds(found), records=found["records"], spent=spent)
    count, lasted_s = found["count"], found["seconds"]
    return Turn(
        rate=count / lasted_s, seconds=lasted_s, records=count, p50_us=found["p50_us"],
        p99_us=found["p99_us"], spent=spent,
    )  # fmt: skip


def unstored(setting: Setting, workload: str) -> str:
    """Why nothing of this setting can be replayed; empty for other workloads and where it can."""
    return UNSTORED if workload == "replay" and setting.level is Level.TAKEN else ""


@dataclass(frozen=True, kw_only=True)
class Scripted:
    """Publish, one at a time, end to end and replay through the roles of ``clients/roles.py``."""

    name: str
    script: str  # of ``clients``
    package: str = ""  # of the Python of the peers' clients; without one the script runs in this Python
    cannot: Mapping[str, str] = field(default_factory=dict)  # workload: why
    told: Mapping[str, object] = field(default_factory=dict)  # options of this client alone
    prefix: str = ""  # of its topics
    kind: str = "python"
    lone: bool = False

    def missing(self, setting: Setting, workload: str) -> str:
        return self.cannot.get(workload) or unstored(setting, workload) or self.not_installed()

    def not_installed(self) -> str:
        return places.no_package(self.package) if self.package else ""

    def turn(self, running: Running, work: Work) -> Turn:
        with ExitStack() as stack:
            if work.workload == "replay":
                chosen = replace(work, count=min(work.count, self.stored(running, work)))
                return self._timed("replay", running, chosen, stack, subscription=running.next_name())
            self.create(running, work, stack)
            if work.workload == "e2e":
                return self._end_to_end(running, work, stack)
            role = "ack_latency" if work.workload == "latency" else "publish"
            return self._timed(role, running, work, stack)

    def options(self, running: Running, work: Work) -> dict[str, Any]:
        """What every role is told."""
        return {
            **running.address, **self.told, "topic": self.prefix + work.topic, "size": work.size,
            "rate": work.rate, "level": running.setting.level.label, "record_count": work.count,
            "warm_count": max(1, int(work.count * WARM_SECONDS_WORTH)),
        }  # fmt: skip

    def child(self, role: str, running: Running, work: Work, **more: Any) -> Child:
        """A process with one role, not started yet."""
        python = places.peers_python() if self.package else [sys.executable]
        script = f"perf/compare/clients/{self.script}"
        return Child(script, role, self.options(running, work) | more, python)

    def create(self, running: Running, work: Work, stack: ExitStack) -> None:
        """Make the topic of this turn and have it deleted after it."""
        self.run("create", running, work)
        stack.callback(self.run, "delete", running, work)

    def run(self, role: str, running: Running, work: Work, **more: Any) -> dict[str, Any]:
        child = self.child(role, running, work, **more).wait_ready()
        child.go()
        return child.result(TURN_TIMEOUT_S)

    def _ready(self, role: str, running: Running, work: Work, stack: ExitStack, **more: Any) -> Child:
        child = self.child(role, running, work, **more)
        stack.callback(child.close)
        return child.wait_ready()

    def _timed(self, role: str, running: Running, work: Work, stack: ExitStack, **more: Any) -> Turn:
        child = self._ready(role, running, work, stack, **more)
        before = cpu(running, [child])
        child.go()
        found = answer(child)
        return turn_of(found, cpu(running, [child]) - before)

    def _end_to_end(self, running: Running, work: Work, stack: ExitStack) -> Turn:
        """Reader first, then the producer; what was delivered, from the first send to the last arrival."""
        stored = running.setting.level is not Level.TAKEN
        sent_count = work.count + self.options(running, work)["warm_count"]
        wanted = {"subscription": running.next_name(), "record_count": sent_count if stored else 0}
        reader = self._ready("read", running, work, stack, **wanted)
        producer = self._ready("publish", running, work, stack)
        before = cpu(running, [producer, reader])
        producer.go()
        sent = answer(producer)
        if not stored:
            time.sleep(LAST_ARRIVALS_S)  # what is still on its way; the clock ends with the last arrival
            reader.go()
        found = answer(reader)
        spent = cpu(running, [producer, reader]) - before
        delivered = max(0, found["records"] - (sent_count - sent["records"]))
        ended = max(sent["ended_ns"], found["ended_ns"])
        moments = {"started_ns": sent["started_ns"], "ended_ns": ended, "records": delivered}
        return replace(turn_of(moments, spent), lost=max(0, sent_count - found["records"]))

    def stored(self, running: Running, work: Work) -> int:
        """How many records the topic for replays holds; it is filled when it is new."""
        if work.topic not in running.stored:
            self.fill(running, work)
        return running.stored[work.topic]

    def fill(self, running: Running, work: Work) -> None:
        """Make the topic that replays read; it lives as long as the server."""
        self.run("create", running, work)
        self.run("fill", running, work, given=[work.stored])
        running.stored[work.topic] = work.stored


# -- tools --------------------------------------------------------------------------------------------


def number(pattern: str, printed: str) -> float:
    """The last number that the tool printed in the group of ``pattern``; Failed when there is none."""
    found = re.findall(pattern, printed)
    if not found:
        raise Failed(f"the tool printed no {pattern!r}: {printed[-500:].strip()}")
    return float(str(found[-1]).replace(",", ""))


def steady(rate: float, work: Work, spent: Spent) -> Turn:
    """A turn of ``work.count`` records at the rate that a tool printed; Failed when that is none."""
    if rate <= 0:
        raise Failed("the tool measured nothing")
    return Turn(rate=rate, seconds=work.count / rate, records=work.count, spent=spent)


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A benchmark tool as data: where it is, its command line, how its result is read, what it cannot do.

    ``topics`` is the Python client that makes and deletes its topics; ``after`` is done behind a turn.
    ``lone`` measures the workload of that name and nothing else.
    """

    name: str
    needs: places.Needed
    command: Callable[[Running, Work], Sequence[str]]
    read: Callable[[str, Running, Work, Spent], Turn]
    cannot: Mapping[str, str] = field(default_factory=dict)  # workload: why
    lacks: Callable[[], str] = lambda: ""
    environment: Mapping[str, str] | None = None
    topics: Scripted | None = None
    after: Callable[[Running, Work], object] | None = None
    kind: str = "tool"
    lone: bool = False

    def missing(self, setting: Setting, workload: str) -> str:
        reason = self.cannot.get(workload) or unstored(setting, workload) or self.needs.missing()
        reason = reason or self.lacks()
        if not reason and self.topics is not None and (absent := self.topics.not_installed()):
            return f"its topics are made by the Python client: {absent}"
        return reason

    def turn(self, running: Running, work: Work) -> Turn:
        with ExitStack() as stack:
            if self.after is not None:
                stack.callback(self.after, running, work)
            if self.topics is not None and work.workload == "replay":
                work = replace(work, count=min(work.count, self.topics.stored(running, work)))
            elif self.topics is not None:
                self.topics.create(running, work, stack)
            return self.measured(running, work)

    def measured(self, running: Running, work: Work) -> Turn:
        """Run it; what it printed, with its CPU time and the server's."""
        before = cpu(running, [])
        finished = Process(self.command(running, work), running.directory, self.environment).finish()
        spent = replace(cpu(running, []) - before, client=finished.cpu_seconds)
        return self.read(finished.output, running, work, spent)
