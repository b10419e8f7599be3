"""A few shapes as SVG text; the same shapes give the same bytes.

A plotting library would write the same panels with dates, hashed ids and fonts of its own version into
the file, so that every run and every machine changed it; and it would be the largest dependency of the
development tools for a few lines and dots.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

Point = tuple[float, float]


class Drawing:
    """Shapes on a white ground, in pixels from the top left."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
            f' viewBox="0 0 {width} {height}" role="img" font-family="sans-serif">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def line(self, points: Sequence[Point], colour: str, *, width: float = 1.0, dashed: bool = False) -> None:
        where = " ".join(f"{_short(x)},{_short(y)}" for x, y in points)
        dashes = ' stroke-dasharray="3 3"' if dashed else ""
        self._parts.append(
            f'<polyline points="{where}" fill="none" stroke={quoteattr(colour)}'
            f' stroke-width="{_short(width)}"{dashes}/>'
        )

    def dot(self, at: Point, colour: str, *, filled: bool, radius: float = 3.0, note: str = "") -> None:
        """A dot; ``note`` shows when the pointer rests on it."""
        inside = colour if filled else "#ffffff"
        shape = (
            f'<circle cx="{_short(at[0])}" cy="{_short(at[1])}" r="{_short(radius)}"'
            f" fill={quoteattr(inside)} stroke={quoteattr(colour)}"
        )
        self._parts.append(f"{shape}><title>{escape(note)}</title></circle>" if note else f"{shape}/>")

    def text(
        self, at: Point, words: str, *, height: int = 10, colour: str = "#222222", anchor: str = "start"
    ) -> None:
        self._parts.append(
            f'<text x="{_short(at[0])}" y="{_short(at[1])}" font-size="{height}"'
            f" fill={quoteattr(colour)} text-anchor={quoteattr(anchor)}>{escape(words)}</text>"
        )

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])


def _short(value: float) -> str:
    """At most one digit after the point."""
    text = f"{value:.1f}"
    return text.removesuffix(".0").replace("-0", "0") if text in ("-0.0", "0.0") else text.removesuffix(".0")
