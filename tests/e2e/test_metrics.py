"""Metrics of a real broker: what is not off the host grows in an outage and returns to 0."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from danube import sync
from danube.errors import AlreadyRunning
from tests import fork_server
from tests.broker_cluster import BrokerCluster
from tests.broker_process import ROOT, BrokerFailed, BrokerProcess, alive, free_port, wait_until
from tests.e2e.side_by_side import Bench, beside
from tests.e2e.side_by_side import alone as alone
from tests.e2e.side_by_side import lanes as lanes
from tests.fakes.s3_proxy import S3Proxy
from tests.s3_server import S3Server

TOPICS = ("/default/one", "/default/two", "/default/parted")
RECORD_BYTES = 1_000
SEALING = {"DANUBE_STORAGE__SEAL_AFTER": "1s"}
Labels = tuple[tuple[str, str], ...]


class Scraped:
    """What one scrape told, without the label broker."""

    def __init__(self, port: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            assert answer.status == 200
            assert answer.getheader("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
            self.text = answer.read().decode()
        finally:
            connection.close()
        self.series: dict[tuple[str, Labels], float] = {}
        for family in text_string_to_metric_families(self.text):
            for sample in family.samples:
                labels = {name: value for name, value in sample.labels.items() if name != "broker"}
                self.series[sample.name, tuple(sorted(labels.items()))] = sample.value

    def __getitem__(self, name: str) -> float:
        return self.series[f"danube_{name}", ()]

    def get(self, name: str) -> float | None:
        return self.series.get((f"danube_{name}", ()))

    def by(self, label: str, name: str) -> dict[str, float]:
        return {
            dict(labels)[label]: value
            for (one, labels), value in self.series.items()
            if one == f"danube_{name}" and label in dict(labels)
        }


def publish(address: str, count: int = 100) -> None:
    with sync.connect(address) as client:
        for topic in TOPICS:
            with client.producer(topic, name="writer") as producer:
                for number in range(count):
                    producer.send_nowait(b"x" * RECORD_BYTES, key=str(number))
                producer.flush()


def create(address: str) -> None:
    with sync.connect(address) as client:
        for topic in TOPICS:
            client.admin.create_topic(topic, partitions=4 if topic.endswith("parted") else 0)


def when(port: int, met: Callable[[Scraped], bool], what: str, timeout_s: float = 120) -> Scraped:
    """The first scrape of which it is true."""
    found: list[Scraped] = []

    def looked() -> bool:
        time.sleep(0.2)
        found[:] = [Scraped(port)]
        return met(found[0])

    try:
        wait_until(looked, timeout_s, what)
    except BrokerFailed:
        print(found[0].text if found else "nothing was scraped")
        raise
    return found[0]


def everything_off(found: Scraped) -> bool:
    return found.get("storage_host_pending_bytes") == 0


def each_pending(least: int) -> Callable[[Scraped], bool]:
    """Whether each topic has at least so many bytes that are not off the host."""
    return lambda found: min(found.by("topic", "storage_pending_bytes").values(), default=0) >= least


def start(
    broker: Callable[..., BrokerProcess], environment: dict[str, str], **options: Any
) -> tuple[Any, int]:
    port = free_port()
    return broker(environment=environment, arguments=["--metrics-port", str(port)], **options), port


def told(address: str) -> dict[str, Any]:
    with sync.connect(address) as client:
        return dict(client.admin.storage_status(""))


def test_the_metrics_process_may_die_and_hundred_clients_may_scrape(
    broker: Callable[..., BrokerProcess],
) -> None:
    process, port = start(broker, {}, workers=2)
    create(process.address)
    found = Scraped(port)
    assert found["storage_tiered"] == 0 and found.get("storage_store_up") is None
    assert found["broker_start_time_seconds"] == pytest.approx(time.time(), abs=300)
    first = process.processes()["metrics"]
    os.kill(first, signal.SIGKILL)
    again = Scraped(port)  # the socket is kept: this waits for the next process
    assert again["broker_topics_owned"] == 3 and not alive(first)
    assert process.processes()["metrics"] != first
    with ThreadPoolExecutor(100) as clients:
        scrapes = [one.result() for one in [clients.submit(Scraped, port) for _ in range(100)]]
    assert {one["broker_topics_owned"] for one in scrapes} == {3}
    publish(process.address, 10)
    assert process.stop() == 0


def test_topics_beyond_the_bound_are_one_together(
    broker: Callable[..., BrokerProcess], tmp_path: Any
) -> None:
    (tmp_path / "store").mkdir()
    environment = {"DANUBE_METRICS__TOPICS_MAX": "1", "DANUBE_STORAGE__SEAL_AFTER": "1h"}
    process = broker(
        environment=environment, workers=2, data_dir=tmp_path / "data",
        arguments=["--metrics-port", "0", "--storage", f"file://{tmp_path / 'store'}"],
    )  # fmt: skip
    port = int(process.statistics()["addresses"]["metrics"].rpartition(":")[2])
    create(process.address)
    publish(process.address)
    found = when(port, lambda one: one.get("storage_host_pending_bytes") is not None, "all is known")
    sizes = found.by("topic", "storage_pending_bytes")
    assert set(sizes) == {TOPICS[0], "other"} and sizes["other"] >= 200 * RECORD_BYTES
    rows = {row["topic"]: row["pending_bytes"] for row in told(process.address)["topics"]}
    assert sizes == {TOPICS[0]: rows[TOPICS[0]], "other": rows[TOPICS[1]] + rows[TOPICS[2]]}


def test_a_taken_port_stops_the_start_and_without_one_nothing_is_served(
    broker: Callable[..., BrokerProcess],
) -> None:
    process, port = start(broker, {})
    assert process.statistics()["addresses"]["metrics"] == f"127.0.0.1:{port}"
    wait_until(lambda: f"http://127.0.0.1:{port}/metrics" in process.output_tail(), 20, "the banner")
    admin = "from danube.cli.upstream.admin import main; main()"
    listed = fork_server.run(
        [sys.executable, "-c", admin, "brokers", "list", "--output", "json"], cwd=ROOT,
        environment={**os.environ, "DANUBE_ADMIN_ENDPOINT": f"http://{process.admin_address}"},
    )  # fmt: skip
    assert json.loads(listed.stdout)[0]["metrics_addr"] == f"http://127.0.0.1:{port}", listed.stderr
    second = broker(start=False, arguments=["--metrics-port", str(port)])
    second.launch()
    wait_until(lambda: not second.running, 60, "the second one ends")
    assert second.exit_code == AlreadyRunning.exit_code
    assert "another --metrics-port" in second.output_tail()
    none = broker()
    assert "metrics" not in none.statistics()["addresses"] and "metrics" not in none.processes()


@beside
def test_exposure_grows_in_an_outage_and_returns_to_zero(bench: Bench, s3_server: S3Server) -> None:
    proxy = S3Proxy("127.0.0.1", s3_server.port, client=s3_server.client()).start()
    try:
        environment = {**SEALING, **s3_server.environ(s3_server.make_bucket(), "p", endpoint=proxy.endpoint)}
        process, port = start(bench.broker, environment, workers=2)
        create(process.address)
        found = when(port, lambda one: bool(one["storage_store_up"]), "the store is up")
        assert set(found.by("topic", "storage_pending_bytes")) == set(TOPICS), "empty topics are told, too"
        assert everything_off(found) and found["storage_mover_up"] == 1 and found["broker_topics_owned"] == 3
        proxy.refuse()
        sizes: list[dict[str, float]] = []
        for round_number in range(1, 4):
            publish(process.address)
            found = when(
                port, each_pending(round_number * 100 * RECORD_BYTES), "what was published is pending"
            )
            sizes.append(found.by("topic", "storage_pending_bytes"))
            assert found["storage_host_pending_bytes"] == sum(sizes[-1].values())
        assert all(earlier[topic] < later[topic] for earlier, later in pairwise(sizes) for topic in TOPICS)
        found = when(
            port,
            lambda one: (
                not one["storage_store_up"] and min(one.by("topic", "storage_pending_seconds").values()) > 3
            ),
            "the store is down and records grow old",
        )
        ages = found.by("topic", "storage_pending_seconds")
        assert found["storage_host_pending_seconds"] == max(ages.values())
        pid = process.kill_worker(0)
        found = when(
            port,
            lambda one: (
                sum(one.by("worker", "worker_restarts_total").values()) == 1
                and len(one.by("topic", "storage_pending_bytes")) == 3
            ),
            "the killed worker's topics are told again",
        )
        assert found["storage_host_pending_bytes"] >= sum(sizes[-1].values()), "a restart makes nothing less"
        assert not alive(pid) and set(found.by("worker", "worker_up").values()) == {1}
        status = told(process.address)
        assert status["pending_bytes"] == found["storage_host_pending_bytes"], "the command tells the same"
        proxy.resume()
        found = when(port, everything_off, "everything is off the host", 240)
        assert set(found.by("topic", "storage_pending_bytes").values()) == {0}
        assert found["storage_host_pending_seconds"] == 0 and found["storage_store_up"] == 1
        assert told(process.address)["pending_bytes"] == 0
    finally:
        proxy.stop()


@beside
def test_a_store_that_is_dead_from_the_start_is_told(bench: Bench) -> None:
    environment = {
        **SEALING, "DANUBE_STORAGE__MODE": "object_store", "DANUBE_STORAGE__URL": "s3://bucket/prefix",
        "DANUBE_STORAGE__ENDPOINT": f"http://127.0.0.1:{free_port()}",
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "canary-9f8a7b6c",
    }  # fmt: skip
    process, port = start(bench.broker, environment, workers=2)
    create(process.address)
    publish(process.address)
    with sync.connect(process.address) as client:
        for topic in TOPICS:
            client.admin.seal(topic)
    for _ in range(2):
        found = when(
            port, lambda one: one.get("storage_host_pending_bytes") is not None, "all partitions are open"
        )
        assert min(found.by("topic", "storage_pending_bytes").values()) >= 100 * RECORD_BYTES
        assert (
            found["storage_store_up"] == 0 and found["storage_mover_up"] == 1 and found["storage_tiered"] == 1
        )
        assert "canary" not in found.text
        os.kill(process.processes()["mover"], signal.SIGKILL)
        again = when(port, lambda one: one["storage_mover_restarts_total"] == 1, "the mover is replaced")
        again = when(port, lambda one: one["storage_mover_up"] == 1, "it gives signs of life")
        for topic, size in found.by("topic", "storage_pending_bytes").items():
            assert again.by("topic", "storage_pending_bytes")[topic] == size, "whether a mover runs or not"
        process.kill()
        process.start()


def test_a_worker_that_hangs_is_missing_and_never_counted_too_small(
    broker: Callable[..., BrokerProcess], tmp_path: Any
) -> None:
    (tmp_path / "store").mkdir()
    process, port = start(
        broker, {"DANUBE_STORAGE__SEAL_AFTER": "1h"}, workers=2, data_dir=tmp_path / "data",
    )  # fmt: skip
    process.kill()
    process.arguments += ["--storage", f"file://{tmp_path / 'store'}"]
    process.start()
    create(process.address)
    publish(process.address)
    before = when(port, lambda one: len(one.by("topic", "storage_pending_bytes")) == 3, "all are told")
    hung = process.running_workers()[0]
    os.kill(hung, signal.SIGSTOP)
    try:
        found = when(
            port, lambda one: one.by("worker", "worker_up") == {"0": 0, "1": 1}, "one is missing", 30
        )
        assert found.get("storage_host_pending_bytes") is None
        seen = found.by("topic", "storage_pending_bytes")
        assert "/default/parted" not in seen, "both workers have partitions of it"
        assert all(seen[topic] == before.by("topic", "storage_pending_bytes")[topic] for topic in seen)
        assert found["broker_topics_owned"] == 3 and found["broker_records_in_total"] == 300
    finally:
        with suppress(ProcessLookupError):  # the supervisor gives it ten seconds
            os.kill(hung, signal.SIGCONT)
    after = when(port, lambda one: one.get("storage_host_pending_bytes") is not None, "it answers again")
    assert after.by("topic", "storage_pending_bytes") == before.by("topic", "storage_pending_bytes")


def test_a_member_of_a_cluster_tells_of_it(tmp_path: Path, alone: None) -> None:
    ports = [free_port() for _ in range(3)]
    cluster = BrokerCluster(tmp_path, 3)
    for broker, port in zip(cluster.brokers, ports, strict=True):
        broker.arguments += ["--metrics-port", str(port)]
    with cluster:

        def all_well(found: Scraped) -> bool:
            return found.get("cluster_leader_known") == 1 and found.get("cluster_members_reached") == 2

        scraped = [when(port, all_well, "a member") for port in ports]
        assert sum(one["cluster_leads"] for one in scraped) == 1
        for one in scraped:
            assert one.by("kind", "cluster_members") == {"voter": 3, "learner": 0}
            assert 0 < one["cluster_lease_seconds"] <= 2
            assert one["cluster_applied_index"] > 0 < one["cluster_term"]
            assert (one.get("cluster_imbalance") is not None) == (one["cluster_leads"] == 1)
        leader = next(port for port, one in zip(ports, scraped, strict=True) if one["cluster_leads"])
        for broker, port in zip(cluster.brokers, ports, strict=True):
            if port != leader:
                broker.kill()
        cut_off = when(leader, lambda found: found["cluster_leader_known"] == 0, "no majority")
        assert cut_off["cluster_leads"] == 0 and cut_off.get("cluster_imbalance") is None
        over = when(leader, lambda found: found["cluster_lease_seconds"] == 0, "the lease is over", 10)
        assert over["cluster_controller_up"] == 1
