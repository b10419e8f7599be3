"""One producer of a load test: sends records when they are due, and accounts for each."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Final, Protocol

from danube.errors import ClosedError, DanubeError, WrongState
from danube.host.clock import monotonic_ns
from danube.load import stamp
from danube.load.collector import Collector, producer_name
from danube.load.links.links import Sender
from danube.load.plan import Plan, size_label
from danube.load.schedule import OpenLoop

IN_FLIGHT_MAX: Final = 256  # unanswered records of a producer; further due records wait
LOOK_S: Final = 0.05  # interval of checks of an idle producer
TURN_S: Final = 0.25
PAUSE_S: Final = 1.0  # after a failure to connect


class Record(Protocol):
    """Takes one request into the statistics."""

    def __call__(
        self, kind: str, name: str, milliseconds: float, size: int, error: Exception | None = None
    ) -> None: ...


class Sizes:
    """Payload sizes by their weights, from a random source of its own."""

    def __init__(self, sizes: tuple[tuple[int, int], ...], seed: int) -> None:
        self._sizes = [size for size, _ in sizes]
        self._bounds = list(accumulate(weight for _, weight in sizes))
        self._random = random.Random(seed)  # noqa: S311 - sizes are no secret

    def next(self) -> int:
        return self._random.choices(self._sizes, cum_weights=self._bounds)[0]


class Producing:
    """Begins a record whenever one is due.  ``turn`` is called again and again until ``close``.

    Each record's outcome is waited for in a thread (a greenlet under Locust) of a bounded pool, where the
    protocol allows several to be under way.
    """

    def __init__(
        self,
        plan: Plan,
        collector: Collector,
        link_to: Callable[[str], Sender],
        record: Record,
        *,
        protocol: str,
        durability: str,
        halted: threading.Event,
    ) -> None:
        self._plan = plan
        self._collector = collector
        self._link_to = link_to
        self._record = record
        self._halted = halted
        self._durability = durability
        self._run = int(collector.run, 16)
        self._names = {size: f"{protocol} {durability} {size_label(size)}" for size, _ in plan.sizes}
        self._protocol = protocol
        self._link: Sender | None = None
        self._room = threading.Semaphore(IN_FLIGHT_MAX)
        self._pool: ThreadPoolExecutor | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Be another producer, whose numbers begin at 0."""
        self.producer = secrets.randbits(64)
        self.sent = 0
        self._sizes = Sizes(self._plan.sizes, self.producer)
        self._clock: OpenLoop | None = None
        self._phase = random.Random(self.producer).random()  # noqa: S311 - so that not all send at once

    # -- what Locust calls ----------------------------------------------------------------------

    def turn(self) -> None:
        """Send due records for a short time; only wait when the run is halted."""
        if self._halted.is_set():
            self._collector.senders.discard(self.producer)
            time.sleep(LOOK_S)
            return
        if self._link is None and not self._open():
            time.sleep(PAUSE_S)
            return
        try:
            self._send_due(monotonic_ns() + round(TURN_S * 1e9))
        except DanubeError as error:
            self._record("publish", f"{self._protocol} {self._durability}", 0.0, 0, error)
            self._renew()

    def close(self) -> None:
        """Wait a few seconds for records under way; those without an answer have then failed."""
        link, self._link = self._link, None
        if link is not None:
            link.close()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)
        self._collector.senders.discard(self.producer)

    # -- sending --------------------------------------------------------------------------------

    def _open(self) -> bool:
        """Connect; False, and a failed request, where that cannot be done."""
        link = self._link_to(f"load-{producer_name(self.producer)}")
        self._collector.senders.add(self.producer)
        began_ns = monotonic_ns()
        try:
            link.open()
        except DanubeError as error:
            self._collector.senders.discard(self.producer)
            self._record("connect", f"{self._protocol} producer", _ms_since(began_ns), 0, error)
            link.close()
            return False
        self._record("connect", f"{self._protocol} producer", _ms_since(began_ns), 0)
        self._link = link
        if link.pipelined and self._plan.rate:
            self._pool = ThreadPoolExecutor(IN_FLIGHT_MAX, "danube-load")
        if self._plan.rate:
            self._clock = OpenLoop(self._plan.rate, monotonic_ns(), self._plan.ramp_s, self._phase)
        return True

    def _renew(self) -> None:
        """After a failure: a new producer takes over, as an application would make one."""
        self.close()
        time.sleep(PAUSE_S)
        self._begin_anew()

    def _send_due(self, until_ns: int) -> None:
        while not self._halted.is_set():
            now_ns = monotonic_ns()
            if now_ns >= until_ns:
                return
            due_ns = now_ns if self._clock is None else self._clock.due_ns(self.sent)
            if due_ns > now_ns:
                time.sleep(min((due_ns - now_ns) / 1e9, LOOK_S))
                continue
            self._send(due_ns, now_ns - due_ns)

    def _send(self, due_ns: int, behind_ns: int) -> None:
        link, pool = self._link, self._pool
        if link is None:
            raise ClosedError("the producer is closed")
        if pool is not None:
            self._room.acquire()
        number, size = self.sent, self._sizes.next()
        key = number % self._plan.keys
        payload = stamp.write(self._run, self.producer, number, key, size, due_ns)
        self.sent += 1
        self._collector.begin(behind_ns)
        try:
            answer = link.begin(payload, f"{self.producer:016x}-{key}")
        except BaseException:  # also when Locust ends this user here: nothing else would settle it
            self._collector.failed(self.producer, number)
            if pool is not None:
                self._room.release()
            raise
        if pool is None:
            self._settle(answer, self.producer, number, size, due_ns)
        else:
            under_way = pool.submit(self._settle, answer, self.producer, number, size, due_ns)
            under_way.add_done_callback(lambda _: self._room.release())

    def _settle(self, answer: Callable[[], str], producer: int, number: int, size: int, due_ns: int) -> None:
        """Wait for the answer; its latency counts from when the record was due."""
        failure: Exception | None = None
        try:
            durability = answer()
        except DanubeError as error:
            failure = error
        except BaseException:
            self._collector.failed(producer, number)
            raise
        else:
            if durability != self._durability:
                failure = WrongState(f"acknowledged at level {durability}, not {self._durability}")
        if failure is None:
            self._collector.acknowledged(producer, number)
        else:
            self._collector.failed(producer, number)
        self._record("publish", self._names[size], _ms_since(due_ns), size, failure)


def _ms_since(began_ns: int) -> float:
    return (monotonic_ns() - began_ns) / 1e6
