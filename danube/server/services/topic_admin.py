"""danube_admin.TopicAdmin: topics and their subscriptions.

A request names a topic, the base of a partitioned one, or one partition; see
:mod:`danube.server.services.naming`.  Figures of partitions are requested from each owner and joined.
Policies and settings of subscriptions apply to the whole topic, for each of its names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from danube.core.metadata.commands import TopicRecord
from danube.core.partition.policy import DAY_MS, FailurePolicy
from danube.errors import (
    Conflict,
    InvalidArgument,
    PolicyMismatch,
    SchemaNotFound,
    SubscriptionNotFound,
    TopicNotFound,
    WrongState,
)
from danube.ids import check_label, check_namespace, check_topic_name, split_partition_name
from danube.schema.model import SchemaType
from danube.server.messages.convert import subscription_type_of
from danube.server.proto import DanubeAdmin_pb2 as pb
from danube.server.services.calls import BrokerCalls, Call, filled, whole_list
from danube.server.services.naming import (
    Named,
    current,
    find,
    no_subscription,
    number_of_broker,
    required_message,
)

_BACKOFFS: Final = {pb.Fixed: "fixed", pb.Exponential: "exponential"}
_POISONS: Final = {pb.DeadLetter: "dead_letter", pb.Block: "block", pb.Drop: "drop"}
_DURATION_MS_MAX: Final = 3_650 * DAY_MS  # in ns this fits easily in 64 bits
_DURATIONS: Final = ("ack_timeout_ms", "base_redelivery_delay_ms", "max_redelivery_delay_ms")


def read_failure_policy(policy: pb.SubscriptionFailurePolicy) -> FailurePolicy:
    """The policy of a request; raises InvalidArgument or InvalidName (dead letter topic)."""
    if policy.backoff_strategy not in _BACKOFFS:
        raise InvalidArgument(
            f"backoff_strategy {policy.backoff_strategy} is not known",
            hint="use Fixed (0) or Exponential (1)",
        )
    if policy.poison_policy not in _POISONS:
        raise InvalidArgument(
            f"poison_policy {policy.poison_policy} is not known",
            hint="use DeadLetter (0), Block (1) or Drop (2)",
        )
    for name in _DURATIONS:
        if getattr(policy, name) > _DURATION_MS_MAX:
            raise InvalidArgument(f"{name} is {getattr(policy, name)}", why="the most is 3650 days")
    found = FailurePolicy(
        max_redelivery_count=policy.max_redelivery_count,
        ack_timeout_ms=policy.ack_timeout_ms,
        base_redelivery_delay_ms=policy.base_redelivery_delay_ms,
        max_redelivery_delay_ms=policy.max_redelivery_delay_ms,
        backoff=_BACKOFFS[policy.backoff_strategy],
        poison=_POISONS[policy.poison_policy],
        dead_letter_topic=policy.dead_letter_topic,
    )
    found.check()
    if found.dead_letter_topic:
        check_topic_name(found.dead_letter_topic)
    return found


def show_failure_policy(policy: FailurePolicy) -> pb.SubscriptionFailurePolicy:
    backoff = pb.Fixed if policy.backoff == "fixed" else pb.Exponential
    poison = {"dead_letter": pb.DeadLetter, "block": pb.Block}.get(policy.poison, pb.Drop)
    return filled(
        pb.SubscriptionFailurePolicy,
        msgspec.structs.asdict(policy),
        max_redelivery_count=min(policy.max_redelivery_count, (1 << 32) - 1),
        dead_letter_topic=policy.dead_letter_topic or None,
        backoff_strategy=backoff,
        poison_policy=poison,
    )


UNACKED_MAX: Final = 10_000
_ASKED_AT_ONCE: Final = 64  # partitions whose owners are asked together
_RELIABLE: Final = "Reliable"
_NON_RELIABLE: Final = "NonReliable"


class TopicAdmin:
    """Topics of this broker; it owns all of them."""

    def __init__(self, broker: BrokerCalls) -> None:
        self._broker = broker

    # Lists

    async def list_namespace_topics(
        self, request: pb.NamespaceRequest, call: Call
    ) -> pb.TopicInfoListResponse:
        namespace = check_namespace(request.name)
        metadata = current(self._broker)
        known = namespace in metadata.namespaces()
        return self._listed(call, metadata.topics(namespace) if known else [])

    async def list_broker_topics(self, request: pb.BrokerRequest, call: Call) -> pb.TopicInfoListResponse:
        """List the topics of one broker; a broker that is alone has all."""
        broker_id = str(number_of_broker(request.broker_id))
        listed = self._listed(call, current(self._broker).topics())
        return pb.TopicInfoListResponse(topics=[one for one in listed.topics if one.broker_id == broker_id])

    def _listed(self, call: Call, records: Sequence[TopicRecord]) -> pb.TopicInfoListResponse:
        sees = self._broker.sight(call).topics()
        return pb.TopicInfoListResponse(
            topics=[
                pb.TopicInfo(name=name, broker_id=self._owner(record, place), delivery=_delivery(record))
                for record in records
                if sees(record.topic)
                for place, name in enumerate(record.physical_names)
            ]
        )

    def _owner(self, record: TopicRecord, partition: int) -> str:
        """Return the id of the broker that owns a partition; "" for none."""
        if not self._broker.clustered:
            return str(self._broker.broker_id)
        owner_id = self._broker.metadata.cluster.owners.of(record.topic_id, partition).broker_id
        return str(owner_id) if owner_id else ""

    # Topics

    async def create_topic(self, request: pb.NewTopicRequest, call: Call) -> pb.TopicResponse:
        return await self._create(request.name, 0, request)

    async def create_partitioned_topic(
        self, request: pb.PartitionedTopicRequest, call: Call
    ) -> pb.TopicResponse:
        """All partitions are made by one command, or none is."""
        if request.partitions == 0:
            raise InvalidArgument("a partitioned topic needs partitions", hint="set partitions to 1 or more")
        return await self._create(request.base_name, request.partitions, request)

    async def _create(
        self, name: str, partitions: int, request: pb.NewTopicRequest | pb.PartitionedTopicRequest
    ) -> pb.TopicResponse:
        check_topic_name(name)
        if request.dispatch_strategy not in (pb.NonReliable, pb.Reliable):
            raise InvalidArgument(
                f"dispatch_strategy {request.dispatch_strategy} is not known",
                hint="use NonReliable (0) or Reliable (1)",
            )
        subject = request.schema_subject
        if subject and not await self._registered(subject):
            subject = ""
        policy = {"reliable": request.dispatch_strategy == pb.Reliable}
        await self._broker.ask("create_topic", topic=name, partitions=partitions, policy=policy)
        if subject:
            await self._broker.ask("schema.configure_topic", topic=name, subject=subject)
        return pb.TopicResponse(success=True)

    async def _registered(self, subject: str) -> bool:
        """Check the subject before a topic is made, so that a refusal leaves no topic behind.

        False for the name of a schema type, which old web interfaces send instead of a subject.  Any other
        unregistered name raises SchemaNotFound.
        """
        try:
            await self._broker.ask("schema.get", subject=subject)
        except SchemaNotFound:
            try:
                SchemaType.parse(subject)
            except InvalidArgument:
                pass
            else:
                return False
            raise
        return True

    async def delete_topic(self, request: pb.TopicRequest, call: Call) -> pb.TopicResponse:
        """Deletes a topic with all its partitions; one partition alone cannot go."""
        check_topic_name(request.name)
        base, partition = split_partition_name(request.name)
        if partition is not None:
            raise InvalidArgument(
                f"Cannot delete individual partition {request.name}",
                why="keys would go to other partitions",
                hint=f"delete {base}, which deletes all its partitions",
            )
        await self._broker.ask("delete_topic", topic=request.name)
        return pb.TopicResponse(success=True)

    async def unload_topic(self, request: pb.TopicRequest, call: Call) -> pb.TopicResponse:
        check_topic_name(request.name)
        await self._broker.ask("unload_topic", topic=request.name)
        return pb.TopicResponse(success=True)

    async def describe_topic(self, request: pb.DescribeTopicRequest, call: Call) -> pb.DescribeTopicResponse:
        """An unknown topic is described too: no broker, no subscriptions, NonReliable."""
        found = self._find_or_none(request.name)
        if found is None:
            return pb.DescribeTopicResponse(name=request.name, delivery=_NON_RELIABLE)
        described = pb.DescribeTopicResponse(
            name=request.name,
            subscriptions=await self._subscriptions(found),
            broker_id=self._owner(found.record, split_partition_name(found.partitions[0])[1] or 0),
            delivery=_delivery(found.record),
        )
        subject = (await self._broker.ask("schema.topic", topic=found.record.topic))["subject"]
        if subject:
            described.schema_subject = subject
            await self._describe_schema(subject, described)
        return described

    async def _describe_schema(self, subject: str, described: pb.DescribeTopicResponse) -> None:
        try:
            entry = await self._broker.ask("schema.get", subject=subject)
        except SchemaNotFound:
            return  # deleted since; the topic still names it
        described.schema_id = entry["schema_id"]
        described.schema_version = entry["version"]
        described.schema_type = entry["schema_type"]
        described.compatibility_mode = entry["compatibility"].upper()

    # Subscriptions

    async def list_subscriptions(self, request: pb.TopicRequest, call: Call) -> pb.SubscriptionListResponse:
        found = self._find_or_none(request.name)
        return pb.SubscriptionListResponse(
            subscriptions=await self._subscriptions(found) if found is not None else []
        )

    async def unsubscribe(self, request: pb.SubscriptionRequest, call: Call) -> pb.SubscriptionResponse:
        """Deletes a subscription with its cursors, on every partition or, while consumers use it, on none."""
        name = request.subscription
        check_label(name, "subscription")
        found = find(self._broker, request.topic)
        held = [one for one in await self._subscriptions_of(found) if one["subscription"] == name]
        if not held:
            raise no_subscription(name, request.topic)
        connected = [consumer for one in held for consumer in one["consumer_names"]]
        if connected:
            raise _consumers_connected(name, request.topic, f"for example {connected[0]!r}")
        for one in held:
            try:
                await self._broker.ask_partition(one["partition"], "delete_subscription", subscription=name)
            except SubscriptionNotFound:
                continue  # deleted by another call meanwhile, as requested
            except Conflict as error:
                raise _consumers_connected(name, one["partition"], error.what) from None
        if found.partitions == found.record.physical_names:
            # The subscription is deleted in all partitions, so its settings are deleted too.
            await self._broker.ask("forget_subscription", topic=found.record.topic, subscription=name)
        return pb.SubscriptionResponse(success=True)

    async def set_subscription_failure_policy(
        self, request: pb.SetSubscriptionFailurePolicyRequest, call: Call
    ) -> pb.SubscriptionResponse:
        """Works before the subscription exists, and reaches a live one at once."""
        check_label(request.subscription, "subscription")
        check_topic_name(request.topic)
        policy = read_failure_policy(required_message(request, "failure_policy"))
        signed = msgspec.structs.replace(policy, set_by=call.identity.author)
        return await self._set(request, failure=msgspec.structs.asdict(signed))

    async def get_subscription_failure_policy(
        self, request: pb.GetSubscriptionFailurePolicyRequest, call: Call
    ) -> pb.GetSubscriptionFailurePolicyResponse:
        """Return the policy that was set, else the topic's for an existing subscription, else unset."""
        record, settings = await self._settings(request)
        mode = settings["mode"]
        response = pb.GetSubscriptionFailurePolicyResponse(
            subscription_type=subscription_type_of(mode) if mode is not None else 0  # it was never made
        )
        if settings["failure"] is not None:
            policy = msgspec.convert(settings["failure"], FailurePolicy)
        elif mode is not None and record.policy.reliable:
            policy = record.policy.failure
        else:
            return response
        response.failure_policy.CopyFrom(show_failure_policy(policy))
        return response

    async def set_subscription_dispatch_config(
        self, request: pb.SetSubscriptionDispatchConfigRequest, call: Call
    ) -> pb.SubscriptionResponse:
        """Set the limit of unacked messages; it applies to a live subscription at once."""
        check_label(request.subscription, "subscription")
        check_topic_name(request.topic)
        unacked = required_message(request, "dispatch_config").max_unacked_messages
        if not 1 <= unacked <= UNACKED_MAX:
            raise InvalidArgument(f"max_unacked_messages is {unacked}", hint=f"set it to 1 .. {UNACKED_MAX}")
        return await self._set(request, max_unacked=unacked)

    async def get_subscription_dispatch_config(
        self, request: pb.GetSubscriptionDispatchConfigRequest, call: Call
    ) -> pb.GetSubscriptionDispatchConfigResponse:
        """Return the limit of unacked messages, unset if none was set for this subscription."""
        _, settings = await self._settings(request)
        response = pb.GetSubscriptionDispatchConfigResponse()
        if settings["max_unacked"]:
            response.dispatch_config.max_unacked_messages = settings["max_unacked"]
        return response

    # Questions to the broker

    async def _set(self, request: Any, **settings: Any) -> pb.SubscriptionResponse:
        """Settings of a subscription; only a reliable topic has any."""
        record, name = find(self._broker, request.topic).record, request.subscription
        if not record.policy.reliable:
            raise PolicyMismatch(
                f"topic {record.topic} is not reliable",
                why="nothing is redelivered on it",
                hint="use a reliable topic",
            )
        await self._broker.ask("set_subscription_settings", topic=record.topic, subscription=name, **settings)
        return pb.SubscriptionResponse(success=True)

    async def _settings(self, request: Any) -> tuple[TopicRecord, dict[str, Any]]:
        """The topic that a request names, and the settings of the subscription."""
        check_label(request.subscription, "subscription")
        record = find(self._broker, request.topic).record
        settings = await self._broker.ask(
            "subscription_settings", topic=record.topic, subscription=request.subscription
        )
        return record, settings

    def _find_or_none(self, name: str) -> Named | None:
        try:
            return find(self._broker, name)
        except TopicNotFound:
            return None

    async def _subscriptions(self, found: Named) -> list[str]:
        """Names on any of the partitions, each once, in order."""
        return sorted({one["subscription"] for one in await self._subscriptions_of(found)})

    async def _subscriptions_of(self, found: Named) -> list[dict[str, Any]]:
        """Collect the subscriptions that each partition's owner reports."""
        held: list[dict[str, Any]] = []
        names = found.partitions
        for start in range(0, len(names), _ASKED_AT_ONCE):
            asked = names[start : start + _ASKED_AT_ONCE]
            for answer in await asyncio.gather(
                *(whole_list(self._broker.ask_partition, name, "list_subscriptions") for name in asked)
            ):
                held += answer
        return held


def _delivery(record: TopicRecord) -> str:
    return _RELIABLE if record.policy.reliable else _NON_RELIABLE


def _consumers_connected(subscription: str, topic: str, why: str) -> WrongState:
    return WrongState(
        f"subscription {subscription!r} on {topic} has consumers connected", why=why, hint="stop them first"
    )
