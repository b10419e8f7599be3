"""The bound of all series together: which rows have labels of their own, and which are one row ``other``.

Workers choose the topics, the oldest, so a topic keeps its label while others come (:func:`topics_within`).
:func:`within` bounds the rest: it joins the last rows of a family that has too many.

Only gauges are joined.  A counter would go backwards when a row leaves ``other`` for a place that became
free, so no counter of the table has a label that clients can make more of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from danube.core.partition.pending import OTHER
from danube.server.metrics.table import FAMILIES, FEW, Family

Series = tuple[tuple[str, ...], float]  # values of the labels, and of the series
Found = dict[str, list[Series]]  # by the family's name

GROWING: Final = {family.name: family for family in FAMILIES if not FEW.issuperset(family.labels)}


def topics_within(series_max: int, topics_max: int, worker_count: int) -> int:
    """How many topics may have labels, of ``topics_max`` that are wanted, beside all other series."""
    others = [family for family in FAMILIES if family.name not in GROWING]
    steady = sum(max(2, worker_count) if family.labels else 1 for family in others)
    return max(0, min(topics_max, (series_max - steady) // len(GROWING) - 1))


def within(found: Found, series_max: int, growing: Mapping[str, Family] = GROWING) -> Found:
    """Return ``found`` in at most ``series_max`` series: the last ones of ``growing`` families are joined.

    Families share the room evenly, and a family that needs less leaves the rest to the others.
    """
    room = series_max - sum(len(series) for name, series in found.items() if name not in growing)
    long = sorted((name for name in found if name in growing), key=lambda name: len(found[name]))
    if sum(len(found[name]) for name in long) <= room:
        return found
    bounded = dict(found)
    for left, name in zip(range(len(long), 0, -1), long, strict=True):
        bounded[name] = _joined(growing[name], found[name], max(1, room // left))
        room -= len(bounded[name])
    return bounded


def _joined(family: Family, series: list[Series], most: int) -> list[Series]:
    """At most ``most`` rows, one of them ``other``, which may be among ``series`` already."""
    if len(series) <= most:
        return series
    other = (OTHER,) * len(family.labels)
    named = [one for one in series if one[0] != other]
    rest = [value for labels, value in series if labels == other]
    rest += [value for _, value in named[most - 1 :]]
    return [*named[: most - 1], (other, max(rest) if family.oldest else sum(rest))]
