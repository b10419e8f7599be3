"""danube.HealthCheck: whether a producer or consumer is still what its client believes."""

from __future__ import annotations

from danube.errors import InvalidArgument
from danube.server.calls import BrokerCalls, Call
from danube.server.consuming import Consuming
from danube.server.proto.DanubeApi_pb2 import HealthCheckRequest, HealthCheckResponse
from danube.server.publishing import Publishing

_PRODUCER = HealthCheckRequest.ClientType.Producer
_CONSUMER = HealthCheckRequest.ClientType.Consumer
_OK = HealthCheckResponse(status=HealthCheckResponse.ClientStatus.OK)
_CLOSE = HealthCheckResponse(status=HealthCheckResponse.ClientStatus.CLOSE)


class HealthCheck:
    """CLOSE makes a client create its producer or consumer again."""

    def __init__(self, broker: BrokerCalls, publishing: Publishing, consuming: Consuming) -> None:
        self._broker = broker
        self._publishing = publishing
        self._consuming = consuming

    async def health_check(self, request: HealthCheckRequest, call: Call) -> HealthCheckResponse:
        """An id that this broker does not know is told to start over, and is never an error."""
        if request.client == _PRODUCER:
            return _OK if self._publishing.known(request.id) else _CLOSE
        if request.client == _CONSUMER:
            return _OK if self._consumer_known(request.id) else _CLOSE
        raise InvalidArgument(
            f"client type {request.client} is not known", hint="use 0 for a producer, 1 for a consumer"
        )

    def _consumer_known(self, consumer_id: int) -> bool:
        if self._consuming.find(consumer_id) is not None:
            return True
        if self._broker.metadata.consumers.find(consumer_id) is None:
            self._broker.refresh()
        return self._broker.metadata.consumers.find(consumer_id) is not None
