"""How long a leader is given for an answer, before it is asked again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from danube.cluster.control.calls import Propose
from danube.cluster.control.leadership import Leadership
from danube.cluster.control.to_leader import TRY_S, ToLeader
from danube.cluster.log.applied_log import AppliedLog
from danube.cluster.raft.engine import EngineStatus
from danube.errors import ConnectionFailed, OutcomeUnknown
from danube.limits import MIB
from tests.fakes.raft_engine import FakeEngine


class FollowingEngine(FakeEngine):
    @property
    def status(self) -> EngineStatus:
        return msgspec.structs.replace(super().status, role="follower", leader_id="2")


@pytest.mark.parametrize(("size", "least_s", "most_s"), [(100, TRY_S, TRY_S + 0.1), (MIB, 8.5, 20.0)])
def test_a_large_request_is_given_the_time_that_it_takes_on_a_slow_network(
    tmp_path: Path, size: int, least_s: float, most_s: float
) -> None:
    """Given up while it is still on its way, it is sent again behind itself, and never answered."""
    given: list[float] = []

    async def call(node_id: str, body: bytes, timeout_s: float) -> bytes:
        given.append(timeout_s)
        raise ConnectionFailed("away")

    async def story() -> None:
        machine = AppliedLog(tmp_path)
        engine = FollowingEngine(machine)
        transport: Any = SimpleNamespace(call=call, identity=SimpleNamespace(node_id="1"))
        to_leader = ToLeader(engine, machine, Leadership(engine, machine, print), transport)
        asked = asyncio.ensure_future(to_leader.ask(Propose("o", 1, bytes(size), 60_000)))
        while not given:
            await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises((asyncio.CancelledError, OutcomeUnknown)):
            await asked
        machine.close()

    asyncio.run(story())
    assert least_s <= given[0] <= most_s
