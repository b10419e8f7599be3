"""A token bucket: so many records a second, saved up for at most one second."""

from __future__ import annotations

from typing import Final

SECOND_NS: Final = 1_000_000_000
UNLIMITED: Final = 1 << 62


class RecordRate:
    """``per_second`` 0 is no limit.  Records are never dropped: those not allowed now are allowed later."""

    __slots__ = ("_filled_ns", "_tokens", "per_second")

    def __init__(self, per_second: int = 0) -> None:
        self.per_second = per_second
        self._tokens = float(per_second)
        self._filled_ns = 0

    def set(self, per_second: int) -> None:
        """Change the rate; saved allowance is cut to the new bound."""
        if per_second != self.per_second:
            self.per_second = per_second
            self._tokens = min(self._tokens, float(per_second))

    def allowed(self, now_ns: int) -> int:
        """Whole records that may go now."""
        if not self.per_second:
            return UNLIMITED
        elapsed_ns = max(0, now_ns - self._filled_ns) if self._filled_ns else 0
        self._filled_ns = now_ns
        earned = elapsed_ns * self.per_second / SECOND_NS
        self._tokens = min(self._tokens + earned, float(max(self.per_second, 1)))
        return int(self._tokens)

    def take(self, records: int) -> None:
        """Take the tokens of ``records`` records that were granted."""
        if self.per_second:
            self._tokens -= records

    def next_ns(self, now_ns: int) -> int | None:
        """Return when one more record may go; None without a limit."""
        if not self.per_second:
            return None
        missing = max(0.0, 1.0 - self._tokens)
        return now_ns + int(missing * SECOND_NS / self.per_second) + 1
