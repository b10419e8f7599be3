"""Rows of the gRPC door: compiled clients, beside the floor of the native rows with frames of one record.

After each turn the broker is asked what it stored or settled, so a call that failed cannot count.

``lone`` is the row that users feel: perf/lone.rs, built with the official Rust client.  One message after
another is published, received and acknowledged; the workers' processor time for each is read from /proc.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from danube import sync
from danube.cli.upstream.endpoint import Endpoint
from danube.cli.upstream.grpc_channel import open_channel
from danube.core.placement.workers import owner_of
from danube.load.links.grpc_client import GrpcChannel
from danube.server.proto import DanubeApi_pb2 as api
from perf.compare.processes import cpu_seconds
from perf.turns import ROOT, Bench, Plan, Skipped
from tests.broker_process import BrokerProcess
from tests.compat import run as compat

IN_FLIGHT = 64
CALLS = 100_000
CALL_S = 30.0
SUBSCRIPTION = "bench"
LATENCY_CALLS = 5_000
SEND_PATH = "/danube.ProducerService/SendMessage"
CALLS_S_MIN = 60_000  # of each worker
WARM = 200
MESSAGES_S_MIN = 3_000
WORKER_US_MAX = 250
TOKEN_US_MAX = 1.0  # more a call where a token is asked for


class GrpcBench:
    """What the three workloads share: the compiled client, and topics with their files."""

    def __init__(self, bench: Bench, broker: BrokerProcess | None = None) -> None:
        self.bench = bench
        self.broker = broker or bench.broker
        self.settings = bench.settings
        self.client = compiled_client(self.settings.directory)

    def count(self, number: int) -> int:
        return max(2 * IN_FLIGHT, int(number * self.settings.scale))

    def opened(self, opening: Opening) -> dict[str, Any]:
        """A fresh topic with a producer or consumer on it, and its message in a file."""
        elsewhere = self.broker is not self.bench.broker
        options = {**self.bench.options(keep=elsewhere), "url": self.broker.address}
        topic, level = options["topic"], options["durability"]
        with sync.connect(options["url"]) as client:
            client.admin.create_topic(topic, reliable=level != "memory", durability=level)
            topic_id = client.admin.describe_topic(topic).topic.topic_id
        door = Endpoint(self.broker.grpc_address, token=os.environ.get("DANUBE_TOKEN", ""))
        with closing(open_channel(door)) as channel:
            data = opening(channel, options).SerializeToString()
        file = self.settings.directory / topic.rsplit("/", 1)[1]
        file.write_bytes(b"\0" + len(data).to_bytes(4, "big") + data)  # as gRPC puts it into DATA
        return {**options, "file": str(file), "owner": owner_of(topic_id, 0, self.settings.workers)}

    def producers(self) -> list[dict[str, Any]]:
        """A fresh topic of each worker with a producer on it."""
        by_owner: dict[int, dict[str, Any]] = {}
        for _ in range(100):
            options = self.opened(producer)
            by_owner.setdefault(options["owner"], options)
            if len(by_owner) == self.settings.workers:
                return list(by_owner.values())
        raise RuntimeError(f"of 100 topics each belongs to one of the workers {sorted(by_owner)}")

    def run_client(self, role: str, port: int, *words: Any) -> dict[str, Any]:
        command = [str(self.client), role, "127.0.0.1", str(port), *map(str, words)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if result.returncode:
            raise RuntimeError(result.stderr.strip() or f"the client ended with {result.returncode}")
        return dict(json.loads(result.stdout))

    def sent(self, options: dict[str, Any], count: int, in_flight: int) -> dict[str, Any]:
        """SendMessage over and over, every call answered with OK."""
        port = self.broker.grpc_port
        found = self.run_client("send", port, SEND_PATH, options["file"], count, in_flight)
        if found["ok"] != count:
            raise RuntimeError(f"{found['ok']} of {count} calls were OK: {found['refusal']}")
        return found

    def send_rate(self, ports: list[int], files: list[str], count: int) -> float:
        """Calls/s of ``count`` calls of each file to its port, a connection each, IN_FLIGHT in all."""
        in_flight = max(1, IN_FLIGHT // len(files))

        def sent(port: int, file: str) -> dict[str, Any]:
            return self.run_client("send", port, SEND_PATH, file, count, in_flight)

        with ThreadPoolExecutor(len(files)) as pool:
            return rate_of(list(pool.map(sent, ports, files)), count)


Opening = Callable[[GrpcChannel, dict[str, Any]], Any]


def producer(channel: GrpcChannel, options: dict[str, Any]) -> Any:
    """Open one; its SendMessage."""
    request = api.ProducerRequest(
        request_id=1, producer_name="bench", topic_name=options["topic"],
        dispatch_strategy=int(options["durability"] != "memory"),
    )  # fmt: skip
    made = channel.call("/danube.ProducerService/CreateProducer", request, api.ProducerResponse, CALL_S)
    place = api.MsgID(
        producer_id=made.producer_id, topic_name=options["topic"], broker_addr="http://127.0.0.1:6650"
    )
    return api.StreamMessage(
        request_id=1, msg_id=place, payload=b"x" * options["size"], publish_time=1_700_000_000_000,
        producer_name="bench",
    )  # fmt: skip


def consumer(channel: GrpcChannel, options: dict[str, Any]) -> Any:
    """Open one; its ReceiveMessages."""
    request = api.ConsumerRequest(
        request_id=1, topic_name=options["topic"], consumer_name="bench", subscription=SUBSCRIPTION
    )
    made = channel.call("/danube.ConsumerService/Subscribe", request, api.ConsumerResponse, CALL_S)
    return api.ReceiveRequest(request_id=1, consumer_id=made.consumer_id)


def rate_of(found: list[dict[str, Any]], count: int) -> float:
    """What the clients did a second, ``count`` each, from the first one's start to the last one's end."""
    started = min(one["started_ns"] for one in found)
    ended = max(one["ended_ns"] for one in found)
    return float(len(found) * count / ((ended - started) / 1e9))


def compiled_client(directory: Path) -> Path:
    """perf/h2_client.c, compiled for this machine."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise Skipped("no C compiler for perf/h2_client.c; install gcc")
    target = directory / "h2_client"
    if not target.exists():
        source = str(ROOT / "perf" / "h2_client.c")
        subprocess.run([compiler, "-O2", "-o", str(target), source], check=True, capture_output=True)
    return target


