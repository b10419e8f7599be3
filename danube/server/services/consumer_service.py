"""danube.ConsumerService: Subscribe and ReceiveMessages.  (Ack and Nack: server/messages/settling.)"""

from __future__ import annotations

from collections.abc import Sequence

from danube.core.dispatch.filters import KeyFilter
from danube.core.http2.streams import Stream
from danube.core.metadata.commands import KnowConsumer, KnownConsumer
from danube.errors import InvalidArgument, LimitExceeded
from danube.ids import check_label, check_topic_name
from danube.limits import KNOWN_CONSUMERS_MAX
from danube.server.messages.consuming import Consuming, Streaming
from danube.server.messages.convert import mode_of
from danube.server.proto.DanubeApi_pb2 import ConsumerRequest, ConsumerResponse, ReceiveRequest
from danube.server.services.calls import BrokerCalls, Call
from danube.server.services.naming import find_partition


class ConsumerService:
    """Joins subscriptions and starts the streams of their consumers."""

    def __init__(self, broker: BrokerCalls, consuming: Consuming) -> None:
        self._broker = broker
        self._consuming = consuming

    async def subscribe(self, request: ConsumerRequest, call: Call) -> ConsumerResponse:
        """Join as this consumer; the same name has the same id and takes over from an older one."""
        check_topic_name(request.topic_name)
        check_label(request.subscription, "subscription")
        check_label(request.consumer_name, "consumer")
        mode = mode_of(request.subscription_type)
        _check_filters(request.key_filters)
        record, partition = find_partition(self._broker, request.topic_name)
        filters = tuple(request.key_filters)
        place = (record.topic_id, partition, request.subscription, request.consumer_name)
        known = self._broker.metadata.consumers.of(*place)
        if known is None or (known.mode, known.filters) != (mode, filters):
            consumer_id = self._broker.metadata.consumers.free_identity(*place)
            wanted = KnownConsumer(consumer_id, *place[:3], mode, request.consumer_name, filters)
        else:
            wanted = known
        consumer = await self._consuming.subscribe(wanted, call.connection, call.identity)
        if wanted is not known:
            try:
                await self._broker.propose(KnowConsumer(consumer=wanted, known_max=KNOWN_CONSUMERS_MAX))
            except BaseException:  # also where the client has cancelled its call
                self._consuming.drop(consumer)
                raise
        return ConsumerResponse(
            request_id=request.request_id,
            consumer_id=wanted.consumer_id,
            consumer_name=request.consumer_name,
        )

    async def receive_messages(self, connection: Streaming, stream: Stream, request: ReceiveRequest) -> None:
        """Start the stream; it lives until the client, the owner or the broker ends it."""
        await self._consuming.receive(request.consumer_id, connection, stream)


def _check_filters(filters: Sequence[str]) -> None:
    """Raise InvalidArgument for an invalid or too large filter, because a retry would not help."""
    try:
        KeyFilter(filters)
    except LimitExceeded as error:
        raise InvalidArgument(error.what, why=error.why, hint=error.hint) from None
