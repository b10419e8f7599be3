"""Three whole brokers that agree on one set of topics, and the commands that show and change the members."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server
from tests.broker_cluster import BrokerCluster
from tests.broker_process import ROOT, BrokerFailed, BrokerProcess, free_port, wait_until


def danube(*words: str, code: int = 0) -> Any:
    """Run a command; what it prints as JSON."""
    done = fork_server.run([sys.executable, "-m", "danube", *words, "-o", "json"], cwd=ROOT)
    assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout) if done.stdout.strip().startswith(("{", "[")) else None


def status(broker: BrokerProcess, code: int = 0) -> Any:
    return danube("cluster", "status", "--data-dir", str(broker.data_dir), code=code)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[BrokerCluster]:
    with BrokerCluster(tmp_path, 3) as started:
        yield started


def controller_of(broker: BrokerProcess) -> int:
    """The kernel keeps 15 characters of a process's name."""
    return broker.processes()["danube-controller"[:15].removeprefix("danube-")]


def test_three_brokers_share_their_topics(cluster: BrokerCluster) -> None:
    one, two, three = cluster.brokers
    cluster.ask(two)
    danube("topics", "create", "/default/a", "-s", one.address)

    def listed() -> bool:
        return [topic["topic"] for topic in danube("topics", "list", "-s", three.address)] == ["/default/a"]

    wait_until(listed, 10, "the topic is known on another host")
    found = status(two)
    assert len(found["voters"]) == 3 and found["leader_id"] in found["voters"]
    code = "from danube.cli.upstream.admin import main; main()"
    words = ["--endpoint", f"http://{one.admin_address}", "cluster", "status"]
    shown = fork_server.run([sys.executable, "-c", code, *words], cwd=ROOT)
    assert f"Leader: {found['leader_id']}" in shown.stdout, shown.stderr
    controller = controller_of(one)
    leases = cluster.leases()
    os.kill(controller, signal.SIGKILL)
    cluster.wait_registered([one], leases)  # clients that wait for an answer are let go of then
    danube("topics", "create", "/default/b", "-s", one.address)
    assert controller_of(one) != controller
    danube("cluster", "remove-node", "--data-dir", str(one.data_dir), "--node-id", "77", code=3)
    danube("cluster", "promote-node", "--data-dir", str(one.data_dir), "--node-id", "x", code=2)
    kept = (found["leader_id"], found["self_node_id"])
    follower = next(node for node in found["voters"] if node not in kept)
    left = danube("cluster", "remove-node", "--data-dir", str(two.data_dir), "--node-id", follower)
    assert follower not in left["voters"] and len(left["voters"]) == 2


def test_a_data_directory_stays_what_it_is(tmp_path: Path) -> None:
    port = free_port()
    seeds = ["--raft-addr", f"127.0.0.1:{port}", "--seed-nodes", f"127.0.0.1:{port}"]
    broker = BrokerProcess(tmp_path / "member", arguments=seeds)
    broker.start()
    assert len(status(broker)["voters"]) == 1
    broker.stop()
    alone = BrokerProcess(tmp_path / "member")
    with pytest.raises(Exception, match="belongs to a member of a cluster"):
        alone.start()
    alone = BrokerProcess(tmp_path / "alone")
    alone.start()
    danube("topics", "create", "/default/a", "-s", alone.address)
    assert len(status(alone)["voters"]) == 1, "a cluster of one"
    alone.stop()
    member = BrokerProcess(tmp_path / "alone", arguments=seeds)
    with pytest.raises(BrokerFailed, match="topics of a broker that was alone"):
        member.start()
    assert member.exit_code == 4 and "danube cluster adopt" in member.output_tail()
    alone.start()
    assert [topic["topic"] for topic in danube("topics", "list", "-s", alone.address)] == ["/default/a"]
    alone.stop()
