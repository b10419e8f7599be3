"""A shard that serves what its broker owns while the lease holds; metadata and time in the test's hands."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from danube.broker.clustered.directory import Directory
from danube.broker.clustered.owning import WITHOUT_LEASE_NS, Owning
from danube.broker.clustered.reserving import Reserving
from danube.broker.clustered.shard import DEPARTED_NS, OPEN_AGAIN_NS, STALE_NS, ClusterShard
from danube.broker.mover.claims import heir_of
from danube.broker.partition.opening import lost_before
from danube.broker.processes.lease import SharedLease
from danube.broker.processes.unbroken import Since
from danube.broker.shard import shard
from danube.cluster.log.local_log import LocalLog
from danube.core.cluster.commands import (
    AssignPartitions,
    GrantLease,
    OwnershipChanged,
    RegisterBroker,
    ReleasePartitions,
    UnloadPartitions,
)
from danube.core.metadata.commands import Command, CreateTopic, DeleteTopic, TopicDeleted, TopicRecord
from danube.core.metadata.machine import Metadata
from danube.core.metadata.policies import NamespacePolicy
from danube.core.partition.policy import TopicPolicy
from danube.core.placement.recovered import LOG_EPOCHS
from danube.core.protocol.native import Kind
from danube.errors import (
    ClosedError,
    DanubeError,
    InvariantBroken,
    OwnerMoved,
    StorageFailed,
    TopicNotFound,
    Unavailable,
)
from danube.host import clock, files
from danube.limits import UNSYNCED_RECORDS_MAX
from danube.wal.log.log import LogOptions
from danube.wal.log.syncer import Syncer
from tests.unit.broker_parts import TOPIC, Bench, RecordingSession, batch

OURS, THEIRS = 1, 2
SECOND_NS = 1_000_000_000


class ClusterBench(Bench):
    """Broker 1 of two; what it proposes is committed at once, unless the test says otherwise."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 10 * SECOND_NS
        self.silences = 0
        self.committing = True
        self.state = Metadata()
        super().__init__(root)
        self.suspended_ns = 0
        monkeypatch.setattr(clock, "monotonic_ns", lambda: self.now_ns)
        monkeypatch.setattr(clock, "elapsed_ns", lambda: self.now_ns + self.suspended_ns)
        self.lease = SharedLease()
        metadata = cast(LocalLog, self)
        self.directory = Directory(OURS, metadata, lambda: None)
        self.owning = Owning((0, 1), metadata, self.directory, self._submit)
        self.shard = self.cluster_shard = ClusterShard(
            self.directory, self.owning, Reserving(self.directory, self._submit), self.lease, self._silence,
            root=root, incarnation=1, find_topic=self.find_topic, counters=self.counters,
            log_options=LogOptions(segment_bytes=4096, preallocate_first=4096, preallocate_step_max=8192),
            syncer=cast(Syncer, self.syncer), sealer=cast(Syncer, self.sealer), executor=self.executor,
            call_on_loop=lambda function, *args: function(*args),
            call_later=lambda delay_s, function, *args: None, schedule_turn=self._wanted,
            take_dead_letters=lambda host, letters: None,
        )  # fmt: skip
        for broker_id in (OURS, THEIRS):
            self.commit(GrantLease(lease_id=broker_id, ttl_ms=10_000))
            self.commit(
                RegisterBroker(broker_id=broker_id, lease_id=broker_id, native_address=f"b{broker_id}:1")
            )
        self.commit(CreateTopic(topic=TOPIC, policy=TopicPolicy(), created_us=1))
        self.topics[TOPIC] = self.record = self.state.topic(TOPIC)
        self.session = RecordingSession()

    @property
    def version(self) -> int:
        return self.state.version

    def _silence(self) -> None:
        self.silences += 1

    def _submit(self, command: Command, then: Any) -> None:
        if not self.committing:
            return
        try:
            self.commit(command)
        except DanubeError as error:
            then(error)
        else:
            then(None)

    def commit(self, command: Command) -> None:
        for change in self.state.apply(self.state.version + 1, command):
            if isinstance(change, TopicDeleted):
                self.topics.pop(change.record.topic)
                self.shard.delete_topic(change.record)
            if isinstance(change, OwnershipChanged):
                self.cluster_shard.follow(change.record)

    @property
    def place(self) -> tuple[int, int]:
        return self.record.topic_id, 0

    @property
    def epoch(self) -> int:
        return self.state.cluster.owners.of(*self.place).epoch

    def hold(self, seconds: float = 2.0) -> None:
        """The lease holds."""
        self.lease.begin(self.version)
        self.lease.extend(clock.elapsed_ns() + int(seconds * SECOND_NS))
        self.cluster_shard.tick()

    def assign(self, broker_id: int = OURS) -> None:
        self.commit(AssignPartitions(broker_id=broker_id, partitions=((*self.place, self.epoch),)))

    def pass_time(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND_NS)

    def add_topic(self, topic: str, topic_id: int = 0, **policy: Any) -> TopicRecord:
        return super().add_topic(topic, topic_id, **policy)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterBench:
    return ClusterBench(tmp_path, monkeypatch)


