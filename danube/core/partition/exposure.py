"""Pending data, which is only on this host: of a partition, of a topic, of all topics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

SECOND_US = 1_000_000


class Pending(NamedTuple):
    """Bytes of batches that are not known to be off this host, and the append time of their oldest record.

    ``oldest_us`` is microseconds of 1970, and 0 if nothing is pending.
    """

    size_bytes: int = 0
    oldest_us: int = 0

    def joined(self, other: Pending) -> Pending:
        """Add two pending amounts."""
        times = [time_us for time_us in (self.oldest_us, other.oldest_us) if time_us]
        return Pending(self.size_bytes + other.size_bytes, min(times, default=0))

    def age_s(self, now_us: int) -> float:
        """Return the age of the oldest pending record; a clock that was set back gives 0."""
        return max(0, now_us - self.oldest_us) / SECOND_US if self.oldest_us else 0.0


NOTHING = Pending()


def together(parts: Iterable[Pending]) -> Pending:
    """All of them."""
    found = NOTHING
    for part in parts:
        found = found.joined(part)
    return found
