"""What a run keeps on disk, so that one that was stopped or killed goes on where it was.

One file, replaced as a whole: the options that must not change, every epoch that was judged, and the
epoch that is open.  Journals and samples lie beside it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1


class StateRefused(Exception):
    """The directory holds another run; the text says which and what to do."""


@dataclass
class Judged:
    """An epoch with its verdict."""

    epoch: int
    seconds: float
    violations: dict[str, int]
    examples: list[str]
    statistics: dict[str, Any]
    note: str = ""

    @property
    def passed(self) -> bool:
        return not self.violations


@dataclass
class OpenEpoch:
    """An epoch that is going on: from where each log is its own, and when it began (wall time)."""

    epoch: int
    since_us: int
    bases: dict[str, list[int]]
    sessions: int = 0  # how often it was taken up again


@dataclass
class State:
    """Everything that must survive; :meth:`save` puts it on disk."""

    path: Path
    seed: int
    options: dict[str, Any]
    judged: list[Judged] = field(default_factory=list)
    open: OpenEpoch | None = None
    died: list[str] = field(default_factory=list)
    sessions: int = 0

    @classmethod
    def load(cls, path: Path, seed: int | None, options: dict[str, Any]) -> State:
        """The run of this directory, or a new one; raises StateRefused when it is another run."""
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            return cls(path, seed if seed is not None else int.from_bytes(os.urandom(4), "big"), options)
        try:
            found = json.loads(path.read_text())
            state = cls(
                path,
                found["seed"],
                found["options"],
                [Judged(**one) for one in found["judged"]],
                OpenEpoch(**found["open"]) if found["open"] else None,
                found["died"],
                found["sessions"],
            )
            version = found["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise StateRefused(f"{path} cannot be read ({error}); --restart begins anew") from error
        given = {"seed": state.seed if seed is None else seed, **options}
        known = {"seed": state.seed, **state.options}
        differing = [name for name in given if given[name] != known.get(name)]
        if version != FORMAT:
            raise StateRefused(f"{path} has format {version}, not {FORMAT}; --restart begins anew")
        if differing:
            changes = ", ".join(f"{name} {known.get(name)}, not {given[name]}" for name in differing)
            raise StateRefused(
                f"the run in {path.parent} was started with {changes};"
                " go on with the same, begin anew with --restart, or name another --directory"
            )
        return state

    def save(self) -> None:
        found = asdict(self)
        del found["path"]
        new = self.path.with_suffix(".new")
        with new.open("w") as file:
            json.dump({"format": FORMAT, **found}, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path)

    @property
    def next_epoch(self) -> int:
        return self.judged[-1].epoch + 1 if self.judged else 0

    @property
    def violations(self) -> Counter[str]:
        """All that was found so far, by name."""
        found: Counter[str] = Counter()
        for one in self.judged:
            found.update(one.violations)
        found.update({"died": len(self.died)} if self.died else {})
        return found

    @property
    def totals(self) -> Counter[str]:
        """Sums of what the epochs counted."""
        found: Counter[str] = Counter()
        for one in self.judged:
            found.update({name: value for name, value in one.statistics.items() if isinstance(value, int)})
        return found

    @property
    def faults(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for one in self.judged:
            found.update(one.statistics.get("faults", {}))
        return found
