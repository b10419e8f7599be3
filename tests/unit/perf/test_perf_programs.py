"""scripts/bench asks for what there is."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from perf import bench
from perf.rows import BY_NAME, ROWS, Row
from tests.broker_process import ROOT

Capture = pytest.CaptureFixture[str]


# -- scripts/bench ----------------------------------------------------------------------------------


def dry_run(*words: str) -> list[list[str]]:
    """The commands that scripts/bench would run."""
    command = [str(ROOT / "scripts" / "bench"), "--dry-run", *words]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return [shlex.split(line)[1:] for line in result.stdout.splitlines()]


def comparisons(*words: str) -> list[Any]:
    """The comparisons among them, parsed by the program."""
    found = [command for command in dry_run(*words) if command[0] == "perf/bench.py"]
    return [bench.arguments(command[1:]) for command in found]


def test_bench_asks_for_every_row_with_arguments_that_are_understood(tmp_path: Path) -> None:
    asked = comparisons()
    for arguments in asked:
        assert arguments.append is not None and arguments.append.parent == Path("perf/history")
        settings = bench.settings_of(arguments, tmp_path)
        publish = arguments.compare == "publish" and settings.durability == "written"
        near_its_target = publish or arguments.compare in ("ack-latency", "auth", "grpc-auth")
        rounds = 5 if arguments.compare == "neighbour" else 9 if near_its_target else 3
        assert arguments.rounds == rounds and arguments.scale == 1.0
        assert settings.size == (arguments.size or BY_NAME[arguments.compare].settings.get("size", 100))
    assert {arguments.compare for arguments in asked} == {row.name for row in ROWS if row.module != "spark"}
    assert len(asked) == 50, "one comparison for each variant"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_names_a_function_that_is_there(row: Row) -> None:
    _, function = row.measure.split(":")
    source = (ROOT / "perf" / f"{row.module}.py").read_text()
    assert f"\ndef {function}(bench: Bench" in source


def test_a_quick_bench_writes_no_history() -> None:
    assert all(arguments.append is None for arguments in comparisons("--quick"))
    found = comparisons("--quick", "grpc-auth", "tier-read", "remote", "spark-read")
    names = [arguments.compare for arguments in found]
    assert sorted(names) == ["grpc-auth", "remote", "spark-read", "tier-read"]
    assert all((arguments.rounds, arguments.scale) == (1, 0.05) for arguments in found)


def test_bench_refuses_a_workload_that_it_does_not_know() -> None:
    command = [str(ROOT / "scripts" / "bench"), "--dry-run", "publsh"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "no workload publsh" in result.stderr


def test_bench_writes_the_report_when_it_has_appended() -> None:
    assert dry_run("publish")[-1] == ["-m", "perf.report", "--keep", "3"]
    assert "perf.report" not in [word for command in dry_run("--quick", "publish") for word in command]


def test_the_list_names_every_row(capsys: Capture) -> None:
    assert bench.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [row.name for row in ROWS]
