"""Load tests: what is lost, reordered, stored twice or wrongly is found, and nothing else is."""

from __future__ import annotations

import itertools
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from danube.load.audit import Account, Auditor, Finding
from danube.load.collector import LATE_MAX, Collector, Reader, producer_name
from danube.load.number_set import NumberSet
from danube.load.stamp import Stamp

RUN = "00000000000000aa"
PRODUCER = 7
SUBSCRIPTIONS = {
    "s-exclusive": ("native", "exclusive"),
    "s-shared": ("native", "shared"),
    "s-key": ("grpc", "key_shared"),
}


class Cluster:
    """Some load processes and the one that judges them, without Locust."""

    def __init__(self, processes: int = 1, *, reliable: bool = True, own_topic: bool = True) -> None:
        self.collectors = [Collector(RUN) for _ in range(processes)]
        self.readers: dict[tuple[int, str], Reader] = {}
        self.auditor = Auditor(RUN, SUBSCRIPTIONS, reliable=reliable, own_topic=own_topic)

    def send(self, *numbers: int, process: int = 0, failed: bool = False, producer: int = PRODUCER) -> None:
        collector = self.collectors[process]
        for number in numbers:
            collector.begin(0)
            (collector.failed if failed else collector.acknowledged)(producer, number)

    def arrive(
        self,
        subscription: str,
        *numbers: int,
        process: int = 0,
        redelivered: bool = False,
        keys: int = 1,
        partitions: int = 1,
    ) -> list[bool]:
        reader = self.readers.setdefault(
            (process, subscription), Reader(subscription, SUBSCRIPTIONS[subscription][1])
        )
        return [
            self.collectors[process].arrived(reader, stamp_of(number, keys), number % partitions, redelivered)
            for number in numbers
        ]

    def everywhere(self, *numbers: int) -> None:
        for subscription in SUBSCRIPTIONS:
            self.arrive(subscription, *numbers)

    def report(self, *processes: int) -> None:
        for process in processes or range(len(self.collectors)):
            self.auditor.add(f"p{process}", self.collectors[process].take())

    def findings(self) -> list[Finding]:
        for collector in self.collectors:
            collector.halted = True
        self.report()
        return self.auditor.findings()

    def account(self, subscription: str) -> Account:
        return next(one for one in self.auditor.accounts() if one.subscription == subscription)


def stamp_of(number: int, keys: int = 1, producer: int = PRODUCER) -> Stamp:
    return Stamp(int(RUN, 16), producer, number, number % keys, 0, 0, 0)


def kinds(findings: list[Finding]) -> list[tuple[str, str, int]]:
    return [(one.kind, one.where, one.count) for one in findings]


# -- numbers --------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=40))
def test_a_number_set_is_a_set(ranges: list[tuple[int, int]]) -> None:
    numbers, model = NumberSet(), set[int]()
    for start, size in ranges:
        fresh = set(range(start, start + size)) - model
        assert numbers.add(start, start + size) == len(fresh)
        model |= fresh
        assert numbers.count == len(model) and numbers.end == max(model) + 1
        spans = list(numbers.ranges())
        assert [number for a, b in spans for number in range(a, b)] == sorted(model)
        assert all(end < start for (_, end), (start, _) in itertools.pairwise(spans))
    assert {number for number in range(80) if number in numbers} == model


@given(st.sets(st.integers(0, 50)), st.sets(st.integers(0, 50)))
def test_what_one_set_has_and_the_other_not(ours: set[int], theirs: set[int]) -> None:
    first, second = NumberSet(), NumberSet()
    for number in ours:
        first.add(number, number + 1)
    for number in theirs:
        second.add(number, number + 1)
    assert {n for a, b in first.without(second) for n in range(a, b)} == ours - theirs


def test_a_number_set_is_bounded_and_says_what_it_gave_up() -> None:
    numbers = NumberSet(ranges_max=3)
    for number in (1, 3, 5, 7, 9):
        numbers.add(number, number + 1)
    assert len(list(numbers.ranges())) == 3
    assert (numbers.count, numbers.given_up) == (5, 2)  # 2 and 4 are no longer told apart
    assert 4 in numbers and 0 not in numbers and 6 not in numbers


# -- a run without fault --------------------------------------------------------------------------


