"""Trying again against a store that fails: jittered pauses, a deadline, and a budget for all of it.

Retries help if one request in many fails, and harm an overloaded store.  So retries take tokens from a bucket
(:class:`RetryBudget`): each first request adds ``share`` of a token, each retry takes one.  In the long run
retries are at most ``share`` of the requests (a fifth), for any errors and any number of threads.  With an
empty bucket the error goes to the caller at once.

Pauses double from ``first_s`` to ``most_s`` and each is drawn evenly from zero to that bound (full jitter),
so clients that failed together do not return together.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from danube.errors import StoreUnavailable

T = TypeVar("T")

SHARE: Final = 0.2
BURST: Final = 10.0


class RetryBudget:
    """Tokens for retries, shared by all threads that ask one store."""

    def __init__(self, share: float = SHARE, burst: float = BURST) -> None:
        self.requests = 0  # first tries
        self.retries = 0
        self.refused = 0  # retries that there was no token for
        self._share = share
        self._burst = burst
        self._tokens = burst
        self._lock = threading.Lock()

    def earn(self) -> None:
        """A request is made for the first time."""
        with self._lock:
            self.requests += 1
            self._tokens = min(self._burst, self._tokens + self._share)

    def spend(self) -> bool:
        """Take a token for one retry; False when there is none."""
        with self._lock:
            if self._tokens < 1.0:
                self.refused += 1
                return False
            self._tokens -= 1.0
            self.retries += 1
            return True


@dataclass(frozen=True, slots=True)
class Pauses:
    """How long and how often to try; times in seconds."""

    first_s: float = 0.1
    most_s: float = 10.0
    tries: int = 6
    deadline_s: float = 120.0

    def bound_s(self, failures: int) -> float:
        """The longest pause after so many failures (1 is the first)."""
        return min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 30))


class Retries:
    """Runs requests of one store.  ``sleep``, ``clock`` and ``jitter`` are replaced by tests."""

    def __init__(
        self,
        budget: RetryBudget | None = None,
        pauses: Pauses | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self.budget = budget or RetryBudget()
        self.pauses = pauses or Pauses()
        self._sleep = sleep
        self._clock = clock
        self._jitter = jitter

    def run(self, request: Callable[[], T]) -> T:
        """Return the result of ``request``, repeated on StoreUnavailable and on no other error.

        ``facts["retry_after_s"]`` of an error (a store's own wish) makes the pause at least so long.
        The last error is raised as it is.
        """
        give_up = self._clock() + self.pauses.deadline_s
        failures = 0
        self.budget.earn()
        while True:
            try:
                return request()
            except StoreUnavailable as error:
                failures += 1
                wish_s = float(error.facts.get("retry_after_s", 0.0))
                pause_s = max(wish_s, self._jitter(0.0, self.pauses.bound_s(failures)))
                last = failures >= self.pauses.tries or self._clock() + pause_s > give_up
                if last or not self.budget.spend():
                    raise
            self._sleep(pause_s)
