"""The measurements of tiered storage do not rot, and none of them believes half a result."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from perf import bench as command
from perf import tiers
from perf.rows import ROWS
from perf.tier_peer import ranges
from perf.turns import Bench, Plan, Settings, plan_of
from tests.s3_server import NoServer, S3Server

OF_THE_STORE = [row.name for row in ROWS if row.module == "tiers"]


@pytest.mark.e2e
@pytest.mark.parametrize("name", OF_THE_STORE)
def test_both_sides_of_a_workload_measure_something(
    name: str, tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "FIRST_READS", 2)
    monkeypatch.setattr(tiers, "COLD_READERS", 12)
    settings = Settings(
        directory=tmp_path, size=1_024, scale=0.07 if name == "tier-first" else 0.005, rounds=0
    )
    with Bench(settings) as bench:
        plan = plan_of(name, bench)
        for side in (plan.floor, plan.danube):
            measured = side()
            value = measured["value"] if isinstance(measured, dict) else measured
            plan.details.update(measured if isinstance(measured, dict) else {})
            assert value > 0
        assert plan.unit and plan.goals(1.0, 1.0)
    assert plan.details["server"] == s3_server.kind


def test_a_process_yields_where_the_kernel_keeps_no_niceness_of_its_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(path: Path, data: str) -> None:
        assert path.name == "autogroup"
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(Path, "write_text", refused)
    with subprocess.Popen(["sleep", "60"]) as process:
        tiers.yielding(process.pid)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
        process.kill()


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, {}),
        (
            {"ratio_min": 0.5, "danube_min": 4_000_000},
            {"ratio >= 0.5": True, ">= 4,000,000 records/s": False},
        ),
        ({"ratio_max": 5}, {"ratio <= 5": True}),
        ({"danube_max": 49.5}, {"<= 49.5 records/s": False}),
        ({"within": 40}, {"<= 40 records/s more than the floor": True}),
        ({"within": 39}, {"<= 39 records/s more than the floor": False}),
        ({"ratio_max": 2, "also": {"p99 < 2 x": bool}}, {"ratio <= 2": False, "p99 < 2 x": False}),
    ],
)
def test_targets_are_told_in_words_made_of_their_numbers(
    asked: dict[str, Any], found: dict[str, bool]
) -> None:
    plan = Plan(lambda: 10.0, lambda: 50.0, **asked)
    assert plan.goals(5.0, 50.0) == found


def test_the_ranges_of_a_bare_read_cover_every_byte_once() -> None:
    assert ranges({"b": 5, "a": 4}, 4) == [("a", 0, 4), ("b", 0, 4), ("b", 4, 1)]


def test_a_missing_server_is_a_visible_skip(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none() -> None:
        raise NoServer("no S3 server: none here")

    monkeypatch.setattr(tiers, "find", none)
    assert command.main(["--compare", "tier-read", "--scale", "0"]) == 0
    assert capsys.readouterr().out == "SKIPPED tier-read: no S3 server: none here\n"
