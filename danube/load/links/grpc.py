"""Producers and consumers over the Danube gRPC API, as official clients use it.

A producer has one call under way: calls that run side by side have no order.  A call whose answer was
lost is made again, as official clients do, so its record may be stored twice; it is one record here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from danube.client.machine.tls import SCHEME, TlsOptions
from danube.client.records.tokens import token_source
from danube.core.batch.columns import key_partitions
from danube.errors import ClosedError, DanubeError, InvalidArgument
from danube.host.clock import wall_us
from danube.host.local_socket import loopback
from danube.load.collector import Collector, Reader
from danube.load.links.grpc_client import AGAIN, GrpcAnswer, GrpcCalls, GrpcStream
from danube.load.links.inbox import Inbox
from danube.load.links.links import Delivery, Place
from danube.load.plan import Plan
from danube.server.proto import DanubeApi_pb2 as pb

CALL_TIMEOUT_S: Final = 10.0
PAUSE_S: Final = 0.2
QUEUE_RECORDS: Final = 64  # that were received and not handed out; beyond that HTTP/2's windows close
ACKS_MAX: Final = 64
CLOSE_TIMEOUT_S: Final = 5.0
_TYPES: Final = {
    "exclusive": pb.ConsumerRequest.Exclusive,
    "shared": pb.ConsumerRequest.Shared,
    "failover": pb.ConsumerRequest.Failover,
    "key_shared": pb.ConsumerRequest.KeyShared,
}


class _User:
    """A connection with numbered requests."""

    _what = "consumer"

    def __init__(self, plan: Plan, collector: Collector, place: Place, name: str) -> None:
        self.collector = collector
        self._plan = plan
        self._place = place
        self._name = name
        self._calls: GrpcCalls | None = None
        self._requests = 0

    def open(self) -> None:
        """Connect, with TLS where the native address asks for it; the token is read once for each user."""
        secured, address = self._plan.broker.startswith(SCHEME), self._plan.grpc_broker
        token = token_source()()
        if token and not secured and not loopback(address.rpartition(":")[0].strip("[]")):
            raise InvalidArgument(
                "the token is not sent over a connection that others can read",
                why=f"{address} is on another host, and the connection has no TLS",
                hint="give --broker an address that begins with danube+tls://",
            )
        self._calls = GrpcCalls(address, TlsOptions.from_environment() if secured else None, token)

    def _call(self, method: str, request: Any, reply: Any) -> Any:
        if self._calls is None:
            raise ClosedError(f"the {self._what} is closed")
        return self._calls.call(method, request, reply, CALL_TIMEOUT_S)

    def _next_request(self) -> int:
        self._requests += 1
        return self._requests

    def close(self) -> None:
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.close()


class GrpcSender(_User):
    """A producer of every partition, one record at a time."""

    pipelined = False
    _what = "producer"

    def __init__(self, plan: Plan, collector: Collector, place: Place, name: str) -> None:
        super().__init__(plan, collector, place, name)
        self._ids: list[int] = []  # of the producer of each partition; empty until they are asked for
        self._place_by_key: dict[str, int] = {}

    def open(self) -> None:
        super().open()
        self._create()

    def _create(self) -> None:
        """Make the producers, or find them again by their name."""
        strategy = pb.Reliable if self._place.reliable else pb.NonReliable
        self._ids = [
            self._call(
                "/danube.ProducerService/CreateProducer",
                pb.ProducerRequest(
                    request_id=self._next_request(),
                    producer_name=self._name,
                    topic_name=partition,
                    producer_access_mode=pb.Shared,
                    dispatch_strategy=strategy,
                ),
                pb.ProducerResponse,
            ).producer_id
            for partition in self._place.partitions
        ]

    def begin(self, payload: bytes, key: str) -> Callable[[], str]:
        return partial(self._send, payload, key)

    def _send(self, payload: bytes, key: str) -> str:
        deadline = time.monotonic() + self._plan.send_timeout_s
        index = self._index_of(key)
        while True:
            try:
                if not self._ids:
                    self._create()
                self._send_once(index, payload, key)
                return self._place.durability  # the API does not say it; it is the topic's
            except AGAIN:
                if time.monotonic() > deadline:
                    raise
                self.collector.count("retries")
                self._ids = []
                time.sleep(PAUSE_S)

    def _index_of(self, key: str) -> int:
        """The partition of a key, as the native client chooses it."""
        index = self._place_by_key.get(key)
        if index is None:
            index = int(key_partitions([key.encode()], len(self._place.partitions))[0])
            self._place_by_key[key] = index
        return index

    def _send_once(self, index: int, payload: bytes, key: str) -> None:
        message = pb.StreamMessage(
            request_id=self._next_request(),
            msg_id=pb.MsgID(
                producer_id=self._ids[index],
                topic_name=self._place.partitions[index],
                broker_addr=f"http://{self._plan.grpc_broker}",
            ),
            payload=payload,
            publish_time=wall_us() // 1_000,
            producer_name=self._name,
            routing_key=key,
        )
        self._call("/danube.ProducerService/SendMessage", message, pb.MessageResponse)


class PartitionReader:
    """Reads one partition in a greenlet of its own, and subscribes again when the broker went away."""

    def __init__(self, receiver: GrpcReceiver, index: int) -> None:
        self._receiver = receiver
        self._index = index
        self._stream: GrpcStream | None = None
        self._first: tuple[GrpcStream, Reader] | None = self._subscribe()
        self._thread = threading.Thread(target=self._run, name="danube-load-reader", daemon=True)
        self._thread.start()

    def _subscribe(self) -> tuple[GrpcStream, Reader]:
        self._stream = stream = self._receiver.subscribe(self._index)
        return stream, self._receiver.reader()

    def _subscribe_again(self) -> tuple[GrpcStream, Reader]:
        found = self._subscribe()
        self._receiver.collector.count("reconnects")
        return found

    def _run(self) -> None:
        inbox = self._receiver.inbox
        while not inbox.closed.is_set():
            try:
                stream, reader = self._first or self._subscribe_again()
                self._first = None
                for message in stream:
                    if not inbox.put(self._delivery(message, reader)):
                        return
            except AGAIN:
                pass  # the broker went away; after a pause it is asked again
            except DanubeError as error:
                inbox.put(error)
                return
            inbox.closed.wait(PAUSE_S)

    def _delivery(self, message: Any, reader: Reader) -> Delivery:
        # The API does not tell a redelivery from a first delivery.
        ack = partial(self._receiver.ack, message)
        return Delivery(message.payload, self._index, False, reader, ack)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
        self._thread.join(CLOSE_TIMEOUT_S)


class GrpcReceiver(_User):
    """A consumer at every partition; acknowledges each record with a call of its own, many at a time."""

    def __init__(
        self, plan: Plan, collector: Collector, place: Place, subscription: str, mode: str, name: str
    ) -> None:
        super().__init__(plan, collector, place, name)
        self.inbox = Inbox(QUEUE_RECORDS)
        self._subscription = subscription
        self._mode = mode
        self._readers: list[PartitionReader] = []
        self._acks: deque[GrpcAnswer] = deque()

    def open(self) -> None:
        super().open()
        for index in range(len(self._place.partitions)):
            self._readers.append(PartitionReader(self, index))

    def reader(self) -> Reader:
        return Reader(self._subscription, self._mode)

    def subscribe(self, index: int) -> GrpcStream:
        """Subscribe at one partition and open its stream."""
        request = pb.ConsumerRequest(
            request_id=self._next_request(),
            topic_name=self._place.partitions[index],
            consumer_name=self._name,
            subscription=self._subscription,
            subscription_type=_TYPES[self._mode],
        )
        made = self._call("/danube.ConsumerService/Subscribe", request, pb.ConsumerResponse)
        if self._calls is None:
            raise ClosedError("the consumer is closed")
        receive = pb.ReceiveRequest(request_id=self._next_request(), consumer_id=made.consumer_id)
        return self._calls.stream("/danube.ConsumerService/ReceiveMessages", receive, pb.StreamMessage)

    def receive(self, timeout_s: float) -> Delivery | None:
        received: Delivery | None = self.inbox.get(timeout_s)
        return received

    def ack(self, message: Any) -> None:
        """Acknowledge, without waiting for the answer; at most ACKS_MAX have none yet."""
        request = pb.AckRequest(
            request_id=message.request_id, msg_id=message.msg_id, subscription_name=self._subscription
        )
        if self._calls is None:
            return
        self._acks.append(
            self._calls.begin("/danube.ConsumerService/Ack", request, pb.AckResponse, CALL_TIMEOUT_S)
        )
        while self._acks and (len(self._acks) > ACKS_MAX or self._acks[0].done):
            self._settle(self._acks.popleft())

    def _settle(self, answer: GrpcAnswer) -> None:
        """Await an ack; if the broker went away, count a retry, as it delivers the message again."""
        try:
            answer.result()
        except AGAIN:
            self.collector.count("retries")

    def close(self) -> None:
        self.inbox.close()
        readers, self._readers = self._readers, []
        calls, self._calls = self._calls, None
        for reader in readers:
            reader.close()
        acks, self._acks = self._acks, deque()
        for answer in acks:  # each has a timeout
            try:
                self._settle(answer)
            except DanubeError:
                pass  # it is closed; records without an ack are delivered to another consumer
        if calls is not None:
            calls.close()
