"""Quorums over voters, and the changes of members that are allowed.

One member changes at a time, so that any majority before and any majority after share a member.  A change
needs that the former one is committed, and that the leader has committed an entry of its term.  A voter comes
from the learners that have caught up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from danube.cluster.raft.engine import Members
from danube.errors import InvalidArgument
from danube.limits import RAFT_MEMBERS_MAX

ID_CHARACTERS_MAX = 128


def quorum_value(members: Members, value_of: Callable[[str], int]) -> int:
    """The largest number that a majority of the voters has reached; 0 if there is no voter."""
    values = sorted(map(value_of, members.voters), reverse=True)
    return values[len(values) // 2] if values else 0


def has_quorum(members: Members, granted: Collection[str]) -> bool:
    """Whether ``granted`` holds a majority of the voters."""
    return sum(voter in granted for voter in members.voters) > len(members.voters) // 2


def peers_of(members: Members, node_id: str) -> list[str]:
    """Return all other members, voters first."""
    return [one for one in (*members.voters, *members.learners) if one != node_id]


def check_members(members: Members) -> None:
    """Raise InvalidArgument if no group can consist of them."""
    everybody = [*members.voters, *members.learners]
    if len(set(everybody)) != len(everybody):
        raise InvalidArgument("a member is a voter or a learner, not both")
    if len(everybody) > RAFT_MEMBERS_MAX:
        raise InvalidArgument("too many members", limit=RAFT_MEMBERS_MAX)
    for node_id in everybody:
        if not 0 < len(node_id) <= ID_CHARACTERS_MAX:
            raise InvalidArgument("a member's id is empty or too long", node_id=node_id)


def check_change(before: Members, after: Members, caught_up: Callable[[str], bool]) -> None:
    """Raise InvalidArgument if ``after`` is not one allowed step from ``before``."""
    check_members(after)
    if not after.voters:
        raise InvalidArgument("the last voter cannot go", hint="a group needs one voter at least")
    changed = {
        node_id
        for node_id in {*before.voters, *before.learners, *after.voters, *after.learners}
        if (node_id in before.voters, node_id in before.learners, _address(before, node_id))
        != (node_id in after.voters, node_id in after.learners, _address(after, node_id))
    }
    if len(changed) != 1:
        raise InvalidArgument(
            f"{len(changed)} members would change, not one", hint="change one member at a time"
        )
    (node_id,) = changed
    if node_id in after.voters and node_id not in before.voters:
        if node_id not in before.learners:
            raise InvalidArgument(f"{node_id} is no learner", hint="add it as a learner first")
        if not caught_up(node_id):
            raise InvalidArgument(
                f"{node_id} has not caught up", hint="wait until it follows, then promote it"
            )


def _address(members: Members, node_id: str) -> str:
    return members.voters.get(node_id) or members.learners.get(node_id, "")
