"""danube_admin.NamespaceAdmin: namespaces, their topics, and the limits that hold in them."""

from __future__ import annotations

import json

from danube.core.metadata.policies import NOTHING, smallest
from danube.errors import NotFound
from danube.ids import check_namespace
from danube.limits import (
    CONSUMERS_PER_SUBSCRIPTION_MAX,
    PRODUCERS_PER_PARTITION_MAX,
    SUBSCRIPTIONS_PER_PARTITION_MAX,
)
from danube.server.proto import DanubeAdmin_pb2 as pb
from danube.server.services.calls import BrokerCalls, Call
from danube.server.services.naming import current


class NamespaceAdmin:
    """Namespaces by their plain name (``default``)."""

    def __init__(self, broker: BrokerCalls) -> None:
        self._broker = broker

    async def get_namespace_topics(self, request: pb.NamespaceRequest, call: Call) -> pb.TopicListResponse:
        """Physical names; none for a namespace that does not exist."""
        check_namespace(request.name)
        return pb.TopicListResponse(topics=physical_names(self._broker, request.name, call))

    async def get_namespace_policies(self, request: pb.NamespaceRequest, call: Call) -> pb.PolicyResponse:
        """The seven limits as JSON; what the namespace does not limit is the broker's own limit, or 0."""
        name = check_namespace(request.name)
        metadata = current(self._broker)
        if name not in metadata.namespaces():
            raise NotFound(f"namespace {name} does not exist", hint="create it, or look at ListNamespaces")
        limits = metadata.quotas.effective(name) or NOTHING
        rate = limits.max_publish_rate_per_topic
        of_broker = {
            "max_producers_per_topic": PRODUCERS_PER_PARTITION_MAX,
            "max_subscriptions_per_topic": SUBSCRIPTIONS_PER_PARTITION_MAX,
            "max_consumers_per_topic": 0,
            "max_consumers_per_subscription": CONSUMERS_PER_SUBSCRIPTION_MAX,
            "max_publish_rate": rate,
            "max_subscription_dispatch_rate": 0,
            "max_message_size": self._broker.config.topics.max_record_bytes,
        }
        policies = {key: smallest(own, getattr(limits, key, 0)) for key, own in of_broker.items()}
        return pb.PolicyResponse(policies=json.dumps(policies))

    async def create_namespace(self, request: pb.NamespaceRequest, call: Call) -> pb.NamespaceResponse:
        await self._broker.ask("create_namespace", namespace=check_namespace(request.name))
        return pb.NamespaceResponse(success=True)

    async def delete_namespace(self, request: pb.NamespaceRequest, call: Call) -> pb.NamespaceResponse:
        await self._broker.ask("delete_namespace", namespace=check_namespace(request.name))
        return pb.NamespaceResponse(success=True)


def physical_names(broker: BrokerCalls, namespace: str, call: Call) -> list[str]:
    """Physical names of a namespace's topics, in order of creation; none where it does not exist."""
    metadata, sees = current(broker), broker.sight(call).topics()
    if namespace not in metadata.namespaces():
        return []
    seen = [record for record in metadata.topics(namespace) if sees(record.topic)]
    return [name for record in seen for name in record.physical_names]
