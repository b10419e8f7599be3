"""The router: which worker a connection's frame is for, and what any worker answers itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from danube import __version__, clock
from danube.broker.api import Session
from danube.broker.proposals import Outcome, Proposals
from danube.broker.remote import RecordKind, RemoteSessions
from danube.core import wire
from danube.core.commands import Command, CreateTopic, DeleteTopic, TopicRecord, UpdatePolicy
from danube.core.placement import owner_of
from danube.core.policy import Durability, TopicPolicy
from danube.core.wire import Admin, Frame, Kind, Lookup, OpenProducer, Subscribe, TopicView
from danube.errors import (
    Conflict,
    DanubeError,
    InvalidArgument,
    LimitExceeded,
    OwnerMoved,
    PolicyMismatch,
    ProtocolError,
    TopicNotFound,
    broken,
)
from danube.ids import check_topic_name
from danube.limits import HANDLES_PER_CONNECTION_MAX

if TYPE_CHECKING:
    from danube.broker.shard import Shard
    from danube.cluster.local_log import LocalLog

_BY_HANDLE = frozenset(map(int, (Kind.PUBLISH, Kind.ACK, Kind.CREDIT, Kind.NACK)))
_CLOSES = frozenset(map(int, (Kind.CLOSE_PRODUCER, Kind.CLOSE_CONSUMER)))
_REQUESTS = frozenset(
    map(int, (Kind.OPEN_PRODUCER, Kind.SUBSCRIBE, Kind.CLOSE_PRODUCER, Kind.CLOSE_CONSUMER, Kind.ADMIN))
)


class RoutedSession(Session):
    """A connection that this worker holds: where each of its handles lives."""

    def __init__(self, connection_id: int) -> None:
        super().__init__()
        self.connection_id = connection_id
        self.routes: dict[int, int] = {}  # handle -> the other worker where it lives
        self.requests: dict[int, int] = {}  # correlation -> other worker that owes the answer
        self.known_to: set[int] = set()  # other workers that keep something for this connection


class Router:
    """Routes frames of local connections; one for each worker."""

    def __init__(
        self,
        worker: int,
        workers: int,
        shard: Shard,
        metadata: LocalLog,
        proposals: Proposals,
        *,
        schedule_turn: Callable[[], None],
        on_metadata: Callable[[], None],
        metadata_changed: Callable[[], None],
        status: Callable[[], dict[str, Any]],
        default_policy: TopicPolicy,
        default_partitions: int,
        auto_create: bool,
    ) -> None:
        self.remote: RemoteSessions | None = None
        self._worker = worker
        self._workers = workers
        self._shard = shard
        self._metadata = metadata
        self._proposals = proposals
        self._schedule_turn = schedule_turn
        self._on_metadata = on_metadata
        self._metadata_changed = metadata_changed
        self._status = status
        self._default_policy = default_policy
        self._default_partitions = default_partitions
        self._auto_create = auto_create

    # -- frames -----------------------------------------------------------------------------------

    def route(self, session: RoutedSession, frame: Frame, buffer: memoryview) -> bool:
        """Take one frame; False when the owner's ring is full: offer the same frame again later."""
        kind = frame.kind
        worker: int | None
        if kind in _BY_HANDLE:
            worker = session.routes.get(frame.handle, self._worker)
        else:
            try:
                worker = self._worker_for(session, frame, buffer)
            except DanubeError as error:
                session.send_error(error, frame.correlation)
                return True
        if worker is None:
            return True
        if worker == self._worker:
            if kind in _CLOSES:
                session.routes.pop(frame.handle, None)
            self._shard.on_frame(session, frame, buffer)
            return True
        if self.remote is None or not self.remote.forward(worker, session.connection_id, frame, buffer):
            return False
        if kind in _REQUESTS:
            session.requests[frame.correlation] = worker
            session.known_to.add(worker)
        if kind in _CLOSES:
            session.routes.pop(frame.handle, None)
        return True

    def _worker_for(self, session: RoutedSession, frame: Frame, buffer: memoryview) -> int | None:
        """The worker that a request is for; None when it is answered here."""
        kind = frame.kind
        body = buffer[frame.start : frame.end]
        if kind == Kind.LOOKUP:
            self._lookup(session, frame.correlation, wire.decode_control(body, Lookup))
            return None
        if kind == Kind.OPEN_PRODUCER:
            worker = self.owner(wire.decode_control(body, OpenProducer).partition)
        elif kind == Kind.SUBSCRIBE:
            worker = self.owner(wire.decode_control(body, Subscribe).partition)
        elif kind in _CLOSES:
            return session.routes.get(frame.handle, self._worker)
        elif kind == Kind.ADMIN:
            request = wire.decode_control(body, Admin)
            if request.partition:
                return self.owner(request.partition)
            self._administer(session, frame.correlation, request)
            return None
        else:
            raise ProtocolError(f"frame kind {kind} is not known")
        self._add_route(session, frame.handle, worker)
        return worker

    def _add_route(self, session: RoutedSession, handle: int, worker: int) -> None:
        """Remember a handle that lives at another worker; all others live here."""
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
        """The worker that owns a partition, by its physical name."""
        record, index = self.find_topic(name)
        return owner_of(record.topic_id, index, self._workers)

    def find_topic(self, name: str) -> tuple[TopicRecord, int]:
        """The topic and partition index of a physical name; reads the metadata log when unknown."""
        check_topic_name(name)
        try:
            return self._metadata.state.topic_of_partition(name)
        except TopicNotFound:
            self._on_metadata()
            return self._metadata.state.topic_of_partition(name)

    def answered(self, session: RoutedSession, frames: bytes) -> None:
        """Frames came back from an owner: their requests are no longer open."""
        if session.requests:
            for frame in wire.FrameDecoder().frames(frames, 0, len(frames)):
                session.requests.pop(frame.correlation, None)

    def session_writable(self, session: RoutedSession) -> None:
        """The connection takes bytes again, or stopped taking them."""
        self._shard.session_writable(session)

    def worker_restarted(self, session: RoutedSession, worker: int) -> None:
        """An owner is gone: its handles must be opened again, its open requests asked again."""
        error = OwnerMoved("the partition's owner started again", hint="the client opens it again by itself")
        for correlation in [key for key, owner in session.requests.items() if owner == worker]:
            del session.requests[correlation]
            session.send_error(error, correlation)
        for handle in [key for key, owner in session.routes.items() if owner == worker]:
            del session.routes[handle]
            session.send_error(error, 0, handle)

    def session_gone(self, session: RoutedSession) -> None:
        """A local connection was closed."""
        self._shard.drop_session(session)
        if self.remote is not None:
            for worker in sorted(session.known_to):
                self.remote.notify(worker, RecordKind.SESSION_GONE, session.connection_id)
        self._schedule_turn()

    # -- topics -----------------------------------------------------------------------------------

    def _lookup(self, session: RoutedSession, correlation: int, request: Lookup) -> None:
        try:
            record = self._topic(request.topic)
        except TopicNotFound:
            if not (request.create and self._auto_create):
                raise
            policy = self._policy_for(request.reliable, request.durability)
            command = CreateTopic(
                topic=request.topic, partitions=request.partitions or self._default_partitions, policy=policy,
                created_us=clock.wall_us(), ensure=True,
            )  # fmt: skip

            def created(outcome: Outcome) -> TopicView:
                # Somebody else may have made it meanwhile, with another policy.
                record = self._topic(request.topic) if isinstance(outcome, Conflict) else _record(outcome)
                self._check_mode(record, request)
                return topic_view(record)

            self._propose(session, correlation, command, created)
            return
        self._check_mode(record, request)
        session.send(wire.result_frame(topic_view(record), correlation))

    def _topic(self, name: str) -> TopicRecord:
        check_topic_name(name)
        try:
            return self._metadata.state.topic(name)
        except TopicNotFound:
            self._on_metadata()
            return self._metadata.state.topic(name)

    def _policy_for(self, reliable: bool | None, durability: str) -> TopicPolicy:
        policy = self._default_policy
        level = durability
        if reliable is None:
            reliable = policy.reliable if not level else level != "memory"
        if not level:
            level = (
                policy.durability if reliable == policy.reliable else ("written" if reliable else "memory")
            )
        policy = msgspec.structs.replace(policy, reliable=reliable, durability=level)
        policy.check()
        return policy

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

    def _propose(
        self, session: RoutedSession, correlation: int, command: Command, view: Callable[[Outcome], Any]
    ) -> None:
        """Commit a metadata command off the loop, then answer."""

        def committed(outcome: Outcome) -> None:
            self._metadata_changed()
            try:
                session.send(wire.result_frame(view(outcome), correlation))
            except DanubeError as failure:
                session.send_error(failure, correlation)
            self._schedule_turn()

        self._proposals.submit(command, committed)

    # -- operations that any worker answers -------------------------------------------------------

    def _administer(self, session: RoutedSession, correlation: int, request: Admin) -> None:
        args = request.args
        if request.op == "status":
            session.send(wire.result_frame(self._status(), correlation))
        elif request.op == "list_topics":
            self._on_metadata()
            namespace = args.get("namespace")
            records = self._metadata.state.topics(None if namespace is None else str(namespace))
            session.send(wire.result_frame([topic_entry(record) for record in records], correlation))
        elif request.op == "topic":
            record = self._topic(str(args.get("topic", "")))
            session.send(wire.result_frame(topic_entry(record), correlation))
        elif request.op == "create_topic":
            self._create_topic(session, correlation, args)
        elif request.op == "delete_topic":
            command = DeleteTopic(topic=str(args.get("topic", "")))
            self._propose(session, correlation, command, _nothing)
        elif request.op == "update_topic":
            record = self._topic(str(args.get("topic", "")))
            policy = policy_from(args.get("policy", {}), record.policy)
            command_update = UpdatePolicy(topic=record.topic, policy=policy)
            self._propose(session, correlation, command_update, _entry)
        else:
            raise InvalidArgument(f"operation {request.op!r} is not known", hint="the client may be newer")

    def _create_topic(self, session: RoutedSession, correlation: int, args: dict[str, Any]) -> None:
        asked, partitions = args.get("policy", {}), args.get("partitions", 0)
        reliable, durability = _mode_asked(asked)
        if not isinstance(partitions, int):
            raise InvalidArgument("partitions must be a number")
        base = self._policy_for(reliable, durability)
        policy = policy_from({**asked, "reliable": base.reliable, "durability": base.durability}, base)
        command = CreateTopic(
            topic=str(args.get("topic", "")), partitions=partitions, policy=policy,
            created_us=clock.wall_us(), ensure=bool(args.get("ensure", False)),
        )  # fmt: skip
        self._propose(session, correlation, command, _entry)


