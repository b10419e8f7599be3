"""Since when a consumer can have begun a record, as far as its acks tell.

A consumer is sent records ahead and begins them in the order of their offsets.  So while it settles records
below an offset, it may not have come to that one: the record's time counts from the last of them.  Who hangs
at a record settles nothing below it any more, even where others beside it go on above.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from danube.core.dispatch.grants import Offsets

CELLS: Final = 64  # of the ack timeout; what falls into one cell is one step


class Begun:
    """For each seat ``(offset, time)`` steps, both ascending: when something up to there was settled last."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: dict[int, list[tuple[int, int]]] = {}

    def settled(self, seat: int, offset: int, now_ns: int, timeout_ns: int) -> None:
        """The consumer at ``seat`` acked or nacked ``offset``; it is the lowest of those that it did now."""
        steps = self._steps.setdefault(seat, [])
        while steps and steps[-1][0] >= offset:
            steps.pop()
        cell_ns = max(timeout_ns // CELLS, 1)
        if steps and steps[-1][1] // cell_ns == now_ns // cell_ns:
            offset = steps.pop()[0]
        if steps and steps[0][1] <= now_ns - timeout_ns:  # too old to make anything later
            steps[:] = [step for step in steps if step[1] > now_ns - timeout_ns]
        steps.append((offset, now_ns))

    def since(self, seat: int, offsets: Offsets) -> npt.NDArray[np.int64]:
        """When something below each of ``offsets`` was settled last; 0 where nothing was."""
        steps = np.array([(0, 0), *self._steps.get(seat, ())], np.int64)
        since_ns: npt.NDArray[np.int64] = steps[np.searchsorted(steps[1:, 0], offsets), 1]
        return since_ns

    def leave(self, seat: int) -> None:
        self._steps.pop(seat, None)

    def clear(self) -> None:
        self._steps.clear()
