"""NATS: JetStream in a file, synced or not, and in memory; core NATS without storage."""

from __future__ import annotations

import re
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from perf.compare import places
from perf.compare.figures import Spent, Turn
from perf.compare.levels import Level
from perf.compare.processes import Tool, cpu_seconds, listens, started
from perf.compare.product import TURN_TIMEOUT_S, Client, Running, Setting, Work
from perf.compare.scripted import Scripted
from perf.compare.tooling import Topics, number, spend, steady
from tests.broker_process import free_port

SERVER = "DANUBE_COMPARE_NATS_SERVER"
TOOL = "DANUBE_COMPARE_NATS"
ALWAYS_SINCE = (2, 10)
BATCHES_SINCE = (2, 12)
BATCH = 1_000  # the most that an atomic batch may hold
BATCH_BYTES = 8 << 20
IN_FLIGHT = 4_000
IN_FLIGHT_BYTES = 64 << 20
RATE = r"stats: ([\d,]+) msgs/sec"
PYTHON = Scripted("nats-py", "nats_peer.py", "nats")


def server_version() -> tuple[int, ...]:
    """Of the server that would be started; () when there is none."""
    path = places.program("nats-server", SERVER)
    if not path:
        return ()
    printed = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    return tuple(map(int, re.findall(r"\d+", printed)[:3]))


class NatsBench:
    """``nats bench``: one connection; the reader is an ordered one, whose place the client keeps."""

    kind = "tool"

    def __init__(self, way: str) -> None:
        self.way = way  # async or batch
        self.name = f"nats bench, {way}"
        self._topics = Topics(PYTHON)

    def missing(self, setting: Setting, workload: str) -> str:
        if not places.program("nats", TOOL):
            return places.no_program("nats", TOOL, places.why_not("nats"))
        if workload == "latency":
            return "nats bench prints no percentiles"
        core = setting.level is Level.TAKEN
        if core and workload == "replay":
            return "nothing is stored that could be read again"
        if self.way == "batch" and workload != "publish":
            return "batches are a way to publish"
        if self.way == "batch" and server_version() < BATCHES_SINCE:
            return "atomic batches need nats-server 2.12"
        return "" if core else self._topics.missing()

    def turn(self, running: Running, work: Work) -> Turn:
        core = running.setting.level is Level.TAKEN
        if work.workload == "e2e":
            return self._end_to_end(running, work, core)
        if work.workload == "replay":
            work = replace(work, count=min(work.count, self._topics.stored(running, work)))
            command = [*self._base(running, "js", "ordered", "--stream", work.topic), *self._volume(work)]
        elif core:
            command = [*self._base(running, "pub", work.topic), *self._volume(work)]
        else:
            command = self._publish(running, work)
        finished, spent = spend(running, command)
        return steady(number(RATE, finished.output), work, spent)

    def _base(self, running: Running, *words: str) -> list[str]:
        return [
            *(places.program("nats", TOOL), "--no-context", "--timeout", "60s"),
            *("-s", str(running.address["url"])),
            *("bench", *words, "--no-progress"),
        ]

    @staticmethod
    def _volume(work: Work) -> list[str]:
        return ["--msgs", str(work.count), "--size", f"{work.size}B"]

    def _publish(self, running: Running, work: Work) -> list[str]:
        """The tool makes the stream, with what a batch needs, and empties it first."""
        window = (
            min(BATCH, BATCH_BYTES // work.size)
            if self.way == "batch"
            else min(IN_FLIGHT, IN_FLIGHT_BYTES // work.size)
        )
        storage = "memory" if running.setting.level is Level.IN_MEMORY else "file"
        stream = f"tool{self.way}"
        return [
            *self._base(running, "js", "pub", self.way, f"{stream}-{storage}"),
            *("--create", "--purge", "--storage", storage, "--stream", stream, "--maxbytes", "3GB"),
            *("--batch", str(min(window, work.count))),
            *self._volume(work),
        ]

    def _end_to_end(self, running: Running, work: Work, core: bool) -> Turn:
        """The slower of what both sides print: a reader counts from its first message only."""
        with ExitStack() as stack:
            if core:
                reading = self._base(running, "sub", work.topic)
                writing = self._base(running, "pub", work.topic)
            else:
                PYTHON.create(running, work, stack)
                reading = self._base(running, "js", "ordered", "--stream", work.topic)
                window = min(IN_FLIGHT, IN_FLIGHT_BYTES // work.size, work.count)
                writing = self._base(running, "js", "pub", "async", work.topic, "--stream", work.topic)
                writing += ["--batch", str(window)]
            before = cpu_seconds(running.pids())
            reader = Tool([*reading, *self._volume(work)], running.directory)
            stack.callback(reader.kill)
            reader.wait_for("expecting")
            writer = Tool([*writing, *self._volume(work)], running.directory)
            stack.callback(writer.kill)
            written, read = writer.finish(TURN_TIMEOUT_S), reader.finish(TURN_TIMEOUT_S)
            client = written.cpu_seconds + read.cpu_seconds
            spent = Spent(server=cpu_seconds(running.pids()) - before, client=client)
        slower = min(number(RATE, side.output) for side in (written, read))
        return steady(slower, work, spent)


class Nats:
    """One nats-server, alone."""

    name = "nats"
    ours = False
    stored_max = 2_000_000
    settings: tuple[Setting, ...] = (
        Setting(
            name="nats core",
            level=Level.TAKEN,
            promise="a flush returned: the server took all before it; a slow subscriber is cut off",
        ),
        Setting(
            name="jetstream memory",
            level=Level.IN_MEMORY,
            promise="in the stream in the server's memory; lost with the process",
        ),
        Setting(
            name="jetstream file",
            level=Level.WRITTEN,
            promise="default sync_interval: written to the file before the ack, synced every two minutes",
        ),
        Setting(
            name="jetstream file sync-always",
            level=Level.FSYNC,
            promise="sync_interval: always: each write is synced before its ack",
        ),
    )

    def clients(self, setting: Setting) -> tuple[Client, ...]:
        ways = ("async",) if setting.level is Level.TAKEN else ("async", "batch")
        return (PYTHON, *map(NatsBench, ways))

    def missing(self, setting: Setting) -> str:
        if not places.program("nats-server", SERVER):
            return places.no_program("nats-server", SERVER, "install the package nats-server")
        if setting.level is Level.FSYNC and server_version() < ALWAYS_SINCE:
            return f"nats-server {self.version()} has no sync_interval: always; 2.10 has"
        return ""

    def version(self) -> str:
        return ".".join(map(str, server_version()))

    def start(self, setting: Setting, directory: Path) -> Running:
        port = free_port()
        always = "sync_interval: always" if setting.level is Level.FSYNC else ""
        (directory / "nats.conf").write_text(
            f'listen: "127.0.0.1:{port}"\n'
            f'jetstream {{ store_dir: "{directory / "data"}", max_mem: 32GB, max_file: 64GB, {always} }}\n'
        )
        command = [places.program("nats-server", SERVER), "-c", str(directory / "nats.conf")]
        server = started(command, directory, lambda: listens(port))
        address: dict[str, object] = {"url": f"nats://127.0.0.1:{port}"}
        return Running(setting=setting, directory=directory, server=server, address=address)
