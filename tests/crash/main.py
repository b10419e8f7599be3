"""``scripts/crash``: run crash cycles, syscall points or clusters, and print what they found.

Every finished cycle or point is one line of JSON in RESULTS, so that a long run that was stopped goes
on where it was.  Runs that failed keep their directory; the others are removed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.broker_process import ROOT
from tests.crash import cluster_main
from tests.crash.checker import Verdict
from tests.crash.run import Plan, crash_run
from tests.crash.storage_run import SHORT_FAULTS as STORAGE_FAULTS
from tests.crash.storage_run import Storage, missing_storage, storage_run
from tests.crash.syscalls import Point, PointRun, dry_run, missing_tool, sample

SHORT_FAULTS = ("kill_worker", "kill_all", "pause_worker", "terminate", "kill_supervisor")
SKIPPED = 3


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/crash", description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="one cycle with every fault, or four points")
    parser.add_argument("--long", action="store_true", help="until --minutes or --cycles; all points")
    parser.add_argument(
        "--cycles", type=int, default=0, help="crash cycles in all (with --long; 0: no bound)"
    )
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after this time (0: no bound)")
    parser.add_argument("--faults", type=int, default=6, help="faults a cycle")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=None, help="seed of the first cycle")
    parser.add_argument("--syscalls", action="store_true", help="kill at write-path system calls with strace")
    parser.add_argument("--cluster", action="store_true", help="brokers on hosts that are cut off too")
    parser.add_argument(
        "--power", action="store_true", help="power cuts, on ext4 on a loop device (needs root)"
    )
    parser.add_argument(
        "--store",
        action="store_true",
        help="an object store; movers and the store are slow or away at starts",
    )
    parser.add_argument(
        "--metadata", default="", choices=("", "etcd"), help="of a cluster: it agrees through a real etcd"
    )
    parser.add_argument("--nodes", type=int, default=3, choices=(3, 5), help="brokers of a cluster")
    parser.add_argument(
        "--rough", action="store_true", help="of a cluster: its network loses, delays and holds back packets"
    )
    parser.add_argument("--points", type=int, default=0, help="how many points (0: 4 short, all long)")
    parser.add_argument("--directory", type=Path, default=ROOT / "crash-runs", help="results and failed runs")
    parser.add_argument("--restart", action="store_true", help="forget earlier results")
    parser.add_argument(
        "--markdown", action="store_true", help="print a row for docs/reliability.md at the end"
    )
    return parser.parse_args(words)


class Results:
    """Lines of JSON, one a finished run."""

    def __init__(self, path: Path, restart: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if restart:
            path.unlink(missing_ok=True)
        self.path = path
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            self.lines = [json.loads(line) for line in path.read_text().splitlines()]

    def add(self, name: str, seed: int, seconds: float, verdict: Verdict, fired: bool = True) -> None:
        line = {
            "name": name,
            "seed": seed,
            "seconds": round(seconds, 1),
            "passed": verdict.passed,
            "fired": fired,
            "violations": dict(verdict.counts),
            "statistics": verdict.statistics,
        }
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        state = "ok" if verdict.passed else "FAILED"
        shown = {name: value for name, value in verdict.statistics.items() if name != "times"}
        print(f"{state:6} {name} seed {seed} {seconds:.1f} s {json.dumps(shown)}", flush=True)
        if not verdict.passed:
            print(verdict, flush=True)
        print(f"       {account(line['statistics'], line['violations'])}", flush=True)


def account(totals: dict[str, Any], violations: dict[str, int]) -> str:
    """What readers got of what was acknowledged, in a line."""
    passed_over = violations.get("undelivered", 0) + violations.get("passed over", 0)
    return (
        f"{totals.get('cuts', 0)} power cuts, {sum(totals.get('faults', {}).values())} faults;"
        f" acknowledged {totals.get('acknowledged', 0):,} (taken by cuts at `written`:"
        f" {totals.get('taken_by_cuts', 0):,}), delivered {totals.get('deliveries', 0):,},"
        f" acks confirmed {totals.get('confirmed', 0):,}; lost {violations.get('lost', 0)},"
        f" passed over {passed_over}, given twice {totals.get('given_twice', 0)},"
        f" offsets used again {violations.get('reused', 0)}"
    )


Runner = Callable[[argparse.Namespace, Results, int], None]


def run_one(results: Results, directory: Path, name: str, seed: int, run: Any) -> None:
    """Run, judge, keep the directory only when something is wrong."""
    shutil.rmtree(directory, ignore_errors=True)
    started = time.monotonic()
    try:
        verdict, fired = run(directory)
    except Exception as error:  # a fault that could not be fired or healed is a failed run, not the end
        verdict, fired = Verdict(), True
        verdict.add("unfinished", f"{type(error).__name__}: {error}")
    results.add(name, seed, time.monotonic() - started, verdict, fired)
    if verdict.passed:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        print(f"kept {directory}", flush=True)


def cycles(options: argparse.Namespace, results: Results) -> Iterator[int]:
    """Numbers of the cycles that are still to run."""
    number = len(results.lines)
    last = 1 if options.short else options.cycles or sys.maxsize
    deadline = time.monotonic() + options.minutes * 60 if options.minutes else None
    while number < last and (deadline is None or time.monotonic() < deadline):
        yield number
        number += 1


def storage_of(options: argparse.Namespace) -> Storage:
    return Storage(power=options.power, store=options.store)


def run_cycles(options: argparse.Namespace, results: Results, first_seed: int) -> None:
    for number in cycles(options, results):
        seed = first_seed + number

        def run(directory: Path, seed: int = seed) -> tuple[Verdict, bool]:
            storage = storage_of(options)
            short = STORAGE_FAULTS[storage] if storage.any else SHORT_FAULTS
            plan = Plan(
                seed=seed,
                directory=directory,
                workers=options.workers,
                faults=short if options.short else (),
                fault_count=options.faults,
                rest_s=(0.5, 3.0) if storage.any else Plan.rest_s,
            )
            return storage_run(plan, storage) if storage.any else crash_run(plan), True

        run_one(results, options.directory / f"cycle-{seed}", "cycle", seed, run)


def run_clusters(options: argparse.Namespace, results: Results, first_seed: int) -> None:
    deadline = time.monotonic() + options.minutes * 60 if options.minutes else None
    for number in cycles(options, results):
        seed = first_seed + number

        def run(directory: Path, seed: int = seed) -> tuple[Verdict, bool]:
            return cluster_main.run_round(options, seed, deadline, directory)

        run_one(results, options.directory / f"cluster-{seed}", "cluster", seed, run)
    print(cluster_main.histograms(results.lines), flush=True)


def run_points(options: argparse.Namespace, results: Results, seed: int) -> None:
    directory = options.directory / "dry-run"
    shutil.rmtree(directory, ignore_errors=True)
    points, verdict = dry_run(directory, seed)
    shutil.rmtree(directory)
    kinds = Counter(point.call for point in points)
    print(f"{len(points)} points: {', '.join(f'{call} {count}' for call, count in sorted(kinds.items()))}")
    if not verdict.passed:
        print(verdict)
    done = {line["name"] for line in results.lines}
    count = options.points or (4 if options.short else len(points))
    deadline = time.monotonic() + options.minutes * 60 if options.minutes else None
    for point in sample(points, count, random.Random(seed)):
        if str(point) in done:
            continue
        if deadline is not None and time.monotonic() > deadline:
            break

        def run(directory: Path, point: Point = point) -> tuple[Verdict, bool]:
            one = PointRun(directory, seed, point)
            return one.execute(), one.fired

        run_one(results, options.directory / f"point-{point.call}-{point.count}", str(point), seed, run)


def summary(results: Results) -> dict[str, Any]:
    lines = results.lines
    totals: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    violations: Counter[str] = Counter()
    for line in lines:
        faults.update(line["statistics"].get("faults", {}))
        totals.update({name: value for name, value in line["statistics"].items() if isinstance(value, int)})
        violations.update(line["violations"])
    return {
        "runs": len(lines),
        "failed": sum(not line["passed"] for line in lines),
        "not_fired": sum(not line["fired"] for line in lines),
        "seconds": round(sum(line["seconds"] for line in lines)),
        "faults": dict(faults),
        "totals": dict(totals),
        "violations": dict(violations),
    }


def markdown(kind: str, found: dict[str, Any]) -> str:
    faults = ", ".join(f"{name} {count}" for name, count in sorted(found["faults"].items()))
    violations = ", ".join(f"{name} {count}" for name, count in found["violations"].items()) or "none"
    totals = found["totals"]
    return (
        f"| {kind} | {found['runs']} | {faults} | {totals.get('acknowledged', 0):,} |"
        f" {totals.get('deliveries', 0):,} | {violations} |"
    )


def chosen(options: argparse.Namespace) -> tuple[str, str, Runner, str]:
    """What is run, where its results are, by whom, and why it cannot be run here (or nothing)."""
    storage = storage_of(options)
    what = "".join([", power cuts" * storage.power, ", a failing store" * storage.store])
    name = "-power" * storage.power + "-store" * storage.store
    if options.syscalls:
        return "syscall points", "points.jsonl", run_points, missing_tool() or ""
    missing = missing_storage(storage)
    if options.cluster:
        missing = missing or cluster_main.missing_hosts(options)
        return "a cluster" + what, f"clusters{name}.jsonl", run_clusters, missing
    return "random faults" + what, f"cycles{name}.jsonl", run_cycles, missing


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    if not (options.short or options.long or options.cycles or options.minutes):
        options.short = True
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**31)
    kind, name, run, missing = chosen(options)
    if missing:
        print(f"skipped: {missing}")
        return SKIPPED
    results = Results(options.directory / name, options.restart or options.short)
    print(f"{kind}, seed {seed}, results in {results.path}", flush=True)
    run(options, results, seed)
    found = summary(results)
    print(markdown(kind, found) if options.markdown else json.dumps(found))
    print(account(found["totals"] | {"faults": found["faults"]}, found["violations"]))
    nothing_fired = found["runs"] and found["not_fired"] == found["runs"]
    return 1 if found["failed"] or nothing_fired else 0


if __name__ == "__main__":
    sys.exit(main())
