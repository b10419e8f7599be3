"""danube.StorageService: sealed segments in object storage, for tools that read them there."""

from __future__ import annotations

from typing import Any

from danube.server.proto.DanubeApi_pb2 import (
    ListSegmentDescriptorsRequest,
    ListSegmentDescriptorsResponse,
    SegmentDescriptorProto,
)
from danube.server.services.calls import BrokerCalls, Call
from danube.server.services.naming import find


class StorageService:
    """Lists uploaded segments; a topic that is not tiered has none."""

    def __init__(self, broker: BrokerCalls) -> None:
        self._broker = broker

    async def list_segment_descriptors(
        self, request: ListSegmentDescriptorsRequest, call: Call
    ) -> ListSegmentDescriptorsResponse:
        """Uploaded segments with records behind ``after_offset``; TopicNotFound for an unknown topic.

        ``topic`` is a partition's name; for a partitioned topic's own name the list is empty.
        """
        record, names = find(self._broker, request.topic)
        if names != [request.topic] or not record.policy.reliable:
            return ListSegmentDescriptorsResponse()
        # A repeated request names the last offset that the client has; a first request also says 0.
        first = min(request.after_offset + 1, 1 << 62) if request.after_offset else 0
        found = await self._broker.ask_partition(request.topic, "list_segments", after_offset=first)
        return ListSegmentDescriptorsResponse(segments=[_descriptor(one) for one in found])


def _descriptor(segment: dict[str, Any]) -> SegmentDescriptorProto:
    """The API names the last offset, not the one behind it, and the object by its key."""
    return SegmentDescriptorProto(
        segment_id=segment["key"],
        start_offset=segment["start_offset"],
        end_offset=segment["end_offset"] - 1,
        size=segment["size_bytes"],
        etag=segment["content_hash"],
        created_at=segment["uploaded_us"] // 1_000_000,
    )
