"""danube.HealthCheck: whether a producer or consumer still exists."""

from __future__ import annotations

from danube.errors import InvalidArgument, TopicNotFound
from danube.server.messages.consuming import Consuming
from danube.server.messages.publishing import Publishing
from danube.server.proto.DanubeApi_pb2 import HealthCheckRequest, HealthCheckResponse
from danube.server.services.calls import BrokerCalls, Call
from danube.server.services.naming import find_consumer

_PRODUCER = HealthCheckRequest.ClientType.Producer
_CONSUMER = HealthCheckRequest.ClientType.Consumer
_OK = HealthCheckResponse(status=HealthCheckResponse.ClientStatus.OK)
_CLOSE = HealthCheckResponse(status=HealthCheckResponse.ClientStatus.CLOSE)


class HealthCheck:
    """CLOSE makes a client look its topic up and create its producer or consumer again."""

    def __init__(self, broker: BrokerCalls, publishing: Publishing, consuming: Consuming) -> None:
        self._broker = broker
        self._publishing = publishing
        self._consuming = consuming

    async def health_check(self, request: HealthCheckRequest, call: Call) -> HealthCheckResponse:
        """Answer whether the client's id is usable; an unknown id must be created again, without an error."""
        if request.client == _PRODUCER:
            return _OK if self._producer_known(request.id, call) else _CLOSE
        if request.client == _CONSUMER:
            return _OK if self._consumer_known(request.id, call) else _CLOSE
        raise InvalidArgument(
            f"client type {request.client} is not known", hint="use 0 for a producer, 1 for a consumer"
        )

    def _producer_known(self, producer_id: int, call: Call) -> bool:
        partition = self._publishing.partition_of(producer_id)
        if not partition or not self._broker.sight(call).may("Produce", partition):
            return False
        try:
            record, index = self._broker.metadata.topic_of_partition(partition)
        except TopicNotFound:
            return False
        return self._broker.serves(record.topic_id, index)

    def _consumer_known(self, consumer_id: int, call: Call) -> bool:
        found = find_consumer(self._broker, consumer_id)
        if found is None:
            held = self._consuming.find(consumer_id)
            if held is None:
                return False
            return self._broker.sight(call).consumes(held.place.name, held.identity.subscription)
        record = self._broker.metadata.topic_with_id(found.topic_id)
        if record is not None and not self._broker.sight(call).consumes(record.topic, found.subscription):
            return False
        return self._broker.serves(found.topic_id, found.partition)
