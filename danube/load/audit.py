"""Judges a run by the reports of all its processes: lost, reordered, changed and repeated records.

Every subscription must deliver each acknowledged record at least once.  A record whose send failed may arrive
or not.  Order is checked if the mode promises it, by the first deliveries of each consumer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from danube.load.number_set import NumberSet, Range

EXAMPLES_MAX: Final = 5
SUSPECTS_MAX: Final = 10_000
_NOTHING: Final = NumberSet()


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason why a run failed.  ``kind`` is a stable word."""

    kind: str  # lost reordered unexpected damaged foreign duplicated incomplete nothing requests exceptions
    where: str  # a subscription, or what it is about
    count: int
    what: str
    examples: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        shown = f" ({'; '.join(self.examples)})" if self.examples else ""
        return f"{self.where}: {self.what}{shown}"


@dataclass(slots=True)
class Account:
    """Counts of a subscription, in records."""

    subscription: str
    protocol: str
    mode: str
    expected: int = 0
    received: int = 0
    lost: int = 0
    dropped: int = 0  # missing where the topic may drop them: it is not reliable
    duplicates: int = 0
    reordered: int = 0
    unexpected: int = 0
    damaged: int = 0
    foreign: int = 0


class Auditor:
    """The account of one run.  ``subscriptions`` maps the name of each to its protocol and mode.

    ``own_topic``: no other program publishes there, so a foreign record is a finding.
    """

    def __init__(
        self, run: str, subscriptions: Mapping[str, tuple[str, str]], *, reliable: bool, own_topic: bool
    ) -> None:
        self.run = run
        self.reliable = reliable
        self.own_topic = own_topic
        self.counts: Counter[str] = Counter()
        self.behind_max_ns = 0
        self.expected: set[str] = set()  # processes that take part, also before their first report
        self.gone: set[str] = set()  # processes that went away before the end
        self._subscriptions = dict(subscriptions)
        self._acked: dict[str, NumberSet] = defaultdict(NumberSet)
        self._unknown: dict[str, NumberSet] = defaultdict(NumberSet)
        self._seen: dict[tuple[str, str], NumberSet] = defaultdict(NumberSet)
        self._duplicates: Counter[str] = Counter()
        self._suspects: dict[tuple[str, str, int], None] = {}
        self._strays: Counter[tuple[str, str]] = Counter()  # by subscription and word
        self._last: dict[str, dict[str, Any]] = {}  # the newest report of each process
        self._reports_missing = 0
        self._not_told = 0

    # -- reports --------------------------------------------------------------------------------

    def add(self, process: str, report: Mapping[str, Any]) -> None:
        """Take in a report; one of another run is ignored."""
        if report["run"] != self.run:
            return
        before = self._last.get(process)
        self._reports_missing += report["index"] - (before["index"] + 1 if before else 0)
        self._last[process] = {
            name: report[name] for name in ("index", "halted", "begun", "senders", "unanswered", "readers")
        }
        self._not_told += report["not_told"]
        self.behind_max_ns = max(self.behind_max_ns, report["behind_max_ns"])
        _add_ranges(self._acked, report["acked"])
        _add_ranges(self._unknown, report["unknown"])
        for subscription, producer, ranges, again, late in report["arrived"]:
            self._arrived(subscription, producer, ranges, again, late)
        self.counts.update(report["counts"])
        for subscription, strays in report["strays"].items():
            self._strays.update({(subscription, what): number for what, number in strays.items()})

    def _arrived(
        self, subscription: str, producer: str, ranges: list[list[int]], again: int, late: list[int]
    ) -> None:
        seen = self._seen[subscription, producer]
        suspects = [
            number for number in late if number not in seen
        ]  # numbers that were there before are duplicates
        for start, end in ranges:
            repeated = end - start - seen.add(start, end)
            again += repeated
            if repeated and self._suspects:
                self._acquit(subscription, producer, start, end)
        for number in suspects:
            if len(self._suspects) < SUSPECTS_MAX:
                self._suspects[subscription, producer, number] = None
            else:
                self._not_told += 1
        self._duplicates[subscription] += again

    def _acquit(self, subscription: str, producer: str, start: int, end: int) -> None:
        """Clear records of lateness that arrived in time at another process, whose report came later."""
        for place in list(self._suspects):
            if place[:2] == (subscription, producer) and start <= place[2] < end:
                del self._suspects[place]

    # -- progress -------------------------------------------------------------------------------

    @property
    def processes(self) -> list[str]:
        """Return the processes that take part."""
        return [*self._last, *sorted(self.expected - set(self._last))]

    def busy(self) -> list[str]:
        """Processes whose producers may still send or wait for answers, and those not heard of yet."""
        return [name for name in self.processes if self._may_send(self._last.get(name))]

    @staticmethod
    def _may_send(report: Mapping[str, Any] | None) -> bool:
        return report is None or report["senders"] > 0 or report["unanswered"] > 0 or not report["halted"]

    @property
    def arrivals(self) -> int:
        """Grows with every record that arrives for the first time."""
        return sum(one.count for one in self._seen.values())

    def missing(self, subscription: str) -> Iterator[tuple[str, Range]]:
        """Return producer and range of acknowledged records that have not arrived."""
        for producer, acked in self._acked.items():
            for gap in acked.without(self._seen.get((subscription, producer), _NOTHING)):
                yield producer, gap

    def drained(self) -> bool:
        """Whether everything acknowledged so far has arrived everywhere."""
        return not any(next(self.missing(one), None) for one in self._subscriptions)

    # -- the verdict ----------------------------------------------------------------------------

    @property
    def acknowledged(self) -> int:
        return sum(one.count for one in self._acked.values())

    @property
    def unknown(self) -> int:
        """Records whose send failed, or that had no answer at the end."""
        return sum(one.count for one in self._unknown.values()) + sum(
            int(one["unanswered"]) for one in self._last.values()
        )

    @property
    def begun(self) -> int:
        return sum(int(one["begun"]) for one in self._last.values())

    def accounts(self) -> list[Account]:
        """One for each subscription, in the order in which they were named."""
        return [self._account(name) for name in self._subscriptions]

    def _account(self, subscription: str) -> Account:
        protocol, mode = self._subscriptions[subscription]
        seen = [one for (name, _), one in self._seen.items() if name == subscription]
        missing = sum(end - start for _, (start, end) in self.missing(subscription))
        missing += sum(one.given_up for one in seen)
        return Account(
            subscription,
            protocol,
            mode,
            expected=self.acknowledged,
            received=sum(one.count for one in seen),
            lost=missing if self.reliable else 0,
            dropped=0 if self.reliable else missing,
            duplicates=self._duplicates[subscription],
            reordered=sum(1 for place in self._suspects if place[0] == subscription),
            unexpected=sum(end - start for _, (start, end) in self._unexpected(subscription)),
            damaged=self._strays[subscription, "damaged"],
            foreign=self._strays[subscription, "foreign"],
        )

    def _unexpected(self, subscription: str) -> Iterator[tuple[str, Range]]:
        """Yield records that arrived and were never sent, by the reports of the producers."""
        for (name, producer), seen in self._seen.items():
            if name != subscription:
                continue
            known = NumberSet()
            for numbers in (self._acked.get(producer, _NOTHING), self._unknown.get(producer, _NOTHING)):
                for start, end in numbers.ranges():
                    known.add(start, end)
            for gap in seen.without(known):
                yield producer, gap

    def findings(self) -> list[Finding]:
        """Return every reason why the run failed; none if all acknowledged records arrived in order."""
        found = [one for account in self.accounts() for one in self._findings_of(account)]
        if not self.acknowledged:
            found.append(Finding("nothing", "publish", 0, "no record was acknowledged: nothing was tested"))
        found += [
            Finding("incomplete", process, 1, "a load process went away before the end")
            for process in sorted(self.gone)
        ]
        found += [
            Finding("incomplete", process, 1, "a load process did not report how its sends ended")
            for process in sorted(set(self.busy()) - self.gone)
        ]
        if self._reports_missing or self._not_told:
            number = self._reports_missing + self._not_told
            found.append(
                Finding("incomplete", "reports", number, f"{number} reports or numbers were not told")
            )
        return found

    def _findings_of(self, account: Account) -> Iterator[Finding]:
        name = account.subscription
        if account.lost:
            readers = sum(one["readers"].get(name, 0) for one in self._last.values())
            lonely = "" if readers else "; no consumer was left"
            examples = _examples(self.missing(name))
            what = f"{account.lost} acknowledged records did not arrive{lonely}"
            yield Finding("lost", name, account.lost, what, examples)
        if account.reordered:
            late = [(place[1], (place[2], place[2] + 1)) for place in self._suspects if place[0] == name]
            what = f"{account.reordered} records arrived behind later ones"
            yield Finding("reordered", name, account.reordered, what, _examples(iter(late)))
        if account.unexpected and not self.busy() and not self.gone:  # else their producer has not reported
            what = f"{account.unexpected} records arrived that no producer sent"
            yield Finding("unexpected", name, account.unexpected, what, _examples(self._unexpected(name)))
        if account.damaged:
            what = f"{account.damaged} records arrived with other bytes than were sent"
            yield Finding("damaged", name, account.damaged, what)
        if account.foreign and self.own_topic:
            what = f"{account.foreign} records arrived that are not of this run"
            yield Finding("foreign", name, account.foreign, what)
        if account.duplicates and not self.reliable:
            what = f"{account.duplicates} records arrived twice, on a topic that delivers at most once"
            yield Finding("duplicated", name, account.duplicates, what)


def _add_ranges(sets: dict[str, NumberSet], ranges: Mapping[str, list[list[int]]]) -> None:
    for producer, found in ranges.items():
        for start, end in found:
            sets[producer].add(start, end)


def _examples(places: Iterator[tuple[str, Range]]) -> list[str]:
    shown: list[str] = []
    for producer, (start, end) in places:
        if len(shown) == EXAMPLES_MAX:
            break
        span = str(start) if end == start + 1 else f"{start} to {end - 1}"
        shown.append(f"producer {producer} number {span}")
    return shown
