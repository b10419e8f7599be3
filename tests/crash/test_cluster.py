"""Three controllers and more on loopback: killed, paused, started, added and removed under proposals."""

from __future__ import annotations

import random
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from danube.cluster.links.tls import TlsFiles
from danube.core.cluster.commands import Allocated, AllocateId, KeyRecord, PutKey
from danube.core.metadata.commands import CreateTopic, TopicRecord
from danube.core.partition.policy import TopicPolicy
from danube.errors import DanubeError, OutcomeUnknown, TopicExists, Unavailable, WrongState
from danube.limits import METADATA_VALUE_BYTES_MAX
from tests.broker_process import free_port, wait_until
from tests.certificates import Authority
from tests.cluster_process import Cluster, MemberProcess

pytestmark = pytest.mark.slow

COUNTER = "/test/counter"
GOES_ON = 50  # answers after a kill; what was on its way then is one


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as started:
        yield started


def create(name: str) -> CreateTopic:
    return CreateTopic(topic=f"/default/{name}", policy=TopicPolicy(), created_us=1)


def names(member: MemberProcess) -> set[str]:
    with member.log() as log:
        log.read_barrier()
        return {record.topic.removeprefix("/default/") for record in log.state.topics()}


def level(cluster: Cluster, timeout_s: float = 10.0) -> None:
    """Wait until all members that run hold the same."""

    def same() -> bool:
        statuses = [member.status() for member in cluster.members if member.running]
        return len({status.version if status else -id(status) for status in statuses}) == 1

    wait_until(same, timeout_s, "all members are level")
    snapshots = set()
    for member in cluster.members:
        if member.running:
            with member.log() as log:
                snapshots.add(log.state.snapshot())
    assert len(snapshots) == 1


class Writer(threading.Thread):
    """Takes numbers of one counter and makes topics through one member until told to stop."""

    def __init__(self, member: MemberProcess, name: str) -> None:
        super().__init__(name=name)
        self._member = member
        self._stopped = threading.Event()
        self.numbers: list[int] = []
        self.topics: list[str] = []
        self.unknown: list[str] = []
        self.unknown_numbers = 0
        self.errors: list[Exception] = []
        self.answered_s: list[float] = []

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        try:
            with self._member.log() as log:
                while not self._stopped.is_set():
                    name = f"{self.name}-{len(self.topics) + len(self.unknown)}"
                    number, topic = log.propose_many([AllocateId(counter=COUNTER), create(name)])
                    self.answered_s.append(time.monotonic())
                    if isinstance(number, Allocated):
                        self.numbers.append(number.number)
                    else:
                        self.unknown_numbers += 1
                    if isinstance(topic, TopicRecord):
                        self.topics.append(name)
                    elif isinstance(topic, Unavailable):
                        self.unknown.append(name)
                    else:
                        raise AssertionError(f"{name} is new, but: {topic}")
        except (Exception, AssertionError) as error:
            self.errors.append(error)


def judge(cluster: Cluster, writers: list[Writer]) -> None:
    """What was acknowledged is there, and nothing was done twice."""
    assert [error for writer in writers for error in writer.errors] == []
    level(cluster)
    present = names(next(member for member in cluster.members if member.running))
    acknowledged = {name for writer in writers for name in writer.topics}
    unknown = {name for writer in writers for name in writer.unknown}
    assert acknowledged <= present, "lost"
    assert present <= acknowledged | unknown, "nobody asked for it"
    numbers = [number for writer in writers for number in writer.numbers]
    assert len(numbers) == len(set(numbers)), "a number was given twice"
    with next(member for member in cluster.members if member.running).log() as log:
        taken = log.propose(AllocateId(counter=COUNTER))
    assert isinstance(taken, Allocated)
    # A command that ran twice would have taken a number that nobody was given.
    assert taken.number - 1 <= len(numbers) + sum(writer.unknown_numbers for writer in writers)


def test_three_members_agree_and_read_what_they_wrote(cluster: Cluster) -> None:
    logs = [member.log() for member in cluster.members]
    for number in range(30):
        log = logs[number % 3]
        record = log.propose(create(f"t{number}"))
        assert log.state.topic(record.topic) == record, "what was proposed can be read at once"
        with pytest.raises(TopicExists):
            logs[(number + 1) % 3].propose(create(f"t{number}"))
    logs[0].read_barrier()
    assert len(logs[0].state.topics()) == 30
    for log in logs:
        log.close()
    level(cluster)


