"""In which order a broker's processes end: nobody takes over before what was sealed is in the store."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from danube.broker.clustered.controller import Controller
from danube.broker.processes.contexts import ControllerContext, DrainSignal, Pulse, SupervisorSettings
from danube.broker.processes.side_process import SideProcess
from danube.broker.processes.supervisor import Supervisor


class Side:
    """A process beside the workers that ends when the test says so."""

    def __init__(self) -> None:
        self.pid = 7
        self.stops: list[bool] = []

    def stop(self, now_ns: int, *, at_once: bool) -> None:
        self.stops.append(at_once)


@pytest.fixture
def supervisor(tmp_path: Path) -> Supervisor:
    made = Supervisor(SupervisorSettings(data_dir=tmp_path), lambda context: None, None, None)
    made._controller, made._mover = cast(SideProcess, Side()), cast(SideProcess, Side())
    made._stop_signals, made._stop_deadline_ns = 1, 1 << 62
    return made


def stops(side: SideProcess | None) -> list[bool]:
    return cast(Side, side).stops


def test_the_controller_leaves_when_the_mover_has_ended(supervisor: Supervisor) -> None:
    supervisor._stop(1)
    assert stops(supervisor._mover) == [False] and not stops(supervisor._controller)
    cast(Any, supervisor._mover).pid = 0
    supervisor._stop(2)
    assert stops(supervisor._controller) == [False]


def test_a_second_signal_waits_for_nobody(supervisor: Supervisor) -> None:
    supervisor._stop_signals = 2
    supervisor._stop(1)
    assert stops(supervisor._mover) == stops(supervisor._controller) == [True]


def test_a_broker_without_a_store_lets_its_controller_leave_at_once(supervisor: Supervisor) -> None:
    supervisor._mover = None
    supervisor._stop(1)
    assert stops(supervisor._controller) == [False]


def test_a_signal_to_the_whole_group_does_not_make_the_controller_leave_early(tmp_path: Path) -> None:
    mover = Pulse()
    mover.pid = 7
    context = ControllerContext(
        listener=cast(socket.socket, None), door=cast(socket.socket, None), drain=DrainSignal(),
        settings=SupervisorSettings(data_dir=tmp_path), pulse=Pulse(), mover=mover,
    )  # fmt: skip

    async def scenario() -> None:
        controller = Controller(context, cast(Any, SimpleNamespace(tls=None)), cast(Any, None))
        waiting = asyncio.ensure_future(controller._others_ended())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not waiting.done()
        mover.pid = 0
        await asyncio.wait_for(waiting, 5)

    asyncio.run(scenario())
