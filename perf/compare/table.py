"""One table of all rows, the level beside each figure; as text or markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, groupby

from perf.compare.figures import Row, Spread
from perf.compare.levels import MEANINGS, refuse_unfair

HEAD = (
    "workload", "size", "level", "product and setting", "driven by", "median", "range",
    "server CPU s/M", "client CPU s/M", "lost",
)  # fmt: skip
RIGHT = {"size", "median", "range", "server CPU s/M", "client CPU s/M", "lost"}


def key(row: Row) -> tuple[str, int, str]:
    return row.workload, row.size, row.group


def grouped(rows: Iterable[Row]) -> list[tuple[tuple[str, int, str], list[Row]]]:
    """Rows that stand beside each other, best first; Unfair when some must not."""
    found: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    for (_, _, group), together in found.items():
        refuse_unfair(group, together)
        together.sort(key=best_first)
    return list(found.items())


def best_first(row: Row) -> float:
    return row.p50_us.median if row.p50_us is not None else -row.rate.median


def plain(value: float) -> str:
    """Three significant digits at least, none that say nothing."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def figure(row: Row) -> tuple[str, str]:
    """Median and range of what the workload is about."""
    if row.p50_us is None or row.p99_us is None:
        return f"{plain(row.rate.median)}/s", _range(row.rate)
    median = f"p50 {plain(row.p50_us.median)} us, p99 {plain(row.p99_us.median)} us"
    return f"{median}, {plain(row.rate.median)}/s", f"{_range(row.p50_us)}; {_range(row.p99_us)}"


def _range(spread: Spread) -> str:
    return f"{plain(spread.low)}-{plain(spread.high)}"


def _median(spread: Spread | None) -> str:
    return "not known" if spread is None else plain(spread.median)


def cells(row: Row) -> list[str]:
    """The row in the order of the head."""
    middle, around = figure(row)
    return [
        row.workload,
        f"{row.size:,}",
        row.level.label,
        row.setting,
        row.client,
        middle,
        around,
        _median(row.server_per_million),
        _median(row.client_per_million),
        f"{row.lost:,}" if row.lost else "",
    ]


def text(rows: Iterable[Row]) -> str:
    """Columns aligned, groups apart."""
    blocks = [[cells(row) for row in together] for _, together in grouped(rows)]
    every = [list(HEAD), *chain.from_iterable(blocks)]
    widths = [max(len(line[place]) for line in every) for place in range(len(HEAD))]
    lines = [_aligned(HEAD, widths)]
    for block in blocks:
        lines += ["", *(_aligned(line, widths) for line in block)]
    return "\n".join(lines)


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    padded = (
        cell.rjust(width) if name in RIGHT else cell.ljust(width)
        for cell, width, name in zip(line, widths, HEAD, strict=True)
    )
    return "  ".join(padded).rstrip()


def markdown(rows: Iterable[Row]) -> str:
    """The same as a table of markdown; Danube's rows are bold."""
    lines = [_piped(HEAD), _piped(["---:" if name in RIGHT else "---" for name in HEAD])]
    for _, together in grouped(rows):
        for row in together:
            line = cells(row)
            lines.append(_piped([f"**{cell}**" if cell and row.ours else cell for cell in line]))
    return "\n".join(lines)


def _piped(line: Sequence[str]) -> str:
    return f"| {' | '.join(line)} |"


def legend(rows: Sequence[Row]) -> list[str]:
    """What the levels mean, what each setting promises, and which version it was."""
    levels = sorted({row.level for row in rows})
    lines = [f"{level.label}: {MEANINGS[level]}" for level in levels]
    settings = sorted({(row.level, row.setting, row.promise, row.version) for row in rows})
    for _, together in groupby(settings, key=lambda known: known[0]):
        lines += [f"{setting} ({version}): {promise}" for _, setting, promise, version in together]
    return lines
