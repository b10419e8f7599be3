"""Lives of a group under every fault: 200 seeds here, as many as one likes with scripts/simulate."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("raftos", reason="a cluster needs raftos; scripts/setup installs it")

from tests.model.raft_simulation import Life, main

LIVES = [
    (size, start) for size, count in ((3, 120), (5, 40), (2, 20), (4, 20)) for start in range(0, count, 20)
]


@pytest.mark.parametrize(("size", "start"), LIVES)
def test_no_life_breaks_a_promise(size: int, start: int) -> None:
    for seed in range(start, start + 20):
        try:
            Life(seed, size).live()
        except BaseException as error:
            error.add_note(f"scripts/simulate --from {seed} --seeds 1 --nodes {size}")
            raise


def test_a_seed_is_the_same_life_every_time() -> None:
    def told() -> list[object]:
        life = Life(11)
        world = life.live()
        return [world.step_count, world.ok_count, world.leaders, world.states, life.standing()]

    assert told() == told()


def test_the_command_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3", "--from", "5"]) == 0
    assert "seeds 5..7, 3 nodes: " in capsys.readouterr().out


def test_the_command_fails_with_the_seed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.model import raft_mutants

    raft_mutants.vote_for_anybody(monkeypatch)
    assert main(["--seeds", "20"]) == 1
    assert re.match(r"seed \d+ with 3 nodes, 500 steps: Violation: ", capsys.readouterr().out)
