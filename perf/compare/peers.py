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
from dataclasses import dataclass, field, replace
from pathlib import Path

from perf.compare.driving import UNSTORED, Scripted, Tool, number, spend, steady
from perf.compare.model import TURN_TIMEOUT_S, Client, Failed, Level, Running, Setting, Spent, Turn, Work
from perf.compare.places import Jars, Needed, Program
from perf.compare.processes import Tool as Started
from perf.compare.processes import cpu_seconds, listens, run, started
from perf.grpc_door import WARM, built
from perf.turns import Skipped
from tests.broker_process import free_port
from tests.child_process import Child

MIB = 1 << 20
UNKNOWN = "of unknown version"


def window(work: Work, most: int, bytes_max: int) -> int:
    """Records in flight: so many, so many bytes, and never more than there are."""
    return max(1, min(most, bytes_max // work.size, work.count))


@dataclass(kw_only=True)
class Launch:
    """A server's command and where it listens; ``check`` raises Failed when it is not what was asked for."""

    command: Sequence[str]
    ports: Sequence[int]
    address: dict[str, object]
    environment: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[], None] = lambda: None


@dataclass(kw_only=True)
class Peer:
    """A broker of somebody else."""

    name: str
    server: Needed
    settings: tuple[Setting, ...]
    drivers: Mapping[Level, tuple[Client, ...]] | tuple[Client, ...]
    launch: Callable[[Setting, Path], Launch]
    version: Callable[[], str]
    lacks: Callable[[Setting], str] = lambda setting: ""
    stored_max: int = 2_000_000
    ours: bool = False

    def clients(self, setting: Setting) -> tuple[Client, ...]:
        return self.drivers if isinstance(self.drivers, tuple) else self.drivers[setting.level]

    def missing(self, setting: Setting) -> str:
        return self.server.missing() or self.lacks(setting)

    def start(self, setting: Setting, directory: Path) -> Running:
        found = self.launch(setting, directory)
        ready = lambda: all(map(listens, found.ports))  # noqa: E731
        server = started(found.command, directory, ready, found.environment)
        try:
            found.check()
        except BaseException:
            server.stop()
            raise
        return Running(setting=setting, directory=directory, server=server, address=found.address)


def printed_by(program: Program) -> str:
    """What ``--version`` prints; empty where there is no such program."""
    path = program.path()
    return subprocess.run([path, "--version"], capture_output=True, text=True).stdout if path else ""


# -- NATS ---------------------------------------------------------------------------------------------

NATS_SERVER = Program("nats-server", "DANUBE_COMPARE_NATS_SERVER", "install the package nats-server")
NATS_TOOL = Program("nats", "DANUBE_COMPARE_NATS")
NATS_RATE = r"stats: ([\d,]+) msgs/sec"
NATS_PYTHON = Scripted("nats-py", "nats_peer.py", "nats")
NATS_IN_FLIGHT = (4_000, 64 * MIB)
NATS_BATCH = (1_000, 8 * MIB)  # the most that an atomic batch may hold


def nats_version() -> tuple[int, ...]:
    """Of the server that would be started; () when there is none."""
    return tuple(map(int, re.findall(r"\d+", printed_by(NATS_SERVER))[:3]))


def nats_lacks(setting: Setting) -> str:
    if setting.level is Level.FSYNC and nats_version() < (2, 10):
        return f"nats-server {'.'.join(map(str, nats_version()))} has no sync_interval: always; 2.10 has"
    return ""


def nats_launch(setting: Setting, directory: Path) -> Launch:
    port, configuration = free_port(), directory / "nats.conf"
    always = "sync_interval: always" if setting.level is Level.FSYNC else ""
    configuration.write_text(
        f'listen: "127.0.0.1:{port}"\n'
        f'jetstream {{ store_dir: "{directory / "data"}", max_mem: 32GB, max_file: 64GB, {always} }}\n'
    )
    command = [NATS_SERVER.path(), "-c", str(configuration)]
    return Launch(command=command, ports=[port], address={"url": f"nats://127.0.0.1:{port}"})


class NatsBench:
    """``nats bench``: one connection; the reader is an ordered one, whose place the client keeps."""

    kind = "tool"

    def __init__(self, way: str) -> None:
        self.way = way  # async or batch
        self.name = f"nats bench, {way}"

    def missing(self, setting: Setting, workload: str) -> str:
        core = setting.level is Level.TAKEN
        if reason := NATS_TOOL.missing():
            return reason
        if workload == "latency":
            return "nats bench prints no percentiles"
        if core and workload == "replay":
            return UNSTORED
        if self.way == "batch" and workload != "publish":
            return "batches are a way to publish"
        if self.way == "batch" and nats_version() < (2, 12):
            return "atomic batches need nats-server 2.12"
        reason = "" if core else NATS_PYTHON.not_installed()
        return f"its topics are made by the Python client: {reason}" if reason else ""

    def turn(self, running: Running, work: Work) -> Turn:
        core = running.setting.level is Level.TAKEN
        if work.workload == "e2e":
            return self._end_to_end(running, work, core)
        if work.workload == "replay":
            work = replace(work, count=min(work.count, NATS_PYTHON.stored(running, work)))
            words = ["js", "ordered", "--stream", work.topic]
        else:
            words = ["pub", work.topic] if core else self._publish(running, work)
        finished, spent = spend(running, self._command(running, work, words))
        return steady(number(NATS_RATE, finished.output), work, spent)

    @staticmethod
    def _command(running: Running, work: Work, words: Sequence[str]) -> list[str]:
        base = [NATS_TOOL.path(), "--no-context", "--timeout", "60s", "-s", str(running.address["url"])]
        return [*base, "bench", *words, "--no-progress", "--msgs", str(work.count), "--size", f"{work.size}B"]

    def _publish(self, running: Running, work: Work) -> list[str]:
        """The tool makes the stream, with what a batch needs, and empties it first."""
        batch = window(work, *(NATS_BATCH if self.way == "batch" else NATS_IN_FLIGHT))
        storage = "memory" if running.setting.level is Level.IN_MEMORY else "file"
        stream = f"tool{self.way}"
        return [
            *("js", "pub", self.way, f"{stream}-{storage}", "--create", "--purge", "--storage", storage),
            *("--stream", stream, "--maxbytes", "3GB", "--batch", str(batch)),
        ]

    def _end_to_end(self, running: Running, work: Work, core: bool) -> Turn:
        """The slower of what both sides print: a reader counts from its first message only."""
        with ExitStack() as stack:
            reading, writing = ["sub", work.topic], ["pub", work.topic]
            if not core:
                NATS_PYTHON.create(running, work, stack)
                reading = ["js", "ordered", "--stream", work.topic]
                writing = ["js", "pub", "async", work.topic, "--stream", work.topic]
                writing += ["--batch", str(window(work, *NATS_IN_FLIGHT))]
            before, sides = cpu_seconds(running.pids()), []
            for words in (reading, writing):
                sides.append(Started(self._command(running, work, words), running.directory))
                stack.callback(sides[-1].kill)
                if words is reading:
                    sides[0].wait_for("expecting")
            done = [side.finish(TURN_TIMEOUT_S) for side in reversed(sides)]
            client = max(one.cpu_seconds for one in done)  # of the first to start: of both
            spent = Spent(server=cpu_seconds(running.pids()) - before, client=client)
        return steady(min(number(NATS_RATE, one.output) for one in done), work, spent)


NATS = Peer(
    name="nats",
    server=NATS_SERVER,
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
    drivers={
        level: (NATS_PYTHON, NatsBench("async"), *([NatsBench("batch")] if level else [])) for level in Level
    },
    launch=nats_launch,
    version=lambda: ".".join(map(str, nats_version())),
    lacks=nats_lacks,
)  # fmt: skip

# -- Redis --------------------------------------------------------------------------------------------

REDIS_SERVER = Program("redis-server", "DANUBE_COMPARE_REDIS_SERVER", "install the package redis-server")
REDIS_TOOL = Program("redis-benchmark", "DANUBE_COMPARE_REDIS_BENCHMARK", "install the package redis-tools")
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
    section = "memory" if name.startswith("lazyfree") else "persistence"
    found = re.search(rf"{name}:(\d+)", ask(port, "INFO", section))
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


def redis_launch(setting: Setting, directory: Path) -> Launch:
    port, policy = free_port(), APPENDFSYNC.get(setting.level, "")
    command = [
        *(REDIS_SERVER.path(), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory)),
        *("--save", "", "--daemonize", "no", "--appendonly", "yes" if policy else "no"),
        *("--appendfsync", policy or "no", "--auto-aof-rewrite-percentage", "0"),
    ]

    def check() -> None:
        """The file is on and synced as the level says."""
        words = ask(port, "CONFIG", "GET", "append*").split("\r\n")
        facts = dict(zip(words[2::4], words[4::4], strict=False))
        if policy and (facts.get("appendonly"), facts.get("appendfsync")) != ("yes", policy):
            raise Failed(f"redis did not take appendfsync {policy}: {words!r}")

    return Launch(command=command, ports=[port], address={"port": port}, check=check)


