#!/usr/bin/env python3
"""Compare Danube with other brokers on this machine, grouped by what an acknowledgement promises.

    python -m perf.compare --list                   products, settings, clients, and what is missing here
    python -m perf.compare --only danube,nats --workload publish --size 100 --rounds 1 --scale 0.1
    python -m perf.compare --append FILE.jsonl      the whole of it, recorded
    python -m perf.compare --table FILE.jsonl       the table of what was recorded last

Turns are interleaved (A B C A B C), the first of each is thrown away, figures are medians.  How each is
measured: docs/comparison.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)
_VENV = ROOT / ".venv" / "bin" / "python"

try:
    import uvloop  # noqa: F401
except ImportError:
    if _VENV.exists() and Path(sys.prefix) != _VENV.parent.parent:
        os.chdir(ROOT)
        os.execv(_VENV, [str(_VENV), "-m", "perf.compare", *sys.argv[1:]])
    raise

from perf.compare import table  # noqa: E402
from perf.compare.figures import Row  # noqa: E402
from perf.compare.levels import Unfair, group_of  # noqa: E402
from perf.compare.network import congestion_control, enter_own_network  # noqa: E402
from perf.compare.product import Product  # noqa: E402
from perf.compare.products import products  # noqa: E402
from perf.compare.run import WORKLOADS, Comparison, Options, Skip  # noqa: E402
from perf.machine import file_system, fingerprint  # noqa: E402

ROUNDS_LEAST, SCALE_LEAST = 5, 0.5  # of a comparison that is recorded
MEMORY_KINDS = ("tmpfs", "ramfs")  # file systems without a disk


def names(words: str) -> list[str]:
    return [word.strip() for word in words.split(",") if word.strip()]


def sizes(words: str) -> list[int]:
    return [int(word) for word in names(words)]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="perf.compare", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="list products, settings, clients and workloads")
    parser.add_argument("--only", type=names, default=[], metavar="NAME,...", help="products or settings")
    parser.add_argument("--workload", type=names, default=list(WORKLOADS), metavar="NAME,...", help="all")
    parser.add_argument(
        "--size", type=sizes, default=[], metavar="BYTES,...", help="instead of a workload's own"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each that count (5)")
    parser.add_argument("--scale", type=float, default=1.0, help="multiply the length of a turn, 4 s (1.0)")
    parser.add_argument("--workers", type=int, default=1, help="of Danube's broker (1)")
    parser.add_argument("--directory", type=Path, help="where data goes; a temporary directory by default")
    parser.add_argument("--network", choices=["own", "machine"], default="own", help="whose loopback (own)")
    parser.add_argument("--append", metavar="FILE", type=Path, help="append a line for each row to FILE")
    parser.add_argument(
        "--table", metavar="FILE", type=Path, help="print what FILE recorded last; measure nothing"
    )
    parser.add_argument("-o", "--output", choices=["text", "markdown", "json"], default="text")
    options = parser.parse_args(words)
    _check(parser, options)
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with what is wrong, why, and what to do instead."""
    known = {product.name for product in products()}
    known |= {setting.name for product in products() for setting in product.settings}
    for given, allowed, what in (
        (options.only, known, "--only"),
        (options.workload, set(WORKLOADS), "--workload"),
    ):
        if unknown := [name for name in given if name not in allowed]:
            parser.error(
                f"{what} does not know {', '.join(unknown)}; there are: {', '.join(sorted(allowed))}"
            )
    if options.rounds < 0 or options.scale <= 0 or options.workers < 1:
        parser.error("--rounds is at least 0, --scale above 0, --workers at least 1")
    if any(size < 8 for size in options.size):
        parser.error("--size is at least 8: a record carries its number")
    if options.append and (options.rounds < ROUNDS_LEAST or options.scale < SCALE_LEAST):
        parser.error(
            f"--append records at least {ROUNDS_LEAST} rounds at --scale {SCALE_LEAST} or more: "
            "a shorter one says too little to be kept; leave --append away"
        )


