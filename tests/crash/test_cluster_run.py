"""The short cluster run: three brokers on hosts under load, a kill, a way that is cut, and a move."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.crash.cluster_run import ClusterPlan, cluster_run
from tests.network_namespaces import available

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not available(), reason="network namespaces need root"),
]
FAULTS = ("kill_broker", "not_heard", "move_partition")


@pytest.mark.timeout(400)
def test_a_cluster_under_kills_cuts_and_moves_loses_nothing_and_agrees(tmp_path: Path, seed: int) -> None:
    verdict = cluster_run(ClusterPlan(seed=seed, directory=tmp_path / "run", faults=FAULTS))
    assert verdict.passed, f"seed {seed}\n{verdict}\n{verdict.statistics}"
    times = verdict.statistics["times"]
    assert times["failover after kill"]["count"], "a killed owner had a successor, and it was heard of"
    assert times["move"]["count"], "a partition moved"
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["steps"] == list(FAULTS) and report["seed"] == seed and report["passed"]
