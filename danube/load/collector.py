"""Fates of records in one process since its last report.

Producers report begun, acknowledged and failed records; consumers report arrived ones.  The report consists
of plain lists and numbers, so that it can be sent to the judging process.  It stays small, because numbers
follow each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from typing import Any, Final

from danube.load.number_set import NumberSet
from danube.load.stamp import Stamp

LATE_MAX: Final = 1_000  # numbers out of order in one report
SEEN_RANGES_MAX: Final = 1_024  # of seen numbers, for each producer: they show a second arrival
ORDERED_MODES: Final = ("exclusive", "failover", "key_shared")


def producer_name(producer: int) -> str:
    return f"{producer:016x}"


class Arrivals:
    """Numbers of one producer that arrived through one subscription since the last report."""

    def __init__(self) -> None:
        self.numbers = NumberSet()
        self.again = 0  # arrivals of numbers that are in this report already
        self.late: list[int] = []  # first deliveries, behind a higher number that came before


class Reader:
    """One consumer as the broker sees it, from subscribing until it subscribes again; knows the order."""

    def __init__(self, subscription: str, mode: str) -> None:
        self.subscription = subscription
        self.mode = mode
        self._highest: dict[tuple[int, int], int] = {}

    def in_order(self, stamp: Stamp, partition: int) -> bool:
        """Whether no higher number came before where the mode promises order."""
        if self.mode not in ORDERED_MODES:
            return True
        group = stamp.key if self.mode == "key_shared" else partition
        place = (stamp.producer, group)
        highest = self._highest.get(place, -1)
        if stamp.number < highest:
            return False
        self._highest[place] = stamp.number
        return True


class Collector:
    """Everything that this process has to tell.  One thread, or greenlets, at a time."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.halted = False  # no producer begins another record
        self.unanswered = 0  # records that were begun and have no outcome
        self.senders: set[int] = set()  # producers that may begin another record
        self.readers: Counter[str] = Counter()  # open consumers of each subscription
        self.begun = 0
        self._reports = 0
        self._seen: dict[tuple[str, int], NumberSet] = defaultdict(partial(NumberSet, SEEN_RANGES_MAX))
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Begin the account that the next report tells."""
        self._acked: dict[int, NumberSet] = defaultdict(NumberSet)
        self._unknown: dict[int, NumberSet] = defaultdict(NumberSet)
        self._arrived: dict[tuple[str, int], Arrivals] = defaultdict(Arrivals)
        self._strays: dict[str, Counter[str]] = defaultdict(Counter)
        self._counts: Counter[str] = Counter()
        self._late_more = 0
        self._behind_max_ns = 0

    # -- producers ------------------------------------------------------------------------------

    def begin(self, behind_ns: int) -> None:
        """A record is about to be sent, so long after it was due."""
        self.begun += 1
        self.unanswered += 1
        self._behind_max_ns = max(self._behind_max_ns, behind_ns)

    def acknowledged(self, producer: int, number: int) -> None:
        self._settle(self._acked, producer, number)

    def failed(self, producer: int, number: int) -> None:
        """Note that a record ended in an error: it may be stored, and need not be."""
        self._settle(self._unknown, producer, number)

    def _settle(self, numbers: dict[int, NumberSet], producer: int, number: int) -> None:
        self.unanswered -= 1
        numbers[producer].add(number, number + 1)

    def count(self, what: str, number: int = 1) -> None:
        """``reconnects`` or ``retries``."""
        self._counts[what] += number

    # -- consumers ------------------------------------------------------------------------------

    def opened(self, subscription: str) -> None:
        self.readers[subscription] += 1

    def closed(self, subscription: str) -> None:
        self.readers[subscription] -= 1

    def arrived(self, reader: Reader, stamp: Stamp, partition: int, redelivered: bool) -> bool:
        """A record was handed out; whether it is new to this process, as far as that is remembered."""
        place = (reader.subscription, stamp.producer)
        found = self._arrived[place]
        ordered = reader.in_order(stamp, partition)
        if not found.numbers.add(stamp.number, stamp.number + 1):
            found.again += 1
        elif not ordered and not redelivered:  # a redelivery comes when it comes
            if len(found.late) < LATE_MAX:
                found.late.append(stamp.number)
            else:
                self._late_more += 1
        return bool(self._seen[place].add(stamp.number, stamp.number + 1))

    def stray(self, subscription: str, what: str) -> None:
        """A payload that is ``foreign``, or ``damaged``."""
        self._strays[subscription][what] += 1

    # -- the report -----------------------------------------------------------------------------

    def take(self) -> dict[str, Any]:
        """The report since the last one; the account begins anew."""
        sets = [
            *self._acked.values(),
            *self._unknown.values(),
            *(one.numbers for one in self._arrived.values()),
        ]
        report = {
            "run": self.run,
            "index": self._reports,
            "halted": self.halted,
            "begun": self.begun,
            "senders": len(self.senders),
            "unanswered": self.unanswered,
            "readers": dict(self.readers),
            "acked": _by_name(self._acked),
            "unknown": _by_name(self._unknown),
            "arrived": [
                [subscription, producer_name(producer), _ranges(one.numbers), one.again, one.late]
                for (subscription, producer), one in self._arrived.items()
            ],
            "strays": {name: dict(found) for name, found in self._strays.items()},
            "counts": dict(self._counts),
            "behind_max_ns": self._behind_max_ns,
            "not_told": self._late_more + sum(one.given_up for one in sets),
        }
        self._reports += 1
        self._begin_anew()
        return report


def _ranges(numbers: NumberSet) -> list[list[int]]:
    return [[start, end] for start, end in numbers.ranges()]


def _by_name(numbers: dict[int, NumberSet]) -> dict[str, list[list[int]]]:
    return {producer_name(producer): _ranges(one) for producer, one in numbers.items()}
