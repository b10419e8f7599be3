"""The brokers beside Danube as data: settings with what each promises, how one starts, what drives it."""

from __future__ import annotations

import base64
import csv
import json
import re
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from perf.compare.driving import Scripted, Tool, cpu, number, steady
from perf.compare.model import Failed, Level, Product, Running, Setting, Spent, Turn, Work
from perf.compare.places import Jars, Program
from perf.compare.processes import Server, listens
from perf.compare.processes import Tool as Process
from perf.grpc_door import WARM, built
from perf.turns import Skipped
from tests.broker_process import free_port

MIB = 1 << 20


def window(work: Work, most: int, bytes_max: int) -> int:
    """Records in flight: so many, so many bytes, and never more than there are."""
    return max(1, min(most, bytes_max // work.size, work.count))


def started(
    setting: Setting,
    directory: Path,
    command: Sequence[str],
    address: Mapping[str, object],
    *ports: int,
    environment: Mapping[str, str] | None = None,
    obeys: Callable[[], bool] = lambda: True,
) -> Running:
    """A server that listens and obeys its setting; one that does not get so far is ended."""
    server = Server(command, directory, environment)
    try:
        server.wait(lambda: all(map(listens, ports)) and obeys())
    except BaseException:
        server.stop()
        raise
    return Running(setting=setting, directory=directory, pids=server.pids, stop=server.stop, address=address)


def printed_by(program: Program) -> str:
    """What ``--version`` prints; empty where there is no such program."""
    path = program.path()
    return subprocess.run([path, "--version"], capture_output=True, text=True).stdout if path else ""


def version_in(pattern: str, text: str) -> str:
    """The group of ``pattern`` in a text."""
    found = re.search(pattern, text)
    return found[1] if found else "of unknown version"


# -- NATS ---------------------------------------------------------------------------------------------

NATS_SERVER = Program("nats-server", "install the package nats-server")
NATS_TOOL = Program("nats")
NATS_RATE = r"stats: ([\d,]+) msgs/sec"
NATS_PYTHON = Scripted(name="nats-py", script="nats_peer.py", package="nats")
NATS_IN_FLIGHT = (4_000, 64 * MIB)
NATS_BATCH = (1_000, 8 * MIB)  # the most that an atomic batch may hold


def nats_version() -> tuple[int, ...]:
    """Of the server that would be started; () when there is none."""
    return tuple(map(int, re.findall(r"\d+", printed_by(NATS_SERVER))[:3]))


def nats_missing(setting: Setting) -> str:
    if reason := NATS_SERVER.missing():
        return reason
    if setting.level is Level.FSYNC and nats_version() < (2, 10):
        return f"nats-server {'.'.join(map(str, nats_version()))} has no sync_interval: always; 2.10 has"
    return ""


def nats_start(setting: Setting, directory: Path) -> Running:
    port, configuration = free_port(), directory / "nats.conf"
    always = "sync_interval: always" if setting.level is Level.FSYNC else ""
    configuration.write_text(
        f'listen: "127.0.0.1:{port}"\n'
        f'jetstream {{ store_dir: "{directory / "data"}", max_mem: 32GB, max_file: 64GB, {always} }}\n'
    )
    command = [NATS_SERVER.path(), "-c", str(configuration)]
    address = {"url": f"nats://127.0.0.1:{port}"}
    return started(setting, directory, command, address, port)


def nats_bench(way: str, running: Running, work: Work, reads: bool) -> list[str]:
    """One side of ``nats bench``; the place of an ordered reader is kept by the client."""
    core = running.setting.level is Level.TAKEN
    if reads:
        words = ["sub", work.topic] if core else ["js", "ordered", "--stream", work.topic]
    elif core:
        words = ["pub", work.topic]
    else:
        batch = window(work, *(NATS_BATCH if way == "batch" else NATS_IN_FLIGHT))
        words = ["js", "pub", way, work.topic, "--stream", work.topic, "--batch", str(batch)]
    return [
        *(NATS_TOOL.path(), "--no-context", "--timeout", "60s", "-s", str(running.address["url"])),
        *("bench", *words, "--no-progress", "--msgs", str(work.count), "--size", f"{work.size}B"),
    ]


class NatsBench(Tool):
    """Two processes when it measures from end to end."""

    def measured(self, running: Running, work: Work) -> Turn:
        """The slower of what both sides print: a reader counts from its first message only."""
        if work.workload != "e2e":
            return super().measured(running, work)
        with ExitStack() as stack:
            before = cpu(running, [])
            reader = Process(nats_bench("async", running, work, True), running.directory)
            stack.callback(reader.kill)
            reader.wait(lambda: "expecting" in reader.said())
            writer = Process(self.command(running, work), running.directory)
            stack.callback(writer.kill)
            done = [writer.finish(), reader.finish()]
            client = max(one.cpu_seconds for one in done)  # of the first to start: of both
            spent = replace(cpu(running, []) - before, client=client)
        return steady(min(number(NATS_RATE, one.output) for one in done), work, spent)


NATS_ASYNC = NatsBench(
    name="nats bench, async", needs=NATS_TOOL, topics=NATS_PYTHON,
    command=lambda running, work: nats_bench("async", running, work, work.workload == "replay"),
    read=lambda printed, running, work, spent: steady(number(NATS_RATE, printed), work, spent),
    cannot={"latency": "nats bench prints no percentiles"},
)  # fmt: skip
NATS_CORE = replace(NATS_ASYNC, topics=None)
NATS_BATCHES = replace(
    NATS_ASYNC, name="nats bench, batch",
    command=lambda running, work: nats_bench("batch", running, work, False),
    cannot={**NATS_ASYNC.cannot, **dict.fromkeys(("e2e", "replay"), "batches are a way to publish")},
    lacks=lambda: "atomic batches need nats-server 2.12" if nats_version() < (2, 12) else "",
)  # fmt: skip
NATS_STORED = (NATS_PYTHON, NATS_ASYNC, NATS_BATCHES)


NATS = Product(
    name="nats",
    settings=(
        Setting("nats core", Level.TAKEN,
                "a flush returned: the server took all before it; a slow subscriber is cut off"),
        Setting("jetstream memory", Level.IN_MEMORY,
                "in the stream in the server's memory; lost with the process"),
        Setting("jetstream file", Level.WRITTEN,
                "default sync_interval: written to the file before the ack, synced every two minutes"),
        Setting("jetstream file sync-always", Level.FSYNC,
                "sync_interval: always: each write is synced before its ack"),
    ),
    drivers={**dict.fromkeys(Level, NATS_STORED), Level.TAKEN: (NATS_PYTHON, NATS_CORE)},
    start=nats_start,
    version=lambda: ".".join(map(str, nats_version())),
    missing=nats_missing,
)  # fmt: skip

# -- Redis --------------------------------------------------------------------------------------------

REDIS_SERVER = Program("redis-server", "install the package redis-server")
REDIS_TOOL = Program("redis-benchmark", "install the package redis-tools")
REDIS_PIPELINE = (500, 4 * MIB)
FILE_BYTES_MAX = 2 << 30  # a longer append-only file is rewritten between two turns
SETTLE_TIMEOUT_S = 120.0
APPENDFSYNC = {Level.WRITTEN_LATER: "everysec", Level.WRITTEN: "no", Level.FSYNC: "always"}


def ask(port: int, *words: str) -> str:
    """The answer to one command, as it comes over a connection of its own."""
    request = f"*{len(words)}\r\n" + "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in words)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(request.encode())
        return connection.recv(1 << 20).decode(errors="replace")


def redis_fact(port: int, name: str) -> int:
    """A number of INFO; 0 when this server does not know it."""
    found = re.search(rf"{name}:(\d+)", ask(port, "INFO"))
    return int(found[1]) if found else 0


def redis_clean(running: Running, work: Work) -> None:
    """Delete a stream and wait until nothing of it is worked on any more, so that the next turn is alone."""
    port = int(str(running.address["port"]))
    ask(port, "UNLINK", work.topic)
    if redis_fact(port, "aof_current_size") > FILE_BYTES_MAX:
        ask(port, "BGREWRITEAOF")
    busy = ("lazyfree_pending_objects", "aof_rewrite_in_progress", "aof_rewrite_scheduled")
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while any(redis_fact(port, name) for name in busy):
        if time.monotonic() > deadline:
            raise Failed(f"redis was not done with deleting {work.topic} within {SETTLE_TIMEOUT_S:g} s")
        time.sleep(0.02)


class RedisPython(Scripted):
    """redis-py; the stream of a turn is deleted from here."""

    def create(self, running: Running, work: Work, stack: ExitStack) -> None:
        stack.callback(redis_clean, running, work)


REDIS_PYTHON = RedisPython(name="redis-py", script="redis_peer.py", package="redis")


def redis_benchmark(running: Running, work: Work) -> list[str]:
    stored = running.setting.level is not Level.TAKEN
    words = ["XADD", work.topic, "*", "p"] if stored else ["PUBLISH", work.topic]
    return [
        *(REDIS_TOOL.path(), "-h", "127.0.0.1", "-p", str(running.address["port"]), "--csv", "-c", "1"),
        *("-n", str(work.count), "-P", str(window(work, *REDIS_PIPELINE)), *words, "x" * work.size),
    ]


def requests_per_second(printed: str, count: int) -> float:
    """The second column of the last line of CSV; its clock counts milliseconds, so less than one is one."""
    rows = [row for row in csv.reader(printed.splitlines()) if len(row) > 1 and row[1] != "rps"]
    if not rows:
        raise Failed(f"redis-benchmark printed no result: {printed[-500:].strip()}")
    return min(float(rows[-1][1]), count * 1_000.0)


REDIS_BENCHMARK = Tool(
    name="redis-benchmark",
    needs=REDIS_TOOL,
    command=redis_benchmark,
    read=lambda printed, running, work, spent: steady(requests_per_second(printed, work.count), work, spent),
    cannot={
        "latency": "redis-benchmark cannot pace what it sends",
        "e2e": "redis-benchmark does not publish and read at the same time",
        "replay": "redis-benchmark does not read a stream to its end",
    },
    after=redis_clean,
)


def redis_obeys(port: int, policy: str) -> bool:
    """Whether the file is on and synced as the level says; Failed when it is not."""
    words = ask(port, "CONFIG", "GET", "append*").split("\r\n")
    facts = dict(zip(words[2::4], words[4::4], strict=False))
    if policy and (facts.get("appendonly"), facts.get("appendfsync")) != ("yes", policy):
        raise Failed(f"redis did not take appendfsync {policy}: {words!r}")
    return True


def redis_start(setting: Setting, directory: Path) -> Running:
    port, policy = free_port(), APPENDFSYNC.get(setting.level, "")
    command = [
        *(REDIS_SERVER.path(), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory)),
        *("--save", "", "--daemonize", "no", "--appendonly", "yes" if policy else "no"),
        *("--appendfsync", policy or "no", "--auto-aof-rewrite-percentage", "0"),
    ]
    obeys = partial(redis_obeys, port, policy)
    return started(setting, directory, command, {"port": port}, port, obeys=obeys)


REDIS = Product(
    name="redis",
    settings=(
        Setting("redis pub/sub", Level.TAKEN,
                "PUBLISH answered: handed to whoever listens; a slow subscriber is cut off"),
        Setting("redis streams memory", Level.IN_MEMORY,
                "appendonly no: in the server's memory; lost with the process"),
        Setting("redis streams everysec", Level.WRITTEN_LATER,
                "appendfsync everysec: written before the answer, or up to 2 s later during a sync"),
        Setting("redis streams no", Level.WRITTEN,
                "appendfsync no: written to the file before the answer, synced by the system"),
        Setting("redis streams always", Level.FSYNC,
                "appendfsync always: synced before the answer, once for what a turn of its loop read"),
    ),
    drivers=dict.fromkeys(Level, (REDIS_PYTHON, REDIS_BENCHMARK)),
    start=redis_start,
    version=lambda: version_in(r"v=([\d.]+)", printed_by(REDIS_SERVER)),
    missing=lambda setting: REDIS_SERVER.missing(),
    stored_max=1_000_000,
)  # fmt: skip

# -- RabbitMQ -----------------------------------------------------------------------------------------

RABBIT_SERVER = Program("rabbitmq-server", "install the package rabbitmq-server")
PERF_TEST, STREAM_PERF_TEST = Jars("perf-test"), Jars("stream-perf-test")
RABBIT_IN_FLIGHT = (1_000, 16 * MIB)
PREFETCH = 1_000
KEEPS_NOTHING = "a queue keeps nothing to be read again"
STREAM = Scripted(name="rstream", script="rabbit_stream.py", package="rstream")
QUORUM = Scripted(
    name="aio-pika", script="rabbit_quorum.py", package="aio_pika", cannot={"replay": KEEPS_NOTHING}
)


def perf_test(running: Running, work: Work) -> list[str]:
    reading, paced = work.workload == "e2e", work.workload == "latency"
    ahead = 1 if paced else window(work, *RABBIT_IN_FLIGHT)
    command = [
        *PERF_TEST.command("com.rabbitmq.perf.PerfTest"),
        *("-h", f"{running.address['url']}%2f", "--quorum-queue", "-u", work.topic, "-f", "persistent"),
        *("-s", str(work.size), "-x", "1", "-y", str(int(reading)), "-c", str(ahead), "-C", str(work.count)),
    ]
    if reading:
        command += ["-D", str(work.count), "--qos", str(PREFETCH), "--multi-ack-every", str(PREFETCH // 4)]
    return command + (["--rate", str(work.rate)] if paced else [])


def read_perf_test(printed: str, running: Running, work: Work, spent: Spent) -> Turn:
    """Rates, or at one at a time the percentiles of the last line."""
    side = "receiving" if work.workload == "e2e" else "sending"
    rate, printed = number(rf"{side} rate avg: (\d+) msg/s", printed), printed.strip()
    turn = steady(rate, work, spent)
    if work.workload != "latency":
        return turn
    found = r"confirm latency min/median/75th/95th/99th {}.*s\s*$"
    p50_us, p99_us = (number(found.format(place), printed) for place in (r"\d+/(\d+)/", r"(?:\d+/){4}(\d+)"))
    return replace(turn, p50_us=p50_us, p99_us=p99_us)


def stream_perf_test(running: Running, work: Work) -> list[str]:
    producers, consumers = int(work.workload != "replay"), int(work.workload != "publish")
    return [
        *STREAM_PERF_TEST.command("com.rabbitmq.stream.perf.StreamPerfTest"),
        *("--uris", f"rabbitmq-stream://guest:guest@127.0.0.1:{running.address['stream_port']}"),
        *("--streams", work.topic, "--size", str(work.size), "--offset", "first"),
        *("--producers", str(producers), "--consumers", str(consumers), "--time", str(whole_seconds(work))),
    ]


def whole_seconds(work: Work) -> int:
    """How long a tool runs that knows whole seconds only."""
    return max(1, round(work.seconds))


def read_stream_perf_test(printed: str, running: Running, work: Work, spent: Spent) -> Turn:
    """A turn from the line that begins with Summary."""
    wanted = "confirmed" if work.workload == "publish" else "consumed"
    rate = number(rf"Summary:.*?\b{wanted} (\d+) msg/s", printed)
    return steady(rate, replace(work, count=round(rate * whole_seconds(work))), spent)


RABBIT_PERF_TEST = Tool(
    name="perf-test", needs=PERF_TEST, command=perf_test, read=read_perf_test,
    cannot={"replay": KEEPS_NOTHING}, topics=QUORUM,
)  # fmt: skip
RABBIT_STREAM_PERF_TEST = Tool(
    name="stream-perf-test", needs=STREAM_PERF_TEST, command=stream_perf_test, read=read_stream_perf_test,
    cannot={"latency": "stream-perf-test prints whole milliseconds"}, topics=STREAM,
)  # fmt: skip


def rabbit_start(setting: Setting, directory: Path) -> Running:
    """One node with the stream plugin, apart from all places of the system's own RabbitMQ."""
    amqp, stream = free_port(), free_port()
    (directory / "rabbitmq.conf").write_text(
        f"listeners.tcp.1 = 127.0.0.1:{amqp}\nstream.listeners.tcp.1 = 127.0.0.1:{stream}\n"
        f"stream.advertised_host = 127.0.0.1\nstream.advertised_port = {stream}\n"
    )
    (directory / "plugins").write_text("[rabbitmq_stream].\n")
    (directory / "env").touch()
    environment = {
        "HOME": str(directory),
        "ERL_EPMD_PORT": str(free_port()),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_NODENAME": "compare@localhost",
        "RABBITMQ_MNESIA_BASE": str(directory / "data"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_LOGS": str(directory / "log" / "server.log"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
        "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq"),
        "RABBITMQ_CONF_ENV_FILE": str(directory / "env"),
        "RABBITMQ_PID_FILE": str(directory / "pid"),
        "NOTIFY_SOCKET": "",
        "detached": "1",  # the script becomes the server instead of waiting for it
    }
    address = {"url": f"amqp://guest:guest@127.0.0.1:{amqp}/", "stream_port": stream}
    command = [RABBIT_SERVER.path()]
    return started(setting, directory, command, address, amqp, stream, environment=environment)


RABBITMQ = Product(
    name="rabbitmq",
    settings=(
        Setting("rabbitmq stream", Level.WRITTEN,
                "confirmed after the chunk is written to the segment; never synced by the server"),
        Setting("rabbitmq quorum queue", Level.FSYNC,
                "confirmed after an fdatasync of its log, one sync for what has gathered; one replica"),
    ),
    drivers={Level.WRITTEN: (STREAM, RABBIT_STREAM_PERF_TEST), Level.FSYNC: (QUORUM, RABBIT_PERF_TEST)},
    start=rabbit_start,
    version=lambda: version_in(r"rabbitmq_server-([\d.]+)", str(Path(RABBIT_SERVER.path()).resolve())),
    missing=lambda setting: RABBIT_SERVER.missing(),
)  # fmt: skip

# -- Kafka --------------------------------------------------------------------------------------------

KAFKA_JARS = Jars("kafka")
KAFKA_PYTHON = Scripted(name="confluent-kafka", script="kafka_peer.py", package="confluent_kafka")
FETCHED = r"(?m)^\d{4}-\d\d-\d\d.*,\s*([\d.]+)\s*$"  # last column of the last line: a second while fetching
KAFKA_PRODUCER = (
    "acks=all", "linger.ms=5", "batch.size=1048576", "max.request.size=4194304", "buffer.memory=134217728"
)  # fmt: skip
# The least that one broker needs; deleted topics go at once, for the next turn's sake.
KAFKA_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
log.dirs={data}
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
message.max.bytes=4194304
log.segment.delete.delay.ms=1000
"""


def java(main: str, *words: str) -> list[str]:
    """A class of Kafka's as a command."""
    return [*KAFKA_JARS.command(main, "-Xmx1g"), *words]


def kafka_perf(running: Running, work: Work) -> list[str]:
    """The reader's rate is that while fetching: joining the group is not the replay."""
    server = str(running.address["server"])
    if work.workload == "replay":
        return java(
            "org.apache.kafka.tools.ConsumerPerformance", "--bootstrap-server", server, "--topic", work.topic,
            "--messages", str(work.count), "--group", running.next_name(),
        )  # fmt: skip
    return java(
        "org.apache.kafka.tools.ProducerPerformance", "--topic", work.topic, "--num-records", str(work.count),
        "--record-size", str(work.size), "--throughput", "-1",
        "--producer-props", f"bootstrap.servers={server}", *KAFKA_PRODUCER,
    )  # fmt: skip


def read_kafka_perf(printed: str, running: Running, work: Work, spent: Spent) -> Turn:
    pattern = FETCHED if work.workload == "replay" else r"records sent, ([\d.]+) records/sec"
    return steady(number(pattern, printed), work, spent)


KAFKA_PERF = Tool(
    name="kafka-*-perf-test",
    needs=KAFKA_JARS,
    command=kafka_perf,
    read=read_kafka_perf,
    cannot={
        "latency": "kafka-producer-perf-test prints whole milliseconds",
        "e2e": "the producer's and the consumer's tool are two, and each counts its own start",
    },
    topics=KAFKA_PYTHON,
)


def kafka_start(setting: Setting, directory: Path) -> Running:
    """A broker that is its own controller in one Java process."""
    port, configuration = free_port(), directory / "server.properties"
    facts = {"port": port, "controller": free_port(), "data": directory / "data"}
    configuration.write_text(KAFKA_PROPERTIES.format(**facts))
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    words = ("format", f"--cluster-id={cluster}", "-c", str(configuration))
    Process(java("kafka.tools.StorageTool", *words), directory).finish()
    flush = {"flush.messages": "1"} if setting.level is Level.FSYNC else {}
    address = {"server": f"127.0.0.1:{port}", "config": flush}
    command = java("kafka.Kafka", str(configuration))
    return started(setting, directory, command, address, port)


KAFKA = Product(
    name="kafka",
    settings=(
        Setting("kafka", Level.WRITTEN,
                "acks=all of one replica, default flush: written before the ack, synced by the system"),
        Setting("kafka flush.messages=1", Level.FSYNC,
                "acks=all of one replica, flush.messages=1: each append is synced before its ack"),
    ),
    drivers=dict.fromkeys(Level, (KAFKA_PYTHON, KAFKA_PERF)),
    start=kafka_start,
    version=lambda: version_in(
        r"kafka_[\d.]+-([\d.]+)\.jar", " ".join(map(str, Path(KAFKA_JARS.path()).parent.glob("kafka_*.jar")))
    ),
    missing=lambda setting: KAFKA_JARS.missing(),
)  # fmt: skip

# -- Danube in Rust, where somebody has built one -----------------------------------------------------

# Not danube-broker, as which this repository's broker is installed.
RUST_SERVER = Program("danube-broker-rust", "link the one that you have built to this name, on PATH")


def rust_lone(running: Running, work: Work) -> list[str]:
    """One message after another (perf/lone.rs)."""
    level = "non-reliable" if running.setting.level is Level.TAKEN else "reliable"
    words = (running.address["grpc"], f"/default/{work.topic}", level, work.size, work.count, WARM)
    try:
        return [built(), *map(str, words)]
    except Skipped as reason:
        raise Failed(str(reason)) from None


def read_rust_lone(printed: str, running: Running, work: Work, spent: Spent) -> Turn:
    found = json.loads(printed)
    figures = ("rate", "seconds", "records", "p50_us", "p99_us")
    return Turn(spent=spent, **{name: found[name] for name in figures})


RUST_LONE = Tool(
    name="danube-client, Rust", needs=Program("cargo", "install Rust"), command=rust_lone,
    read=read_rust_lone, lone=True,
)  # fmt: skip
# It makes topics by using them, and cannot delete one.
RUST_PYTHON = Scripted(
    name="danube-client, gRPC", script="danube_grpc.py", package="danube", prefix="/default/",
    cannot={"replay": "its API has no way to begin a subscription with the first record"},
)  # fmt: skip


def rust_start(setting: Setting, directory: Path) -> Running:
    port, admin, raft = free_port(), free_port(), free_port()
    command = [
        *(RUST_SERVER.path(), "--mode", "standalone", "--broker-addr", f"127.0.0.1:{port}"),
        *("--admin-addr", f"127.0.0.1:{admin}", "--raft-addr", f"127.0.0.1:{raft}"),
        *("--data-dir", str(directory / "data")),
    ]
    address = {"grpc": f"http://127.0.0.1:{port}"}
    return started(setting, directory, command, address, port)


DANUBE_RUST = Product(
    name="danube-rust",
    settings=(
        Setting("danube-rust non-reliable", Level.TAKEN,
                "non-reliable topic: handed to whoever listens, dropped for who is full"),
        Setting("danube-rust reliable", Level.WRITTEN_LATER,
                "in the log's buffer: written within 5 s or 10 MiB of the ack, never synced"),
    ),
    drivers=dict.fromkeys(Level, (RUST_PYTHON, RUST_LONE)),
    start=rust_start,
    version=lambda: "of unknown version",  # its command line has no flag that tells
    missing=lambda setting: RUST_SERVER.missing(),
    stored_max=200_000,
)  # fmt: skip

PEERS = (NATS, REDIS, RABBITMQ, KAFKA, DANUBE_RUST)
