"""Three brokers that lose power and take over while the store is not told: nothing is lost or passed over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.cluster_run import ClusterPlan, cluster_run
from tests.crash.cluster_storage import POWER_WEIGHTS, STORE_WEIGHTS, StorageNemesis, weights_of
from tests.crash.storage_run import Storage, missing_storage
from tests.network_namespaces import available

FAULTS = ("power_cut", "takeover_with_stopped_movers")


def test_every_fault_of_storage_that_can_be_drawn_is_there() -> None:
    both = weights_of(power=True, store=True)
    assert set(both) > set(POWER_WEIGHTS) | set(STORE_WEIGHTS)
    assert all(callable(getattr(StorageNemesis, name)) for name in both)
    assert not set(weights_of(power=False, store=False)) & (set(POWER_WEIGHTS) | set(STORE_WEIGHTS))


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="network namespaces need root")
@pytest.mark.timeout(600)
def test_a_cluster_whose_storage_fails_gives_every_subscription_what_was_acknowledged(
    tmp_path: Path, seed: int
) -> None:
    if reason := missing_storage(Storage(power=True, store=True)):
        pytest.skip(reason)
    plan = ClusterPlan.with_storage(
        power=True, store=True, seed=seed, directory=tmp_path / "run", faults=FAULTS
    )
    verdict = cluster_run(plan)
    assert verdict.passed, f"seed {seed}\n{verdict}\n{verdict.statistics}"
    assert verdict.statistics["cuts"] == 1 and verdict.statistics["confirmed"]
