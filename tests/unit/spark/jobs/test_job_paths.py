"""Where jobs write: paths of this machine, never the URL of a store taken for a folder."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from danube.errors import InvalidArgument
from danube.spark.history.local_segments import LocalSegments
from danube.spark.jobs.options import COMMON, parse_local_path, read_job_options
from danube.wal.segments.segment import LogIdentity

URLS = ["s3://bucket/lake", "S3A://bucket/lake", "gs://b/x", "hdfs:/x", "az://b", "https://h/x"]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    ("option", "job"),
    [
        ("report", ""),
        ("target", "jobs.export.export"),
        ("toDirectory", "jobs.replay.options"),
        ("state", "jobs.replay.options"),
        ("work", "jobs.compact.compact"),
    ],
)
def test_a_url_is_refused_before_anything_is_written(
    option: str, job: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if job.startswith("jobs.export"):
        pytest.importorskip("pyspark")
    readers = import_module(f"danube.spark.{job}").READERS if job else COMMON
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=f"option {option} must be a path of this machine"):
        read_job_options({option: url}, readers)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/lake", "/lake"), ("lake", "lake"), (" ./lake ", "./lake"), ("file:///lake", "/lake"),
        ("file:/lake", "/lake"), ("a:b", "a:b"), ("c:/x", "c:/x"), ("", ""),
    ],
)  # fmt: skip
def test_paths_stay_and_file_urls_become_paths(text: str, path: str) -> None:
    assert parse_local_path(text) == path


def test_a_partition_without_a_segment_is_empty(tmp_path: Path) -> None:
    identity = LogIdentity(1, 2)
    assert LocalSegments(tmp_path, identity).found(unsynced=True) == []
    assert LocalSegments(tmp_path / "none", identity).found(unsynced=False) == []
