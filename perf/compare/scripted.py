"""A product's Python client: a script of ``clients`` in the Python of the peers, one process for each end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from perf.compare import places
from perf.compare.figures import Spent, Turn
from perf.compare.levels import Level
from perf.compare.processes import cpu_seconds
from perf.compare.product import TURN_TIMEOUT_S, Running, Setting, Work
from tests.child_process import Child

WARM_SECONDS_WORTH = 0.05  # of the records, before the clock runs
LAST_ARRIVALS_S = 0.5  # a reader of what is not stored is stopped so long after the last send


class Clock:
    """CPU time of server and clients between two moments."""

    def __init__(self, running: Running, clients: Sequence[Child]) -> None:
        self._running = running
        self._clients = [child.pid for child in clients]
        self._before = self._now()

    def _now(self) -> tuple[float, float]:
        return cpu_seconds(self._running.pids()), cpu_seconds(self._clients)

    def spent(self) -> Spent:
        """Read while the clients still exist."""
        server, client = self._now()
        return Spent(server=server - self._before[0], client=client - self._before[1])


def answer(child: Child) -> dict[str, Any]:
    """A child's result, before it is gone."""
    found: dict[str, Any] = json.loads(child.line(TURN_TIMEOUT_S))
    return found


class Scripted:
    """Publish, one at a time, end to end and replay through the roles of ``clients/roles.py``."""

    kind = "python"

    def __init__(self, name: str, script: str, package: str, no_replay: str = "") -> None:
        self.name = name
        self._script = f"perf/compare/clients/{script}"
        self._package = package
        self._no_replay = no_replay

    def missing(self, setting: Setting, workload: str) -> str:
        if workload == "replay" and (self._no_replay or setting.level is Level.TAKEN):
            return self._no_replay or "nothing is stored that could be read again"
        return self.not_installed()

    def not_installed(self) -> str:
        return places.no_package(self._package)

    def turn(self, running: Running, work: Work) -> Turn:
        measures: dict[str, Callable[[Running, Work, ExitStack], Turn]] = {
            "publish": self._publish,
            "latency": self._latency,
            "e2e": self._end_to_end,
            "replay": self._replay,
        }
        with ExitStack() as stack:
            return measures[work.workload](running, self.whole(work), stack)

    def whole(self, work: Work) -> Work:
        """The same work in numbers that the client can do."""
        return work

    def child(self, role: str, running: Running, work: Work, **more: Any) -> Child:
        """A process with one role, not started yet."""
        options = {
            **running.address,
            "topic": work.topic,
            "size": work.size,
            "level": running.setting.level.label,
            "rate": work.rate,
            "record_count": work.count,
            "warm_count": self.warm_count(work),
            **more,
        }
        return Child(self._script, role, options, places.peers_python())

    def warm_count(self, work: Work) -> int:
        return max(1, int(work.count * WARM_SECONDS_WORTH))

    def create(self, running: Running, work: Work, stack: ExitStack) -> None:
        """Make the topic of this turn and have it deleted after it."""
        self.run("create", running, work)
        stack.callback(self.run, "delete", running, work)

    def run(self, role: str, running: Running, work: Work, **more: Any) -> dict[str, Any]:
        child = self.child(role, running, work, **more).wait_ready()
        child.go()
        return child.result(TURN_TIMEOUT_S)

    def _publish(self, running: Running, work: Work, stack: ExitStack) -> Turn:
        self.create(running, work, stack)
        child = self._ready("publish", running, work, stack)
        clock = Clock(running, [child])
        child.go()
        return rate_turn(answer(child), clock.spent())

    def _latency(self, running: Running, work: Work, stack: ExitStack) -> Turn:
        self.create(running, work, stack)
        child = self._ready("ack_latency", running, work, stack)
        clock = Clock(running, [child])
        started = time.monotonic()
        child.go()
        found = answer(child)
        seconds = float(found.get("seconds") or time.monotonic() - started)
        return Turn(
            rate=found["count"] / seconds,
            seconds=seconds,
            records=found["count"],
            p50_us=found["p50_us"],
            p99_us=found["p99_us"],
            spent=clock.spent(),
        )

    def _end_to_end(self, running: Running, work: Work, stack: ExitStack) -> Turn:
        """Reader first, then the producer; what was delivered, from the first send to the last arrival."""
        self.create(running, work, stack)
        stored = running.setting.level is not Level.TAKEN
        sent_count = work.count + self.warm_count(work)
        reader = self._ready(
            "read", running, work, stack,
            subscription=running.next_name(), record_count=sent_count if stored else 0,
        )  # fmt: skip
        producer = self._ready("publish", running, work, stack)
        clock = Clock(running, [producer, reader])
        producer.go()
        sent = answer(producer)
        if not stored:
            time.sleep(LAST_ARRIVALS_S)  # what is still on its way; the clock ends with the last arrival
            reader.go()
        found = answer(reader)
        spent = clock.spent()
        delivered = max(0, found["records"] - (sent_count - sent["records"]))
        ended = max(sent["ended_ns"], found["ended_ns"])
        moments = {"started_ns": sent["started_ns"], "ended_ns": ended, "records": delivered}
        return replace(rate_turn(moments, spent), lost=max(0, sent_count - found["records"]))

    def _replay(self, running: Running, work: Work, stack: ExitStack) -> Turn:
        if work.topic not in running.stored:
            self.fill(running, work)
        chosen = replace(work, count=min(work.count, running.stored[work.topic]))
        child = self._ready("replay", running, chosen, stack, subscription=running.next_name())
        clock = Clock(running, [child])
        child.go()
        return rate_turn(answer(child), clock.spent())

    def fill(self, running: Running, work: Work) -> None:
        """Make the topic that replays read; it lives as long as the server."""
        self.run("create", running, work)
        self.run("fill", running, work, record_count=work.stored)
        running.stored[work.topic] = work.stored

    def _ready(self, role: str, running: Running, work: Work, stack: ExitStack, **more: Any) -> Child:
        child = self.child(role, running, work, **more)
        stack.callback(child.close)
        return child.wait_ready()


def rate_turn(found: dict[str, Any], spent: Spent) -> Turn:
    """A turn from a load's moments and its number of records."""
    seconds = max(1e-9, (found["ended_ns"] - found["started_ns"]) / 1e9)
    return Turn(rate=found["records"] / seconds, seconds=seconds, records=found["records"], spent=spent)