def _mode_asked(asked: Any) -> tuple[bool | None, str]:
    """``reliable`` and ``durability`` of a policy that a client sent; None and "" where not given."""
    if not isinstance(asked, dict):
        raise InvalidArgument("policy must be a map")
    reliable, durability = asked.get("reliable"), asked.get("durability") or ""
    if not isinstance(reliable, bool | None) or not isinstance(durability, str):
        raise InvalidArgument("policy cannot be read", why="reliable is a boolean and durability a text")
    return reliable, durability


def policy_from(asked: Any, base: TopicPolicy) -> TopicPolicy:
    """The base policy with the asked fields; unknown fields and impossible values are refused."""
    if not isinstance(asked, dict):
        raise InvalidArgument("policy must be a map")
    unknown = set(asked) - set(TopicPolicy.__struct_fields__)
    if unknown:
        raise InvalidArgument(f"policy has unknown fields: {', '.join(sorted(map(str, unknown)))}")
    fields = msgspec.to_builtins(base) | {name: value for name, value in asked.items() if value is not None}
    if isinstance(asked.get("failure"), dict):
        fields["failure"] = msgspec.to_builtins(base.failure) | asked["failure"]
    try:
        policy = msgspec.convert(fields, TopicPolicy)
    except msgspec.ValidationError as error:
        raise InvalidArgument("policy cannot be read", why=str(error)) from None
    policy.check()
    return policy


