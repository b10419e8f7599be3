"""Tiered storage under a failing store and killed processes; ``scripts/crash --store`` does it for longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.run import Plan
from tests.crash.storage_run import Storage, missing_storage, storage_run

pytestmark = pytest.mark.slow
FAULTS = ("slow_down", "kill_worker", "lost_answers", "kill_mover", "damaged_reads", "outage")


@pytest.mark.timeout(600)
def test_three_readers_agree_on_what_was_acknowledged(tmp_path: Path, seed: int) -> None:
    storage = Storage(power=False, store=True)
    if reason := missing_storage(storage):
        pytest.skip(reason)
    plan = Plan(seed=seed, directory=tmp_path / "run", faults=FAULTS, rest_s=(0.2, 1.0))
    verdict = storage_run(plan, storage)
    assert verdict.passed, f"seed {seed}\n{verdict}\n{verdict.statistics}"
    assert verdict.statistics["in_log"] >= 200 and verdict.statistics["confirmed"]