def publish(bench: Bench) -> Plan:
    """SendMessage to a topic of each worker, 64 in flight in all, against the bare pump."""
    door = GrpcBench(bench)
    workers = door.settings.workers
    count = door.count(CALLS) // workers

    def danube() -> float:
        opened = door.producers()
        ports = workers * [bench.broker.grpc_port]
        rate = door.send_rate(ports, [options["file"] for options in opened], count)
        for options in opened:
            with sync.connect(options["url"]) as client:
                found = client.admin.describe_topic(options["topic"])
            stored = (found.partitions[0]["log_end"], found.topic.durability)
            if stored != (count, door.settings.durability):
                raise RuntimeError(f"{count} calls at {door.settings.durability} left {stored}")
        return rate

    return Plan(
        floor=lambda: bench.floor_rate(count * workers),
        danube=danube,
        unit="calls/s",
        danube_min=CALLS_S_MIN * workers,
        target=f">= {CALLS_S_MIN:,} calls/s a worker",
        details={"in_flight": IN_FLIGHT, "topics": workers, "connections": workers},
    )


def receive(bench: Bench) -> Plan:
    """ReceiveMessages with one Ack call a message, against the bare pump."""
    door = GrpcBench(bench)
    count = door.count(CALLS)

    def danube() -> float:
        opened = [door.opened(consumer) for _ in range(door.settings.workers)]
        whole = -(-count // 128) * 128
        for options in opened:
            bench.run("publish", {**options, "batch": 128, "record_count": whole})
        with ThreadPoolExecutor(len(opened)) as pool:
            found = list(pool.map(lambda options: consumed(door, options, whole), opened))
        return rate_of(found, whole)

    return Plan(
        floor=lambda: bench.floor_rate(count),
        danube=danube,
        unit="messages/s",
        danube_min=CALLS_S_MIN * door.settings.workers,
        target=f">= {CALLS_S_MIN:,} messages/s a worker",
        details={"consumers": door.settings.workers},
    )


def consumed(door: GrpcBench, options: dict[str, Any], count: int) -> dict[str, Any]:
    """One consumer to the end: every Ack answered with OK, and nothing left at the broker."""
    found = door.run_client("consume", door.bench.broker.grpc_port, options["file"], "bench", count)
    with sync.connect(options["url"]) as client:
        left = client.admin.describe_subscription(options["topic"], SUBSCRIPTION)
    if found["ok"] != count or left.lag_records or left.in_flight:
        raise RuntimeError(f"{found['ok']} of {count} acks were OK, {left} is left: {found['refusal']}")
    return found


def latency(bench: Bench) -> Plan:
    """p50 of one SendMessage at a time, acknowledged at the level, against a bare ping-pong on uvloop."""
    door = GrpcBench(bench)
    count = door.count(LATENCY_CALLS)

    def danube() -> dict[str, Any]:
        found = door.sent(door.opened(producer), count, 1)
        return {"value": found["p50_us"], "p99_us": found["p99_us"], "max_us": found["max_us"]}

    def floor() -> dict[str, Any]:
        found = bench.ping(count)  # both ends on uvloop, as everywhere in perf/
        return {"value": found["p50_us"], "floor_p99_us": found["p99_us"]}

    return Plan(
        floor=floor,
        danube=danube,
        unit="us p50",
        ratio_max=2.0,
        target="p50 <= 2 x the ping-pong on uvloop",
        details={"in_flight": 1},
    )


def auth(bench: Bench) -> Plan:
    """What SendMessage takes of the worker where it asks for a token, against where it asks nobody."""
    asks, open_to_all = GrpcBench(bench, bench.asking()), GrpcBench(bench)
    count = asks.count(CALLS)

    def spent_us(door: GrpcBench) -> float:
        options = door.opened(producer)
        before = cpu_seconds(door.broker.worker_pids)
        door.sent(options, count, IN_FLIGHT)
        return (cpu_seconds(door.broker.worker_pids) - before) / count * 1e6

    return Plan(
        floor=lambda: spent_us(open_to_all), danube=lambda: spent_us(asks), unit="us of a worker a call",
        within=TOKEN_US_MAX, target=f"<= {TOKEN_US_MAX:.0f} us more than `none`",
    )  # fmt: skip


# -- the official Rust client ---------------------------------------------------------------------------


def built() -> str:
    """Path of the program; raises Skipped without cargo or the crate."""
    try:
        return compat.rust("danube-lone", "--release")[0]
    except compat.Skipped as reason:
        raise Skipped(str(reason)) from None


def lone(bench: Bench) -> Plan:
    """publish, receive, ack, one 100 B message after another."""
    program, settings = built(), bench.settings
    count = settings.records(10_000)
    details: dict[str, Any] = {}

    def danube() -> dict[str, Any]:
        topic = bench.options()["topic"]
        level = "non-reliable" if settings.durability == "memory" else "reliable"
        url = f"http://{bench.broker.grpc_address}"
        before = cpu_seconds(bench.broker.worker_pids)
        command = [program, url, topic, level, *map(str, (settings.size, count, WARM))]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=600).stdout)
        spent_s = cpu_seconds(bench.broker.worker_pids) - before
        found["worker_us"] = round(spent_s / (count + WARM) * 1e6, 1)
        return {"value": found["rate"], **found}

    return Plan(
        floor=lambda: 1e6 / bench.ping(count)["p50_us"],
        danube=danube,
        unit="messages/s",
        danube_min=MESSAGES_S_MIN,
        also=lambda: details["worker_us"] <= WORKER_US_MAX,
        target=f">= {MESSAGES_S_MIN:,}/s and <= {WORKER_US_MAX} us of a worker",
        details=details,
    )
