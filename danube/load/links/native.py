"""Producers and consumers over the native protocol: the blocking client, whose sockets gevent patches."""

from __future__ import annotations

from collections.abc import Callable

import danube.sync
from danube.errors import ClosedError, DanubeError, OperationTimeout, Overloaded
from danube.load.collector import Collector, Reader
from danube.load.links.links import Delivery, Place
from danube.load.plan import Plan

CLOSE_TIMEOUT_S = 5.0
PREFETCH_RECORDS = 256


class NativeLink:
    """A connection of its own, as an application has it."""

    def __init__(self, plan: Plan, collector: Collector) -> None:
        self._plan = plan
        self._collector = collector
        self._client: danube.sync.Client | None = None
        self._connections = 1

    def _connect(self) -> danube.sync.Client:
        timeout_s = self._plan.send_timeout_s
        self._client = client = danube.sync.connect(
            self._plan.broker, name="danube-load", timeout=timeout_s, reconnect_timeout=timeout_s
        )
        self._connections = 1
        return client.open()

    def _note_reconnects(self) -> None:
        """The client connects again by itself; the report says how often."""
        if self._client is not None:
            connections = self._client.statistics()["connections"]
            if connections > self._connections:
                self._collector.count("reconnects", connections - self._connections)
                self._connections = connections

    def _disconnect(self) -> None:
        self._note_reconnects()
        client, self._client = self._client, None
        if client is not None:
            try:
                client.close()
            except DanubeError:
                pass  # undelivered records have failed at their own sender


class NativeSender(NativeLink):
    """A producer with many records in flight; the client keeps their order over reconnects."""

    pipelined = True

    def __init__(self, plan: Plan, collector: Collector, place: Place, name: str) -> None:
        super().__init__(plan, collector)
        self._place = place
        self._name = name
        self._producer: danube.sync.Producer | None = None

    def open(self) -> None:
        self._producer = self._connect().producer(self._place.topic, name=self._name).open()

    def begin(self, payload: bytes, key: str) -> Callable[[], str]:
        producer = self._producer
        if producer is None:
            raise ClosedError("the producer is closed")
        while True:
            try:
                sent = producer.send_nowait(payload, key=key)
                break
            except Overloaded:
                producer.ready()
        self._note_reconnects()
        timeout_s = self._plan.send_timeout_s + CLOSE_TIMEOUT_S  # the client's own timeout is first
        return lambda: sent.result(timeout_s).durability

    def close(self) -> None:
        producer, self._producer = self._producer, None
        try:
            if producer is not None:
                producer.close(timeout=CLOSE_TIMEOUT_S)
        except DanubeError:
            pass  # each send tells its own failure
        finally:
            self._disconnect()


class NativeReceiver(NativeLink):
    """A consumer; its records come in the order of the subscription."""

    def __init__(self, plan: Plan, collector: Collector, place: Place, subscription: str, mode: str) -> None:
        super().__init__(plan, collector)
        self._place = place
        self._subscription = subscription
        self._mode = mode
        self._reader = Reader(subscription, mode)
        self._consumer: danube.sync.Consumer | None = None

    def open(self) -> None:
        self._reader = Reader(self._subscription, self._mode)
        self._consumer = (
            self._connect()
            .consumer(
                self._place.topic,
                self._subscription,
                self._mode,
                prefetch_records=PREFETCH_RECORDS,
            )
            .open()
        )

    def receive(self, timeout_s: float) -> Delivery | None:
        consumer = self._consumer
        if consumer is None:
            raise ClosedError("the consumer is closed")
        try:
            message = consumer.receive(timeout_s)
        except OperationTimeout:
            self._note_reconnects()
            return None
        return Delivery(
            message.payload, message.partition, message.redelivery_count > 0, self._reader, message.ack
        )

    def close(self) -> None:
        consumer, self._consumer = self._consumer, None
        try:
            if consumer is not None:
                consumer.close()
        except DanubeError:
            pass  # the connection is gone, and with it the consumer
        finally:
            self._disconnect()
