"""Redis: streams in memory and with the append-only file synced in three ways; PUBLISH without storage."""

from __future__ import annotations

import csv
import re
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

from perf.compare import places
from perf.compare.figures import Turn
from perf.compare.levels import Level
from perf.compare.processes import Failed, listens, started
from perf.compare.product import Client, Running, Setting, Work
from perf.compare.scripted import Scripted
from perf.compare.tooling import spend, steady
from tests.broker_process import free_port

SERVER = "DANUBE_COMPARE_REDIS_SERVER"
TOOL = "DANUBE_COMPARE_REDIS_BENCHMARK"
PIPELINE = 500
PIPELINE_BYTES = 4 << 20
FILE_BYTES_MAX = 2 << 30  # a longer append-only file is rewritten between two turns
SETTLE_TIMEOUT_S = 120.0
APPENDFSYNC = {Level.WRITTEN_LATER: "everysec", Level.WRITTEN: "no", Level.FSYNC: "always"}


def ask(port: int, *words: str) -> str:
    """The answer to one command, as it comes over a connection of its own."""
    request = f"*{len(words)}\r\n" + "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in words)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(request.encode())
        return connection.recv(1 << 20).decode(errors="replace")


def clean(port: int, topic: str) -> None:
    """Delete a stream and wait until nothing of it is worked on any more, so that the next turn is alone."""
    ask(port, "UNLINK", topic)
    if _fact(port, "aof_current_size") > FILE_BYTES_MAX:
        ask(port, "BGREWRITEAOF")
    busy = ("lazyfree_pending_objects", "aof_rewrite_in_progress", "aof_rewrite_scheduled")
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while any(_fact(port, name) for name in busy):
        if time.monotonic() > deadline:
            raise Failed(f"redis was not done with deleting {topic} within {SETTLE_TIMEOUT_S:g} s")
        time.sleep(0.02)


def _fact(port: int, name: str) -> int:
    """A number of INFO; 0 when this server does not know it."""
    section = "memory" if name.startswith("lazyfree") else "persistence"
    found = re.search(rf"{name}:(\d+)", ask(port, "INFO", section))
    return int(found[1]) if found else 0


class RedisPython(Scripted):
    """redis-py; the stream of a turn is deleted from here."""

    def create(self, running: Running, work: Work, stack: ExitStack) -> None:
        stack.callback(clean, int(str(running.address["port"])), work.topic)


class RedisBenchmark:
    """``redis-benchmark``: one connection with a pipeline; it paces nothing and reads no streams."""

    name = "redis-benchmark"
    kind = "tool"

    def missing(self, setting: Setting, workload: str) -> str:
        if not places.program("redis-benchmark", TOOL):
            return places.no_program("redis-benchmark", TOOL, "install the package redis-tools")
        return {
            "latency": "redis-benchmark cannot pace what it sends",
            "e2e": "redis-benchmark does not publish and read at the same time",
            "replay": "redis-benchmark does not read a stream to its end",
        }.get(workload, "")

    def turn(self, running: Running, work: Work) -> Turn:
        port = int(str(running.address["port"]))
        stored = running.setting.level is not Level.TAKEN
        words = ["XADD", work.topic, "*", "p"] if stored else ["PUBLISH", work.topic]
        pipeline = max(1, min(PIPELINE, PIPELINE_BYTES // work.size, work.count))
        command = [
            *(places.program("redis-benchmark", TOOL), "-h", "127.0.0.1", "-p", str(port), "--csv"),
            *("-n", str(work.count), "-c", "1", "-P", str(pipeline)),
            *(*words, "x" * work.size),
        ]
        try:
            finished, spent = spend(running, command)
        finally:
            clean(port, work.topic)
        return steady(requests_per_second(finished.output, work.count), work, spent)


def requests_per_second(printed: str, count: int) -> float:
    """The second column of the last line of CSV; its clock counts milliseconds, so less than one is one."""
    rows = [row for row in csv.reader(printed.splitlines()) if len(row) > 1 and row[1] != "rps"]
    if not rows:
        raise Failed(f"redis-benchmark printed no result: {printed[-500:].strip()}")
    return min(float(rows[-1][1]), count * 1_000.0)


class Redis:
    """One redis-server."""

    name = "redis"
    ours = False
    stored_max = 1_000_000
    settings: tuple[Setting, ...] = (
        Setting(
            name="redis pub/sub",
            level=Level.TAKEN,
            promise="PUBLISH answered: handed to whoever listens; a slow subscriber is cut off",
        ),
        Setting(
            name="redis streams memory",
            level=Level.IN_MEMORY,
            promise="appendonly no: in the server's memory; lost with the process",
        ),
        Setting(
            name="redis streams everysec",
            level=Level.WRITTEN_LATER,
            promise="appendfsync everysec: written before the answer, or up to 2 s later during a sync",
        ),
        Setting(
            name="redis streams no",
            level=Level.WRITTEN,
            promise="appendfsync no: written to the file before the answer, synced by the system",
        ),
        Setting(
            name="redis streams always",
            level=Level.FSYNC,
            promise="appendfsync always: synced before the answer, once for what a turn of its loop read",
        ),
    )

    def clients(self, setting: Setting) -> tuple[Client, ...]:
        return (RedisPython("redis-py", "redis_peer.py", "redis"), RedisBenchmark())

    def missing(self, setting: Setting) -> str:
        if not places.program("redis-server", SERVER):
            return places.no_program("redis-server", SERVER, "install the package redis-server")
        return ""

    def version(self) -> str:
        command = [places.program("redis-server", SERVER), "--version"]
        printed = subprocess.run(command, capture_output=True, text=True).stdout
        found = re.search(r"v=([\d.]+)", printed)
        return found[1] if found else "of unknown version"

    def start(self, setting: Setting, directory: Path) -> Running:
        port, policy = free_port(), APPENDFSYNC.get(setting.level, "")
        command = [
            *(places.program("redis-server", SERVER), "--bind", "127.0.0.1", "--port", str(port)),
            *(
                "--dir",
                str(directory),
                "--save",
                "",
                "--daemonize",
                "no",
                "--appendonly",
                "yes" if policy else "no",
            ),
            *("--appendfsync", policy or "no", "--auto-aof-rewrite-percentage", "0"),
        ]
        server = started(command, directory, lambda: listens(port))
        try:
            said = ask(port, "CONFIG", "GET", "append*")
            if policy and not _claims(said, policy):
                raise Failed(f"redis did not take appendfsync {policy}: {said!r}")
        except BaseException:
            server.stop()
            raise
        return Running(setting=setting, directory=directory, server=server, address={"port": port})


def _claims(said: str, policy: str) -> bool:
    """Whether an answer to CONFIG GET says that the file is on and synced like this."""
    words = said.split("\r\n")
    facts = dict(zip(words[2::4], words[4::4], strict=False))
    return facts.get("appendonly") == "yes" and facts.get("appendfsync") == policy
