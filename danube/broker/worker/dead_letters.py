"""Dead letters: copies of records that a subscription gave up on, in its dead letter topic.

The copy is published like a client's batch, through the router, because another worker may own the dead
letter topic.  If another broker owns it, the worker publishes through a client of its own.  The original is
acked only when the copy is acknowledged.  If that fails, it is tried again after the subscription's back-off.

A copy is made for whoever set the failure policy: that principal must have Produce on the dead letter topic
now, and the namespace may keep its letters within.  Else the record stays, and the subscription says why.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from danube.broker.api import RoutedSession
from danube.broker.partition.hosted import HostedSubscription
from danube.client.machine.publishing import Outgoing, PartitionProducer
from danube.core.batch.columns import BatchView, encode
from danube.core.metadata.commands import CreateTopic, Outcome
from danube.core.metadata.known_consumers import producer_identity
from danube.core.metadata.policies import NOTHING, fitting
from danube.core.metadata.quotas import check_auto_create, namespace_of
from danube.core.partition.policy import TopicPolicy
from danube.core.protocol import native as wire
from danube.core.protocol.native import FrameDecoder, Kind, OpenProducer
from danube.core.security.principals import INTERNAL
from danube.errors import Conflict, DanubeError, OffsetOutOfRange, TopicNotFound
from danube.host import clock, telemetry
from danube.limits import ATTRIBUTE_BYTES_MAX, ATTRIBUTES_PER_RECORD_MAX, RECORD_BYTES_MAX

if TYPE_CHECKING:
    from danube.broker.clustered.parts import ClusterParts
    from danube.broker.operations.proposals import Proposals
    from danube.broker.routing.router import Router
    from danube.broker.shard.shard import Shard
    from danube.broker.traffic import Traffic
    from danube.client.machine.reply import Reply
    from danube.cluster.log.local_log import LocalLog
    from danube.core.batch.columns import EncodedBatch
    from danube.core.dispatch.grants import DeadLetter

_log = telemetry.events("dead_letters")
INTERNAL_CONNECTION_ID = 1 << 62
WAITING_MAX = 10_000


class PublishingWorker(Protocol):
    """Members of :class:`danube.broker.worker.worker.Worker` that DeadLetters uses."""

    index: int
    counters: Traffic
    metadata: LocalLog
    proposals: Proposals
    shard: Shard
    router: Router
    cluster: ClusterParts | None

    def metadata_changed(self) -> None: ...
    def schedule_turn(self) -> None: ...


class _Letter(NamedTuple):
    """A record whose copy is being published: its subscription and offset."""

    host: HostedSubscription
    offset: int


class _Target:
    """This worker's producer of one dead letter topic; letters wait while it is being opened."""

    def __init__(self) -> None:
        self.handle = 0
        self.open = False
        self.opening = False
        self.elsewhere: PartitionProducer | None = None  # if another broker owns the topic
        self.waiting: deque[tuple[HostedSubscription, DeadLetter]] = deque()


