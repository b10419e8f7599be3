"""A reliable subscription by hand: the promises of the contract, one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from danube.core.dispatch.cursor import CursorState
from danube.core.dispatch.subscription import Grant, Mode, Subscription
from danube.core.dispatch.window import DELIVERIES_MAX
from danube.core.partition.policy import FailurePolicy
from danube.errors import InvalidArgument, LimitExceeded, SubscriptionBusy, SubscriptionNotFound
from danube.limits import ACKED_RANGES_STORED_MAX, MAX_UNACKED_LIMIT
from tests.processor_time import processor_time_within

SECOND = 1_000_000_000
POLICY = FailurePolicy()


def make(mode: Mode, *, max_unacked: int = 1000, floor: int = 0, **policy: object) -> Subscription:
    return Subscription(
        "orders", mode, CursorState.at(mode, floor), max_unacked=max_unacked,
        failure=FailurePolicy(**policy),  # type: ignore[arg-type]
    )  # fmt: skip


def join(subscription: Subscription, *names: str, credit: int = 1000) -> None:
    for consumer_id, name in enumerate(names, 1):
        subscription.join(consumer_id, name, now_ns=0)
        subscription.credit(consumer_id, credit)


def offsets(grant: Grant) -> list[int]:
    return list(range(grant.start, grant.end)) if grant.offsets is None else grant.offsets.tolist()


def ranges(*bounds: tuple[int, int]) -> np.ndarray:
    return np.array(bounds, np.uint64)


def moment_count(subscription: Subscription) -> int:
    failures = subscription._failures
    return len(failures._timeouts._by_cell) + len(failures._retries._by_cell)


def owners(grants: list[Grant]) -> dict[int, int]:
    return {offset: grant.consumer_id for grant in grants for offset in offsets(grant)}


@pytest.mark.parametrize("step", [1, 2, 5, 7, 36])
def test_36_records_over_three_consumers_go_round_exactly_however_they_arrive(step: int) -> None:
    subscription = make(Mode.SHARED)
    join(subscription, "a", "b", "c")
    got: dict[int, int] = {}
    for end in [*range(step, 36, step), 36]:
        got |= owners(subscription.grant(end, 0))
        subscription.check()
    assert got == {offset: offset % 3 + 1 for offset in range(36)}


def test_a_consumer_without_credit_is_passed_over_and_comes_back_in_its_place() -> None:
    subscription = make(Mode.SHARED)
    join(subscription, "a", "b", "c", credit=2)
    assert list(owners(subscription.grant(6, 0)).values()) == [1, 1, 2, 2, 3, 3]
    subscription.credit(2, 1)
    assert owners(subscription.grant(7, 0)) == {6: 2}
    subscription.credit(1, 5)
    subscription.credit(3, 5)
    assert owners(subscription.grant(10, 0)) == {7: 3, 8: 1, 9: 3}
    subscription.set_ready(3, False)
    assert owners(subscription.grant(12, 0)) == {10: 1, 11: 1}


def test_a_thousand_consumers_take_turns_exactly() -> None:
    subscription = make(Mode.SHARED, max_unacked=100_000)
    join(subscription, *(f"c{n}" for n in range(1000)))
    got = owners(subscription.grant(300, 0)) | owners(subscription.grant(2500, 0))
    assert got == {offset: offset % 1000 + 1 for offset in range(2500)}
    subscription.check()


def test_acked_0_to_2_then_take_over_delivers_3_first_and_again() -> None:
    subscription = make(Mode.EXCLUSIVE)
    join(subscription, "anna")
    [grant] = subscription.grant(10, 0)
    assert offsets(grant) == list(range(10))
    subscription.ack(1, ranges((0, 3)), 0)
    for consumer_id in (2, 3, 4):
        result = subscription.join(consumer_id, "anna", now_ns=0)
        assert result.displaced == consumer_id - 1 and result.active
        subscription.credit(consumer_id, 100)
        [again] = subscription.due(0, 100)
        assert (again.start, again.end, again.redelivery_count) == (3, 10, consumer_id - 1)
        assert subscription.grant(12, 0)[0].start == 10 if consumer_id == 2 else True
        subscription.check()
        subscription.ack(consumer_id, ranges((10, 12)), 0)
    assert subscription.ack(1, ranges((3, 5)), 0).acked == 0


def test_exclusive_refuses_another_name_only_while_one_is_connected() -> None:
    subscription = make(Mode.EXCLUSIVE)
    join(subscription, "anna")
    with pytest.raises(SubscriptionBusy):
        subscription.join(2, "bert", now_ns=0)
    subscription.leave(1, 0)
    assert subscription.join(2, "bert", now_ns=0).active


def test_a_count_of_deliveries_that_cannot_grow_is_too_many_whatever_the_policy_allows() -> None:
    one = make(Mode.SHARED, max_redelivery_count=2**32 - 1, base_redelivery_delay_ms=0, poison="drop")
    join(one, "anna")
    one.grant(1, 0)
    one._window.deliveries[0] = DELIVERIES_MAX - 1
    assert one.nack(1, ranges((0, 1)), 0, "", 0) == 1
    assert [grant.redelivery_count for grant in one.due(0, 9)] == [DELIVERIES_MAX - 1]
    assert one.nack(1, ranges((0, 1)), 0, "", 0) == 1
    assert one.due(0, 9) == [] and one.statistics()["dropped"] == 1 and one.ack_floor == 1


def test_a_standby_takes_over_in_order_beginning_with_what_was_in_flight() -> None:
    subscription = make(Mode.FAILOVER)
    assert subscription.join(1, "anna", now_ns=0).active
    assert not subscription.join(2, "bert", now_ns=0).active
    assert not subscription.join(3, "carl", now_ns=0).active
    for consumer_id in (1, 2, 3):
        subscription.credit(consumer_id, 5)
    assert owners(subscription.grant(9, 0)) == dict.fromkeys(range(5), 1)
    subscription.ack(1, ranges((1, 2)), 0)
    subscription.leave(1, 0)
    assert subscription.grant(9, 0) == [], "new records wait for the redelivered ones"
    assert [(g.consumer_id, g.start, g.end) for g in subscription.due(0, 10)] == [(2, 0, 5)]
    assert owners(subscription.grant(9, 0)) == {5: 2}


def test_the_same_name_takes_its_predecessors_place_in_a_failover() -> None:
    subscription = make(Mode.FAILOVER)
    join(subscription, "anna", "bert")
    result = subscription.join(3, "anna", now_ns=0)
    assert (result.active, result.displaced) == (True, 1)
    assert not subscription.join(4, "bert", now_ns=0).active


def test_the_survivor_of_a_shared_subscription_drains_everything_once() -> None:
    subscription = make(Mode.SHARED)
    join(subscription, "a", "b")
    first = owners(subscription.grant(10, 0))
    subscription.ack(1, ranges((0, 1), (2, 3)), 0)
    subscription.ack(2, ranges((1, 2)), 0)
    subscription.leave(1, 0)
    again = owners(subscription.due(0, 100))
    assert set(again) == {offset for offset, owner in first.items() if owner == 1} - {0, 2}
    assert set(again.values()) == {2}
    subscription.ack(2, ranges((0, 10)), 0)
    assert subscription.ack_floor == 10 and not subscription.due(60 * SECOND, 10)


@pytest.mark.parametrize(("redeliveries", "sends"), [(0, 1), (1, 2), (5, 6)])
def test_a_record_is_dead_after_exactly_one_delivery_more_than_the_redeliveries(
    redeliveries: int, sends: int
) -> None:
    subscription = make(
        Mode.SHARED, max_redelivery_count=redeliveries, poison="dead_letter",
        dead_letter_topic="/default/dead",
    )  # fmt: skip
    join(subscription, "a")
    now, deliveries = 0, []
    while not (letters := subscription.take_dead_letters(10)):
        grants = subscription.due(now, 10) + subscription.grant(1, now)
        deliveries += [grant.redelivery_count for grant in grants]
        for grant in grants:
            subscription.nack(grant.consumer_id, ranges((0, 1)), -1, "bad payload", now)
        now += SECOND
    assert deliveries == list(range(sends))
    assert letters == [(0, sends, "bad payload")]


def test_the_cursor_does_not_move_while_the_dead_letter_cannot_be_stored() -> None:
    subscription = make(
        Mode.EXCLUSIVE, max_redelivery_count=0, poison="dead_letter", dead_letter_topic="/default/dead",
        ack_timeout_ms=10**9,
    )  # fmt: skip
    join(subscription, "a")
    subscription.grant(5, 0)
    subscription.nack(1, ranges((2, 3)), 0, "bad", 0)
    subscription.ack(1, ranges((0, 2), (3, 5)), 0)
    now = 0
    for wait in (1, 2, 4, 8, 16, 32, 60, 60):
        [letter] = subscription.take_dead_letters(10)
        assert subscription.take_dead_letters(10) == [], "one copy at a time"
        subscription.dead_letter_failed(letter.offset, now)
        assert subscription.tick(now) == now + wait * SECOND
        subscription.tick(now + wait * SECOND - 1)
        assert subscription.take_dead_letters(10) == []
        now += wait * SECOND
        subscription.tick(now)
        assert subscription.ack_floor == 2
    [letter] = subscription.take_dead_letters(10)
    subscription.dead_lettered(letter.offset)
    assert subscription.ack_floor == 5
    assert subscription.statistics()["dead_lettered"] == 1
    subscription.dead_lettered(letter.offset)
    assert subscription.statistics()["dead_lettered"] == 1


def test_a_blocked_record_stops_everything_until_it_is_unblocked_with_a_fresh_count() -> None:
    subscription = make(Mode.SHARED, max_redelivery_count=0)
    join(subscription, "a", "b")
    subscription.grant(4, 0)
    subscription.nack(1, ranges((0, 1)), 0, "bad", 0)
    subscription.leave(2, 0)
    assert subscription.grant(9, 0) == [] and subscription.due(0, 9) == []
    assert subscription.statistics()["blocked_offsets"] == [0] and subscription.explain(0) == "blocked"
    assert subscription.unblock(0) == 1
    again = [(offset, g.redelivery_count) for g in subscription.due(0, 9) for offset in offsets(g)]
    assert again == [(0, 0), (1, 1), (3, 1)]


def test_drop_counts_as_acked() -> None:
    subscription = make(Mode.EXCLUSIVE, max_redelivery_count=0, poison="drop")
    join(subscription, "a")
    subscription.grant(3, 0)
    version = subscription.version
    subscription.nack(1, ranges((0, 2)), 0, "bad", 0)
    assert subscription.ack_floor == 2 and subscription.statistics()["dropped"] == 2
    assert subscription.version > version


@pytest.mark.parametrize(
    ("backoff", "asked_ms", "seconds"),
    [
        ("exponential", -1, [1, 2, 4, 8, 10, 10]),
        ("fixed", -1, [1, 1, 1]),
        ("exponential", 3000, [3, 3, 4, 8, 10]),
        ("fixed", 99_000, [10, 10]),
    ],
)
def test_delays_are_the_longer_of_policy_and_wish_and_capped(
    backoff: str, asked_ms: int, seconds: list[int]
) -> None:
    subscription = make(
        Mode.EXCLUSIVE, backoff=backoff, max_redelivery_delay_ms=10_000, max_redelivery_count=99,
        ack_timeout_ms=10**9,
    )  # fmt: skip
    join(subscription, "a")
    subscription.grant(1, 0)
    now = 0
    for wait in seconds:
        subscription.nack(1, ranges((0, 1)), asked_ms, "", now)
        assert subscription.tick(now) == now + wait * SECOND
        assert subscription.due(now + wait * SECOND - 1, 9) == []
        now += wait * SECOND
        assert len(subscription.due(now, 9)) == 1


def test_records_not_acked_in_time_come_again_and_those_acked_late_do_not() -> None:
    subscription = make(Mode.SHARED, ack_timeout_ms=30_000)
    join(subscription, "a", "b")
    subscription.grant(4, 0)
    assert subscription.tick(0) == 30 * SECOND
    subscription.tick(30 * SECOND)
    assert subscription.ack(1, ranges((0, 1)), 0).acked == 1, "late, but nobody else has it"
    again = owners(subscription.due(31 * SECOND, 10))
    assert set(again) == {1, 2, 3}
    late = subscription.ack(3 - again[1], ranges((1, 2)), 0)
    assert tuple(late) == (0, 0, 1), "by now it is in flight at the other consumer"
    subscription.check()


def test_acks_are_idempotent_and_foreign_ones_are_refused() -> None:
    subscription = make(Mode.SHARED)
    join(subscription, "a", "b")
    subscription.grant(10, 0)
    assert tuple(subscription.ack(1, ranges((0, 10)), 0)) == (5, 0, 5)
    assert tuple(subscription.ack(1, ranges((0, 10)), 0)) == (0, 5, 5)
    assert tuple(subscription.ack(99, ranges((0, 10)), 0)) == (0, 5, 5)
    assert tuple(subscription.ack(2, ranges((1, 12)), 0)) == (5, 6, 0)
    assert tuple(subscription.ack(2, ranges((0, 10)), 0)) == (0, 10, 0)
    assert subscription.ack_floor == 10


HOSTILE = [
    [[5, 2]],
    [[0, 2**64 - 1]],
    [[2**63, 2**64 - 1]],
    [[2**62, 2**62 + 5]],
    [[7, 2**62]],
    [[0, 0]],
    [[2**64 - 1, 0]],
    [[0, 2**64 - 1]] * 1000,
    [[1000, 10**15]] * 1000,
    [[2**64 - 1 - n, n] for n in range(100)],
]


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_ranges_cost_nothing_and_change_nothing_outside_the_window(hostile: list[list[int]]) -> None:
    subscription = make(Mode.SHARED)
    join(subscription, "a", "b")
    subscription.grant(10, 0)
    with processor_time_within(0.5):
        result = subscription.ack(1, np.array(hostile, np.uint64), 0)
        subscription.nack(1, np.array(hostile, np.uint64), 2**40, "x", 0)
    assert result.acked <= 5 and result.refused <= 5 and result.ignored >= 0
    assert subscription.next == 10
    subscription.check()


def test_a_frame_of_a_million_overlapping_ranges_is_bounded_by_the_window() -> None:
    subscription = make(Mode.EXCLUSIVE, max_unacked=200_000)
    join(subscription, "a", credit=200_000)
    subscription.grant(200_000, 0)
    with processor_time_within(3):
        result = subscription.ack(1, np.tile(np.array([[0, 200_000]], np.uint64), (1_000_000, 1)), 0)
    assert result.acked == 200_000 and subscription.ack_floor == 200_000


def test_the_window_bounds_what_is_unacked() -> None:
    subscription = make(Mode.SHARED, max_unacked=10)
    join(subscription, "a")
    assert sum(grant.record_count for grant in subscription.grant(100, 0)) == 10
    assert not subscription.wants_records and subscription.explain(0) == "window_full"
    subscription.ack(1, ranges((3, 6)), 0)
    assert subscription.wants_records
    assert sum(grant.record_count for grant in subscription.grant(100, 0)) == 3
    assert subscription.ack_floor == 0


def test_a_record_that_is_never_acked_stops_the_window_at_its_width() -> None:
    subscription = make(Mode.EXCLUSIVE, max_unacked=10)
    join(subscription, "a", credit=10**9)
    subscription.grant(10, 0)
    subscription.ack(1, ranges((1, 10)), 0)
    while subscription.wants_records:
        [grant] = subscription.grant(10**9, 0)
        subscription.ack(1, ranges((grant.start, grant.end)), 0)
    assert subscription.next <= 262_144 and subscription.explain(0) == "window_full"
    assert subscription.statistics()["acked_above_floor"] == subscription.next - 1
    subscription.ack(1, ranges((0, 1)), 0)
    assert subscription.ack_floor == subscription.next
    for second in (1, 11, 22, 33):
        subscription.tick(second * SECOND)
    assert subscription._window.mask < 4096, "the memory was given back"
    subscription.check()


def test_a_million_pending_all_acked_out_of_order_stays_bounded() -> None:
    count = 1_000_000
    subscription = make(Mode.EXCLUSIVE, max_unacked=count)
    join(subscription, "a", credit=count)
    for end in range(10_000, count + 1, 10_000):
        subscription.grant(end, 0)
    order = np.random.default_rng(7).permutation(np.arange(1, count, 2, dtype=np.uint64))
    with processor_time_within(5):
        for part in np.array_split(order, 50):
            subscription.ack(1, np.stack((part, part + np.uint64(1)), axis=1), 0)
    with processor_time_within(1):
        state = subscription.cursor_state()
        stored = state.encode()
    assert len(state.acked) == ACKED_RANGES_STORED_MAX and len(stored) <= 64 * len(state.acked)
    assert subscription._window.state.nbytes + subscription._window.deliveries.nbytes < 4 * 2**20
    assert subscription.ack_floor == 0
    even = np.arange(0, count, 2, dtype=np.uint64)
    subscription.ack(1, np.stack((even, even + np.uint64(1)), axis=1), 0)
    assert subscription.ack_floor == count
    assert subscription.cursor_state().encode() == CursorState.at(Mode.EXCLUSIVE, count).encode()


def test_single_acks_for_an_hour_keep_few_deadlines() -> None:
    subscription = make(Mode.EXCLUSIVE, max_unacked=4)
    join(subscription, "a", credit=10**9)
    for turn in range(30_000):
        now = turn * SECOND // 10
        subscription.grant(turn + 1, now)
        subscription.ack(1, ranges((turn, turn + 1)), 0)
        if turn % 50 == 0:
            subscription.tick(now)
        if turn % 1000 == 0:
            assert moment_count(subscription) < 140
    assert subscription.ack_floor == 30_000


def test_nacks_with_every_delay_keep_few_moments() -> None:
    count = 20_000
    subscription = make(Mode.EXCLUSIVE, max_unacked=count, max_redelivery_delay_ms=10**7)
    join(subscription, "a", credit=10**9)
    subscription.grant(count, 0)
    for offset in range(count):
        subscription.nack(1, ranges((offset, offset + 1)), offset * 97 % 1_000_000, "", offset * 1000)
    assert moment_count(subscription) < 1500
    for second in range(0, 1100, 10):
        subscription.tick(second * SECOND)
    assert sum(grant.record_count for grant in subscription.due(1100 * SECOND, count)) == count
    subscription.check()


def test_cursor_survives_a_restart_and_nothing_acked_comes_again() -> None:
    subscription = make(Mode.SHARED)
    join(subscription, "a", "b")
    subscription.grant(100, 0)
    subscription.ack(1, ranges(*((offset, offset + 1) for offset in range(0, 60, 2))), 0)
    stored = subscription.cursor_state().encode()
    again = Subscription("orders", Mode.SHARED, CursorState.decode(stored), max_unacked=1000, failure=POLICY)
    again.join(9, "a", now_ns=0)
    again.credit(9, 1000)
    got = [offset for grant in again.grant(100, 0) for offset in offsets(grant)]
    assert got == [*range(1, 60, 2), *range(60, 100)]
    again.ack(9, ranges((0, 100)), 0)
    assert again.ack_floor == 100
    again.check()


def settle(subscription: Subscription, way: str) -> None:
    """Let the records 0 .. 100, all that is granted, be done with in one of the ways there are."""
    if way == "ack":
        subscription.ack(1, ranges((0, 100)), 0)
    elif way == "expire":
        subscription.skip_to(100)
    elif way == "drop":
        subscription.nack(1, ranges((0, 100)), 0, "bad", 0)
    elif way == "time out":
        subscription.tick(60 * SECOND)
    else:
        subscription.nack(1, ranges((0, 100)), 0, "bad", 0)
        for letter in subscription.take_dead_letters(100):
            subscription.dead_lettered(letter.offset)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("way", ["ack", "expire", "drop", "time out", "dead letter"])
def test_a_gap_that_is_closed_joins_what_was_acked_behind_it(way: str, mode: Mode) -> None:
    """100 .. 200 acked, a restart, then 0 .. 100: the next restart finds all 200, without a grant between."""
    state = CursorState(mode, 0, np.array([[100, 200]], np.int64))
    poison = "dead_letter" if way == "dead letter" else "drop"
    failure = FailurePolicy(max_redelivery_count=0, poison=poison, dead_letter_topic="/default/dead")
    subscription = Subscription("orders", mode, state, max_unacked=1000, failure=failure)
    join(subscription, "a", credit=100)
    hashes = np.arange(200, dtype=np.uint64)
    assert sum(grant.record_count for grant in subscription.grant(200, 0, hashes, 0)) == 100
    before = subscription.version
    settle(subscription, way)
    subscription.check()
    assert subscription.version > before
    assert subscription.ack_floor == 200 and subscription.statistics()["ack_floor"] == 200
    stored = subscription.cursor_state().encode()
    assert stored == CursorState.at(mode, 200).encode()
    assert CursorState.decode(stored).ack_floor == 200


def test_seek_forgets_everything_and_late_acks_have_no_effect() -> None:
    subscription = make(Mode.EXCLUSIVE)
    join(subscription, "a")
    subscription.grant(50, 0)
    subscription.ack(1, ranges((0, 20), (30, 40)), 0)
    subscription.seek(10, 50, 0)
    assert (subscription.next, subscription.ack_floor) == (10, 10)
    assert tuple(subscription.ack(1, ranges((10, 50)), 0)) == (0, 40, 0)
    [grant] = subscription.grant(50, 0)
    assert (grant.start, grant.end, grant.redelivery_count) == (10, 50, 0)
    subscription.seek(99, 50, 0)
    assert (subscription.next, subscription.ack_floor) == (50, 50)
    assert subscription.tick(3600 * SECOND) is None and subscription.due(3600 * SECOND, 9) == []


def test_retention_and_damage_move_the_cursor_and_are_counted() -> None:
    subscription = make(Mode.EXCLUSIVE)
    join(subscription, "a")
    subscription.grant(10, 0)
    subscription.ack(1, ranges((2, 4)), 0)
    assert subscription.skip_to(6) == 4
    assert subscription.ack_floor == 6
    assert subscription.skip_damaged(8, 10) == 2 and subscription.ack_floor == 6
    assert subscription.skip_damaged(15, 20) == 5
    subscription.ack(1, ranges((6, 8)), 0)
    [grant] = subscription.grant(30, 0)
    assert offsets(grant) == [*range(10, 15), *range(20, 30)]
    assert subscription.skip_to(10**12) == 5 + 10 + 10**12 - 30
    assert subscription.next == subscription.ack_floor == 10**12
    figures = subscription.statistics()
    assert figures["damaged"] == 7 and figures["expired"] == 4 + 15 + 10**12 - 30
    subscription.check()


def test_a_hole_wider_than_the_window_is_crossed() -> None:
    subscription = make(Mode.EXCLUSIVE)
    join(subscription, "a")
    subscription.grant(1, 0)
    subscription.skip_damaged(1, 10**9)
    assert subscription.grant(10**9 + 5, 0) == []
    subscription.ack(1, ranges((0, 1)), 0)
    [grant] = subscription.grant(10**9 + 5, 0)
    assert (grant.start, grant.end) == (10**9, 10**9 + 5)
    subscription.check()


def test_explain_names_the_reason() -> None:
    subscription = make(Mode.SHARED)
    assert subscription.explain(0) == "no_consumer"
    subscription.join(1, "a", now_ns=0)
    assert subscription.explain(0) == "caught_up"
    subscription.grant(5, 0)
    assert subscription.explain(0) == "no_credit"
    subscription.credit(1, 10)
    assert subscription.explain(0) == "ready"
    subscription.grant(5, 0)
    assert subscription.explain(0) == "caught_up"
    subscription.nack(1, ranges((0, 1)), 5000, "", 0)
    assert subscription.explain(0) == "waiting_redelivery"


def test_wrong_callers_get_typed_errors() -> None:
    subscription = make(Mode.SHARED)
    subscription.join(1, "a", now_ns=0)
    with pytest.raises(SubscriptionNotFound):
        subscription.credit(2, 1)
    with pytest.raises(InvalidArgument):
        subscription.credit(1, -1)
    with pytest.raises(InvalidArgument):
        subscription.join(1, "b", now_ns=0)
    with pytest.raises(LimitExceeded):
        subscription.join(2, "b", filters=["x"] * 101, now_ns=0)
    with pytest.raises(InvalidArgument):
        make(Mode.SHARED, max_unacked=0)
    with pytest.raises(InvalidArgument):
        Mode.parse("queue")
    assert Mode.parse("key_shared") is Mode.parse("Key-Shared") is Mode.KEY_SHARED
    subscription.leave(77, 0)
    subscription.check()


@pytest.mark.parametrize("mode", [Mode.EXCLUSIVE, Mode.SHARED, Mode.FAILOVER])
def test_consumers_killed_every_second_lose_nothing(mode: Mode) -> None:
    subscription = make(mode, max_redelivery_count=10_000)
    done: set[int] = set()
    names, ids, alive = itertools.cycle("abc"), itertools.count(1), []
    rng = np.random.default_rng(3)
    for second in range(1000):
        now = second * SECOND
        if mode is not Mode.EXCLUSIVE or not alive:
            alive.append(next(ids))
            subscription.join(alive[-1], f"{next(names)}{alive[-1]}", now_ns=now)
            subscription.credit(alive[-1], 40)
        for grant in subscription.due(now, 1000) + subscription.grant(1000, now):
            assert grant.consumer_id in alive
            assert not mode.single or grant.consumer_id == alive[0], "one active"
            acked = [offset for offset in offsets(grant) if rng.random() < 0.5]
            bounds = np.array([[offset, offset + 1] for offset in acked], np.uint64).reshape(-1, 2)
            assert subscription.ack(grant.consumer_id, bounds, 0).acked == len(acked)
            assert not done & set(acked)
            done |= set(acked)
        if len(alive) > 1 or mode is Mode.EXCLUSIVE:
            subscription.leave(alive.pop(int(rng.integers(len(alive)))), now)
        subscription.check()
        if len(done) == 1000:
            break
    assert done == set(range(1000)) and subscription.ack_floor == 1000


@pytest.mark.parametrize("poison", ["drop", "dead_letter", "block"])
def test_what_is_used_up_is_not_left(poison: str) -> None:
    failure = FailurePolicy(max_redelivery_count=0, poison=poison, dead_letter_topic="/default/dead")
    subscription = Subscription(
        "s", Mode.SHARED, CursorState.at(Mode.SHARED, 0), max_unacked=100, failure=failure
    )
    subscription.join(1, "c", now_ns=0)
    subscription.credit(1, 100)
    subscription.grant(4, 0)
    assert (
        subscription.left_from == subscription.statistics()["left_from"] == 4 and subscription.ack_floor == 0
    )
    subscription.nack(1, ranges((2, 4)), 0, "no", 0)
    assert subscription.left_from == 4


def test_what_comes_again_is_left() -> None:
    subscription = Subscription(
        "s", Mode.SHARED, CursorState.at(Mode.SHARED, 0), max_unacked=100, failure=FailurePolicy()
    )
    subscription.join(1, "c", now_ns=0)
    subscription.credit(1, 100)
    subscription.grant(4, 0)
    subscription.nack(1, ranges((1, 2)), 0, "later", 0)
    assert subscription.left_from == 1
    subscription.leave(1, 0)
    assert subscription.left_from == 0


def test_what_was_acked_ahead_is_not_left() -> None:
    state = CursorState(Mode.SHARED, 0, ranges((2, 4), (6, 8)), 0, None)
    subscription = Subscription("s", Mode.SHARED, state, max_unacked=100, failure=FailurePolicy())
    assert subscription.left_from == 0
    subscription.join(1, "c", now_ns=0)
    subscription.credit(1, 2)
    subscription.grant(8, 0)
    assert subscription.left_from == 4, "two are at the consumer, two were acked, and it has no credit"


def test_a_gap_does_not_count_for_the_width_of_the_window() -> None:
    """One record before a compacted range is not acked: what lies behind the range goes out."""
    subscription = Subscription(
        "s", Mode.SHARED, CursorState.at(Mode.SHARED, 0), max_unacked=1_000, failure=FailurePolicy()
    )
    subscription.join(1, "c", now_ns=0)
    subscription.credit(1, 1_000_000)
    subscription.grant(1, 0)
    subscription.skip_damaged(1, 1_000_000, why="compacted")
    grants = subscription.grant(1_000_000 + 5_000, 0)
    assert (grants[0].start, sum(grant.record_count for grant in grants)) == (1_000_000, 999)
    for start in range(1_000_000, 1_400_000, 500):  # the width is that of records: 262,144
        subscription.ack(1, ranges((start, start + 500)), 0)
        subscription.grant(1_500_000, 0)
    assert subscription.next == 1_000_000 + 262_144 - 1 and not subscription.wants_records
    subscription.check()
    subscription.ack(1, ranges((0, 1)), 0)
    assert subscription.wants_records


def test_gaps_widen_a_window_only_so_far() -> None:
    subscription = Subscription(
        "s", Mode.SHARED, CursorState.at(Mode.SHARED, 0), max_unacked=1_000, failure=FailurePolicy()
    )
    subscription.join(1, "c", now_ns=0)
    subscription.credit(1, 10)
    subscription.grant(1, 0)
    subscription.skip_damaged(1, 33_000_000)
    assert not subscription.grant(33_000_010, 0)
    assert subscription.next == MAX_UNACKED_LIMIT
    subscription.ack(1, ranges((0, 1)), 0)
    assert [grant.start for grant in subscription.grant(33_000_010, 0)] == [33_000_000]