def test_values_of_a_mebibyte(cluster: Cluster) -> None:
    value = secrets.token_bytes(METADATA_VALUE_BYTES_MAX)
    with cluster.members[0].log() as log:
        for number in range(5):
            record = log.propose(PutKey(key=f"/v/{number}", value=value))
            assert isinstance(record, KeyRecord) and record.value == value
    level(cluster)
    for member in cluster.members:
        with member.log() as log:
            found = log.state.cluster.keys.find("/v/4")
            assert found is not None and found.value == value


def test_the_leader_is_killed_under_proposals(cluster: Cluster) -> None:
    pauses_s = [pause_s for turn in range(3) for pause_s in kill_leader(cluster, turn)]
    level(cluster)
    assert max(pauses_s) < 3.0, f"the first write after the kill came after {pauses_s}"


def kill_leader(cluster: Cluster, turn: int) -> list[float]:
    """One kill under proposals through the other two; how long each waited for its next answer."""
    leader = cluster.leader()
    others = [member for member in cluster.members if member is not leader]
    writers = [Writer(member, f"w{turn}{place}") for place, member in enumerate(others)]
    for writer in writers:
        writer.start()
    wait_until(lambda: all(len(writer.topics) > 20 for writer in writers), 20, "writers are under way")
    killed_s = time.monotonic()
    leader.kill()
    wait_until(lambda: all(goes_on(writer, killed_s) for writer in writers), 15, "writes go on")
    for writer in writers:
        writer.stop()
    for writer in writers:
        writer.join(20)
    leader.start()
    assert not [error for writer in writers for error in writer.errors]
    assert not [name for writer in writers for name in writer.unknown], "asked again until it is answered"
    assert {name for writer in writers for name in writer.topics} <= names(others[0])
    return [pause_s(writer.answered_s, killed_s) for writer in writers]


def goes_on(writer: Writer, killed_s: float) -> bool:
    """Whether answers came from the next leader, one after the other."""
    answered_s = writer.answered_s
    return len(answered_s) > GOES_ON and answered_s[-GOES_ON] > killed_s


def pause_s(answered_s: list[float], killed_s: float) -> float:
    """The longest wait between two answers that ended after the kill."""
    return max(later - earlier for earlier, later in pairwise(answered_s) if later > killed_s)


def test_every_member_is_killed_in_turn_and_writers_notice_nothing_but_time(
    cluster: Cluster, source: random.Random
) -> None:
    """Also the member that a writer is connected to: it comes back, and the writer asks it again."""
    writers = [Writer(member, f"w{place}") for place, member in enumerate(cluster.members)]
    for writer in writers:
        writer.start()
    for _ in range(2):
        for member in cluster.members:
            time.sleep(source.uniform(0.1, 0.5))  # a random moment of the writers
            member.kill()
            member.start()
            wait_until(lambda one=member: one.status() is not None, 10, "it answers")  # type: ignore[misc]
    killed_s = time.monotonic()
    wait_until(lambda: all(goes_on(writer, killed_s) for writer in writers), 15, "writes go on")
    for writer in writers:
        writer.stop()
    for writer in writers:
        writer.join(30)
    cluster.leader()
    assert all(writer.numbers for writer in writers)
    judge(cluster, writers)


def test_a_leader_that_is_paused_comes_back_to_another_one(cluster: Cluster) -> None:
    leader = cluster.leader()
    other = next(member for member in cluster.members if member is not leader)
    writer = Writer(other, "w")
    writer.start()
    wait_until(lambda: len(writer.topics) > 10, 20, "under way")
    leader.pause()
    paused_s = time.monotonic()
    wait_until(lambda: writer.answered_s[-1] > paused_s + 1, 15, "writes go on")
    leader.resume()
    wait_until(lambda: (leader.status() or other.status()).role == "follower", 10, "it follows")  # type: ignore[union-attr]
    writer.stop()
    writer.join(20)
    judge(cluster, [writer])


def test_all_are_killed_at_once_and_nothing_is_lost(cluster: Cluster) -> None:
    writers = [Writer(member, f"w{place}") for place, member in enumerate(cluster.members)]
    for writer in writers:
        writer.start()
    wait_until(lambda: all(len(writer.topics) > 20 for writer in writers), 20, "under way")
    for member in cluster.members:
        member.kill()
    for member in cluster.members:
        member.start()
    cluster.leader(15)
    for writer in writers:
        writer.stop()
    for writer in writers:
        writer.join(30)
    judge(cluster, writers)