def test_all_that_was_acknowledged_arrived_in_order() -> None:
    run = Cluster()
    for number in range(100):
        run.send(number)
        run.everywhere(number)
        if number % 10 == 0:
            run.report()
    assert run.findings() == []
    assert run.auditor.drained()
    account = run.account("s-shared")
    assert (account.expected, account.received, account.duplicates) == (100, 100, 0)
    assert run.auditor.acknowledged == run.auditor.begun == 100


def test_a_shared_subscription_has_no_order() -> None:
    run = Cluster()
    run.send(*range(4))
    run.arrive("s-exclusive", 0, 1, 2, 3)
    run.arrive("s-shared", 2, 0, 3, 1)
    run.arrive("s-key", 0, 1, 2, 3)
    assert run.findings() == []


def test_keys_have_an_order_each() -> None:
    run = Cluster()
    run.send(*range(4))
    run.arrive("s-exclusive", *range(4), keys=2)
    run.arrive("s-shared", *range(4), keys=2)
    run.arrive("s-key", 1, 3, 0, 2, keys=2)  # key 1 first, then key 0: each in order
    assert run.findings() == []


def test_partitions_have_an_order_each() -> None:
    run = Cluster()
    run.send(*range(4))
    run.arrive("s-exclusive", 1, 3, 0, 2, partitions=2)
    run.arrive("s-shared", *range(4))
    run.arrive("s-key", *range(4))
    assert run.findings() == []


def test_what_failed_may_arrive_and_need_not() -> None:
    run = Cluster()
    run.send(0, 1, 4)
    run.send(2, 3, failed=True)
    run.everywhere(0, 1, 3, 4)
    assert run.findings() == []
    assert (run.auditor.unknown, run.account("s-shared").expected) == (2, 3)


def test_records_are_shared_between_processes() -> None:
    run = Cluster(processes=3)
    run.send(*range(300), process=0)
    run.arrive("s-exclusive", *range(300), process=1)
    run.arrive("s-shared", *range(0, 300, 2), process=1)
    run.arrive("s-shared", *range(1, 300, 2), process=2)
    run.arrive("s-key", *range(300), process=2)
    assert run.findings() == []


# -- planted faults -------------------------------------------------------------------------------


def test_a_lost_record_is_found_and_named() -> None:
    run = Cluster()
    run.send(*range(100))
    run.everywhere(*range(40), *range(43, 100))
    run.arrive("s-exclusive", 40, 41, 42)
    run.collectors[0].opened("s-shared")
    found = {one.where: one for one in run.findings() if one.kind == "lost"}
    assert set(found) == {"s-shared", "s-key"}
    assert found["s-shared"].count == 3
    assert found["s-shared"].examples == [f"producer {producer_name(PRODUCER)} number 40 to 42"]
    assert found["s-shared"].what == "3 acknowledged records did not arrive"
    assert found["s-key"].what.endswith("; no consumer was left")
    assert not run.auditor.drained()


def test_the_last_record_is_missed_too() -> None:
    run = Cluster()
    run.send(0, 1)
    run.everywhere(0)
    assert kinds(run.findings()) == [("lost", name, 1) for name in SUBSCRIPTIONS]


def test_a_producer_of_whom_nothing_arrived_is_missed() -> None:
    run = Cluster()
    run.send(0)
    run.everywhere(0)
    run.send(0, 1, producer=8)
    assert kinds(run.findings()) == [("lost", name, 2) for name in SUBSCRIPTIONS]


def test_a_record_behind_a_later_one_is_reordered() -> None:
    run = Cluster()
    run.send(*range(4))
    run.arrive("s-exclusive", 0, 2, 1, 3)
    run.arrive("s-shared", *range(4))
    run.arrive("s-key", *range(4))
    (finding,) = run.findings()
    assert (finding.kind, finding.where, finding.count) == ("reordered", "s-exclusive", 1)
    assert finding.examples == [f"producer {producer_name(PRODUCER)} number 1"]
    assert run.account("s-exclusive").lost == 0


def test_a_key_out_of_order_is_reordered() -> None:
    run = Cluster()
    run.send(*range(4))
    run.arrive("s-exclusive", *range(4), keys=2)
    run.arrive("s-shared", *range(4))
    run.arrive("s-key", 0, 1, 3, 2, keys=2)
    assert run.findings() == []
    run.send(4, 5, 6)
    run.arrive("s-exclusive", 4, 5, 6, keys=2)
    run.arrive("s-shared", 4, 5, 6)
    run.arrive("s-key", 6, 4, 5, keys=2)
    assert kinds(run.findings()) == [("reordered", "s-key", 1)]


