"""Placing of a gRPC connection: it is passed to the owner of the partition that its first call names.

A client that is about to make a topic looks it up first, or creates a producer.  Its connection goes to the
worker that owns the topic which is made next.

Until that call is complete, only SETTINGS and PING were answered, so the state of the connection follows from
the received bytes.  These bytes are passed with the socket.  The machine of the other worker processes them
again and skips the part of its output that was sent already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from danube.broker.routing.passing import ConnectionPassing
from danube.core.metadata.commands import KnownConsumer
from danube.core.placement.workers import owner_of
from danube.errors import DanubeError
from danube.ipc.passage import UNREAD_BYTES_MAX
from danube.server.grpc.methods import Method

if TYPE_CHECKING:
    from danube.core.http2.streams import Stream

# A call that crosses rings takes about twice the processor time of one that does not, so drawing clients to
# an owner pays until it serves twice as many as others.
SHARES_MAX: Final = 2
# Before any call.  The other worker processes these bytes at once although they came over time, and must not
# count them as a flood.  The most costly frames of so many bytes use a fourth of a peer's allowance
# (core/http2/sending.py).
GREETING_BYTES_MAX: Final = 4 * 1024

_TOPICS: Final[dict[str, Callable[[Any], str]]] = {
    "/danube.ProducerService/CreateProducer": lambda request: request.topic_name,
    "/danube.ProducerService/SendMessage": lambda request: request.msg_id.topic_name,
    "/danube.ConsumerService/Subscribe": lambda request: request.topic_name,
    "/danube.ConsumerService/Ack": lambda request: request.msg_id.topic_name,
    "/danube.Discovery/TopicLookup": lambda request: request.topic,
    "/danube.Discovery/TopicPartitions": lambda request: request.topic,
}
_RECEIVE: Final = "/danube.ConsumerService/ReceiveMessages"


class HeldCall(NamedTuple):
    """A whole call that waits until its worker is known; ``size`` counts against flow control."""

    method: Method
    stream: Stream
    message: bytes
    size: int


class Unplaced:
    """Bytes that a connection has received, and calls it has begun, until its worker is known."""

    __slots__ = ("calls", "deferred", "received", "sent_bytes")

    def __init__(self) -> None:
        self.received = bytearray()
        self.sent_bytes = 0
        self.calls: list[HeldCall] = []
        self.deferred = False  # until the kernel has taken the output

    def decided(self, begun: bool) -> bool:
        """Whether its first call is here (``begun``: a part of it), or too much to go along with a socket."""
        return bool(self.calls) or len(self.received) > (UNREAD_BYTES_MAX if begun else GREETING_BYTES_MAX)


class Placing:
    """Passes connections of the data port to the workers that their first calls are for."""

    def __init__(
        self,
        passing: ConnectionPassing,
        owner_of_partition: Callable[[str], int],
        find_consumer: Callable[[int], KnownConsumer | None],
        workers: int,
    ) -> None:
        """``owner_of_partition`` takes a physical name; it raises DanubeError if no worker here owns it."""
        self._passing = passing
        self._owner_of_partition = owner_of_partition
        self._find_consumer = find_consumer
        self._workers = workers

    def pass_on(self, unplaced: Unplaced, descriptor: int) -> bool:
        """Whether another worker has the socket now; otherwise the connection stays, for good."""
        if not unplaced.calls:
            return False
        owner = self._owner(unplaced.calls[0])
        return owner is not None and self._passing.offer(
            owner, descriptor, unplaced.received, unplaced.sent_bytes
        )

    def _owner(self, call: HeldCall) -> int | None:
        path = call.stream.head.path
        topic_of = _TOPICS.get(path)
        if topic_of is None and path != _RECEIVE:
            return None
        try:
            request = call.method.request_class.FromString(call.message)
            if topic_of is not None:
                return self._owner_of_partition(topic_of(request))
            consumer = self._find_consumer(request.consumer_id)
        except (DecodeError, DanubeError):  # the worker that serves the call reports it
            return None
        return None if consumer is None else owner_of(consumer.topic_id, consumer.partition, self._workers)
