"""The profile of a workload: what py-spy tells, by process and function."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from perf import hotspots
from perf.hotspots import Stack, profile, stacks, table

RAW = """\
process 1:"python -m perf.hotspots publish";main;wait 3
process 1:"python -m perf.hotspots publish";process 7:"python -m danube start";turn;pwritev 6
process 1:"python -m perf.hotspots publish";process 7:"python -m danube start";turn 2
process 1:"python -m perf.hotspots publish";process 7:"python -m danube start";0x7ff4438a3f16 (libc.so.6) 9
process 1:"python -m perf.hotspots publish";process 9:"python perf/loads.py publish {}";send 4
no process 1

"""


def test_stacks_are_read_with_the_innermost_process() -> None:
    assert stacks(RAW.splitlines())[1:] == [
        Stack(7, "python -m danube start", "pwritev", 6),
        Stack(7, "python -m danube start", "turn", 2),
        Stack(9, "python perf/loads.py publish {}", "send", 4),
    ]


def test_a_profile_names_processes_and_the_shares_of_functions() -> None:
    shown = profile(stacks(RAW.splitlines()), {7: "danube-worker-0"}, top=1)
    assert shown == {
        "danube-worker-0": {"samples": 8, "functions": {"pwritev": 75.0}},
        "client: publish": {"samples": 4, "functions": {"send": 100.0}},
    }
    assert "   75.0 %  pwritev" in table(shown, markdown=False)
    assert "| `pwritev` | 75.0 % |" in table(shown, markdown=True)


def test_a_workload_is_sampled(capsys: pytest.CaptureFixture[str]) -> None:
    if hotspots.main(["publish", "--scale", "0.05", "--seconds", "2", "-o", "json"]):
        told = capsys.readouterr().err
        assert "ermission" in told, told
        pytest.skip("py-spy may not look into other processes here")
    shown = json.loads(capsys.readouterr().out)
    assert any(name.startswith(("danube-worker", "client: ")) for name in shown), shown
    assert all(0 < share <= 100 for one in shown.values() for share in one["functions"].values())


def test_without_a_sampler_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hotspots, "sys", SimpleNamespace(executable=str(tmp_path / "python"), stderr=None))
    monkeypatch.setattr(hotspots, "os", SimpleNamespace(pathsep=os.pathsep, environ={"PATH": ""}))
    with pytest.raises(hotspots.SamplingFailed, match="pip install"):
        hotspots.sampled("publish", hotspots.Settings(directory=tmp_path), 1.0)
