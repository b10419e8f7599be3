"""The short crash runs: nothing that was acknowledged is lost, repeated, moved or reordered."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.crash.main import SHORT_FAULTS
from tests.crash.run import Plan, crash_run
from tests.crash.syscalls import PointRun, dry_run, missing_tool, sample

pytestmark = pytest.mark.slow


@pytest.mark.timeout(180)
def test_no_acknowledged_record_is_lost_whatever_is_killed(tmp_path: Path, seed: int) -> None:
    verdict = crash_run(Plan(seed=seed, directory=tmp_path / "run", faults=SHORT_FAULTS))
    assert verdict.passed, f"seed {seed}\n{verdict}\n{verdict.statistics}"


@pytest.mark.timeout(300)
def test_no_acknowledged_record_is_lost_at_a_killed_system_call(tmp_path: Path, seed: int) -> None:
    if reason := missing_tool():
        pytest.skip(reason)
    points, verdict = dry_run(tmp_path / "dry", seed)
    assert verdict.passed, f"without a fault: {verdict}"
    assert {"fdatasync", "fsync"} & {point.call for point in points}, "the write path syncs"
    fired = []
    for point in sample(points, 3, random.Random(seed)):
        run = PointRun(tmp_path / str(point).replace("#", "-"), seed, point)
        verdict = run.execute()
        assert verdict.passed, f"seed {seed}, killed at {point}\n{verdict}\n{verdict.statistics}"
        fired.append(run.fired)
    assert any(fired), "no kill happened, so nothing was shown"
