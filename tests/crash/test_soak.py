"""Half a minute of the soak: stopped, gone on with, faults fired, nothing lost, and a report that says so."""

from __future__ import annotations

import io
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from perf.soak.store import NoStore, Store
from tests.broker_process import ROOT, BrokerProcess, die_with_parent, wait_until
from tests.crash.journal import Journal
from tests.crash.store_faults import STORE_FAULTS

pytestmark = pytest.mark.slow
STOPPED = 3


class Soak:
    """``python -m perf.soak`` in a directory of its own."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.directory = folder / "soak"
        self.report_path = folder / "report.json"
        self.output = folder / "output"
        self.words = ["--minutes", "0.5", "--epoch-minutes", "0.25", "--seed", str(seed)]
        self.words += ["--fault-every", "2-4", "--sample-every", "0.3", "--settle", "0.5", "--faults", "all"]
        self.words += ["--store", "directory", "--pause", "0.1", "--markdown"]
        self.words += ["--directory", str(self.directory), "--report", str(self.report_path)]

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        with self.output.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "perf.soak", *self.words, *more],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
            )

    def text(self) -> str:
        return self.output.read_text()

    def report(self) -> dict[str, Any]:
        return dict(json.loads(self.report_path.read_text()))

    def journaled(self, kind: str) -> bool:
        """Whether the open epoch's clients wrote an event of this kind."""
        word = f'["{kind}"'.encode()
        return any(word in path.read_bytes() for path in self.directory.glob("epoch-*/journals/*.jsonl"))


@pytest.mark.timeout(400)
def test_half_a_minute_with_faults_stopped_once_loses_nothing(tmp_path: Path, seed: int) -> None:
    soak = Soak(tmp_path, seed)
    first = soak.start("--minutes", "5")  # it will be stopped long before
    wait_until(lambda: soak.journaled("fault") or first.poll() is not None, 120, "a fault fired")
    first.send_signal(signal.SIGINT)
    assert first.wait(180) == STOPPED, soak.text()
    stopped = soak.report()
    assert stopped["verdict"] == "stopped" and stopped["epochs"] == 1 and not stopped["violations"]

    half_a_minute = max(0.5, stopped["minutes"] + 0.25)  # a slow machine may have needed it all to stop
    assert soak.start("--minutes", str(half_a_minute)).wait(240) == 0, soak.text()
    found = soak.report()
    assert found["verdict"] == "passed" and found["sessions"] == 2 and found["epochs"] >= 2
    assert found["seed"] == seed
    assert sum(found["faults"].values()) >= 2
    assert found["totals"]["acknowledged"] > stopped["totals"]["acknowledged"] > 0
    assert found["totals"]["deliveries"] >= found["totals"]["acknowledged"]
    assert {one["whose"] for one in found["growth"]} == {"supervisor", "worker", "mover", "places"}
    assert found["largest"]["worker-0"]["descriptors"] > 10
    assert found["largest"]["places"]["store"] > 0 < found["largest"]["places"]["region"]
    assert "| soak, store directory, 2 workers |" in soak.text()
    assert not list(soak.directory.glob("epoch-*")), "what was judged is not kept"


def killed_under_load(soak: Soak) -> None:
    """SIGKILL to the soak, which ends its broker and its clients with it."""
    process = soak.start()
    wait_until(lambda: soak.journaled("ack") or process.poll() is not None, 120, "records acked")
    time.sleep(1)  # of load, so that there is something to lose
    process.kill()
    process.wait()


@pytest.mark.timeout(400)
def test_a_soak_that_was_killed_judges_what_was_open(tmp_path: Path, seed: int) -> None:
    soak = Soak(tmp_path, seed)
    killed_under_load(soak)
    assert soak.start("--minutes", "0.1").wait(240) == 0, soak.text()
    found = soak.report()
    assert found["verdict"] == "passed" and found["epochs"] == 1
    assert found["notes"] == ["epoch 0 taken up after this soak was killed"]
    assert found["totals"]["acknowledged"] > 0
    assert found["faults"] == {"stopped_soak": 1}


@pytest.mark.timeout(400)
def test_a_planted_loss_fails_the_soak_and_stays_to_be_looked_at(tmp_path: Path, seed: int) -> None:
    soak = Soak(tmp_path, seed)
    killed_under_load(soak)
    journals = soak.directory / "epoch-0" / "journals"
    journal = Journal(journals / "producer-planted-0.jsonl")
    journal.write("try", "planted", "/default/plain", 0, 1, None)
    journal.write("ok", "planted", "/default/plain", 0, 1, 0, None, "written", time.monotonic_ns())
    journal.close()
    assert soak.start("--minutes", "0.1").wait(240) == 1, soak.text()
    found = soak.report()
    assert (found["verdict"], found["violations"]) == ("failed", {"lost": 1})
    assert "Identity(producer='planted', sequence=0)" in found["examples"][0]
    assert journals.is_dir() and (soak.directory / "data").is_dir()
    assert soak.start("--minutes", "0.1").wait(60) == 1, "a run that failed stays failed"


def test_an_s3_store_keeps_its_objects_over_sessions_and_fails_on_demand(
    tmp_path: Path, source: random.Random
) -> None:
    try:
        first = Store("s3", tmp_path / "store", 1)
    except NoStore as reason:
        pytest.skip(str(reason))
    try:
        environment = first.open()
        client, bucket = first.client(), environment["DANUBE_STORAGE__URL"].split("/")[2]
        client.put_object(bucket, "run/kept", io.BytesIO(b"bytes"), 5)
        assert set(first.fault_weights) == set(first.faults()) == set(STORE_FAULTS)
        facts = first.faults()["outage"](BrokerProcess(tmp_path / "data"), source)
        assert facts["away_s"] > 0
    finally:
        first.close()
    again = Store("auto", tmp_path / "store", 1)
    try:
        assert again.kind == "s3"
        again.open()
        url, words, _ = again.location()
        assert url == environment["DANUBE_STORAGE__URL"] and words[0] == "--s3-endpoint"
        assert again.client().stat_object(bucket, "run/kept").size == 5
        again.forget_requests()
    finally:
        again.close()
