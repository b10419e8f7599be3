"""A real standalone cluster on loopback: the same code as on a laptop, submitted, and no jar to install."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow.parquet")

import pyarrow.parquet as pq

from tests.broker_process import die_with_parent, free_port
from tests.spark.conftest import TUNING, why_not
from tests.spark.drivers import shell_environment, spark_home, submit, wait_for_driver
from tests.spark.stored_history import stored_topic
from tests.spark.test_secured import Secured

pytestmark = pytest.mark.slow

TOPIC = "/default/orders"
RECORDS = 4 * 5 * 20


class Cluster:
    """A master and a worker in processes of their own, which end with the test runner."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        port, page = str(free_port()), str(free_port())
        self.url = f"spark://127.0.0.1:{port}"
        try:
            self._start("master.Master", "Starting Spark master", "--port", port, "--webui-port", page)
            self._start(
                "worker.Worker", "Successfully registered with master", "--port", str(free_port()),
                "--webui-port", str(free_port()), "--cores", "2", "--memory", "1g",
                "--work-dir", str(folder / "work"), self.url,
            )  # fmt: skip
        except BaseException:
            self.stop()
            raise

    def _start(self, role: str, ready: str, *words: str) -> None:
        log = self._folder / f"{role}.log"
        command = [str(spark_home() / "bin" / "spark-class"), f"org.apache.spark.deploy.{role}"]
        with log.open("wb") as output:
            started = subprocess.Popen(
                [*command, "--host", "127.0.0.1", *words],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=self._folder,
                env=shell_environment(), start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        self._processes.append(started)
        wait_for_driver(started, lambda: ready in log.read_text(), f"{role} serves", log)

    def stop(self) -> None:
        for process in reversed(self._processes):
            with suppress(ProcessLookupError):
                process.kill()
            process.wait(30)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = why_not()
    if reason:
        pytest.skip(f"no Spark: {reason}")
    running = Cluster(tmp_path_factory.mktemp("cluster"))
    yield running
    running.stop()


def test_a_submitted_driver_reads_checks_and_exports_on_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    store = stored_topic(tmp_path, TOPIC)
    answer, lake = tmp_path / "answer.json", tmp_path / "lake"
    lake.mkdir()
    done = submit(
        "--master", cluster.url, "--conf", "spark.sql.session.timeZone=Europe/Vienna",
        "--conf", f"spark.executor.extraJavaOptions={TUNING}",
        "tests/spark/cluster_driver.py", f"file://{store}", TOPIC, str(lake), str(answer),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(answer.read_text())
    assert told["master"] == cluster.url
    assert told["time_zone"] == "Europe/Vienna", "what was submitted stays"
    assert told["speculation"] == "false" and "arrow" in told["java_options"], "the rest is Danube's"
    assert (told["rows"], told["sum"]) == (RECORDS, sum(range(RECORDS)))
    assert told["validate"]["records"] == RECORDS and told["validate"]["findings"] == 0
    assert told["export"]["records"] == RECORDS
    offsets = [
        offset
        for path in lake.rglob("*.parquet")
        for offset in pq.read_table(path, partitioning=None)["offset"].to_pylist()
    ]
    assert sorted(offsets) == list(range(RECORDS))


COUNTING = """
import sys
from pathlib import Path
from danube.spark import session
url, ca, topic, answer = sys.argv[1:]
spark = session("secured")
rows = spark.read.format("danube").options(broker=url, tlsCa=ca, topic=topic, minPartitions="2").load()
Path(answer).write_text(str(rows.count()))
spark.stop()
"""


def test_executors_get_the_token_that_only_the_driver_s_environment_names(
    cluster: Cluster, tmp_path: Path
) -> None:
    """All records come from the broker, so each task has to be let in; the cluster's worker runs already."""
    site = Secured(tmp_path)
    try:
        with site.admin.producer(TOPIC, partitions=2) as producer:
            producer.send_many([b"x"] * 100)
        script, answer = tmp_path / "counting.py", tmp_path / "answer"
        script.write_text(COUNTING)
        done = submit(
            "--master", cluster.url, "--conf", f"spark.executor.extraJavaOptions={TUNING}",
            str(script), site.url, site.ca, TOPIC, str(answer), DANUBE_TOKEN_FILE=str(tmp_path / "consumer"),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        assert answer.read_text() == "100"
        assert (tmp_path / "consumer").read_text() not in done.stdout + done.stderr
    finally:
        site.close()