def test_order_is_found_across_reports() -> None:
    run = Cluster()
    run.send(0, 1, 2)
    run.arrive("s-shared", 0, 1, 2)
    run.arrive("s-key", 0, 1, 2)
    run.arrive("s-exclusive", 0, 2)
    run.report()
    run.arrive("s-exclusive", 1)
    assert kinds(run.findings()) == [("reordered", "s-exclusive", 1)]


def test_a_duplicate_is_counted_and_is_no_failure_where_at_least_once_permits() -> None:
    run = Cluster()
    run.send(*range(6))
    run.everywhere(0, 1, 2)
    run.report()
    assert run.arrive("s-exclusive", 1, 2, 3, 4, 5) == [False, False, True, True, True]  # after a crash
    run.arrive("s-shared", 3, 3, 4, 5)
    run.arrive("s-key", 3, 4, 5)
    assert run.findings() == []
    assert (run.account("s-exclusive").duplicates, run.account("s-shared").duplicates) == (2, 1)
    assert run.account("s-exclusive").received == 6


def test_a_duplicate_is_a_failure_where_it_is_at_most_once() -> None:
    run = Cluster(reliable=False)
    run.send(*range(3))
    run.everywhere(0, 1, 2)
    run.arrive("s-shared", 1)
    assert kinds(run.findings()) == [("duplicated", "s-shared", 1)]


def test_a_topic_that_is_not_reliable_may_drop_but_not_reorder() -> None:
    run = Cluster(reliable=False)
    run.send(*range(10))
    run.everywhere(0, 1, 9)
    assert run.findings() == []
    account = run.account("s-key")
    assert (account.lost, account.dropped) == (0, 7)
    run.arrive("s-exclusive", 5)
    assert kinds(run.findings()) == [("reordered", "s-exclusive", 1)]


def test_a_redelivery_comes_when_it_comes() -> None:
    run = Cluster()
    run.send(*range(4))
    run.arrive("s-shared", *range(4))
    run.arrive("s-key", *range(4))
    run.arrive("s-exclusive", 0, 2, 3)
    run.arrive("s-exclusive", 1, redelivered=True)  # it went to a consumer that was killed first
    assert run.findings() == []


def test_a_late_record_that_another_process_has_seen_is_a_duplicate() -> None:
    """Whichever report comes first: here the one that was late."""
    run = Cluster(processes=2)
    run.send(*range(4))
    run.arrive("s-shared", *range(4))
    run.arrive("s-key", *range(4))
    run.arrive("s-exclusive", 0, 1, process=0)
    run.arrive("s-exclusive", 2, 3, 1, process=1)
    run.report(1)
    run.report(0)
    assert run.findings() == []
    assert run.account("s-exclusive").duplicates == 1


def test_what_nobody_sent_is_unexpected() -> None:
    run = Cluster()
    run.send(0, 1)
    run.everywhere(0, 1)
    run.arrive("s-shared", 7)
    run.arrive("s-key", 2, 3)
    assert kinds(run.findings()) == [("unexpected", "s-shared", 1), ("unexpected", "s-key", 2)]


def test_damaged_and_foreign_records_are_findings() -> None:
    run = Cluster()
    run.send(0)
    run.everywhere(0)
    run.collectors[0].stray("s-shared", "damaged")
    run.collectors[0].stray("s-key", "foreign")
    run.report()
    run.collectors[0].stray("s-shared", "damaged")
    assert kinds(run.findings()) == [("damaged", "s-shared", 2), ("foreign", "s-key", 1)]


def test_a_topic_of_somebody_else_holds_their_records_too() -> None:
    run = Cluster(own_topic=False)
    run.send(0)
    run.everywhere(0)
    run.collectors[0].stray("s-key", "foreign")
    assert run.findings() == []
    assert run.account("s-key").foreign == 1


def test_nothing_sent_is_no_success() -> None:
    assert [one.kind for one in Cluster().findings()] == ["nothing"]


# -- what the judge was not told ------------------------------------------------------------------


