"""One Spark session for all tests of this run, started when the first one asks for it."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import danube.sync
from danube.errors import ConfigInvalid
from danube.spark.jobs.running import LocalRunner, Work
from tests.broker_process import BrokerProcess
from tests.spark.history import PARTED, TOPIC, Journal, publish

COMPILER = "-XX:TieredStopAtLevel=1 -Xshare:auto"  # no JVM of a test lives long enough for the second one
TUNING = f"{COMPILER} -XX:+UseSerialGC"


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


def quick_home(folder: Path) -> Path:
    """Spark's installation without the archives of pyspark's source.

    Each kind of Python worker would compile them anew; pip's own copy has been compiled.
    """
    import pyspark

    folder.mkdir()
    for each in Path(pyspark.__file__).parent.iterdir():
        if each.name != "python":
            (folder / each.name).symlink_to(each)
    (folder / "python" / "lib").mkdir(parents=True)
    return folder


def quick_python(path: Path) -> Path:
    """This Python for Spark's workers, with a daemon that has imported what they need.

    A query starts workers of four kinds and more, each of which would import Danube and Arrow again.
    """
    python = shlex.quote(sys.executable)
    path.write_text(
        "#!/bin/sh\n"
        f'if [ "$1 $2" = "-m pyspark.daemon" ]; then shift 2; exec {python} -m tests.spark.daemon "$@"; fi\n'
        f'exec {python} "$@"\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture(scope="session", autouse=True)
def scratch_of_jvms() -> Iterator[None]:
    """What a killed JVM leaves (sockets, libraries, blocks) lies in one folder and goes with it.

    The path is short: names of sockets have 107 bytes.
    """
    folder = tempfile.mkdtemp(prefix="danube-jvm-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAVA_TOOL_OPTIONS", f"{COMPILER} -Djava.io.tmpdir={folder}")
        yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session on two slots that tries a failed task again; skipped aloud without Spark or Java."""
    reason = why_not()
    if reason:
        pytest.skip(f"no Spark: {reason}")
    from danube.spark import session

    home = tmp_path_factory.mktemp("spark")
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["SPARK_HOME"] = str(quick_home(home / "home"))
    python = str(quick_python(home / "python"))
    os.environ |= dict.fromkeys(("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"), python)
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
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs without Spark work in this process alone: each further one would import for a second."""

    def run(runner: LocalRunner, work: Work, tasks: Sequence[Any]) -> Iterator[tuple[int, bytes]]:
        yield from enumerate(map(work, tasks))

    monkeypatch.setattr(LocalRunner, "run", run)


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoint")


@pytest.fixture(scope="session")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker for tests that have topics of their own and leave it running."""
    with BrokerProcess(tmp_path_factory.mktemp("shared") / "data") as broker:
        yield broker


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Journal, Journal]]:
    """A stopped broker's data directory, and the journals of a topic and of a partitioned one.

    Nobody changes it: what is to be damaged is a copy.
    """
    data = tmp_path_factory.mktemp("history") / "data"
    orders, parted = Journal(), Journal()
    broker = BrokerProcess(data, workers=1).start()
    try:
        with danube.sync.connect(broker.address) as client:
            client.admin.create_topic(TOPIC)
            client.admin.create_topic(PARTED, partitions=3)
        publish(broker, orders, random.Random(1), rounds=15)
        publish(broker, parted, random.Random(2), rounds=30, topic=PARTED)
        broker.kill()
        broker.start()
        publish(broker, orders, random.Random(3), rounds=5)
        broker.stop()
    finally:
        broker.kill()
    yield str(data), orders, parted
