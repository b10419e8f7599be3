"""Windows that follow the pace of their consumers, and the time that a consumer has for a record."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from danube.core.dispatch.consumer_window import SPAN_NS, WINDOW_FIRST, ConsumerWindow, span_of
from danube.core.dispatch.cursor import CursorState
from danube.core.dispatch.failures import CELLS, Begun
from danube.core.dispatch.subscription import Grant, Mode, Subscription
from danube.core.partition.policy import FailurePolicy

MS = 1_000_000
SECOND = 1_000 * MS


def test_a_window_doubles_while_half_of_it_is_handled_fast() -> None:
    window = ConsumerWindow(WINDOW_FIRST)
    sizes = [window.records]
    for turn in range(1, 20):
        window.handled(window.records // 2, turn * MS)
        sizes.append(window.records)
    assert sizes[:4] == [16, 32, 64, 128] and sizes[-1] == window.most
    assert window.handled(1, 20 * MS) == 0, "not before half of it is handled"


def test_a_window_shrinks_at_once_to_what_is_handled_in_the_span() -> None:
    window = ConsumerWindow(4_096)
    assert window.handled(1, SECOND) == 1 - 4_096 and window.records == 1
    for turn in range(2, 100):  # 20 a second
        window.handled(1, SECOND + turn * 50 * MS)
    assert 8 <= window.records <= 10
    window.least = 4
    assert window.handled(1, 60 * SECOND) < 0 and window.records == 4


def test_waiting_for_records_is_no_handling() -> None:
    window = ConsumerWindow(WINDOW_FIRST)
    for turn in range(1, 100):
        window.began(turn * SECOND)
        window.handled(1, turn * SECOND + MS)
    assert window.records == WINDOW_FIRST


def test_a_fixed_window_stays() -> None:
    window = ConsumerWindow(10, least=10, most=10)
    assert window.fixed and window.handled(10, SECOND) == 0 and window.records == 10


def test_the_span_is_a_part_of_the_ack_timeout() -> None:
    assert span_of(30 * SECOND) == SPAN_NS and span_of(800 * MS) == 100 * MS and span_of(1) == 1


def test_begun_is_the_last_time_that_something_below_was_settled() -> None:
    begun = Begun()
    for offset, second in ((5, 1), (6, 2), (9, 3), (7, 4)):
        begun.settled(3, offset, second * SECOND, 30 * SECOND)
    offsets = np.array([5, 6, 7, 8, 100])
    assert begun.since(3, offsets).tolist() == [0, SECOND, 2 * SECOND, 4 * SECOND, 4 * SECOND]
    assert begun.since(4, offsets).tolist() == [0] * 5
    begun.leave(3)
    assert not begun.since(3, offsets).any()


def test_begun_keeps_few_steps_however_long_a_consumer_works() -> None:
    begun = Begun()
    for offset in range(20_000):
        begun.settled(0, offset, offset * MS, SECOND)
    assert len(begun._steps[0]) <= CELLS + 2
    long_ago_ns, once_ns, last_ns = begun.since(0, np.array([10_000, 19_500, 20_000])).tolist()
    assert last_ns == 19_999 * MS and 0 <= once_ns - 19_499 * MS <= SECOND // CELLS + MS
    assert long_ago_ns < 19_000 * MS, "of no use any more"


# -- subscriptions ------------------------------------------------------------------------------------


def subscription(mode: Mode = Mode.SHARED, ack_timeout_ms: int = 30_000) -> Subscription:
    failure = FailurePolicy(ack_timeout_ms=ack_timeout_ms, base_redelivery_delay_ms=0)
    return Subscription("s", mode, CursorState.at(mode, 0), max_unacked=10_000, failure=failure)


def join(one: Subscription, consumer_id: int, now_ns: int = 0, *, paced: bool = True) -> None:
    one.join(consumer_id, f"c{consumer_id}", now_ns=now_ns)
    if paced:
        one.pace(consumer_id, now_ns)
    one.credit(consumer_id, 1_000)


def ack(one: Subscription, offset: int, now_ns: int, consumer_id: int | None = None) -> None:
    one.ack(consumer_id, np.array([[offset, offset + 1]], np.int64), now_ns)


def offsets_of(grants: list[Grant]) -> list[tuple[int, int]]:
    return [
        (grant.consumer_id, offset)
        for grant in grants
        for offset in (range(grant.start, grant.end) if grant.offsets is None else grant.offsets.tolist())
    ]


class Workers:
    """Workers that do ``at_once`` records at a time, in the order in which the records came to them."""

    def __init__(self, one: Subscription, records: int, task_ns: int, at_once: int = 1) -> None:
        self.at_once = at_once
        self.subscription = one
        self.records = records
        self.task_ns = task_ns
        self.slow: dict[int, int] = {}
        self.now_ns = 0
        self.waiting: dict[int, list[int]] = {}
        self.busy: Counter[int] = Counter()
        self.done: Counter[int] = Counter()
        self.done_by: Counter[int] = Counter()
        self._ends: list[tuple[int, int, int]] = []  # when, consumer, offset

    def start(self, consumer_id: int) -> None:
        join(self.subscription, consumer_id, self.now_ns)
        self.waiting[consumer_id] = []

    def run(self, until_ns: int) -> None:
        while True:
            self._hand_out()
            if not self._ends or self._ends[0][0] > until_ns:
                break
            self.now_ns, consumer_id, offset = heapq.heappop(self._ends)
            self.done[offset] += 1
            self.done_by[consumer_id] += 1
            ack(self.subscription, offset, self.now_ns)
            self.busy[consumer_id] -= 1
            self._begin(consumer_id)
        self.now_ns = until_ns

    def _hand_out(self) -> None:
        grants = self.subscription.due(self.now_ns, 1_000)
        grants += self.subscription.grant(self.records, self.now_ns)
        for consumer_id, offset in offsets_of(grants):
            self.subscription.credit(consumer_id, 1)  # the stream took it
            self.waiting[consumer_id].append(offset)
            self._begin(consumer_id)
        self.subscription.tick(self.now_ns)
        self.subscription.check()

    def _begin(self, consumer_id: int) -> None:
        if self.waiting[consumer_id] and self.busy[consumer_id] < self.at_once:
            self.busy[consumer_id] += 1
            offset = self.waiting[consumer_id].pop(0)
            task_ns = self.slow.get(consumer_id, self.task_ns)
            heapq.heappush(self._ends, (self.now_ns + task_ns, consumer_id, offset))


def test_a_late_worker_gets_its_share() -> None:
    workers = Workers(subscription(), 200, 50 * MS)
    workers.start(1)
    workers.run(2 * SECOND)
    workers.start(2)
    workers.run(60 * SECOND)
    assert set(workers.done.values()) == {1} and len(workers.done) == 200
    assert workers.done_by[1] <= 130, workers.done_by


@pytest.mark.parametrize("seconds", [1, 7, 20])
def test_slow_tasks_are_shared_and_done_once(seconds: int) -> None:
    """A worker has sixteen of them before anything is known of its pace, and one at a time from then on."""
    workers = Workers(subscription(), 100, seconds * SECOND)
    workers.start(1)
    workers.run(2 * seconds * SECOND)
    workers.start(2)
    workers.run(200 * seconds * SECOND)
    assert set(workers.done.values()) == {1} and len(workers.done) == 100
    assert workers.done_by[1] <= 60, workers.done_by


@pytest.mark.parametrize("at_once", [2, 10, 40])
@pytest.mark.parametrize("seconds", [0.01, 1, 10])
def test_a_worker_that_does_many_at_once_is_kept_busy(at_once: int, seconds: float) -> None:
    workers = Workers(subscription(), 40 * at_once, int(seconds * SECOND), at_once)
    workers.start(1)
    workers.run(int(seconds * 50 * SECOND))
    assert set(workers.done.values()) == {1} and len(workers.done) == 40 * at_once
    assert workers.subscription._consumers.paced[0].window.records <= max(4 * at_once, at_once / seconds)


def test_workers_of_different_speed_each_have_their_share() -> None:
    workers = Workers(subscription(), 300, 50 * MS)
    workers.start(1)
    workers.start(2)
    workers.slow[2] = SECOND
    workers.run(60 * SECOND)
    assert len(workers.done) == 300 and workers.done_by[2] <= 30 and workers.now_ns


@pytest.mark.parametrize("mode", [Mode.SHARED, Mode.EXCLUSIVE])
def test_what_waits_behind_slow_records_does_not_time_out(mode: Mode) -> None:
    """A thousand records were sent ahead; each takes a second, and the ack timeout is thirty."""
    one = subscription(mode)
    join(one, 1, paced=False)
    assert len(offsets_of(one.grant(1_000, 0))) == 1_000
    for offset in range(1_000):
        now_ns = (offset + 1) * SECOND
        one.tick(now_ns)
        assert not one.due(now_ns, 10)
        ack(one, offset, now_ns, 1)
    assert one.statistics()["timed_out"] == 0 and one.ack_floor == 1_000


def test_a_record_at_which_a_worker_hangs_times_out_while_others_go_on() -> None:
    one = subscription()
    join(one, 1, paced=False)
    one.grant(100, 0)
    for offset in range(1, 40):
        ack(one, offset, offset * SECOND, 1)
        one.tick(offset * SECOND)
        assert [place for _, place in offsets_of(one.due(offset * SECOND, 10))] == (
            [0] if offset == 30 else []
        )
    assert one.statistics()["timed_out"] == 1


def test_a_worker_that_stops_gives_all_back_after_the_ack_timeout() -> None:
    one = subscription()
    join(one, 1, paced=False)
    one.grant(100, 0)
    for offset in range(10):
        ack(one, offset, (offset + 1) * SECOND, 1)
    one.tick(39 * SECOND)
    assert one.statistics()["timed_out"] == 0
    one.tick(41 * SECOND)
    assert one.statistics()["timed_out"] == 90


@pytest.mark.parametrize("size", [16, 100, 500])
def test_a_consumer_that_collects_records_before_it_acks_them_gets_them(size: int) -> None:
    one = subscription()
    join(one, 1)
    held: list[int] = []
    now_ns, batches = 0, 0
    while batches < 5:
        assert now_ns < 60 * SECOND, "it waits for ever"
        sent = [offset for _, offset in offsets_of(one.grant(100_000, now_ns))]
        one.credit(1, len(sent))  # the stream took them
        held += sent
        if len(held) >= size:
            collected, held = held[:size], held[size:]
            one.ack(None, np.array([[offset, offset + 1] for offset in collected], np.int64), now_ns)
            batches += 1
        wanted_ns = one.tick(now_ns)
        now_ns = max(now_ns + MS, min(wanted_ns or 0, now_ns + SECOND))
        one.check()
    assert one.statistics()["timed_out"] == 0


def test_a_worker_that_acks_nothing_gets_no_more_where_there_is_no_more() -> None:
    one = subscription()
    join(one, 1)
    assert len(offsets_of(one.grant(WINDOW_FIRST, 0))) == WINDOW_FIRST
    for second in range(1, 29):
        one.tick(second * SECOND)
    assert one._consumers.paced[0].window.records == WINDOW_FIRST


def test_a_change_of_the_ack_timeout_changes_the_window() -> None:
    one = subscription()
    join(one, 1)
    one.set_failure(FailurePolicy(ack_timeout_ms=800))
    assert one._consumers.paced[0].window.span_ns == 100 * MS


def test_only_shared_records_are_paced() -> None:
    one = subscription(Mode.FAILOVER)
    join(one, 1)
    assert len(offsets_of(one.grant(500, 0))) == 500


@pytest.mark.parametrize("mode", [Mode.SHARED, Mode.KEY_SHARED])
def test_paced_consumers_never_have_more_than_their_window(mode: Mode, source: random.Random) -> None:
    """Whatever happens, counts agree and usable credit and what is in flight stay within the window."""
    one = subscription(mode, ack_timeout_ms=1_000)
    now_ns, end, next_id = 0, 0, 3
    for consumer_id in (1, 2):
        join(one, consumer_id)
    hashes: list[int] = []

    def give_back() -> None:
        for grant in one.grant(end, now_ns, np.array(hashes, np.uint64), 0)[:1]:
            one.give_back(grant, grant.start)

    for _ in range(600):
        now_ns += source.randrange(300) * MS
        end += source.randrange(20)
        hashes += [source.randrange(1, 9) for _ in range(end - len(hashes))]
        offset = source.randrange(one.ack_floor, max(one.next, one.ack_floor + 1))
        span: Any = np.array([[offset, offset + source.randrange(1, 9)]], np.int64)
        action = source.randrange(12)
        if action < 4:
            one.ack(source.choice([None, 1, 2, next_id - 1]), span, now_ns)
        elif action == 4:
            one.nack(None, span, 0, "", now_ns)
        elif action == 5:
            one.credit(source.choice(list(one._consumers.by_id)), 50)
        elif action == 6 and len(one._consumers) > 1:
            one.leave(source.choice(list(one._consumers.by_id)), now_ns)
        elif action == 7:
            join(one, next_id, now_ns)
            next_id += 1
        elif action == 8:
            one.skip_damaged(offset, offset + 3)
        elif action == 9:
            one.seek(offset, end, now_ns)
        elif action == 10:
            give_back()
        one.due(now_ns, 100)
        one.grant(end, now_ns, np.array(hashes, np.uint64), 0)
        one.tick(now_ns)
        one.check()
        for seat, paced in one._consumers.paced.items():
            usable = int(one._consumers.credit[seat])
            assert usable == 0 or paced.open <= paced.window.records
