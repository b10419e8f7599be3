"""Half a minute of the soak: stopped, gone on with, faults fired, nothing lost, and a report that says so."""

from __future__ import annotations

import io
import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from danube import sync
from danube.load import stamp
from perf.soak.load import KEPT_TOPIC, make_kept_topic, unread
from perf.soak.store import Store
from tests.broker_process import ROOT, BrokerProcess, die_with_parent, wait_until
from tests.crash.store_faults import STORE_FAULTS
from tests.s3_server import NoServer

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
        self.words += ["--store", "directory"]
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

    def fired(self) -> bool:
        """Whether a fault was fired in the open epoch."""
        return any(path.stat().st_size for path in self.directory.glob("epoch-*/nemesis.jsonl"))


@pytest.mark.timeout(400)
def test_half_a_minute_with_faults_stopped_once_loses_nothing(tmp_path: Path, seed: int) -> None:
    soak = Soak(tmp_path, seed)
    first = soak.start("--minutes", "5")  # it will be stopped long before
    wait_until(lambda: soak.fired() or first.poll() is not None, 120, "a fault fired")
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
    assert not list(soak.directory.glob("epoch-*")), "what was judged is not kept"


@pytest.mark.timeout(400)
def test_a_soak_that_was_killed_goes_on_behind_the_epoch_that_was_open(tmp_path: Path, seed: int) -> None:
    soak = Soak(tmp_path, seed)
    process = soak.start()
    wait_until(lambda: soak.fired() or process.poll() is not None, 120, "a fault fired")
    process.kill()  # its broker and its load end with it
    process.wait()
    minutes = json.loads((soak.directory / "samples.jsonl").read_text().splitlines()[-2])["at_s"] / 60 + 0.3
    assert soak.start("--minutes", str(minutes)).wait(240) == 0, soak.text()
    found = soak.report()
    assert (found["verdict"], found["epochs"], found["sessions"]) == ("passed", 2, 2)
    assert found["notes"] == ["epoch 0 was cut off and not judged"]
    assert found["totals"]["acknowledged"] > 0


def test_what_is_stored_otherwise_than_it_was_sent_is_found(tmp_path: Path) -> None:
    run = 7
    told: dict[str, Any] = {"run": {"id": f"{run:016x}"}, "records": {"acknowledged": 3, "not_known": 0}}
    with BrokerProcess(tmp_path / "data") as broker:
        make_kept_topic(broker.address, 60_000)
        with sync.connect(broker.address) as client, client.producer(KEPT_TOPIC) as producer:
            for number in range(3):
                producer.send(stamp.write(run, 1, number, 0, 100, 0))
            assert unread(broker.address, 0, told) == []
            told["records"]["acknowledged"] = 4
            assert "3 records are stored of 4 acknowledged" in unread(broker.address, 0, told)[0]
            damaged = bytearray(stamp.write(run, 1, 3, 0, 100, 0))
            damaged[-1] ^= 1
            producer.send(bytes(damaged))
        lost, short = unread(broker.address, 0, told)
        assert "offset 3 is damaged" in lost and short.startswith("3 records are stored")


def test_an_s3_store_keeps_its_objects_over_sessions_and_fails_on_demand(
    tmp_path: Path, source: random.Random
) -> None:
    try:
        first = Store("s3", tmp_path / "store", 1)
    except NoServer as reason:
        pytest.skip(str(reason))
    try:
        environment = first.open()
        client, bucket = first.client(), environment["DANUBE_STORAGE__URL"].split("/")[2]
        client.put_object(bucket, "run/kept", io.BytesIO(b"bytes"), 5)
        assert set(first.faults()) == set(STORE_FAULTS)
        facts = first.faults()["outage"](BrokerProcess(tmp_path / "data"), source)
        assert facts["away_s"] > 0
    finally:
        first.close()
    again = Store("auto", tmp_path / "store", 1)
    try:
        assert again.kind == "s3"
        again.open()
        words, _ = again.location()
        assert words[:2] == [environment["DANUBE_STORAGE__URL"], "--s3-endpoint"]
        assert again.client().stat_object(bucket, "run/kept").size == 5
        again.forget_requests()
    finally:
        again.close()
