"""What only the running broker has: how far each partition goes now, and its newest records.

Records are asked for through a subscription that lives as long as one read.  Its name begins with
``danube-spark-``, so one that a killed task has left behind is easy to find and delete.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from danube.client.blocking_client import Batch, Client, Consumer, connect
from danube.core.batch import BODY_CRC_START, pack_header
from danube.errors import DanubeError, OperationTimeout
from danube.limits import MIB

SUBSCRIPTION_PREFIX: Final = "danube-spark-"
_WAIT_S: Final = 30.0
_JOIN_BYTES: Final = 4 * MIB


class PartitionEnds(NamedTuple):
    """Records ``start .. end`` of a partition can be read from the broker."""

    start: int
    end: int


class BrokerTopic(NamedTuple):
    topic: str
    topic_id: int
    partitions: tuple[str, ...]  # physical names


class Tail:
    """One broker, connected when it is first asked; for one thread."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: Client | None = None

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _live(self) -> Client:
        if self._client is None:
            self._client = connect(self._url).open()
        return self._client

    def topics(self) -> list[BrokerTopic]:
        """All topics, by name."""
        found = [
            BrokerTopic(info.topic, info.topic_id, tuple(info.partitions))
            for info in self._live().admin.list_topics()
        ]
        return sorted(found)

    def ends(self, topic: str) -> list[tuple[str, PartitionEnds]]:
        """Physical name and ends of every partition, in order; TopicNotFound where there is no topic."""
        described = self._live().admin.describe_topic(topic)
        return [
            (str(facts["partition"]), PartitionEnds(int(facts["start"]), int(facts["high_watermark"])))
            for facts in described.partitions
        ]

    def read(self, partition: str, start: int, end: int) -> Iterator[NDArray[np.uint8]]:
        """Records ``start .. end`` of a physical partition, as whole stored batches one after the other.

        The first and the last may hold more than was asked for.  OperationTimeout where the broker sends
        nothing for half a minute.
        """
        name = SUBSCRIPTION_PREFIX + uuid.uuid4().hex
        parts: list[bytes] = []
        gathered, at = 0, start
        with self._subscribed(partition, name, start) as batches:
            while at < end:
                batch = next(batches, None)
                if batch is None:
                    raise OperationTimeout(
                        f"{partition} sends nothing from offset {at} on",
                        why=f"it has records up to {end}, and {_WAIT_S:.0f} s have passed",
                        hint="look at the broker with `danube status`",
                    )
                at = max(at, batch[1])
                parts.append(batch[0])
                gathered += len(batch[0])
                if gathered >= _JOIN_BYTES:
                    yield np.frombuffer(b"".join(parts), np.uint8)
                    parts, gathered = [], 0
        if parts:
            yield np.frombuffer(b"".join(parts), np.uint8)

    @contextmanager
    def _subscribed(self, partition: str, name: str, start: int) -> Iterator[Iterator[tuple[bytes, int]]]:
        client = self._live()
        try:
            with client.consumer(partition, name, "exclusive", start=start) as consumer:
                yield _batches(consumer)
        finally:
            try:
                client.admin.delete_subscription(partition, name)
            except DanubeError:
                pass  # a broker that is gone takes the reader with it, not its subscription


def _batches(consumer: Consumer) -> Iterator[tuple[bytes, int]]:
    """Stored batches with the offset behind each; ends when none comes in time."""
    inbox, connection = consumer._box, consumer._connection
    with connection.lock:
        inbox.begin_batches(None)
    batch: Batch | None = None

    def take() -> bool:
        nonlocal batch
        batch, _ = inbox.next_batch(None, 0)
        return batch is not None

    while connection.wait_until(take, _WAIT_S) and batch is not None:
        for part in batch._parts:
            received = part.batch
            whole = pack_header(received.header)[:BODY_CRC_START] + received.body
            yield whole, int(received.offsets[-1]) + 1
        batch.ack()
        batch = None