def open_and_publish(bench: ClusterBench, payload: bytes = b"a") -> list[int]:
    bench.ask(bench.session, Kind.OPEN_PRODUCER, {"partition": TOPIC, "name": "p"}, 1)
    while bench.executor.waiting:
        bench.executor.step()
    bench.publish(bench.session, batch(payload))
    bench.turn()
    return [frame.kind for frame in bench.session.take()]


def test_only_the_owner_opens_and_the_log_has_the_epoch_of_the_ownership(bench: ClusterBench) -> None:
    bench.hold()
    bench.ask(bench.session, Kind.OPEN_PRODUCER, {"partition": TOPIC, "name": "p"}, 1)
    assert type(bench.session.only(Kind.ERROR).error) is Unavailable, "nobody owns it"
    bench.assign(THEIRS)
    bench.ask(bench.session, Kind.OPEN_PRODUCER, {"partition": TOPIC, "name": "p"}, 1)
    error = bench.session.only(Kind.ERROR).error
    assert isinstance(error, OwnerMoved) and error.facts["address"] == "b2:1"
    bench.commit(ReleasePartitions(broker_id=THEIRS, partitions=((*bench.place, 1),)))
    bench.assign(OURS)
    assert open_and_publish(bench) == [Kind.PRODUCER_OPENED, Kind.PUBLISHED]
    assert bench.hosted.core.epoch == 2 * LOG_EPOCHS


def test_what_is_assigned_before_the_lease_is_heard_of_is_opened_once_it_is(bench: ClusterBench) -> None:
    """No turn would write what such a partition is sent, and what that lies in is used again."""
    bench.assign()  # the leader is faster than the controller's word
    assert open_and_publish(bench)[-1:] != [Kind.PUBLISHED] and not bench.shard.partitions
    bench.hold()
    assert bench.epoch == 2 and open_and_publish(bench)[-1] == Kind.PUBLISHED
    assert [payload for _, payload in bench.stored()] == [b"a"]


def test_an_answer_to_what_was_asked_before_the_lease_ended_is_not_waited_for(bench: ClusterBench) -> None:
    bench.hold()
    bench.committing = False  # it is asked for an epoch, and the lease ends before that is answered
    bench.state.apply(bench.version + 1, AssignPartitions(broker_id=OURS, partitions=((*bench.place, 0),)))
    bench.ask(bench.session, Kind.OPEN_PRODUCER, {"partition": TOPIC, "name": "p"}, 1)
    bench.pass_time(3)
    bench.turn()
    bench.assign()
    assert not bench.owning.granted(bench.place), "it came without a lease"
    bench.committing = True
    bench.hold()
    assert bench.owning.granted(bench.place) and bench.epoch == 3


