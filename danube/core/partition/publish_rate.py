"""Publish rate of a partition: so many records and bytes a second, with up to a second saved.

A batch is never split, so it may take more than is saved: that is a debt, which passes with time.  With less
than a second of debt batches are still taken, and each is answered when it is paid, after a second at most.
With more, batches are refused.  So clients with a bounded window publish at the rate without a refusal.

The rate of a whole namespace or tenant is one debt for all its partitions at a worker.  What other workers of
the host take counts there as well, and a host has its share of the limit
(:mod:`danube.core.placement.shares`).
"""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

from danube.errors import QuotaExceeded

QUOTAS: Final = ("max_publish_rate_per_topic", "max_publish_bytes_per_topic")
SECOND_NS: Final = 1_000_000_000
DEBT_NS_MAX: Final = SECOND_NS
ANSWER_NS_MAX: Final = SECOND_NS
SAVED_NS_MAX: Final = SECOND_NS


class Debt:
    """``records`` and ``size_bytes``: allowed in a second; 0: no limit of that kind."""

    __slots__ = ("_paid_ns", "_per_second", "quotas", "refusal")

    def __init__(self, records: int, size_bytes: int, quotas: tuple[str, str]) -> None:
        self._per_second = (records, size_bytes)
        self._paid_ns = [0, 0]  # when all is paid that was taken, by kind
        self.quotas = quotas  # the names of the two limits
        self.refusal: QuotaExceeded | None = None  # why nothing is taken at all: the stored bytes are enough

    @property
    def limits(self) -> tuple[int, int]:
        return self._per_second

    def set(self, records: int, size_bytes: int, now_ns: int) -> None:
        """Change the rates.

        What is owed is paid at the new rate where that is higher, at the old one where it is lower, and
        nothing is owed where there is no rate now.
        """
        former, self._per_second = self._per_second, (records, size_bytes)
        for kind, limit in enumerate(self._per_second):
            owed_ns = self._paid_ns[kind] - now_ns
            if not limit:
                self._paid_ns[kind] = 0
            elif limit > former[kind] and owed_ns > 0:
                self._paid_ns[kind] = now_ns + owed_ns * former[kind] // limit

    def check(self, partition: str, now_ns: int) -> None:
        """Raise QuotaExceeded if a batch may not be taken now."""
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)  # one error object serves every refusal
        debt_ns = max(self._paid_ns) - now_ns
        if debt_ns >= DEBT_NS_MAX:
            kind = self._paid_ns.index(max(self._paid_ns))
            limit, quota = self._per_second[kind], self.quotas[kind]
            retry_after_ms = debt_ns // 1_000_000 + 1
            raise QuotaExceeded(
                f"{partition} gets more than it may",
                why=f"its share of {quota} is {limit} a second",
                hint=f"send again in {retry_after_ms} ms",
                limit=limit, quota=quota, retry_after_ms=retry_after_ms,
            )  # fmt: skip

    def add(self, records: int, size_bytes: int, now_ns: int) -> int:
        """Note what was taken; return when it is paid."""
        for kind, amount in enumerate((records, size_bytes)):
            limit = self._per_second[kind]
            if limit:
                begin_ns = max(self._paid_ns[kind], now_ns - SAVED_NS_MAX)
                self._paid_ns[kind] = begin_ns + amount * SECOND_NS // limit
        return max(self._paid_ns)


class Taken(Protocol):
    """Amounts taken of a sum, in words that all workers of a host read (:mod:`danube.ipc.usage`)."""

    def take(self, records: int, size_bytes: int) -> None: ...
    def hold(self) -> None:
        """Note that something waits or was refused: more is wanted here than there is."""

    def others(self) -> tuple[int, int]:
        """Return the records and bytes that other workers have taken, of all time."""


class SharedDebt(Debt):
    """Rate of a namespace or tenant at one worker, which owes what other workers take as well."""

    __slots__ = ("_seen", "_taken")

    def __init__(self, taken: Taken, quotas: tuple[str, str]) -> None:
        super().__init__(0, 0, quotas)
        self._taken = taken
        self._seen = taken.others()

    def follow(self, now_ns: int) -> None:
        """Owe what other workers have taken since; one that began anew counts from 0."""
        taken, seen = self._taken.others(), self._seen
        if taken != seen:
            self._seen = taken
            self.add(max(0, taken[0] - seen[0]), max(0, taken[1] - seen[1]), now_ns)


class SumRate(SharedDebt):
    """Publish rate of a namespace or tenant at one worker."""

    __slots__ = ()

    def __init__(self, taken: Taken) -> None:
        super().__init__(taken, ("max_publish_rate", "max_publish_bytes"))

    def check(self, partition: str, now_ns: int) -> None:
        self.follow(now_ns)
        try:
            super().check(partition, now_ns)
        except QuotaExceeded:
            self._taken.hold()
            raise

    def take(self, records: int, size_bytes: int, now_ns: int) -> int:
        """Take a batch; return when it is paid."""
        self._taken.take(records, size_bytes)
        paid_ns = self.add(records, size_bytes, now_ns)
        if paid_ns > now_ns:
            self._taken.hold()
        return paid_ns


class PublishRate(Debt):
    """Publish rate of a partition, and the sums that it is a part of."""

    __slots__ = ("_due", "sums")

    def __init__(self, records: int, size_bytes: int, sums: tuple[SumRate, ...] = ()) -> None:
        super().__init__(records, size_bytes, QUOTAS)
        self.sums = sums
        self._due: deque[tuple[int, int]] = deque()  # end offset, when it is answered; both ascend

    def set(self, records: int, size_bytes: int, now_ns: int) -> None:
        super().set(records, size_bytes, now_ns)
        if not self.sums:  # answers do not wait for what is owed no more
            paid_ns = max(*self._paid_ns, now_ns)
            self._due = deque((end_offset, min(due_ns, paid_ns)) for end_offset, due_ns in self._due)

    def check(self, partition: str, now_ns: int) -> None:
        super().check(partition, now_ns)
        for one in self.sums:
            one.check(partition, now_ns)

    def take(self, records: int, size_bytes: int, end_offset: int, now_ns: int) -> int:
        """Take a batch that ends at ``end_offset``; return when it is answered, 0 for at once."""
        due_ns = self.add(records, size_bytes, now_ns)
        for one in self.sums:
            due_ns = max(due_ns, one.take(records, size_bytes, now_ns))
        due_ns = min(due_ns, now_ns + ANSWER_NS_MAX)
        if due_ns <= now_ns and not self._due:
            return 0
        self._due.append((end_offset, due_ns))
        return due_ns

    def answered_end(self, end: int, now_ns: int) -> int:
        """The end of the batches that may be answered now, of those that are stored up to ``end``."""
        due = self._due
        while due and due[0][1] <= now_ns:
            due.popleft()
        return min(end, due[0][0] - 1) if due else end

    @property
    def holds(self) -> bool:
        """Whether answers wait that were not due when they were last asked for."""
        return bool(self._due)
