"""No benchmark rots: every program of perf names the test that runs it; and its figures are up to date."""

from __future__ import annotations

import re
import subprocess
from pathlib import PurePosixPath

import pytest

from perf.report import main as report
from tests.law.source import ROOT, name_of, repository_files

# A program, or a package that is one, and the test in which it runs with next to nothing to do.
PROGRAMS = {
    "perf/bench.py": "tests/unit/perf/test_perf_programs.py",
    "perf/compare": "tests/unit/perf/test_perf_compare.py",
    "perf/locustfile.py": "tests/e2e/test_load.py",
    "perf/report.py": "tests/unit/perf/test_report.py",
    "perf/soak": "tests/crash/test_soak.py",
    "scripts/bench": "tests/unit/perf/test_perf_programs.py",
}
# Not run by itself: the program or part that it belongs to, whose text names it.
PARTS = {
    "perf/child.py": "perf/loads.py",
    "perf/grpc_door.py": "perf/rows.py",
    "perf/h2_client.c": "perf/grpc_door.py",
    "perf/loads.py": "perf/turns.py",
    "perf/lone.rs": "perf/grpc_door.py",
    "perf/machine.py": "perf/bench.py",
    "perf/metadata.py": "perf/rows.py",
    "perf/native.py": "perf/rows.py",
    "perf/pump.py": "perf/turns.py",
    "perf/rows.py": "perf/bench.py",
    "perf/spark.py": "perf/rows.py",
    "perf/tier_peer.py": "perf/tiers.py",
    "perf/tiers.py": "perf/rows.py",
    "perf/turns.py": "perf/bench.py",
}


def programs() -> set[str]:
    """Files and packages of perf that hold code and are part of the repository."""
    command = ["git", "ls-files", "--cached", "perf"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    found = set()
    for name in map(PurePosixPath, listed or map(name_of, repository_files())):
        if name.parts[0] == "perf" and name.suffix in (".py", ".c", ".rs"):
            found.add("/".join(name.parts[:2]))
    return found


def mentions(file: str, program: str) -> bool:
    """Whether a file names a program: by its path, or as a module."""
    text = (ROOT / file).read_text()
    module = program.removesuffix(".py").removesuffix(".c").removesuffix(".rs")
    spoken = [re.escape(program), re.escape(module.replace("/", ".")), rf"\b{re.escape(module[5:])}\b"]
    return any(re.search(one, text) for one in spoken)


def test_every_program_of_perf_is_listed() -> None:
    assert programs() | {"scripts/bench"} == set(PROGRAMS) | set(PARTS)


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_a_program_is_run_by_its_test(program: str) -> None:
    assert mentions(PROGRAMS[program], program)
    assert "def test_" in (ROOT / PROGRAMS[program]).read_text()


@pytest.mark.parametrize("part", sorted(PARTS))
def test_a_part_belongs_to_a_program(part: str) -> None:
    assert mentions(PARTS[part], part)
    whole = PARTS[part]
    while whole in PARTS:
        whole = PARTS[whole]
    assert whole in PROGRAMS


def test_every_program_is_told_in_the_documents() -> None:
    """Whoever looks for a way to measure something finds it."""
    text = "".join(path.read_text() for path in repository_files() if path.suffix == ".md")
    spoken = {program: program.removesuffix(".py").replace("/", ".") for program in PROGRAMS}
    missing = [program for program, module in spoken.items() if program not in text and module not in text]
    assert not missing, missing


def test_the_figures_in_the_documents_are_those_of_the_history() -> None:
    assert report(["--check"]) == 0, "run python -m perf.report"
