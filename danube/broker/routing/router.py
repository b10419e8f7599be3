"""The router: finds the worker that a connection's frame is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from danube.broker.api import RoutedSession
from danube.broker.audit.audit import DENIED
from danube.broker.operations import cluster, credentials, quotas, roles, schemas, storage, topics
from danube.broker.operations.arguments import arguments_of
from danube.broker.operations.context import Answer, Operation, Operations
from danube.broker.operations.schema_gate import SchemaGate
from danube.broker.operations.topics import policy_for, topic_view
from danube.broker.partition.metadata import OwnerMetadata
from danube.broker.routing.judging import Judging, asking, discreet
from danube.broker.routing.questions import Questions, Route
from danube.broker.routing.remote import RecordKind, RemoteSessions
from danube.broker.routing.signing import signed
from danube.core.metadata.commands import CreateTopic, TopicRecord
from danube.core.partition.policy import Durability
from danube.core.placement.workers import owner_of
from danube.core.protocol import native as wire
from danube.core.protocol.native import Admin, Frame, Kind, Lookup, OpenProducer, Subscribe, TopicView
from danube.core.security.authority import EVERYBODY, Authority
from danube.core.security.operations import unknown
from danube.errors import (
    Conflict,
    DanubeError,
    LimitExceeded,
    NotAllowed,
    NotAuthenticated,
    OwnerMoved,
    PolicyMismatch,
    ProtocolError,
    TopicNotFound,
    Unavailable,
)
from danube.host import clock
from danube.ids import check_topic_name, split_partition_name
from danube.limits import HANDLES_PER_CONNECTION_MAX

if TYPE_CHECKING:
    from danube.broker.audit.audit import Audit
    from danube.broker.partition.hosted import ProducerLink
    from danube.broker.shard.shard import Shard
    from danube.cluster.log.local_log import LocalLog
    from danube.core.batch.columns import EncodedBatch


def _audit(operations: Operations, args: Any, answer: Answer) -> None:
    operations.audit_lines(args, answer)


# Operations that any worker answers; those of a partition's owner are in danube.broker.shard.admin.
_OPERATIONS: dict[str, Operation] = {
    "audit": _audit,
    **topics.TABLE, **schemas.TABLE, **roles.TABLE, **credentials.TABLE, **quotas.TABLE, **storage.TABLE,
    **cluster.TABLE,
}  # fmt: skip
_BY_HANDLE = frozenset(map(int, (Kind.PUBLISH, Kind.ACK, Kind.CREDIT, Kind.NACK)))
_CLOSES = frozenset(map(int, (Kind.CLOSE_PRODUCER, Kind.CLOSE_CONSUMER)))
_OPENS = frozenset(map(int, (Kind.OPEN_PRODUCER, Kind.SUBSCRIBE)))
_JUDGED: Final[dict[int, type[Lookup | OpenProducer | Subscribe]]] = {
    Kind.LOOKUP: Lookup, Kind.OPEN_PRODUCER: OpenProducer, Kind.SUBSCRIBE: Subscribe,
}  # fmt: skip
_SETS_FAILURES = frozenset(map(int, (Kind.SUBSCRIBE, Kind.ADMIN)))
_REQUESTS = frozenset(
    map(int, (Kind.OPEN_PRODUCER, Kind.SUBSCRIBE, Kind.CLOSE_PRODUCER, Kind.CLOSE_CONSUMER, Kind.ADMIN))
)


def find_topic(metadata: LocalLog, refresh: Callable[[], None], name: str) -> tuple[TopicRecord, int]:
    """Return the topic and partition index of a physical name; calls ``refresh`` for an unknown one."""
    check_topic_name(name)
    try:
        return metadata.state.topic_of_partition(name)
    except TopicNotFound:
        refresh()
        return metadata.state.topic_of_partition(name)


class Elsewhere(Protocol):
    """The router's access to the other brokers of a cluster."""

    def elsewhere(self, topic_id: int, partition: int) -> DanubeError | None: ...
    def describe(self, record: TopicRecord, view: TopicView) -> TopicView: ...
    def take(
        self, session: RoutedSession, frame: Frame, buffer: memoryview, error: DanubeError, answer: Answer
    ) -> bool:
        """Return whether a failed request waits here or is sent to another broker instead."""


