"""The owner's decisions about offsets, append times and ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube.core.batch.format import MAGIC, BatchHeader, Flag
from danube.core.partition.dedup import Duplicate
from danube.core.partition.partition import Admitted, Partition
from danube.core.partition.policy import TopicPolicy
from danube.errors import Damage, InvalidArgument, InvalidName, InvariantBroken, ProtocolError

NOW_US = 1_700_000_000_000_000


def header(
    count: int = 1, producer_id: int = 0, sequence: int = 0, epoch: int = 1, crc: int = 7, flags: int = 0
) -> BatchHeader:
    return BatchHeader(
        MAGIC, 1024, 0, 0, 0, crc, 0, flags, 0, count, 0, 0, producer_id, sequence, 0, epoch, 0, 0, 0, 0, 0, 0
    )


def partition(durability: str = "written", log_end: int = 0, epoch: int = 3) -> Partition:
    policy = TopicPolicy(reliable=durability != "memory", durability=durability)
    return Partition("/default/orders", epoch, policy, log_end)


def test_offsets_are_dense_from_the_recovered_end() -> None:
    orders = partition(log_end=40)
    admitted = [orders.admit(header(count), NOW_US) for count in (1, 5, 2)]
    assert [a.base_offset for a in admitted] == [40, 41, 46]
    assert orders.log_end == 48


def test_append_time_never_goes_back_even_if_the_clock_does() -> None:
    orders = partition()
    times = [orders.admit(header(), now) for now in (500, 400, 600, 10)]
    assert [a.append_time_us for a in times if isinstance(a, Admitted)] == [500, 500, 600, 600]


def test_append_time_never_goes_back_across_a_restart() -> None:
    stored = header(2)._replace(base_offset=0, append_time_us=900)
    orders = partition(log_end=2)
    orders.restore(None, [stored])
    assert orders.admit(header(), 100) == Admitted(2, 900)


@pytest.mark.parametrize("durability", ["memory", "written"])
def test_what_is_written_is_visible_at_memory_and_written(durability: str) -> None:
    orders = partition(durability)
    orders.admit(header(10), NOW_US)
    assert orders.high_watermark == 0
    assert orders.written(10) == 10
    assert orders.synced(10) == 10


def test_only_what_is_synced_is_visible_at_fsync() -> None:
    orders = partition("fsync")
    orders.admit(header(10), NOW_US)
    assert orders.written(10) == 0
    assert orders.synced(4) == 4
    assert orders.synced(10) == 10


def test_group_commits_may_finish_in_any_order() -> None:
    orders = partition("fsync")
    orders.admit(header(10), NOW_US)
    orders.written(10)
    assert [orders.synced(end) for end in (8, 3, 10, 10)] == [8, 8, 10, 10]


def test_high_watermark_never_goes_back_when_the_policy_gets_stricter() -> None:
    orders = partition("written")
    orders.admit(header(10), NOW_US)
    orders.written(10)
    assert orders.update_policy(TopicPolicy(durability="fsync")) == 10
    orders.admit(header(1), NOW_US)
    assert orders.written(11) == 10
    assert orders.update_policy(TopicPolicy(durability="written")) == 11


def test_a_partition_that_is_held_counts_what_is_synced() -> None:
    orders = partition("written")
    orders.admit(header(10), NOW_US)
    assert orders.written(10) == orders.acknowledged_end == 10
    orders.hold()
    orders.admit(header(5), NOW_US)
    assert orders.written(15) == orders.acknowledged_end == 10, "what was told stays told"
    assert orders.synced(7) == 10 and orders.synced(12) == orders.acknowledged_end == 12
    assert orders.release() == orders.acknowledged_end == 15
    orders.hold()
    orders.update_policy(TopicPolicy(durability="fsync"))
    assert orders.settling and orders.acknowledged_end == 12 and not orders.held
    assert orders.synced(15) == 15 and not orders.settling


def test_an_end_outside_the_log_stops_the_shard() -> None:
    orders = partition()
    orders.admit(header(10), NOW_US)
    orders.written(5)
    for wrong in (
        lambda: orders.written(11),
        lambda: orders.written(4),
        lambda: orders.synced(6),
        lambda: orders.rollback(4),
        lambda: orders.rollback(11),
        lambda: orders.snapshot(11),
    ):
        with pytest.raises(InvariantBroken):
            wrong()
    assert (orders.synced_end, orders.written_end, orders.log_end) == (0, 5, 10)


def test_a_negative_log_end_stops_the_shard() -> None:
    with pytest.raises(InvariantBroken):
        partition(log_end=-1)


def test_rollback_gives_the_same_offsets_again() -> None:
    orders = partition()
    orders.admit(header(3), NOW_US)
    orders.written(3)
    orders.admit(header(4), NOW_US)
    orders.rollback(3)
    assert orders.admit(header(2), NOW_US).base_offset == 3


def test_a_batch_that_selects_offsets_is_never_stored() -> None:
    orders = partition()
    with pytest.raises(ProtocolError):
        orders.admit(header(flags=int(Flag.SELECTED)), NOW_US)
    assert orders.log_end == 0


def test_a_producer_needs_a_name_and_the_id_of_that_name() -> None:
    orders = partition()
    with pytest.raises(InvalidName):
        orders.open_producer("", 0, 0, NOW_US)
    with pytest.raises(InvalidArgument):
        orders.open_producer("anna", 12345, 1, NOW_US)


def test_a_duplicate_can_wait_until_its_original_has_reached_the_level() -> None:
    orders = partition("fsync")
    orders.admit(header(10, producer_id=9), NOW_US)
    orders.written(10)
    again = orders.admit(header(10, producer_id=9), NOW_US)
    assert again == Duplicate(base_offset=0, end_offset=10, epoch=3)
    assert orders.high_watermark < again.end_offset
    assert orders.synced(10) >= again.end_offset


def test_a_duplicate_names_the_epoch_that_stored_it() -> None:
    first = partition(epoch=3)
    first.admit(header(2, producer_id=9), NOW_US)
    second = partition(epoch=4, log_end=2)
    second.restore(first.snapshot(), [])
    assert second.admit(header(2, producer_id=9), NOW_US) == Duplicate(0, 2, epoch=3)


def test_recovered_headers_beyond_the_log_stop_the_shard() -> None:
    with pytest.raises(InvariantBroken):
        partition(log_end=1).restore(None, [header(2)])


def test_a_damaged_snapshot_changes_nothing() -> None:
    orders = partition()
    orders.admit(header(2, producer_id=9), NOW_US)
    snapshot = bytearray(orders.snapshot())
    snapshot[-1] ^= 1
    with pytest.raises(Damage):
        orders.restore(bytes(snapshot), [])
    assert isinstance(orders.admit(header(2, producer_id=9), NOW_US), Duplicate)


EVENT = st.one_of(
    st.tuples(st.just("admit"), st.integers(1, 50)),
    st.tuples(st.just("written"), st.floats(0, 1)),
    st.tuples(st.just("synced"), st.floats(0, 1)),
    st.tuples(st.just("rollback"), st.floats(0, 1)),
    st.tuples(st.just("policy"), st.sampled_from(["written", "fsync"])),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(EVENT, max_size=60))
def test_the_ends_keep_their_order_whatever_happens(events: list[tuple[str, float | str]]) -> None:
    orders = partition()
    seen = 0
    for kind, value in events:
        if kind == "admit":
            orders.admit(header(int(value)), NOW_US)
        elif kind == "policy":
            orders.update_policy(TopicPolicy(durability=str(value)))
        else:
            low = 0 if kind == "synced" else orders.written_end
            high = orders.written_end if kind == "synced" else orders.log_end
            getattr(orders, kind)(low + int((high - low) * float(value)))
        assert orders.synced_end <= orders.written_end <= orders.log_end
        assert seen <= orders.high_watermark <= orders.written_end
        seen = orders.high_watermark
