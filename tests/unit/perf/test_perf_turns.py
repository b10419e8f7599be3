"""Turns of a comparison that the host disturbed are measured again, not for ever, and it is told."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perf import machine, turns
from perf.turns import Plan


def taken(monkeypatch: pytest.MonkeyPatch, stolen: list[float], rounds: int) -> tuple[list[Any], Plan]:
    """What counts; in the n-th turn that is measured ``stolen[n]`` of the processors' time is taken away."""
    numbers = itertools.count()
    clock = itertools.count(0.0, 1.0)
    asked = itertools.count()
    totals = [0.0]

    def stolen_s() -> float:
        turn, moment = divmod(next(asked), 4)  # before and after each side
        if moment == 3 and turn < len(stolen):
            totals[0] += 2 * stolen[turn]
        return totals[0]

    monkeypatch.setattr(machine, "stolen_s", stolen_s)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    plan = Plan(floor=lambda: 10.0, danube=lambda: float(next(numbers)))
    bench: Any = SimpleNamespace(end_turn=lambda: None)
    return list(turns._turns(bench, plan, rounds)), plan


def test_disturbed_turns_do_not_count_while_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    found, plan = taken(monkeypatch, [0.5, 0.0, 0.02, 0.0, 0.009], rounds=3)
    assert [danube for _, danube, _ in found] == [1, 3, 4], "the first one warms up, whatever it met"
    assert plan.details == {"turns_again": 1}
    assert found[2][2] == pytest.approx(0.009)


def test_a_host_that_always_disturbs_is_measured_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found, plan = taken(monkeypatch, [0.3] * 20, rounds=3)
    assert [danube for _, danube, _ in found] == [4, 5, 6] and plan.details == {"turns_again": 3}
    assert all(stolen == pytest.approx(0.3) for _, _, stolen in found)


def test_without_rounds_there_is_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    found, plan = taken(monkeypatch, [0.3], rounds=0)
    assert len(found) == 1 and plan.details == {}


@pytest.mark.parametrize(
    ("text", "seconds"), [("cpu  9 8 7 6 5 4 3 250 1 0\ncpu0 1 1", 2.5), ("cpu 1 2", 0.0), ("", 0.0)]
)
def test_stolen_time_is_read_where_the_kernel_tells_it(
    monkeypatch: pytest.MonkeyPatch, text: str, seconds: float
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    assert machine.stolen_s() == seconds
