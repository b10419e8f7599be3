"""``danube spark``: jobs are listed without Spark, read their own options, leave with their own codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from danube.cli.main import root

JOBS = ("validate", "replay", "compact", "export")


def call(*words: str) -> Result:
    return CliRunner().invoke(root, ["spark", *words])


def test_help_loads_neither_spark_nor_arrow() -> None:
    code = (
        "import sys\nfrom danube.cli.main import root\n"
        "try:\n    root(['spark', '--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(bool({'pyspark', 'pyarrow', 'numpy', 'numba'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(f"  {job} " in done.stdout for job in JOBS)


def test_a_job_has_its_own_help() -> None:
    pytest.importorskip("pyarrow")
    found = call("replay", "--help")
    assert found.exit_code == 0
    assert "--to-topic" in found.output and "--dry-run" in found.output


def test_a_job_refuses_what_it_does_not_know() -> None:
    pytest.importorskip("pyarrow")
    assert call("replay", "--local", "--unknown", "1").exit_code == 2
    found = call("replay", "--local", "--topic", "/default/x")
    assert found.exit_code == 2 and "neither storage nor broker" in found.stderr


def test_a_job_that_there_is_not() -> None:
    found = call("reply")
    assert found.exit_code == 2 and "No such command" in found.output


def test_without_arrow() -> None:
    code = (
        "import sys\nsys.modules['pyarrow'] = None\nfrom danube.cli.main import root\n"
        "root(['spark', 'replay', '--local'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 11
    assert "danube spark replay needs pyarrow" in done.stderr and "danube-broker[spark]" in done.stderr


def test_without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.setitem(sys.modules, "pyspark", None)
    found = call("replay", "--storage", "/nowhere", "--topic", "/default/x")
    assert found.exit_code == 11
    assert "Spark is not installed" in found.stderr and "danube-broker[spark]" in found.stderr


def test_without_java(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    pytest.importorskip("pyspark")
    from danube.spark import java

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(java, "_bundled", lambda: None)
    found = call("replay", "--storage", "/nowhere", "--topic", "/default/x")
    assert found.exit_code == 11
    assert "Spark needs Java 17 or later" in found.stderr


def test_the_file_for_spark_submit() -> None:
    found = call("file")
    path = Path(found.output.strip())
    assert found.exit_code == 0 and path.is_file()
    beside = {each.name for each in path.parent.iterdir() if each.suffix == ".py"}
    assert beside == {path.name, "__init__.py"}, "Python looks there first for all that is imported"
    for words in ([], ["reply"]):
        done = subprocess.run(
            [sys.executable, str(path), *words], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2 and "validate, replay, compact, export" in done.stderr


def test_the_java_that_jobs_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"21.0.1\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    found = call("java-home")
    assert found.exit_code == 0 and found.output.strip() == str(tmp_path)


def test_a_broker_never_loads_spark() -> None:
    """Every module that a broker may load, where there is neither pyspark nor pyarrow."""
    code = (
        "import sys, importlib, pkgutil\n"
        "sys.modules['pyspark'] = sys.modules['pyarrow'] = None\n"
        "import danube.app\n"
        "for layer in ('broker', 'server', 'wal', 'ipc', 'cluster', 'schema', 'core'):\n"
        "    package = importlib.import_module(f'danube.{layer}')\n"
        "    for found in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        if found.name not in ('danube.wal.stores.cloud', 'danube.cluster.raft.raftos_engine'):\n"
        "            importlib.import_module(found.name)\n"
        "sys.exit(any(name.startswith('danube.spark') for name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
