"""The rows of Spark do not rot: each runs once with next to nothing to do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from perf import spark as rows
from perf.rows import ROWS
from perf.turns import Bench, Settings, plan_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_process")]


@pytest.mark.e2e
@pytest.mark.parametrize("name", [row.name for row in ROWS if row.module == "spark"])
def test_both_sides_of_a_row_measure_something(
    name: str, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "spark_session", lambda bench: spark)
    monkeypatch.setattr(os, "sync", lambda: None)  # no figure counts here, and other tests' writes are many
    settings = Settings(directory=tmp_path, size=1_024, batch=100, scale=0.001, rounds=0)
    with Bench(settings) as bench:
        plan = plan_of(name, bench)
        for side in (plan.floor, plan.danube):
            measured = side()
            values = measured.values() if isinstance(measured, dict) else [measured]
            assert all(value > 0 for value in values)
        assert plan.unit and set(plan.goals(1.0, 1.0).values()) <= {True, False}
