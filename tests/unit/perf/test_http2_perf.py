"""The benchmark of the HTTP/2 machine does not rot."""

from __future__ import annotations

import json

import pytest

from perf.http2 import main


def test_every_case_measures_something(capsys: pytest.CaptureFixture[str], kernels_or_twins: str) -> None:
    main(["--calls", "8", "--rounds", "1", "--batch", "4", "--size", "100"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 6
    assert all(case["us"] > 0 for case in found)
