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
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from danube.broker.partition.limits import record_bytes_max
from danube.broker.routing.router import Router
from danube.core.batch.payloads import larger_record_hint
from danube.core.metadata.known_consumers import producer_identity
from danube.core.metadata.quotas import namespace_of
from danube.core.protocol import native as wire
from danube.core.protocol.native import Frame, Kind, OpenProducer
from danube.core.security.authority import EVERYBODY, Authority, topic_resource
from danube.core.security.principals import Identity
from danube.errors import (
    CallerError,
    DanubeError,
    Draining,
    InvalidArgument,
    LimitExceeded,
    OwnerMoved,
    RecordTooLarge,
    TopicNotFound,
)
from danube.ids import check_label, split_partition_name
from danube.server.messages.answers import Answering, Call, answer_calls, refuse_calls
from danube.server.messages.sent_messages import (
    FEW,
    TURN_MESSAGES_MAX,
    Envelope,
    Lot,
    Message,
    MessageColumns,
    encode_messages,
    envelope_of,
    own_fields_of,
    parsed,
    read_together,
)
from danube.server.messages.session import BrokerSession
from danube.server.proto.DanubeApi_pb2 import MsgID, StreamMessage

if TYPE_CHECKING:
    from danube.cluster.log.local_log import LocalLog
    from danube.core.http2.streams import Stream

GROUP_RECORDS_MAX = TURN_MESSAGES_MAX
GROUP_BYTES_MAX = 4 * 1024 * 1024
ATTEMPTS_MAX = 3
TARGETS_MAX = 50_000
ALLOWED_MAX = 1_000  # credentials that a target remembers
_REQUEST_ID: Callable[[Message], int] = itemgetter(2)


class _Group:
    """Messages of one producer that become one batch."""

    __slots__ = ("attempts", "calls", "envelope", "messages", "size_bytes")

    def __init__(
        self,
        envelope: Envelope,
        calls: list[Call],
        messages: list[Message] | MessageColumns,
        size_bytes: int = 0,
    ) -> None:
        self.envelope = envelope
        self.calls = calls
        self.messages = messages
        self.size_bytes = size_bytes
        self.attempts = 0

    @property
    def request_ids(self) -> list[int]:
        if isinstance(self.messages, MessageColumns):
            request_ids: list[int] = self.messages.request_ids.tolist()
            return request_ids
        return list(map(_REQUEST_ID, self.messages))

    def split(self, ranges: Iterable[tuple[int, int]]) -> list[_Group]:
        """Ranges of its messages as groups of their own."""
        messages = self.messages
        if isinstance(messages, MessageColumns):
            messages = list(messages.one_by_one())
        others = [_Group(self.envelope, self.calls[start:end], messages[start:end]) for start, end in ranges]
        for other in others:
            other.attempts = self.attempts
        return others


class Target:
    """One producer of one partition, as this worker publishes for it; a handle's owner."""

    __slots__ = (
        "_publishing", "allowed", "exclusive", "groups", "handle", "in_flight", "name", "opening",
        "partition", "producer_id", "record_bytes_max", "topic_id", "users", "version", "waiters",
    )  # fmt: skip

    def __init__(self, publishing: Publishing, partition: str, name: str) -> None:
        self._publishing = publishing
        self.partition = partition
        self.name = name
        self.producer_id = 0
        self.topic_id = 0
        self.record_bytes_max = 0
        self.version = -1  # version of the metadata that the two above come from
        self.handle = 0  # 0: not open at the owner
        self.opening = False
        self.exclusive = False
        self.groups: deque[_Group] = deque()
        self.in_flight: dict[int, _Group] = {}
        self.waiters: list[asyncio.Future[None]] = []
        self.users: set[Any] = set()  # connections that created this producer
        self.allowed: dict[bytes, int] = {}  # token_key of who may publish, by what version of the rights

    @property
    def idle(self) -> bool:
        """Return whether no connection has created the producer and none of its records waits."""
        return not (self.users or self.groups or self.in_flight or self.waiters)

    def delivered(self, batches: bytes | memoryview) -> None:
        """A producer gets no deliveries."""

    def handle_closed(self, error: DanubeError) -> None:
        self._publishing.closed(self, error)


