"""Rows of the gRPC door: compiled clients against a bare grpcio server in the same run.

After each turn the broker is asked what it stored or settled, so a call that failed cannot count.

``lone`` is the row that users feel: perf/lone.rs, built with the official Rust client.  One message after
another is published, received and acknowledged; the workers' processor time for each is read from /proc.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from perf.compare.processes import cpu_seconds
from perf.turns import ROOT, Bench, Plan, Skipped
from tests.child_process import Child
from tests.compat import run as compat

IN_FLIGHT = 64
CALLS = 100_000
FLOOR_CALLS = 15_000  # the floor is slower by the factor that is measured here
LATENCY_CALLS = 5_000
SEND_PATH = "/danube.ProducerService/SendMessage"
CALLS_S_MIN = 60_000  # of each worker
WARM = 200
MESSAGES_S_MIN = 3_000
WORKER_US_MAX = 250


class GrpcBench:
    """What the three workloads share: the compiled client, the bare servers, and topics with their files."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.settings = bench.settings
        self.client = compiled_client(self.settings.directory)
        self._echo_ports: list[int] = []

    def count(self, number: int) -> int:
        return max(2 * IN_FLIGHT, int(number * self.settings.scale))

    def ask(self, role: str, options: dict[str, Any]) -> dict[str, Any]:
        return Child("perf/grpc_peer.py", role, options).result()

    def opened(self, role: str) -> dict[str, Any]:
        """A fresh topic with a producer or consumer on it, and its message in a file."""
        options = self.bench.options(grpc=self.bench.broker.grpc_address)
        options["file"] = str(self.settings.directory / f"{options['topic'].rsplit('/', 1)[1]}.{role}")
        return {**options, **self.ask(role, options)}

    def producers(self) -> list[dict[str, Any]]:
        """A fresh topic of each worker with a producer on it."""
        by_owner: dict[int, dict[str, Any]] = {}
        for _ in range(100):
            options = self.opened("producer")
            by_owner.setdefault(options["owner"], options)
            if len(by_owner) == self.settings.workers:
                return list(by_owner.values())
        raise RuntimeError(f"of 100 topics each belongs to one of the workers {sorted(by_owner)}")

    def echo_ports(self) -> list[int]:
        """The ports of as many bare grpcio servers as the broker has workers."""
        while len(self._echo_ports) < self.settings.workers:
            server = Child("perf/grpc_peer.py", "echo", {"size": self.settings.size})
            self.bench.on_close(server.stop)
            self._echo_ports.append(int(server.line()))
        return self._echo_ports

    def run_client(self, role: str, port: int, *words: Any) -> dict[str, Any]:
        command = [str(self.client), role, "127.0.0.1", str(port), *map(str, words)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if result.returncode:
            raise RuntimeError(result.stderr.strip() or f"the client ended with {result.returncode}")
        return dict(json.loads(result.stdout))

    def send_rate(self, ports: list[int], files: list[str], count: int) -> float:
        """Calls/s of ``count`` calls of each file to its port, a connection each, IN_FLIGHT in all."""
        in_flight = max(1, IN_FLIGHT // len(files))

        def sent(port: int, file: str) -> dict[str, Any]:
            return self.run_client("send", port, SEND_PATH, file, count, in_flight)

        with ThreadPoolExecutor(len(files)) as pool:
            return rate_of(list(pool.map(sent, ports, files)), count)


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
    """SendMessage to a topic of each worker, 64 in flight in all, against as many bare grpcio servers."""
    door = GrpcBench(bench)
    workers = door.settings.workers
    count = door.count(CALLS) // workers

    def danube() -> float:
        opened = door.producers()
        ports = workers * [bench.broker.grpc_port]
        rate = door.send_rate(ports, [options["file"] for options in opened], count)
        for options in opened:
            stored = door.ask("stored", options)
            if stored != {"records": count, "durability": door.settings.durability}:
                raise RuntimeError(f"{count} calls at {door.settings.durability} left {stored}")
        return rate

    def floor() -> float:
        file = door.settings.directory / "echo.producer"
        door.ask("message", {"file": str(file), "size": door.settings.size})
        return door.send_rate(door.echo_ports(), workers * [str(file)], door.count(FLOOR_CALLS) // workers)

    return Plan(
        floor=floor,
        danube=danube,
        unit="calls/s",
        ratio_min=10.0,
        danube_min=CALLS_S_MIN * workers,
        target=f"ratio >= 10 and >= {CALLS_S_MIN:,} calls/s a worker",
        details={"in_flight": IN_FLIGHT, "topics": workers, "connections": workers},
    )


def receive(bench: Bench) -> Plan:
    """ReceiveMessages with one Ack call a message, against a bare grpcio server that streams and answers."""
    door = GrpcBench(bench)
    count = door.count(CALLS)

    def danube() -> float:
        opened = [door.opened("consumer") for _ in range(door.settings.workers)]
        whole = -(-count // 128) * 128
        for options in opened:
            bench.run("publish", {**options, "batch": 128, "record_count": whole})
        with ThreadPoolExecutor(len(opened)) as pool:
            found = list(pool.map(lambda options: consumed(door, options, whole), opened))
        return rate_of(found, whole)

    def floor() -> float:
        file = door.settings.directory / "echo.consumer"
        floor_count = door.count(FLOOR_CALLS)
        door.ask("request", {"file": str(file), "count": floor_count})
        found = door.run_client("consume", door.echo_ports()[0], file, "bench", floor_count)
        return rate_of([found], floor_count)

    return Plan(
        floor=floor,
        danube=danube,
        unit="messages/s",
        danube_min=CALLS_S_MIN * door.settings.workers,
        target=f">= {CALLS_S_MIN:,} messages/s a worker",
        details={"consumers": door.settings.workers, "floor_consumers": 1},
    )


def consumed(door: GrpcBench, options: dict[str, Any], count: int) -> dict[str, Any]:
    """One consumer to the end: every Ack answered with OK, and nothing left at the broker."""
    found = door.run_client("consume", door.bench.broker.grpc_port, options["file"], "bench", count)
    left = door.ask("settled", options)
    if found["ok"] != count or left != {"lag": 0, "in_flight": 0}:
        raise RuntimeError(f"{found['ok']} of {count} acks were OK, {left} is left: {found['refusal']}")
    return found


def latency(bench: Bench) -> Plan:
    """p50 of one SendMessage at a time, acknowledged at the level, against a bare ping-pong on uvloop."""
    door = GrpcBench(bench)
    count = door.count(LATENCY_CALLS)

    def danube() -> dict[str, Any]:
        options = door.opened("producer")
        found = door.run_client("send", bench.broker.grpc_port, SEND_PATH, options["file"], count, 1)
        if found["ok"] != count:
            raise RuntimeError(f"{found['ok']} of {count} calls were OK: {found['refusal']}")
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
