"""gRPC clients that look topics up, retry and subscribe again as the official ones do, on blocking sockets.

What they do is their rule book: a call that ends with UNAVAILABLE, DEADLINE_EXCEEDED or RESOURCE_EXHAUSTED
is made again five times, after 0.2 s, 0.4 s and so on, each time where a new lookup leads; then the producer
or consumer is made anew.  A lost connection is UNAVAILABLE.  Any other status ends them, and is an *error*
here.  Their service address stands for several brokers, as a name in DNS does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import h2.exceptions

from tests.e2e.grpc_parts import NOT_FOUND, RELIABLE, SHARED, UNAVAILABLE, DanubeCalls, pb
from tests.grpc_client import Disconnected, GrpcError

RETRYABLE = (4, 8, UNAVAILABLE)
RETRIES = 5
RETRY_S = 0.2
CALL_S = 20.0
# A call on a connection that ended, or that was told to go away.
LOST = (Disconnected, OSError, h2.exceptions.ProtocolError)

_Answer = TypeVar("_Answer")


class Following(threading.Thread):
    """One client of one topic; ``finish`` waits for it."""

    def __init__(self, addresses: Sequence[str], topic: str) -> None:
        super().__init__(daemon=True)
        self.addresses = list(addresses)
        self.topic = topic
        self.error: BaseException | None = None
        self.retries = 0
        self.over = threading.Event()
        self._calls: dict[str, DanubeCalls] = {}

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.error = error
        for calls in self._calls.values():
            calls.close()

    def work(self) -> None:
        raise NotImplementedError

    def finish(self, timeout_s: float) -> None:
        self.over.set()
        self.join(timeout_s)
        assert not self.is_alive(), f"{type(self).__name__} of {self.topic} does not end"

    # -- as official clients do -----------------------------------------------------------------------

    def at(self, address: str) -> DanubeCalls:
        """The connection to an address, made once."""
        calls = self._calls.get(address)
        if calls is None:
            try:
                calls = self._calls[address] = DanubeCalls(address)
            except OSError as error:
                raise Disconnected(str(error)) from None
        return calls

    def call(self, address: str, path: str, request: Any) -> Any:
        """One call; a connection that was lost is not used again."""
        try:
            return self.at(address).unary(path, request)
        except LOST as error:
            with suppress(KeyError):
                self._calls.pop(address).close()
            raise Disconnected(str(error)) from None

    def lookup(self) -> str:
        """Where the topic is served; any broker that answers is asked, and itself where it knows nothing."""
        request = pb.TopicLookupRequest(request_id=1, topic=self.topic)
        for address in self.addresses:
            try:
                answer = self.call(address, "Discovery/TopicLookup", request)
            except Disconnected:
                continue
            except GrpcError as error:
                if error.code in (*RETRYABLE, NOT_FOUND):
                    continue
                raise
            return str(answer.connect_url).partition("://")[2]
        return self.addresses[0]

    def again(self, attempt: Callable[[str], _Answer]) -> _Answer | None:
        """Try at the topic's place until it works; None when so many retries did not help."""
        for number in range(RETRIES + 1):
            try:
                return attempt(self.lookup())
            except Disconnected:
                pass
            except GrpcError as error:
                if error.code not in RETRYABLE:
                    raise
            self.retries += 1
            time.sleep(RETRY_S * (number + 1))
        return None


class FollowingProducer(Following):
    """Sends 0, 1, 2, ..., each once it was told that the one before is stored."""

    def __init__(self, addresses: Sequence[str], topic: str, pause_s: float = 0.005) -> None:
        super().__init__(addresses, topic)
        self.sent = 0
        self._pause_s = pause_s

    def work(self) -> None:
        while not self.over.is_set():
            created = self.again(self._create)
            if created is not None:
                self._send(*created)

    def _create(self, address: str) -> tuple[str, int]:
        request = pb.ProducerRequest(
            request_id=1, producer_name="official", topic_name=self.topic, dispatch_strategy=RELIABLE
        )
        return address, self.call(address, "ProducerService/CreateProducer", request).producer_id

    def _send(self, address: str, producer_id: int) -> None:
        """Until it is over, or the producer has to be made anew."""
        failures = 0
        while not self.over.is_set():
            place = pb.MsgID(producer_id=producer_id, topic_name=self.topic, broker_addr=address)
            message = pb.StreamMessage(
                request_id=self.sent + 1, msg_id=place, payload=b"%d" % self.sent,
                publish_time=1, producer_name="official",
            )  # fmt: skip
            try:
                self.call(address, "ProducerService/SendMessage", message)
            except (GrpcError, Disconnected) as error:
                if isinstance(error, GrpcError) and error.code not in RETRYABLE:
                    raise
                self.retries += 1
                failures += 1
                if failures > RETRIES or isinstance(error, Disconnected):
                    return
                time.sleep(RETRY_S * failures)
                address = self.lookup()
                continue
            failures = 0
            self.sent += 1
            time.sleep(self._pause_s)


class FollowingConsumer(Following):
    """Subscribes, reads and acks; ``received`` are payloads in the order in which they came."""

    def __init__(self, addresses: Sequence[str], topic: str) -> None:
        super().__init__(addresses, topic)
        self.received: list[int] = []

    def work(self) -> None:
        while not self.over.is_set():
            subscribed = self.again(self._subscribe)
            if subscribed is not None:
                self._receive(*subscribed)

    def _subscribe(self, address: str) -> tuple[str, int]:
        request = pb.ConsumerRequest(
            request_id=1, topic_name=self.topic, consumer_name="official", subscription="official",
            subscription_type=SHARED,
        )  # fmt: skip
        return address, self.call(address, "ConsumerService/Subscribe", request).consumer_id

    def _receive(self, address: str, consumer_id: int) -> None:
        """Read until the stream cannot be had any more; then subscribe again."""
        failures = 0
        while not self.over.is_set() and failures <= RETRIES:
            opened = False
            try:
                stream = self.at(address).start(
                    "/danube.ConsumerService/ReceiveMessages",
                    pb.ReceiveRequest(request_id=1, consumer_id=consumer_id),
                    pb.StreamMessage,
                )
                while not self.over.is_set():
                    with suppress(TimeoutError):
                        message = stream.next(0.2)
                        opened, failures = True, 0
                        self.received.append(int(message.payload))
                        self._ack(address, message)
            except LOST:
                with suppress(KeyError):
                    self._calls.pop(address).close()
                return
            except GrpcError as error:
                if not opened and error.code not in (*RETRYABLE, 0):
                    raise
            self.retries += 1
            failures += 1
            time.sleep(RETRY_S * failures)

    def _ack(self, address: str, message: Any) -> None:
        """At the broker that sent it, else where the topic is now."""
        request = pb.AckRequest(request_id=1, msg_id=message.msg_id, subscription_name="official")
        deadline = time.monotonic() + CALL_S
        while time.monotonic() < deadline:
            try:
                self.call(address, "ConsumerService/Ack", request)
                return
            except Disconnected:
                address = self.lookup()
            except GrpcError as error:
                if error.code not in RETRYABLE:
                    raise
                address = self.lookup()
            self.retries += 1
            time.sleep(RETRY_S)
        raise TimeoutError(f"offset {message.msg_id.topic_offset} cannot be acked")
