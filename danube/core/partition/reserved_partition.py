"""A partition whose owner appends only below what it has reserved: the partition of a cluster.

A class of its own, so that on a single host nobody pays for the question.
"""

from __future__ import annotations

from typing import NoReturn

from danube.core.batch.format import BatchHeader
from danube.core.partition.dedup import Duplicate
from danube.core.partition.offset_budget import OffsetBudget
from danube.core.partition.partition import Admitted, Partition
from danube.core.partition.policy import TopicPolicy
from danube.errors import Overloaded, OwnerMoved

__all__ = ["ReservedPartition"]


class ReservedPartition(Partition):
    """``budget`` is this epoch's; its owner reserves more and tells it."""

    __slots__ = ("budget",)

    def __init__(
        self, name: str, epoch: int, policy: TopicPolicy, log_end: int, budget: OffsetBudget
    ) -> None:
        super().__init__(name, epoch, policy, log_end)
        self.budget = budget

    def admit(self, header: BatchHeader, now_us: int) -> Admitted | Duplicate:
        """As before; Overloaded where more must be reserved first, OwnerMoved where it is being released."""
        if self.log_end + header.record_count > self.budget.end:
            self._refuse()
        return super().admit(header, now_us)

    def _refuse(self) -> NoReturn:
        if self.budget.closed:
            raise OwnerMoved(f"{self.name} is being released", hint="look it up again")
        raise Overloaded(
            f"{self.name} has given all offsets that are reserved",
            why="the controller does not answer, or takes its time",
            hint="send again",
            reserved_end=self.budget.end,
        )
