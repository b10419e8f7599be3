"""Running tasks in processes, and the options that all jobs share."""

from __future__ import annotations

import os
from typing import Any

import pytest

from danube.errors import InvalidArgument, Unavailable
from danube.spark.jobs.options import COMMON, Surroundings, parse_arguments, read_job_options
from danube.spark.jobs.running import LocalRunner, Pace, packed


def double(task: Any) -> bytes:
    return b"%d" % (2 * task)


def die(task: Any) -> bytes:
    os._exit(9)


def refuse(task: Any) -> bytes:
    raise InvalidArgument(f"task {task} is wrong", why="it must be", hint="ask for another", number=task)


@pytest.mark.parametrize("processes", [1, 3])
def test_every_task_runs_once(processes: int) -> None:
    found = dict(LocalRunner(processes).run(double, list(range(20))))
    assert found == {number: b"%d" % (2 * number) for number in range(20)}


def test_an_error_of_a_task_ends_the_run_as_it_is() -> None:
    for processes in (1, 2):
        with pytest.raises(InvalidArgument, match=r"task \d is wrong"):
            list(LocalRunner(processes).run(refuse, [1, 2, 3]))


def test_a_process_that_dies_is_told() -> None:
    with pytest.raises(Unavailable, match="has died"):
        list(LocalRunner(2).run(die, [1, 2, 3]))


def test_tasks_have_about_equal_bytes() -> None:
    sizes = [100] * 50 + [5_000] + [1] * 100
    runs = packed(sizes, 2, 10**9)
    assert [number for run in runs for number in run] == list(range(len(sizes)))
    assert max(sum(sizes[number] for number in run) for run in runs) < 5_000 + sum(sizes) // 8 + 100
    assert packed([], 2, 100) == [] and packed([0, 0], 2, 100) == [[0, 1]]
    assert all(sum(sizes[n] for n in run) <= 300 for run in packed(sizes[:50], 1, 200))


def test_progress_is_told_at_the_end_at_least() -> None:
    lines: list[str] = []
    pace = Pace("job", 3, lines.append)
    for _ in range(3):
        pace.step(1_000_000_000, "fine")
    assert len(lines) == 1 and lines[0].startswith("job: 3 of 3 tasks, 3.00 GB") and lines[0].endswith("fine")


def test_options_are_read_in_any_case_and_secrets_are_not_shown() -> None:
    read = read_job_options({"STORAGE": "s3://b/p", "s3.access_key": "one", "s3.secretKey": "two"}, {})
    assert read.storage == "s3://b/p" and read.settings is not None
    assert "two" not in repr(read.settings)
    with pytest.raises(InvalidArgument, match=r"s3\.colour is not known"):
        read_job_options({"s3.colour": "blue"}, {})
    with pytest.raises(InvalidArgument, match=r"s3\.part_bytes") as caught:
        read_job_options({"s3.part_bytes": "much"}, {})
    assert "much" not in str(caught.value)
    with pytest.raises(InvalidArgument, match="processes"):
        read_job_options({"processes": "-1"}, COMMON)


def test_the_command_line_takes_store_options(capsys: pytest.CaptureFixture[str]) -> None:
    given, where = parse_arguments(
        "job",
        "does",
        {"failOn": str},
        ["--local", "--s3.region", "eu", "--fail-on", "error", "--s3.profile=x"],
    )
    assert where == Surroundings(local=True) and given == {
        "failOn": "error",
        "s3.region": "eu",
        "s3.profile": "x",
    }
    words = ["--master", "spark://h:1", "--conf", "spark.executor.memory=2g", "--conf=spark.x=a=b"]
    assert parse_arguments("job", "does", {}, words) == (
        {}, Surroundings(False, "spark://h:1", {"spark.executor.memory": "2g", "spark.x": "a=b"}),
    )  # fmt: skip
    for wrong, expected in (
        (["--colour", "blue"], "unrecognized argument --colour"),
        (["--conf", "spark.x"], "is not NAME=VALUE"),
        (["--local", "--master", "local[2]"], "works without Spark"),
        (["--local", "--conf", "spark.x=1"], "works without Spark"),
    ):
        with pytest.raises(SystemExit):
            parse_arguments("job", "does", {}, wrong)
        assert expected in capsys.readouterr().err
