"""How much a peer may ask of a connection that brings no work forward.

Two allowances fill with time and with useful work, and are spent by what a peer can repeat cheaply:

    control  PING, SETTINGS, PRIORITY, WINDOW_UPDATE, unknown frames, empty DATA, frames for streams
             that ended, pieces of DATA that a tiny window made; each call and each DATA frame that
             was sent for its own sake earns some, because clients answer those with such frames
    resets   calls that the peer resets, that are refused or malformed; each call that was not earns
             a part of one, so cancelling a share of many calls is fine

A client at 100,000 calls/s stays far below both; a peer that only floods has used up a burst after a
fraction of a second and is told ENHANCE_YOUR_CALM.
"""

from __future__ import annotations

from typing import Final

CONTROL_BURST: Final = 10_000
CONTROL_PER_SECOND: Final = 1_000
CONTROL_PER_CALL: Final = 4
CONTROL_PER_DATA: Final = 2
RESETS_BURST: Final = 2_000
RESETS_PER_SECOND: Final = 100
CALLS_PER_RESET: Final = 4
_SECOND_NS: Final = 1_000_000_000


class FloodGuard:
    """Both allowances of one connection.  Times in ns; calls and DATA frames are running totals."""

    __slots__ = ("_calls_seen", "_control", "_data_seen", "_filled_ns", "_resets", "resets_count")

    def __init__(self, now_ns: int) -> None:
        self._filled_ns = now_ns
        self._control = float(CONTROL_BURST)
        self._resets = float(RESETS_BURST)
        self._calls_seen = 0
        self._data_seen = 0
        self.resets_count = 0

    def control(self, cost: int, now_ns: int, calls: int, data_frames: int) -> bool:
        """Spend ``cost``; False when there is no more."""
        self._control -= cost
        if self._control >= 0:
            return True
        self._fill(now_ns, calls, data_frames)
        return self._control >= 0

    def reset(self, now_ns: int, calls: int, data_frames: int) -> bool:
        """Spend one reset; False when there is no more."""
        self.resets_count += 1
        self._resets -= 1
        if self._resets >= 0:
            return True
        self._fill(now_ns, calls, data_frames)
        return self._resets >= 0

    def _fill(self, now_ns: int, calls: int, data_frames: int) -> None:
        seconds = max(0, now_ns - self._filled_ns) / _SECOND_NS
        calls_new, data_new = calls - self._calls_seen, data_frames - self._data_seen
        earned = calls_new * CONTROL_PER_CALL + data_new * CONTROL_PER_DATA
        useful = max(0, calls_new - self.resets_count)
        self._control = min(CONTROL_BURST, self._control + seconds * CONTROL_PER_SECOND + earned)
        self._resets = min(
            RESETS_BURST, self._resets + seconds * RESETS_PER_SECOND + useful / CALLS_PER_RESET
        )
        self._filled_ns = now_ns
        self._calls_seen, self._data_seen, self.resets_count = calls, data_frames, 0
