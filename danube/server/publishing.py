"""SendMessage: calls that arrive in one turn of the loop become one batch for each producer.

A *target* is one producer of one partition as this worker publishes for it; its messages wait in
*groups* that become batches of the log.  All groups of a turn are handed to the partition's owner
before the owner writes, so one call never costs one write.  A call is answered when the batch that
holds its message is acknowledged at the topic's level.

Producer ids are derived from the topic and the producer's name, so they are valid on every worker and
after every restart; a message names both, and its target is found or opened again from that alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from google.protobuf.message import DecodeError

from danube.broker.router import Router
from danube.core import wire
from danube.core.known_consumers import producer_identity
from danube.core.wire import Frame, Kind, OpenProducer
from danube.errors import (
    CallerError,
    DanubeError,
    Draining,
    InvalidArgument,
    LimitExceeded,
    OwnerMoved,
    RecordTooLarge,
)
from danube.ids import check_label
from danube.server.broker_session import BrokerSession
from danube.server.proto.DanubeApi_pb2 import StreamMessage
from danube.server.publishes import encode_messages

if TYPE_CHECKING:
    from danube.core.http2_streams import Stream

GROUP_RECORDS_MAX = 16_384
GROUP_BYTES_MAX = 4 * 1024 * 1024
ATTEMPTS_MAX = 3
TARGETS_MAX = 50_000
_VARINT_7 = tuple(bytes((0, 0, 0, 0, 2, 8, number)) for number in range(128))


class Answering(Protocol):
    """A connection, as far as the answer of a call is concerned."""

    def answer(self, stream: Stream, message: bytes, size: int = 0) -> None: ...
    def answer_error(self, stream: Stream, error: BaseException) -> None: ...
    def consumed(self, stream: Stream, size: int) -> None: ...


_Envelope = tuple[str, int | None, int | None]  # origin, id and version of the schema
# One call that waits for its answer; the number is what it counts against flow control.
_Sent = tuple[Answering, "Stream", StreamMessage, int]


class _Group:
    """Messages of one producer that become one batch."""

    __slots__ = ("attempts", "envelope", "sent", "size_bytes")

    def __init__(self, envelope: _Envelope) -> None:
        self.envelope = envelope
        self.sent: list[_Sent] = []
        self.size_bytes = 0
        self.attempts = 0

    def like(self, sent: list[_Sent]) -> _Group:
        """A group with the same envelope and other messages."""
        other = _Group(self.envelope)
        other.sent = sent
        other.attempts = self.attempts
        return other


class Target:
    """One producer of one partition, as this worker publishes for it; a handle's owner."""

    __slots__ = (
        "_publishing", "exclusive", "groups", "handle", "in_flight", "name", "opening", "partition",
        "producer_id", "record_bytes_max", "users", "version", "waiters",
    )  # fmt: skip

    def __init__(self, publishing: Publishing, partition: str, name: str) -> None:
        self._publishing = publishing
        self.partition = partition
        self.name = name
        self.producer_id = 0
        self.record_bytes_max = 0
        self.version = -1  # of the metadata that the two above come from
        self.handle = 0  # 0: not open at the owner
        self.opening = False
        self.exclusive = False
        self.groups: deque[_Group] = deque()
        self.in_flight: dict[int, _Group] = {}
        self.waiters: list[asyncio.Future[None]] = []
        self.users: set[Any] = set()  # connections that created this producer

    @property
    def idle(self) -> bool:
        """Whether no connection created it and nothing of it waits for an answer."""
        return not (self.users or self.groups or self.in_flight or self.waiters)

    def delivered(self, batches: bytes | memoryview) -> None:
        """A producer gets no deliveries."""

    def handle_closed(self, error: DanubeError) -> None:
        self._publishing.closed(self, error)


