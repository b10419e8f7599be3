"""``--processor FILE``: the processor time of each test with its children; a busy machine changes it little.

A line of FILE is the seconds of one test, with its fixtures, and its name.  The run ends with the sums of
folders and the tests that took most.  Children count
when they have ended, and when a test kills their broker.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests import fork_server

SHOWN: Final = 40


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[bool | None]:
    started_s = spent_s()
    try:
        return (yield)
    finally:
        if path := item.config.option.processor:
            with open(path, "a") as file:
                file.write(f"{spent_s() - started_s:.2f} {item.nodeid}\n")


def spent_s() -> float:
    """Seconds of this process and of its children so far."""
    return sum(os.times()[:4]) + fork_server.processor_s


def pytest_configure(config: pytest.Config) -> None:
    if config.option.processor and not hasattr(config, "workerinput"):
        Path(config.option.processor).unlink(missing_ok=True)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    path = config.option.processor
    if not path or not Path(path).exists():
        return
    folders, tests = Counter[str](), Counter[str]()
    for line in Path(path).read_text().splitlines():
        seconds, _, name = line.partition(" ")
        tests[name] += float(seconds)
        folders["/".join(name.partition("::")[0].split("/")[1:-1])] += float(seconds)
    for found in (folders, tests):
        terminalreporter.write_line(f"{sum(found.values()):.0f} s of processor:")
        for name, seconds in found.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:8.1f} {name}")
