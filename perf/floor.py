#!/usr/bin/env python3
"""Measure the floor of this machine, and Danube against it in the same run.

    perf/floor.py                                      the floor alone
    perf/floor.py --compare publish --size 100 -o json one line with floor, danube and ratio
    perf/floor.py --list                               what can be compared

Floor and Danube take turns (A B A B); the first turn of each is thrown away, because it pays for
the first touch of memory; the figure is the median of the others.  Records/s count what was
acknowledged or delivered.  A latency's ratio is better when it is lower, every other one higher.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
_VENV = ROOT / ".venv" / "bin" / "python"

try:
    import uvloop  # noqa: F401
except ImportError:
    if _VENV.exists() and Path(sys.prefix) != _VENV.parent.parent:
        os.execv(_VENV, [str(_VENV), *sys.argv])
    raise

from perf.machine import fingerprint  # noqa: E402
from perf.turns import Settings, compare, floor_alone  # noqa: E402
from perf.workloads import WORKLOADS  # noqa: E402


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="perf/floor.py", description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=100, help="payload bytes of a record (100)")
    parser.add_argument("--batch", type=int, default=0, help="records a send_many; 0: one batch")
    parser.add_argument("--durability", choices=["memory", "written", "fsync"], default="written")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--count", type=int, default=0, help="consumers, topics or GiB, where a workload has them"
    )
    common_arguments(parser, WORKLOADS)
    return parser.parse_args(words)


def common_arguments(parser: argparse.ArgumentParser, workloads: Mapping[str, object]) -> None:
    """The arguments of every program that compares ``workloads`` with a floor."""
    add = parser.add_argument
    add("--compare", metavar="WORKLOAD", choices=sorted(workloads), help="see --list")
    add("--list", action="store_true", help="list the workloads")
    add("--rounds", type=int, default=3, help="turns that count (3); one more is thrown away")
    add("--scale", type=float, default=1.0, help="multiply the amount of work (1.0)")
    add("--directory", type=Path, help="where data goes; a temporary directory by default")
    add("--append", metavar="FILE", type=Path, help="append the line to FILE as well")
    add("-o", "--output", choices=["text", "json"], default="text")


def listing(workloads: Mapping[str, object]) -> str:
    """Each workload with the first line of its docstring."""
    lines = (
        f"{name:18} {(workload.__doc__ or '').splitlines()[0]}"
        for name, workload in sorted(workloads.items())
    )
    return "\n".join(lines)


def report(found: dict[str, Any], output: str) -> str:
    if output == "json":
        return json.dumps(found)
    if "ratio" not in found:
        return "\n".join(f"{name:32} {value}" for name, value in found.items() if not isinstance(value, dict))
    head = " ".join(str(found[name]) for name in ("workload", "size", "durability", "workers"))
    target = f", target {found['target']}: {'met' if found['met'] else 'MISSED'}" if found["target"] else ""
    return (
        f"{head}: floor {found['floor']:,} {found['unit']}, danube {found['danube']:,} {found['unit']},"
        f" ratio {found['ratio']}{target}"
    )


def conclude(measured: dict[str, Any], directory: Path, options: argparse.Namespace) -> None:
    """Print what was measured in ``directory`` with time and machine; append it where that is asked for."""
    found = {
        **measured,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": fingerprint(directory),
    }
    if options.append:
        with options.append.open("a") as history:
            history.write(json.dumps(found) + "\n")
    print(report(found, options.output), flush=True)


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    if options.list:
        print(listing(WORKLOADS))
        return 0
    with tempfile.TemporaryDirectory(prefix="danube-floor-", dir=options.directory) as directory:
        settings = Settings(
            directory=Path(directory),
            size=options.size,
            batch=options.batch,
            durability=options.durability,
            workers=options.workers,
            rounds=options.rounds,
            scale=options.scale,
            count=options.count,
        )
        name = options.compare
        measured = compare(name, settings, WORKLOADS) if name else floor_alone(settings)
        conclude(measured, Path(directory), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
