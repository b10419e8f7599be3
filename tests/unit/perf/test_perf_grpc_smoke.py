"""The gRPC measurements do not rot, and none of them believes a call that failed."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perf import bench as command
from perf import grpc_door
from perf.rows import ROWS
from perf.turns import Bench, Settings, plan_of
from tests.broker_process import BrokerProcess

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for perf/h2_client.c")


@pytest.fixture(scope="module")
def shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("perf") / "data", workers=2) as process:
        yield process


@needs_compiler
@pytest.mark.e2e
@pytest.mark.parametrize(
    "name", [row.name for row in ROWS if row.module == "grpc_door" and row.name != "rust-lone"]
)
def test_both_sides_of_a_workload_measure_something(
    name: str, tmp_path: Path, shared_broker: BrokerProcess
) -> None:
    settings = Settings(directory=tmp_path, size=1_024, batch=1, workers=2, scale=0.002, rounds=0)
    with Bench(settings, shared_broker) as bench:
        plan = plan_of(name, bench)
        for side in (plan.floor, plan.danube):
            measured = side()
            assert (measured["value"] if isinstance(measured, dict) else measured) > 0
        bench.end_turn()
    assert plan.unit and plan.goals(1.0, 1.0)


@needs_compiler
@pytest.mark.e2e
def test_calls_that_the_broker_refuses_are_not_counted(tmp_path: Path, shared_broker: BrokerProcess) -> None:
    client = grpc_door.compiled_client(tmp_path)
    (tmp_path / "empty").write_bytes(b"\0\0\0\0\0")
    command = [str(client), "send", "127.0.0.1", str(shared_broker.grpc_port), grpc_door.SEND_PATH]
    result = subprocess.run([*command, str(tmp_path / "empty"), "10", "2"], capture_output=True, text=True)
    found: dict[str, Any] = json.loads(result.stdout)
    assert (found["ok"], found["ended"]) == (0, 10)
    assert "msg_id" in found["refusal"]


@needs_compiler
def test_the_client_says_what_is_wrong(tmp_path: Path) -> None:
    client = grpc_door.compiled_client(tmp_path)
    for words, sentence in (
        ([], "see the top"),
        (["send", "127.0.0.1", "1", "/path", "none", "1", "1"], "cannot connect"),
        (["send", "localhost", "1", "/path", "none", "1", "1"], "IPv4"),
    ):
        result = subprocess.run([str(client), *words], capture_output=True, text=True)
        assert result.returncode == 1 and sentence in result.stderr


def test_a_missing_compiler_is_a_visible_skip(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(grpc_door.shutil, "which", lambda tool: None)
    assert command.main(["--compare", "grpc-publish", "--scale", "0"]) == 0
    assert capsys.readouterr().out.startswith("SKIPPED grpc-publish: no C compiler")


def test_a_worker_without_a_topic_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    door = object.__new__(grpc_door.GrpcBench)
    door.settings = Settings(directory=tmp_path, workers=2)
    owners = iter([1, 1, 0])
    monkeypatch.setattr(door, "opened", lambda opening: {"owner": next(owners)})
    assert [one["owner"] for one in door.producers()] == [1, 0]
    monkeypatch.setattr(door, "opened", lambda opening: {"owner": 1})
    with pytest.raises(RuntimeError, match="of 100 topics"):
        door.producers()


LONE = """#!/bin/sh
[ "$3 $4 $6" = "reliable 100 200" ] || exit 1
echo '{"rate": 4000.0, "p50_us": 240.0, "p99_us": 300.0, "publish_p50_us": 100.0, "publish_p99_us": 150.0}'
"""


@pytest.mark.e2e
def test_one_message_after_another_is_judged_by_rate_and_processor_time(
    tmp_path: Path, shared_broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "danube-lone"
    program.write_text(LONE)
    program.chmod(0o755)
    monkeypatch.setattr(grpc_door, "built", lambda: str(program))
    with Bench(Settings(directory=tmp_path, workers=2, scale=0.01, rounds=0), shared_broker) as bench:
        plan = plan_of("rust-lone", bench)
        found = plan.danube()
        assert isinstance(found, dict) and found["value"] == 4_000 and found["worker_us"] >= 0
    for worker_us, met in ((250, True), (251, False)):
        plan.details["worker_us"] = worker_us
        goals = plan.goals(0.5, 4_000)
        assert goals == {">= 3,000 messages/s": True, "<= 250 us of a worker": met}
        assert not plan.goals(0.5, 2_999)[">= 3,000 messages/s"]


def test_without_cargo_the_rust_client_is_a_visible_skip(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(grpc_door.compat.shutil, "which", lambda program: None)
    assert command.main(["--compare", "rust-lone", "--scale", "0"]) == 0
    assert capsys.readouterr().out == "SKIPPED rust-lone: cargo is not installed\n"
