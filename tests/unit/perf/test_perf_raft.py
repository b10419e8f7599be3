"""The rows of a cluster's metadata run with next to nothing to do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("raftos", reason="a cluster needs raftos; scripts/setup installs it")

from danube.limits import METADATA_VALUE_BYTES_MAX
from perf import metadata
from perf.rows import ROWS
from perf.turns import Bench, Settings, plan_of


@pytest.mark.parametrize("name", [row.name for row in ROWS if row.module == "metadata"])
def test_both_sides_are_measured_over_processes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "IN_FLIGHT", 4)
    monkeypatch.setattr(metadata, "BATCH", 2)
    settings = Settings(directory=tmp_path, size=64, durability="quorum", rounds=0, scale=0.00001)
    with Bench(settings) as bench:
        plan = plan_of(name, bench)
        for side in (plan.floor, plan.danube):
            measured = side()
            assert (measured["value"] if isinstance(measured, dict) else measured) > 0
        assert plan.unit and plan.goals(1.0, 1.0)


def test_a_write_that_is_refused_is_not_counted(tmp_path: Path) -> None:
    with Bench(Settings(directory=tmp_path, scale=0.00001)) as bench:
        cluster = metadata.started(bench, "c")
        too_large = METADATA_VALUE_BYTES_MAX + 1
        with pytest.raises(AssertionError, match="not agreed on"):
            asyncio.run(metadata.write_many(cluster.leader().socket_path, 1, 1, 1, too_large))
