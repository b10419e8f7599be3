"""danube.StorageService: sealed segments in object storage, for tools that read them there."""

from __future__ import annotations

from danube.ids import check_topic_name
from danube.server.calls import BrokerCalls, Call
from danube.server.proto.DanubeApi_pb2 import ListSegmentDescriptorsRequest, ListSegmentDescriptorsResponse


class StorageService:
    """Lists what was uploaded; until a topic is tiered that is nothing."""

    def __init__(self, broker: BrokerCalls) -> None:
        self._broker = broker

    async def list_segment_descriptors(
        self, request: ListSegmentDescriptorsRequest, call: Call
    ) -> ListSegmentDescriptorsResponse:
        """Uploaded segments that end above ``after_offset``; raises TopicNotFound for an unknown topic."""
        check_topic_name(request.topic)
        self._broker.refresh()
        metadata = self._broker.metadata
        if metadata.find_topic(request.topic) is None:
            metadata.topic_of_partition(request.topic)
        return ListSegmentDescriptorsResponse()
