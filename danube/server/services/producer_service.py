"""danube.ProducerService: CreateProducer.  (SendMessage is :mod:`danube.server.messages.publishing`.)"""

from __future__ import annotations

from typing import Any

from danube.core.metadata.commands import TopicRecord
from danube.core.metadata.known_consumers import producer_identity
from danube.core.metadata.quotas import check_auto_create
from danube.errors import (
    Conflict,
    PolicyMismatch,
    SchemaNotFound,
    SchemaSubjectMismatch,
    TopicExists,
    TopicNotFound,
)
from danube.ids import check_label, check_topic_name, split_partition_name
from danube.server.messages.convert import reliable_of
from danube.server.messages.publishing import Publishing
from danube.server.proto.DanubeApi_pb2 import ProducerAccessMode, ProducerRequest, ProducerResponse
from danube.server.services.calls import BrokerCalls, Call
from danube.server.services.naming import current, find_partition


class ProducerService:
    """Creates producers, and the topics that they name where that is allowed."""

    def __init__(self, broker: BrokerCalls, publishing: Publishing) -> None:
        self._broker = broker
        self._publishing = publishing

    async def create_producer(self, request: ProducerRequest, call: Call) -> ProducerResponse:
        """Create the producer of this name; the id is the same at each time and broker."""
        name = request.topic_name
        check_topic_name(name)
        check_label(request.producer_name, "producer")
        reliable = reliable_of(request.dispatch_strategy)
        subject = request.schema_ref.subject if request.HasField("schema_ref") else ""
        if subject:
            await self._check_subject(subject)
        record, partition = await self._topic(name, reliable)
        _check_mode(record, reliable)
        if subject:
            await self._attach_subject(record, subject)
        exclusive = request.producer_access_mode == ProducerAccessMode.Exclusive
        await self._publishing.create(name, request.producer_name, exclusive, call.connection)
        return ProducerResponse(
            request_id=request.request_id,
            producer_id=producer_identity(record.topic_id, partition, request.producer_name),
            producer_name=request.producer_name,
        )

    # -- the topic --------------------------------------------------------------------------------

    async def _topic(self, name: str, reliable: bool) -> tuple[TopicRecord, int]:
        """Return the topic of this physical name; create it if it is missing and creation is allowed."""
        try:
            return find_partition(self._broker, name)
        except TopicNotFound:
            self._refuse_creation(name)
        base, index = split_partition_name(name)
        try:
            if index is None:
                await self._create(name, 0, reliable)
            elif current(self._broker).find_topic(base) is None:
                await self._create(base, index + 1, reliable)
            else:
                await self._broker.ask("add_partitions", topic=base, partitions=index + 1)
        except Conflict:
            pass  # made by another call meanwhile, perhaps with fewer partitions
        if index is not None and current(self._broker).topic(base).partitions <= index:
            await self._broker.ask("add_partitions", topic=base, partitions=index + 1)
        return current(self._broker).topic_of_partition(name)

    def _refuse_creation(self, name: str) -> None:
        """Raise where a missing topic may not be made: names that conflict, or creation turned off."""
        metadata = self._broker.metadata
        base, index = split_partition_name(name)
        existing = metadata.find_topic(base)
        if existing is not None and (index is None or existing.partitions == 0):
            raise TopicExists(
                f"{name} conflicts with topic {base}",
                why=f"it has {existing.partitions} partitions",
                hint="use its partitions, which TopicPartitions tells" if existing.partitions else "",
            )
        if not self._broker.config.topics.auto_create:
            raise TopicNotFound(
                f"topic {name} does not exist", why="topics.auto_create is off", hint="create the topic first"
            )
        check_auto_create(metadata, name)

    async def _create(self, topic: str, partitions: int, reliable: bool) -> None:
        policy: dict[str, Any] = {"reliable": reliable}
        await self._broker.ask("create_topic", topic=topic, partitions=partitions, policy=policy, ensure=True)

    # -- its schema -------------------------------------------------------------------------------

    async def _check_subject(self, subject: str) -> None:
        try:
            await self._broker.ask("schema.get", subject=subject)
        except SchemaNotFound as error:
            raise SchemaSubjectMismatch(
                f"schema subject {subject!r} not found", why=str(error), hint="register the schema first"
            ) from None

    async def _attach_subject(self, record: TopicRecord, subject: str) -> None:
        current = record.schema.subject if record.schema is not None else ""
        if current == subject:
            return
        if current:
            raise SchemaSubjectMismatch(
                f"{record.topic} follows schema subject {current!r}",
                why=f"the producer asked for {subject!r}",
                hint="use the topic's subject, or another topic",
            )
        await self._broker.ask("schema.configure_topic", topic=record.topic, subject=subject)


def _check_mode(record: TopicRecord, reliable: bool) -> None:
    if record.policy.reliable != reliable:
        raise PolicyMismatch(
            f"{record.topic} is {'reliable' if record.policy.reliable else 'non-reliable'}",
            why=f"the producer asked for {'reliable' if reliable else 'non-reliable'} dispatch",
            hint="use the topic's dispatch strategy, or another topic",
        )
