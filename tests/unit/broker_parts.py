"""The broker's parts without sockets and processes: recorded sessions, steps instead of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple, cast

from danube.broker.api import RoutedSession, Session
from danube.broker.operations.context import Operations
from danube.broker.operations.examinations import Examinations
from danube.broker.operations.proposals import Proposals
from danube.broker.partition.hosted import HostedPartition, HostedSubscription
from danube.broker.routing.router import Router
from danube.broker.shard.shard import Shard
from danube.cluster.log.local_log import LocalLog
from danube.core.batch.columns import BatchView, encode
from danube.core.batch.format import read_header
from danube.core.dispatch.grants import DeadLetter
from danube.core.metadata.commands import (
    Command,
    CreateTopic,
    TopicRecord,
    decode_commands,
    encode_command,
    join_commands,
)
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import FailurePolicy, TopicPolicy
from danube.core.placement.workers import owner_of
from danube.core.protocol import native as wire
from danube.core.protocol.native import Frame, FrameDecoder, Kind
from danube.errors import DanubeError, TopicNotFound
from danube.schema.verdict import Request, judge
from danube.wal.log.log import LogOptions
from danube.wal.log.syncer import Syncer

TOPIC = "/default/orders"
CREDIT = 1 << 20
QUICK = FailurePolicy(base_redelivery_delay_ms=0, max_redelivery_count=0, ack_timeout_ms=60_000)


class Received(NamedTuple):
    """One frame that a session was sent, its body decoded as far as tests ask."""

    kind: int
    correlation: int
    handle: int
    flags: int
    body: bytes

    @property
    def error(self) -> DanubeError:
        assert self.kind == Kind.ERROR, Kind(self.kind).name
        return wire.decode_error(self.body)

    @property
    def records(self) -> list[tuple[int, bytes]]:
        """``(offset, payload)`` of every record of a DELIVER frame."""
        assert self.kind == Kind.DELIVER, Kind(self.kind).name
        found = records_in(self.body[wire.DELIVERY_BYTES :])
        assert len(found) == wire.decode_delivery(self.body).record_count, "the head tells the count"
        return found


def records_in(data: bytes | memoryview) -> list[tuple[int, bytes]]:
    """``(offset, payload)`` of every record of batches, selections included."""
    records: list[tuple[int, bytes]] = []
    data, position = bytes(data), 0
    while position < len(data):
        view = BatchView(data, position=position)
        records += zip(view.offsets.tolist(), view.payloads(), strict=True)
        position += view.header.size
    return records


def frames_in(data: bytes) -> list[Received]:
    return [
        Received(frame.kind, frame.correlation, frame.handle, frame.flags, data[frame.start : frame.end])
        for frame in FrameDecoder().frames(data, 0, len(data))
    ]


class RecordingSession(RoutedSession):
    """A connection that keeps what it is sent."""

    def __init__(self, connection_id: int = 1) -> None:
        super().__init__(connection_id)
        self._sent: list[bytes] = []

    def send(self, *parts: bytes | memoryview) -> None:
        self._sent.append(b"".join(parts))

    def take(self, kind: int | None = None) -> list[Received]:
        """What came since the last call; with ``kind`` only that (the rest is dropped)."""
        sent, self._sent = self._sent, []
        frames = [frame for data in sent for frame in frames_in(data)]
        return frames if kind is None else [frame for frame in frames if frame.kind == kind]

    def only(self, kind: int) -> Received:
        frames = self.take()
        assert [frame.kind for frame in frames] == [kind], [Kind(frame.kind).name for frame in frames]
        return frames[0]

    def records(self) -> list[tuple[int, bytes]]:
        return [record for frame in self.take(Kind.DELIVER) for record in frame.records]


class CountingCounters:
    """Counters of a worker in a dict, instead of danube.broker.traffic.Traffic."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        return self.values.get(name, 0)

    def add(self, name: str, amount: int = 1) -> None:
        self.values[name] = self[name] + amount

    def add_in(self, records: int, size_bytes: int) -> None:
        self.add("records_in", records)

    def add_out(self, records: int, size_bytes: int, redelivery_count: int) -> None:
        self.add("records_out", records)


