"""Faults: each is fired at a running broker, proves itself, and leaves the broker ready again."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from tests.broker_process import BrokerProcess, alive, wait_until
from tests.crash.journal import Journal

RECOVER_S = 60.0  # a busy machine takes its time to start processes


def kill_worker(broker: BrokerProcess, source: random.Random) -> dict[str, Any]:
    """SIGKILL to one worker; another takes its place."""
    pid = broker.kill_worker(source.randrange(len(broker.running_workers())))
    started = time.monotonic()
    broker.wait_worker_replaced(pid, RECOVER_S)
    broker.wait_ready(RECOVER_S)
    return {"pid": pid, "replaced_s": round(time.monotonic() - started, 3)}


def kill_all(broker: BrokerProcess, source: random.Random) -> dict[str, Any]:
    """SIGKILL to every process of the broker at once, then a new start."""
    pids = broker.pids
    broker.kill()
    started = time.monotonic()
    broker.start(RECOVER_S)
    return {"pids": pids, "ready_s": round(time.monotonic() - started, 3)}


def kill_supervisor(broker: BrokerProcess, source: random.Random) -> dict[str, Any]:
    """SIGKILL to the supervisor alone: the workers must end by themselves."""
    supervisor, workers = broker.pid, broker.running_workers()
    os.kill(supervisor, signal.SIGKILL)
    started = time.monotonic()
    wait_until(lambda: not any(map(alive, [supervisor, *workers])), 5, "workers ended after their supervisor")
    ended = time.monotonic() - started
    broker.kill()
    broker.start(RECOVER_S)
    return {"pid": supervisor, "workers_ended_s": round(ended, 3)}


def pause_worker(broker: BrokerProcess, source: random.Random) -> dict[str, Any]:
    """SIGSTOP to one worker for a while; it may or may not be replaced meanwhile."""
    pid = source.choice(broker.running_workers())
    pause_s = source.uniform(0.3, 1.5)
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(pause_s)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    broker.wait_ready(RECOVER_S)
    return {"pid": pid, "pause_s": round(pause_s, 3)}


def terminate(broker: BrokerProcess, source: random.Random) -> dict[str, Any]:
    """SIGTERM under load: drains, ends with 0, and starts again."""
    started = time.monotonic()
    code = broker.stop()
    stopped = time.monotonic() - started
    if code != 0:
        raise AssertionError(f"SIGTERM left with {code}\n{broker.output_tail()}")
    broker.start(RECOVER_S)
    return {"stopped_s": round(stopped, 3)}


def kill_during_recovery(broker: BrokerProcess, source: random.Random) -> dict[str, Any]:
    """SIGKILL to everything, and again while the next start recovers."""
    broker.kill()
    broker.launch()
    delay_s = source.uniform(0.05, 1.0)
    time.sleep(delay_s)
    broker.kill()
    broker.start(RECOVER_S)
    return {"second_kill_after_s": round(delay_s, 3)}


def kill_mover(broker: BrokerProcess, source: random.Random) -> dict[str, Any]:
    """SIGKILL to the process that does object I/O; another takes its place.  Needs tiered storage."""
    wait_until(lambda: "mover" in broker.processes(), RECOVER_S, "a mover runs")
    pid = broker.processes()["mover"]
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    wait_until(lambda: broker.processes().get("mover", pid) != pid, RECOVER_S, f"mover {pid} replaced")
    return {"pid": pid, "replaced_s": round(time.monotonic() - started, 3)}


Fault = Callable[[BrokerProcess, random.Random], dict[str, Any]]
FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        kill_worker, kill_all, kill_supervisor, pause_worker, terminate, kill_during_recovery, kill_mover
    )
}  # fmt: skip
WEIGHTS = {
    "kill_during_recovery": 1,
    "kill_worker": 6,
    "kill_all": 2,
    "kill_supervisor": 1,
    "pause_worker": 2,
    "terminate": 1,
}


class Nemesis:
    """Fires faults drawn from a seed and journals each with what it did.

    ``more`` are faults beside those of this module; ``weights`` says which are drawn, and how often.
    """

    def __init__(
        self,
        broker: BrokerProcess,
        journal: Journal,
        seed: int | str,
        *,
        weights: Mapping[str, int] = WEIGHTS,
        more: Mapping[str, Fault] | None = None,
    ) -> None:
        self.broker = broker
        self.journal = journal
        self.seed = seed
        self.source = random.Random(f"nemesis {seed}")
        self.weights = weights
        self.faults = {**FAULTS, **(more or {})}
        self.fired: list[str] = []

    def fire(self, name: str = "") -> str:
        """One fault, ``name`` or a drawn one; which it was."""
        if not name:
            (name,) = self.source.choices(list(self.weights), list(self.weights.values()))
        started = time.monotonic_ns()
        facts = self.faults[name](self.broker, self.source)
        self.journal.write("fault", name, self.seed, started, time.monotonic_ns(), facts)
        self.fired.append(name)
        return name

    def rest(self, least_s: float, most_s: float) -> None:
        """Let the load go on for a random while."""
        time.sleep(self.source.uniform(least_s, most_s))