def redis_version() -> str:
    found = re.search(r"v=([\d.]+)", printed_by(REDIS_SERVER))
    return found[1] if found else UNKNOWN


REDIS = Peer(
    name="redis",
    server=REDIS_SERVER,
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
    drivers=(RedisPython("redis-py", "redis_peer.py", "redis"), REDIS_BENCHMARK),
    launch=redis_launch,
    version=redis_version,
    stored_max=1_000_000,
)  # fmt: skip

# -- RabbitMQ -----------------------------------------------------------------------------------------

RABBIT_VARIABLE, RABBIT_HOW = "DANUBE_COMPARE_RABBITMQ_SERVER", "install the package rabbitmq-server"
RABBIT_SERVER = Program("rabbitmq-server", RABBIT_VARIABLE, RABBIT_HOW)
PERF_TEST = Jars("perf-test", "DANUBE_COMPARE_PERF_TEST")
STREAM_PERF_TEST = Jars("stream-perf-test", "DANUBE_COMPARE_STREAM_PERF_TEST")
RABBIT_IN_FLIGHT = (1_000, 16 * MIB)
PREFETCH = 1_000
KEEPS_NOTHING = "a queue keeps nothing to be read again"
STREAM = Scripted("rstream", "rabbit_stream.py", "rstream")
QUORUM = Scripted("aio-pika", "rabbit_quorum.py", "aio_pika", KEEPS_NOTHING)


