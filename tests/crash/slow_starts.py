"""Faults of a start: the mover or the store says nothing, or late, while a broker begins again.

Everything old lies in the store alone, so a broker that begins without it knows its own disk only.  It must
wait for what it does not know, and pass over nothing meanwhile.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import Event, Thread
from typing import Any

from tests.broker_process import BrokerProcess, wait_until
from tests.crash import nemesis
from tests.fakes.s3_proxy import Fault, S3Proxy

READY_S = 60.0
HELD_S = (1.0, 13.0)  # retention looks at a log every ten seconds
SLOW_ANSWER_S = 2.0
RUN_S, STOPPED_S = 0.02, 0.4  # of a slow mover, in turns

Ended = Callable[[BrokerProcess, random.Random], dict[str, Any]]
Trouble = Callable[[BrokerProcess], AbstractContextManager[Callable[[], None]]]


def mover_of(broker: BrokerProcess) -> int:
    """Process id of the mover, once it is there."""
    wait_until(lambda: "mover" in broker.processes(), READY_S, "a mover runs")
    return broker.processes()["mover"]


def stop_mover(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)


def let_mover_go(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@contextmanager
def stopped_mover(broker: BrokerProcess) -> Iterator[Callable[[], None]]:
    """SIGSTOP as soon as the mover is there, SIGCONT at the end."""
    stopped: list[int] = []

    def launched() -> None:
        stopped.append(mover_of(broker))
        stop_mover(stopped[0])

    try:
        yield launched
    finally:
        for pid in stopped:
            let_mover_go(pid)


@contextmanager
def slow_mover(broker: BrokerProcess) -> Iterator[Callable[[], None]]:
    """The mover gets a twentieth of the time."""
    ended = Event()

    def slow(pid: int) -> None:
        while not ended.is_set():
            stop_mover(pid)
            ended.wait(STOPPED_S)
            let_mover_go(pid)
            time.sleep(RUN_S)

    threads: list[Thread] = []

    def launched() -> None:
        threads.append(Thread(target=slow, args=(mover_of(broker),)))
        threads[0].start()

    try:
        yield launched
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def store_away(proxy: S3Proxy) -> Trouble:
    """Nobody listens where the store was."""

    @contextmanager
    def trouble(broker: BrokerProcess) -> Iterator[Callable[[], None]]:
        proxy.refuse()
        try:
            yield lambda: None
        finally:
            proxy.resume()

    return trouble


def store_meets(proxy: S3Proxy, make: Callable[[], Fault]) -> Trouble:
    """Every request meets the fault."""

    @contextmanager
    def trouble(broker: BrokerProcess) -> Iterator[Callable[[], None]]:
        proxy.add(make())
        try:
            yield lambda: None
        finally:
            proxy.clear()

    return trouble


def begun_under(trouble: Trouble, ways: Mapping[str, Ended]) -> nemesis.Fault:
    """A fault: the trouble begins, the broker ends in one of the ways and starts, the trouble goes on."""

    def fault(broker: BrokerProcess, source: random.Random) -> dict[str, Any]:
        way = source.choice(list(ways))
        with trouble(broker) as launched:
            facts = ways[way](broker, source)
            launched()
            held_s = source.uniform(*HELD_S)
            until = time.monotonic() + held_s
            broker.wait_ready(READY_S)
            time.sleep(max(0.0, until - time.monotonic()))
        return facts | {"way": way, "held_s": round(held_s, 3)}

    return fault


def killed(broker: BrokerProcess, source: random.Random) -> dict[str, Any]:
    """SIGKILL to every process, then a start that nobody waits for."""
    broker.kill()
    broker.launch()
    return {"ended": "all"}


def worker_killed(broker: BrokerProcess, source: random.Random) -> dict[str, Any]:
    """SIGKILL to one worker, which is replaced: it asks the same mover."""
    broker.kill_worker(source.randrange(len(broker.running_workers())))
    return {"ended": "a worker"}


def slow_starts(ways: Mapping[str, Ended], proxy: S3Proxy | None) -> dict[str, nemesis.Fault]:
    """All of these faults by name; those of the store need a proxy before it."""
    troubles: dict[str, Trouble] = {"start_with_a_stopped_mover": stopped_mover}
    troubles["start_with_a_slow_mover"] = slow_mover
    if proxy is not None:
        troubles["start_without_the_store"] = store_away(proxy)
        troubles["start_with_a_slow_store"] = store_meets(
            proxy, lambda: Fault("delay", seconds=SLOW_ANSWER_S)
        )
        troubles["start_with_a_silent_store"] = store_meets(proxy, lambda: Fault("blackhole"))
    return {name: begun_under(trouble, ways) for name, trouble in troubles.items()}
