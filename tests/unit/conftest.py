"""Fixtures shared by unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from danube.core import kernels


@pytest.fixture(params=["kernels", "twins"])
def kernels_or_twins(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test once with kernels and once with their twins, and leave things as they were."""
    before = kernels.available
    if request.param == "kernels":
        report = kernels.load()
        if "off" in report.reason:
            pytest.skip(report.reason)
        assert report.available, report.reason
    else:
        kernels.unload()
    yield request.param
    if before:
        kernels.load()
    else:
        kernels.unload()