def test_a_fourth_joins_is_promoted_and_the_first_is_removed(cluster: Cluster) -> None:
    with cluster.members[0].log() as log:
        log.propose_many([create(f"t{number}") for number in range(300)])
    fourth = cluster.add()
    wait_until(lambda: joined(fourth), 15, "it joins")
    status = fourth.status()
    assert status is not None and status.self_node_id in status.learners
    level(cluster)
    wait_until(lambda: promoted(cluster.members[1], status.self_node_id), 10, "promoted")
    leader = cluster.leader()
    removed = leader.status()
    assert removed is not None
    other = next(member for member in cluster.members if member is not leader)
    members = other.change("remove", removed.self_node_id)
    assert removed.self_node_id not in members.voters and len(members.voters) == 3
    leader.kill()
    cluster.members.remove(leader)
    cluster.leader()
    with fourth.log() as log:
        log.propose(create("after"))
    level(cluster)
    assert len(names(cluster.members[0])) == 301


def joined(member: MemberProcess) -> bool:
    """Whether it is a learner by the word of the cluster, which also names voters."""
    status = member.status()
    return status is not None and bool(status.voters) and status.self_node_id in status.learners


def promoted(member: MemberProcess, node_id: str) -> bool:
    try:
        return node_id in member.change("promote", node_id).voters
    except DanubeError:
        return False


def test_the_last_voter_cannot_be_removed(tmp_path: Path) -> None:
    with Cluster(tmp_path, size=1) as alone:
        status = alone.members[0].status()
        assert status is not None
        with pytest.raises(WrongState):
            alone.members[0].change("remove", status.self_node_id)
        with alone.members[0].log() as log:
            log.propose(create("a"))


def test_a_minority_says_that_it_cannot_decide(cluster: Cluster) -> None:
    one, *others = cluster.members
    with one.log(propose_timeout_s=1.5) as log:
        for other in others:
            other.kill()
        with pytest.raises(Unavailable):
            log.propose(create("alone"))
        with pytest.raises(Unavailable):
            log.read_barrier(1.0)
        for other in others:
            other.start()
        cluster.leader()
        try:
            log.propose(create("alone"))
        except TopicExists:
            pass  # the first one was agreed on after all
        except OutcomeUnknown:
            pytest.fail("there is a leader")


def test_a_member_whose_journal_is_gone_does_not_vote_again(cluster: Cluster) -> None:
    victim = cluster.members[0]
    victim.kill()
    shutil.rmtree(victim.data_dir / "raft")
    victim.start()
    wait_until(lambda: not victim.running, 10, "it refuses")
    assert "journal" in victim.output
    shutil.rmtree(victim.data_dir)
    victim.start()  # now it is a new node: it joins as a learner, under another id
    wait_until(
        lambda: (status := victim.status()) is not None and len(status.learners) == 1, 15, victim.output
    )


def test_a_copy_that_was_damaged_is_made_anew(cluster: Cluster) -> None:
    with cluster.members[0].log() as log:
        log.propose_many([create(f"t{number}") for number in range(50)])
    level(cluster)
    victim = cluster.members[0]
    victim.kill()
    path = victim.data_dir / "metadata" / "metadata.log"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    victim.start()
    cluster.leader()
    wait_until(lambda: path.read_bytes() != bytes(content), 10, "made anew")
    assert len(names(victim)) == 50


def test_a_member_that_comes_back_at_another_address_is_found(cluster: Cluster) -> None:
    leader = cluster.leader()
    mover = next(member for member in cluster.members if member is not leader)
    status = mover.status()
    assert status is not None
    mover.kill()
    mover.address = f"127.0.0.1:{free_port()}"
    mover.start()

    def agreed() -> bool:
        found = [member.status() for member in cluster.members]
        return all(one is not None and one.voters[status.self_node_id] == mover.address for one in found)

    wait_until(agreed, 10, "the new address is agreed on")
    with mover.log() as log:
        log.propose(create("a"))
    level(cluster)


def test_mutual_tls(tmp_path: Path) -> None:
    files: TlsFiles = Authority(tmp_path / "ca").sign("node", "IP:127.0.0.1")
    with Cluster(tmp_path, tls=files) as cluster:
        with cluster.members[0].log() as log:
            log.propose(create("a"))
        level(cluster)
        stranger = MemberProcess(tmp_path / "stranger", join=cluster.seeds)
        stranger.start()
        time.sleep(1.5)  # long enough to be let in, if it were
        status = stranger.status()
        assert status is not None and status.role == "waiting"
        stranger.kill()