def test_records_are_never_taken_without_a_lease(bench: ClusterBench) -> None:
    bench.hold()
    bench.assign()
    open_and_publish(bench)
    hosted = bench.hosted
    bench.pass_time(3)
    bench.turn()
    bench.shard.write_soon(hosted)
    with pytest.raises(InvariantBroken, match="without a lease"):
        bench.turn()


def test_after_the_lease_nothing_is_written_or_answered_and_all_is_taken_anew(bench: ClusterBench) -> None:
    bench.hold()
    bench.assign()
    open_and_publish(bench)
    log = bench.hosted.log
    assert log is not None
    written = log.written_end
    bench.publish(bench.session, batch(b"too late"))
    bench.pass_time(3)
    bench.turn()
    assert bench.silences == 1 and log.written_end == written and not bench.shard.partitions
    assert Kind.PUBLISHED not in [frame.kind for frame in bench.session.take()]
    bench.turn()
    assert bench.silences == 1
    bench.hold()  # nobody took it meanwhile
    assert bench.epoch == 2 and open_and_publish(bench)[-1] == Kind.PUBLISHED
    assert bench.hosted.core.epoch == 2 * LOG_EPOCHS
    assert [offset for offset, _ in bench.stored()] == [0, 1]


def test_what_is_stored_and_waits_for_its_rate_is_answered_when_the_lease_ends(bench: ClusterBench) -> None:
    """A session of gRPC outlives its sockets; it would send again what it is told has failed."""
    bench.hold()
    bench.assign()
    open_and_publish(bench)
    hosted = bench.hosted
    hosted.limit(NamespacePolicy(max_publish_rate_per_topic=2))
    for payloads in ([b"paid", b"too"], [b"owed"]):
        bench.publish(bench.session, batch(*payloads))
    bench.turn()
    assert [frame.kind for frame in bench.session.take()] == [Kind.PUBLISHED]
    bench.publish(bench.session, batch(b"not written"))
    bench.pass_time(3)
    bench.turn()
    answers = bench.session.take()
    assert [frame.kind for frame in answers] == [Kind.PUBLISHED, Kind.ERROR, Kind.ERROR], "and the handle"
    assert isinstance(answers[1].error, OwnerMoved)
    assert hosted.core.written_end == 4


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_acknowledged_before_the_lease_ended_is_synced_all_the_same(
    bench: ClusterBench, fails: bool
) -> None:
    """A host that slept too long to sync may lose power as soon as it wakes."""
    bench.hold()
    bench.assign()
    assert open_and_publish(bench)[-1] == Kind.PUBLISHED
    log = bench.hosted.log
    assert log is not None and log.active is not None and log.synced_end < log.written_end
    file = log.active.file
    bench.pass_time(3)
    bench.turn()
    assert not bench.shard.partitions
    [(job, _)] = bench.syncer.jobs
    assert file in job.files
    bench.syncer.step(OSError(errno.EIO, "the disk fails") if fails else None)
    assert file not in log._unsynced.ends, "its descriptor is given back"
    bench.hold()
    assert open_and_publish(bench)[-1] == Kind.PUBLISHED
    assert [offset for offset, _ in bench.stored()] == [0, 1]


