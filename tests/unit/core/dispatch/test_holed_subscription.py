"""A subscription over holes: it goes on behind them, comes back for what returns, misses nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest

from danube.core.batch.selection import ring_hash
from danube.core.dispatch.cursor import CursorState
from danube.core.dispatch.grants import Grant, Mode, between, joined, no_ranges, size_of, within, without
from danube.core.dispatch.holed import GIVEN_UP, HoledSubscription
from danube.core.partition.policy import FailurePolicy
from tests.examples import examples

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
    assert (one.next, one.ack_floor, one.settled_end, one.left_from) == (WIDE, 3, 3, 5)
    assert grant(one, WIDE + 3) == [WIDE, WIDE + 1, WIDE + 2], "nothing waits for what lies before it"
    ack(one, (4, 5), (WIDE, WIDE + 2))
    state = CursorState.decode(one.cursor_state().encode())
    assert (state.ack_floor, state.acked.tolist()) == (3, [[4, 5], [WIDE, WIDE + 2]])
    ack(one, (3, 4))
    assert (one.ack_floor, one.settled_end) == (5, WIDE + 2)
    numbers = one.statistics()
    assert (numbers["ack_floor"], numbers["next"], numbers["withheld"]) == (5, WIDE + 3, WIDE - 5)
    assert one.explain(0) == "caught_up"


@pytest.mark.parametrize("mode", list(Mode))
def test_what_comes_back_is_delivered_and_nothing_else_again(mode: Mode) -> None:
    one = make(mode)
    one.withhold(100)
    assert grant(one, 110) == list(range(100, 110))
    ack(one, (100, 104))
    one.follow_holes(no_ranges(), spans((7, 100)))
    assert (one.ack_floor, one.left_from, one.explain(0)) == (0, 0, "ready")
    assert grant(one, 110) == list(range(7)), "before anything new, whatever is in flight"
    assert (one.ack_floor, one.next) == (0, 110)
    assert grant(one, 112) == [110, 111]
    ack(one, (0, 7), (110, 112))
    assert (one.ack_floor, one.cursor_state().acked.tolist()) == (104, [[110, 112]])
    ack(one, (104, 110))
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
    assert grant(one, 100) + grant(one, 100) == [*range(10, 20), *range(30, 40)]


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


def test_going_back_passes_what_was_delivered_and_holes_that_are_left() -> None:
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
    assert one.next == 31, "what was delivered is passed, and the hole that is left"
    assert (one.ack_floor, one.withheld.tolist()) == (20, [[20, 30]]) and grant(one, 32) == [31]


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
    assert grant(one, 7) == [5, 6] and one.ack_floor == 0


def test_of_a_hole_that_is_partly_filled_while_it_is_waited_for_only_what_is_left_is_passed() -> None:
    """One segment of the disk that came back was damaged: the records behind it are there all the same."""
    one = make()
    assert grant(one, 5) == list(range(5))
    one.withhold(50)
    one.follow_holes(spans((5, 10)), spans((20, 50)))
    ack(one, (0, 5))
    assert (one.next, one.withheld.tolist()) == (10, [[5, 10]])
    assert grant(one, 20) == list(range(10, 20))


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("why", ["compacted", "expired", "unused"])
def test_a_gap_of_any_width_stops_nothing_and_costs_no_memory(mode: Mode, why: str) -> None:
    one = make(mode)
    assert grant(one, 1) == [0]
    for start in (1, WIDE + 1, 2 * WIDE + 1):
        one.skip(spans((start, start + WIDE - 1)), why)
        one.check()
        assert grant(one, start + WIDE) == [start + WIDE - 1], "whatever is not acked before it"
    assert len(one._window.state) < 1_000
    state = CursorState.decode(one.cursor_state().encode())
    assert (state.ack_floor, state.acked[:, 1].tolist()) == (0, [WIDE, 2 * WIDE, 3 * WIDE])
    again = make(mode, state=state)
    assert [grant(again, 3 * WIDE + 1) for _ in range(4)] == [[0], [WIDE], [2 * WIDE], [3 * WIDE]] or (
        grant(again, 3 * WIDE + 1) == []
    )
    assert ack(one, (0, 1), (WIDE, 3 * WIDE + 1)) == 4 and one.ack_floor == one.next == 3 * WIDE + 1


def test_many_gaps_count_for_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is too small to be passed over at once; together they are wider than any window."""
    monkeypatch.setattr("danube.core.dispatch.subscription.SPAN_MAX", 1_000)
    monkeypatch.setattr("danube.core.dispatch.course.SPAN_LIMIT", 8_000)
    monkeypatch.setattr("danube.core.dispatch.holed.WIDE_SPAN", 2_000)
    one = make()
    starts = np.arange(1, 1_000, dtype=np.int64) * 100
    one.skip(np.stack((starts - 99, starts), axis=1), "compacted")
    got: list[int] = []
    for _ in range(2_000):
        got += grant(one, 100_000)
    assert got == [number * 100 for number in range(1_000)], "as many as the window has records"
    one.check()
    assert len(one._window.state) <= 16_384
    assert ack(one, *((offset, offset + 1) for offset in got[1:])) == 999 and one.ack_floor == 0
    assert ack(one, (0, 1)) == 1 and one.ack_floor == got[-1] + 1


