"""The row that users feel: perf/lone.rs, built with the official Rust client, against a bare ping-pong.

One message after another is published, received and acknowledged; the workers' processor time for each is
read from /proc.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from perf.compare.processes import cpu_seconds
from perf.turns import Bench, Plan, Skipped
from tests.compat import run as compat

WARM = 200
MESSAGES_S_MIN = 3_000
WORKER_US_MAX = 250


def built() -> str:
    """Path of the program; raises Skipped without cargo or the crate."""
    try:
        return compat.rust("danube-lone", "--release")[0]
    except compat.Skipped as reason:
        raise Skipped(str(reason)) from None


def lone(bench: Bench) -> Plan:
    """publish, receive, ack, one 100 B message after another."""
    program, settings = built(), bench.settings
    count = settings.records(10_000)
    details: dict[str, Any] = {}

    def danube() -> dict[str, Any]:
        topic = bench.options()["topic"]
        level = "non-reliable" if settings.durability == "memory" else "reliable"
        url = f"http://{bench.broker.grpc_address}"
        before = cpu_seconds(bench.broker.worker_pids)
        command = [program, url, topic, level, *map(str, (settings.size, count, WARM))]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=600).stdout)
        spent_s = cpu_seconds(bench.broker.worker_pids) - before
        found["worker_us"] = round(spent_s / (count + WARM) * 1e6, 1)
        return {"value": found["rate"], **found}

    return Plan(
        floor=lambda: 1e6 / bench.ping(count)["p50_us"],
        danube=danube,
        unit="messages/s",
        danube_min=MESSAGES_S_MIN,
        also=lambda: details["worker_us"] <= WORKER_US_MAX,
        target=f">= {MESSAGES_S_MIN:,}/s and <= {WORKER_US_MAX} us of a worker",
        details=details,
    )
