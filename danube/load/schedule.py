"""Schedule of records: when each is due, whatever became of the ones before it."""

from __future__ import annotations

from math import sqrt
from typing import Final

_NS: Final = 1_000_000_000


class OpenLoop:
    """An arrival clock: a constant rate, after a ramp in which it grows linearly from nothing.

    A stalled broker does not slow it down: a record that could not be sent in time keeps its due time, and
    its latency counts from then.
    """

    def __init__(self, rate: float, began_ns: int, ramp_s: float = 0.0, phase: float = 0.0) -> None:
        """``rate`` in records a second; ``phase`` (0 to 1) moves all by that part of the time between two."""
        self._rate = rate
        self._began_ns = began_ns
        self._ramp_s = ramp_s
        self._phase = phase
        self._ramped = rate * ramp_s / 2  # records that are due within the ramp

    def due_ns(self, number: int) -> int:
        """The moment at which record ``number``, from 0, is due."""
        place = number + self._phase
        if place < self._ramped:
            after_s = sqrt(2 * place * self._ramp_s / self._rate)
        else:
            after_s = self._ramp_s + (place - self._ramped) / self._rate
        return self._began_ns + round(after_s * _NS)
