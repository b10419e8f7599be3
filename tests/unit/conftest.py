"""Fixtures shared by unit tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.fakes.broker import FakeBroker


@pytest.fixture
def fake() -> Iterator[FakeBroker]:
    """A scripted broker whose clients obeyed the protocol to the end."""
    with FakeBroker() as broker:
        yield broker
        assert broker.violations == []


@pytest.fixture(autouse=True)
def whole_turns(request: pytest.FixtureRequest) -> Iterator[None]:
    """A turn's share of time is tested with a clock in the test's hands (``looks``); elsewhere a machine
    that is busy must not end a turn early."""
    deliveries = sys.modules.get("danube.broker.partition.deliveries")
    if deliveries is None or "looks" in request.fixturenames:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deliveries, "SHARE_NS", 60_000_000_000)
        patch.setattr(deliveries, "BUSY_SHARE_NS", 60_000_000_000)
        yield