def rabbit_script() -> str:
    """The start script itself: what lies on PATH may be a wrapper that becomes another user."""
    known = [Path(RABBIT_SERVER.path()), Path("/usr/lib/rabbitmq/bin/rabbitmq-server")]
    found = (path for path in known if path.is_file() and "rabbitmq-env" in path.read_text(errors="replace"))
    return str(next(found, ""))


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
    if work.workload != "latency":
        return steady(rate, work, spent)
    found = r"confirm latency min/median/75th/95th/99th {}.*s\s*$"
    p50_us, p99_us = (number(found.format(place), printed) for place in (r"\d+/(\d+)/", r"(?:\d+/){4}(\d+)"))
    lasted_s = work.count / work.rate
    return Turn(rate=rate, seconds=lasted_s, records=work.count, p50_us=p50_us, p99_us=p99_us, spent=spent)


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
    cannot={"replay": KEEPS_NOTHING},
    after=lambda running, work: QUORUM.run("delete", running, work),
)  # fmt: skip
RABBIT_STREAM_PERF_TEST = Tool(
    name="stream-perf-test", needs=STREAM_PERF_TEST, command=stream_perf_test, read=read_stream_perf_test,
    cannot={"latency": "stream-perf-test prints whole milliseconds"}, topics=STREAM,
)  # fmt: skip


def rabbit_launch(setting: Setting, directory: Path) -> Launch:
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
    url = f"amqp://guest:guest@127.0.0.1:{amqp}/"
    address: dict[str, object] = {"url": url, "stream_port": stream, "queue_type": "quorum"}
    return Launch(command=[rabbit_script()], ports=[amqp, stream], address=address, environment=environment)


def rabbit_version() -> str:
    found = re.search(r"rabbitmq_server-([\d.]+)", str(Path(rabbit_script()).resolve()))
    return found[1] if found else UNKNOWN


RABBITMQ = Peer(
    name="rabbitmq",
    server=RABBIT_SERVER,
    settings=(
        Setting("rabbitmq stream", Level.WRITTEN,
                "confirmed after the chunk is written to the segment; never synced by the server"),
        Setting("rabbitmq quorum queue", Level.FSYNC,
                "confirmed after an fdatasync of its log, one sync for what has gathered; one replica"),
    ),
    drivers={Level.WRITTEN: (STREAM, RABBIT_STREAM_PERF_TEST), Level.FSYNC: (QUORUM, RABBIT_PERF_TEST)},
    launch=rabbit_launch,
    version=rabbit_version,
    lacks=lambda setting: "" if rabbit_script() else (
        "rabbitmq-server is here, its own start script is not (/usr/lib/rabbitmq/bin/rabbitmq-server)"
    ),
)  # fmt: skip

# -- Kafka --------------------------------------------------------------------------------------------

KAFKA_JARS = Jars("kafka", "DANUBE_COMPARE_KAFKA")
KAFKA_TOOLS = KAFKA_JARS._replace(kind="kafka-tools-[0-9]*.jar")
KAFKA_PYTHON = Scripted("confluent-kafka", "kafka_peer.py", "confluent_kafka")
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
    needs=KAFKA_TOOLS,
    command=kafka_perf,
    read=read_kafka_perf,
    cannot={
        "latency": "kafka-producer-perf-test prints whole milliseconds",
        "e2e": "the producer's and the consumer's tool are two, and each counts its own start",
    },
    topics=KAFKA_PYTHON,
)


