"""Benchmarks do not rot: every workload runs once with next to nothing to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perf.child import percentiles
from perf.machine import file_system, fingerprint
from perf.rows import BY_NAME, ROWS
from perf.turns import Bench, Settings, compare, plan_of
from tests.broker_process import ROOT, BrokerProcess

TINY = {"scale": 0.0005, "rounds": 0, "workers": 2}
OWN_BROKER = {"restart"}


@pytest.fixture(scope="module")
def shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("perf") / "data", workers=2) as process:
        yield process


@pytest.mark.e2e
@pytest.mark.parametrize("name", sorted({row.name for row in ROWS if row.module == "native"} - OWN_BROKER))
def test_a_workload_measures_something(name: str, tmp_path: Path, shared_broker: BrokerProcess) -> None:
    settings = Settings(directory=tmp_path, count=3, **TINY, **BY_NAME[name].settings)
    with Bench(settings, shared_broker) as bench:
        plan = plan_of(name, bench)
        measured = plan.danube()
        bench.end_turn()
    value = measured["value"] if isinstance(measured, dict) else measured
    assert value > 0
    assert plan.unit


@pytest.mark.e2e
def test_a_comparison_prints_one_line_with_floor_danube_and_ratio(tmp_path: Path) -> None:
    command = [sys.executable, "perf/bench.py", "--compare", "publish", "--rounds", "0", "--scale", "0.002"]
    command += ["-o", "json", "--directory", str(tmp_path), "--append", str(tmp_path / "history.jsonl")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = result.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    assert found["ratio"] == pytest.approx(found["danube"] / found["floor"], rel=0.01)
    assert found["workload"] == "publish"
    assert found["durability"] == "written"
    assert found["machine"]["cores"] >= 1
    assert json.loads((tmp_path / "history.jsonl").read_text()) == found


@pytest.mark.e2e
def test_restart_is_measured_on_brokers_of_its_own(tmp_path: Path) -> None:
    found = compare("restart", Settings(directory=tmp_path, count=1, scale=0.01, rounds=0, workers=1))
    assert found["unit"] == "s"
    assert 0 < found["danube"] < 60


def test_percentiles_are_of_the_ordered_values() -> None:
    found = percentiles([float(value) for value in range(1, 1_001)])
    assert (found["p50_us"], found["p99_us"], found["max_us"]) == (501.0, 991.0, 1000.0)


def test_a_fingerprint_says_what_decides_a_comparison(tmp_path: Path) -> None:
    found = fingerprint(tmp_path)
    assert {"cpu", "cores", "kernel", "python", "filesystem", "commit"} <= set(found)
    assert found["filesystem"] == file_system(tmp_path) != "unknown"
