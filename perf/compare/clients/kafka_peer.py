"""confluent-kafka: asynchronous produce with delivery reports; a group reader that commits as it goes."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

from confluent_kafka import Consumer, KafkaError, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from perf.compare.clients.roles import Peer, main

POLL_EVERY = 1_000
CONSUME = 10_000
TIMEOUT_S = 60.0
PRODUCER = {
    "acks": "all",  # of the one replica
    "linger.ms": 5,
    "batch.size": 1 << 20,
    "message.max.bytes": 4 << 20,
    "queue.buffering.max.messages": 200_000,
    "queue.buffering.max.kbytes": 256 << 10,
}
CONSUMER = {
    "auto.offset.reset": "earliest",
    "enable.auto.commit": True,
    "fetch.min.bytes": 1,
    "fetch.max.bytes": 64 << 20,
    "max.partition.fetch.bytes": 8 << 20,
    "queued.max.messages.kbytes": 128 << 10,
}


class Kafka(Peer):
    """The client's own threads batch and fetch; its calls block, which is all that these processes do."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.server = {"bootstrap.servers": options["server"], "log_level": 3}
        self.failure: KafkaError | None = None
        self.producer: Producer | None = None

    def _producer(self, **more: Any) -> Producer:
        if self.producer is None:
            self.producer = Producer({**self.server, **PRODUCER, **more})
            self.opened.callback(self.producer.flush, TIMEOUT_S)
        return self.producer

    def _admin(self) -> AdminClient:
        self.admin = AdminClient(self.server)  # kept: its calls end when it is collected
        return self.admin

    async def create(self) -> None:
        topic = NewTopic(self.topic, num_partitions=1, replication_factor=1, config=self.options["config"])
        (made,) = self._admin().create_topics([topic], operation_timeout=TIMEOUT_S).values()
        made.result(TIMEOUT_S)

    async def delete(self) -> None:
        (gone,) = self._admin().delete_topics([self.topic], operation_timeout=TIMEOUT_S).values()
        gone.result(TIMEOUT_S)

    def _reported(self, error: KafkaError | None, message: Any) -> None:
        self.failure = self.failure or error

    async def publish(self, payloads: list[bytes], count: int) -> None:
        producer, reported = self._producer(), self._reported
        for number, payload in enumerate(islice(cycle(payloads), count)):
            while True:
                try:
                    producer.produce(self.topic, payload, on_delivery=reported)
                    break
                except BufferError:  # full: wait for delivery reports
                    producer.poll(0.1)
            if number % POLL_EVERY == 0:
                producer.poll(0)
        left = producer.flush(TIMEOUT_S)
        if left or self.failure:
            raise SystemExit(f"{left} records were not delivered: {self.failure}")

    async def send(self, payload: bytes) -> None:
        producer = self._producer(**{"linger.ms": 0})
        producer.produce(self.topic, payload, on_delivery=self._reported)
        if producer.flush(TIMEOUT_S) or self.failure:
            raise SystemExit(f"a record was not delivered: {self.failure}")

    async def subscribe(self, name: str) -> None:
        self.reader = Consumer({**self.server, **CONSUMER, "group.id": name})
        self.opened.callback(self.reader.close)
        self.reader.subscribe([self.topic])
        self.ahead: list[Any] = []  # what comes while joining the group, which takes its time
        while not self.ahead and not self.reader.assignment():
            self.ahead = self.reader.consume(1, timeout=0.1)

    async def receive(self) -> int:
        messages = [*self.ahead, *self.reader.consume(CONSUME, timeout=0.05)]
        self.ahead = []
        for message in messages:
            if message.error() is not None:
                raise SystemExit(f"reading failed: {message.error()}")
        return len(messages)


if __name__ == "__main__":
    main(Kafka)