def listing(known: Sequence[Product]) -> str:
    """Everything that can be measured, with the reason where it cannot be here."""
    lines = ["workloads:"]
    lines += [f"  {name:8} {meaning}" for name, meaning in WORKLOADS.items()]
    for product in known:
        lines.append(f"{product.name}:")
        for setting in product.settings:
            reason = product.missing(setting)
            head = f"  {setting.name} [{setting.level.label}; stands in the group {group_of(setting.level)}]"
            lines.append(f"{head}: {setting.promise}")
            if reason:
                lines.append(f"    skipped: {reason}")
                continue
            for client in product.clients(setting):
                reasons = {name: client.missing(setting, name) for name in WORKLOADS}
                can = [name for name, why in reasons.items() if not why]
                lines.append(f"    {client.name}: {', '.join(can) or 'nothing'}")
                lines += [f"      skipped: {name}: {why}" for name, why in reasons.items() if why]
    return "\n".join(lines)


def recorded(path: Path) -> list[Row]:
    """The rows of the newest run in a file of history; ValueError when there is none."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    compared = [line for line in lines if "comparison" in line]
    if not compared:
        raise ValueError(f"{path} holds no comparison")
    return [Row.from_line(line) for line in compared if line["time"] == compared[-1]["time"]]


def show(rows: Sequence[Row], skips: Sequence[Skip], facts: dict[str, Any], output: str) -> str:
    """The result as it is printed."""
    if output == "json":
        return "\n".join(json.dumps({**row.line(), **facts}) for row in rows)
    head = [f"{name}: {value}" for name, value in facts.items() if name != "machine"]
    machine = facts.get("machine", {})
    head += [
        f"machine: {', '.join(f'{name} {value}' for name, value in machine.items() if name != 'packages')}"
    ] * bool(machine)
    body = table.markdown(rows) if output == "markdown" else table.text(rows)
    notes = [*table.legend(rows), *map(str, skips)]
    if output == "markdown":
        notes = [f"- {note}" for note in notes]
    return "\n".join([*head, "", body, "", *notes])


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(words)
    try:
        if options.list:
            print(listing(products(options.workers)))
            return 0
        if options.table:
            print(show(recorded(options.table), [], {}, options.output))
            return 0
        return measure(options)
    except (Unfair, ValueError, OSError) as error:
        print(f"perf.compare: {error}", file=sys.stderr)
        return 1


def ended(number: int, frame: object) -> None:
    """SIGTERM leaves as an exception does: with nothing running and no files."""
    sys.exit(128 + number)


def measure(options: argparse.Namespace) -> int:
    """Run the comparison and print it; 1 when something failed that should have been measured."""
    signal.signal(signal.SIGTERM, ended)
    network = (
        enter_own_network() if options.network == "own" else f"the machine's loopback, {congestion_control()}"
    )
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="danube-compare-", dir=options.directory) as directory:
        kind = file_system(Path(directory))
        if kind in MEMORY_KINDS and options.append:
            raise ValueError(
                f"{directory} is on {kind}, where nothing is synced: name one on a disk with --directory"
            )
        comparison = Comparison(
            Options(
                directory=Path(directory),
                products=products(options.workers),
                workloads=options.workload,
                sizes=options.size,
                only=options.only,
                rounds=options.rounds,
                scale=options.scale,
            ),
            lambda note: print(note, file=sys.stderr, flush=True),
        )
        facts = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "rounds": options.rounds,
            "scale": options.scale,
            "network": network,
            "machine": fingerprint(Path(directory)),
        }
        if kind in MEMORY_KINDS:
            comparison.skip(
                "durability", f"data lies on {kind}: whatever a level says, all of it is in memory"
            )
        for row in comparison.rows():
            rows.append(row)
            if options.append:  # at once: a long run that ends early has said something
                with options.append.open("a") as history:
                    history.write(json.dumps({**row.line(), **facts}) + "\n")
    if not rows and not comparison.skips:
        print("perf.compare: nothing to measure: no setting fits --only", file=sys.stderr)
        return 1
    print(show(rows, comparison.skips, facts, options.output))
    return int(any(skip.failed for skip in comparison.skips))


if __name__ == "__main__":
    sys.exit(main())
