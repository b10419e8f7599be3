"""Fixtures shared by unit tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from danube.core import kernels
from tests.fakes.broker import FakeBroker


@pytest.fixture
def fake() -> Iterator[FakeBroker]:
    """A scripted broker whose clients obeyed the protocol to the end."""
    with FakeBroker() as broker:
        yield broker
        assert broker.violations == []


@pytest.fixture(params=["kernels", "twins"])
def kernels_or_twins(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test once with kernels and once with their twins, and leave things as they were."""
    with kernels_kept():
        if request.param == "kernels":
            load_kernels()
        else:
            kernels.unload()
        yield request.param


@pytest.fixture
def with_kernels() -> Iterator[None]:
    """Run a test with kernels, and leave things as they were."""
    with kernels_kept():
        load_kernels()
        yield


def load_kernels() -> None:
    report = kernels.load()
    if "off" in report.reason:
        pytest.skip(report.reason)
    assert report.available, report.reason


@contextmanager
def kernels_kept() -> Iterator[None]:
    before = kernels.available
    try:
        yield
    finally:
        if before:
            kernels.load()
        else:
            kernels.unload()


@pytest.fixture(autouse=True)
def whole_turns(request: pytest.FixtureRequest) -> Iterator[None]:
    """A turn's share of time is tested with a clock in the test's hands (``looks``); elsewhere a machine
    that is busy must not end a turn early."""
    deliveries = sys.modules.get("danube.broker.deliveries")
    if deliveries is None or "looks" in request.fixturenames:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deliveries, "SHARE_NS", 60_000_000_000)
        patch.setattr(deliveries, "BUSY_SHARE_NS", 60_000_000_000)
        yield
