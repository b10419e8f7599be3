"""The results of a run: JSON that programs read, a table for people, Locust's CSV and HTML."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from danube import __version__
from danube.load.conduct import Outcome
from danube.load.plan import size_label

PERCENTILES: Final = {"p50_ms": 0.50, "p90_ms": 0.90, "p99_ms": 0.99, "p999_ms": 0.999}
_COLUMNS: Final = ("type", "name", "count", "failures", "p50_ms", "p99_ms", "max_ms", "per_second")
ROWS_MAX: Final = 20


def bucket_ms(milliseconds: float) -> float:
    """Three digits of a response time, so that a histogram stays small and keeps microseconds.

    Takes the place of Locust's own, which rounds to whole milliseconds.
    """
    return float(f"{milliseconds:.3g}") if milliseconds > 0 else 0.0


def report_of(outcome: Outcome, statistics: Any, users: int) -> dict[str, Any]:
    """The documented JSON of a run; ``statistics`` are Locust's."""
    plan = outcome.plan
    return {
        "passed": outcome.passed,
        "findings": [asdict(one) for one in outcome.findings],
        "run": {
            "id": outcome.run,
            "topic": outcome.place.topic,
            "partitions": len(outcome.place.partitions),
            "durability": outcome.place.durability,
            "protocols": list(plan.protocols),
            "modes": list(plan.modes),
            "sizes": {size_label(size): weight for size, weight in plan.sizes},
            "rate": plan.rate,
            "ramp_s": plan.ramp_s,
            "users": users,
            "processes": outcome.processes,
            "seconds": round(outcome.seconds, 3),
            "danube": __version__,
        },
        "records": {
            "sent": outcome.begun,
            "acknowledged": outcome.acknowledged,
            "not_known": outcome.unknown,
            "behind_max_ms": round(outcome.behind_max_ms, 3),
            "reconnects": outcome.counts.get("reconnects", 0),
            "retries": outcome.counts.get("retries", 0),
        },
        "subscriptions": [asdict(one) for one in outcome.accounts],
        "requests": [_row(statistics.entries[key]) for key in sorted(statistics.entries)],
    }


def _row(entry: Any) -> dict[str, Any]:
    """One kind of request.  Times are milliseconds, to three digits."""
    timed = entry.num_requests - entry.num_none_requests > 0
    times = {
        name: entry.get_response_time_percentile(part) if timed else None
        for name, part in PERCENTILES.items()
    }
    return {
        "type": entry.method,
        "name": entry.name,
        "count": entry.num_requests,
        "failures": entry.num_failures,
        "mean_ms": round(entry.avg_response_time, 3) if timed else None,
        **times,
        "max_ms": round(entry.max_response_time, 3) if timed else None,
        "per_second": round(entry.total_rps, 1),
        "bytes_mean": round(entry.avg_content_length),
    }


def write_json(path: str, report: dict[str, Any]) -> None:
    """Write the report, whole or not at all; raises OSError."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    partial.write_text(json.dumps(report, indent=2) + "\n")
    partial.replace(target)


def write_html(path: str, environment: Any) -> None:
    """Write Locust's page; raises OSError."""
    from locust.html import get_html_report

    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(get_html_report(environment, show_download_link=False), encoding="utf-8")


def text_of(report: dict[str, Any]) -> str:
    """Return the report for people: requests, subscriptions, findings."""
    run, records = report["run"], report["records"]
    lines = _table([{name: row[name] for name in _COLUMNS} for row in report["requests"]])
    lines.append("")
    shown = ("protocol", "mode", "expected", "received", "lost", "dropped", "duplicates", "reordered")
    lines += _table([{name: row[name] for name in shown} for row in report["subscriptions"]])
    lines.append("")
    lines.append(
        f"{records['sent']} records sent at level {run['durability']}, "
        f"{records['acknowledged']} acknowledged, "
        f"{records['not_known']} not known"
    )
    lines.append(f"{records['reconnects']} reconnects, {records['retries']} retries")
    findings = report["findings"]
    for one in findings[:ROWS_MAX]:
        examples = f" ({'; '.join(one['examples'])})" if one["examples"] else ""
        lines.append(f"{one['kind']}: {one['where']}: {one['what']} [{one['count']}]{examples}")
    if len(findings) > ROWS_MAX:
        lines.append(f"and {len(findings) - ROWS_MAX} more; --json has all of them")
    lines.append(_verdict(report))
    return "\n".join(lines) + "\n"


def _verdict(report: dict[str, Any]) -> str:
    if not report["passed"]:
        return f"failed: {len(report['findings'])} findings"
    if report["run"]["durability"] == "memory":
        return "passed: what arrived came once and in order; this topic may drop records"
    return "passed: every acknowledged record arrived, in order"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """Rows under their names; numbers stand right."""
    if not rows:
        return ["(none)"]
    names = list(rows[0])
    cells = [[_cell(row[name]) for name in names] for row in rows]
    numeric = [all(not isinstance(row[name], str) for row in rows) for name in names]
    widths = [max(len(name), *(len(row[at]) for row in cells)) for at, name in enumerate(names)]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in ([name.upper() for name in names], *cells)
    ]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