@pytest.mark.parametrize("fails", [False, True])
def test_it_is_synced_also_while_the_worker_ends(
    bench: ClusterBench, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    bench.hold()
    bench.assign()
    open_and_publish(bench)
    log = bench.hosted.log
    assert log is not None and log.active is not None
    file, synced = log.active.file, []

    def refuse(*job: object) -> None:
        raise ClosedError("the syncer was stopped")

    def fdatasync(fd: int) -> None:
        synced.append(fd)
        if fails:
            raise OSError(errno.EIO, "the disk fails")

    monkeypatch.setattr(bench.syncer, "submit", refuse)
    monkeypatch.setattr(files, "fdatasync", fdatasync)
    bench.pass_time(3)
    bench.turn()
    assert synced and not bench.shard.partitions and file.failed == fails and file not in log._unsynced.ends


def test_a_host_that_was_suspended_says_nothing_when_it_wakes(bench: ClusterBench) -> None:
    """Its monotonic clock stood still for ten minutes, in which another broker took everything over."""
    bench.hold()
    bench.assign()
    open_and_publish(bench)
    log = bench.hosted.log
    assert log is not None
    written = log.written_end
    bench.publish(bench.session, batch(b"too late"))
    bench.suspended_ns += 600 * SECOND_NS
    bench.turn()
    assert bench.silences == 1 and log.written_end == written and not bench.shard.partitions
    assert Kind.PUBLISHED not in [frame.kind for frame in bench.session.take()]
    bench.hold()
    bench.assign()
    assert open_and_publish(bench)[-1] == Kind.PUBLISHED, "and it serves again with a lease of now"


def test_a_lease_that_was_over_here_and_is_renewed_lets_the_broker_serve_again(bench: ClusterBench) -> None:
    """Its registration never ended: without a leader nobody renews a lease, and nobody ends one either."""
    bench.hold()
    bench.assign()
    open_and_publish(bench)
    bench.pass_time(3)
    bench.turn()
    assert bench.silences == 1 and not bench.shard.partitions
    bench.lease.extend(bench.now_ns + 2 * SECOND_NS)
    bench.turn()
    bench.shard.tick()
    assert bench.epoch == 2 and open_and_publish(bench)[-1] == Kind.PUBLISHED


def test_an_answer_that_was_ready_when_the_lease_ended_is_not_sent(bench: ClusterBench) -> None:
    bench.hold()
    bench.assign()
    open_and_publish(bench)
    writing = bench.shard.storage.write

    def write(hosted: Any) -> None:
        writing(hosted)
        bench.pass_time(3)  # the process slept between the write and the answer

    bench.shard.storage.write = write  # type: ignore[method-assign]
    bench.publish(bench.session, batch(b"b"))
    bench.turn()
    assert bench.silences == 1 and not bench.shard.partitions


def test_a_lease_that_ends_while_a_log_is_opened_anew_leaves_its_records(bench: ClusterBench) -> None:
    bench.hold()
    bench.assign()
    open_and_publish(bench)
    hosted, storage = bench.hosted, bench.shard.storage
    storage.fence(hosted, StorageFailed("the disk failed once"))
    bench.executor.held = True
    storage._start_reopen(hosted)
    (reopen,) = bench.executor.waiting
    bench.executor.waiting, bench.executor.held = [], False
    bench.pass_time(3)
    bench.turn()
    reopen()
    assert hosted.directory is not None and hosted.directory.exists()
    bench.hold()
    assert open_and_publish(bench)[-1] == Kind.PUBLISHED
    assert [offset for offset, _ in bench.stored()] == [0, 1]


def stale_reopen(bench: ClusterBench) -> Callable[[], None]:
    """A log is opened anew in a thread when its ownership ends; returns what lets the thread go on."""
    bench.hold()
    bench.assign()
    open_and_publish(bench)
    bench.shard.storage.fence(bench.hosted, StorageFailed("the disk failed once"))
    bench.executor.held = True
    bench.shard.storage._start_reopen(bench.hosted)
    (reopen,) = bench.executor.waiting
    bench.executor.waiting = []
    bench.commit(ReleasePartitions(broker_id=OURS, partitions=((*bench.place, 1),)))
    bench.assign()
    return reopen


def test_a_log_is_not_opened_before_the_thread_has_ended_that_opens_it_for_an_earlier_ownership(
    bench: ClusterBench,
) -> None:
    reopen = stale_reopen(bench)
    bench.session.take()
    bench.ask(bench.session, Kind.OPEN_PRODUCER, {"partition": TOPIC, "name": "p"}, 3)
    assert not bench.executor.waiting and not bench.session.take(), "it waits"
    reopen()
    assert len(bench.executor.waiting) == 1, "and is opened once, as soon as that has ended"
    bench.executor.step()
    assert bench.session.only(Kind.PRODUCER_OPENED)
    assert open_and_publish(bench, b"b")[-1] == Kind.PUBLISHED
    assert [offset for offset, _ in bench.stored()] == [0, 1]


def test_who_waits_for_a_log_that_a_thread_still_opens_is_told_after_a_while(bench: ClusterBench) -> None:
    reopen = stale_reopen(bench)
    bench.session.take()
    bench.ask(bench.session, Kind.OPEN_PRODUCER, {"partition": TOPIC, "name": "p"}, 3)
    for _ in range(4):  # the lease goes on meanwhile
        bench.pass_time(STALE_NS / SECOND_NS / 3)
        bench.lease.extend(bench.now_ns + 2 * SECOND_NS)
        bench.shard.tick()
    assert isinstance(bench.session.only(Kind.ERROR).error, Unavailable)
    assert not bench.executor.waiting, "nothing else is opened in its place"
    reopen()
    bench.pass_time(OPEN_AGAIN_NS / SECOND_NS)
    bench.lease.extend(bench.now_ns + 2 * SECOND_NS)
    bench.shard.tick()
    bench.executor.step()
    assert TOPIC in bench.shard.partitions, "it is opened though nobody asks again"


def test_a_registration_that_was_made_while_it_slept_is_noticed(bench: ClusterBench) -> None:
    bench.hold()
    bench.assign()
    open_and_publish(bench)
    bench.lease.begin(bench.version + 1)
    bench.lease.extend(bench.now_ns + 9 * SECOND_NS)
    bench.turn()
    assert bench.silences == 1 and not bench.shard.partitions
    bench.shard.tick()
    assert bench.epoch == 1, "not before that version is known here"


def test_what_another_broker_got_is_let_go_with_its_address(bench: ClusterBench) -> None:
    bench.hold()
    bench.assign()
    open_and_publish(bench)
    hosted = bench.hosted
    bench.commit(ReleasePartitions(broker_id=OURS, partitions=((*bench.place, 1),)))
    assert hosted.deleted and not bench.shard.partitions
    bench.session.take()
    bench.assign(THEIRS)
    bench.ask(bench.session, Kind.OPEN_PRODUCER, {"partition": TOPIC, "name": "p"}, 3)
    assert bench.session.only(Kind.ERROR).error.facts["address"] == "b2:1"
    assert hosted.directory is not None and hosted.directory.exists()


def test_records_on_this_disk_only_are_not_given_away(bench: ClusterBench) -> None:
    bench.hold()
    bench.assign()
    open_and_publish(bench)
    bench.commit(UnloadPartitions(partitions=((*bench.place, 1),), reason="unload", to_broker_id=THEIRS))
    bench.shard.tick()
    assert bench.epoch == 2 and not bench.state.cluster.owners.of(*bench.place).reason
    assert open_and_publish(bench)[-1] == Kind.PUBLISHED


def test_a_worker_that_starts_takes_what_its_predecessor_had(bench: ClusterBench) -> None:
    bench.state.apply(bench.version + 1, AssignPartitions(broker_id=OURS, partitions=((*bench.place, 0),)))
    bench.ask(bench.session, Kind.OPEN_PRODUCER, {"partition": TOPIC, "name": "p"}, 1)
    assert not bench.session.take() and not bench.executor.waiting, "not without a lease"
    bench.hold()
    bench.executor.step()
    assert bench.epoch == 2 and bench.session.only(Kind.PRODUCER_OPENED)


def test_who_asks_a_broker_without_a_lease_is_soon_sent_elsewhere(bench: ClusterBench) -> None:
    """It may be cut off from the others, and a client that reaches it must not wait for that to end."""
    bench.hold()
    bench.assign()
    open_and_publish(bench)
    bench.pass_time(3)
    bench.shard.turn()
    bench.session.take()
    bench.ask(bench.session, Kind.OPEN_PRODUCER, {"partition": TOPIC, "name": "p"}, 2)
    bench.shard.tick()
    assert not bench.session.take(), "the lease may be renewed in this moment"
    bench.pass_time(WITHOUT_LEASE_NS / SECOND_NS)
    bench.shard.tick()
    (told,) = bench.session.take()
    assert told.error.retryable and "address" not in told.error.facts
    bench.hold()
    assert Kind.PUBLISHED in open_and_publish(bench), "what nobody took is ours again"


def test_who_waits_for_an_epoch_waits_no_longer_when_the_lease_ends(bench: ClusterBench) -> None:
    bench.hold()
    bench.committing = False  # asked for, and never answered
    bench.state.apply(bench.version + 1, AssignPartitions(broker_id=OURS, partitions=((*bench.place, 0),)))
    bench.ask(bench.session, Kind.OPEN_PRODUCER, {"partition": TOPIC, "name": "p"}, 1)
    bench.pass_time(3)
    bench.shard.turn()
    bench.pass_time(WITHOUT_LEASE_NS / SECOND_NS)
    bench.shard.tick()
    (told,) = bench.session.take()
    assert told.error.retryable


def test_who_has_open_what_was_given_away_waits_to_be_told_where_it_is(
    bench: ClusterBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.hold()
    bench.assign()
    open_and_publish(bench)
    bench.subscribe(bench.session)
    hosted = bench.hosted
    monkeypatch.setattr(hosted, "tier", None)
    log, hosted.log = hosted.log, None  # as of a topic that stores nothing
    bench.commit(UnloadPartitions(partitions=((*bench.place, 1),), reason="unload", to_broker_id=THEIRS))
    bench.shard.tick()
    hosted.log = log
    assert bench.state.cluster.owners.of(*bench.place).broker_id == 0
    assert not bench.session.take() and not bench.shard.partitions
    bench.assign(THEIRS)
    told = [frame.error.facts["address"] for frame in bench.session.take()]
    assert told == ["b2:1", "b2:1"], "the producer and the consumer"
    bench.pass_time(DEPARTED_NS / SECOND_NS + 1)


def test_a_partition_that_cannot_be_opened_yet_leaves_once_it_can(
    bench: ClusterBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has locally has to be in the store first; nobody else opens a partition without clients."""
    bench.hold(30)
    bench.assign()

    def failing(*_: Any) -> None:
        raise StorageFailed("the disk does not answer")

    opening = shard.open_partition
    monkeypatch.setattr(shard, "open_partition", failing)
    bench.commit(UnloadPartitions(partitions=((*bench.place, 1),), reason="unload", to_broker_id=THEIRS))
    bench.executor.step()
    assert not bench.shard.partitions
    monkeypatch.setattr(shard, "open_partition", opening)
    bench.pass_time(OPEN_AGAIN_NS / SECOND_NS)
    bench.shard.tick()
    bench.executor.step()
    bench.shard.tick()
    assert bench.epoch == 2, "it was asked to leave, and this one stays as it has no store"


def test_what_was_taken_over_is_opened_again_until_it_is_open(
    bench: ClusterBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without clients: its owner uploads what only this disk has, and takes what comes back."""
    bench.hold(30)
    bench.assign(THEIRS)
    bench.commit(ReleasePartitions(broker_id=THEIRS, partitions=((*bench.place, 1),)))

    def failing(*_: Any) -> None:
        raise StorageFailed("the disk does not answer")

    opening = shard.open_partition
    monkeypatch.setattr(shard, "open_partition", failing)
    bench.assign()
    bench.executor.step()
    assert not bench.shard.partitions
    monkeypatch.setattr(shard, "open_partition", opening)
    bench.pass_time(OPEN_AGAIN_NS / SECOND_NS)
    bench.shard.tick()
    bench.executor.step()
    bench.shard.tick()
    assert bench.hosted.core.epoch == 2 * LOG_EPOCHS


def test_what_is_on_this_host_only_goes_on_behind_a_hole_after_the_end_of_the_machine(
    bench: ClusterBench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Once; nobody has reserved anything, and a partition that nobody had before has lost nothing."""
    bench.hold(30)
    bench.cluster_shard.unbroken_since = Since(5, 5)
    bench.assign()
    assert Kind.PUBLISHED in open_and_publish(bench) and bench.hosted.core.log_end == 1
    for since, log_end in ((9, 2 + UNSYNCED_RECORDS_MAX), (9, 3 + UNSYNCED_RECORDS_MAX)):
        later = ClusterBench(tmp_path, monkeypatch)
        later.cluster_shard.unbroken_since = Since(since, since)
        later.hold(30)
        while later.epoch <= bench.epoch:
            later.assign()
        assert Kind.PUBLISHED in open_and_publish(later) and later.hosted.core.log_end == log_end
        bench = later


def test_the_mover_is_told_what_the_end_of_the_machine_may_have_taken(bench: ClusterBench) -> None:
    asked: list[dict[str, Any]] = []
    bench.shard.tiers = cast(Any, SimpleNamespace(inherit=lambda fields, then: asked.append(fields)))
    bench.cluster_shard.unbroken_since = Since(5, 5)
    bench.hold(30)
    bench.assign()
    bench.ask(bench.session, Kind.OPEN_PRODUCER, {"partition": TOPIC, "name": "p"}, 1)
    heir = heir_of(asked[0] | {"id": 1})
    assert (heir.incarnation, heir.lost_before) == (1, 5)
    synced = msgspec.structs.replace(bench.record, policy=TopicPolicy(durability="fsync"))
    assert lost_before(Since(5, 5), synced) == 0


def test_a_topic_that_is_deleted_while_it_moves_leaves_nothing(
    bench: ClusterBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.hold()
    bench.assign()
    open_and_publish(bench)
    hosted, directory = bench.hosted, bench.hosted.directory
    monkeypatch.setattr(hosted, "tier", None)
    log, hosted.log = hosted.log, None  # as of a topic that stores nothing
    bench.commit(UnloadPartitions(partitions=((*bench.place, 1),), reason="unload", to_broker_id=THEIRS))
    bench.shard.tick()
    hosted.log = log
    assert bench.state.cluster.owners.of(*bench.place).broker_id == 0
    other = RecordingSession()
    bench.ask(other, Kind.OPEN_PRODUCER, {"partition": TOPIC, "name": "q"}, 1)
    assert not other.take() and not bench.session.take(), "both wait to be told where it is"
    bench.commit(DeleteTopic(topic=TOPIC))
    assert isinstance(other.only(Kind.ERROR).error, TopicNotFound)
    assert isinstance(bench.session.only(Kind.ERROR).error, TopicNotFound)
    assert directory is not None and not directory.exists()
    assert not bench.owning.granted(bench.place)


def test_a_topic_that_is_deleted_is_asked_to_leave_no_more(bench: ClusterBench) -> None:
    bench.hold()
    bench.assign()
    open_and_publish(bench)
    bench.commit(UnloadPartitions(partitions=((*bench.place, 1),), reason="unload", to_broker_id=THEIRS))
    bench.commit(DeleteTopic(topic=TOPIC))
    bench.shard.tick()
    assert not bench.cluster_shard._leaving and not bench.owning.granted(bench.place)


def test_who_waits_for_a_partition_that_cannot_be_given_away_yet_is_served(bench: ClusterBench) -> None:
    bench.hold()
    bench.assign()
    open_and_publish(bench)
    bench.cluster_shard.silence(bench.hosted)
    other = RecordingSession()
    bench.ask(other, Kind.OPEN_PRODUCER, {"partition": TOPIC, "name": "q"}, 1)
    bench.publish(bench.session, batch(b"b"))
    assert isinstance(bench.session.only(Kind.ERROR).error, OwnerMoved) and not other.take()
    bench.cluster_shard.serve_on(bench.hosted)
    assert other.only(Kind.PRODUCER_OPENED)
    bench.publish(bench.session, batch(b"b"))
    bench.turn()
    assert bench.session.only(Kind.PUBLISHED)
