"""Memory is touched until it is there, and nothing of it stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from perf import machine as memory


def passes(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """How long each pass takes, by the clock that touch() looks at."""

    def readings() -> Iterator[float]:
        now = 0.0
        for took in seconds:
            yield now
            now += took
            yield now

    monkeypatch.setattr("perf.machine.time.monotonic", readings().__next__)


@pytest.mark.parametrize(
    ("seconds", "count"),
    [
        ([1.0, 0.9], 2),
        ([2.0, 0.4, 0.5], 3),
        ([2.0, 1.0, 0.4, 0.41], 4),
        ([0.5**number for number in range(memory.PASSES_MAX)], memory.PASSES_MAX),
    ],
)
def test_passes_are_repeated_until_one_takes_as_long_as_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: list[float], count: int
) -> None:
    passes(monkeypatch, *seconds)
    assert memory.touch(tmp_path, 3 << 20) == count
    assert list(tmp_path.iterdir()) == []


def test_nothing_stays_of_a_pass_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PIECE", "no bytes")
    with pytest.raises(TypeError):
        memory.touch(tmp_path, 64)
    assert list(tmp_path.iterdir()) == []
