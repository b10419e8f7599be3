"""The logs that the metadata store's contract is tested over.

A *kind* is a context manager that gives ``open``: each call opens another log of the same order, as
another process or member would.  Another kind of log is one more entry of KINDS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from danube.cluster.control import proposer
from danube.cluster.control.cluster_log import ClusterLog
from danube.cluster.log.local_log import LocalLog
from danube.core.metadata.ports import Consensus
from tests.fakes.memory_log import MemoryLog, Order
from tests.unit.cluster.control.test_cluster_log import Controller

OpenLog = Callable[[], Consensus]
Kind = Callable[[pytest.FixtureRequest, Path], AbstractContextManager[OpenLog]]


class ManualClock:
    """Time that is moved by hand; the wall clock jumps on its own account."""

    def __init__(self) -> None:
        self.now_ns = 5_000_000_000
        self.wall = 1_700_000_000_000_000

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_us(self) -> int:
        return self.wall

    def pass_ms(self, ms: float) -> None:
        self.now_ns += int(ms * 1_000_000)


@contextmanager
def memory(request: pytest.FixtureRequest, directory: Path) -> Iterator[OpenLog]:
    order = Order()
    yield lambda: MemoryLog(order)


@contextmanager
def local(request: pytest.FixtureRequest, directory: Path) -> Iterator[OpenLog]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(LocalLog(directory))


@contextmanager
def controller(request: pytest.FixtureRequest, directory: Path) -> Iterator[OpenLog]:
    """A worker's log behind a controller that leads alone."""
    request.getfixturevalue("monkeypatch").setattr(proposer, "clock", request.getfixturevalue("time"))
    directory.mkdir()
    made = Controller(directory)
    try:
        with ExitStack() as stack:
            yield lambda: stack.enter_context(ClusterLog(made.directory, made.address))
    finally:
        made.stop()


@contextmanager
def members(
    request: pytest.FixtureRequest, directory: Path, fixture: str = "raft_members"
) -> Iterator[OpenLog]:
    """Workers' logs at three members, each the next one's; all tests of a module share one cluster."""
    cluster: Any = request.getfixturevalue(fixture)
    cluster.clock.follow(request.getfixturevalue("time"))
    cluster.agree_on_time()
    try:
        with ExitStack() as stack:
            yield lambda: stack.enter_context(cluster.log())
    finally:
        cluster.clear()


KINDS: dict[str, Kind] = {
    "memory": memory,
    "local": local,
    "etcd": partial(members, fixture="etcd_members"),
    "controller": controller,
    "members": members,
}