class Router:
    """Routes frames of local connections; one for each worker."""

    def __init__(
        self,
        worker: int,
        workers: int,
        shard: Shard,
        operations: Operations,
        *,
        schedule_turn: Callable[[], None],
        default_partitions: int,
        auto_create: bool,
        remote: RemoteSessions | None = None,
        other_brokers: Callable[[Route], Elsewhere] | None = None,
        authority: Authority = EVERYBODY,
    ) -> None:
        """``other_brokers``: in a cluster, makes the access to them, given a function that routes frames.

        ``authority``: judges what sessions ask for, by their identities.
        """
        self.judging = (
            Judging(authority, lambda: operations.state, self.route) if authority.enforced else None
        )
        operations.authority = authority
        self.audit: Audit | None = None
        self.remote = remote
        self.elsewhere = other_brokers(self.route) if other_brokers is not None else None
        self.questions = Questions(self.route, schedule_turn)
        self.operations = operations
        operations.ask_owner = self.questions.ask
        gate = SchemaGate(operations.metadata, shard.counters)
        shard.metadata = self._owner_metadata = OwnerMetadata(gate, operations)
        self._worker = worker
        self._workers = workers
        self._shard = shard
        self._schedule_turn = schedule_turn
        self._default_partitions = default_partitions
        self._auto_create = auto_create

    # -- frames -----------------------------------------------------------------------------------

    def received(self) -> None:
        """Note that new frames came: their batches must be checked with metadata that is read anew."""
        self._owner_metadata.fresh = False

    def route(self, session: RoutedSession, frame: Frame, buffer: memoryview) -> bool:
        """Route one frame; False if the owner's ring is full: then route the same frame again later."""
        kind = frame.kind
        worker: int | None
        if kind in _BY_HANDLE:
            worker = session.routes.get(frame.handle, self._worker)
        else:
            try:
                if kind in _SETS_FAILURES:
                    frame, buffer = signed(session.identity, frame, buffer)
                worker = self._worker_for(session, frame, buffer)
            except DanubeError as error:
                if self.audit is not None and isinstance(error, NotAllowed | NotAuthenticated):
                    self._tell_denied(self.audit, session, frame, buffer, error)
                elsewhere, answer = self.elsewhere, self._answer_to(session, frame.correlation)
                if elsewhere is None or not elsewhere.take(session, frame, buffer, error, answer):
                    session.send_error(self._told(session, error), frame.correlation)
                return True
        if worker is None:
            return True
        if worker == self._worker:
            if kind in _CLOSES:
                session.routes.pop(frame.handle, None)
            self._shard.on_frame(session, frame, buffer)
            return True
        if self.remote is None or not self.remote.forward(worker, session, frame, buffer):
            if session.grants and kind in _OPENS:  # nothing is opened yet: the same frame comes again
                session.grants.pop(frame.handle, None)
                session.routes.pop(frame.handle, None)
            session.told = kind == Kind.ADMIN
            return False
        if kind in _REQUESTS:
            session.requests[frame.correlation] = worker
            session.known_to.add(worker)
        if kind in _CLOSES:
            session.routes.pop(frame.handle, None)
        return True

    def publish(self, session: RoutedSession, handle: int, correlation: int, batch: EncodedBatch) -> bool:
        """Publish a batch that this process has encoded; False if another worker owns the partition."""
        if handle in session.routes:
            return False
        link: ProducerLink | None = session.producers.get(handle)
        try:
            if link is None:
                raise OwnerMoved("this producer is not open here", hint="open it again")
            link.hosted.publish_own(session, handle, correlation, batch, clock.wall_us())
            self._shard.write_soon(link.hosted)
        except DanubeError as error:
            self._shard.counters.add("errors")
            session.send_error(error, correlation)
        return True

    def _worker_for(self, session: RoutedSession, frame: Frame, buffer: memoryview) -> int | None:
        """Return the worker that must handle a request; None if it was answered here."""
        kind, judging = frame.kind, self.judging
        body = buffer[frame.start : frame.end]
        if kind == Kind.LOOKUP:
            lookup = wire.decode_control(body, Lookup)
            if judging is not None:
                judging.lookup(session, lookup)
            self._lookup(session, frame.correlation, lookup)
            return None
        if kind == Kind.OPEN_PRODUCER:
            opened = wire.decode_control(body, OpenProducer)
            if judging is not None:
                judging.open_producer(session, frame.handle, opened)
            worker = self._owner_of(opened)
        elif kind == Kind.SUBSCRIBE:
            subscribed = wire.decode_control(body, Subscribe)
            if judging is not None:
                judging.subscribe(session, frame.handle, subscribed)
            worker = self._owner_of(subscribed)
        elif kind in _CLOSES:
            if judging is not None:
                judging.close(session, frame.handle, kind)
            return session.routes.get(frame.handle, self._worker)
        elif kind == Kind.ADMIN:
            request = wire.decode_control(body, Admin)
            self._judge(session, request)
            if request.partition:
                return self.owner(request.partition)
            self._administer(session, frame.correlation, request)
            return None
        else:
            raise ProtocolError(f"frame kind {kind} is not known")
        self._add_route(session, frame.handle, worker)
        return worker

    def _judge(self, session: RoutedSession, request: Admin) -> None:
        """Raise NotAllowed unless the session may have the operation carried out, and have either written."""
        asker, audit = asking(session.identity, request), self.audit
        told, session.told = session.told, False
        try:
            if self.judging is not None:
                self.judging.admin(session, request)
        except (NotAllowed, NotAuthenticated) as error:
            if audit is not None:
                source = f"connection {session.connection_id}"
                audit.tell(asker, request.op, request.partition, DENIED, source=source, code=error.code)
            raise
        if audit is not None and not told:
            audit.request(asker, request, session.connection_id)

    def _tell_denied(
        self, audit: Audit, session: RoutedSession, frame: Frame, buffer: memoryview, error: DanubeError
    ) -> None:
        """Write that a lookup, a producer or a consumer was denied; operations have told it."""
        asked = _JUDGED.get(frame.kind)
        if asked is None:
            return
        request = wire.decode_control(buffer[frame.start : frame.end], asked)
        resource = request.topic if isinstance(request, Lookup) else request.partition
        source = f"connection {session.connection_id}"
        audit.tell(
            session.identity, Kind(frame.kind).name.lower(), resource, DENIED, source=source, code=error.code
        )

    def _add_route(self, session: RoutedSession, handle: int, worker: int) -> None:
        """Remember a handle that is open at another worker; handles without an entry are open here."""
        routes = session.routes
        if worker == self._worker:
            routes.pop(handle, None)
            return
        if len(routes) >= HANDLES_PER_CONNECTION_MAX:
            raise LimitExceeded(
                f"a connection holds at most {HANDLES_PER_CONNECTION_MAX} handles",
                hint="close producers and consumers that are not used, or connect again",
            )
        routes[handle] = worker

    def owner(self, name: str) -> int:
        """Return the worker that owns a partition; raises an error if another broker owns it."""
        record, index = self.find_topic(name)
        if self.elsewhere is not None and (error := self.elsewhere.elsewhere(record.topic_id, index)):
            raise error
        return owner_of(record.topic_id, index, self._workers)

    def _owner_of(self, opened: OpenProducer | Subscribe) -> int:
        """Return the worker of what is opened; raises Unavailable for a topic not read of yet.

        Another broker of the cluster has made it for this client a moment ago.
        """
        try:
            return self.owner(opened.partition)
        except TopicNotFound:
            if self.elsewhere is None or opened.topic_id < self.operations.state.next_topic_id:
                raise
        raise Unavailable(
            f"this broker has not read of {opened.partition} yet",
            why="the topic was made at another broker",
            hint="the client opens it again by itself",
        )

    def owner_to_be(self, name: str) -> int:
        """Return the owner; for a topic that does not exist, its owner if it is the next one to be made."""
        try:
            return self.owner(name)
        except TopicNotFound:
            _, index = split_partition_name(name)
            return owner_of(self.operations.state.next_topic_id, index or 0, self._workers)

    def owner_of_opened(self, frame: Frame, buffer: memoryview) -> int | None:
        """Return the owner of the partition in an OPEN_PRODUCER or SUBSCRIBE; None on an error."""
        producer = frame.kind == Kind.OPEN_PRODUCER
        opens: type[OpenProducer | Subscribe] = OpenProducer if producer else Subscribe
        try:
            return self.owner(wire.decode_control(buffer[frame.start : frame.end], opens).partition)
        except DanubeError:
            return None

    def find_topic(self, name: str) -> tuple[TopicRecord, int]:
        """Return the topic and partition index of a physical name, reading new metadata if necessary."""
        return find_topic(self.operations.metadata, self.operations.refresh, name)

    def answered(self, session: RoutedSession, frames: bytes) -> None:
        """Drop the requests that these frames of an owner answer from the open ones."""
        if session.requests:
            for frame in wire.FrameDecoder().frames(frames, 0, len(frames)):
                session.requests.pop(frame.correlation, None)

    def session_writable(self, session: RoutedSession) -> None:
        """Note that the connection takes bytes again, or no longer."""
        self._shard.session_writable(session)

    def worker_restarted(self, session: RoutedSession, worker: int) -> None:
        """Fail the open requests and handles of an owner that restarted; the client repeats them."""
        error = OwnerMoved("the partition's owner started again", hint="the client opens it again by itself")
        for correlation in [key for key, owner in session.requests.items() if owner == worker]:
            del session.requests[correlation]
            session.send_error(error, correlation)
        for handle in [key for key, owner in session.routes.items() if owner == worker]:
            del session.routes[handle]
            session.send_error(error, 0, handle)

    def session_gone(self, session: RoutedSession) -> None:
        """Close all handles of a closed local connection, here and at other workers."""
        self._shard.drop_session(session)
        if self.remote is not None:
            for worker in sorted(session.known_to):
                self.remote.notify(worker, RecordKind.SESSION_GONE, session.connection_id)
        self._schedule_turn()

    # -- topics -----------------------------------------------------------------------------------

    def _lookup(self, session: RoutedSession, correlation: int, request: Lookup) -> None:
        record = self.operations.find_topic(request.topic)
        if record is None and request.create and self._auto_create:
            default = self.operations.policy_of_used(request.topic)
            policy = policy_for(default, request.reliable, request.durability)
            command = CreateTopic(
                topic=request.topic, partitions=request.partitions or self._default_partitions, policy=policy,
                created_us=clock.wall_us(), ensure=True,
            )  # fmt: skip

            answer = self._answer_to(session, correlation)
            self.operations.propose(
                command, lambda made: answer(self._created(request, made)), lambda made: made
            )
            return
        record = record or self.operations.state.topic(request.topic)  # its error names similar topics
        self._check_mode(record, request)
        session.send(wire.result_frame(self._view(record), correlation))

    def _view(self, record: TopicRecord) -> TopicView:
        view = topic_view(record)
        return view if self.elsewhere is None else self.elsewhere.describe(record, view)

    def _created(self, request: Lookup, made: TopicRecord | DanubeError) -> TopicView | DanubeError:
        """Return the answer of a lookup that creates its topic."""
        try:
            if isinstance(made, Conflict):  # another lookup has made it meanwhile, with another policy
                made = self.operations.topic(request.topic)
            if isinstance(made, DanubeError):
                return made
            self._check_mode(made, request)
        except DanubeError as error:
            return error
        return self._view(made)

    def _check_mode(self, record: TopicRecord, request: Lookup) -> None:
        policy = record.policy
        if request.reliable is not None and request.reliable != policy.reliable:
            raise PolicyMismatch(
                f"{record.topic} is {'reliable' if policy.reliable else 'non-reliable'}",
                why=f"the producer asked for reliable={request.reliable}",
                hint="use the topic's mode, or another topic",
            )
        if request.durability and Durability.parse(request.durability) > policy.level:
            raise PolicyMismatch(
                f"{record.topic} acknowledges at level {policy.durability}",
                why=f"the producer asked for {request.durability}",
                hint="danube topics update --durability raises it for everyone",
            )

    # -- operations that any worker answers -------------------------------------------------------

    def _administer(self, session: RoutedSession, correlation: int, request: Admin) -> None:
        operation = _OPERATIONS.get(request.op)
        if operation is None:
            raise unknown(request.op)
        answer, operations = self._answer_to(session, correlation), self.operations
        if self.judging is not None:
            asker = asking(session.identity, request)
            operations = operations.acting_for(asker, self.judging.shows(asker, request.op))
        operation(operations, arguments_of(request), answer)

    def _answer_to(self, session: RoutedSession, correlation: int) -> Answer:
        """Return a callback that sends a value or an error to the session, if it still exists."""

        def answer(value: Any) -> None:
            if session.closed:
                return
            if isinstance(value, DanubeError):
                session.send_error(self._told(session, value), correlation)
            else:
                session.send(wire.result_frame(value, correlation))
            self._schedule_turn()

        return answer

    def _told(self, session: RoutedSession, error: DanubeError) -> DanubeError:
        """Return an error without names that the session may not see."""
        judging = self.judging
        return error if judging is None else discreet(judging.authority, session.identity, error)
