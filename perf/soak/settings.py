"""What a soak is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of a run; times in seconds.  Those of :attr:`lasting` must not change when it is resumed."""

    directory: Path
    total_s: float
    epoch_s: float = 300.0
    fault_every_s: tuple[float, float] = (30.0, 60.0)
    sample_every_s: float = 5.0
    settle_s: float = 5.0
    workers: int = 2
    pause_s: float = 0.25  # after each send of a producer, at most
    store: str = "auto"
    faults: str = "alternate"
    journal_bytes_max: int = (
        160 * MIB
    )  # an epoch ends early there: the checker takes six times as much memory

    @property
    def conclude_s(self) -> float:
        """What the end of an epoch is expected to take."""
        return min(15.0, self.epoch_s / 4)

    @property
    def lasting(self) -> dict[str, Any]:
        return {"workers": self.workers, "store": self.store, "epoch_s": self.epoch_s}

    @property
    def retention_ms(self) -> int:
        """Records live for some epochs: the open one is always whole, and the disk stays bounded."""
        return int(max(120.0, 3 * self.epoch_s) * 1000)

    def load_s(self, left_s: float) -> float:
        """How long the load of the next epoch runs when ``left_s`` are left; 0: no epoch fits any more."""
        fitting = left_s - self.conclude_s
        if fitting >= self.epoch_s * 1.5:
            return self.epoch_s
        return max(0.0, fitting if fitting >= min(10.0, self.epoch_s / 2) else 0.0)
