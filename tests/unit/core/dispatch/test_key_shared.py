"""Key-shared: one consumer for a key at a time, whoever comes and goes."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube.core import kernels
from danube.core.batch.selection import ring_hash
from danube.core.dispatch.cursor import CursorState
from danube.core.dispatch.filters import KeyFilter
from danube.core.dispatch.key_ring import NOBODY, PLACES_PER_CONSUMER, KeyRing
from danube.core.dispatch.subscription import Grant, Mode, Subscription
from danube.core.partition.policy import FailurePolicy
from danube.errors import InvalidArgument, LimitExceeded

KEYS = [f"key-{n}".encode() for n in range(10)]


@pytest.fixture(params=["kernels", "twins"], autouse=True)
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    before = kernels.available
    if request.param == "twins":
        kernels.unload()
    elif not kernels.load().available:
        pytest.skip("no kernels here")
    yield
    if before:
        kernels.load()
    else:
        kernels.unload()


class Log:
    """Records with keys, and the subscription that reads them."""

    def __init__(self, keys: list[bytes], *, max_unacked: int = 10_000, **policy: object) -> None:
        self.keys = keys
        self.hashes = np.array([ring_hash(key) for key in keys], np.uint64)
        self.asked: list[bytes] = []
        self.subscription = Subscription(
            "s", Mode.KEY_SHARED, CursorState.at(Mode.KEY_SHARED, 0), max_unacked=max_unacked,
            failure=FailurePolicy(**policy),  # type: ignore[arg-type]
        )  # fmt: skip

    def key_of(self, offset: int) -> bytes:
        self.asked.append(self.keys[offset])
        return self.keys[offset]

    def join(self, consumer_id: int, *filters: str, credit: int = 1000) -> None:
        self.subscription.join(consumer_id, f"c{consumer_id}", filters=filters, now_ns=0)
        self.subscription.credit(consumer_id, credit)

    def pump(self, end: int | None = None, now: int = 0) -> list[tuple[int, int]]:
        end = len(self.keys) if end is None else end
        grants = self.subscription.due(now, 10_000)
        grants += self.subscription.grant(end, now, self.hashes, 0, self.key_of)
        self.subscription.check()
        return flat(grants)

    def ack(self, consumer_id: int, *offsets: int) -> None:
        ranges = np.array([[offset, offset + 1] for offset in offsets], np.uint64)
        assert self.subscription.ack(consumer_id, ranges, 0).acked == len(offsets)


def flat(grants: list[Grant]) -> list[tuple[int, int]]:
    pairs = []
    for grant in grants:
        offsets = range(grant.start, grant.end) if grant.offsets is None else grant.offsets.tolist()
        pairs += [(grant.consumer_id, offset) for offset in offsets]
    return pairs


def test_a_key_never_visits_two_consumers_while_membership_is_stable() -> None:
    log = Log(KEYS * 20)
    for consumer_id in (1, 2, 3):
        log.join(consumer_id)
    seen: dict[bytes, set[int]] = {}
    for end in range(1, len(log.keys) + 1, 7):
        for consumer_id, offset in log.pump(end):
            seen.setdefault(log.keys[offset], set()).add(consumer_id)
            log.ack(consumer_id, offset)
    assert all(len(consumers) == 1 for consumers in seen.values())
    assert len(set().union(*seen.values())) >= 2, "the work is shared"


def test_a_key_in_flight_stays_and_its_later_records_wait_while_others_pass() -> None:
    log = Log(KEYS * 2)
    log.join(1)
    first = log.pump(10)
    assert {consumer for consumer, _ in first} == {1}
    log.join(2)
    second = log.pump()
    moved = {KEYS[offset % 10] for offset in range(10, 20)} - {log.keys[offset] for _, offset in second}
    assert moved, "with ten keys some belong to the newcomer now"
    assert {consumer for consumer, _ in second} == {1}
    log.ack(1, *range(10))
    third = log.pump()
    assert {log.keys[offset] for _, offset in third} == moved and {c for c, _ in third} == {2}


def test_first_deliveries_of_a_key_keep_their_order_while_its_consumer_has_no_credit() -> None:
    log = Log([b"a", b"b"] * 20)
    log.join(1, "a", credit=2)
    log.join(2, "b", credit=100)
    got = log.pump()
    assert [offset for consumer, offset in got if consumer == 2] == list(range(1, 40, 2))
    order = [offset for consumer, offset in got if consumer == 1]
    while len(order) < 20:
        log.subscription.credit(1, 3)
        order += [offset for _, offset in log.pump()]
    assert order == list(range(0, 40, 2))


def test_records_of_a_key_wait_until_one_that_came_back_has_gone_out_again() -> None:
    log = Log([b"a", b"b", b"a", b"b", b"a"], base_redelivery_delay_ms=1_000)
    log.join(1, credit=2)
    assert log.pump() == [(1, 0), (1, 1)]
    log.subscription.nack(1, np.array([[0, 1]], np.uint64), 0, "again", 0)
    log.subscription.credit(1, 10)
    assert log.pump(now=999_000_000) == [(1, 3)], "a's others wait with it, b's pass"
    assert log.pump(now=1_000_000_000) == [(1, 0), (1, 2), (1, 4)]


def test_records_of_a_key_go_on_when_one_that_waits_for_its_delay_is_acked() -> None:
    log = Log([b"a"] * 3, base_redelivery_delay_ms=60_000)
    log.join(1, credit=1)
    assert log.pump() == [(1, 0)]
    log.subscription.nack(1, np.array([[0, 1]], np.uint64), 0, "late", 0)
    log.subscription.credit(1, 10)
    assert log.pump() == []
    log.ack(1, 0)
    assert log.pump() == [(1, 1), (1, 2)]


def test_held_records_go_out_through_due_when_nothing_new_is_published() -> None:
    log = Log([b"a"] * 5)
    log.join(1, credit=2)
    assert len(log.pump()) == 2
    log.subscription.credit(1, 3)
    again = log.subscription.due(0, 100)
    assert flat(again) == [(1, 2), (1, 3), (1, 4)] and again[0].redelivery_count == 0


def test_held_records_are_bounded_by_max_unacked() -> None:
    log = Log([b"a"] * 100, max_unacked=20)
    log.join(1, credit=5)
    log.pump()
    figures = log.subscription.statistics()
    assert figures["in_flight"] + figures["held"] <= 20 and not log.subscription.wants_records


def test_a_key_that_nobody_wants_is_skipped_and_counted() -> None:
    log = Log([b"apple", b"pear", b"apple", b"plum"])
    log.join(1, "p*")
    assert log.pump() == [(1, 1), (1, 3)]
    log.ack(1, 1, 3)
    assert log.subscription.ack_floor == 4 and log.subscription.statistics()["skipped"] == 2


def test_filters_are_asked_once_for_each_key() -> None:
    log = Log(KEYS * 50)
    log.join(1, "key-[0]", "key-1", "*")
    log.join(2, "key-?")
    for end in range(1, len(log.keys) + 1, 13):
        log.pump(end)
    assert len(log.asked) <= len(KEYS)


def test_poison_blocks_only_its_key() -> None:
    log = Log([b"a", b"b", b"a", b"b", b"a"], max_redelivery_count=0)
    log.join(1)
    log.pump(2)
    log.subscription.nack(1, np.array([[0, 1]], np.uint64), 0, "bad", 0)
    assert log.pump() == [(1, 3)]
    assert log.subscription.statistics()["blocked_offsets"] == [0]
    log.subscription.unblock(0)
    assert log.pump() == [(1, 0), (1, 2), (1, 4)]


def test_a_filtered_record_in_flight_waits_for_its_kind_of_consumer() -> None:
    log = Log([b"a", b"b"])
    log.join(1, "a")
    log.join(2, "b")
    assert log.pump() == [(1, 0), (2, 1)]
    log.subscription.leave(1, 0)
    assert log.pump() == [], "it was delivered once, so it is not skipped"
    log.join(3, "a")
    assert log.pump() == [(3, 0)]


def test_joining_mid_stream_loses_nothing_and_shows_everything_once() -> None:
    log = Log([KEYS[n % 7] for n in range(300)])
    log.join(1)
    seen: list[int] = []
    for end in range(10, 301, 10):
        if end % 50 == 0:
            log.join(end)
        for consumer_id, offset in log.pump(end):
            seen.append(offset)
            log.ack(consumer_id, offset)
    while log.subscription.ack_floor < 300:
        for consumer_id, offset in log.pump():
            seen.append(offset)
            log.ack(consumer_id, offset)
    assert sorted(seen) == list(range(300))


def test_consumers_killed_every_second_lose_nothing_and_a_key_is_never_at_two() -> None:
    log = Log([KEYS[n * n % 10] for n in range(600)], max_redelivery_count=10_000)
    rng = np.random.default_rng(5)
    ids, alive, done = itertools.count(1), [], set()
    holder: dict[int, int] = {}
    for second in range(2000):
        alive.append(next(ids))
        log.join(alive[-1], credit=30)
        for consumer_id, offset in log.pump(now=second * 10**9):
            holder[offset] = consumer_id
            same = {holder[o] for o in holder if log.keys[o] == log.keys[offset]}
            assert same == {consumer_id}
        for offset, consumer_id in list(holder.items()):
            if rng.random() < 0.3:
                log.ack(consumer_id, offset)
                done.add(offset)
                del holder[offset]
        if len(alive) > 2:
            gone = alive.pop(int(rng.integers(len(alive))))
            log.subscription.leave(gone, 0)
            holder = {offset: owner for offset, owner in holder.items() if owner != gone}
        if len(done) == 600:
            break
    assert done == set(range(600)) and log.subscription.ack_floor == 600


def test_thirty_thousand_keys_pass_through_a_small_table() -> None:
    log = Log([b"x"])
    log.join(1, credit=10**7)
    log.join(2, credit=10**7)
    rng = np.random.default_rng(1)
    for turn in range(30):
        hashes = rng.integers(0, 2**32, 1000, dtype=np.uint64)
        start = log.subscription.next
        grants = log.subscription.grant(start + 1000, turn, hashes, start)
        assert sum(grant.record_count for grant in grants) == 1000
        for consumer_id, offset in flat(grants) if turn % 10 == 0 else []:
            log.ack(consumer_id, offset)
        for grant in [] if turn % 10 == 0 else grants:
            log.subscription.ack(grant.consumer_id, np.array([[grant.start, grant.end]], np.uint64), 0)
        log.subscription.check()
    keys = log.subscription._keys
    assert log.subscription.ack_floor == 30_000 and keys is not None and len(keys.hash) <= 32_768


def test_a_consumer_that_comes_moves_only_keys_to_itself() -> None:
    ring = KeyRing()
    everything = KeyFilter(())
    for seat in range(5):
        ring.add(seat, 100 + seat, everything)
    positions = np.random.default_rng(2).integers(0, 2**32, 2000).tolist()
    before = [ring.seat_of(position, None) for position in positions]
    ring.add(5, 105, everything)
    after = [ring.seat_of(position, None) for position in positions]
    assert {new for old, new in zip(before, after, strict=True) if old != new} == {5}
    assert 0.05 < sum(old != new for old, new in zip(before, after, strict=True)) / 2000 < 0.35
    ring.remove(5)
    assert [ring.seat_of(position, None) for position in positions] == before
    assert len(ring.positions) == 5 * PLACES_PER_CONSUMER
    assert KeyRing().seat_of(7, None) == NOBODY


# -- key filters -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=300)
@given(st.text("ab*?é", min_size=1, max_size=9), st.text("abé", max_size=12))
def test_a_glob_is_what_its_regular_expression_says(pattern: str, key: str) -> None:
    expected = "".join({"*": ".*", "?": "."}.get(sign, re.escape(sign)) for sign in pattern)
    assert KeyFilter([pattern]).passes(key.encode()) == bool(re.fullmatch(expected, key, re.DOTALL))


def test_keys_that_are_not_text_match_too() -> None:
    assert KeyFilter(["a*"]).passes(b"a\xff\xfe\n") and KeyFilter(["a??"]).passes(b"a\xff\n")


@pytest.mark.parametrize("pattern", ["*a" * 63 + "*b", "a?" * 64, "*" * 64, "*a?" * 32 + "b", "a" * 256])
@pytest.mark.parametrize("size", [10, 256, 4096])
def test_no_glob_takes_a_millisecond(pattern: str, size: int) -> None:
    key_filter, key = KeyFilter([pattern]), b"a" * size
    key_filter.passes(key)
    best = min(timed(key_filter, key) for _ in range(5))
    assert best < 0.001, f"{best * 1e6:.0f} us"


def timed(key_filter: KeyFilter, key: bytes) -> float:
    started = time.thread_time()
    key_filter.passes(key)
    return time.thread_time() - started


def test_filters_beyond_the_limits_are_refused() -> None:
    for patterns in (["x" * 257], ["é" * 129], ["*" * 65], ["?" * 65], ["a"] * 101):
        with pytest.raises(LimitExceeded):
            KeyFilter(patterns)
    with pytest.raises(InvalidArgument):
        KeyFilter([""])
    assert KeyFilter(["a"] * 100).passes(b"a")
    assert KeyFilter(()).passes(b"anything") and not KeyFilter(["b", "c?"]).passes(b"a")


def test_a_small_limit_only_spreads_redeliveries_over_more_calls() -> None:
    log = Log([b"a", b"b", b"c"] * 4)
    log.join(1)
    log.pump()
    log.join(2)
    log.subscription.leave(1, 0)
    got = [pair for _ in range(12) for pair in flat(log.subscription.due(0, 1))]
    assert got == [(2, offset) for offset in range(12)] and log.subscription.due(0, 1) == []
