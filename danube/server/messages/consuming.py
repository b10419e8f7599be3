"""Subscribe, ReceiveMessages, Ack and Nack: gRPC consumers on this worker.

A consumer id is derived from topic, subscription and consumer name and kept in the metadata, so it is valid
on every worker and after every restart.  A worker holds a handle for it at the owner of the partition, bound
to one connection.  When the connection or the stream ends, the handle is closed and its records are delivered
again.  Records are sent as fast as the client's windows open: the owner gets credit only for records that the
stream has taken.  Clients take all messages and keep them, so on shared subscriptions the owner limits the
credit by the acks.

Acks of one turn are settled together, one request for each subscription, for any consumer of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from danube.core.batch.columns import BatchView
from danube.core.batch.format import HEADER_BYTES, read_header
from danube.core.http2.headers import RESPONSE_HEAD
from danube.core.metadata.known_consumers import KnownConsumer, producer_identity
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind, Subscribe
from danube.core.security.principals import ANONYMOUS, Identity
from danube.errors import (
    DanubeError,
    Draining,
    Fenced,
    NotAllowed,
    NotAuthenticated,
    OwnerMoved,
    ProtocolError,
)
from danube.host import telemetry
from danube.server.messages.session import BrokerSession
from danube.server.messages.stream_messages import framed_messages

if TYPE_CHECKING:
    from danube.core.http2.streams import Stream

_log = telemetry.events("grpc")
CREDIT_RECORDS = 1_000
CREDIT_BYTES = 4 * 1024 * 1024
CONNECTION_CREDIT_BYTES = 64 * 1024 * 1024  # of the consumers of one connection together
UNKNOWN_DELAY_S = 0.2  # some clients ask again at once, for ever


@lru_cache(maxsize=4096)
def _identity(topic_id: int, partition: int, name: bytes) -> int:
    """The id of a producer that is not idempotent, by its name as a batch has it."""
    try:
        return producer_identity(topic_id, partition, str(name, "utf-8"))
    except UnicodeDecodeError as error:
        raise ProtocolError("batch holds text that is not UTF-8", why=str(error)) from None


class Streaming(Protocol):
    """A connection, as far as a stream of deliveries is concerned."""

    @property
    def congested(self) -> bool: ...
    def send_head(self, stream: Stream, block: bytes) -> None: ...
    def send_data(self, stream: Stream, data: bytes) -> None: ...
    def identity_of(self, stream: Stream) -> Identity: ...
    def end(self, stream: Stream, error: DanubeError | None) -> None: ...


class Judge(Protocol):
    """The judge of callers (:class:`danube.server.grpc.guard.GrpcGuard`)."""

    def consumes(self, identity: Identity, topic: str, subscription: str) -> None:
        """Raise NotAllowed or NotAuthenticated."""

    def revoked(self, identity: Identity) -> bool: ...


class Place(NamedTuple):
    """Physical name of a consumer's partition, and whether that keeps a log."""

    name: str
    reliable: bool


class GrpcConsumer:
    """One consumer that this worker serves; the owner of its handle."""

    __slots__ = (
        "_consuming",
        "caller",
        "connection",
        "consumer_id",
        "credit_bytes",
        "credit_bytes_max",
        "credit_records",
        "handle",
        "identity",
        "place",
        "stream",
    )

    def __init__(
        self,
        consuming: Consuming,
        identity: KnownConsumer,
        connection: Streaming,
        place: Place,
        caller: Identity = ANONYMOUS,
    ) -> None:
        self._consuming = consuming
        self.caller = caller  # who has subscribed, or receives now
        self.place = place
        self.identity = identity
        self.consumer_id = identity.consumer_id
        self.connection = connection
        self.handle = 0
        self.stream: Stream | None = None
        self.credit_records = 0  # delivered, and not yet given back as credit
        self.credit_bytes = 0
        self.credit_bytes_max = CREDIT_BYTES

    def delivered(self, batches: bytes | memoryview) -> None:
        """Send delivered batches, which are whole and lie back to back."""
        stream = self.stream
        if stream is None:
            return
        try:
            self._send(stream, batches)
        except DanubeError as error:  # a batch that cannot be told in this API: the policy decides about it
            self._consuming.undeliverable(self, error)
        else:
            self.give_credit()

    def _send(self, stream: Stream, batches: bytes | memoryview) -> None:
        identity = self.identity
        position = 0
        while position < len(batches):
            header = read_header(batches, position)
            batch = BatchView(batches, header, position)
            position += header.size
            self.credit_records += header.record_count
            self.credit_bytes += header.size
            producer_id = header.producer_id
            if not producer_id:
                name = bytes(batch.data[HEADER_BYTES : HEADER_BYTES + header.name_size])
                producer_id = _identity(identity.topic_id, identity.partition, name)
            data = framed_messages(batch, self.place.name, producer_id, stored=self.place.reliable)
            self.connection.send_data(stream, data)

    def give_credit(self) -> None:
        """Give credit back once the client took half of it; called again when its windows open."""
        stream = self.stream
        few = 2 * self.credit_records < CREDIT_RECORDS and 2 * self.credit_bytes < self.credit_bytes_max
        if few or stream is None or stream.queued_bytes or self.connection.congested:
            return
        self._consuming.credit(self, self.credit_records, self.credit_bytes)
        self.credit_records = self.credit_bytes = 0

    def handle_closed(self, error: DanubeError) -> None:
        """The owner closed the handle: the consumer was taken over, or its partition moved."""
        self._consuming.closed(self, error)