def test_a_filter_is_asked_for_the_key_of_the_offset_behind_a_gap() -> None:
    one = HoledSubscription(
        "s", Mode.KEY_SHARED, CursorState.at(Mode.KEY_SHARED, 0), max_unacked=10, failure=FailurePolicy()
    )
    one.join(1, "anna", filters=["a*"], now_ns=0)
    one.credit(1, 100)
    asked: list[int] = []

    def key_of(offset: int) -> bytes:
        asked.append(offset)
        return b"a%d" % offset

    def hashes(start: int) -> np.ndarray:
        return np.array([ring_hash(b"a%d" % offset) for offset in range(start, start + 3)], np.uint64)

    assert offsets(one.grant(3, 0, hashes(0), 0, key_of)) == [0, 1, 2]
    one.skip(spans((3, WIDE)), "compacted")
    assert offsets(one.grant(WIDE + 3, 0, hashes(WIDE), WIDE, key_of)) == [WIDE, WIDE + 1, WIDE + 2]
    assert asked == [0, 1, 2, WIDE, WIDE + 1, WIDE + 2]


def test_what_is_dead_or_blocked_behind_a_gap_has_its_offset() -> None:
    for poison in ("dead_letter", "block"):
        one = make(poison=poison, dead_letter_topic="/default/dead", max_redelivery_count=0)
        grant(one, 2)
        one.withhold(WIDE)
        assert grant(one, WIDE + 2) == [WIDE, WIDE + 1]
        one.nack(1, spans((WIDE + 1, WIDE + 2)), 0, "no", 0)
        one.check()
        if poison == "block":
            assert one.statistics()["blocked_offsets"] == [WIDE + 1] and one.unblock(0) == 1
            assert offsets(one.due(0, 9)) == [WIDE + 1]
            continue
        for answer in (one.dead_letter_failed, one.dead_lettered):
            one.tick(2_000_000_000)
            assert [letter.offset for letter in one.take_dead_letters(9)] == [WIDE + 1]
            answer(*((WIDE + 1, 0) if answer == one.dead_letter_failed else (WIDE + 1,)))  # type: ignore[arg-type]
        assert one.statistics()["dead_lettered"] == 1


def test_what_could_not_be_sent_behind_a_gap_is_granted_again() -> None:
    one = make()
    grant(one, 2)
    one.withhold(WIDE)
    [granted] = one.grant(WIDE + 5, 0)
    assert one.give_back(granted, WIDE + 3) == 2
    assert [(one.start, one.end, one.redelivery_count) for one in one.due(0, 9)] == [(WIDE + 3, WIDE + 5, 0)]


def test_a_hole_inside_what_came_back_is_withheld_again() -> None:
    """A chunk says so; what is told of all holes follows."""
    one = make()
    grant(one, 2)
    one.withhold(100)
    assert grant(one, 103) == [100, 101, 102]
    one.follow_holes(no_ranges(), no_ranges())
    assert one.next == 2
    one.withhold(60)
    one.check()
    assert (one.withheld.tolist(), one.next) == ([[2, 60]], 60) and one.left_from == 2
    assert grant(one, 100) == list(range(60, 100)) and one.next == 103


