"""Measure rows of Danube, each against a floor of the same machine in the same run.

    .venv/bin/python perf/bench.py --list               what can be measured
    .venv/bin/python perf/bench.py --compare publish --size 100 -o json  one line with floor, danube and ratio
    scripts/bench [--quick] [--dry-run] [ROW...]        all rows, each in a process of its own

Floor and Danube take turns (A B A B); the first turn of each is thrown away, because it pays for
the first touch of memory; the figure is the median of the others.  Records/s count what was
acknowledged or delivered.  A latency's ratio is better when it is lower, every other one higher.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from perf.machine import fingerprint  # noqa: E402
from perf.rows import BY_NAME, ROWS  # noqa: E402
from perf.turns import Settings, Skipped, compare  # noqa: E402

USAGE = 2
HISTORY_KEPT = 3  # lines of each variant; git has the older ones
VARIED = ("size", "batch", "durability", "workers", "count")  # of a row; what is not given is its default
QUICK = {"scale": 0.05, "rounds": 1}


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="perf/bench.py", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("rows", nargs="*", metavar="ROW", help="with --all: these rows only")
    add("--compare", metavar="ROW", choices=sorted(BY_NAME), help="see --list")
    add("--list", action="store_true", help="list the rows")
    add("--all", action="store_true", help="what scripts/bench does")
    add("--quick", action="store_true", help="with --all: a taste, nothing is appended")
    add("--dry-run", action="store_true", help="with --all: say what would be measured")
    add("--size", type=int, help="payload bytes of a record (100, gRPC and tiers 1024)")
    add("--batch", type=int, help="records a send_many; 0: one batch")
    add("--durability", choices=["memory", "written", "fsync"], help="written unless the row says otherwise")
    add("--workers", type=int, help="of the broker (1)")
    add("--count", type=int, help="consumers, topics, GiB or added milliseconds, where a row has them")
    add("--rounds", type=int, default=3, help="turns that count (3); one more is thrown away")
    add("--scale", type=float, default=1.0, help="multiply the amount of work (1.0)")
    add("--directory", type=Path, help="where data goes; a temporary directory by default")
    add("--append", metavar="FILE", type=Path, help="append the line to FILE as well")
    add("-o", "--output", choices=["text", "json"], default="text")
    return parser.parse_args(words)


def settings_of(options: argparse.Namespace, directory: Path) -> Settings:
    """The row's own defaults, changed by what is given."""
    given = {name: getattr(options, name) for name in VARIED if getattr(options, name) is not None}
    row = BY_NAME[options.compare].settings
    return Settings(directory=directory, rounds=options.rounds, scale=options.scale, **{**row, **given})


def text(found: dict[str, Any]) -> str:
    head = " ".join(str(found[name]) for name in ("workload", "size", "durability", "workers"))
    target = f", target {found['target']}: {'met' if found['met'] else 'MISSED'}" if found["target"] else ""
    return (
        f"{head}: floor {found['floor']:,} {found['unit']}, danube {found['danube']:,} {found['unit']},"
        f" ratio {found['ratio']}{target}"
    )


def measured(options: argparse.Namespace) -> None:
    """Measure one row; print the line with time and machine, and append it to a file."""
    with tempfile.TemporaryDirectory(prefix="danube-bench-", dir=options.directory) as folder:
        settings = settings_of(options, Path(folder))
        try:
            found = compare(options.compare, settings)
        except Skipped as reason:
            print(f"SKIPPED {options.compare}: {reason}", flush=True)
            return
        found["time"] = datetime.now(UTC).isoformat(timespec="seconds")
        found["machine"] = fingerprint(Path(folder))
    if options.append:
        with options.append.open("a") as history:
            history.write(json.dumps(found) + "\n")
    print(json.dumps(found) if options.output == "json" else text(found), flush=True)


def commands(options: argparse.Namespace) -> Iterator[list[str]]:
    """Command of each run of a full benchmark, and of the report behind them."""
    history = f"perf/history/{datetime.now(UTC):%Y-%m}.jsonl"
    for row in ROWS:
        for run in row.runs or ({},) * (row.name in options.rows):
            if options.rows and row.name not in options.rows:
                continue
            facts = {**run, **(QUICK if options.quick else {"append": history})}
            words = [word for name, value in facts.items() for word in (f"--{name}", str(value))]
            yield [sys.executable, "perf/bench.py", "--compare", row.name, *words]
    if not options.quick:
        yield [sys.executable, "-m", "perf.report", "--keep", str(HISTORY_KEPT)]


def everything(options: argparse.Namespace) -> int:
    """Run all commands, or those of the named rows; 1 when one failed."""
    if unknown := [name for name in options.rows if name not in BY_NAME]:
        print(f"bench: no workload {', '.join(unknown)}; there are {' '.join(BY_NAME)}", file=sys.stderr)
        return USAGE
    failed = False
    for command in commands(options):
        if options.dry_run:
            print(shlex.join(command))
        else:
            failed |= subprocess.run(command, cwd=ROOT).returncode != 0
    return int(failed)


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    if options.all:
        return everything(options)
    if options.compare:
        measured(options)
    else:
        print("\n".join(f"{row.name:18} {row.title}" for row in ROWS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
