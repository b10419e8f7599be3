"""Marks of tests by their folder and file, and the quick tests.

A quick test needs no server and takes less than a second of processor.  Folders say which
tests are quick; ``tests/slow.txt`` names the tests of those folders that take longer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
SLOW_LIST: Final = ROOT / "tests" / "slow.txt"
QUICK_CALL_S: Final = 1.0  # of processor, for one test
QUICK_TIMEOUT_S: Final = 30  # by the wall, on a machine that others use too
SPARK_TIMEOUT_S: Final = 900  # a Java virtual machine starts several times slower on a small, shared machine
# Mark: how the names of its files begin.
MARKED: Final = {
    "quick": ("tests/golden/", "tests/stories/", "tests/unit/config/", "tests/unit/core/"),
    "e2e": ("tests/e2e/", "tests/compat/"),
    "crash": ("tests/crash/",),
    "spark": ("tests/spark/",),
    "cluster": ("tests/e2e/test_cluster_", "tests/crash/test_cluster_", "tests/crash/test_cluster.py"),
}


def slow_tests() -> set[str]:
    """Return the lines of the list: a file, or a file and a test function."""
    return {line for line in SLOW_LIST.read_text().splitlines() if line and not line.startswith("#")}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A run of the quick tests reads no other file."""
    if not config.option.quick or collection_path.suffix != ".py":
        return None
    name = collection_path.relative_to(ROOT).as_posix()
    return None if name.startswith(MARKED["quick"]) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark by file; in a run of the quick tests, keep them alone."""
    slow = slow_tests()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in slow or name.partition("::")[0] in slow:
            item.add_marker("slow")
        for mark, beginnings in MARKED.items():
            if item.nodeid.startswith(beginnings) and not (mark == "quick" and not _may_be_quick(item)):
                item.add_marker(mark)
        if item.get_closest_marker("quick") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(QUICK_TIMEOUT_S, func_only=True))
        if item.get_closest_marker("spark") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SPARK_TIMEOUT_S))
    if config.option.quick:
        kept = [item for item in items if item.get_closest_marker("quick")]
        config.hook.pytest_deselected(items=[item for item in items if not item.get_closest_marker("quick")])
        items[:] = kept


def _may_be_quick(item: pytest.Item) -> bool:
    return not any(item.get_closest_marker(mark) for mark in ("slow", "e2e", "crash"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Write the processor time of a quick test down."""
    started_s = _processor_s()
    try:
        return (yield)
    finally:
        if item.get_closest_marker("quick"):
            item.user_properties.append(("processor_s", _processor_s() - started_s))


def _processor_s() -> float:
    """Return the time of this process and of the children that have ended."""
    return sum(os.times()[:4])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Name the quick tests that are not quick."""
    found = [
        (spent_s, report.nodeid)
        for report in terminalreporter.stats.get("passed", [])
        for name, spent_s in report.user_properties
        if name == "processor_s" and spent_s > QUICK_CALL_S
    ]
    for spent_s, name in sorted(found, reverse=True):
        terminalreporter.write_line(f"not quick, for tests/slow.txt: {spent_s:.1f} s of processor: {name}")