def test_a_process_that_did_not_halt_is_told() -> None:
    run = Cluster(processes=2)
    run.send(0)
    run.everywhere(0)
    run.collectors[0].halted = True
    run.report()
    (finding,) = run.auditor.findings()
    assert (finding.kind, finding.where) == ("incomplete", "p1")
    assert run.auditor.busy() == ["p1"]


def test_a_send_without_an_outcome_is_told_and_what_it_sent_is_not_unexpected() -> None:
    run = Cluster()
    run.send(0)
    run.everywhere(0, 1)
    run.collectors[0].begin(0)
    assert kinds(run.findings()) == [("incomplete", "p0", 1)]
    assert run.auditor.unknown == 1


def test_what_a_process_sent_that_never_reported_is_not_unexpected() -> None:
    run = Cluster()
    run.auditor.expected = {"p0", "p1"}
    run.send(0)
    run.everywhere(0, 1)
    assert kinds(run.findings()) == [("incomplete", "p1", 1)]
    run.auditor.gone = {"p1"}
    assert kinds(run.findings()) == [("incomplete", "p1", 1)]


def test_a_process_that_went_away_is_told() -> None:
    run = Cluster(processes=2)
    run.send(0)
    run.everywhere(0)
    run.report()
    run.auditor.gone = {"p1"}
    assert kinds(run.findings()) == [("incomplete", "p1", 1)]


def test_a_report_that_was_lost_on_the_way_is_told() -> None:
    run = Cluster()
    run.send(0)
    run.everywhere(0)
    run.report()
    run.collectors[0].take()
    assert kinds(run.findings()) == [("incomplete", "reports", 1)]


def test_a_report_of_another_run_is_ignored() -> None:
    run = Cluster()
    other = Collector("00000000000000bb")
    other.begin(0)
    run.auditor.add("p9", other.take())
    assert run.auditor.processes == []


def test_late_numbers_are_bounded_and_what_is_not_told_is_a_finding() -> None:
    run = Cluster()
    count = LATE_MAX + 500
    run.send(*range(count + 1))
    run.arrive("s-shared", *range(count + 1))
    run.arrive("s-key", *range(count + 1))
    run.arrive("s-exclusive", count, *range(count))
    found = {one.kind: one.count for one in run.findings()}
    assert found == {"reordered": LATE_MAX, "incomplete": 500}


def test_a_long_run_with_many_holes_ends_with_all_of_them_lost() -> None:
    run = Cluster()
    run.auditor._seen = _small_sets()
    run.send(*range(1_000))
    for number in range(0, 1_000, 2):
        run.everywhere(number)
        run.report()
    assert kinds(run.findings()) == [("lost", name, 500) for name in SUBSCRIPTIONS]


def _small_sets() -> Any:
    return {(name, producer_name(PRODUCER)): NumberSet(ranges_max=8) for name in SUBSCRIPTIONS}


def test_counts_and_delays_add_up() -> None:
    run = Cluster(processes=2)
    run.collectors[0].begin(5)
    run.collectors[1].begin(70)
    run.collectors[0].count("retries")
    run.report()
    run.collectors[0].count("retries", 2)
    run.collectors[1].count("reconnects")
    run.report()
    assert run.auditor.counts == {"retries": 3, "reconnects": 1}
    assert run.auditor.behind_max_ns == 70


# -- a model --------------------------------------------------------------------------------------


def test_random_runs_end_as_their_faults_say(source: random.Random) -> None:
    """Any mix of processes, reports, losses, duplicates: the audit says exactly what was planted."""
    for _ in range(200):
        run = Cluster(processes=source.randint(1, 3))
        count = source.randint(1, 60)
        lost = {number for number in range(count) if source.random() < 0.05}
        arrivals = []
        for number in range(count):
            run.send(number, process=source.randrange(len(run.collectors)))
            if number not in lost:
                arrivals += [number] * (2 if source.random() < 0.1 else 1)
        source.shuffle(arrivals)
        for number in arrivals:
            run.arrive("s-shared", number, process=source.randrange(len(run.collectors)))
            if source.random() < 0.2:
                run.report(source.randrange(len(run.collectors)))
        for subscription in ("s-exclusive", "s-key"):
            run.arrive(subscription, *range(count))
        found = {one.where: one.count for one in run.findings()}
        assert found == ({"s-shared": len(lost)} if lost else {})
        assert run.account("s-shared").duplicates == len(arrivals) - len(set(arrivals))
