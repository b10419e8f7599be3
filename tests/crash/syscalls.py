"""SIGKILL at the k-th call of every kind that the write path makes, one run a point.

A dry run under strace lists the calls that touch the data directory.  For each point the broker runs
under strace, which kills the calling process as it enters that call; then everything is killed, a
clean broker is started on what is left, the clients finish against it, and the checker decides.
Calls are counted per thread, as strace does.  ``write`` also goes to sockets, bells and terminals, so
only its calls on files of the data directory are points.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.broker_process import BrokerFailed, BrokerProcess, wait_until
from tests.child_process import Child
from tests.crash.checker import Verdict
from tests.crash.journal import Journal
from tests.crash.run import CLIENT_TIMEOUT_S, Load, Plan, Run

CALLS = (
    *("write", "writev", "pwrite64", "pwritev", "pwritev2", "fdatasync", "fsync", "sync_file_range"),
    *("rename", "renameat", "renameat2", "unlink", "unlinkat", "ftruncate", "fallocate", "copy_file_range"),
)
STEPS = 8
SIZES = (0, 120_000)  # enough for a segment of the smallest size to roll, and for one reserved ahead to begin
ENVIRONMENT = {"DANUBE_WAL__SEGMENT_SIZE": "16MiB"}
START_TIMEOUT_S = 60.0
_CALL = re.compile(r"^(\d+) +(\w+)\((.*)")
_KILLED = re.compile(r"\+\+\+ killed by SIGKILL")


@dataclass(frozen=True)
class Point:
    """Kill at the ``count``-th ``call`` of a thread."""

    call: str
    count: int

    def __str__(self) -> str:
        return f"{self.call}#{self.count}"


def missing_tool() -> str:
    """Why points cannot be killed on this machine; empty when they can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace"
        command = [*strace(trace, Point("write", 1)), "echo", "alive"]
        result = subprocess.run(command, capture_output=True, text=True)
        fired = trace.exists() and _KILLED.search(trace.read_text()) is not None
    return "" if fired else f"strace cannot kill at a call here: {result.stderr.strip()[:200]}"


def small_load() -> Load:
    """Two topics, one at each level, a producer and a consumer each."""
    load = Load()
    for level in ("written", "fsync"):
        topic = f"/default/{level}"
        load.topics.append({"topic": topic, "partitions": 0, "durability": level})
        load.producers.append(
            {"topic": topic, "producer": level, "style": "many", "keyed": False, "durability": level}
        )
        load.consumers.append(
            {
                "topic": topic,
                "subscription": f"exclusive-{level}",
                "mode": "exclusive",
                "consumer": "c0",
                "batched": True,
            }
        )
    return load


# No --seccomp-bpf: with it, some pairs of kernel and strace pass the call and drop the signal.
def strace(trace: Path, point: Point | None) -> list[str]:
    """The command that runs a broker under strace, killing at ``point`` or only listing calls."""
    names = ",".join(f"?{name}" for name in CALLS)
    command = [
        "strace",
        "-f",
        "-y",
        "-q",
        "-s",
        "0",
        "-o",
        str(trace),
        "-e",
        f"trace={names}",
    ]
    if point is not None:
        command += ["-e", f"inject={point.call}:signal=KILL:when={point.count}"]
    return command


def points_of(trace: str, data_dir: str) -> list[Point]:
    """Points of a dry run: per call, every count at which some thread touched the data directory."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    found: set[Point] = set()
    for line in trace.splitlines():
        match = _CALL.match(line)
        if match is None:
            continue
        thread, call, arguments = match.groups()
        counts[thread, call] += 1
        if data_dir in arguments:
            found.add(Point(call, counts[thread, call]))
    return sorted(found, key=lambda point: (point.call, point.count))


class PointRun:
    """One broker under strace with the small load, then a clean broker on the same directory."""

    def __init__(self, directory: Path, seed: int, point: Point | None) -> None:
        directory.mkdir(parents=True)
        self.trace = directory / "trace"
        plan = Plan(seed=seed, directory=directory / "run", workers=1)
        self.run = Run(plan, small_load(), environment=ENVIRONMENT, prefix=strace(self.trace, point))
        self.journal = Journal(self.run.journals / "nemesis.jsonl")
        self.seed = seed
        self.fired = False

    @property
    def broker(self) -> BrokerProcess:
        return self.run.broker

    def killed(self) -> bool:
        return self.trace.exists() and _KILLED.search(self.trace.read_text(errors="replace")) is not None

    def execute(self) -> Verdict:
        with ExitStack() as stack:
            stack.callback(self.journal.close)
            stack.callback(self.broker.kill)
            self._load_until_killed(stack)
            return self._judge()

    def _load_until_killed(self, stack: ExitStack) -> None:
        self.broker.launch()
        children: list[Child] = []

        def child(role: str, **options: object) -> Child:
            made = self.run.client(role, **options)
            stack.callback(made.close)
            children.append(made)
            return made

        if not self._ready() and self._restart_clean():
            self.broker.wait_ready(START_TIMEOUT_S)
        preparing = child("prepare")
        self._finish(preparing)
        consumers = child("consume", consumers=self.run.load.consumers, idle_s=0.8).wait_ready()
        producers = child(
            "produce", producers=self.run.load.producers, steps=STEPS, sizes=SIZES, pause_s=0.01
        ).wait_ready()
        self._finish(producers)
        consumers.go()
        self._finish(consumers)
        if not self.fired:
            try:
                self.broker.stop()
            except BrokerFailed:
                self.broker.kill()
            self._restart_clean()

    def _ready(self) -> bool:
        """Wait until the broker serves or was killed."""
        try:
            wait_until(lambda: self.killed() or self.broker._answers(), START_TIMEOUT_S, "ready or killed")
        except BrokerFailed:
            if not self.killed():
                raise
        return not self.killed()

    def _finish(self, child: Child) -> None:
        """Wait for a child's result; when the point fires meanwhile, put a clean broker in place."""
        wait_until(
            lambda: child.ended() or self._restart_clean(), CLIENT_TIMEOUT_S, f"{child.role} or a kill"
        )
        child.result(CLIENT_TIMEOUT_S)

    def _restart_clean(self) -> bool:
        """After the kill, once: SIGKILL to the rest and a start without strace."""
        if self.fired or not self.killed():
            return False
        self.fired = True
        self.journal.write("fault", "syscall", self.seed, 0, 0, {})
        self.broker.kill()
        self.broker.prefix = []
        self.broker.start(START_TIMEOUT_S)
        return True

    def _judge(self) -> Verdict:
        self.broker.kill()
        self.broker.prefix = []
        self.broker.start(START_TIMEOUT_S)
        self.run.read_log()
        self.broker.stop()
        return self.run.verdict(acknowledged_min=STEPS)


def dry_run(directory: Path, seed: int) -> tuple[list[Point], Verdict]:
    """All points of the small load, and the verdict of the run that found them."""
    run = PointRun(directory, seed, None)
    verdict = run.execute()
    return points_of(run.trace.read_text(errors="replace"), str(run.broker.data_dir)), verdict


def sample(points: list[Point], count: int, source: random.Random) -> list[Point]:
    """``count`` points, spread over the kinds of call first."""
    by_call: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        by_call[point.call].append(point)
    groups = [source.sample(group, len(group)) for group in by_call.values()]
    source.shuffle(groups)
    chosen = [group[turn] for turn in range(len(points)) for group in groups if turn < len(group)]
    return chosen[:count]