class SteppedSyncer:
    """A syncer whose jobs run when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Any, Callable[[Any, Exception | None], None]]] = []

    def submit(self, job: Any, on_done: Callable[[Any, Exception | None], None]) -> None:
        self.jobs.append((job, on_done))

    def submit_all(self, jobs: list[tuple[Any, Callable[[Any, Exception | None], None]]]) -> None:
        self.jobs += jobs

    def step(self, error: Exception | None = None) -> int:
        """Run everything that was submitted (or let it fail); return how many jobs that was."""
        jobs, self.jobs = self.jobs, []
        for job, on_done in jobs:
            found = error
            if found is None:
                try:
                    job.run(set())
                except Exception as failure:
                    found = failure
            on_done(job, found)
        return len(jobs)


class SteppedExecutor(Executor):
    """Runs at once, or, while ``held``, at ``step``."""

    def __init__(self) -> None:
        self.held = False
        self.waiting: list[Callable[[], None]] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        if self.held:
            self.waiting.append(run)
        else:
            run()
        return future

    def step(self) -> None:
        waiting, self.waiting = self.waiting, []
        for run in waiting:
            run()


class Bench:
    """One shard with everything around it in the test's hands."""

    def __init__(self, root: Path, **policy: Any) -> None:
        self.topics: dict[str, TopicRecord] = {}
        self.counters = CountingCounters()
        self.syncer, self.sealer, self.executor = SteppedSyncer(), SteppedSyncer(), SteppedExecutor()
        self.later: list[tuple[float, Callable[..., object], tuple[Any, ...]]] = []
        self.letters: list[tuple[HostedSubscription, DeadLetter]] = []
        self.turns_wanted = 0
        self.correlation = 100
        self.record = self.add_topic(TOPIC, **policy)
        self.shard = Shard(
            root=root,
            incarnation=1,
            find_topic=self.find_topic,
            counters=self.counters,
            log_options=LogOptions(segment_bytes=4096, preallocate_first=4096, preallocate_step_max=8192),
            syncer=cast(Syncer, self.syncer),
            sealer=cast(Syncer, self.sealer),
            executor=self.executor,
            call_on_loop=lambda function, *args: function(*args),
            call_later=lambda delay_s, function, *args: self.later.append((delay_s, function, args)),
            schedule_turn=self._wanted,
            take_dead_letters=lambda host, letters: self.letters.extend((host, each) for each in letters),
        )

    def _wanted(self) -> None:
        self.turns_wanted += 1

    def add_topic(self, topic: str, topic_id: int = 0, **policy: Any) -> TopicRecord:
        record = TopicRecord(topic, topic_id or len(self.topics) + 1, 0, TopicPolicy(**policy), 0)
        self.topics[topic] = record
        return record

    def find_topic(self, name: str) -> tuple[TopicRecord, int]:
        try:
            return self.topics[name], 0
        except KeyError:
            raise TopicNotFound(f"topic {name} does not exist") from None

    @property
    def hosted(self) -> HostedPartition:
        return self.shard.partitions[TOPIC]

    def turn(self) -> None:
        self.shard.turn()

    def stored(self) -> list[tuple[int, bytes]]:
        """All records of the topic that are acknowledged, from the disk."""
        log, end = self.hosted.log, self.hosted.high_watermark
        assert log is not None
        records: list[tuple[int, bytes]] = []
        offset = log.start
        while offset < end:
            chunk = log.read(offset, end)
            records += records_in(chunk.data)
            offset = chunk.next_offset
        return records

    def run_later(self) -> list[float]:
        """Carry out what was put off; return the delays in seconds."""
        later, self.later = self.later, []
        for _, function, args in later:
            function(*args)
        return [delay_s for delay_s, _, _ in later]

    # -- what a client does -----------------------------------------------------------------------

    def frame(self, session: Session, raw: bytes) -> None:
        buffer = memoryview(bytearray(raw))
        for frame in FrameDecoder().frames(buffer, 0, len(buffer)):
            self.shard.on_frame(session, frame, buffer)

    def ask(self, session: Session, kind: int, body: Any = None, handle: int = 0) -> int:
        self.correlation += 1
        self.frame(session, wire.control_frame(kind, body, self.correlation, handle))
        return self.correlation

    def open_producer(
        self, session: RecordingSession, handle: int = 1, name: str = "p"
    ) -> wire.ProducerOpened:
        self.ask(session, Kind.OPEN_PRODUCER, wire.OpenProducer(TOPIC, name), handle)
        return wire.decode_control(session.only(Kind.PRODUCER_OPENED).body, wire.ProducerOpened)

    def publish(self, session: Session, batch: bytes, handle: int = 1) -> int:
        self.correlation += 1
        self.frame(session, wire.frame_header(Kind.PUBLISH, len(batch), self.correlation, handle) + batch)
        return self.correlation

    def subscribe(
        self, session: RecordingSession, handle: int = 2, name: str = "s", **fields: Any
    ) -> wire.Subscribed:
        """Subscribe and let the cursor reach the disk."""
        fields = {"consumer": f"c{handle}", "credit_records": 1000, "credit_bytes": CREDIT, **fields}
        self.ask(session, Kind.SUBSCRIBE, wire.Subscribe(TOPIC, name, **fields), handle)
        self.syncer.step()
        (frame,) = [each for each in session.take() if each.kind != Kind.PUBLISHED]
        assert frame.kind == Kind.SUBSCRIBED, Kind(frame.kind).name
        return wire.decode_control(frame.body, wire.Subscribed)

    def ack(self, session: Session, start: int, end: int, handle: int = 2) -> None:
        ranges = start.to_bytes(8, "little") + end.to_bytes(8, "little")
        self.frame(session, wire.ack_frame(handle, ranges))

    def nack(self, session: Session, start: int, end: int, handle: int = 2) -> None:
        self.ask(session, Kind.NACK, wire.Nack([(start, end)], 0, "bad"), handle)

    def admin(self, session: RecordingSession, op: str, **args: Any) -> Received:
        self.ask(session, Kind.ADMIN, wire.Admin(op, TOPIC, args))
        self.syncer.step()
        # A seek is told to the session's consumers as well.
        frames = [each for each in session.take() if each.kind != Kind.SOUGHT]
        assert len(frames) == 1, frames
        return frames[0]


