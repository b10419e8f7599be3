"""Validation in Spark: the same findings as without it, on files and on a real S3 server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from danube.config.sections import StorageSettings
from danube.spark.history.places import StorePlace
from danube.spark.jobs.findings import Damage
from danube.spark.jobs.validate import validate
from danube.wal.segments.segment import LogIdentity
from tests.spark.stored_history import put_history, write_history

pytest.importorskip("pyspark")
IDENTITY = LogIdentity(5, 0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A data directory's partitions: 20 sealed segments of two partitions."""
    for partition in range(2):
        write_history(tmp_path / "data", LogIdentity(5, partition), segments=10)
    return tmp_path / "data"


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_spark_and_processes_find_the_same(spark: Any, directory: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    put_history(StorePlace(StorageSettings(url=f"file://{store}")).store(), directory)
    lines: list[str] = []
    clean = validate.run({"storage": f"file://{store}"}, spark, lines.append)
    assert clean.findings == [] and clean.counts["segments"] == 20
    assert lines and "tasks" in lines[-1]
    paths = sorted(store.rglob("*.seg"))
    _flip(paths[3], 300)
    _flip(paths[7], -20)
    paths[12].unlink()
    one = validate.run({"storage": f"file://{store}"}, spark)
    other = validate.run({"storage": f"file://{store}", "processes": "2"})
    assert one.findings == other.findings
    assert {Damage.BATCH_BODY, Damage.FOOTER_DAMAGED, Damage.OBJECT_MISSING} <= {f.kind for f in one.findings}
    rows = validate.frame_of(spark, one.findings).where("kind = 'object_missing'").collect()
    assert [row["file"].rsplit("/", 1)[1] for row in rows] == [paths[12].name]
    assert validate.frame_of(spark, []).count() == 0


def test_a_store_on_s3(spark: Any, directory: Path, s3_server: Any) -> None:
    bucket = s3_server.make_bucket()
    options = {
        "storage": f"s3://{bucket}/history", "s3.endpoint": s3_server.endpoint, "s3.region": "us-east-1",
        "s3.access_key": s3_server.access_key, "s3.secret_key": s3_server.secret_key,
    }  # fmt: skip
    place = validate.read_job_options(options, validate.READERS).place()
    assert isinstance(place, StorePlace)
    store = place.store()
    put_history(store, directory)
    assert validate.run(options, spark).findings == []
    key = next(info.key for info in store.list("partitions/") if info.key.endswith(".seg"))
    data = bytearray(store.get(key))
    data[500] ^= 1
    store.put(key, bytes(data))
    found = validate.run(options, spark).findings
    assert {one.kind for one in found} == {
        Damage.BATCH_BODY,
        Damage.CONTENT_HASH,
        Damage.OFFSETS_MISSING,
    } or {one.kind for one in found} == {Damage.BATCH_BODY, Damage.CONTENT_HASH}
    assert found[0].file == key
    assert s3_server.secret_key not in repr(place)
