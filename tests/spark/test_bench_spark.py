"""The benchmarks of Spark do not rot: each runs once with next to nothing to do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]


def rows(capsys: Capture) -> list[dict[str, Any]]:
    """The lines of JSON among what was printed."""
    lines = capsys.readouterr().out.splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_reading_is_measured_beside_parquet(spark: Any, capsys: Capture, tmp_path: Path) -> None:
    from perf import bench_spark

    words = ["--megabytes", "2", "--sizes", "1024", "--rounds", "1", "--keep", str(tmp_path)]
    bench_spark.main(words, spark)
    machine, found = rows(capsys)
    assert "machine" in machine
    assert found["segments"] == 2 and found["rows"] > 0
    assert all(value >= 0 for name, value in found.items() if name.endswith("_gb_s"))


@pytest.mark.parametrize("with_spark", [True, False])
def test_jobs_are_measured(spark: Any, capsys: Capture, with_spark: bool) -> None:
    from perf import bench_spark_jobs

    words = ["--gigabytes", "0.001", "--payload", "100", "--records", "100"]
    bench_spark_jobs.main([*words, *(["--spark"] if with_spark else [])], spark if with_spark else None)
    (found,) = rows(capsys)
    assert {"validate", "export parquet", "compact"} <= set(found)
    assert ("export by df.write.parquet" in found) == with_spark


@pytest.mark.e2e
@pytest.mark.parametrize("with_spark", [True, False])
def test_a_replay_is_measured_beside_publishing(
    spark: Any, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_spark: bool
) -> None:
    from perf import bench_spark_replay

    monkeypatch.setattr(os, "sync", lambda: None)  # no figure counts here, and other tests' writes are many
    words = ["--megabytes", "1", "--sizes", "1024", "--rounds", "1", "--directory", str(tmp_path)]
    bench_spark_replay.main(
        [*words, *([] if with_spark else ["--without-spark"])], spark if with_spark else None
    )
    machine, found = rows(capsys)
    assert "machine" in machine
    assert found["records"] == 1_024
    assert found["publish_mb_s"] > 0 < found["local_mb_s"]
    assert ("replay_mb_s" in found) == with_spark
