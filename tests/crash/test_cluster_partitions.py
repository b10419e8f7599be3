"""Members on hosts whose cables are cut: a minority decides nothing, a majority goes on (D5)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from danube.core.metadata.commands import CreateTopic
from danube.core.partition.policy import TopicPolicy
from danube.errors import TopicExists, Unavailable
from tests.broker_process import wait_until
from tests.cluster_process import Cluster, MemberProcess
from tests.network_namespaces import Hosts, available

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not available(), reason="network namespaces need root"),
]

PORT = 7650


def create(name: str) -> CreateTopic:
    return CreateTopic(topic=f"/default/{name}", policy=TopicPolicy(), created_us=1)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts(3)
    yield made
    made.close()


@pytest.fixture
def cluster(tmp_path: Path, hosts: Hosts) -> Iterator[Cluster]:
    made = Cluster(tmp_path, size=hosts.count)
    seeds = [f"{hosts.host(place)}:{PORT}" for place in range(hosts.count)]
    made.members = [
        MemberProcess(
            tmp_path / f"h{place}", seeds=seeds, port=PORT, host=hosts.host(place), prefix=hosts.prefix(place)
        )
        for place in range(hosts.count)
    ]
    with made:
        yield made


def test_a_leader_that_is_cut_off_decides_nothing_and_follows_when_it_is_back(
    cluster: Cluster, hosts: Hosts
) -> None:
    leader = cluster.leader()
    place = cluster.members.index(leader)
    others = [member for member in cluster.members if member is not leader]
    with others[0].log() as log, leader.log(propose_timeout_s=2.0) as cut_off:
        log.propose(create("before"))
        hosts.cut(place)
        cut_s = time.monotonic()
        record = log.propose(create("during"))
        assert time.monotonic() - cut_s < 6.0, "a majority goes on"
        with pytest.raises(Unavailable):
            cut_off.propose(create("minority"))
        with pytest.raises(Unavailable):
            cut_off.read_barrier(1.0)
        wait_until(
            lambda: (status := leader.status()) is not None and status.role != "leader", 5, "it steps down"
        )
        assert cut_off.state.find_topic("/default/during") is None
        hosts.mend(place)
        mended_s = time.monotonic()
        wait_until(lambda: reads(cut_off.read_barrier), 10, "it follows again")
        assert time.monotonic() - mended_s < 10.0
        assert cut_off.state.topic("/default/during") == record
        try:
            cut_off.propose(create("minority"))
        except TopicExists:
            pass  # what was asked then was agreed on later; never twice
        assert cut_off.state.topic("/default/minority")


def reads(barrier: object) -> bool:
    try:
        barrier(1.0)  # type: ignore[operator]
    except Unavailable:
        return False
    return True


def test_a_member_that_comes_and_goes_disturbs_nobody(cluster: Cluster, hosts: Hosts) -> None:
    """Cut again and again: the others keep their leader and their term, as it asks before it stands."""
    leader = cluster.leader()
    flapping = next(member for member in cluster.members if member is not leader)
    place = cluster.members.index(flapping)
    before = leader.status()
    assert before is not None
    with leader.log() as log:
        for turn in range(4):
            hosts.cut(place)
            log.propose(create(f"cut{turn}"))
            time.sleep(1.1)  # longer than it waits for a leader's word
            hosts.mend(place)
            log.propose(create(f"mended{turn}"))
            wait_until(
                lambda: (status := flapping.status()) is not None and status.version == log.version,
                10,
                "level",
            )
    after = leader.status()
    assert after is not None and (after.role, after.current_term) == ("leader", before.current_term)