class Consuming:
    """The consuming half of a gRPC door; one for each worker."""

    def __init__(self, session: BrokerSession, known: Known, judge: Judge | None = None) -> None:
        """``judge``: None where access is not controlled."""
        self.draining = False
        self._judge = judge
        self._session = session
        self._known = known
        self._by_id: dict[int, GrpcConsumer] = {}
        self._by_connection: dict[Any, set[GrpcConsumer]] = {}

    # -- consumers --------------------------------------------------------------------------------

    async def subscribe(
        self, identity: KnownConsumer, connection: Streaming, caller: Identity = ANONYMOUS
    ) -> GrpcConsumer:
        """Join a subscription as this consumer; one of the same name here or elsewhere is taken over."""
        if self.draining:
            raise Draining("the broker is stopping", hint="connect again")
        older = self._by_id.get(identity.consumer_id)
        if older is not None:
            self._forget(older)
            self._end(older, None)
        place = self._known.place(identity)
        consumer = GrpcConsumer(self, identity, connection, place, caller)
        consumer.handle = self._session.open_handle(consumer)
        self._by_id[identity.consumer_id] = consumer
        self._by_connection.setdefault(connection, set()).add(consumer)
        body = Subscribe(
            partition=place.name,
            subscription=identity.subscription,
            consumer=identity.name,
            mode=identity.mode,
            filters=list(identity.filters),
            topic_id=identity.topic_id,
            paced=True,
        )
        try:
            await self._session.call(Kind.SUBSCRIBE, body, consumer.handle)
        except BaseException:
            self._forget(consumer)
            raise
        if not consumer.handle:  # closed in the turn in which it joined: no other frame would tell
            raise OwnerMoved("the consumer was closed while it joined", hint="subscribe again")
        return consumer

    def find(self, consumer_id: int) -> GrpcConsumer | None:
        return self._by_id.get(consumer_id)

    def of_connection(self, connection: Any) -> list[GrpcConsumer]:
        return list(self._by_connection.get(connection, ()))

    async def receive(self, consumer_id: int, connection: Streaming, stream: Stream) -> None:
        """Start the stream of a consumer.

        Its older stream ends, and the records of that one are redelivered.
        """
        consumer, caller = self._by_id.get(consumer_id), ANONYMOUS
        if self._judge is not None:
            caller = connection.identity_of(stream)
            if not self._may_receive(self._judge, consumer_id, caller):
                await asyncio.sleep(UNKNOWN_DELAY_S)
                raise _unknown(consumer_id)
        if consumer is None or consumer.connection is not connection or consumer.stream is not None:
            identity = consumer.identity if consumer is not None else self._known.find(consumer_id)
            if identity is None:
                await asyncio.sleep(UNKNOWN_DELAY_S)
                raise _unknown(consumer_id)
            consumer = await self._subscribe_again(identity, connection, caller)
        consumer.caller = caller
        if stream.local_closed:  # the client went away meanwhile
            self.leave(consumer)
            return
        consumer.stream = stream
        stream.context = consumer
        connection.send_head(stream, RESPONSE_HEAD)
        share = CONNECTION_CREDIT_BYTES // len(self._by_connection[connection])
        consumer.credit_bytes_max = min(CREDIT_BYTES, share)
        self.credit(consumer, CREDIT_RECORDS, consumer.credit_bytes_max)

    async def _subscribe_again(
        self, identity: KnownConsumer, connection: Streaming, caller: Identity
    ) -> GrpcConsumer:
        try:
            return await self.subscribe(identity, connection, caller)
        except OwnerMoved:
            await asyncio.sleep(UNKNOWN_DELAY_S)
            raise

    def _may_receive(self, judge: Judge, consumer_id: int, caller: Identity) -> bool:
        """Return whether the caller may consume the subscription of this id, if there is one."""
        held = self._by_id.get(consumer_id)
        identity = held.identity if held is not None else self._known.find(consumer_id)
        if identity is None:
            return True  # it is not known to anybody
        try:
            judge.consumes(caller, self._known.place(identity).name, identity.subscription)
        except (NotAllowed, NotAuthenticated):
            return False
        return True

    def judge_again(self, connection: Any) -> int:
        """End the consumers of a connection whose callers may not consume any more; how many there were."""
        consumers, judge = self.of_connection(connection), self._judge
        if judge is None:
            return 0
        for consumer in consumers:
            try:
                judge.consumes(consumer.caller, consumer.place.name, consumer.identity.subscription)
                if judge.revoked(consumer.caller):
                    raise NotAuthenticated("the credential is not accepted any more", hint="get a new one")
            except (NotAllowed, NotAuthenticated) as error:
                self._forget(consumer)
                self._end(consumer, error.with_traceback(None))
        return len(consumers)

    def end_expired(self, ended: Callable[[Identity], bool]) -> None:
        """End the streams of expired credentials, in a way that has their clients call again."""
        for consumer in [one for one in self._by_id.values() if one.caller.expires_us]:
            if ended(consumer.caller):
                self._forget(consumer)
                self._end(
                    consumer, OwnerMoved("the credential has expired", hint="call again with a new one")
                )

    def credit(self, consumer: GrpcConsumer, records: int, size_bytes: int) -> None:
        if consumer.handle:
            self._session.send_frame(bytearray(wire.credit_frame(consumer.handle, records, size_bytes)))

    def leave(self, consumer: GrpcConsumer) -> None:
        """Close the handle after the client dropped the stream or the connection.

        Its records are redelivered.
        """
        consumer.stream = None
        self._forget(consumer)

    def drop(self, consumer: GrpcConsumer) -> None:
        """Undo a Subscribe whose consumer could not be kept, or whose client has given it up."""
        if consumer.handle:
            self._forget(consumer)

    def connection_lost(self, connection: Any) -> None:
        for consumer in self.of_connection(connection):
            self.leave(consumer)

    def closed(self, consumer: GrpcConsumer, error: DanubeError) -> None:
        """End the stream after the owner closed the handle.

        There is no error if another stream took over; otherwise the reason is sent.
        """
        consumer.handle = 0
        self._forget(consumer)
        self._end(consumer, None if isinstance(error, Fenced) else error)

    def undeliverable(self, consumer: GrpcConsumer, error: DanubeError) -> None:
        """End a stream that a delivery cannot be put on."""
        _log.error("delivery failed", consumer=consumer.identity.name, error=str(error))
        self._end(consumer, error)
        self._forget(consumer)

    def drain(self) -> None:
        """End every stream, so that its client looks the topic up again."""
        self.draining = True
        for consumer in list(self._by_id.values()):
            self._end(consumer, Draining("the broker is stopping", hint="receive again in a moment"))
            self.leave(consumer)

    def _forget(self, consumer: GrpcConsumer) -> None:
        """Remove the consumer here and at the owner; its id stays known."""
        if self._by_id.get(consumer.consumer_id) is consumer:
            del self._by_id[consumer.consumer_id]
        others = self._by_connection.get(consumer.connection)
        if others is not None:
            others.discard(consumer)
            if not others:
                del self._by_connection[consumer.connection]
        handle, consumer.handle = consumer.handle, 0
        if handle:
            self._session.drop_handle(handle)
            self._session.request(Kind.CLOSE_CONSUMER, None, handle, lambda frame, data: None)

    def _end(self, consumer: GrpcConsumer, error: DanubeError | None) -> None:
        stream, consumer.stream = consumer.stream, None
        if stream is not None and not stream.local_closed:
            consumer.connection.end(stream, error)


def _unknown(consumer_id: int) -> OwnerMoved:
    return OwnerMoved(
        f"consumer {consumer_id} is not known",
        why="its topic or subscription was deleted, or it was never made",
        hint="subscribe again",
    )


class Known(Protocol):
    """Store of the identities of consumers (the metadata)."""

    def find(self, consumer_id: int) -> KnownConsumer | None: ...
    def place(self, identity: KnownConsumer) -> Place: ...
