"""Consumers that clients know by a number, and the numbers themselves.

A number must mean the same consumer on every worker and after a restart.  So it is a hash of topic,
partition, subscription and name.  The metadata maps each number to its consumer.  At most ``known_max`` are
kept; then the oldest one is forgotten, and its client subscribes again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from danube.core.batch.checksum import key_hash
from danube.core.dispatch.grants import Mode
from danube.core.metadata.commands import KnowConsumer, KnownConsumer
from danube.errors import Conflict, InvalidArgument
from danube.ids import check_label
from danube.limits import KEY_FILTER_BYTES_MAX, KEY_FILTERS_MAX, KNOWN_CONSUMERS_MAX

__all__ = ["KnownConsumer", "KnownConsumers", "consumer_identity", "producer_identity"]

ID_MAX: Final = (1 << 63) - 1
_PLACE: Final = struct.Struct("<4sQIQ")

Identity = tuple[int, int, str, str]


def consumer_identity(topic_id: int, partition: int, subscription: str, name: str, salt: int = 0) -> int:
    """The number of a consumer, 1 .. 2**63 - 1; another ``salt`` gives another number."""
    return _number(_PLACE.pack(b"cons", topic_id, partition, salt), subscription, name)


def producer_identity(topic_id: int, partition: int, name: str) -> int:
    """The number of a producer, 1 .. 2**63 - 1."""
    return _number(_PLACE.pack(b"prod", topic_id, partition, 0), name)


def _number(place: bytes, *names: str) -> int:
    """XXH3-64 of the place and of each name after its length, without the highest bit; 0 becomes 1."""
    parts = [place]
    for name in names:
        encoded = name.encode("utf-8", "surrogatepass")
        parts += (len(encoded).to_bytes(4, "little"), encoded)
    return (key_hash(b"".join(parts)) & ID_MAX) or 1


class KnownConsumers:
    """Known consumers in the order in which they were kept."""

    __slots__ = ("_by_id", "_by_topic", "_id_by_identity")

    def __init__(self) -> None:
        self._by_id: dict[int, KnownConsumer] = {}
        self._id_by_identity: dict[Identity, int] = {}
        self._by_topic: dict[int, dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[KnownConsumer]:
        return iter(self._by_id.values())

    def find(self, consumer_id: int) -> KnownConsumer | None:
        return self._by_id.get(consumer_id)

    def of(self, topic_id: int, partition: int, subscription: str, name: str) -> KnownConsumer | None:
        """The consumer that is this, if it is known."""
        consumer_id = self._id_by_identity.get((topic_id, partition, subscription, name))
        return None if consumer_id is None else self._by_id[consumer_id]

    def free_identity(self, topic_id: int, partition: int, subscription: str, name: str) -> int:
        """The number for a consumer: the one it has, else the first that no other consumer has."""
        known = self.of(topic_id, partition, subscription, name)
        if known is not None:
            return known.consumer_id
        for salt in range(len(self._by_id) + 1):
            consumer_id = consumer_identity(topic_id, partition, subscription, name, salt)
            if consumer_id not in self._by_id:
                return consumer_id
        raise Conflict("no number is free for this consumer", hint="use another consumer name")

    # Check and apply

    def check(self, command: KnowConsumer) -> bool:
        """Whether keeping it would change anything; raises a CallerError if it is not allowed."""
        consumer = command.consumer
        check_label(consumer.subscription, "subscription")
        check_label(consumer.name, "consumer")
        Mode.parse(consumer.mode)
        filters = consumer.filters
        if len(filters) > KEY_FILTERS_MAX or any(len(one) > KEY_FILTER_BYTES_MAX for one in filters):
            raise InvalidArgument(
                f"a consumer has at most {KEY_FILTERS_MAX} key filters of {KEY_FILTER_BYTES_MAX} bytes"
            )
        if not 1 <= command.known_max <= KNOWN_CONSUMERS_MAX:
            raise InvalidArgument(f"known_max is 1 .. {KNOWN_CONSUMERS_MAX}")
        self.refuse(command)
        return not self.unneeded(command)

    def unneeded(self, command: KnowConsumer) -> bool:
        return self._by_id.get(command.consumer.consumer_id) == command.consumer

    def refuse(self, command: KnowConsumer) -> None:
        """Raise where the number is none, stands for another consumer, or the consumer has another."""
        consumer = command.consumer
        if not 1 <= consumer.consumer_id <= ID_MAX:
            raise InvalidArgument("a consumer's number is 1 .. 2**63 - 1", why=f"not {consumer.consumer_id}")
        known = self._by_id.get(consumer.consumer_id)
        number = self._id_by_identity.get(_identity(consumer), consumer.consumer_id)
        if (known is not None and _identity(known) != _identity(consumer)) or number != consumer.consumer_id:
            raise Conflict(
                f"consumer number {consumer.consumer_id} does not fit",
                why="it stands for another consumer, or this one has another number",
                hint="take the number that free_identity gives",
            )

    def apply(self, command: KnowConsumer) -> None:
        """Keep the consumer as the youngest one; raises where ``refuse`` does."""
        if self.unneeded(command):
            return
        self.refuse(command)
        consumer = command.consumer
        self.forget(consumer.consumer_id)
        while len(self._by_id) >= max(command.known_max, 1):
            self.forget(next(iter(self._by_id)))
        self._put(consumer)

    def _put(self, consumer: KnownConsumer) -> None:
        self._by_id[consumer.consumer_id] = consumer
        self._id_by_identity[_identity(consumer)] = consumer.consumer_id
        self._by_topic.setdefault(consumer.topic_id, {})[consumer.consumer_id] = None

    def forget(self, consumer_id: int) -> None:
        """Forget one consumer, if it is known."""
        consumer = self._by_id.pop(consumer_id, None)
        if consumer is None:
            return
        del self._id_by_identity[_identity(consumer)]
        of_topic = self._by_topic[consumer.topic_id]
        del of_topic[consumer_id]
        if not of_topic:
            del self._by_topic[consumer.topic_id]

    def ids_of(self, topic_id: int, subscription: str | None = None, partition: int = -1) -> list[int]:
        """Numbers of a topic's consumers, of one subscription and partition where they are given."""
        known = [self._by_id[consumer_id] for consumer_id in self._by_topic.get(topic_id, ())]
        return [
            consumer.consumer_id
            for consumer in known
            if subscription in (None, consumer.subscription) and partition in (-1, consumer.partition)
        ]

    # Copies

    def copy(self) -> KnownConsumers:
        other = KnownConsumers()
        other._by_id, other._id_by_identity = dict(self._by_id), dict(self._id_by_identity)
        other._by_topic = {topic_id: dict(ids) for topic_id, ids in self._by_topic.items()}
        return other

    def load(self, consumers: list[KnownConsumer]) -> None:
        """Load the consumers of a snapshot, the oldest first."""
        for consumer in consumers:
            self._put(consumer)


def _identity(consumer: KnownConsumer) -> Identity:
    return consumer.topic_id, consumer.partition, consumer.subscription, consumer.name
