"""The history of ratios: a panel for each variant of a row, a line for each number of workers.

Runs stand side by side in the order of time.  A filled dot met its target (or has none), an empty one missed
it.  The scale is logarithmic: half and twice as much are equally far from the line at 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from perf.report.table import Series, size

COLUMNS = 3


def draw(series: Iterable[Series], path: Path) -> int:
    """Draw all panels of one machine into a file; returns how many.  ImportError without matplotlib."""
    from matplotlib.figure import Figure

    def panel_of(one: Series) -> tuple[object, ...]:
        return one.variant.title, one.variant.size, one.variant.durability

    panels = [list(some) for _, some in groupby(series, key=panel_of)]
    rows = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(4.5 * COLUMNS, 2.6 * rows), layout="constrained")
    for number, panel in enumerate(panels, 1):
        variant = panel[0].variant
        axes = figure.add_subplot(rows, COLUMNS, number, yscale="log")
        axes.set_title(f"{variant.title}\n{size(variant.size)}, {variant.durability}", fontsize=7)
        axes.axhline(1.0, color="grey", linestyle="dashed", linewidth=0.8)
        axes.set_xticks([])
        for one in panel:
            ratios = [line.ratio for line in one.lines]
            (drawn,) = axes.plot(ratios, label=f"{one.variant.workers} workers", linewidth=0.8)
            missed = [place for place, line in enumerate(one.lines) if line.target and not line.met]
            axes.plot(ratios, "o", color=drawn.get_color(), markersize=4)
            axes.plot(missed, [ratios[place] for place in missed], "o", color="white", markersize=2)
        axes.legend(fontsize=6)
    figure.savefig(path)
    return len(panels)
