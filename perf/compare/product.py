"""What a product brings to a comparison: settings with a level each, a server, clients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from perf.compare.figures import Turn
from perf.compare.levels import Level

MIB = 1 << 20
TURN_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A product configured so that its acknowledgements have one meaning."""

    name: str
    level: Level
    promise: str  # what this setting of this product really does, in words


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one turn does.

    ``count`` is how many records are measured, about ``seconds`` of them, ``stored`` how many a topic for
    replays should hold, ``rate`` the records/s of one at a time.
    """

    workload: str
    size: int
    count: int
    topic: str
    stored: int = 0
    seconds: float = 1.0
    rate: int = 1_000


class Process(Protocol):
    """A server's process tree."""

    def pids(self) -> list[int]:
        """All of it, now."""

    def stop(self) -> None:
        """End all of it."""


@dataclass(kw_only=True)
class Running:
    """A started server of one setting.

    ``address`` is what clients are told, as options of their own; ``stored`` is how many records each
    topic for replays holds.
    """

    setting: Setting
    directory: Path
    server: Process
    address: dict[str, object]
    stored: dict[str, int] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def pids(self) -> list[int]:
        return self.server.pids()

    def next_name(self) -> str:
        """A name for a reader whose place is kept, that was never used."""
        return f"reader{next(self.numbers)}"

    def stop(self) -> None:
        self.server.stop()


class Client(Protocol):
    """One way to drive a product: a Python client or a tool of the product."""

    name: str
    kind: str  # python or tool

    def missing(self, setting: Setting, workload: str) -> str:
        """Why it cannot do this here, in words; empty when it can."""

    def turn(self, running: Running, work: Work) -> Turn:
        """Measure once and leave no topic but those for replays; Failed or ChildFailed when that fails."""


class Product(Protocol):
    """A broker and how it is started."""

    name: str
    ours: bool
    stored_max: int  # records of a topic for replays: as many as are stored in a moment
    settings: tuple[Setting, ...]

    def clients(self, setting: Setting) -> Sequence[Client]:
        """What drives it, with this setting."""

    def missing(self, setting: Setting) -> str:
        """Why it cannot run here with this setting, in words; empty when it can."""

    def version(self) -> str:
        """What the server says it is."""

    def start(self, setting: Setting, directory: Path) -> Running:
        """A server with data in ``directory``, ready, at the level of the setting; Failed when it is not."""