class Publishing:
    """The publishing half of a gRPC door; one for each worker."""

    def __init__(
        self, session: BrokerSession, router: Router, metadata: LocalLog, authority: Authority = EVERYBODY
    ) -> None:
        self.draining = False
        self._authority = authority if authority.enforced else None
        self._session = session
        self._router = router
        self._metadata = metadata
        self._targets: dict[tuple[str, str], Target] = {}
        self._by_id: dict[int, Target] = {}
        self._by_user: dict[Any, set[Target]] = {}  # connection -> its producers
        self.dirty: dict[Target, None] = {}
        self.calls: list[Call] = []  # of this turn, not read yet
        self._datas: list[bytes] = []  # and their messages

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
        known = user in target.users
        target.users.add(user)
        self._by_user.setdefault(user, set()).add(target)
        if exclusive and not target.exclusive and target.handle:
            self._close(target)
        target.exclusive |= exclusive
        if not target.handle:
            future = asyncio.get_running_loop().create_future()
            target.waiters.append(future)
            self._open(target)
            try:
                await future
            except asyncio.CancelledError:  # its client has given it up: it may never be used
                if not known:
                    self._leave(target, user)
                raise
        return target

    def _leave(self, target: Target, user: Any) -> None:
        """Drop this connection's use of the producer; without other users it is closed once it is open."""
        target.users.discard(user)
        used = self._by_user.get(user)
        if used is not None:
            used.discard(target)
            if not used:
                del self._by_user[user]

    def partition_of(self, producer_id: int) -> str:
        """Return the partition of a producer id created or used on this worker; "" for others."""
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
        elif target.version != self._metadata.state.version:
            self._refresh(target)
        return target

    def _refresh(self, target: Target) -> None:
        record, index = self._router.find_topic(target.partition)
        target.version = self._metadata.state.version
        target.topic_id = record.topic_id
        limits = self._metadata.state.quotas.effective(namespace_of(record.topic))
        target.record_bytes_max = record_bytes_max(record, limits)
        producer_id = producer_identity(record.topic_id, index, target.name)
        if target.producer_id not in (0, producer_id):  # the topic was deleted and made again
            self._close(target)
            self._fail_all(target, TopicNotFound(f"the topic of {target.partition} was deleted"))
            self._by_id.pop(target.producer_id, None)
        target.producer_id = producer_id
        self._by_id[producer_id] = target

    def _forget_idle(self) -> None:
        idle = [target for target in self._targets.values() if target.idle]
        for target in idle[: TARGETS_MAX // 10]:
            self._forget(target)

    def connection_lost(self, user: Any) -> None:
        """Close the producers of a lost connection that no other connection uses."""
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
            if target.idle:
                self._forget(target)

        body = OpenProducer(
            target.partition, target.name, exclusive=target.exclusive, topic_id=target.topic_id
        )
        self._session.request(Kind.OPEN_PRODUCER, body, handle, opened)

    def _close(self, target: Target) -> None:
        """Close the handle; messages in flight are still answered."""
        handle, target.handle = target.handle, 0
        if handle:
            self._session.drop_handle(handle)
            self._session.request(Kind.CLOSE_PRODUCER, None, handle, lambda frame, data: None)

    def closed(self, target: Target, error: DanubeError) -> None:
        """Fail messages in flight after the owner closed the handle; they may or may not be stored."""
        target.handle = 0
        groups, target.in_flight = target.in_flight, {}
        for group in groups.values():
            refuse_calls(group.calls, error)
        if target.groups:
            self._offer(target)

    # -- messages ---------------------------------------------------------------------------------

    def send_message(self, connection: Answering, stream: Stream, data: bytes, size: int) -> None:
        """Take one SendMessage, to be read in this turn and answered later.

        ``size`` is given back to flow control then.  Raises Draining.
        """
        if self.draining:
            raise Draining("the broker is stopping", hint="send it again")
        self.calls.append((connection, stream, size))
        self._datas.append(data)

    def _read(self) -> None:
        """Put the messages of this turn into groups."""
        calls, self.calls = self.calls, []
        datas, self._datas = self._datas, []
        if self._authority is None:
            self._read_of(None, calls, datas)
            return
        for identity, (of, some) in _by_caller(calls, datas).items():
            self._read_of(identity, of, some)

    def _read_of(self, caller: Identity | None, calls: list[Call], datas: list[bytes]) -> None:
        """Put messages of one caller into groups."""
        lots = read_together(datas) if len(datas) >= FEW else None
        if lots is None:
            for call, data in zip(calls, datas, strict=True):
                self._take(caller, call, data)
            return
        for lot in lots:
            self._take_lot(caller, lot, calls, datas)

    def _take_lot(self, caller: Identity | None, lot: Lot, calls: list[Call], datas: list[bytes]) -> None:
        columns, indices = lot.columns, lot.indices
        chosen = calls if len(indices) == len(calls) else [calls[index] for index in indices]
        try:
            target = self._target_of(caller, lot.first, lot.first.msg_id)
        except Exception as error:  # even an unforeseen error: the turn is other clients' too
            refuse_calls(chosen, error)
            return
        if columns.largest > target.record_bytes_max:
            for index, call in zip(indices, chosen, strict=True):
                self._take(caller, call, datas[index])
            return
        target.groups.append(
            _Group(envelope_of(lot.first, lot.first.msg_id), chosen, columns, columns.payloads.total)
        )
        self.dirty[target] = None

    def _take(self, caller: Identity | None, call: Call, data: bytes) -> None:
        """Take one message by itself: refuse it, or add it to a group."""
        try:
            message = parsed(data)
            place = message.msg_id
            target = self._target_of(caller, message, place)
            own = own_fields_of(message)
            if len(own[0]) > target.record_bytes_max:
                _refuse_large(len(own[0]), target)
        except Exception as error:
            refuse_calls([call], error)
            return
        envelope = envelope_of(message, place)
        group = target.groups[-1] if target.groups else None
        if (
            group is None
            or group.envelope != envelope
            or isinstance(group.messages, MessageColumns)
            or len(group.calls) >= GROUP_RECORDS_MAX
            or group.size_bytes >= GROUP_BYTES_MAX
        ):
            target.groups.append(_Group(envelope, [call], [own], len(data)))
            self.dirty[target] = None
            return
        group.calls.append(call)
        group.messages.append(own)
        group.size_bytes += len(data)

    def _target_of(self, caller: Identity | None, message: StreamMessage, place: MsgID) -> Target:
        target = self._targets.get((place.topic_name, message.producer_name))
        if caller is not None:
            self._demand(caller, target, place.topic_name)
        if (
            target is None
            or target.producer_id != place.producer_id
            or (not target.groups and target.version != self._metadata.state.version)  # once for each group
        ):
            return self._find(message)
        return target

    def _demand(self, caller: Identity, target: Target | None, partition: str) -> None:
        """Raise NotAllowed unless the caller may publish there, by the rights of now."""
        authority = self._authority
        if authority is None:
            return
        version, key = authority.version, caller.token_key  # another one of its principal may be revoked
        if target is not None and target.allowed.get(key) == version:
            return
        authority.demand(caller, "Produce", topic_resource(partition))
        if target is not None and key:
            if len(target.allowed) >= ALLOWED_MAX:
                target.allowed.clear()
            target.allowed[key] = version

    def _find(self, message: StreamMessage) -> Target:
        """The target of a message that names none of the open ones, or another id than it has."""
        if not message.HasField("msg_id"):
            raise InvalidArgument(
                "msg_id is missing",
                hint="set its producer_id and topic_name from what CreateProducer answered",
            )
        place = message.msg_id
        check_label(message.producer_name, "producer")
        target = self._target(place.topic_name, message.producer_name)
        if target.producer_id != place.producer_id:
            raise OwnerMoved(
                f"producer {place.producer_id} is not one of {place.topic_name}",
                why="the topic was made anew, or the id belongs to another producer_name",
                hint="create the producer again",
            )
        return target

    def hand_over(self) -> None:
        """Send every group of this turn to its owner."""
        self._router.received()
        if self.calls:
            self._read()
        while self.dirty:
            dirty, self.dirty = self.dirty, {}
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
                    group.messages, producer_name=target.name, origin=origin,
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
            answer_calls(group.calls, group.request_ids)

        return answered

    # -- refusals ---------------------------------------------------------------------------------

    def _failed(self, target: Target, group: _Group, error: DanubeError) -> None:
        """Handle the refusal of a batch, of which no record is stored: only the bad record may fail."""
        group.attempts += 1
        if isinstance(error, OwnerMoved) and group.attempts < ATTEMPTS_MAX:
            # The restarted owner does not know the handle and took no record, so all can be sent again.
            self._close(target)
            target.groups.appendleft(group)
            self._offer(target)
        elif isinstance(error, CallerError) and len(group.calls) > 1:
            self._send_split(target, group, error)
        else:
            refuse_calls(group.calls, error)

    def _send_split(self, target: Target, group: _Group, error: DanubeError) -> None:
        """Answer the record that the error names and send the others again; without a name, each alone."""
        index = error.facts.get("index")
        count = len(group.calls)
        if isinstance(index, int) and 0 <= index < count:
            before, refused, behind = group.split([(0, index), (index, index + 1), (index + 1, count)])
            refuse_calls(refused.calls, error)
            again = [one for one in (before, behind) if one.calls]
        else:
            again = group.split((one, one + 1) for one in range(count))
        target.groups.extendleft(reversed(again))
        self._offer(target)

    def _offer(self, target: Target) -> None:
        """Schedule the waiting messages for this turn or, if that has handed over already, for the next."""
        self.dirty[target] = None
        self._session.schedule_turn()

    def _fail_all(self, target: Target, error: DanubeError) -> None:
        groups, target.groups = target.groups, deque()
        for group in groups:
            refuse_calls(group.calls, error)


def _refuse_large(size: int, target: Target) -> None:
    raise RecordTooLarge(
        f"payload has {size} bytes",
        why=f"the limit of {target.partition} is {target.record_bytes_max} bytes",
        hint=larger_record_hint(size, split_partition_name(target.partition)[0]),
    )


def _by_caller(calls: list[Call], datas: list[bytes]) -> dict[Identity, tuple[list[Call], list[bytes]]]:
    """The calls of a turn and their messages, by who makes them; those of nobody are refused."""
    found: dict[Identity, tuple[list[Call], list[bytes]]] = {}
    former: Identity | None = None
    of: list[Call] = []
    some: list[bytes] = []
    for call, data in zip(calls, datas, strict=True):
        try:
            caller = call[0].identity_of(call[1])
        except DanubeError as error:
            refuse_calls([call], error)
            continue
        if caller is not former:
            of, some = found.setdefault(caller, ([], []))
            former = caller
        of.append(call)
        some.append(data)
    return found
