"""Where the processor time of a workload goes: a profile of broker and clients while it runs.

    python -m perf.hotspots publish [--size 100] [--workers 1] [--seconds 10] [-o text|markdown|json]

Danube's turns of a workload (``perf/floor.py --list``) follow each other while py-spy samples every process,
native code included.  A row is a function and its own share of its process's samples, that is of the time in
which the process ran or was in a system call that worked; what waits is not sampled.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from perf.turns import Bench, Settings
from perf.workloads import WORKLOADS

SAMPLES_S = 200
START_S = 5.0  # py-spy has attached to all processes by then
_PROCESS = re.compile(r'process (\d+):"(.*)"$')
_WAIT = re.compile(r"0x[0-9a-f]+ \(libc")  # waiting for another thread, which py-spy takes for work
_LOAD = re.compile(r"perf/(?:loads|pump)\.py (\w+)")


class SamplingFailed(Exception):
    """py-spy is not installed, or may not look into other processes."""


class Stack(NamedTuple):
    """So many samples with ``function`` on top, in the process of this id and command."""

    pid: int
    command: str
    function: str
    samples: int


def stacks(raw: Iterable[str]) -> list[Stack]:
    """The stacks of py-spy's raw format: frames from the outermost, then how often."""
    found = []
    for line in raw:
        frames, _, samples = line.rpartition(" ")
        *outer, function = frames.split(";")
        told = [one for one in map(_PROCESS.match, [*outer, function]) if one]
        if told and samples.strip().isdigit() and not _WAIT.match(function):
            found.append(Stack(int(told[-1][1]), told[-1][2], function, int(samples)))
    return found


def profile(found: Iterable[Stack], names: dict[int, str], top: int) -> dict[str, dict[str, Any]]:
    """Samples and the shares (percent) of the ``top`` functions of each process; ``names`` by process id."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for one in found:
        load = _LOAD.search(one.command)
        name = names.get(one.pid) or (f"client: {load[1]}" if load else "")
        if name:
            counts[name][one.function] += one.samples
    return {
        name: {
            "samples": count.total(),
            "functions": {
                function: round(100 * samples / count.total(), 1)
                for function, samples in count.most_common(top)
            },
        }
        for name, count in sorted(counts.items(), key=lambda one: -one[1].total())
    }


def sampled(name: str, settings: Settings, seconds: float) -> tuple[list[Stack], dict[int, str]]:
    """Samples of a workload's Danube turns for so long, and the names of the broker's processes."""
    sampler = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if sampler is None:
        raise SamplingFailed("py-spy is not installed: pip install 'danube-broker[test]'")
    raw = settings.directory / "samples"
    command = [sampler, "record", "--pid", str(os.getpid()), "--subprocesses", "--native", "--nolineno"]
    command += ["--rate", str(SAMPLES_S), "--format", "raw", "--output", str(raw)]
    with Bench(settings) as bench:
        plan = WORKLOADS[name](bench)
        plan.danube()
        bench.end_turn()
        spy = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            end_s = time.monotonic() + START_S + seconds
            while time.monotonic() < end_s and spy.poll() is None:
                plan.danube()
                bench.end_turn()
            names = {pid: comm(pid) for pid in bench.broker.pids}
        finally:
            spy.send_signal(signal.SIGINT)
            _, told = spy.communicate(timeout=60)
    if not raw.exists():
        raise SamplingFailed(told.strip() or "py-spy told nothing")
    return stacks(raw.read_text().splitlines()), names


def comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def table(shown: dict[str, dict[str, Any]], *, markdown: bool) -> str:
    """One table for each process, the busiest first."""
    lines: list[str] = []
    for name, one in shown.items():
        title = f"{name}, {one['samples']} samples"
        lines += [f"**{title}**", "", "| function | share |", "|---|---|"] if markdown else [title]
        for function, share in one["functions"].items():
            lines.append(f"| `{function}` | {share} % |" if markdown else f"  {share:5.1f} %  {function}")
        lines.append("")
    return "\n".join(lines).rstrip()


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="perf.hotspots", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--size", type=int, default=100)
    parser.add_argument("--durability", choices=["memory", "written", "fsync"], default="written")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--count", type=int, default=0, help="as of perf/floor.py")
    parser.add_argument("--scale", type=float, default=1.0, help="multiply the work of each turn")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--top", type=int, default=12, help="functions of each process")
    parser.add_argument("-o", "--output", choices=["text", "markdown", "json"], default="text")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="danube-hotspots-") as directory:
        settings = Settings(
            directory=Path(directory), size=options.size, durability=options.durability,
            workers=options.workers, count=options.count, scale=options.scale,
        )  # fmt: skip
        try:
            found, names = sampled(options.workload, settings, options.seconds)
        except SamplingFailed as error:
            print(f"hotspots: {error}", file=sys.stderr)
            return 1
    shown = profile(found, names, options.top)
    if options.output == "json":
        print(json.dumps(shown))
    else:
        print(table(shown, markdown=options.output == "markdown"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
