"""A subscription over holes: it goes on behind them, comes back for what returns, misses nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest

from danube.core.cursor import CursorState
from danube.core.grants import Grant, Mode
from danube.core.holed_subscription import GIVEN_UP, HoledSubscription
from danube.core.policy import FailurePolicy
from danube.core.ranges import between, joined, no_ranges, size_of, within, without
from danube.core.selection import ring_hash

WIDE = 1 << 33


def make(
    mode: Mode = Mode.SHARED, floor: int = 0, state: CursorState | None = None, **policy: object
) -> HoledSubscription:
    made = HoledSubscription(
        "s", mode, state or CursorState.at(mode, floor), max_unacked=1000,
        failure=FailurePolicy(**policy),  # type: ignore[arg-type]
    )  # fmt: skip
    made.join(1, "anna", now_ns=0)
    made.credit(1, 100_000)
    return made


def spans(*bounds: tuple[int, int]) -> np.ndarray:
    return np.array(bounds, np.int64).reshape(-1, 2)


def offsets(grants: list[Grant]) -> list[int]:
    return [
        offset
        for grant in grants
        for offset in (range(grant.start, grant.end) if grant.offsets is None else grant.offsets.tolist())
    ]


def grant(subscription: HoledSubscription, end: int) -> list[int]:
    if not subscription.wants_records:
        return []
    return offsets(subscription.grant(end, 0, np.zeros(10_000, np.uint64), subscription.next))


def ack(subscription: HoledSubscription, *bounds: tuple[int, int]) -> int:
    acked = subscription.ack(1, spans(*bounds), 0).acked
    subscription.check()
    return acked


def test_sets_of_ranges_are_what_sets_of_offsets_are(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        first, second = (
            joined(spans(*((start, start + draw.randrange(6)) for start in draw.sample(range(40), 5))))
            for _ in range(2)
        )
        as_set = lambda ranges: {one for start, end in ranges.tolist() for one in range(start, end)}  # noqa: E731
        low, high = sorted(draw.sample(range(45), 2))
        assert as_set(between(first, low, high)) == set(range(low, high)) - as_set(first)
        assert as_set(within(first, low, high)) == set(range(low, high)) & as_set(first)
        assert as_set(without(first, second)) == as_set(first) - as_set(second)
        assert size_of(first) == len(as_set(first))
    assert len(joined(no_ranges())) == len(without(no_ranges(), spans((1, 2)))) == 0


@pytest.mark.parametrize("mode", list(Mode))
def test_it_goes_on_behind_a_hole_and_its_floor_stays_in_front(mode: Mode) -> None:
    one = make(mode)
    assert grant(one, 5) == [0, 1, 2, 3, 4]
    ack(one, (0, 3))
    one.withhold(WIDE)
    assert not one.wants_records and one.explain(0) == "waiting_at_hole", "what lies before it is not acked"
    ack(one, (3, 5))
    assert one.next == WIDE and one.ack_floor == 5 and one.settled_end == WIDE
    assert grant(one, WIDE + 3) == [WIDE, WIDE + 1, WIDE + 2]
    ack(one, (WIDE, WIDE + 2))
    state = CursorState.decode(one.cursor_state().encode())
    assert (state.ack_floor, state.acked.tolist()) == (5, [[WIDE, WIDE + 2]])
    numbers = one.statistics()
    assert (numbers["ack_floor"], numbers["withheld"]) == (5, WIDE - 5)


@pytest.mark.parametrize("mode", list(Mode))
def test_what_comes_back_is_delivered_and_nothing_else_again(mode: Mode) -> None:
    one = make(mode)
    one.withhold(100)
    assert grant(one, 110) == list(range(100, 110))
    ack(one, (100, 104))
    one.follow_holes(no_ranges(), spans((7, 100)))
    assert one.ack_floor == 0 and not one.wants_records, "what is in flight is acked first"
    ack(one, (104, 110))
    assert grant(one, 110) == list(range(7)) and one.ack_floor == 0
    ack(one, (0, 7))
    assert grant(one, 112) == [110, 111]
    ack(one, (110, 112))
    assert one.ack_floor == one.next == 112 and not len(one.cursor_state().acked)


def test_a_restart_goes_on_where_it_was_in_front_of_a_hole() -> None:
    one = make()
    one.withhold(100)
    grant(one, 110)
    ack(one, (100, 105), (106, 107))
    again = make(state=CursorState.decode(one.cursor_state().encode()))
    assert again.next == 0
    again.withhold(100)
    assert grant(again, 110) == [105, 107, 108, 109] and again.ack_floor == 0


def test_a_restart_after_records_came_back_delivers_them() -> None:
    one = make()
    one.withhold(100)
    grant(one, 110)
    ack(one, (100, 110))
    again = make(state=CursorState.decode(one.cursor_state().encode()))
    assert grant(again, 5) == [0, 1, 2, 3, 4]
    ack(again, (0, 5))
    again.skip(spans((5, 100)), "unused")
    again.grant(115, 0)
    assert again.statistics()["in_flight"] == 5 and again.ack_floor == 110


def test_acks_that_the_dead_owner_s_copy_knew_of_are_kept() -> None:
    one = make(state=CursorState(Mode.SHARED, 10, spans((20, 30), (95, 97))))
    one.withhold(90)
    assert one.withheld.tolist() == [[10, 20], [30, 90]] and one.next == 90
    assert grant(one, 100) == [*range(90, 95), 97, 98, 99]
    ack(one, (90, 95), (97, 100))
    one.follow_holes(no_ranges(), spans((40, 90)))
    assert grant(one, 100) == [*range(10, 20), *range(30, 40)]


def test_of_two_holes_the_first_one_to_come_back_is_delivered_and_the_other_stays() -> None:
    one = make()
    one.withhold(10)
    assert grant(one, 20) == list(range(10, 20))
    ack(one, (10, 20))
    one.withhold(30)
    assert grant(one, 40) == list(range(30, 40))
    ack(one, (30, 40))
    one.follow_holes(spans((0, 10)), spans((25, 30)))
    assert (one.ack_floor, one.next) == (0, 20) and grant(one, 40) == list(range(20, 25))
    ack(one, (20, 25))
    assert grant(one, 41) == [40] and one.withheld.tolist() == [[0, 10]]
    ack(one, (40, 41))
    one.follow_holes(no_ranges(), no_ranges())
    assert grant(one, 41) == list(range(10))
    ack(one, (0, 10))
    assert grant(one, 42) == [41] and one.ack_floor == 41


def test_going_back_meets_holes_on_the_way_again() -> None:
    one = make()
    one.withhold(10)
    grant(one, 20)
    ack(one, (10, 20))
    one.withhold(30)
    grant(one, 31)
    ack(one, (30, 31))
    one.follow_holes(spans((20, 30)), no_ranges())
    assert grant(one, 20) == list(range(10))
    ack(one, (0, 10))
    assert grant(one, 20) == [] and one.next == 20, "what was delivered is passed, up to the hole"
    one.withhold(30)
    assert one.ack_floor == 20 and grant(one, 32) == [31]


def test_what_is_given_up_counts_and_what_expired_is_gone() -> None:
    one = make()
    one.withhold(10)
    one.follow_holes(no_ranges(), given_up=spans((0, 10)))
    assert one.ack_floor == 10 and one.statistics()[GIVEN_UP] == 10
    one.withhold(30)
    one.skip_to(20)
    assert one.ack_floor == 20 and one.withheld.tolist() == [[20, 30]]
    one.skip_to(40)
    assert one.ack_floor == one.next == 40 and not len(one.withheld)


def test_a_seek_forgets_what_was_withheld() -> None:
    one = make()
    one.withhold(10)
    grant(one, 12)
    one.withhold(30)
    one.seek(4, 12, 0)
    assert (one.ack_floor, one.next, len(one.withheld)) == (4, 4, 0)
    one.withhold(10)
    assert one.withheld.tolist() == [[4, 10]] and grant(one, 12) == [10, 11]


def test_a_hole_that_is_filled_while_it_is_waited_for_is_none() -> None:
    one = make()
    assert grant(one, 5) == list(range(5))
    one.withhold(50)
    one.follow_holes(no_ranges(), no_ranges())
    assert one.wants_records and grant(one, 7) == [5, 6]


def test_of_a_hole_that_is_partly_filled_while_it_is_waited_for_only_what_is_left_is_passed() -> None:
    """One segment of the disk that came back was damaged: the records behind it are there all the same."""
    one = make()
    assert grant(one, 5) == list(range(5))
    one.withhold(50)
    one.follow_holes(spans((5, 10)), spans((20, 50)))
    ack(one, (0, 5))
    assert (one.next, one.withheld.tolist()) == (10, [[5, 10]])
    assert grant(one, 20) == list(range(10, 20))


class Randomly:
    """A log of records and holes, consumers that ack or not, disks that come back or never do."""

    def __init__(self, seed: int, mode: Mode) -> None:
        self.random = random.Random(seed)
        self.mode = mode
        self.held: set[int] = set()
        self.end = 0
        self.open: list[tuple[int, int, int]] = []  # start, end, where its records end
        self.nothing: list[tuple[int, int]] = []  # unused
        self.acked: set[int] = set()
        self.delivered: set[int] = set()
        self.flying: set[int] = set()
        self.subscription = self.make(CursorState.at(mode, 0))
        self.version = 0

    def make(self, state: CursorState) -> HoledSubscription:
        made = HoledSubscription(
            "s", self.mode, state, max_unacked=20, failure=FailurePolicy(ack_timeout_ms=10**9)
        )
        made.join(1, "anna", now_ns=0)
        made.credit(1, 10**9)
        return made

    def step(self) -> None:
        chance = self.random.random()
        if chance < 0.3:
            count = self.random.randrange(1, 6)
            self.held |= set(range(self.end, self.end + count))
            self.end += count
        elif chance < 0.38 and len(self.open) < 4:
            start, count = self.end, self.random.randrange(1, 30)
            self.end += count
            self.open.append((start, self.end, start + self.random.randrange(count + 1)))
        elif chance < 0.45 and self.open:
            self.settle(self.open.pop(self.random.randrange(len(self.open))))
        elif chance < 0.7:
            self.dispatch()
        elif chance < 0.97:
            self.ack(self.random.random() < 0.5)
        else:
            self.restart()
        self.subscription.check()
        self.compare()

    def settle(self, hole: tuple[int, int, int]) -> None:
        start, end, given = hole
        if self.random.random() < 0.2:
            given, why = start, GIVEN_UP
        else:
            why = "unused"
        self.held |= set(range(start, given))
        if given < end:
            self.nothing.append((given, end))
        rest = spans(*([(given, end)] if given < end else []))
        told = (rest, None) if why == "unused" else (None, rest)
        self.subscription.follow_holes(spans(*((a, b) for a, b, _ in sorted(self.open))), *told)

    def dispatch(self) -> None:
        one = self.subscription
        for _ in range(100):
            one.tick(0)
            if not one.wants_records or one.next >= self.end:
                return
            at = one.next
            hole = next((h for h in self.open if h[0] <= at < h[1]), None)
            empty = next((h for h in self.nothing if h[0] <= at < h[1]), None)
            if hole is not None:
                one.withhold(hole[1])
            elif empty is not None:
                one.skip_damaged(at, empty[1], why="unused")
            else:
                stop = at
                while stop in self.held:
                    stop += 1
                hashes = np.array([ring_hash(b"%d" % (offset % 3)) for offset in range(at, stop)], np.uint64)
                got = set(offsets(one.grant(stop, 0, hashes, at)))
                assert got <= self.held and not got & self.acked and not got & self.flying
                self.flying |= got
                self.delivered |= got
            if one.next == at and one.wants_records:
                return

    def ack(self, all_of_them: bool) -> None:
        for offset in sorted(self.flying):
            if all_of_them or self.random.random() < 0.3:
                assert self.subscription.ack(1, spans((offset, offset + 1)), 0).acked == 1
                self.flying.discard(offset)
                self.acked.add(offset)

    def restart(self) -> None:
        self.subscription = self.make(CursorState.decode(self.subscription.cursor_state().encode()))
        self.flying.clear()

    def compare(self) -> None:
        state = self.subscription.cursor_state()
        known = {offset for a, b in state.acked.tolist() for offset in range(a, b)} | set(
            range(state.ack_floor)
        )
        nothing = {offset for a, b in self.nothing for offset in range(a, b)}
        assert known <= self.acked | nothing, "the cursor is never ahead of what was acked"
        assert self.acked <= known, "and forgets no ack"
        assert self.subscription.ack_floor == state.ack_floor
        again = CursorState.decode(state.encode())
        assert (again.ack_floor, again.acked.tolist()) == (state.ack_floor, state.acked.tolist())

    def finish(self) -> None:
        while self.open:
            self.settle(self.open.pop())
            self.compare()
        for _ in range(200):
            self.dispatch()
            self.ack(True)
        assert self.acked == self.held, "every record was delivered and acked"
        assert self.subscription.ack_floor == self.end


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("number", range(25))
def test_whatever_happens_every_record_is_delivered_once_its_disk_is_back(
    number: int, mode: Mode, seed: int
) -> None:
    run = Randomly(seed * 1_000 + number, mode)
    for _ in range(150):
        run.step()
    run.finish()
