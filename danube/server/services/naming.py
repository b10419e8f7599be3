"""Names in requests: their form, and the partitions that they mean.

In the gRPC world ``/ns/t`` is a topic or the base name of a partitioned one, and ``/ns/t-part-3`` is a
topic of its own.  Here both lead to one TopicRecord and the physical names that are meant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from danube.core.metadata.commands import TopicRecord
from danube.core.metadata.machine import Metadata
from danube.errors import InvalidArgument, SubscriptionNotFound
from danube.ids import check_label, check_topic_name
from danube.server.services.ports import BrokerCalls


@dataclass(frozen=True, slots=True)
class Named:
    """Meaning of a topic name in a request: the topic and the physical names of its partitions."""

    record: TopicRecord
    partitions: list[str]


def current(broker: BrokerCalls) -> Metadata:
    """The metadata with all that was committed before this call, by whichever worker."""
    broker.refresh()
    return broker.metadata


def find(broker: BrokerCalls, name: str) -> Named:
    """The topic behind a base or partition name; raises InvalidName or TopicNotFound."""
    metadata = current(broker)
    record = metadata.find_topic(name)
    if record is not None:
        return Named(record, record.physical_names)
    check_topic_name(name)
    record, _ = metadata.topic_of_partition(name)
    return Named(record, [name])


def check_subscription(name: str) -> str:
    """The subscription's name as it is; raises InvalidName."""
    check_label(name, "subscription")
    return name


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