def kafka_launch(setting: Setting, directory: Path) -> Launch:
    """A broker that is its own controller in one Java process."""
    port, configuration = free_port(), directory / "server.properties"
    facts = {"port": port, "controller": free_port(), "data": directory / "data"}
    configuration.write_text(KAFKA_PROPERTIES.format(**facts))
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    words = ("format", f"--cluster-id={cluster}", "-c", str(configuration))
    run(java("kafka.tools.StorageTool", *words), directory)
    flush = {"flush.messages": "1"} if setting.level is Level.FSYNC else {}
    address: dict[str, object] = {"server": f"127.0.0.1:{port}", "config": flush}
    return Launch(command=java("kafka.Kafka", str(configuration)), ports=[port], address=address)


def kafka_version() -> str:
    names = (path.name for path in Path(KAFKA_JARS.path()).parent.glob("kafka_*.jar"))
    found = (re.match(r"kafka_[\d.]+-([\d.]+)\.jar$", name) for name in names)
    return next((one[1] for one in found if one), UNKNOWN)


KAFKA = Peer(
    name="kafka",
    server=KAFKA_JARS,
    settings=(
        Setting("kafka", Level.WRITTEN,
                "acks=all of one replica, default flush: written before the ack, synced by the system"),
        Setting("kafka flush.messages=1", Level.FSYNC,
                "acks=all of one replica, flush.messages=1: each append is synced before its ack"),
    ),
    drivers=(KAFKA_PYTHON, KAFKA_PERF),
    launch=kafka_launch,
    version=kafka_version,
)  # fmt: skip

# -- Danube in Rust, where somebody has built one -----------------------------------------------------

RUST_SERVER = Program("danube-broker", "DANUBE_COMPARE_DANUBE_RUST")


class Official(Scripted):
    """danube-client; it makes topics by using them and cannot delete one."""

    def create(self, running: Running, work: Work, stack: ExitStack) -> None:
        self.run("create", running, work)

    def child(self, role: str, running: Running, work: Work, **more: object) -> Child:
        return super().child(role, running, replace(work, topic=f"/default/{work.topic}"), **more)


class RustLone:
    """The official Rust client, one message after another (perf/lone.rs)."""

    name, kind, lone = "danube-client, Rust", "tool", True

    def missing(self, setting: Setting, workload: str) -> str:
        return Program("cargo", "", "install Rust").missing()

    def turn(self, running: Running, work: Work) -> Turn:
        level = "non-reliable" if running.setting.level is Level.TAKEN else "reliable"
        words = (f"/default/{work.topic}", level, work.size, work.count, WARM)
        try:
            command = [built(), str(running.address["grpc"]), *map(str, words)]
        except Skipped as reason:
            raise Failed(str(reason)) from None
        finished, spent = spend(running, command)
        found = json.loads(finished.output)
        return Turn(
            spent=spent, **{name: found[name] for name in ("rate", "seconds", "records", "p50_us", "p99_us")}
        )


def rust_launch(setting: Setting, directory: Path) -> Launch:
    port, admin, raft = free_port(), free_port(), free_port()
    command = [
        *(RUST_SERVER.path(), "--mode", "standalone", "--broker-addr", f"127.0.0.1:{port}"),
        *("--admin-addr", f"127.0.0.1:{admin}", "--raft-addr", f"127.0.0.1:{raft}"),
        *("--data-dir", str(directory / "data")),
    ]
    return Launch(command=command, ports=[port], address={"grpc": f"http://127.0.0.1:{port}"})


DANUBE_RUST = Peer(
    name="danube-rust",
    server=RUST_SERVER,
    settings=(
        Setting("danube-rust non-reliable", Level.TAKEN,
                "non-reliable topic: handed to whoever listens, dropped for who is full"),
        Setting("danube-rust reliable", Level.WRITTEN_LATER,
                "in the log's buffer: written within 5 s or 10 MiB of the ack, never synced"),
    ),
    drivers=(Official("danube-client, gRPC", "danube_grpc.py", "danube",
                      "its API has no way to begin a subscription with the first record"), RustLone()),
    launch=rust_launch,
    version=lambda: UNKNOWN,  # its command line has no flag that tells
    stored_max=200_000,
)  # fmt: skip

PEERS = (NATS, REDIS, RABBITMQ, KAFKA, DANUBE_RUST)
