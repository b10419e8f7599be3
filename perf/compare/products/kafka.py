"""Apache Kafka: one broker that is its own controller, with its default flush and with one for each write."""

from __future__ import annotations

import base64
import re
import shutil
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from perf.compare import places
from perf.compare.figures import Turn
from perf.compare.levels import Level
from perf.compare.processes import listens, run, started
from perf.compare.product import Client, Running, Setting, Work
from perf.compare.scripted import Scripted
from perf.compare.tooling import Topics, number, spend, steady
from tests.broker_process import free_port

HOME = "DANUBE_COMPARE_KAFKA"
HEAP = "-Xmx1g"
PRODUCER = (
    "acks=all",
    "linger.ms=5",
    "batch.size=1048576",
    "max.request.size=4194304",
    "buffer.memory=134217728",
)
PYTHON = Scripted("confluent-kafka", "kafka_peer.py", "confluent_kafka")


def java(main: str, *words: str, options: Sequence[str] = ()) -> list[str]:
    """A class of Kafka's as a command."""
    return ["java", HEAP, *options, "-cp", places.jars("kafka", HOME), main, *words]


class KafkaPerf:
    """``kafka-producer-perf-test`` and ``kafka-consumer-perf-test``, started as the classes they are."""

    name = "kafka-*-perf-test"
    kind = "tool"

    def __init__(self) -> None:
        self._topics = Topics(PYTHON)

    def missing(self, setting: Setting, workload: str) -> str:
        reason = {
            "latency": "kafka-producer-perf-test prints whole milliseconds",
            "e2e": "the producer's and the consumer's tool are two, and each counts its own start",
        }.get(workload, "")
        if reason:
            return reason
        folder = Path(places.jars("kafka", HOME)).parent
        if not any(folder.glob("kafka-tools-[0-9]*.jar")):
            return "kafka-tools is not among the jars"
        return self._topics.missing()

    def turn(self, running: Running, work: Work) -> Turn:
        server = str(running.address["server"])
        if work.workload == "replay":
            return self._replay(
                running, replace(work, count=min(work.count, self._topics.stored(running, work)))
            )
        with ExitStack() as stack:
            self._topics.create(running, work, stack)
            command = java(
                "org.apache.kafka.tools.ProducerPerformance",
                *("--topic", work.topic, "--num-records", str(work.count), "--record-size", str(work.size)),
                *("--throughput", "-1", "--producer-props", f"bootstrap.servers={server}", *PRODUCER),
            )
            finished, spent = spend(running, command)
        return steady(number(r"records sent, ([\d.]+) records/sec", finished.output), work, spent)

    def _replay(self, running: Running, work: Work) -> Turn:
        """The rate while fetching: joining the group is not the replay."""
        command = java(
            "org.apache.kafka.tools.ConsumerPerformance",
            *("--bootstrap-server", str(running.address["server"]), "--topic", work.topic),
            *("--messages", str(work.count), "--group", running.next_name()),
        )
        finished, spent = spend(running, command)
        return steady(fetched_per_second(finished.output), work, spent)


def fetched_per_second(printed: str) -> float:
    """The last column of the last line: messages a second while fetching."""
    return number(r"(?m)^\d{4}-\d\d-\d\d.*,\s*([\d.]+)\s*$", printed)


class Kafka:
    """A broker and its controller in one Java process."""

    name = "kafka"
    ours = False
    stored_max = 2_000_000
    settings: tuple[Setting, ...] = (
        Setting(
            name="kafka",
            level=Level.WRITTEN,
            promise="acks=all of one replica, default flush: written before the ack, synced by the system",
        ),
        Setting(
            name="kafka flush.messages=1",
            level=Level.FSYNC,
            promise="acks=all of one replica, flush.messages=1: each append is synced before its ack",
        ),
    )

    def clients(self, setting: Setting) -> tuple[Client, ...]:
        return (PYTHON, KafkaPerf())

    def missing(self, setting: Setting) -> str:
        if not shutil.which("java"):
            return "no Java runtime"
        return "" if places.jars("kafka", HOME) else places.no_jars("kafka", HOME)

    def version(self) -> str:
        folder = Path(places.jars("kafka", HOME)).parent
        names = [re.match(r"kafka_[\d.]+-([\d.]+)\.jar$", path.name) for path in folder.glob("kafka_*.jar")]
        return next((found[1] for found in names if found), "of unknown version")

    def start(self, setting: Setting, directory: Path) -> Running:
        port, controller = free_port(), free_port()
        configuration = directory / "server.properties"
        configuration.write_text(properties(port, controller, directory))
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        run(
            java("kafka.tools.StorageTool", "format", f"--cluster-id={cluster}", "-c", str(configuration)),
            directory,
        )
        command = java("kafka.Kafka", str(configuration))
        server = started(command, directory, lambda: listens(port))
        flush = {"flush.messages": "1"} if setting.level is Level.FSYNC else {}
        address: dict[str, object] = {"server": f"127.0.0.1:{port}", "config": flush}
        return Running(setting=setting, directory=directory, server=server, address=address)


def properties(port: int, controller: int, directory: Path) -> str:
    """The least that one broker needs; deleted topics go at once, for the next turn's sake."""
    return "\n".join(
        (
            "process.roles=broker,controller",
            "node.id=1",
            f"controller.quorum.voters=1@127.0.0.1:{controller}",
            f"listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
            f"advertised.listeners=PLAINTEXT://127.0.0.1:{port}",
            "controller.listener.names=CONTROLLER",
            f"log.dirs={directory / 'data'}",
            "offsets.topic.replication.factor=1",
            "offsets.topic.num.partitions=1",
            "transaction.state.log.replication.factor=1",
            "transaction.state.log.min.isr=1",
            "group.initial.rebalance.delay.ms=0",
            "message.max.bytes=4194304",
            "log.segment.delete.delay.ms=1000",
            "",
        )
    )