def test_what_is_told_of_available_records_is_right_behind_a_gap() -> None:
    """Stale places would say that there is more, or that there is nothing."""
    one = make()
    grant(one, 2)
    one.withhold(WIDE)
    assert grant(one, WIDE + 2) == [WIDE, WIDE + 1]
    one.tick(1, WIDE + 2)
    assert one.explain(1) == "caught_up"
    one.tick(2, WIDE + 3)
    assert one.explain(2) == "ready"
    one.seek(1, WIDE + 3, 3)
    assert (one.next, one.ack_floor, one.explain(3)) == (1, 1, "ready")
    ack(one, (0, 5))
    assert grant(one, 2) == [1]


@pytest.mark.parametrize("mode", list(Mode))
def test_what_was_acked_at_an_earlier_owner_is_not_delivered_whoever_would_get_it(mode: Mode) -> None:
    one = make(mode)
    assert grant(one, 5) == [0, 1, 2, 3, 4]
    one.withhold(20)
    assert one.ack_earlier(spans((30, 33), (3, 4), (10, 12))) == 4, "what is withheld counts when it is back"
    assert one.ack_earlier(spans((30, 33), (3, 4), (10, 12))) == 0
    one.check()
    state = CursorState.decode(one.cursor_state().encode())
    assert (state.ack_floor, state.acked.tolist()) == (0, [[3, 4], [10, 12], [30, 33]])
    assert grant(one, 35) == [*range(20, 30), 33, 34]
    one.follow_holes(no_ranges(), spans((15, 20)))
    assert grant(one, 35) + grant(one, 35) == [*range(5, 10), 12, 13, 14]


