#!/usr/bin/env python3
"""Compare Danube with other brokers on this machine, grouped by what an acknowledgement promises.

    python -m perf.compare --list                   products, settings, clients, and what is missing here
    python -m perf.compare --only danube,nats --workload publish --size 100 --rounds 1 --scale 0.1
    python -m perf.compare --append FILE.jsonl      the whole of it, recorded
    python -m perf.compare --write                  the newest of perf/history into docs/comparison.md

Turns are interleaved (A B C A B C), the first of each is thrown away, figures are medians.  How each is
measured: docs/comparison.md.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from perf.compare.model import Product, Row, Unfair, group_of
from perf.compare.processes import congestion_control, enter_own_network
from perf.compare.products import products
from perf.compare.report import DOCUMENT, HISTORY, Run, last_runs, show, written
from perf.compare.run import WORKLOADS, Comparison
from perf.machine import file_system, fingerprint

ROUNDS_LEAST, SCALE_LEAST = 5, 0.5  # of a comparison that is recorded
MEMORY_KINDS = ("tmpfs", "ramfs")  # file systems without a disk


def names(words: str) -> list[str]:
    return [word.strip() for word in words.split(",") if word.strip()]


def sizes(words: str) -> list[int]:
    return [int(word) for word in names(words)]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="perf.compare", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--list", action="store_true", help="list products, settings, clients and workloads")
    add("--only", type=names, default=[], metavar="NAME,...", help="products or settings")
    add("--workload", type=names, default=list(WORKLOADS), metavar="NAME,...", help="all")
    add("--size", type=sizes, default=[], metavar="BYTES,...", help="instead of a workload's own")
    add("--rounds", type=int, default=5, help="turns of each that count (5)")
    add("--scale", type=float, default=1.0, help="multiply the length of a turn, 4 s (1.0)")
    add("--workers", type=int, default=1, help="of Danube's broker (1)")
    add("--directory", type=Path, help="where data goes; a temporary directory by default")
    add("--network", choices=["own", "machine"], default="own", help="whose loopback (own)")
    add("--append", metavar="FILE", type=Path, help="append the run to FILE as one line")
    add("--write", action="store_true", help="write the newest of each workload and size into the document")
    add("-o", "--output", choices=["markdown", "json"], default="markdown")
    options = parser.parse_args(words)
    _check(parser, options)
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with what is wrong, why, and what to do instead."""
    known = {product.name for product in products()}
    known |= {setting.name for product in products() for setting in product.settings}
    for what, given, allowed in (
        ("--only", options.only, known), ("--workload", options.workload, set(WORKLOADS))
    ):  # fmt: skip
        if unknown := ", ".join(name for name in given if name not in allowed):
            parser.error(f"{what} does not know {unknown}; there are: {', '.join(sorted(allowed))}")
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
    lines = ["workloads:", *(f"  {name:8} {meaning}" for name, meaning in WORKLOADS.items())]
    for product in known:
        lines.append(f"{product.name}:")
        for setting in product.settings:
            head = f"  {setting.name} [{setting.level.label}; stands in the group {group_of(setting.level)}]"
            lines.append(f"{head}: {setting.promise}")
            if reason := product.missing(setting):
                lines.append(f"    skipped: {reason}")
                continue
            for client in product.clients(setting):
                its = [name for name in WORKLOADS if (name == "lone") is client.lone]
                reasons = {name: client.missing(setting, name) for name in its}
                can = ", ".join(name for name, why in reasons.items() if not why)
                lines.append(f"    {client.name}: {can or 'nothing'}")
                lines += [f"      skipped: {name}: {why}" for name, why in reasons.items() if why]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(words)
    try:
        if options.list:
            print(listing(products(options.workers)))
        elif options.write:
            DOCUMENT.write_text(written(DOCUMENT.read_text(), last_runs(sorted(HISTORY.glob("*.jsonl")))))
        else:
            return measure(options)
    except (Unfair, ValueError, OSError) as error:
        print(f"perf.compare: {error}", file=sys.stderr)
        return 1
    return 0


def measure(options: argparse.Namespace) -> int:
    """Run the comparison, print and record it; 1 when something failed that should have been measured."""
    # SIGTERM leaves as an exception does: with nothing running and no files.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    own = options.network == "own"
    network = enter_own_network() if own else f"the machine's loopback, {congestion_control()}"
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="danube-compare-", dir=options.directory) as folder:
        directory = Path(folder)
        kind = file_system(directory)
        if kind in MEMORY_KINDS and options.append:
            raise ValueError(
                f"{directory} is on {kind}, where nothing is synced: name one on a disk with --directory"
            )
        comparison = Comparison(
            directory=directory, products=products(options.workers), workloads=options.workload,
            sizes=options.size, only=options.only, rounds=options.rounds, scale=options.scale,
            note=lambda note: print(note, file=sys.stderr, flush=True),
        )  # fmt: skip
        if kind in MEMORY_KINDS:
            comparison.skip("durability", f"data lies on {kind}: whatever a level says, it is all in memory")
        facts = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"), "rounds": options.rounds,
            "scale": options.scale, "network": network, "machine": fingerprint(directory),
        }  # fmt: skip
        try:
            rows.extend(comparison.rows())
        finally:  # what was measured of a long run that is ended is kept
            run = Run(facts, rows, comparison.skips)
            if options.append and rows:
                with options.append.open("a") as history:
                    history.write(json.dumps(run.line()) + "\n")
    if not rows:
        print("perf.compare: nothing to measure: no setting fits --only", file=sys.stderr)
        return 1
    print(show(run, options.output))
    return int(any(skip.failed for skip in comparison.skips))


if __name__ == "__main__":
    sys.exit(main())
