"""Counts by name over the workers of a host: exact for each name, and a dead worker's are gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from danube.ipc.region import Region
from danube.ipc.tallies import Tallies


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region.create(3, ring_bytes=4096)
    yield made
    made.close()


def test_a_name_is_counted_over_all_workers(region: Region) -> None:
    workers = [Tallies(region, worker) for worker in range(3)]
    for worker, amount in enumerate((2, 1, 4)):
        workers[worker].add("192.0.2.1", amount)
    workers[0].add("192.0.2.2", 1)
    assert [one.total("192.0.2.1") for one in workers] == [7, 7, 7]
    assert (workers[2].total("192.0.2.2"), workers[2].total("192.0.2.3")) == (1, 0)
    workers[1].add("192.0.2.1", -1)
    assert workers[0].total("192.0.2.1") == 6


def test_many_names_do_not_disturb_each_other(region: Region) -> None:
    tallies = Tallies(region, 0)
    names = [f"10.0.{number >> 8}.{number & 255}" for number in range(1_000)]
    for name in names:
        tallies.add(name, 1)
    wrong = sum(tallies.total(name) != 1 for name in names)
    assert all(tallies.total(name) >= 1 for name in names) and wrong < 60, "both places must be shared"


def test_a_worker_that_starts_again_begins_with_none(region: Region) -> None:
    first, second = Tallies(region, 0), Tallies(region, 1)
    first.add("a", 5)
    second.add("a", 1)
    again = Tallies(region, 0)
    assert again.total("a") == second.total("a") == 1


def test_counts_go_round_at_their_end(region: Region) -> None:
    first, second = Tallies(region, 0), Tallies(region, 1)
    first.add("a", -1)
    second.add("a", 3)
    assert first.total("a") == 2
