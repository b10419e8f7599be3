"""Journals of members that were damaged on disk: of one, of all, with everything else left as it was."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from danube.core.cluster.commands import PutKey
from danube.core.metadata.commands import CreateTopic
from danube.core.partition.policy import TopicPolicy
from tests.broker_process import wait_until
from tests.cluster_process import Cluster, MemberProcess

pytestmark = pytest.mark.slow

TOPICS = 20
Harm = Callable[[bytearray], None]


def flip(content: bytearray) -> None:
    content[len(content) // 2] ^= 0x10


def zero(content: bytearray) -> None:
    content[len(content) // 2 : len(content) // 2 + 512] = bytes(512)


def tear(content: bytearray) -> None:
    del content[len(content) * 2 // 3 :]


HARMS = (flip, zero, tear)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as started:
        with started.leader().log() as log:
            for number in range(TOPICS):
                topic = f"/default/t{number}"
                log.propose(CreateTopic(topic=topic, policy=TopicPolicy(), created_us=1))
        yield started


def journal(member: MemberProcess) -> Path:
    return member.data_dir / "raft" / "raft.log"


def damage(member: MemberProcess, harm: Harm) -> bytes:
    """Harm the journal of a member that does not run; what it is then."""
    content = bytearray(journal(member).read_bytes())
    harm(content)
    journal(member).write_bytes(content)
    return bytes(content)


def refuses(member: MemberProcess) -> None:
    """It ends by itself, with the place in its last words."""
    member.start()
    wait_until(lambda: not member.running, 20, f"{member.data_dir.name} refuses")
    assert member.exit_code != 0
    assert "journal is damaged at position" in member.output, member.output[-1500:]


def topics(member: MemberProcess) -> int:
    with member.log() as log:
        log.read_barrier()
        return log.state.topic_count


@pytest.mark.parametrize("harm", HARMS)
def test_a_member_with_a_damaged_journal_does_not_vote_and_the_others_keep_everything(
    cluster: Cluster, harm: Harm
) -> None:
    leader = cluster.leader()
    victim = next(member for member in cluster.members if member is not leader)
    victim.kill()
    damaged = damage(victim, harm)
    refuses(victim)
    assert journal(victim).read_bytes() == damaged, "nothing is mended or thrown away by itself"
    assert topics(leader) == TOPICS
    with leader.log() as log:
        log.propose(PutKey(key="/after", value=b"1"))
        former = (victim.data_dir / "node_id").read_text().split()[0]
    leader.change("remove", former)
    shutil.rmtree(victim.data_dir)
    victim.start()  # a new node in its place
    wait_until(lambda: (status := victim.status()) is not None and bool(status.learners), 20, victim.output)
    wait_until(lambda: topics(victim) == TOPICS, 20, "it has everything")
    with victim.log() as log:
        assert log.state.cluster.keys.find("/after") is not None


def test_with_every_journal_damaged_nobody_starts_and_nothing_is_thrown_away(cluster: Cluster) -> None:
    for member in cluster.members:
        member.kill()
    whole = [journal(member).read_bytes() for member in cluster.members]
    damaged = [damage(member, harm) for member, harm in zip(cluster.members, HARMS, strict=True)]
    for member in cluster.members:
        refuses(member)
    assert [journal(member).read_bytes() for member in cluster.members] == damaged
    for member, content in zip(cluster.members[:2], whole, strict=False):
        journal(member).write_bytes(content)  # from a backup: a majority is enough
        member.start()
    assert topics(cluster.leader(20)) == TOPICS