class DeadLetters(RoutedSession):
    """This worker's publisher of dead letters; a session without a socket."""

    def __init__(self, worker: PublishingWorker) -> None:
        super().__init__(INTERNAL_CONNECTION_ID, INTERNAL)
        self._worker = worker
        self._targets: dict[str, _Target] = {}
        self._by_handle: dict[int, _Target] = {}
        self._letters: dict[int, _Letter] = {}
        self._correlation = 0

    # -- taking letters ---------------------------------------------------------------------------

    def take(self, host: HostedSubscription, letters: list[DeadLetter]) -> None:
        """Publish the copies of these records; called when a subscription gives up on them."""
        topic = host.core.failure.dead_letter_topic
        try:
            self._judge(host, topic)
        except DanubeError as error:
            _log.warning("dead letters not allowed", partition=host.hosted.name, error=str(error))
            self._worker.counters.add("dead_letters_refused", len(letters))
            for letter in letters:
                self._failed(host, letter.offset, str(error))
            return
        target = self._targets.setdefault(topic, _Target())
        if target.elsewhere is not None and target.elsewhere.failure is not None:
            target.open, target.elsewhere = False, None  # the producer ended while it was idle
        for letter in letters:
            if len(target.waiting) >= WAITING_MAX:
                self._failed(host, letter.offset)
            else:
                target.waiting.append((host, letter))
        if target.open:
            self._publish_waiting(target)
        elif not target.opening:
            self._open(topic, target)

    def _judge(self, host: HostedSubscription, topic: str) -> None:
        """Raise PolicyMismatch, NotAllowed or NotAuthenticated if no letter may go to this topic."""
        self._worker.metadata.state.quotas.check_letters(host.hosted.record.topic, topic)
        judging = self._worker.router.judging
        if judging is not None:
            judging.letter(host.core.failure.set_by, topic)

    def _publish_waiting(self, target: _Target) -> None:
        while target.waiting:
            host, letter = target.waiting.popleft()
            try:
                taken = self._publish(target, host, letter)
            except OffsetOutOfRange as error:
                host.expire(int(error.facts["start"]))
                continue
            except DanubeError as error:
                _log.warning("dead letter not written", offset=letter.offset, error=str(error))
                taken = False
            if not taken:
                self._failed(host, letter.offset)

    def _failed(self, host: HostedSubscription, offset: int, why: str = "it could not be sent now") -> None:
        """Keep the record; the next dispatch of its subscription schedules another attempt."""
        host.dead_letter_error = why
        host.core.dead_letter_failed(offset, clock.monotonic_ns())
        self._worker.shard.wake(host.hosted)

    def _fail_waiting(self, target: _Target, why: str) -> None:
        """Fail all waiting letters of a topic that cannot be opened now; each is tried again later."""
        _log.warning("dead letter topic not open", error=why, letters=len(target.waiting))
        target.open = target.opening = False
        waiting, target.waiting = target.waiting, deque()
        for host, letter in waiting:
            self._failed(host, letter.offset, why)

    def _publish(self, target: _Target, host: HostedSubscription, letter: DeadLetter) -> bool:
        chunk = host.hosted.chunk(letter.offset)
        if chunk.first_offset > letter.offset:  # the record was damaged or compacted since its delivery
            host.pass_missing(letter.offset, chunk.first_offset, chunk.hole_before)
            return True
        place = chunk.places[chunk.find(letter.offset)]
        index = chunk.index_of(place, letter.offset)
        if index is None:
            host.core.skip_damaged(letter.offset, letter.offset + 1, why="compacted")
            return True
        original = BatchView(chunk.batch(place))
        encoded = encode(
            [original.payload(index)],
            producer_name=f"dead-letters-{self._worker.index}",
            keys=[original.key(index)],
            attributes=[self._attributes(host, letter, original, index)],
            publish_time_us=clock.wall_us(),
            schema_id=original.schema_id,
            schema_version=original.schema_version,
        )
        if target.elsewhere is not None:
            self._send_elsewhere(target.elsewhere, target, _Letter(host, letter.offset), encoded)
            return True
        batch = encoded.to_bytes()
        correlation = self._next_correlation()
        frame = wire.frame_header(Kind.PUBLISH, len(batch), correlation, target.handle) + batch
        self._letters[correlation] = _Letter(host, letter.offset)  # before routing: it may refuse at once
        if self._route(frame):
            return True
        del self._letters[correlation]
        return False

    def _send_elsewhere(
        self, producer: PartitionProducer, target: _Target, letter: _Letter, batch: EncodedBatch
    ) -> None:
        def settled(reply: Reply) -> None:
            if reply.error is None:
                self._stored(letter)
                return
            _log.warning("dead letter refused", error=str(reply.error))
            self._failed(letter.host, letter.offset, str(reply.error))

        outgoing = Outgoing(producer, batch)
        outgoing.when_settled(settled)
        producer.send(outgoing, 0, 0, 0)

    def _stored(self, letter: _Letter) -> None:
        letter.host.core.dead_lettered(letter.offset)
        letter.host.dead_letter_error = ""
        self._worker.counters.add("dead_letters")
        self._worker.shard.wake(letter.host.hosted)

    def _attributes(
        self, host: HostedSubscription, letter: DeadLetter, original: BatchView, index: int
    ) -> dict[str, str]:
        added = {
            "x-original-topic": host.hosted.name,
            "x-original-subscription": host.core.name,
            "x-original-topic-offset": str(letter.offset),
            "x-original-producer-id": str(_producer_id(host, original)),
            "x-original-broker-addr": original.origin,
            "x-poison-policy": "dead_letter",
            "x-delivery-attempt": str(letter.deliveries),
            "x-failure-reason": letter.reason,
        }
        kept = dict(list(original.attributes(index).items())[: ATTRIBUTES_PER_RECORD_MAX - len(added)])
        while kept and _encoded_bytes(kept) + _encoded_bytes(added) > ATTRIBUTE_BYTES_MAX:
            kept.popitem()
        return kept | added

    # -- the dead letter topic --------------------------------------------------------------------

    def _open(self, topic: str, target: _Target) -> None:
        """Open a producer of the topic; create the topic first if it does not exist."""
        target.opening = True
        try:
            record = self._worker.metadata.state.topic(topic)
        except TopicNotFound:
            policy = TopicPolicy(max_record_bytes=RECORD_BYTES_MAX)
            quotas = self._worker.metadata.state.quotas
            policy = fitting(policy, quotas.effective(namespace_of(topic)) or NOTHING)
            command = CreateTopic(topic=topic, policy=policy, created_us=clock.wall_us(), ensure=True)
            try:
                check_auto_create(self._worker.metadata.state, topic)
                self._worker.proposals.submit(command, lambda outcome: self._created(topic, target, outcome))
            except DanubeError as error:
                self._fail_waiting(target, str(error))
            return
        if self._worker.cluster is not None:
            name = record.physical_name(0)
            target.elsewhere = self._worker.cluster.producer_elsewhere(record, name, f"dead-letters-{name}")
            if target.elsewhere is not None:
                target.open, target.opening = True, False
                self._publish_waiting(target)
                return
        if self._by_handle.pop(target.handle, None) is not None:
            self._route(
                wire.control_frame(Kind.CLOSE_PRODUCER, None, self._next_correlation(), target.handle)
            )
        target.handle = self._next_correlation()
        self._by_handle[target.handle] = target
        body = OpenProducer(record.physical_name(0), f"dead-letters-{self._worker.index}", internal=True)
        frame = wire.control_frame(Kind.OPEN_PRODUCER, body, self._next_correlation(), target.handle)
        if not self._route(frame):
            self._fail_waiting(target, "the ring to its owner is full")

    def _created(self, topic: str, target: _Target, outcome: Outcome) -> None:
        self._worker.metadata_changed()
        if isinstance(outcome, DanubeError) and not isinstance(outcome, Conflict):
            self._fail_waiting(target, str(outcome))
        else:
            self._open(topic, target)

    def _next_correlation(self) -> int:
        self._correlation = self._correlation % 0xFFFF_FFFF + 1
        return self._correlation

    def _route(self, frame: bytes) -> bool:
        buffer = memoryview(bytearray(frame))
        taken = True
        for one in FrameDecoder().frames(buffer, 0, len(buffer)):
            taken = self._worker.router.route(self, one, buffer)
        self._worker.schedule_turn()
        return taken

    # -- answers ----------------------------------------------------------------------------------

    def send(self, *parts: bytes | memoryview) -> None:
        """Take the owner's answers to the frames of this session."""
        frames = b"".join(parts)
        for frame in FrameDecoder().frames(frames, 0, len(frames)):
            self._on_answer(frame, frames)

    def _on_answer(self, frame: Any, frames: bytes) -> None:
        letter = self._letters.pop(frame.correlation, None)
        target = self._by_handle.get(frame.handle)
        if frame.kind == Kind.PRODUCER_OPENED and target is not None:
            target.open, target.opening = True, False
            self._publish_waiting(target)
        elif frame.kind == Kind.PUBLISHED and letter is not None:
            self._stored(letter)
        elif frame.kind == Kind.ERROR:
            error = wire.decode_error(frames[frame.start : frame.end])
            _log.warning("dead letter refused", error=str(error))
            if letter is not None:
                self._failed(letter.host, letter.offset, str(error))
            for known in self._by_handle.values():
                if known.opening or frame.handle == known.handle:
                    self._fail_waiting(known, str(error))

    def worker_restarted(self, worker: int) -> None:
        """Schedule unanswered letters again, after another worker was replaced: it may have owned topics."""
        self._worker.router.worker_restarted(self, worker)
        letters, self._letters = self._letters, {}
        for letter in letters.values():
            self._failed(letter.host, letter.offset)


def _producer_id(host: HostedSubscription, original: BatchView) -> int:
    """Return the producer's id; for a producer that is not idempotent, the id derived from its name."""
    hosted = host.hosted
    return original.header.producer_id or producer_identity(
        hosted.topic_id, hosted.index, original.producer_name
    )


def _encoded_bytes(attributes: dict[str, str]) -> int:
    """Return a lower bound of the attributes' size in a batch."""
    return sum(len(key.encode()) + len(text.encode()) + 8 for key, text in attributes.items())
