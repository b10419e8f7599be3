"""Write the table of docs/performance.md from perf/history.

    python -m perf.report               write
    python -m perf.report --check       say whether it is up to date, and change nothing
    python -m perf.report --keep 3      and leave the newest three lines of each variant in perf/history
    python -m perf.report --plot FILE   draw the history of ratios (needs matplotlib)

The same history gives the same bytes.  Exit code: 0; 1 with --check when something is not up to date; 2 when
the history or the document cannot be used, and then nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from perf.report.history import read_history, trim
from perf.report.plots import draw
from perf.report.table import MarkersMissing, by_machine, make, variant_of

ROOT = Path(__file__).resolve().parents[2]
OUTDATED, UNUSABLE = 1, 2


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="compare, and change nothing")
    parser.add_argument(
        "--keep", type=int, default=0, metavar="N", help="lines of each variant in the history"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the newest machine's ratios into FILE"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def complain(line: str) -> None:
    print(line, file=sys.stderr)


def main(words: list[str] | None = None) -> int:
    given = arguments(words)
    document, folder = given.root / "docs" / "performance.md", given.root / "perf" / "history"
    history = read_history(folder, given.root)
    for error in history.errors:
        complain(error)
    if history.errors:
        complain("nothing was written: mend those lines, or take them out")
        return UNUSABLE
    try:
        made = make(history.lines, document.read_text())
    except (OSError, MarkersMissing) as error:
        complain(f"{document.relative_to(given.root)}: {error}")
        return UNUSABLE
    if given.check:
        if outdated := document.read_text() != made:
            complain("docs/performance.md is not up to date; run python -m perf.report")
        return OUTDATED if outdated else 0
    if given.plot:
        try:
            draw(next(iter(by_machine(history.lines).values()), []), given.plot)
        except ImportError:
            complain("SKIPPED the plot: matplotlib is not installed: pip install 'danube-broker[perf]'")
        return 0
    document.write_text(made)
    if given.keep:
        trim(folder, given.keep, variant_of)
    others = f" ({history.others} lines of other kinds were left alone)" if history.others else ""
    print(f"{len(history.lines)} lines{others}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
