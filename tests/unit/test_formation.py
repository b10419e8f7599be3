"""What a node decides on what the others say, and what it says where it can only wait."""

from __future__ import annotations

from typing import Any

import pytest

from danube.cluster import formation
from danube.cluster.calls import Introduction
from danube.cluster.formation import Formation
from danube.cluster.node_files import NodeRecord

SEEDS = ("a:1", "b:1", "c:1")


class Events:
    def __init__(self) -> None:
        self.told: list[str] = []

    def limited(self, what: str, **facts: object) -> None:
        self.told.append(what)

    def info(self, what: str, **facts: object) -> None: ...


def decide(node_id: str, said: dict[str, str]) -> bool:
    """Whether this node makes the cluster, where the seeds say these ids."""
    nobody: Any = None
    formed = Formation(nobody, NodeRecord(node_id), seeds=SEEDS, join=())._decide(
        {address: Introduction(one) for address, one in said.items()}
    )
    return formed is not None


def test_the_lowest_of_all_seeds_makes_the_cluster_and_nobody_on_less() -> None:
    assert decide("1", {"a:1": "1", "b:1": "2", "c:1": "10"})
    assert not decide("2", {"a:1": "1", "b:1": "2", "c:1": "10"})
    assert not decide("1", {"a:1": "1", "b:1": "2"})
    assert not decide("0", {"a:1": "1", "b:1": "2", "c:1": "10"})


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"a:1": "1", "b:1": "1", "c:1": "2"}, ["two seeds are one node"]),
        ({"a:1": "1", "b:1": "x", "c:1": "2"}, ["a seed says no node id"]),
        ({"a:1": "1", "b:1": "2"}, []),
    ],
)
def test_seeds_that_can_make_no_cluster_are_named(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, str], told: list[str]
) -> None:
    events = Events()
    monkeypatch.setattr(formation, "_log", events)
    assert not decide("1", said)
    assert events.told == told
