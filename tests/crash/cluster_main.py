"""``scripts/crash --cluster``: rounds of a cluster on hosts, each with a seed, a report and a verdict."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests import rough_cables
from tests.crash.checker import Verdict
from tests.crash.cluster_run import ClusterPlan, cluster_run
from tests.crash.cluster_times import ROUGH, histogram
from tests.network_namespaces import available

ROUND_MINUTES = 10.0
SHORT_FAULTS = ("kill_broker", "not_heard", "move_partition")


def missing_hosts(options: argparse.Namespace) -> str:
    """Why there can be no hosts here; empty where there can."""
    if not available():
        return "network namespaces need root and `ip`"
    return "rough cables need TAP devices" if options.rough and not rough_cables.available() else ""


def round_seconds(options: argparse.Namespace, left_s: float | None) -> float:
    """How long the next round has faults; 0: it has a number of them."""
    if options.short or (options.cycles and not options.minutes):
        return 0.0
    most_s = ROUND_MINUTES * 60
    return most_s if left_s is None else min(most_s, max(left_s, 30.0))


def run_round(
    options: argparse.Namespace, seed: int, deadline: float | None, directory: Path
) -> tuple[Verdict, bool]:
    """One cluster; its report stays in ``options.directory``."""
    left_s = None if deadline is None else deadline - time.monotonic()
    seconds = round_seconds(options, left_s)
    make: Callable[..., ClusterPlan] = ClusterPlan
    faults: tuple[str, ...] = SHORT_FAULTS
    if options.rough:
        make, faults = ClusterPlan.on_rough_cables, ROUGH
    elif options.power or options.store:
        make = partial(ClusterPlan.with_storage, power=options.power, store=options.store)
        faults = ("power_cut",) * options.power + ("takeover_with_stopped_movers",) * options.store
    plan = make(
        seed=seed,
        directory=directory,
        size=options.nodes,
        etcd=options.metadata == "etcd",
        workers=options.workers,
        faults=faults if options.short else (),
        count=0 if options.short or seconds else options.faults,
        seconds=seconds,
    )
    return cluster_run(plan, options.directory / f"cluster-{seed}.json"), True


def histograms(lines: list[dict[str, Any]]) -> str:
    """The times of all rounds together."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        for name, found in line["statistics"].get("times", {}).items():
            seconds[name] += found["seconds"]
    return "\n".join(histogram(name, found) for name, found in seconds.items())