def _record(outcome: Outcome) -> TopicRecord:
    if isinstance(outcome, DanubeError):
        raise outcome
    if outcome is None:
        broken("a topic command gave no topic")
    return outcome


def _nothing(outcome: Outcome) -> None:
    _record(outcome)


def _entry(outcome: Outcome) -> dict[str, Any]:
    return topic_entry(_record(outcome))


def topic_view(record: TopicRecord) -> TopicView:
    policy = record.policy
    return TopicView(
        record.topic, record.topic_id, record.physical_names, policy.reliable, policy.durability,
        policy.max_record_bytes,
    )  # fmt: skip


def topic_entry(record: TopicRecord) -> dict[str, Any]:
    """What list_topics and topic answer: the view and the whole policy."""
    policy = {name: getattr(record.policy, name) for name in TopicPolicy.__struct_fields__}
    return {
        "topic": record.topic,
        "topic_id": record.topic_id,
        "partitions": record.physical_names,
        "partition_count": record.partition_count,
        "reliable": record.policy.reliable,
        "durability": record.policy.durability,
        "max_record_bytes": record.policy.max_record_bytes,
        "created_us": record.created_us,
        "policy": policy | {"failure": msgspec.structs.asdict(record.policy.failure)},
        "broker_version": __version__,
    }
