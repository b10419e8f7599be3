"""All series together have a bound, sums stay the truth, and no counter can fall."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.config.sections import MetricsConfig
from danube.core.partition.pending import OTHER
from danube.limits import WORKERS_MAX
from danube.server.metrics.process import Metrics
from danube.server.metrics.series import GROWING, Found, Series, topics_within, within
from danube.server.metrics.table import FAMILIES, FEW, Family

KINDS = {
    "bytes": Family("bytes", "gauge", ("topic",), "Sizes."),
    "seconds": Family("seconds", "gauge", ("topic",), "Ages.", oldest=True),
    "handles": Family("handles", "gauge", ("namespace", "principal"), "Of whom."),
}
COUNT = 100_000


def crowd(*, ahead: int = 0) -> Found:
    """Topics and principals in namespaces of their own, ``ahead`` of those with a place left out."""
    numbers = range(ahead, COUNT)
    topics: list[Series] = [((f"/n{number}/t",), float(number)) for number in numbers]
    principals: list[Series] = [((f"n{number}", f"user:{number}"), 2.0) for number in numbers]
    return {"up": [((), 1.0)], "bytes": topics, "seconds": topics, "handles": principals}


def rows(found: Found) -> int:
    return sum(map(len, found.values()))


@pytest.mark.parametrize("most", [1_000, 10_000])
def test_a_crowd_of_topics_namespaces_and_principals_is_bounded_and_sums_are_the_truth(most: int) -> None:
    found, whole = within(crowd(), most, KINDS), crowd()
    assert most - 2 <= rows(found) <= most
    assert found["up"] == whole["up"]
    for name in ("bytes", "handles"):
        assert sum(value for _, value in found[name]) == sum(value for _, value in whole[name])
    assert found["bytes"][:-1] == whole["bytes"][: len(found["bytes"]) - 1], "the first keep their rows"
    assert found["seconds"][-1] == ((OTHER,), COUNT - 1.0), "the oldest, not a sum of ages"
    assert found["handles"][-1][0] == (OTHER, OTHER)


def test_a_place_that_gets_free_is_taken_and_the_sum_falls_only_by_what_is_gone() -> None:
    before, after = within(crowd(), 10_000, KINDS), within(crowd(ahead=1), 10_000, KINDS)
    whole = [sum(value for _, value in found["handles"]) for found in (before, after)]
    assert whole == [2 * COUNT, 2 * COUNT - 2]
    assert after["handles"][0] == before["handles"][1]


@given(sizes=st.tuples(*[st.integers(0, 60)] * 3), steady=st.integers(1, 9), most=st.integers(30, 120))
def test_a_family_that_needs_less_leaves_its_room(
    sizes: tuple[int, int, int], steady: int, most: int
) -> None:
    found: Found = {"up": [((str(number),), 1.0) for number in range(steady)]}
    for (name, family), size in zip(KINDS.items(), sizes, strict=True):
        found[name] = [((str(number),) * len(family.labels), 1.0) for number in range(size)]
    bounded = within(found, most, KINDS)
    assert rows(bounded) == min(rows(found), most)
    assert sum(value for _, value in bounded["bytes"]) == sizes[0]
    assert bounded["up"] == found["up"]


def test_a_row_other_that_a_worker_made_is_joined_with_those_that_join_it() -> None:
    series: list[Series] = [
        ((name,), value) for name, value in (("/a/b", 1.0), (OTHER, 5.0), ("/a/c", 2.0), ("/a/d", 3.0))
    ]
    found = within({"bytes": series}, 2, KINDS)["bytes"]
    assert found == [(("/a/b",), 1.0), ((OTHER,), 10.0)]


@pytest.mark.parametrize("workers", [1, WORKERS_MAX])
@pytest.mark.parametrize("series_max", [1_000, 10_000, 100_000])
def test_workers_are_asked_for_as_many_topics_as_there_is_room_for(series_max: int, workers: int) -> None:
    topics = topics_within(series_max, 10_000, workers)
    labelled: list[Series] = [(("x",), 1.0)] * (topics + 1)
    found: Found = {family.name: [((), 1.0)] for family in FAMILIES if not family.labels}
    found |= dict.fromkeys(GROWING, labelled)
    found |= {f"worker{number}": [((), 1.0)] * workers for number in (1, 2)}
    assert within(found, series_max) is found, "no topic loses its label when the text is made"
    assert topics == 10_000 or rows(found) + 2 * len(GROWING) + 4 * workers + 8 > series_max
    assert topics_within(series_max, 7, workers) == 7


def test_the_process_asks_workers_for_as_many_topics_as_the_configuration_leaves_room_for() -> None:
    context = SimpleNamespace(workers=3, controller_address="")
    made = Metrics(context, MetricsConfig(topics_max=9_000, series_max=2_000), lambda: 1)  # type: ignore[arg-type]
    assert made._gathering._topics_max == topics_within(2_000, 9_000, 3) < 1_000
    assert made._series_max == 2_000


def test_a_counter_has_no_label_that_clients_can_make_more_of() -> None:
    assert all(FEW.issuperset(family.labels) for family in FAMILIES if family.kind == "counter")
    assert all(family.kind == "gauge" for family in GROWING.values())
