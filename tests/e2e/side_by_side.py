"""Tests of one file that mostly wait, side by side: each runs in a thread, from the file's first test on.

    from tests.e2e.side_by_side import Bench, beside
    from tests.e2e.side_by_side import lanes as lanes

    @beside
    def test_what_takes_the_broker_ten_seconds(bench: Bench, s3_server: S3Server, how: str) -> None:
        process = bench.broker(workers=2)

Each stays a test of its own: it is chosen, parametrized, passes and fails as ever, at its place in the file.
Beside ``bench`` it may ask for parameters and for fixtures of the session; what it starts is its own, and is
killed at its end.  Not for tests that measure time, nor for what changes this process (CliRunner,
monkeypatch); a test that must have the machine for itself asks for the fixture ``alone``.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from tests.broker_process import Brokers

LANES = 3  # they wait more than they compute


class Bench:
    """What a test in a thread works with: a directory, a seed, and brokers that are killed after it."""

    def __init__(self, tmp_path: Path, seed: int) -> None:
        self.tmp_path = tmp_path
        self.seed = seed
        brokers = Brokers(tmp_path)
        self.broker, self.close = brokers.make, brokers.kill


class Lanes:
    """The tests of one file that run side by side, by their names."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(LANES, thread_name_prefix="lane")
        self._futures: dict[str, Future[None]] = {}
        self._benches: list[Bench] = []
        self._lock = threading.Lock()

    def begin(self, name: str, bench: Bench, scenario: Callable[..., None], given: dict[str, Any]) -> None:
        def run() -> None:
            with self._lock:
                self._benches.append(bench)
            try:
                scenario(bench, **given)
            finally:
                bench.close()

        self._futures[name] = self._pool.submit(run)

    def result(self, name: str) -> None:
        """Wait for one; whatever it raised is raised here."""
        self._futures[name].result()

    def wait(self) -> None:
        """Until none of them runs."""
        wait(self._futures.values())

    def close(self) -> None:
        """No test waits for them any more: those that run lose their brokers, and end."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            benches = list(self._benches)
        for bench in benches:
            bench.close()
        self._pool.shutdown()


@pytest.fixture(scope="module", autouse=True)
def lanes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lanes]:
    """Begins all of this file's tests that were chosen and are to run side by side, in their order."""
    made = Lanes()
    for item in request.session.items:
        scenario = getattr(getattr(item, "obj", None), "scenario", None)
        if scenario is None or item.getparent(pytest.Module) is not request.node:
            continue
        params: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
        names = list(inspect.signature(scenario).parameters)[1:]
        given = {name: params[name] if name in params else request.getfixturevalue(name) for name in names}
        seed = random.Random(f"{request.config.option.seed} {item.name}").randrange(2**32)
        made.begin(item.name, Bench(tmp_path_factory.mktemp("bench"), seed), scenario, given)
    yield made
    made.close()


@pytest.fixture
def alone(lanes: Lanes) -> None:
    """Nothing of this file runs beside the test."""
    lanes.wait()


def beside(scenario: Callable[..., None]) -> Callable[..., None]:
    """A test that waits for its scenario, which has begun with the file."""

    def test(lanes: Lanes, request: pytest.FixtureRequest, **_: Any) -> None:
        lanes.result(request.node.name)

    _, *given = inspect.signature(scenario).parameters.values()
    own = [one for one in inspect.signature(test).parameters.values() if one.kind is not one.VAR_KEYWORD]
    test.__name__ = test.__qualname__ = scenario.__name__
    test.__doc__ = scenario.__doc__
    test.__module__ = scenario.__module__
    test.__signature__ = inspect.Signature([*own, *given])  # type: ignore[attr-defined]
    test.scenario = scenario  # type: ignore[attr-defined]
    return test
