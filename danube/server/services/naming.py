"""Names in requests: their form, and the partitions that they mean.

In the gRPC world ``/ns/t`` is a topic or the base name of a partitioned one, and ``/ns/t-part-3`` is a
topic of its own.  Here both lead to one TopicRecord and the physical names that are meant.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from danube.core.metadata.commands import KnownConsumer, TopicRecord
from danube.core.metadata.machine import Metadata
from danube.errors import InvalidArgument, SubscriptionNotFound, TopicNotFound
from danube.ids import check_topic_name
from danube.server.services.calls import BrokerCalls


class Named(NamedTuple):
    """Meaning of a topic name in a request: the topic and the physical names of its partitions."""

    record: TopicRecord
    partitions: list[str]


def current(broker: BrokerCalls) -> Metadata:
    """The metadata with all that was committed before this call, by whichever worker."""
    broker.refresh()
    return broker.metadata


def find(broker: BrokerCalls, name: str) -> Named:
    """The topic behind a base or partition name; raises InvalidName or TopicNotFound."""
    check_topic_name(name)
    metadata = current(broker)
    record = metadata.find_topic(name)
    if record is not None:
        return Named(record, record.physical_names)
    record, _ = metadata.topic_of_partition(name)
    return Named(record, [name])


def find_partition(broker: BrokerCalls, name: str) -> tuple[TopicRecord, int]:
    """Return the topic and partition of a physical name, reading newer metadata if it is unknown."""
    try:
        return broker.metadata.topic_of_partition(name)
    except TopicNotFound:
        return current(broker).topic_of_partition(name)


def find_consumer(broker: BrokerCalls, consumer_id: int) -> KnownConsumer | None:
    """Return the consumer of an id, reading newer metadata if it is unknown; None without one."""
    found = broker.metadata.consumers.find(consumer_id)
    return found if found is not None else current(broker).consumers.find(consumer_id)


def required(text: str, field: str, hint: str) -> str:
    """A text field that must not be empty; raises InvalidArgument."""
    if not text:
        raise InvalidArgument(f"the request has no {field}", hint=hint)
    return text


def required_message(request: Any, field: str) -> Any:
    """A sub-message that must be set; raises InvalidArgument."""
    if not request.HasField(field):
        raise InvalidArgument(
            f"the request has no {field}", hint=f"set {field}, even where all its values are zero"
        )
    return getattr(request, field)


def number_of_broker(text: str) -> int:
    """A broker id as requests spell it: decimal, 64 bits; raises InvalidArgument."""
    required(text, "broker_id", "ListBrokers tells the ids")
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) < 1 << 64):
        raise InvalidArgument(
            f"broker id {text[:40]!r} is not a number", hint="ListBrokers tells the ids, in decimal"
        )
    return int(text)


def no_subscription(subscription: str, topic: str) -> SubscriptionNotFound:
    return SubscriptionNotFound(
        f"subscription {subscription!r} does not exist on {topic}", hint="ListSubscriptions tells the names"
    )
