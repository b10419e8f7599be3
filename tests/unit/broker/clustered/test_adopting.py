"""A broker that was alone begins a cluster in place: nothing is lost, and a crash in between is mended."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from danube.app import _controller
from danube.broker.clustered.adopting import adopt_directory
from danube.broker.clustered.controller import check_cluster
from danube.broker.processes import unbroken
from danube.broker.processes.copied import begin_history, note_place
from danube.broker.processes.data_dir import DataDir
from danube.broker.tiers.inheritance import Heir, inherit, read_owner
from danube.cluster.control.recovery import Plan, recover, unfinished
from danube.cluster.log.local_log import LocalLog
from danube.cluster.log.node_files import MEMBER, NodeRecord, load_node, store_node
from danube.cluster.raft.disk import DirectoryDisk
from danube.cluster.raft.journal import Journal
from danube.config.loading import load
from danube.core.metadata.commands import CreateTopic
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import TopicPolicy
from danube.core.placement.recovered import LOG_EPOCHS, OFFSETS_AHEAD, recovery_of, reservation_of
from danube.errors import AlreadyRunning, Damage, NotFound, WrongState
from danube.wal.log.log import Log, LogIdentity
from danube.wal.tier.binding import bound_store, rebind, share, stored_identity, take_over
from danube.wal.tier.uploader import Ownership
from tests.fakes.memory_store import MemoryStore
from tests.unit.failing_files import FailingFiles, Killed
from tests.unit.wal_samples import append, memory_directory

ADDRESS = "a:7650"
LIVED = LogIdentity(1, 0)
COUNT = 7


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    with memory_directory(tmp_path) as directory:
        yield directory / "data"


def lived(place: Path) -> Path:
    """Alone: a topic with records, a partitioned one that nobody wrote to, and one that keeps nothing."""
    data = DataDir(place)
    note_place(place)
    incarnation = data.next_incarnations(1)
    unbroken.begin(place, incarnation)
    with LocalLog(place / "metadata") as log:
        log.propose(CreateTopic(topic="/default/t", policy=TopicPolicy(), created_us=1))
        log.propose(CreateTopic(topic="/default/wide", policy=TopicPolicy(), created_us=1, partitions=2))
        lossy = TopicPolicy(reliable=False, durability="memory")
        log.propose(CreateTopic(topic="/default/lossy", policy=lossy, created_us=1))
    log_of = Log.open(directory_of(place, LIVED), LIVED, incarnation * LOG_EPOCHS)
    for number in range(COUNT):
        append(log_of, b"%d" % number)
    log_of.close()
    unbroken.end(place)
    data.close()
    return place


def directory_of(place: Path, identity: LogIdentity) -> Path:
    return place / "partitions" / identity.directory_name


def machine_of(place: Path) -> Metadata:
    """The machine that the member will start with."""
    journal = Journal(DirectoryDisk(place / "raft"))
    found = journal.recover()
    node = load_node(place)
    assert node.state == MEMBER and found.identity.cluster_id == node.cluster_id
    assert found.base.members.voters == {node.node_id: ADDRESS}
    state = Metadata.restore(journal.snapshot())
    assert found.base.index == state.cluster.agreement.index
    journal.close()
    return state


def continued(place: Path, state: Metadata, identity: LogIdentity) -> int:
    """Take a partition as its worker does, with a store; where its log goes on."""
    broker_id = int(load_node(place).node_id)
    known = state.cluster.owners.of(*identity)
    assert known.broker_id == broker_id
    epoch, directory = known.epoch + 1, directory_of(place, identity)
    owner = Ownership("/default/t", identity, epoch * LOG_EPOCHS, directory)
    heir = Heir(owner, broker_id, epoch, reservation_of(state, *identity))
    assert inherit(MemoryStore(), heir, place, 1).continued
    kept = read_owner(directory)
    assert kept is not None and (kept.broker_id, kept.last_epoch) == (broker_id, epoch)
    log = Log.open(directory, identity, owner.epoch)
    log_end = log.log_end
    log.close()
    return log_end


def test_topics_and_offsets_go_on_in_the_cluster(place: Path) -> None:
    found = adopt_directory(lived(place), ADDRESS)
    assert found.told == {"topics": 3, "partitions": 4, "logs": 3}
    assert load_node(place) == NodeRecord(found.plan.node_id, found.plan.cluster_id, MEMBER)
    state = machine_of(place)
    assert sorted(one.topic for one in state.topics()) == ["/default/lossy", "/default/t", "/default/wide"]
    ends = {
        (one.topic_id, one.partition): (one.end, one.closed) for one in state.cluster.reservations.records()
    }
    assert ends == {(1, 0): (COUNT, True), (2, 0): (0, True), (2, 1): (0, True)}
    assert len(state.cluster.owners) == 3, "topics that keep nothing wait for an owner"
    assert continued(place, state, LIVED) == COUNT
    assert continued(place, state, LogIdentity(2, 1)) == 0
    assert (place / found.plan.kept / "metadata" / "metadata.log").exists()


def test_a_history_that_no_log_has_begun_yet_is_begun(place: Path) -> None:
    """In a cluster reservations stand for it, so each log goes ahead before."""
    data = DataDir(lived(place))
    history = begin_history(data, "put back")
    data.close()
    adopt_directory(place, ADDRESS)
    state = machine_of(place)
    assert recovery_of(state).history_id == history.history_id
    for identity in (LIVED, LogIdentity(2, 0)):
        assert continued(place, state, identity) >= OFFSETS_AHEAD


def test_a_copy_that_was_put_back_begins_a_history_first(place: Path) -> None:
    shutil.copytree(lived(place), place.with_name("copy"))
    adopt_directory(place.with_name("copy"), ADDRESS)
    assert recovery_of(machine_of(place.with_name("copy"))).count == 1


def test_who_cannot_be_adopted_is_told_why_and_stays_as_it_is(place: Path) -> None:
    with pytest.raises(NotFound, match="not the data directory of a broker that was alone"):
        adopt_directory(place, ADDRESS)
    assert not place.exists()
    data = DataDir(lived(place))
    with pytest.raises(AlreadyRunning):
        adopt_directory(place, ADDRESS)
    data.close()
    metadata = (place / "metadata" / "metadata.log").read_bytes()
    (place / "metadata" / "metadata.log").write_bytes(metadata[:50] + b"?" + metadata[51:])
    with pytest.raises(Damage):
        adopt_directory(place, ADDRESS)
    assert not (place / "raft").exists() and unfinished(place) is None
    (place / "metadata" / "metadata.log").write_bytes(metadata)
    cluster_id = adopt_directory(place, ADDRESS).plan.cluster_id
    with pytest.raises(WrongState, match=f"member of cluster {cluster_id}"):
        adopt_directory(place, ADDRESS)
    (place / "node_id").unlink()
    with pytest.raises(Damage, match="node_id is missing"):
        adopt_directory(place, ADDRESS)


def test_a_member_is_not_started_on_what_was_not_adopted(place: Path) -> None:
    store_node(lived(place), NodeRecord("11"))  # as an adoption that was cut off early leaves it
    config = load(None, {}, {"data_dir": place, "cluster.seed_nodes": "127.0.0.1:1"}).config
    with pytest.raises(WrongState, match="broker that was alone") as raised:
        check_cluster(config.cluster, place)
    assert f"danube cluster adopt --data-dir {place}" in raised.value.hint


@pytest.mark.parametrize("how", ["killed", "killed after"])
def test_cut_off_at_any_call_it_is_alone_or_a_member_or_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    failing = FailingFiles(monkeypatch)
    origin, at, refused = lived(place), 0, 0
    (origin / "store").write_text(json.dumps({"format": 1, "store_id": "s", "created_us": 1}))
    (origin / "place").unlink()  # the copies are to count as themselves
    while True:
        one = place.with_name(f"data-{at}")
        shutil.copytree(origin, one)
        failing.arm(at, how)
        try:
            adopt_directory(one, ADDRESS)
            fired = failing.fired
        except Killed:
            fired = 1
        failing.disarm()
        if not fired:
            break
        plan = unfinished(one)
        if plan is not None:
            refused += 1
            is_refused(one, plan)
        elif not load_node(one).cluster_id:
            still_alone(one)
        if plan is not None or not load_node(one).cluster_id:
            adopt_directory(one, ADDRESS)
        state = machine_of(one)
        assert continued(one, state, LIVED) == COUNT
        assert bound_store(one).store_id == load_node(one).cluster_id  # type: ignore[union-attr]
        assert unfinished(one) is None
        shutil.rmtree(one)
        at += 1
    assert at > 20 and refused > 5


def still_alone(place: Path) -> None:
    """A start alone finds all that it had."""
    assert not (place / "raft").exists()
    with LocalLog(place / "metadata", create=False) as log:
        assert log.state.topic_count == 3


def is_refused(place: Path, plan: Plan) -> None:
    """No broker starts, and nothing else is done to it."""
    for flags in ({}, {"cluster.seed_nodes": "127.0.0.1:1"}):
        with pytest.raises(WrongState, match="half changed") as raised:
            _controller(load(None, {}, {"data_dir": place, **flags}).config)
        assert "danube cluster adopt" in raised.value.hint
    with pytest.raises(WrongState, match="half changed"):
        recover(place, rebind)


def test_the_store_of_one_host_becomes_the_cluster_s(place: Path) -> None:
    store = MemoryStore()
    take_over(store, lived(place), "holder")
    cluster_id = adopt_directory(place, ADDRESS).plan.cluster_id
    share(store, place, cluster_id)
    assert stored_identity(store).store_id == cluster_id  # type: ignore[union-attr]
    share(store, place, cluster_id)


def test_a_store_that_another_host_has_taken_over_is_not_taken_back(place: Path) -> None:
    store = MemoryStore()
    take_over(store, lived(place), "holder")
    shutil.copytree(place, place.with_name("other"))
    take_over(store, place.with_name("other"), "another")
    cluster_id = adopt_directory(place, ADDRESS).plan.cluster_id
    with pytest.raises(WrongState, match="another host has taken over"):
        share(store, place, cluster_id)


def test_without_a_store_there_is_none_to_take_along(place: Path) -> None:
    cluster_id = adopt_directory(lived(place), ADDRESS).plan.cluster_id
    assert bound_store(place) is None
    share(store := MemoryStore(), place, cluster_id)
    assert stored_identity(store).store_id == cluster_id  # type: ignore[union-attr]
