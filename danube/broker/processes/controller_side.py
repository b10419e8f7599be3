"""The supervisor's view of the controller: its sockets are opened early, so a taken port stops the start."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from danube.broker.processes.contexts import (
    ControllerContext,
    ControllerMain,
    DrainSignal,
    Pulse,
    SupervisorSettings,
)
from danube.broker.processes.lease import SharedLease
from danube.broker.processes.side_process import SideProcess
from danube.cluster.control.dismissal import EXIT_DISMISSED
from danube.errors import DanubeError, WrongState
from danube.ipc.region import Region

DRAIN_MS: Final = 2_000


def dismissal() -> DanubeError:
    """Why a broker stops whose controller has left for good."""
    return WrongState(
        "this broker was removed from its cluster",
        why="the other members do not name it any more",
        hint="to take part again, start it with an empty data directory and cluster.join",
    )


@dataclass(frozen=True, slots=True)
class ControllerSide:
    """The controller's main function, what opens its door for other members, and the lease that it keeps."""

    main: ControllerMain
    open_door: Callable[[], socket.socket]
    lease: SharedLease = field(default_factory=SharedLease)

    def make(
        self,
        settings: SupervisorSettings,
        region: Region,
        addresses: Mapping[str, str],
        mover: Pulse | None = None,
    ) -> SideProcess:
        """The process, not started yet; raises ConfigInvalid if the address cannot be used."""
        door = self.open_door()

        def run(drain: DrainSignal, side: SideProcess) -> int | None:
            return self.main(
                ControllerContext(
                    listener=side.listener, door=door, drain=drain, settings=settings, pulse=side.pulse,
                    lease=self.lease, region=region, addresses=addresses, mover=mover,
                )
            )  # fmt: skip

        return SideProcess(
            "controller", settings, run, drain_timeout_ms=DRAIN_MS, door=door, final_exit_code=EXIT_DISMISSED
        )
