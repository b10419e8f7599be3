"""Usage of sums in shared memory: one writer for each slot, and figures over all workers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from danube.ipc.region import Region
from danube.ipc.usage import SLOTS, Usage, Used, used

KEY, OTHER = -7, 11


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region.create(3, ring_bytes=4096)
    yield made
    made.close()


def test_workers_see_what_the_others_take_and_all_store(region: Region) -> None:
    workers = [Usage(region, worker) for worker in range(3)]
    workers[1].slot(OTHER).take(99, 99)  # the slots of a sum lie anywhere
    slots = [one.slot(KEY) for one in workers]
    for usage, slot in zip(workers, slots, strict=True):
        usage.look(slot)
    for number, slot in enumerate(slots, 1):
        slot.take(number, 10 * number)
        slot.store(100 * number)
    slots[2].hold()
    assert [slot.others() for slot in slots] == [(5, 50), (4, 40), (3, 30)]
    assert [slot.stored_bytes() for slot in slots] == [600] * 3
    assert used(region) == {KEY: Used(6, 60, 1, 600), OTHER: Used(99, 99, 0, 0)}


def test_a_slot_that_another_worker_frees_counts_no_more(region: Region) -> None:
    first, second = Usage(region, 0), Usage(region, 1)
    theirs = second.slot(KEY)
    mine = first.slot(KEY)
    theirs.take(5, 5)
    theirs.store(5)
    assert (mine.others(), mine.stored_bytes()) == ((5, 5), 5)
    theirs.free()
    assert (mine.others(), mine.stored_bytes()) == ((0, 0), 0)
    again = second.slot(OTHER)
    again.take(9, 9)  # in the same place
    first.look(mine)
    assert mine.others() == (0, 0) and used(region)[OTHER] == Used(9, 9, 0, 0)


def test_a_worker_that_starts_again_begins_with_none(region: Region) -> None:
    Usage(region, 0).slot(KEY).take(5, 5)
    Usage(region, 0)
    assert used(region) == {}


def test_where_all_slots_are_taken_a_worker_counts_for_itself(region: Region) -> None:
    usage, other = Usage(region, 0), Usage(region, 1)
    for key in range(1, SLOTS + 1):
        usage.slot(key)
    alone = usage.slot(KEY)
    alone.take(5, 5)
    alone.store(7)
    assert alone.stored_bytes() == 7 and KEY not in used(region)
    assert other.slot(KEY).others() == (0, 0)


def test_blocks_that_nobody_uses_take_no_memory(region: Region) -> None:
    before = os.stat(region.path).st_blocks
    assert used(region) == {}
    assert os.stat(region.path).st_blocks == before
