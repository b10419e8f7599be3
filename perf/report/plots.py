"""The history of ratios: a panel for each workload, a line for each number of workers.

Runs stand side by side in the order of time, the latest of every line at the right, because weeks may lie
between two and minutes between the next.  A filled dot met its target (or has none), an empty one missed
it.  The scale is logarithmic: half and twice as much are equally far from the dashed line at 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from perf.report.figures import Series, Variant
from perf.report.svg import Drawing
from perf.report.tables import ratio, size
from perf.report.workloads import title_of

COLUMNS = 3
WIDTH, HEIGHT = 280, 150
LEFT, RIGHT, TOP, BOTTOM = 40, 12, 34, 24
HEADER = 30
COLOURS = ("#1f5fa8", "#b04a1e", "#3b7d3b", "#7a4a9c", "#8a6d00")
GREY, LIGHT = "#777777", "#dddddd"


def plot(series: Sequence[Series], title: str) -> str:
    """All panels of a group on one machine."""
    panels = [list(some) for _, some in groupby(series, key=lambda one: _panel(one.variant))]
    rows = -(-len(panels) // COLUMNS)
    drawing = Drawing(COLUMNS * WIDTH, HEADER + rows * HEIGHT, title)
    drawing.text((10, 20), title, height=13)
    for number, panel in enumerate(panels):
        corner = (number % COLUMNS * WIDTH, HEADER + number // COLUMNS * HEIGHT)
        _Panel(drawing, corner, panel).draw()
    return str(drawing)


def _panel(variant: Variant) -> tuple[object, ...]:
    """What shares a panel: all but the number of workers."""
    return (variant.workload, variant.size, variant.durability, variant.varied)


class _Panel:
    """Axes and lines of one panel."""

    def __init__(self, drawing: Drawing, corner: tuple[int, int], series: Sequence[Series]) -> None:
        self.drawing = drawing
        self.series = series
        self.left, self.right = corner[0] + LEFT, corner[0] + WIDTH - RIGHT
        self.top, self.bottom = corner[1] + TOP, corner[1] + HEIGHT - BOTTOM
        self.corner = corner
        ratios = [line.ratio for one in series for line in one.lines]
        self.low, self.high = min(*ratios, 0.5) / 1.1, max(*ratios, 2.0) * 1.1
        self.times = sorted(line.time for one in series for line in one.lines)
        self.runs = max(len(one.lines) for one in series)

    def draw(self) -> None:
        variant = self.series[0].variant
        facts = [size(variant.size), variant.durability, *([variant.varied] if variant.varied else [])]
        self.drawing.text(
            (self.corner[0] + 10, self.corner[1] + 12), title_of(variant.workload).replace("`", "")
        )
        self._legend(", ".join(facts))
        self._axes()
        for one in self.series:
            self._series(one)

    def _legend(self, facts: str) -> None:
        y = self.corner[1] + 25.0
        self.drawing.text((self.corner[0] + 10, y), facts, height=9, colour=GREY)
        x = float(self.right)
        for one in reversed(self.series):
            workers = one.variant.workers
            words = f"{workers} worker{'s' if workers != 1 else ''}"
            self.drawing.text((x, y), words, height=9, colour=_colour(workers), anchor="end")
            x -= 6.0 * len(words)

    def _axes(self) -> None:
        for value in _ticks(self.low, self.high):
            y = self._y(value)
            self.drawing.line([(self.left, y), (self.right, y)], LIGHT)
            self.drawing.text((self.left - 4, y + 3), _tick(value), height=9, colour=GREY, anchor="end")
        self.drawing.line([(self.left, self._y(1.0)), (self.right, self._y(1.0))], GREY, dashed=True)
        self.drawing.line([(self.left, self.bottom), (self.right, self.bottom)], GREY)
        y = self.bottom + 14
        self.drawing.text((self.left, y), f"{self.times[0]:%Y-%m-%d}", height=9, colour=GREY)
        if self.times[0].date() != self.times[-1].date():
            self.drawing.text(
                (self.right, y), f"{self.times[-1]:%Y-%m-%d}", height=9, colour=GREY, anchor="end"
            )

    def _series(self, one: Series) -> None:
        colour = _colour(one.variant.workers)
        first = self.runs - len(one.lines)
        points = [(self._x(first + number), self._y(line.ratio)) for number, line in enumerate(one.lines)]
        if len(points) > 1:
            self.drawing.line(points, colour, width=1.5)
        for point, line in zip(points, one.lines, strict=True):
            note = f"{line.time:%Y-%m-%d %H:%M} {line.machine.commit}: {ratio(line.ratio)}"
            self.drawing.dot(point, colour, filled=line.met or not line.target, note=note)

    def _x(self, number: int) -> float:
        if self.runs == 1:
            return (self.left + self.right) / 2
        inside = self.right - self.left - 12
        return self.left + 6 + inside * number / (self.runs - 1)

    def _y(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.bottom - share * (self.bottom - self.top)


def _colour(workers: int) -> str:
    return COLOURS[(workers - 1) % len(COLOURS)]


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each power of ten within; powers alone where those would be many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    found = [value for value in fine if low <= value <= high]
    return found if len(found) <= 5 else [10.0**power for power in powers if low <= 10.0**power <= high]


def _tick(value: float) -> str:
    return f"{value:g}"
