"""Tiered storage under a failing store and killed processes; ``DANUBE_TIERED_SECONDS`` makes it longer."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.crash.tiered_run import TieredRun
from tests.s3_server import S3Server

pytestmark = pytest.mark.slow
SECONDS = float(os.environ.get("DANUBE_TIERED_SECONDS", "12"))


@pytest.mark.timeout(240 + 3 * int(SECONDS))
def test_three_readers_agree_on_what_was_acknowledged(
    tmp_path: Path, s3_server: S3Server, source: random.Random
) -> None:
    with TieredRun(tmp_path, s3_server, source) as run:
        run.torment(SECONDS)
        run.settle()
        assert run.journal.count > 1_000 and not run.journal.problems
        run.check_reader(run.broker.address, "live")
        run.check_verified()
        run.check_restored()
    print(f"{run.journal.count} records, faults: {' '.join(run.faults)}")
