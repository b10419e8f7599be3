"""Chooses what is shown: for each machine and variant of a workload the latest line and those before it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from perf.report.history import Line, Machine
from perf.report.workloads import VARIED_BY, group_of, place_of

LEVELS = ("memory", "written", "fsync", "quorum")


@dataclass(frozen=True)
class Variant:
    """A workload with what was varied; equal for the runs that are one history."""

    workload: str
    size: int
    durability: str
    workers: int
    number: int = 0  # of what else was varied
    varied: str = ""  # the same in words: "4 consumers"

    @property
    def order(self) -> tuple[object, ...]:
        level = LEVELS.index(self.durability) if self.durability in LEVELS else len(LEVELS)
        return (place_of(self.workload), self.workload, level, self.size, self.number, self.workers)


@dataclass(frozen=True)
class Series:
    """All runs of a variant on one machine, the latest last."""

    variant: Variant
    lines: tuple[Line, ...]

    @property
    def latest(self) -> Line:
        return self.lines[-1]

    @property
    def group(self) -> str:
        return group_of(self.variant.workload)


def variant_of(line: Line) -> Variant:
    detail, words = VARIED_BY.get(line.workload, ("", ""))
    number = line.details.get(detail)
    if not isinstance(number, int):
        return Variant(line.workload, line.size, line.durability, line.workers)
    varied = f"{number:,} {words.removesuffix('s') if number == 1 else words}"
    return Variant(line.workload, line.size, line.durability, line.workers, number, varied)


def by_machine(lines: Iterable[Line]) -> dict[str, list[Series]]:
    """Series by machine; the machine that was measured last comes first.  Lines come in order of time."""
    known: list[Machine] = []
    machines: dict[str, dict[Variant, list[Line]]] = {}
    for line in lines:
        machine = next((one for one in known if one.like(line.machine)), None)
        if machine is None:
            machine = line.machine
            known.append(machine)
        variants = machines.pop(machine.hardware, defaultdict(list))
        variants[variant_of(line)].append(line)
        machines[machine.hardware] = variants
    return {
        hardware: sorted(
            (Series(variant, tuple(found)) for variant, found in variants.items()),
            key=lambda series: series.variant.order,
        )
        for hardware, variants in reversed(machines.items())
    }


def grouped(series: Iterable[Series]) -> dict[str, list[Series]]:
    """Series by group, in their order."""
    found: dict[str, list[Series]] = defaultdict(list)
    for one in series:
        found[one.group].append(one)
    return dict(found)
