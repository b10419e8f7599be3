"""Who is a member no more finds it out, and nobody else does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from danube.cluster.control.dismissal import ROUNDS, dismissed, excluded
from danube.cluster.raft.engine import Members

ALL = Members({"1": "a:1", "2": "b:1", "3": "c:1"})
WITHOUT = Members({"1": "a:1", "2": "b:1"})


@pytest.mark.parametrize(
    ("known", "told", "gone"),
    [
        (ALL, {"1": WITHOUT, "2": WITHOUT}, True),
        (WITHOUT, {"1": WITHOUT, "2": WITHOUT}, True),  # its own log says so, too
        (ALL, {"1": WITHOUT}, False),  # one that is behind says the same
        (ALL, {"1": WITHOUT, "2": ALL}, False),
        (ALL, {"1": WITHOUT, "2": Members({})}, False),  # knows nobody
        (ALL, {}, False),
        (ALL, {"1": WITHOUT, "4": WITHOUT}, False),  # not one of the voters
        (ALL, {"1": Members(WITHOUT.voters, {"3": "c:1"}), "2": WITHOUT}, False),  # a learner is a member
        (Members({"3": "c:1"}), {}, False),
        (Members({"1": "a:1", "3": "c:1"}), {"1": Members({"1": "a:1"})}, True),
    ],
)
def test_most_of_the_other_voters_say_it(known: Members, told: dict[str, Members], gone: bool) -> None:
    assert excluded(known, "3", told) is gone


class FakeNode:
    """Each answer is for one round; ``asked`` counts them."""

    node_id = "3"

    def __init__(self, members: Members, leader_id: str, answers: list[dict[str, Members]]) -> None:
        self.members = members
        self.leader_id = leader_id
        self.asked = 0
        self._answers: Iterator[dict[str, Members]] = iter(answers)

    async def ask_members(self) -> dict[str, Members]:
        self.asked += 1
        return next(self._answers)


GONE, STILL = {"1": WITHOUT, "2": WITHOUT}, {"1": ALL, "2": ALL}


def watch(node: FakeNode, seconds: float = 5.0) -> None:
    asyncio.run(asyncio.wait_for(dismissed(node, 0.001), seconds))


def test_two_rounds_in_a_row_are_needed() -> None:
    node = FakeNode(ALL, "", [GONE, STILL, GONE, GONE])
    watch(node)
    assert node.asked == 4 and ROUNDS == 2


@pytest.mark.parametrize(("members", "leader_id"), [(ALL, "1"), (Members({}, {"3": "c:1"}), "")])
def test_a_member_that_follows_and_a_node_that_waits_to_be_added_ask_nobody(
    members: Members, leader_id: str
) -> None:
    node = FakeNode(members, leader_id, [])
    with pytest.raises(TimeoutError):
        watch(node, 0.1)
    assert node.asked == 0
