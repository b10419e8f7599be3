"""danube.Discovery: which broker serves a topic, and which partitions it has."""

from __future__ import annotations

from danube.core.metadata.machine import Metadata
from danube.errors import TopicNotFound
from danube.ids import check_topic_name, split_partition_name
from danube.server.proto.DanubeApi_pb2 import (
    TopicLookupRequest,
    TopicLookupResponse,
    TopicPartitionsResponse,
)
from danube.server.services.calls import BrokerCalls, Call


class Discovery:
    """Answers from the metadata: this broker serves every topic, or in a cluster those that it owns."""

    def __init__(self, broker: BrokerCalls) -> None:
        self._broker = broker

    async def topic_lookup(self, request: TopicLookupRequest, call: Call) -> TopicLookupResponse:
        """Answer the address for a topic or a partition: one that this client can reach."""
        check_topic_name(request.topic)
        metadata = self._metadata(request.topic)
        record, partition = metadata.find_topic(request.topic), 0
        if record is None:
            record, partition = metadata.topic_of_partition(request.topic)
        elsewhere = await self._broker.served_at(record.topic_id, partition)
        kind = TopicLookupResponse.LookupType
        url = elsewhere or self._broker.address_for(call)
        return TopicLookupResponse(
            request_id=request.request_id,
            response_type=kind.Redirect if elsewhere else kind.Connect,
            connect_url=url,
            broker_url=url,
            proxy=False,
        )

    async def topic_partitions(self, request: TopicLookupRequest, call: Call) -> TopicPartitionsResponse:
        """The physical names behind a topic; none for a topic that does not exist."""
        check_topic_name(request.topic)
        metadata = self._metadata(request.topic)
        record = metadata.find_topic(request.topic)
        if record is not None:
            names = record.physical_names
        else:
            names = [request.topic] if _exists(metadata, request.topic) else []
        return TopicPartitionsResponse(request_id=request.request_id, partitions=names)

    def _metadata(self, name: str) -> Metadata:
        if not _exists(self._broker.metadata, name):
            self._broker.refresh()
        return self._broker.metadata


def _exists(metadata: Metadata, name: str) -> bool:
    if metadata.find_topic(name) is not None:
        return True
    base, index = split_partition_name(name)
    if index is None:
        return False
    try:
        metadata.topic_of_partition(name)
    except TopicNotFound:
        return False
    return metadata.find_topic(base) is not None
