"""A cluster on a network that loses, delays and holds back packets (row D4): slower, and never at a stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import rough_cables
from tests.crash.cluster_run import STALL_MAX_S, ClusterPlan, cluster_run
from tests.crash.cluster_times import ROUGH
from tests.network_namespaces import available

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not available(), reason="network namespaces need root"),
    pytest.mark.skipif(not rough_cables.available(), reason="rough cables need TAP devices"),
]
FAULTS = ROUGH[1:]  # scripts/crash --cluster --rough loses a tenth too, which is the mildest


@pytest.mark.timeout(400)
def test_a_bad_network_makes_a_cluster_slower_and_takes_nothing_from_it(tmp_path: Path, seed: int) -> None:
    """30 % loss, 200 ms and 100 ms more or less, 1 Mbit/s: no partition stalls for 10 s."""
    plan = ClusterPlan.on_rough_cables(seed=seed, directory=tmp_path / "run", faults=FAULTS)
    verdict = cluster_run(plan)
    assert verdict.passed, f"seed {seed}\n{verdict}\n{verdict.statistics}"
    for name in FAULTS:
        found = verdict.statistics["times"][f"stall, {name}"]
        assert found["count"] == 6 and found["max_s"] <= STALL_MAX_S, (name, found)
