"""Records that a real broker stored, with a journal of what its producers were told."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import danube.sync
from danube.core.batch.checksum import content_hash
from tests.broker_process import BrokerProcess

TOPIC, PARTED = "/default/orders", "/default/parted"
Record = tuple[bytes, bytes | None, dict[str, str]]


@dataclass
class Journal:
    """Payload, key and attributes of every acknowledged record, by partition and offset."""

    records: dict[tuple[int, int], Record] = field(default_factory=dict)

    def note(self, ack: Any, records: Sequence[Record]) -> None:
        for number, record in enumerate(records):
            self.records[ack.partition, ack.offset + number] = record

    def between(self, partition: int, start: int, end: int) -> int:
        return sum(1 for at, offset in self.records if at == partition and start <= offset < end)

    def digest(self) -> str:
        return digest((*place, *record) for place, record in self.records.items())


def digest(rows: Iterable[Any]) -> str:
    """One hash over partition, offset, payload, key and attributes of rows, in the order of offsets."""
    lines = [
        repr((partition, offset, bytes(payload), key and bytes(key), sorted((attributes or {}).items())))
        for partition, offset, payload, key, attributes in sorted(rows, key=lambda row: row[:2])
    ]
    return content_hash("\n".join(lines).encode()).hex()


def digest_of_frame(frame: Any) -> str:
    return digest(frame.select("partition", "offset", "payload", "key", "attributes").collect())


def digest_of_batches(batches: Iterable[Any]) -> str:
    """The same hash over Arrow record batches with all columns."""
    return digest(
        (row["partition"], row["offset"], row["payload"], row["key"], dict(row["attributes"] or {}))
        for batch in batches
        for row in batch.to_pylist()
    )


def publish(
    broker: BrokerProcess, journal: Journal, source: random.Random, *, rounds: int, topic: str = TOPIC
) -> None:
    """Send single records and batches of all shapes, and journal what is acknowledged.

    Batches need a topic with one partition, so that their records are in one row.
    """
    with danube.sync.connect(broker.address) as client:
        single = client.admin.topic(topic).partition_count == 1
        for number in range(rounds):
            compression = source.choice(["none", "none", "lz4", "zstd"])
            with client.producer(topic, f"shop-{number % 3}", compression=compression) as producer:
                for record in records_of(source, 4):
                    journal.note(producer.send(*record), [record])
                if not single:
                    continue
                batch = records_of(source, source.choice([3, 60, 700]))
                payloads, keys, attributes = (list(column) for column in zip(*batch, strict=True))
                done = 0
                for ack in producer.send_many(payloads, keys, attributes):
                    journal.note(ack, batch[done : done + ack.record_count])
                    done += ack.record_count


def records_of(source: random.Random, count: int) -> list[Record]:
    """Records with and without keys and attributes, empty and compressible payloads."""
    made: list[Record] = []
    for _ in range(count):
        payload = source.randbytes(source.choice([0, 1, 40, 900])) * source.choice([1, 3])
        key = source.choice([None, b"", b"ada", source.randbytes(6)])
        made.append(
            (payload, key, source.choice([{}, {}, {"land": "österreich", "n": str(source.random())}]))
        )
    return made