class Publishing:
    """The publishing half of a gRPC door; one for each worker."""

    def __init__(self, session: BrokerSession, router: Router, metadata_version: Callable[[], int]) -> None:
        self.draining = False
        self._session = session
        self._router = router
        self._metadata_version = metadata_version
        self._targets: dict[tuple[str, str], Target] = {}
        self._by_id: dict[int, Target] = {}
        self._by_user: dict[Any, set[Target]] = {}  # connection -> what it created
        self._dirty: dict[Target, None] = {}

    @property
    def targets(self) -> Mapping[tuple[str, str], Target]:
        return self._targets

    # -- producers --------------------------------------------------------------------------------

    async def create(self, partition: str, name: str, exclusive: bool, user: Any) -> Target:
        """Open a producer at the partition's owner, for a connection that creates it."""
        check_label(name, "producer")
        if self.draining:
            raise Draining("the broker is stopping", hint="connect again")
        target = self._target(partition, name)
        target.users.add(user)
        self._by_user.setdefault(user, set()).add(target)
        if exclusive and not target.exclusive and target.handle:
            self._close(target)
        target.exclusive |= exclusive
        if not target.handle:
            future = asyncio.get_running_loop().create_future()
            target.waiters.append(future)
            self._open(target)
            await future
        return target

    def partition_of(self, producer_id: int) -> str:
        """Of a producer with this id that was created or used on this worker; "" for others."""
        target = self._by_id.get(producer_id)
        return "" if target is None else target.partition

    def _target(self, partition: str, name: str) -> Target:
        target = self._targets.get((partition, name))
        if target is None:
            target = Target(self, partition, name)
            self._refresh(target)
            if len(self._targets) >= TARGETS_MAX:
                self._forget_idle()
            self._targets[partition, name] = target
        elif target.version != self._metadata_version():
            self._refresh(target)
        return target

    def _refresh(self, target: Target) -> None:
        record, index = self._router.find_topic(target.partition)
        target.version = self._metadata_version()
        target.record_bytes_max = record.policy.max_record_bytes
        producer_id = producer_identity(record.topic_id, index, target.name)
        if target.producer_id not in (0, producer_id):  # the topic was deleted and made again
            self._close(target)
            self._by_id.pop(target.producer_id, None)
        target.producer_id = producer_id
        self._by_id[producer_id] = target

    def _forget_idle(self) -> None:
        idle = [target for target in self._targets.values() if target.idle]
        for target in idle[: TARGETS_MAX // 10]:
            self._forget(target)

    def connection_lost(self, user: Any) -> None:
        """The connection that created producers is gone; those that nobody else uses are closed."""
        for target in self._by_user.pop(user, ()):
            target.users.discard(user)
            if target.idle:
                self._forget(target)

    def _forget(self, target: Target) -> None:
        del self._targets[target.partition, target.name]
        if self._by_id.get(target.producer_id) is target:
            del self._by_id[target.producer_id]
        self._close(target)

    def _open(self, target: Target) -> None:
        if target.opening:
            return
        target.opening = True
        handle = self._session.open_handle(target)

        def opened(frame: Frame, data: bytes | memoryview) -> None:
            target.opening = False
            waiters, target.waiters = target.waiters, []
            if frame.kind == Kind.ERROR:
                self._session.drop_handle(handle)
                error = wire.decode_error(data[frame.start : frame.end])
                self._fail_all(target, error)
                for future in waiters:
                    if not future.done():
                        future.set_exception(error.with_traceback(None))
                return
            target.handle = handle
            if target.groups:
                self._offer(target)
            for future in waiters:
                if not future.done():
                    future.set_result(None)

        body = OpenProducer(target.partition, target.name, exclusive=target.exclusive)
        self._session.request(Kind.OPEN_PRODUCER, body, handle, opened)

    def _close(self, target: Target) -> None:
        """Close the handle; what is in flight is still answered."""
        handle, target.handle = target.handle, 0
        if handle:
            self._session.drop_handle(handle)
            self._session.request(Kind.CLOSE_PRODUCER, None, handle, lambda frame, data: None)

    def closed(self, target: Target, error: DanubeError) -> None:
        """The owner closed the handle: what was in flight may or may not be stored."""
        target.handle = 0
        groups, target.in_flight = target.in_flight, {}
        for group in groups.values():
            self._refuse(group, error)
        if target.groups:
            self._offer(target)

    # -- messages ---------------------------------------------------------------------------------

    def send_message(self, connection: Answering, stream: Stream, data: bytes, size: int) -> None:
        """Take one SendMessage, to be answered later; ``size`` is given back to flow control then.

        Raises what refuses it; then nothing of it stays here.
        """
        try:
            message = StreamMessage.FromString(data)
        except DecodeError:
            raise InvalidArgument("the message is not a danube.StreamMessage") from None
        place = message.msg_id
        target = self._targets.get((place.topic_name, message.producer_name))
        if (
            target is None
            or target.producer_id != place.producer_id
            or (not target.groups and target.version != self._metadata_version())  # once for each group
        ):
            target = self._find(message)
        if len(data) > target.record_bytes_max and len(message.payload) > target.record_bytes_max:
            _refuse_large(len(message.payload), target)
        if self.draining:
            raise Draining("the broker is stopping", hint="send it again")
        envelope = (
            place.broker_addr,
            message.schema_id if message.HasField("schema_id") else None,
            message.schema_version if message.HasField("schema_version") else None,
        )
        group = target.groups[-1] if target.groups else None
        if (
            group is None
            or group.envelope != envelope
            or len(group.sent) >= GROUP_RECORDS_MAX
            or group.size_bytes >= GROUP_BYTES_MAX
        ):
            group = _Group(envelope)
            target.groups.append(group)
            self._dirty[target] = None
        group.sent.append((connection, stream, message, size))
        group.size_bytes += len(data)

    def _find(self, message: StreamMessage) -> Target:
        """The target of a message that names none of the open ones, or another id than it has."""
        if not message.HasField("msg_id"):
            raise InvalidArgument(
                "msg_id is missing",
                hint="set its producer_id and topic_name from what CreateProducer answered",
            )
        check_label(message.producer_name, "producer")
        target = self._target(message.msg_id.topic_name, message.producer_name)
        if target.producer_id != message.msg_id.producer_id:
            raise OwnerMoved(
                f"producer {message.msg_id.producer_id} is not one of {message.msg_id.topic_name}",
                why="the topic was made anew, or the id belongs to another producer_name",
                hint="create the producer again",
            )
        return target

    def hand_over(self) -> None:
        """Send every group of this turn to its owner."""
        while self._dirty:
            dirty, self._dirty = self._dirty, {}
            for target in dirty:
                if target.handle:
                    self._publish(target)
                elif target.groups:
                    self._open(target)

    def _publish(self, target: Target) -> None:
        groups = target.groups
        while groups and target.handle:
            group = groups.popleft()
            origin, schema_id, schema_version = group.envelope
            try:
                batch = encode_messages(
                    [message for _, _, message, _ in group.sent], producer_name=target.name, origin=origin,
                    schema_id=schema_id, schema_version=schema_version,
                )  # fmt: skip
            except LimitExceeded as error:  # to a client that is a limit which may have room again later
                self._failed(target, group, RecordTooLarge(error.what, why=error.why, **error.facts))
                continue
            except DanubeError as error:
                self._failed(target, group, error)
                continue
            correlation = self._session.expect(self._answer_to(target, group))
            target.in_flight[correlation] = group
            self._session.publish(target.handle, correlation, batch)

    def _answer_to(self, target: Target, group: _Group) -> Callable[[Frame, bytes | memoryview], None]:
        def answered(frame: Frame, data: bytes | memoryview) -> None:
            if target.in_flight.pop(frame.correlation, None) is None:
                return
            if frame.kind == Kind.ERROR:
                self._failed(target, group, wire.decode_error(data[frame.start : frame.end]))
                return
            for connection, stream, message, size in group.sent:
                connection.answer(stream, response(message.request_id), size)

        return answered

    # -- refusals ---------------------------------------------------------------------------------

    def _failed(self, target: Target, group: _Group, error: DanubeError) -> None:
        """A batch was refused and nothing of it is stored: others must not suffer for one record."""
        group.attempts += 1
        if isinstance(error, OwnerMoved) and group.attempts < ATTEMPTS_MAX:
            # The owner restarted and does not know the handle: nothing was taken, so it can be sent again.
            self._close(target)
            target.groups.appendleft(group)
            self._offer(target)
        elif isinstance(error, CallerError) and len(group.sent) > 1:
            self._send_apart(target, group, error)
        else:
            self._refuse(group, error)

    def _send_apart(self, target: Target, group: _Group, error: DanubeError) -> None:
        """Answer the record that the error names and send the others again; unnamed: each for itself."""
        index = error.facts.get("index")
        if isinstance(index, int) and 0 <= index < len(group.sent):
            self._refuse(group.like([group.sent[index]]), error)
            again = [group.like(group.sent[:index] + group.sent[index + 1 :])]
        else:
            again = [group.like([sent]) for sent in group.sent]
        target.groups.extendleft(reversed(again))
        self._offer(target)

    def _offer(self, target: Target) -> None:
        """What waits goes out with this turn or, when that has handed over already, with the next."""
        self._dirty[target] = None
        self._session.schedule_turn()

    def _refuse(self, group: _Group, error: DanubeError) -> None:
        for connection, stream, _, size in group.sent:
            connection.consumed(stream, size)
            connection.answer_error(stream, error)

    def _fail_all(self, target: Target, error: DanubeError) -> None:
        groups, target.groups = target.groups, deque()
        for group in groups:
            self._refuse(group, error)


def _refuse_large(size: int, target: Target) -> None:
    raise RecordTooLarge(
        f"payload has {size} bytes",
        why=f"the limit of {target.partition} is {target.record_bytes_max} bytes",
        hint="send smaller messages or raise the topic's max_record_bytes",
    )


def response(request_id: int) -> bytes:
    """A length-prefixed message whose field 1 is the echoed request id: MessageResponse and its like."""
    if request_id < 128:
        return _VARINT_7[request_id] if request_id else b"\0\0\0\0\0"
    varint = bytearray()
    while request_id > 127:
        varint.append(request_id & 127 | 128)
        request_id >>= 7
    varint.append(request_id)
    return b"\0\0\0\0" + bytes((len(varint) + 1, 8)) + varint
