"""What a worker asks of the garbage collector: to look rarely, and never not at all."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from danube import app
from danube.host import allocator, telemetry


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def thresholds() -> Any:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_garbage_is_bounded(thresholds: None) -> None:
    allocator.collect_rarely()
    alive: list[weakref.ref[Cycle]] = []
    for _ in range(3 * allocator.COLLECT_EVERY[0]):
        alive.append(weakref.ref(Cycle()))
    left = sum(1 for one in alive if one() is not None)
    assert 0 < left <= allocator.COLLECT_EVERY[0]


def test_a_worker_collects_rarely(thresholds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[int, int, int]] = []

    async def serve(*_: Any) -> None:
        served.append(gc.get_threshold())

    monkeypatch.setattr(app, "_serve", serve)
    monkeypatch.setattr(telemetry, "configure", lambda *_, **__: None)
    app.run_worker(_Anything(), _Anything())  # type: ignore[arg-type]
    assert served == [allocator.COLLECT_EVERY]


class _Anything:
    def __getattr__(self, name: str) -> Any:
        return self
