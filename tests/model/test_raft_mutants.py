"""Bugs planted into the engine are found by lives that are clean without them."""

from __future__ import annotations

import pytest

pytest.importorskip("raftos", reason="a cluster needs raftos; scripts/setup installs it")

from tests.model import raft_mutants
from tests.model.raft_mutants import Mutant
from tests.model.raft_simulation import Life
from tests.model.raft_world import Violation

SEEDS_MAX = 400
# The bug, the members of a life, and the first seed that found it: looked at first, and no more than a hint.
FOUND_BY_CHANCE: list[tuple[Mutant, int, int]] = [
    (raft_mutants.vote_wiped, 3, 18),
    (raft_mutants.tail_committed, 5, 147),
    (raft_mutants.vote_for_anybody, 3, 0),
    (raft_mutants.stale_votes_counted, 3, 0),
    (raft_mutants.own_last_index, 5, 200),
    (raft_mutants.deposed_leader_sends, 3, 42),
    (raft_mutants.step_not_synced, 3, 0),
]


@pytest.mark.parametrize(
    ("mutant", "size", "hint"), FOUND_BY_CHANCE, ids=[one.__name__ for one, *_ in FOUND_BY_CHANCE]
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, mutant: Mutant, size: int, hint: int
) -> None:
    with monkeypatch.context() as patch:
        mutant(patch)
        found = next((seed for seed in (hint, *range(SEEDS_MAX)) if breaks(seed, size)), None)
    assert found is not None
    assert not breaks(found, size)


def breaks(seed: int, size: int) -> bool:
    try:
        Life(seed, size).live()
    except Violation:
        return True
    return False


def test_every_mutant_has_a_test() -> None:
    """Two need an order of events that chance is slow to find: test_raft_scenarios plays it."""
    played = {raft_mutants.old_term_committed, raft_mutants.stale_success_accepted}
    assert {mutant for mutant, *_ in FOUND_BY_CHANCE} | played == set(raft_mutants.MUTANTS)
