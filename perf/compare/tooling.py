"""What the benchmark tools of the peers have in common: topics, CPU time, and no result without a number."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from perf.compare.figures import Spent, Turn
from perf.compare.processes import Failed, Finished, cpu_seconds, run
from perf.compare.product import TURN_TIMEOUT_S, Running, Work
from perf.compare.scripted import Scripted


def number(pattern: str, printed: str) -> float:
    """The last number that the tool printed in the group of ``pattern``; Failed when there is none."""
    found = re.findall(pattern, printed)
    if not found:
        raise Failed(f"the tool printed no {pattern!r}: {printed[-500:].strip()}")
    return float(str(found[-1]).replace(",", ""))


def spend(
    running: Running, command: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[Finished, Spent]:
    """Run a tool; what it printed, and the CPU time of it and of the server."""
    before = cpu_seconds(running.pids())
    finished = run(command, running.directory, environment, TURN_TIMEOUT_S)
    return finished, Spent(server=cpu_seconds(running.pids()) - before, client=finished.cpu_seconds)


def steady(rate: float, work: Work, spent: Spent) -> Turn:
    """A turn of ``work.count`` records at the rate that a tool printed; Failed when that is none."""
    if rate <= 0:
        raise Failed("the tool measured nothing")
    return Turn(rate=rate, seconds=work.count / rate, records=work.count, spent=spent)


class Topics:
    """Makes and deletes a tool's topics through the Python client of the product."""

    def __init__(self, client: Scripted) -> None:
        self._client = client

    def missing(self) -> str:
        reason = self._client.not_installed()
        return f"its topics are made by the Python client: {reason}" if reason else ""

    def create(self, running: Running, work: Work, stack: ExitStack) -> None:
        self._client.create(running, work, stack)

    def stored(self, running: Running, work: Work) -> int:
        """How many records the topic for replays holds; it is filled when it is new."""
        if work.topic not in running.stored:
            self._client.fill(running, work)
        return running.stored[work.topic]
