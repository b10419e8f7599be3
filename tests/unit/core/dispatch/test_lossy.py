"""A lossy subscription: never blocks, drops the oldest, counts every record."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube.core.batch.selection import ring_hash
from danube.core.dispatch.grants import Mode
from danube.core.dispatch.lossy import LossySubscription
from danube.errors import InvalidArgument, SubscriptionBusy

KEYS = [b"alpha", b"beta", b"gamma", b"delta"]


class Feed:
    """Offers numbered records; a token is the number of its first record."""

    def __init__(self, mode: Mode, *, bytes_max: int = 10**6, records_max: int = 10**6) -> None:
        self.lossy = LossySubscription(
            "s", mode, bytes_max=bytes_max, records_max=records_max,
            key_of=lambda token, index: self.key(token + index),
        )  # fmt: skip
        self.sizes: dict[int, int] = {}
        self.end = 0

    def key(self, number: int) -> bytes:
        return KEYS[number % 4]

    def join(self, consumer_id: int, credit: int = 10**6, filters: tuple[str, ...] = ()) -> None:
        self.lossy.join(consumer_id, f"c{consumer_id}", filters=filters, now_ns=0)
        self.lossy.credit(consumer_id, credit)

    def offer(self, records: int, size_bytes: int = 100) -> int:
        hashes = np.array([ring_hash(self.key(self.end + n)) for n in range(records)], np.uint64)
        self.sizes[self.end] = records
        dropped = self.lossy.offer(self.end, self.end, records, size_bytes, hashes=hashes)
        self.end += records
        self.lossy.check()
        return dropped

    def granted(self) -> list[tuple[int, int]]:
        """(consumer, record number) of what is granted now."""
        pairs = []
        for token, consumer_id, indexes in self.lossy.grant():
            chosen = range(self.sizes[token]) if indexes is None else indexes.tolist()
            pairs += [(consumer_id, token + index) for index in chosen]
        self.lossy.check()
        return pairs

    def figure(self, name: str) -> int:
        return int(self.lossy.statistics()[name])


def test_with_nobody_connected_everything_is_dropped_and_counted() -> None:
    feed = Feed(Mode.SHARED)
    assert feed.offer(7) == 7
    feed.lossy.count_dropped(3)
    assert feed.figure("dropped") == 10 and feed.figure("queued_batches") == 0
    feed.join(1)
    assert feed.granted() == []


def test_whole_batches_go_to_the_active_consumer_as_they_are() -> None:
    feed = Feed(Mode.FAILOVER)
    feed.join(1)
    feed.join(2)
    feed.offer(5)
    feed.offer(6)
    assert feed.lossy.grant() == [(0, 1, None), (5, 1, None)]
    feed.lossy.leave(1, 0)
    feed.offer(2)
    assert feed.lossy.grant() == [(11, 2, None)]


@pytest.mark.parametrize("size", [1, 4, 12, 36])
def test_shared_goes_round_exactly(size: int) -> None:
    feed = Feed(Mode.SHARED)
    for consumer_id in (1, 2, 3):
        feed.join(consumer_id)
    got: dict[int, int] = {}
    for _ in range(0, 36, size):
        feed.offer(size)
        got |= {number: consumer for consumer, number in feed.granted()}
    assert got == {number: number % 3 + 1 for number in range(36)}


def test_without_credit_the_oldest_give_way_by_records_and_by_bytes() -> None:
    feed = Feed(Mode.EXCLUSIVE, bytes_max=1000, records_max=25)
    feed.join(1, credit=0)
    assert [feed.offer(10, 100) for _ in range(4)] == [0, 0, 10, 10]
    assert feed.offer(1, 900) == 10, "bytes: 100 + 100 + 900"
    assert feed.figure("dropped") == 30
    feed.lossy.credit(1, 5)
    assert feed.granted() == [(1, number) for number in range(30, 35)]
    feed.lossy.credit(1, 100)
    assert feed.granted() == [(1, number) for number in range(35, 41)]


def test_a_batch_larger_than_the_bounds_waits_alone() -> None:
    feed = Feed(Mode.EXCLUSIVE, bytes_max=1000, records_max=25)
    feed.join(1, credit=0)
    feed.offer(5)
    assert feed.offer(100, 5000) == 5
    assert feed.offer(1) == 100
    feed.lossy.credit(1, 9)
    assert feed.granted() == [(1, 105)]


def test_the_last_to_leave_drops_the_queue() -> None:
    feed = Feed(Mode.SHARED)
    feed.join(1, credit=2)
    feed.offer(5)
    assert len(feed.granted()) == 2
    feed.lossy.leave(1, 0)
    assert feed.figure("dropped") == 3 and feed.figure("queued_bytes") == 0


def test_a_key_goes_to_one_consumer_and_one_without_credit_stops_only_its_own() -> None:
    feed = Feed(Mode.KEY_SHARED)
    for consumer_id in range(1, 6):
        feed.join(consumer_id)
    feed.offer(40)
    owner = {number % 4: consumer for consumer, number in feed.granted()}
    assert len(set(owner.values())) >= 2
    feed.offer(40)
    assert all(owner[number % 4] == consumer for consumer, number in feed.granted())
    slow = owner[0]
    feed.lossy.set_ready(slow, False)
    feed.offer(40)
    feed.offer(40)
    assert slow not in {consumer for consumer, _ in feed.granted()}
    feed.lossy.set_ready(slow, True)
    late = [number for consumer, number in feed.granted() if consumer == slow]
    assert late == sorted(late) and {number % 4 for number in late} >= {0}
    assert feed.figure("queued_records") == 0


def test_keys_that_nobody_wants_are_skipped_and_counted() -> None:
    feed = Feed(Mode.KEY_SHARED)
    feed.join(1, filters=("al*",))
    feed.join(2, filters=("?eta",))
    feed.offer(8)
    got = feed.granted()
    assert {(consumer, feed.key(number)) for consumer, number in got} == {(1, b"alpha"), (2, b"beta")}
    assert feed.figure("skipped") == 4 and feed.figure("queued_batches") == 0


def test_a_consumer_that_leaves_hands_its_keys_on() -> None:
    feed = Feed(Mode.KEY_SHARED)
    feed.join(1, credit=0)
    feed.join(2, credit=0)
    feed.offer(12)
    assert feed.granted() == []
    feed.lossy.leave(1, 0)
    feed.lossy.credit(2, 100)
    assert feed.granted() == [(2, number) for number in range(12)]


def test_names_filters_and_modes_are_checked() -> None:
    feed = Feed(Mode.EXCLUSIVE)
    feed.join(1)
    with pytest.raises(SubscriptionBusy):
        feed.join(2)
    assert feed.lossy.join(3, "c1").displaced == 1
    blind = LossySubscription("s", Mode.KEY_SHARED, bytes_max=1, records_max=1)
    with pytest.raises(InvalidArgument):
        blind.join(1, "a", filters=["x*"])
    assert blind.join(1, "a", filters=["*"]).active


steps = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), st.integers(1, 9)),
        st.tuples(st.just("grant"), st.just(0)),
        st.tuples(st.just("join"), st.integers(1, 4)),
        st.tuples(st.just("leave"), st.integers(1, 4)),
        st.tuples(st.just("credit"), st.integers(1, 4)),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([Mode.SHARED, Mode.FAILOVER, Mode.KEY_SHARED]), steps)
def test_every_record_is_granted_once_or_counted_and_order_is_kept(
    mode: Mode, actions: list[tuple[str, int]]
) -> None:
    feed = Feed(mode, bytes_max=1500, records_max=40)
    connected: set[int] = set()
    credit: dict[int, int] = {}
    seen: list[int] = []
    last: dict[tuple[int, bytes], int] = {}
    for action, value in [("join", 1), *actions]:
        if action == "offer":
            feed.offer(value)
        elif action == "join" and value not in connected:
            feed.join(value, credit=6)
            connected.add(value)
            credit[value] = 6
        elif action == "leave":
            feed.lossy.leave(value, 0)
            connected.discard(value)
        elif action == "credit" and value in connected:
            feed.lossy.credit(value, 5)
            credit[value] += 5
        elif action == "grant":
            for consumer, number in feed.granted():
                assert consumer in connected
                credit[consumer] -= 1
                seen.append(number)
                stream = (0 if mode is Mode.KEY_SHARED else consumer, feed.key(number))
                assert last.get(stream, -1) < number, "out of order"
                last[stream] = number
            assert min(credit.values()) >= 0
    assert len(seen) == len(set(seen)) == feed.figure("granted")
    assert feed.figure("queued_records") <= 40 + 9
    assert feed.end == sum(feed.figure(n) for n in ("granted", "dropped", "skipped", "queued_records"))
