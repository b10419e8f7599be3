"""Write the figures of docs/performance.md and their plots from perf/history.

    python -m perf.report            write
    python -m perf.report --check    say whether they are up to date, and change nothing

The same history gives the same bytes.  Exit code: 0; 1 with --check when something is not up to date; 2 when
the history or the document cannot be used, and then nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from perf.report.document import MarkersMissing, make, outdated, write
from perf.report.history import read_history

ROOT = Path(__file__).resolve().parents[2]
OUTDATED, UNUSABLE = 1, 2


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="compare, and change nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def complain(line: str) -> None:
    print(line, file=sys.stderr)


def main(words: list[str] | None = None) -> int:
    given = arguments(words)
    document, plots = given.root / "docs" / "performance.md", given.root / "docs" / "plots"
    history = read_history(given.root / "perf" / "history", given.root)
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
        found = outdated(made, document, plots)
        for name in found:
            complain(f"docs/{name} is not up to date; run python -m perf.report")
        return OUTDATED if found else 0
    write(made, document, plots)
    others = f" ({history.others} lines of other kinds were left alone)" if history.others else ""
    print(f"{len(history.lines)} lines, {len(made.plots)} plots{others}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
