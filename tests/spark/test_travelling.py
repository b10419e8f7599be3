"""What Spark pickles of ours: loaded where Danube is, and one clear error where it is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from pyspark import cloudpickle
from pyspark.errors import PythonException

from danube.errors import ConfigInvalid
from danube.spark.failures import error_from_spark
from danube.spark.history.options import read_options
from danube.spark.jobs.spark_runner import JobReader, JobSource
from danube.spark.sink.options import read_sink_options
from danube.spark.sink.sink import DanubeArrowWriter, DanubeStreamArrowWriter
from danube.spark.source.frame import RowsOfSplits, SplitSource
from danube.spark.source.schema import columns_of
from danube.spark.source.source import DanubeDataSource, DanubeReader
from danube.spark.source.stream import DanubeStreamReader
from danube.spark.travelling import covered

OPTIONS = {"topic": "/default/t", "broker": "danube://127.0.0.1:1"}
# As Spark's worker does it, in a Python that has pyspark and no Danube.
WORKER = """
import sys, traceback
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "danube":
            raise ModuleNotFoundError("No module named 'danube'", name="danube")
sys.meta_path.insert(0, Without())
from pyspark import cloudpickle
for path in sys.argv[1:]:
    vars(sys).pop("tracebacklimit", None)
    try:
        loaded = cloudpickle.loads(open(path, "rb").read())
        if isinstance(loaded, type):
            loaded({})
    except Exception:
        print(traceback.format_exc(), end="")
    print("---")
"""


def shipped() -> dict[str, Any]:
    """Everything that a session registers or a task is sent."""
    batch = read_options(OPTIONS, streaming=False)
    reader = DanubeReader(batch, columns_of())
    sink = read_sink_options(OPTIONS)
    job = type("JobSource", (JobSource,), {"source_name": "danube.job-1", "work": len, "tasks": [(0, b"")]})
    return {
        "registered": covered(DanubeDataSource),
        "registered splits": covered(SplitSource),
        "registered job": covered(job),
        "source": covered(DanubeDataSource)(dict(OPTIONS)),
        "own source": DanubeDataSource(OPTIONS),
        "reader": reader,
        "stream": DanubeStreamReader(read_options(OPTIONS, streaming=True), columns_of()),
        "rows": RowsOfSplits(reader, []),
        "job": JobReader(len, [(0, b"")]),
        "writer": DanubeArrowWriter(sink),
        "stream writer": DanubeStreamArrowWriter(sink),
    }


def test_what_arrives_is_what_was_sent() -> None:
    found = {name: cloudpickle.loads(cloudpickle.dumps(one)) for name, one in shipped().items()}
    assert found["registered"].name() == "danube" and found["registered splits"].name() == "danube.splits"
    assert found["registered job"].name() == "danube.job-1"
    source = found["registered"](dict(OPTIONS))
    assert isinstance(source.inner, DanubeDataSource) and source.schema() == columns_of()
    assert isinstance(source.reader(columns_of()), DanubeReader)
    assert found["source"].inner.given == OPTIONS and found["own source"].given == OPTIONS
    assert found["reader"].options == read_options(OPTIONS, streaming=False)
    assert found["rows"]._reader.columns == found["reader"].columns
    assert found["stream"]._catalogue is None and found["job"]._tasks == [(0, b"")]
    assert found["writer"]._options == found["stream writer"]._options == read_sink_options(OPTIONS)


def test_a_python_without_danube_says_so_in_one_line(tmp_path: Path) -> None:
    sent, paths = shipped(), []
    for name, one in sent.items():
        paths.append(tmp_path / name.replace(" ", "-"))
        paths[-1].write_bytes(cloudpickle.dumps(one if isinstance(one, type) else (one, 1)))
    words = [sys.executable, "-c", WORKER, *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    told = ""
    for name, told in zip(sent, done.stdout.split("---\n"), strict=False):
        assert told.count("\n") == 1, (name, told, done.stderr)
        assert told.startswith(f"ImportError: Danube cannot be imported by {sys.executable} on "), name
        assert "No module named 'danube'" in told and "pip install 'danube-broker[spark]'" in told
    error = error_from_spark(PythonException(f"An exception was thrown from the Python worker:\n{told}\nJVM"))
    assert isinstance(error, ConfigInvalid)
    assert "where Spark runs tasks" in error.what and error.hint.startswith("install it there")
