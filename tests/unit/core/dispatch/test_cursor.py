"""Bytes of a cursor: the same comes back, damage is found, the size is bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube.core.dispatch.cursor import CursorState
from danube.core.dispatch.grants import Mode
from danube.core.partition.policy import FailurePolicy
from danube.errors import Damage, StorageIncompatible
from danube.limits import ACKED_RANGES_STORED_MAX
from tests.processor_time import processor_time_within

edges = st.lists(st.integers(1, 2**33), max_size=40).map(lambda steps: steps[: len(steps) // 2 * 2])
near_edges = st.lists(st.integers(1, 3), max_size=60).map(lambda steps: steps[: len(steps) // 2 * 2])


def state_of(steps: list[int], floor: int, mode: Mode = Mode.SHARED) -> CursorState:
    acked = (np.cumsum(np.array(steps, np.int64)) + floor).reshape(-1, 2)
    return CursorState(mode, floor, acked, 77, FailurePolicy(poison="drop"))


@settings(deadline=None)
@given(near_edges, st.integers(0, 2**60), st.sampled_from(list(Mode)))
def test_what_is_encoded_comes_back(steps: list[int], floor: int, mode: Mode) -> None:
    state = state_of(steps, floor, mode)
    again = CursorState.decode(state.encode())
    assert np.array_equal(again.acked, state.acked)
    assert (again.mode, again.ack_floor, again.max_unacked, again.failure) == (mode, floor, 77, state.failure)


@settings(deadline=None)
@given(edges, st.integers(0, 2**60))
def test_ranges_of_any_width_come_back(steps: list[int], floor: int) -> None:
    state = state_of(steps, floor)
    encoded = state.encode()
    assert np.array_equal(CursorState.decode(encoded).acked, state.acked)
    assert encoded[0] == (2 if max(steps, default=0) >= 2**32 else 1), "others read what they can"


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_any_cut_or_changed_byte_gives_damage_or_a_state(data: st.DataObject) -> None:
    encoded = state_of([3, 1, 4, 1, 5, 9, 2, 6] * 3, 1000).encode()
    cut = data.draw(st.integers(0, len(encoded) - 1))
    place = data.draw(st.integers(0, len(encoded) - 1))
    changed = bytearray(encoded)
    changed[place] ^= data.draw(st.integers(1, 255))
    for damaged in (encoded[:cut], bytes(changed)):
        try:
            CursorState.decode(damaged)
        except (Damage, StorageIncompatible):
            pass
    with pytest.raises(Damage):
        CursorState.decode(encoded[:cut])


def test_a_newer_version_is_refused_and_not_read() -> None:
    encoded = bytearray(CursorState.at(Mode.SHARED, 5).encode())
    encoded[0] = 3
    with pytest.raises(StorageIncompatible):
        CursorState.decode(bytes(encoded))


ranges_in_any_order = st.lists(st.tuples(st.integers(0, 60), st.integers(-3, 20)), max_size=12)


@settings(deadline=None)
@given(ranges_in_any_order, st.integers(0, 40))
def test_whatever_a_state_is_made_of_what_is_stored_says_the_same(
    spans: list[tuple[int, int]], floor: int
) -> None:
    acked = np.array([(start, start + size) for start, size in spans], np.int64).reshape(-1, 2)
    again = CursorState.decode(CursorState(Mode.SHARED, floor, acked).encode())
    meant = set(range(floor)) | {o for start, size in spans for o in range(start, start + size)}
    assert offsets_of(again) == meant
    edges = np.diff(again.acked.reshape(-1), prepend=again.ack_floor)
    assert (edges > 0).all(), "every range is above the floor and apart from the next"
    assert CursorState.decode(again.encode()).encode() == again.encode()


@settings(deadline=None)
@given(near_edges, st.integers(0, 40), st.integers(0, 200))
def test_what_is_clipped_to_a_log_keeps_all_below_its_end(steps: list[int], floor: int, end: int) -> None:
    state = state_of(steps, floor)
    assert offsets_of(state.clipped(end)) == {offset for offset in offsets_of(state) if offset < end}
    CursorState.decode(state.clipped(end).encode())


def offsets_of(state: CursorState) -> set[int]:
    return set(range(state.ack_floor)) | {o for a, b in state.acked.tolist() for o in range(a, b)}


@pytest.mark.parametrize("width", [0, 2**33])
def test_gaps_of_nothing_that_former_versions_wrote_are_read(width: int) -> None:
    """A range at the floor, and two that touch: `floor 10, 10 .. 15, 15 .. 20, then one far above`."""
    edges = np.array([0, 5, 0, 5, width + 1, 1], "<u8" if width else "<u4").tobytes()
    form = b"\2\1\2" if width else b"\1\1\0"
    head = form + bytes(1) + bytes(4) + (10).to_bytes(8, "little") + bytes(4) + (3).to_bytes(4, "little")
    state = CursorState.decode(head + edges)
    assert state.ack_floor == 20 and state.acked.tolist() == [[width + 21, width + 22]]


def test_huge_claims_allocate_nothing() -> None:
    encoded = bytearray(CursorState.at(Mode.SHARED, 5).encode())
    encoded[20:24] = b"\xff\xff\xff\xff"
    for form in (0, 1):
        encoded[2] = form
        with pytest.raises(Damage):
            CursorState.decode(bytes(encoded))


def test_the_bytes_of_wide_ranges_are_pinned_and_what_they_cannot_be_is_damage() -> None:
    state = CursorState(Mode.SHARED, 10, np.array([[2**33, 2**33 + 5]], np.int64), 9)
    encoded = state.encode()
    assert encoded.hex() == (
        "02010200" "09000000" "0a00000000000000" "00000000" "01000000" "f6ffffff01000000" "0500000000000000"
    )  # fmt: skip
    for edges in ([5, 0], [2**63, 5], [2**62, 2**62]):
        with pytest.raises(Damage):
            CursorState.decode(encoded[:24] + np.array(edges, "<u8").tobytes())
    with pytest.raises(Damage):
        CursorState.decode(encoded[:2] + b"\0" + encoded[3:])


def test_the_bytes_are_pinned() -> None:
    state = CursorState(Mode.KEY_SHARED, 10, np.array([[12, 13], [500, 700]], np.int64), 9)
    assert state.encode().hex() == (
        "01030000090000000a0000000000000000000000020000000200000001000000e7010000c8000000"
    )
    dense = CursorState(Mode.SHARED, 10, np.array([[11, 12], [13, 15]], np.int64))
    assert dense.encode().hex() == "01010100000000000a0000000000000000000000050000001a"


def test_a_new_subscription_costs_24_bytes() -> None:
    assert len(CursorState.at(Mode.SHARED, 2**60).encode()) == 24


def test_the_size_is_bounded_whatever_is_acked() -> None:
    acked = np.arange(0, 4_000_000, dtype=np.int64).reshape(-1, 2) * 100 + 1
    with processor_time_within(1):
        encoded = CursorState(Mode.SHARED, 0, acked).encode()
    assert len(encoded) == 24 + 8 * ACKED_RANGES_STORED_MAX
    assert np.array_equal(CursorState.decode(encoded).acked, acked[:ACKED_RANGES_STORED_MAX])
