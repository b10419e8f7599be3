"""The micro-benchmarks run once with next to nothing to do, and scripts/bench asks for what there is."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from danube.core import kernels
from perf import floor, grpc_door, grpc_messages, manifest, raft_processes, tiers
from perf.workloads import WORKLOADS
from tests.broker_process import ROOT

Capture = pytest.CaptureFixture[str]


def printed(capsys: Capture) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_encoding_of_messages_is_timed(capsys: Capture, kernels_or_twins: str) -> None:
    grpc_messages.main(["--records", "1,8", "--size", "16", "--seconds", "0.0001"])
    found = printed(capsys)
    cases = {records: [row["case"] for row in found if row["records"] == records] for records in (1, 8)}
    assert len(cases[1]) == 7 and len(cases[8]) == (9 if kernels.available else 7)
    assert all(row["us"] > 0 for row in found)


def test_manifests_are_timed(capsys: Capture) -> None:
    manifest.main(["--entries", "8"])
    (found,) = printed(capsys)
    assert (found["entries"], found["planned"]) == (8, 2)
    assert min(found[name] for name in ("encode_ms", "decode_ms", "plan_ms", "find_us")) >= 0


def test_the_floor_is_measured_alone(tmp_path: Path) -> None:
    command = [sys.executable, "perf/floor.py", "--scale", "0.0001", "--rounds", "0", "-o", "json"]
    result = subprocess.run(
        [*command, "--directory", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = json.loads(result.stdout)
    assert {"pump_100_records_s", "pump_65536_mb_s", "ping_pong_p50_us"} <= set(found)
    assert found["pump_100_records_s"] > 0 < found["ping_pong_p50_us"]


# -- scripts/bench ----------------------------------------------------------------------------------

PROGRAMS = {
    "perf/floor.py": floor,
    "perf/grpc_door.py": grpc_door,
    "perf/raft_processes.py": raft_processes,
    "perf/tiers.py": tiers,
}


def bench(*words: str) -> list[tuple[str, Any]]:
    """The comparisons that scripts/bench would make: program and its arguments, parsed by the program."""
    command = [str(ROOT / "scripts" / "bench"), "--dry-run", *words]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    found = []
    for line in result.stdout.splitlines():
        _, program, *arguments = shlex.split(line)
        if program in PROGRAMS:
            found.append((program, PROGRAMS[program].arguments(arguments)))
    return found


def test_bench_asks_for_every_workload_with_arguments_that_are_understood() -> None:
    asked: dict[str, set[str]] = {name: set() for name in PROGRAMS}
    for program, arguments in bench():
        asked[program].add(arguments.compare)
        assert arguments.append is not None and arguments.append.parent == Path("perf/history")
        publish = arguments.compare == "publish" and arguments.durability == "written"
        near_its_target = publish or arguments.compare == "ack-latency"
        assert arguments.rounds == (9 if near_its_target else 3) and arguments.scale == 1.0
    assert asked == {
        "perf/floor.py": set(WORKLOADS),
        "perf/grpc_door.py": set(grpc_door.WORKLOADS),
        "perf/raft_processes.py": set(raft_processes.WORKLOADS),
        "perf/tiers.py": set(tiers.WORKLOADS),
    }


def test_a_quick_bench_writes_no_history() -> None:
    assert all(arguments.append is None for _, arguments in bench("--quick"))
    found = bench("--quick", "grpc-latency", "tier-plan", "remote")
    assert sorted(arguments.compare for _, arguments in found) == ["grpc-latency", "remote", "tier-plan"]


def test_bench_refuses_a_workload_that_it_does_not_know() -> None:
    command = [str(ROOT / "scripts" / "bench"), "--dry-run", "publsh"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "no workload publsh" in result.stderr


def test_bench_writes_the_report_when_it_has_appended() -> None:
    command = [str(ROOT / "scripts" / "bench"), "--dry-run"]
    full = subprocess.run([*command, "publish"], capture_output=True, text=True, check=True).stdout
    quick = subprocess.run(
        [*command, "--quick", "publish"], capture_output=True, text=True, check=True
    ).stdout
    assert full.splitlines()[-1].endswith("-m perf.report")
    assert "perf.report" not in quick
