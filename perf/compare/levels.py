"""What an acknowledgement promises, and which settings may stand beside each other.

The rule: nothing of ours at a weaker level stands beside something of theirs at a stronger one.  A group is
named after one of Danube's levels; a peer joins the first group that is at least as strong as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Protocol


class Level(IntEnum):
    """Ordered: a higher one survives all that a lower one survives."""

    TAKEN = 0
    IN_MEMORY = 1
    WRITTEN_LATER = 2
    WRITTEN = 3
    FSYNC = 4

    @property
    def label(self) -> str:
        return LABELS[self]


LABELS = {
    Level.TAKEN: "taken",
    Level.IN_MEMORY: "in memory",
    Level.WRITTEN_LATER: "written later",
    Level.WRITTEN: "written",
    Level.FSYNC: "fsync",
}
MEANINGS = {
    Level.TAKEN: "the server took it; nothing is stored, and a reader that is slow or absent loses it",
    Level.IN_MEMORY: "kept for readers in the server's memory; lost with its process",
    Level.WRITTEN_LATER: "in the server's memory, and handed to the operating system some time after the ack",
    Level.WRITTEN: "in the operating system's page cache before the ack; survives the death of the process",
    Level.FSYNC: "an fsync that covers it returned before the ack; survives a power cut",
}
GROUPS = {"memory": Level.TAKEN, "written": Level.WRITTEN, "fsync": Level.FSYNC}  # Danube's name: its level


class Unfair(Exception):
    """A comparison that would flatter Danube; it is not measured and not printed."""


class Compared(Protocol):
    """Something that stands in a comparison."""

    @property
    def name(self) -> str: ...

    @property
    def level(self) -> Level: ...

    @property
    def ours(self) -> bool: ...


def level_of(label: str) -> Level:
    """The level with this label; ValueError when there is none."""
    for level, known in LABELS.items():
        if known == label:
            return level
    raise ValueError(f"no durability level is called {label!r}; there are {', '.join(LABELS.values())}")


def group_of(level: Level) -> str:
    """The group of a peer's setting: the weakest that is not weaker than it."""
    return next(name for name, floor in GROUPS.items() if floor >= level)


def refuse_unfair(group: str, members: Iterable[Compared]) -> None:
    """Raise Unfair unless everything of ours is at least as strong as the group and as every peer in it."""
    compared = list(members)
    ours = [one for one in compared if one.ours]
    for theirs in (one for one in compared if not one.ours):
        for own in ours:
            if own.level < theirs.level:
                raise Unfair(
                    f"{own.name} acknowledges at the level {own.level.label!r}, {theirs.name} at the stronger"
                    f" {theirs.level.label!r}: they do not stand beside each other"
                )
        if theirs.level > GROUPS[group]:
            raise Unfair(f"{theirs.name} is {theirs.level.label!r}, too strong for the group {group!r}")
    for own in ours:
        if own.level < GROUPS[group]:
            raise Unfair(f"{own.name} is {own.level.label!r}, too weak for the group {group!r}")
