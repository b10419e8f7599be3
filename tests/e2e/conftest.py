"""Brokers that tests of this folder share: a start costs two seconds of processor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from tests.broker_process import BrokerProcess, Brokers


@pytest.fixture(scope="session")
def shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., BrokerProcess]]:
    """``shared_broker(workers=2)``: for tests with topics of their own that leave the broker running."""
    brokers = Brokers(tmp_path_factory.mktemp("shared"))
    made: dict[int, BrokerProcess] = {}

    def of(workers: int = 1) -> BrokerProcess:
        if workers not in made or not made[workers].running:
            made[workers] = brokers.make(workers=workers)
        return made[workers]

    yield of
    brokers.kill()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic with the test's name."""
    return "/default/" + re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")
