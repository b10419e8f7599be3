"""grpc.health.v1.Health: whether this broker, and each of its services, takes calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Final

from danube.errors import LimitExceeded, NotFound
from danube.server.proto.health_pb2 import (
    HealthCheckRequest,
    HealthCheckResponse,
    HealthListRequest,
    HealthListResponse,
)
from danube.server.services.calls import BrokerCalls, Call

WATCHES_MAX: Final = 256  # of one door
WATCH_INTERVAL_S: Final = 0.25  # delay of a change's report, at most


class Health:
    """SERVING while the broker is ready; the name "" is the broker as a whole.

    It is not ready once it drains, and in a cluster while it waits for its part in it or has no lease.
    """

    def __init__(self, broker: BrokerCalls, services: Collection[str]) -> None:
        """``services`` are the full names of the door's services."""
        self._broker = broker
        self._services = frozenset(services)
        self._watch_count = 0

    @property
    def _status(self) -> HealthCheckResponse.ServingStatus:
        return HealthCheckResponse.SERVING if self._broker.ready else HealthCheckResponse.NOT_SERVING

    def _status_of(self, service: str) -> HealthCheckResponse.ServingStatus:
        if service and service not in self._services:
            return HealthCheckResponse.SERVICE_UNKNOWN
        return self._status

    async def check(self, request: HealthCheckRequest, call: Call) -> HealthCheckResponse:
        """Raises NotFound for a service that is not served."""
        status = self._status_of(request.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            raise NotFound(
                f"service {request.service[:100]!r} is not served here",
                hint="List tells the services; an empty name asks for the broker as a whole",
            )
        return HealthCheckResponse(status=status)

    async def list(self, request: HealthListRequest, call: Call) -> HealthListResponse:
        status = HealthCheckResponse(status=self._status)
        return HealthListResponse(statuses=dict.fromkeys(("", *sorted(self._services)), status))

    async def watch(self, request: HealthCheckRequest, call: Call) -> AsyncIterator[HealthCheckResponse]:
        """The state at once, then each change; raises LimitExceeded beyond WATCHES_MAX.

        The state of a draining broker is the last one: the call ends, so it does not delay the stop.
        """
        if self._watch_count >= WATCHES_MAX:
            raise LimitExceeded(
                f"{WATCHES_MAX} calls watch the health of this door already", hint="use Check, or close some"
            )
        self._watch_count += 1
        try:
            told = None
            while True:
                status = self._status_of(request.service)
                if status != told:
                    told = status
                    yield HealthCheckResponse(status=status)
                if self._broker.draining:
                    return
                await asyncio.sleep(WATCH_INTERVAL_S)
        finally:
            self._watch_count -= 1
