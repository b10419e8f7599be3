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
SEND_PATH = "/danube.ProducerService/SendMessage"
CALLS_S_MIN = 60_000  # of each worker
WARM = 200
MESSAGES_S_MIN = 3_000
WORKER_US_MAX = 250
TOKEN_US_MAX = 1  # more a call where a token is asked for


class GrpcBench:
    """What the workloads share: the compiled client, and topics with their files."""

    def __init__(self, bench: Bench, broker: BrokerProcess | None = None) -> None:
        self.bench = bench
        self._other = broker
        self.broker = broker or bench.broker
        self.settings = bench.settings
        self.client = compiled_client(self.settings.directory)
        self.count = self.settings.scaled(CALLS, 2 * IN_FLIGHT)

    def opened(self, opening: Opening) -> dict[str, Any]:
        """A fresh topic with a producer or consumer on it, and its message in a file."""
        options = self.bench.options(self._other)
        topic_id = self.bench.create(options).topic_id
        door = Endpoint(self.broker.grpc_address, token=os.environ.get("DANUBE_TOKEN", ""))
        with closing(open_channel(door)) as channel:
            data = opening(channel, options).SerializeToString()
        file = self.settings.directory / options["topic"].rsplit("/", 1)[1]
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

    def run_client(self, role: str, count: int, *words: Any) -> dict[str, Any]:
        """What the compiled client did; each of its ``count`` calls was answered with OK."""
        command = [self.client, role, "127.0.0.1", self.broker.grpc_port, *words]
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
        if result.returncode:
            raise RuntimeError(result.stderr.strip() or f"the client ended with {result.returncode}")
        found: dict[str, Any] = json.loads(result.stdout)
        if found["ok"] != count:
            raise RuntimeError(f"{found['ok']} of {count} calls were OK: {found['refusal']}")
        return found

    def send(self, options: dict[str, Any], count: int, in_flight: int) -> dict[str, Any]:
        """SendMessage over and over."""
        return self.run_client("send", count, SEND_PATH, options["file"], count, in_flight)


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


def rate_of(call: Callable[[dict[str, Any]], dict[str, Any]], opened: list[dict[str, Any]]) -> float:
    """Calls/s of a client for each of ``opened`` side by side, from the first start to the last end."""
    with ThreadPoolExecutor(len(opened)) as pool:
        found = list(pool.map(call, opened))
    started = min(one["started_ns"] for one in found)
    ended = max(one["ended_ns"] for one in found)
    return float(sum(one["ok"] for one in found) / ((ended - started) / 1e9))


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
    count, in_flight = door.count // workers, max(1, IN_FLIGHT // workers)

    def danube() -> float:
        opened = door.producers()
        rate = rate_of(lambda options: door.send(options, count, in_flight), opened)
        for options in opened:
            with sync.connect(options["url"]) as client:
                found = client.admin.describe_topic(options["topic"])
            stored = (found.partitions[0]["log_end"], found.topic.durability)
            if stored != (count, door.settings.durability):
                raise RuntimeError(f"{count} calls at {door.settings.durability} left {stored}")
        return rate

    details = {"in_flight": IN_FLIGHT, "topics": workers, "connections": workers}
    least = CALLS_S_MIN * workers
    return Plan(
        lambda: bench.floor_rate(count * workers), danube, "calls/s", danube_min=least, details=details
    )


def receive(bench: Bench) -> Plan:
    """ReceiveMessages with one Ack call a message, against the bare pump."""
    door = GrpcBench(bench)
    workers, whole = door.settings.workers, -(-door.count // 128) * 128

    def consumed(options: dict[str, Any]) -> dict[str, Any]:
        """One consumer to the end, and nothing left at the broker."""
        found = door.run_client("consume", whole, options["file"], "bench", whole)
        with sync.connect(options["url"]) as client:
            left = client.admin.describe_subscription(options["topic"], SUBSCRIPTION)
        if left.lag_records or left.in_flight:
            raise RuntimeError(f"{left} is left of {whole} messages")
        return found

    def danube() -> float:
        opened = [door.opened(consumer) for _ in range(workers)]
        for options in opened:
            bench.run("publish", {**options, "batch": 128, "record_count": whole})
        return rate_of(consumed, opened)

    least, details = CALLS_S_MIN * workers, {"consumers": workers}
    return Plan(lambda: bench.floor_rate(door.count), danube, "messages/s", danube_min=least, details=details)


def auth(bench: Bench) -> Plan:
    """What SendMessage takes of the worker where it asks for a token, against where it asks nobody."""
    asks, open_to_all = GrpcBench(bench, bench.asking()), GrpcBench(bench)

    def spent_us(door: GrpcBench) -> float:
        options = door.opened(producer)
        before = cpu_seconds(door.broker.worker_pids)
        door.send(options, door.count, IN_FLIGHT)
        return (cpu_seconds(door.broker.worker_pids) - before) / door.count * 1e6

    unit = "us of a worker a call"
    return Plan(lambda: spent_us(open_to_all), lambda: spent_us(asks), unit, within=TOKEN_US_MAX)


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
    count = settings.scaled(10_000, 1_000)

    def danube() -> dict[str, Any]:
        topic = bench.options()["topic"]
        level = "non-reliable" if settings.durability == "memory" else "reliable"
        url = f"http://{bench.broker.grpc_address}"
        before = cpu_seconds(bench.broker.worker_pids)
        command = [program, url, topic, level, *map(str, (settings.size, count, WARM))]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=600).stdout)
        spent_s = cpu_seconds(bench.broker.worker_pids) - before
        return {"value": found["rate"], "worker_us": round(spent_s / (count + WARM) * 1e6, 1), **found}

    return Plan(
        lambda: 1e6 / bench.ping(count)["p50_us"], danube, "messages/s", danube_min=MESSAGES_S_MIN,
        also={f"<= {WORKER_US_MAX} us of a worker": lambda details: details["worker_us"] <= WORKER_US_MAX},
    )  # fmt: skip
