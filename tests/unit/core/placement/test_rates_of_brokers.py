"""Rates of a namespace over three brokers by the clock of the test: at the limit, beyond, at ten times."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import pytest

from danube.core.dispatch.rate import DispatchLimits, DispatchRate, DispatchSum
from danube.core.partition.publish_rate import PublishRate, SharedDebt, SumRate
from danube.core.placement.shares import share
from danube.errors import QuotaExceeded
from tests.unit.core.partition.test_publish_rate import Taken

LIMIT = 1_000
START_NS = 10**12
TICK_NS = 20_000_000
SECOND_NS = 1_000_000_000
REPORT_TICKS = 250
Told = dict[int, tuple[float, bool]]


class Broker:
    """Broker that wants so many records a second, of which it keeps a second's at most for later."""

    total: SharedDebt

    def __init__(self, wanted: float) -> None:
        self.wanted = wanted
        self.words = Taken([])
        self.waiting = 0.0
        self.told = (0, 0)

    def tick(self, now_ns: int) -> None:
        self.waiting = min(self.waiting + self.wanted * TICK_NS / SECOND_NS, max(1.0, self.wanted))
        if self.waiting >= 1:
            self.waiting -= self.take(int(self.waiting), now_ns)

    def take(self, records: int, now_ns: int) -> int:
        raise NotImplementedError

    def report(self) -> tuple[float, bool]:
        before, self.told = self.told, (self.words.records, self.words.held)
        return (self.told[0] - before[0]) / (REPORT_TICKS * TICK_NS / SECOND_NS), self.told[1] > before[1]


class Taking(Broker):
    """It publishes in small batches, until one is refused."""

    def __init__(self, wanted: float) -> None:
        super().__init__(wanted)
        self.total = SumRate(self.words)
        self.rate = PublishRate(0, 0, (self.total,))

    def take(self, records: int, now_ns: int) -> int:
        sent = 0
        with suppress(QuotaExceeded):
            while sent < records:
                self.rate.check("p", now_ns)
                count = min(20, records - sent)
                self.rate.take(count, count, self.words.records + count, now_ns)
                sent += count
        return sent


class Delivering(Broker):
    def __init__(self, wanted: float) -> None:
        super().__init__(wanted)
        self.total = DispatchSum(self.words)
        self.rate = DispatchRate()
        self.rate.follow(DispatchLimits(0, (self.total,)), START_NS)

    def take(self, records: int, now_ns: int) -> int:
        sent = 0
        while sent < records and (allowed := self.rate.allowed(now_ns)) > 0:
            count = min(allowed, records - sent)
            self.rate.take(count, count)
            sent += count
        return sent


@pytest.mark.parametrize("kind", [Taking, Delivering])
@pytest.mark.parametrize("offered", [LIMIT // 2, LIMIT, LIMIT + 1, 10 * LIMIT])
@pytest.mark.parametrize("parts", [(1, 1, 1), (1, 0, 0), (8, 2, 0)], ids=str)
@pytest.mark.parametrize("measure", ["records", "bytes"])
def test_after_three_reports_what_passes_is_within_a_tenth(
    kind: type[Broker], offered: int, parts: tuple[int, int, int], measure: str
) -> None:
    brokers = {number: kind(offered * part / sum(parts)) for number, part in enumerate(parts, 1)}
    told: Told = dict.fromkeys(brokers, (0.0, False))
    passed: list[int] = []  # by report
    for tick in range(8 * REPORT_TICKS):
        now_ns = START_NS + tick * TICK_NS
        if tick % REPORT_TICKS == 0:
            passed.append(sum(one.words.records for one in brokers.values()))
            told = {number: one.report() for number, one in brokers.items()} if tick else told
            for number, one in brokers.items():
                limit = share(LIMIT, number, told)
                one.total.set(*((limit, 0) if measure == "records" else (0, limit)), now_ns)
        for one in brokers.values():
            one.tick(now_ns)
    seconds = REPORT_TICKS * TICK_NS / SECOND_NS
    expected = min(offered, LIMIT)
    for before, after in pairwise(passed[3:]):
        assert 0.9 * expected <= (after - before) / seconds <= 1.1 * LIMIT
    assert passed[-1] <= LIMIT * (7 * seconds + 2) * 1.02, "with what was saved, and what may be owed"