def test_of_very_many_acks_of_an_earlier_owner_the_lowest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danube.core.dispatch.subscription.ACKED_RANGES_STORED_MAX", 3)
    one = make()
    ranges = spans(*((offset, offset + 1) for offset in range(1, 11, 2)))
    assert one.ack_earlier(ranges) == 3 and one.ack_earlier(ranges[3:]) == 0
    assert grant(one, 11) == [0, 2, 4, 6, 7, 8, 9, 10]


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
        self.flying: dict[int, int] = {}  # the consumer of each offset in flight
        self.subscription = self.make(CursorState.at(mode, 0))
        self.version = 0

    def make(self, state: CursorState) -> HoledSubscription:
        made = HoledSubscription(
            "s",
            self.mode,
            state,
            max_unacked=20,
            failure=FailurePolicy(
                ack_timeout_ms=10**9, base_redelivery_delay_ms=0, max_redelivery_count=10**6
            ),
        )
        for number in (1, 2) if self.mode is not Mode.EXCLUSIVE else (1,):
            made.join(number, f"c{number}", now_ns=0)
            made.credit(number, 10**9)
        return made

    def step(self) -> None:
        chance = self.random.random()
        if chance < 0.3:
            count = self.random.randrange(1, 6)
            self.held |= set(range(self.end, self.end + count))
            self.end += count
        elif chance < 0.34:  # compacted
            self.nothing.append((self.end, self.end + self.random.randrange(1, 30)))
            self.end = self.nothing[-1][1]
        elif chance < 0.4 and len(self.open) < 4:
            start, count = self.end, self.random.randrange(1, 30)
            self.end += count
            self.open.append((start, self.end, start + self.random.randrange(count + 1)))
        elif chance < 0.45 and self.open:
            self.settle(self.open.pop(self.random.randrange(len(self.open))))
        elif chance < 0.7:
            self.dispatch()
        elif chance < 0.74:
            self.ack_earlier()
        elif chance < 0.92:
            self.ack(self.random.random() < 0.5)
        elif chance < 0.97:
            self.return_some()
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
        self.acked -= set(range(given, end))
        self.delivered -= set(range(given, end))
        if given < end:
            self.nothing.append((given, end))
        rest = spans(*([(given, end)] if given < end else []))
        told = (rest, None) if why == "unused" else (None, rest)
        self.subscription.follow_holes(spans(*((a, b) for a, b, _ in sorted(self.open))), *told)

    def dispatch(self) -> None:
        one = self.subscription
        self.take(one.due(0, 1_000), new=False)
        for _ in range(100):
            one.tick(0, self.end)
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
                self.take(one.grant(stop, 0, hashes, at), new=True)
            if one.next == at and one.wants_records:
                return

    def take(self, grants: list[Grant], *, new: bool) -> None:
        for one in grants:
            got = set(offsets([one]))
            assert got <= self.held and not got & self.acked and not got & set(self.flying)
            assert not new or not (got & self.delivered or one.redelivery_count)
            if self.mode is Mode.KEY_SHARED:
                keys = {offset % 3 for offset in got}
                assert not {o for o, c in self.flying.items() if o % 3 in keys and c != one.consumer_id}
            self.flying |= dict.fromkeys(got, one.consumer_id)
            self.delivered |= got

    def ack(self, all_of_them: bool) -> None:
        if self.flying and not all_of_them and self.random.random() < 0.5:
            self.ack_ranges()
        for offset, consumer in sorted(self.flying.items()):
            if all_of_them or self.random.random() < 0.3:
                assert self.subscription.ack(consumer, spans((offset, offset + 1)), 0).acked == 1
                self.acked.add(offset)
                del self.flying[offset]

    def ack_ranges(self) -> None:
        """Some wide ranges, in any order; what the consumer has not counts as ignored or refused."""
        consumer = self.random.choice(list(self.flying.values()))
        pairs = [
            sorted(self.random.sample(range(self.end + 20), 2)) for _ in range(self.random.randrange(1, 7))
        ]
        named = {offset for start, end in pairs for offset in range(start, end)}
        mine = {offset for offset, owner in self.flying.items() if owner == consumer} & named
        result = self.subscription.ack(consumer, np.array(pairs, np.uint64), 0)
        size = sum(end - start for start, end in pairs)
        assert result.acked >= len(mine) and sum(result) == size
        assert result.refused <= len((set(self.flying) - mine) & named)
        taken = (self.delivered - self.acked - set(self.flying)) & named  # waits to be delivered again
        assert result.acked == len(mine | taken)
        self.acked |= mine | taken
        for offset in mine:
            del self.flying[offset]

    def ack_earlier(self) -> None:
        """What somebody had from an earlier owner, also of a disk that is away."""
        away = {offset for start, _, given in self.open for offset in range(start, given)}
        records = sorted((self.held | away) - self.acked)
        named = set(self.random.sample(records, min(len(records), self.random.randrange(1, 6))))
        ranges = [(offset, offset + 1) for offset in sorted(named, key=lambda _: self.random.random())]
        assert self.subscription.ack_earlier(spans(*ranges)) <= len(named), "what is withheld does not count"
        assert self.subscription.ack_earlier(spans(*ranges)) == 0
        self.acked |= named
        self.flying = {offset: one for offset, one in self.flying.items() if offset not in named}

    def return_some(self) -> None:
        """Some consumer hands back, or refuses, some of what it has."""
        for offset, consumer in sorted(self.flying.items()):
            if self.random.random() < 0.3:
                if self.random.random() < 0.5:
                    assert self.subscription.hand_back(consumer, spans((offset, offset + 1))) == 1
                else:
                    assert self.subscription.nack(consumer, spans((offset, offset + 1)), -1, "", 0) == 1
                del self.flying[offset]

    def restart(self) -> None:
        self.subscription = self.make(CursorState.decode(self.subscription.cursor_state().encode()))
        self.flying.clear()
        self.delivered = set(self.acked)

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
@pytest.mark.parametrize("number", range(examples(25)))
def test_whatever_happens_every_record_is_delivered_once_its_disk_is_back(
    number: int, mode: Mode, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if number % 2:  # as if all gaps were wide
        monkeypatch.setattr("danube.core.dispatch.holed.PASSED_MIN", 3)
    run = Randomly(seed * 1_000 + number, mode)
    for _ in range(150):
        run.step()
    run.finish()
