#!/usr/bin/env python3
"""Compare Danube with other brokers on this machine, grouped by what an acknowledgement promises.

    python -m perf.compare --list                   products, settings, clients, and what is missing here
    python -m perf.compare --only danube,nats --workload publish --size 100 --rounds 1 --scale 0.1
    python -m perf.compare --append FILE.jsonl      the whole of it, recorded
    python -m perf.compare --table FILE.jsonl       the table of what was recorded last
    python -m perf.compare --write                  the same of perf/history into docs/comparison.md

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
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain
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

from perf.compare.levels import Unfair, group_of  # noqa: E402
from perf.compare.network import congestion_control, enter_own_network  # noqa: E402
from perf.compare.product import Product  # noqa: E402
from perf.compare.products import products  # noqa: E402
from perf.compare.report import DOCUMENT, HISTORY, last_runs, run_of, show, written  # noqa: E402
from perf.compare.run import WORKLOADS, Comparison, Options  # noqa: E402
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
    parser.add_argument(
        "--write", action="store_true", help="write the newest of each workload and size into the document"
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


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(words)
    try:
        if options.list:
            print(listing(products(options.workers)))
            return 0
        if options.table:
            print(show(last_runs([options.table])[0], options.output))
            return 0
        if options.write:
            DOCUMENT.write_text(written(DOCUMENT.read_text(), last_runs(sorted(HISTORY.glob("*.jsonl")))))
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
    own = options.network == "own"
    network = enter_own_network() if own else f"the machine's loopback, {congestion_control()}"
    with tempfile.TemporaryDirectory(prefix="danube-compare-", dir=options.directory) as folder:
        directory = Path(folder)
        kind = file_system(directory)
        if kind in MEMORY_KINDS and options.append:
            raise ValueError(
                f"{directory} is on {kind}, where nothing is synced: name one on a disk with --directory"
            )
        comparison = comparison_of(options, directory)
        if kind in MEMORY_KINDS:
            comparison.skip("durability", f"data lies on {kind}: whatever a level says, it is all in memory")
        facts = facts_of(options, directory, network)
        lines = list(recorded(comparison, facts, options.append))
    if not lines:
        print("perf.compare: nothing to measure: no setting fits --only", file=sys.stderr)
        return 1
    print(show(run_of(lines), options.output))
    return int(any(skip.failed for skip in comparison.skips))


def comparison_of(options: argparse.Namespace, directory: Path) -> Comparison:
    chosen = Options(
        directory=directory,
        products=products(options.workers),
        workloads=options.workload,
        sizes=options.size,
        only=options.only,
        rounds=options.rounds,
        scale=options.scale,
    )
    return Comparison(chosen, lambda note: print(note, file=sys.stderr, flush=True))


def facts_of(options: argparse.Namespace, directory: Path, network: str) -> dict[str, Any]:
    """What stands in every line of a run."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "rounds": options.rounds,
        "scale": options.scale,
        "network": network,
        "machine": fingerprint(directory),
    }


def recorded(comparison: Comparison, facts: dict[str, Any], path: Path | None) -> Iterator[dict[str, Any]]:
    """Each row, then each skip, as a line, and in the file at once: it may be a long run."""
    lines = chain((row.line() for row in comparison.rows()), (skip.line() for skip in comparison.skips))
    for found in lines:
        line = {**facts, **found}
        if path is not None:
            with path.open("a") as history:
                history.write(json.dumps(line) + "\n")
        yield line


if __name__ == "__main__":
    sys.exit(main())
