"""Samples a running broker every few seconds, and notices processes that end though nobody ended them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from perf.soak.record import Record
from perf.soak.sampling import Sample, take

EXCUSED_S = 10.0  # after a fault: what it did may show late, as a missed heartbeat does


@dataclass
class Faults:
    """Which fault is going on, how many there were, and since when it is quiet."""

    clock: Callable[[], float] = time.monotonic
    count: int = 0
    running: str = ""
    ended_s: float = field(default=float("-inf"))

    def begin(self, name: str) -> None:
        self.count += 1
        self.running = name

    def end(self) -> None:
        self.running = ""
        self.ended_s = self.clock()

    def quiet_for(self, seconds: float) -> bool:
        """Whether no fault is going on and none ended in the last ``seconds``."""
        return not self.running and self.clock() - self.ended_s >= seconds


class Watch:
    """A thread that samples; errors of its own are raised by :meth:`check`."""

    def __init__(
        self,
        record: Record,
        faults: Faults,
        processes: Callable[[], Mapping[str, int]],
        places: Mapping[str, Callable[[], int]],
        *,
        data: str = "",
        every_s: float = 5.0,
        settle_s: float = 5.0,
        on_sample: Callable[[], None] = lambda: None,
    ) -> None:
        self.record = record
        self.faults = faults
        self.died: list[str] = []
        self._processes = processes
        self._places = places
        self._data = data
        self._every_s = every_s
        self._settle_s = settle_s
        self._on_sample = on_sample
        self._started = time.monotonic() - record.last_s
        self._known: dict[str, str] = {}
        self._known_s = time.monotonic()
        self._stopped = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="soak-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join()

    @property
    def run_s(self) -> float:
        """Seconds of the run, over all its sessions."""
        return time.monotonic() - self._started

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def take_died(self) -> list[str]:
        """What was noticed since the last call."""
        taken, self.died = self.died, []
        return taken

    def check(self) -> None:
        """Raise what ended the thread."""
        if self._error is not None:
            raise RuntimeError(f"sampling failed: {self._error}") from self._error

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self.sample()
                self._on_sample()
                self._stopped.wait(self._every_s)
        except Exception as error:  # told by check(), in the thread that can end the run
            self._error = error

    def sample(self) -> None:
        """Take one sample now."""
        quiet_before = self.faults.quiet_for(self._settle_s)
        interval = self.faults.count
        sample = take(self._processes, self._places, self._data)
        quiet = quiet_before and interval == self.faults.count
        self._compare(sample)
        self.record.add(self.run_s, interval, quiet, sample)

    def _compare(self, sample: Sample) -> None:
        """A life that is over must have a fault to account for it."""
        lives = {role: reading.life for role, reading in sample.processes.items()}
        since_s = self.faults.clock() - self._known_s
        if self.faults.quiet_for(EXCUSED_S + since_s):
            for role, life in self._known.items():
                if lives.get(role) != life:
                    self.died.append(
                        f"{role} (process {life.partition('-')[0]}) ended before {self.run_s:.0f} s"
                        " and nothing had been done to it"
                    )
        self._known, self._known_s = lives, self.faults.clock()
