"""A broker whose node is removed from the cluster stops, says why, and does not come back by itself."""

from __future__ import annotations

from pathlib import Path

from danube import sync
from tests.broker_cluster import BrokerCluster
from tests.broker_process import wait_until
from tests.e2e.test_cluster_brokers import danube
from tests.e2e.test_cluster_owners import TOPIC

EXIT_CONFLICT = 4
SAID = "this broker was removed from its cluster"


def test_a_removed_broker_stops_and_the_others_serve_what_it_had(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with BrokerCluster(tmp_path, 3, arguments=["--storage", f"file://{tmp_path}/store"]) as cluster:
        with sync.connect(cluster.brokers[0].address) as client:
            client.admin.create_topic(TOPIC)
        removed = cluster.owner(TOPIC)
        other, third = cluster.others(removed)
        cluster.ask(other)
        with sync.connect(removed.address) as client, client.producer(TOPIC) as producer:
            assert producer.send(b"before").offset == 0
        node_id = str(cluster.id_of(removed))
        danube("cluster", "remove-node", "--data-dir", str(other.data_dir), "--node-id", node_id)
        wait_until(lambda: not removed.running, 30, f"it ends\n{removed.output_tail()}")
        assert removed.exit_code == EXIT_CONFLICT and SAID in removed.output_tail()
        with sync.connect(third.address, timeout=20) as client, client.producer(TOPIC) as producer:
            producer.send(b"after")
        removed.launch()
        wait_until(lambda: not removed.running, 30, f"it ends again\n{removed.output_tail()}")
        assert removed.exit_code == EXIT_CONFLICT
        assert len(danube("cluster", "status", "--data-dir", str(third.data_dir))["voters"]) == 2
