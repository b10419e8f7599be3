"""One Spark session for all tests of this run, started when the first one asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube.errors import ConfigInvalid

TUNING = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"


def why_not() -> str:
    """Why there is no Spark here; empty where there is."""
    try:
        from danube.spark.env import check_version
        from danube.spark.java import find_java

        check_version()
        find_java()
    except (ConfigInvalid, ImportError) as error:
        return f"{error} ({getattr(error, 'hint', '')})"
    return ""


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session on two slots that tries a failed task again; skipped aloud without Spark or Java."""
    reason = why_not()
    if reason:
        pytest.skip(f"no Spark: {reason}")
    from danube.spark import session

    home = tmp_path_factory.mktemp("spark")
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    made = session(
        "danube-tests",
        "local[2,2]",
        **{
            "spark.ui.enabled": False,
            "spark.ui.showConsoleProgress": False,
            "spark.sql.shuffle.partitions": 1,
            "spark.sql.warehouse.dir": str(home / "warehouse"),
            "spark.local.dir": str(home / "local"),
            "spark.driver.extraJavaOptions": f"{TUNING} -Dderby.system.home={home}",
            "spark.log.level": "ERROR",
        },
    )
    yield made
    made.stop()


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoint")
