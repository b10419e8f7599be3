"""RabbitMQ: streams over their own protocol, and quorum queues over AMQP."""

from __future__ import annotations

import re
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from perf.compare import places
from perf.compare.figures import Spent, Turn
from perf.compare.levels import Level
from perf.compare.processes import listens, started
from perf.compare.product import Client, Running, Setting, Work
from perf.compare.scripted import Scripted
from perf.compare.tooling import Topics, number, spend, steady
from tests.broker_process import free_port

SERVER = "DANUBE_COMPARE_RABBITMQ_SERVER"
PERF_TEST = "DANUBE_COMPARE_PERF_TEST"
STREAM_PERF_TEST = "DANUBE_COMPARE_STREAM_PERF_TEST"
IN_FLIGHT = 1_000
IN_FLIGHT_BYTES = 16 << 20
PREFETCH = 1_000
STREAM = Scripted("rstream", "rabbit_stream.py", "rstream")
QUORUM = Scripted("aio-pika", "rabbit_quorum.py", "aio_pika", "a queue keeps nothing to be read again")


class PerfTest:
    """``perf-test``: a publisher with a window of confirms, a consumer that acknowledges in groups."""

    name = "perf-test"
    kind = "tool"
    results: ClassVar = {
        "publish": r"sending rate avg: (\d+) msg/s",
        "e2e": r"receiving rate avg: (\d+) msg/s",
    }

    def missing(self, setting: Setting, workload: str) -> str:
        if workload == "replay":
            return "a queue keeps nothing to be read again"
        if not shutil.which("java"):
            return "no Java runtime"
        return "" if places.jars("perf-test", PERF_TEST) else places.no_jars("perf-test", PERF_TEST)

    def turn(self, running: Running, work: Work) -> Turn:
        reading, paced = work.workload == "e2e", work.workload == "latency"
        window = 1 if paced else max(1, min(IN_FLIGHT, IN_FLIGHT_BYTES // work.size, work.count))
        command = [
            *("java", "-cp", places.jars("perf-test", PERF_TEST), "com.rabbitmq.perf.PerfTest"),
            *("-h", f"{running.address['url']}%2f", "--quorum-queue", "-u", work.topic, "-f", "persistent"),
            *(
                "-s",
                str(work.size),
                "-x",
                "1",
                "-y",
                str(int(reading)),
                "-c",
                str(window),
                "-C",
                str(work.count),
            ),
        ]
        if reading:
            command += [
                "-D",
                str(work.count),
                "--qos",
                str(PREFETCH),
                "--multi-ack-every",
                str(PREFETCH // 4),
            ]
        if paced:
            command += ["--rate", str(work.rate)]
        with ExitStack() as stack:
            stack.callback(QUORUM.run, "delete", running, work)
            finished, spent = spend(running, command)
        if not paced:
            return steady(number(self.results[work.workload], finished.output), work, spent)
        found = r"confirm latency min/median/75th/95th/99th {}.*s\s*$"
        printed = finished.output.strip()
        return Turn(
            rate=number(self.results["publish"], printed),
            seconds=work.count / work.rate,
            records=work.count,
            p50_us=number(found.format(r"\d+/(\d+)/"), printed),
            p99_us=number(found.format(r"(?:\d+/){4}(\d+)"), printed),
            spent=spent,
        )


class StreamPerfTest:
    """``stream-perf-test``: it runs for whole seconds; its latencies are whole milliseconds."""

    name = "stream-perf-test"
    kind = "tool"

    def __init__(self) -> None:
        self._topics = Topics(STREAM)

    def missing(self, setting: Setting, workload: str) -> str:
        if workload == "latency":
            return "stream-perf-test prints whole milliseconds"
        if not shutil.which("java"):
            return "no Java runtime"
        if not places.jars("stream-perf-test", STREAM_PERF_TEST):
            return places.no_jars("stream-perf-test", STREAM_PERF_TEST)
        return self._topics.missing()

    def turn(self, running: Running, work: Work) -> Turn:
        with ExitStack() as stack:
            if work.workload == "replay":
                self._topics.stored(running, work)
            else:
                self._topics.create(running, work, stack)
            finished, spent = spend(running, self.command(running, work))
        wanted = "confirmed" if work.workload == "publish" else "consumed"
        return self.read(finished.output, wanted, work, spent)

    def command(self, running: Running, work: Work) -> list[str]:
        producers, consumers = int(work.workload != "replay"), int(work.workload != "publish")
        return [
            *("java", "-cp", places.jars("stream-perf-test", STREAM_PERF_TEST)),
            "com.rabbitmq.stream.perf.StreamPerfTest",
            *("--uris", f"rabbitmq-stream://guest:guest@127.0.0.1:{running.address['stream_port']}"),
            *("--streams", work.topic, "--size", str(work.size), "--offset", "first"),
            *(
                "--producers",
                str(producers),
                "--consumers",
                str(consumers),
                "--time",
                str(whole_seconds(work)),
            ),
        ]

    @staticmethod
    def read(printed: str, wanted: str, work: Work, spent: Spent) -> Turn:
        """A turn from the line that begins with Summary."""
        rate = number(rf"Summary:.*?\b{wanted} (\d+) msg/s", printed)
        return steady(rate, replace(work, count=round(rate * whole_seconds(work))), spent)


def whole_seconds(work: Work) -> int:
    """How long a tool runs that knows whole seconds only."""
    return max(1, round(work.seconds))


class RabbitMQ:
    """One node with the stream plugin, with its own epmd, cookie and ports."""

    name = "rabbitmq"
    ours = False
    stored_max = 2_000_000
    settings: tuple[Setting, ...] = (
        Setting(
            name="rabbitmq stream",
            level=Level.WRITTEN,
            promise="confirmed after the chunk is written to the segment; never synced by the server",
        ),
        Setting(
            name="rabbitmq quorum queue",
            level=Level.FSYNC,
            promise="confirmed after an fdatasync of its log, one sync for what has gathered; one replica",
        ),
    )

    def clients(self, setting: Setting) -> tuple[Client, ...]:
        return (QUORUM, PerfTest()) if setting.level is Level.FSYNC else (STREAM, StreamPerfTest())

    def missing(self, setting: Setting) -> str:
        if not places.program("rabbitmq-server", SERVER):
            return places.no_program("rabbitmq-server", SERVER, "install the package rabbitmq-server")
        if not _script():
            return (
                "rabbitmq-server is here, its own start script is not (/usr/lib/rabbitmq/bin/rabbitmq-server)"
            )
        return ""

    def version(self) -> str:
        found = re.search(r"rabbitmq_server-([\d.]+)", str(Path(_script()).resolve()))
        return found[1] if found else "of unknown version"

    def start(self, setting: Setting, directory: Path) -> Running:
        amqp, stream = free_port(), free_port()
        (directory / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{amqp}\n"
            f"stream.listeners.tcp.1 = 127.0.0.1:{stream}\n"
            f"stream.advertised_host = 127.0.0.1\nstream.advertised_port = {stream}\n"
        )
        (directory / "plugins").write_text("[rabbitmq_stream].\n")
        (directory / "env").touch()
        server = started(
            [_script()], directory, lambda: listens(amqp) and listens(stream), environment(directory)
        )
        address: dict[str, object] = {
            "url": f"amqp://guest:guest@127.0.0.1:{amqp}/",
            "stream_port": stream,
            "queue_type": "quorum",
        }
        return Running(setting=setting, directory=directory, server=server, address=address)


def environment(directory: Path) -> dict[str, str]:
    """All that would otherwise come from, or go to, places of the system's own RabbitMQ."""
    return {
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


def _script() -> str:
    """The start script itself: what lies on PATH may be a wrapper that becomes another user."""
    known = [Path(places.program("rabbitmq-server", SERVER)), Path("/usr/lib/rabbitmq/bin/rabbitmq-server")]
    for path in known:
        if path.is_file() and "rabbitmq-env" in path.read_text(errors="replace"):
            return str(path)
    return ""
