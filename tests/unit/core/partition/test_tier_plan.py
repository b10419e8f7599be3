"""What the mover does next: plain values in, decisions out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.core.partition.tier_plan import (
    MERGE_COUNT_MIN,
    OUTAGE_FAILURES_MIN,
    RETRY_MAX_US,
    SECOND_US,
    ListedObject,
    LocalSegment,
    OutageGate,
    TierSettings,
    Waiting,
    backlog,
    choose,
    due,
    installable,
    merge_next,
    retry_delay_us,
    superseded,
    sweep,
)

ENTRY = np.dtype(
    [("base_offset", "<u8"), ("end_offset", "<u8"), ("size_bytes", "<u8"), ("uploaded_us", "<i8")]
)
NOW_US = 10_000 * SECOND_US
SETTINGS = TierSettings(merge_below=100, merge_to=400)


def sealed(base: int, end: int, size: int = 10, first_us: int = 0) -> LocalSegment:
    return LocalSegment(base, end, size, first_us or base + 1, sealed=True)


def active(base: int) -> LocalSegment:
    return LocalSegment(base, base, 64, 0, sealed=False)


def entries(*rows: tuple[int, int, int] | tuple[int, int, int, int]) -> np.ndarray:
    return np.array([(*row, 0)[:4] for row in rows], ENTRY)


# -- backlog --------------------------------------------------------------------------------------


def test_what_is_sealed_and_not_uploaded_is_the_backlog_in_order() -> None:
    found = backlog([sealed(20, 30, 7), active(30), sealed(0, 10), sealed(10, 20, 5)], 10)
    assert [one.base_offset for one in found.segments] == [10, 20]
    assert found.flaw == ""


def test_nothing_behind_an_unsealed_segment_is_uploaded() -> None:
    found = backlog([sealed(0, 10), active(10), sealed(20, 30)], 0)
    assert [one.base_offset for one in found.segments] == [0]


def test_an_unsealed_segment_that_lies_below_what_is_uploaded_is_in_nobodys_way() -> None:
    assert [one.base_offset for one in backlog([active(0), sealed(10, 20)], 10).segments] == [10]


def test_a_segment_cut_elsewhere_than_the_uploaded_one_stops_everything_with_words() -> None:
    found = backlog([sealed(0, 10), sealed(10, 25), sealed(25, 30)], 15)
    assert found.segments == [] and "overlaps what is uploaded: 15" in found.flaw


def test_local_segments_that_overlap_each_other_stop_with_words() -> None:
    found = backlog([sealed(0, 10), sealed(5, 15)], 0)
    assert len(found.segments) == 1 and "segment 5 overlaps" in found.flaw


def test_missing_local_segments_do_not_hide_the_later_ones() -> None:
    assert [one.base_offset for one in backlog([sealed(50, 60)], 10).segments] == [50]


def test_an_empty_backlog_has_no_age() -> None:
    found = backlog([active(0)], 0)
    assert found.segments == []


# -- choosing -------------------------------------------------------------------------------------


def test_the_oldest_records_go_first_and_a_busy_partition_waits() -> None:
    waiting = [Waiting("busy", 1, 2), Waiting("young", 9, 0), Waiting("old", 5, 0)]
    assert choose(waiting, 2) == ["old", "young"]
    assert choose(waiting, 9) == ["old", "young", "busy"]
    assert choose(waiting, 0) == []


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=30), st.integers(0, 40))
def test_whoever_is_chosen_has_no_more_uploads_than_who_is_not(
    rows: list[tuple[int, int]], slots: int
) -> None:
    waiting = [Waiting(number, *row) for number, row in enumerate(rows)]
    chosen = set(choose(waiting, slots))
    assert len(chosen) == min(slots, len(rows))
    rest = [one.running for one in waiting if one.name not in chosen]
    taken = [one.running for one in waiting if one.name in chosen]
    assert not rest or not taken or max(taken) <= min(rest)


def test_only_a_gapless_beginning_can_be_installed() -> None:
    assert installable([0, 10, 20, 30], {0, 10, 30}) == 2
    assert installable([0, 10], {10}) == 0
    assert installable([], {1}) == 0


# -- merging --------------------------------------------------------------------------------------


def test_small_neighbours_that_make_up_a_large_segment_are_merged() -> None:
    found = merge_next(entries((0, 1, 500), (1, 2, 60), (2, 3, 60), (3, 4, 500)), NOW_US, SETTINGS)
    assert found == (1, 2)


def test_the_newest_segments_are_left_alone() -> None:
    young = NOW_US - SETTINGS.merge_after_us + 1
    assert merge_next(entries((0, 1, 60, young), (1, 2, 60, young)), NOW_US, SETTINGS) is None
    assert merge_next(entries((0, 1, 60, young - 1), (1, 2, 60, young - 1)), NOW_US, SETTINGS) == (0, 1)


def test_few_small_segments_wait_for_more_unless_no_more_can_come() -> None:
    assert merge_next(entries((0, 1, 10), (1, 2, 10)), NOW_US, SETTINGS) is None
    assert merge_next(entries((0, 1, 10), (1, 2, 10), (2, 3, 300)), NOW_US, SETTINGS) == (0, 1)
    young = (2, 3, 10, NOW_US)
    assert merge_next(entries((0, 1, 10), (1, 2, 10), young), NOW_US, SETTINGS) is None
    many = [(n, n + 1, 1) for n in range(MERGE_COUNT_MIN)]
    assert merge_next(entries(*many), NOW_US, SETTINGS) == (0, MERGE_COUNT_MIN - 1)


def test_a_hole_is_not_merged_away() -> None:
    found = merge_next(entries((0, 1, 60), (5, 6, 60), (6, 7, 60)), NOW_US, SETTINGS)
    assert found == (1, 2)
    assert merge_next(entries((0, 1, 60), (5, 6, 60)), NOW_US, SETTINGS) is None


def test_a_merge_of_nothing_or_with_merging_off_is_none() -> None:
    assert merge_next(entries((0, 1, 1)), NOW_US, SETTINGS) is None
    off = TierSettings(merge_below=0)
    assert merge_next(entries(*[(n, n + 1, 1) for n in range(50)]), NOW_US, off) is None


@given(
    st.lists(st.tuples(st.integers(1, 150), st.booleans(), st.booleans()), max_size=60),
)
def test_merging_ends_and_keeps_its_bounds(rows: list[tuple[int, bool, bool]]) -> None:
    offset, made = 0, []
    for size, hole, young in rows:
        offset += hole
        made.append((offset, offset + 1, size, NOW_US if young else 0))
        offset += 1
    for _ in range(len(made) + 1):
        found = merge_next(entries(*made), NOW_US, SETTINGS)
        if found is None:
            break
        first, last = found
        parts = made[first : last + 1]
        assert len(parts) >= 2 and sum(part[2] for part in parts) <= SETTINGS.merge_to
        assert all(part[2] < SETTINGS.merge_below and part[3] < NOW_US for part in parts)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
        made[first : last + 1] = [(parts[0][0], parts[-1][1], sum(part[2] for part in parts), 0)]
    else:
        pytest.fail("merging does not end")


# -- deleting -------------------------------------------------------------------------------------

AGED = NOW_US - SETTINGS.orphan_age_us - 1
GRACE = SETTINGS.reader_grace_us


def one_sweep(
    *listed: ListedObject, since: dict[str, int], end: int = 100, named: set[str] | None = None, most: int = 9
) -> tuple[list[str], dict[str, int]]:
    found = sweep(listed, named or set(), end, since, NOW_US, SETTINGS, most)
    return found.doomed, found.unnamed_since


def test_an_old_object_that_nobody_names_goes_at_the_second_look() -> None:
    orphan = ListedObject("a", 0, AGED)
    assert one_sweep(orphan, since={}) == ([], {"a": NOW_US})
    assert one_sweep(orphan, since={"a": NOW_US - GRACE + 1}) == ([], {"a": NOW_US - GRACE + 1})
    assert one_sweep(orphan, since={"a": NOW_US - GRACE}) == (["a"], {})


def test_young_named_and_future_objects_stay() -> None:
    assert one_sweep(ListedObject("young", 0, AGED + 2), since={}) == ([], {})
    assert one_sweep(ListedObject("named", 0, AGED), since={"named": 0}, named={"named"}) == ([], {})
    assert one_sweep(ListedObject("next", 100, AGED), since={"next": 0}) == ([], {})


def test_a_round_is_bounded() -> None:
    listed = [ListedObject(f"{n}", 0, AGED) for n in range(5)]
    doomed, since = one_sweep(*listed, since={f"{n}": 0 for n in range(5)}, most=2)
    assert len(doomed) == 2 and len(since) == 2


def test_what_left_the_manifest_waits_for_readers() -> None:
    dropped = {"a": NOW_US - GRACE, "b": NOW_US - GRACE + 1, "c": 0}
    assert due(dropped, NOW_US, SETTINGS, 9) == ["a", "c"]
    assert due(dropped, NOW_US, SETTINGS, 1) == ["a"]


def test_the_newest_manifests_are_kept() -> None:
    assert superseded(["1", "2", "3", "4", "5"]) == ["1", "2"]
    assert superseded(["1", "2", "3"]) == []


# -- trying again ---------------------------------------------------------------------------------


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_a_retry_waits_a_bounded_time_and_never_none(failures: int, chance: float) -> None:
    assert SECOND_US // 4 <= retry_delay_us(failures, chance) <= RETRY_MAX_US


def test_an_outage_lets_one_call_through_at_growing_intervals() -> None:
    gate, now = OutageGate(), 0
    for _ in range(OUTAGE_FAILURES_MIN):
        assert gate.admit(now)
        gate.failed(now, 1.0)
    pauses = []
    for _ in range(8):
        assert gate.closed and not gate.admit(now)
        begin = now
        while not gate.admit(now):
            now += 10_000
        assert not gate.admit(now)  # one at a time
        pauses.append(now - begin)
        gate.failed(now, 1.0)
    assert pauses == sorted(pauses) and pauses[0] <= SECOND_US and pauses[-1] <= 11 * SECOND_US
    now += 11 * SECOND_US
    assert gate.admit(now)
    assert gate.succeeded(now)
    assert not gate.closed and gate.admit(now)
    assert not gate.succeeded(now), "it was open"


def test_a_store_that_comes_and_goes_is_not_asked_by_all_each_time() -> None:
    """The end of an outage is told once in the time in which everybody tries by itself."""
    gate, told = OutageGate(), []
    for now in range(0, 10 * RETRY_MAX_US, 5 * SECOND_US):
        for _ in range(OUTAGE_FAILURES_MIN):
            gate.failed(now, 0.0)
        if gate.succeeded(now):
            told.append(now)
    assert told == list(range(0, 10 * RETRY_MAX_US, RETRY_MAX_US))


def test_an_admission_that_was_not_used_is_given_back() -> None:
    gate = OutageGate()
    for _ in range(OUTAGE_FAILURES_MIN):
        gate.failed(0, 0.0)
    now = 60 * SECOND_US
    assert gate.admit(now) and not gate.admit(now)
    gate.unused()
    assert gate.admit(now)
