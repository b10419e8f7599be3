"""Order in which waiting steps get a free thread: the most urgent first, sometimes the longest waiting.

An urgency is a tuple that sorts lower when it is more urgent.  A step that is put again with another urgency
moves to its new place.  Among equals, and in every FAIR_SHARE-th turn among all, the step that has waited
longest goes first, so no step waits for ever behind others that are always more urgent.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

FAIR_SHARE: Final = 4

_Item = TypeVar("_Item", bound=Hashable)
_Urgency = tuple[int, int]


class StepQueue(Generic[_Item]):
    """Plain values in, decisions out; each item waits once."""

    def __init__(self) -> None:
        self._waiting: dict[_Item, tuple[_Urgency, int]] = {}  # in the order in which they came
        self._heap: list[tuple[_Urgency, int, _Item]] = []  # old places are left in it until they come up
        self._number = self._turn = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, item: _Item, urgency: _Urgency) -> None:
        """Let ``item`` wait; where it waits already it keeps the time since when."""
        before = self._waiting.get(item)
        if before is not None and before[0] == urgency:
            return
        if before is None:
            self._number += 1
        number = self._number if before is None else before[1]
        self._waiting[item] = urgency, number
        heapq.heappush(self._heap, (urgency, number, item))
        if len(self._heap) > 2 * len(self._waiting) + FAIR_SHARE:
            self._heap = [(urgency, number, one) for one, (urgency, number) in self._waiting.items()]
            heapq.heapify(self._heap)

    def discard(self, item: _Item) -> None:
        self._waiting.pop(item, None)

    def pop(self) -> _Item:
        """Take the next one; KeyError from an empty queue."""
        self._turn = (self._turn + 1) % FAIR_SHARE
        item = self._most_urgent() if self._turn else next(iter(self._waiting), None)
        if item is None:
            raise KeyError("nobody waits")
        del self._waiting[item]
        return item

    def _most_urgent(self) -> _Item | None:
        while self._heap:
            urgency, number, item = heapq.heappop(self._heap)
            if self._waiting.get(item) == (urgency, number):
                return item
        return None
