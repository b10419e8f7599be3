"""What a node decides on what the others say, and what it says where it can only wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from danube.cluster.control import formation
from danube.cluster.control.calls import Change, Failed, Introduction, encode, sent_error
from danube.cluster.control.formation import Formation
from danube.cluster.control.leadership import changed_members
from danube.cluster.log.node_files import NodeRecord
from danube.cluster.log.waiting import waiting_error
from danube.cluster.raft.engine import Members
from danube.errors import Conflict, ConnectionFailed

SEEDS = ("a:1", "b:1", "c:1")


class Events:
    def __init__(self) -> None:
        self.told: list[str] = []

    def lasting(self, what: str, **facts: object) -> None:
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


def waiting_of(said: dict[str, Introduction]) -> Any:
    nobody: Any = None
    asking = Formation(nobody, NodeRecord("1"), seeds=SEEDS, join=())
    asking._decide(said)
    return asking._wait_for([address for address in SEEDS if address not in said])


def test_whom_a_node_waits_for_is_told_with_what_helps() -> None:
    found = waiting_of({"a:1": Introduction("1"), "b:1": Introduction("2")})
    assert found.missing == ["c:1"] and "c:1 does not answer" in found.why and "start" in found.hint
    assert "b:1, c:1 do not answer" in waiting_of({"a:1": Introduction("1")}).why
    error = waiting_error(found, found.since_us + 12_000_000)
    assert "since 12 s" in error.why and error.hint == found.hint and error.status == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            {"a:1": Introduction("1"), "b:1": Introduction("1"), "c:1": Introduction("2")},
            "two seeds are one node",
        ),
        ({"b:1": Introduction("2", "x"), "c:1": Introduction("3", "y")}, "different clusters"),
    ],
)
def test_what_hinders_a_decision_is_told_instead(said: dict[str, Introduction], why: str) -> None:
    found = waiting_of(said)
    assert why in found.why and "cluster.seed_nodes" in found.hint


def test_a_members_refusal_is_told_rather_than_the_silence_of_another() -> None:
    class Line:
        async def call_address(self, address: str, request: bytes, timeout_s: float) -> tuple[str, bytes]:
            if address == "b:1":
                return "", encode(Failed(sent_error(Conflict("node 7 is at a:1 already", hint="remove it"))))
            raise ConnectionFailed(f"{address} is not reached")

    line: Any = Line()
    refused = asyncio.run(formation.ask_to_join(line, b"", ("a:1", "b:1", "c:1"), 1.0))
    assert isinstance(refused, Conflict) and refused.hint == "remove it"


def test_the_way_back_of_a_node_that_lost_its_disk_is_told() -> None:
    with pytest.raises(Conflict) as caught:
        changed_members(Members({"1": "a:1", "2": "b:1"}), Change("add", "9", "b:1"))
    assert "remove-node --node-id 2" in caught.value.hint
