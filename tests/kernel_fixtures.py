"""Fixtures that run a test with kernels, with their twins, or with both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from danube.core import kernels


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