def batch(*payloads: bytes, **fields: Any) -> bytes:
    """An unstamped batch as a client sends it."""
    return encode(list(payloads), publish_time_us=0, **fields).to_bytes()


def numbered(count: int, start: int = 0, **fields: Any) -> bytes:
    """One batch with the payloads ``b"start"``, ``b"start+1"`` .."""
    return batch(*(b"%d" % number for number in range(start, start + count)), **fields)


def expected(start: int, end: int) -> list[tuple[int, bytes]]:
    """The records of ``numbered`` batches that begin at offset 0."""
    return [(number, b"%d" % number) for number in range(start, end)]


def size_of(data: bytes) -> int:
    return read_header(data).size


class SteppedProposals:
    """Metadata commands that are committed when the test says so."""

    def __init__(self) -> None:
        self.state = Metadata()
        self.waiting: list[tuple[Command, Callable[[Any], None]]] = []
        self.refusal: DanubeError | None = None  # what submit raises
        self.changed = True  # others may have committed something

    def submit(self, command: Command, then: Callable[[Any], None]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.waiting.append((command, then))

    def apply(self, command: Command) -> Any:
        """The topic that the command changed or found, None, or the error."""
        try:
            decode_commands(join_commands([encode_command(command)]))
            needed = self.state.check(command)
            changes = self.state.apply(self.state.version + 1, command) if needed else []
        except DanubeError as error:
            return error
        records = [change.record for change in changes if hasattr(change, "record")]
        return records[-1] if records else self.state.find_topic(getattr(command, "topic", ""))

    def step(self, error: DanubeError | None = None) -> None:
        waiting, self.waiting = self.waiting, []
        for command, then in waiting:
            then(self.apply(command) if error is None else error)

    def create(self, topic: str, partitions: int = 0, **policy: Any) -> TopicRecord:
        made = self.apply(
            CreateTopic(topic=topic, partitions=partitions, policy=TopicPolicy(**policy), created_us=0)
        )
        assert isinstance(made, TopicRecord), made
        return made


class SteppedExaminations:
    """Definitions that are judged in this process, when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Request, Callable[[Any], None]]] = []
        self.seen: list[Request] = []

    def submit(self, request: Request, then: Callable[[Any], None]) -> None:
        self.waiting.append((request, then))

    def step(self, error: DanubeError | None = None) -> int:
        """Judge everything that waits (or fail it); return how many that were."""
        waiting, self.waiting = self.waiting, []
        for request, then in waiting:
            self.seen.append(request)
            outcome: Any = error
            if error is None:
                try:
                    outcome = judge(request)
                except DanubeError as refusal:
                    outcome = refusal
            then(outcome)
        return len(waiting)


CHECKING = ("default_compatibility", "compatibility_checks")


class RoutedBench(Bench):
    """A shard behind its router, as worker 0 of ``workers``."""

    def __init__(self, root: Path, workers: int = 1, **options: Any) -> None:
        super().__init__(root)
        self.proposals = SteppedProposals()
        self.examiner = SteppedExaminations()
        self.metadata_changes = 0
        self.metadata_reads = 0
        operations = Operations(
            cast(LocalLog, self.proposals), cast(Proposals, self.proposals),
            cast(Examinations, self.examiner),
            refresh=self._read_metadata,
            metadata_changed=self._changed_metadata,
            status=lambda: {"version": "test"},
            default_policy=TopicPolicy(),
            **{name: options.pop(name) for name in CHECKING if name in options},
        )  # fmt: skip
        self.router = Router(
            0, workers, self.shard, operations,
            schedule_turn=self._wanted,
            **{"default_partitions": 0, "auto_create": True, **options},
        )  # fmt: skip
        self.shard._find_topic = self.router.find_topic

    def _read_metadata(self) -> None:
        self.metadata_reads += 1

    def _changed_metadata(self) -> None:
        self.metadata_changes += 1

    def route(self, session: RoutedSession, raw: bytes) -> bool:
        buffer = memoryview(bytearray(raw))
        self.router.received()
        return all(
            self.router.route(session, frame, buffer)
            for frame in FrameDecoder().frames(buffer, 0, len(buffer))
        )

    def request(self, session: RoutedSession, kind: int, body: Any = None, handle: int = 0) -> int:
        self.correlation += 1
        assert self.route(session, wire.control_frame(kind, body, self.correlation, handle))
        return self.correlation

    def name_owned_by(self, worker: int, workers: int = 2) -> str:
        """A topic (made here) that this worker owns."""
        for number in range(64):
            record = self.proposals.create(f"/default/of-{worker}-{number}")
            if owner_of(record.topic_id, 0, workers) == worker:
                return record.topic
        raise AssertionError("no topic falls to this worker")


class FakeChannel:
    """A ring channel that keeps what is sent; ``room`` False refuses."""

    def __init__(self) -> None:
        self.room = True
        self.sent: list[tuple[int, int, bytes]] = []

    def send(self, worker: int, kind: int, parts: Sequence[bytes | memoryview]) -> bool:
        if self.room:
            self.sent.append((worker, kind, b"".join(parts)))
        return self.room

    def take(self) -> list[tuple[int, int, bytes]]:
        sent, self.sent = self.sent, []
        return sent


__all__ = [
    "CREDIT",
    "QUICK",
    "TOPIC",
    "Bench",
    "CountingCounters",
    "FakeChannel",
    "Frame",
    "Received",
    "RecordingSession",
    "RoutedBench",
    "SteppedExaminations",
    "SteppedExecutor",
    "SteppedProposals",
    "SteppedSyncer",
    "batch",
    "expected",
    "frames_in",
    "numbered",
    "records_in",
    "size_of",
]  # fmt: skip
