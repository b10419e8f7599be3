"""The one door to time: a monotonic clock for deadlines and the wall clock for stamps."""

from __future__ import annotations

import time

monotonic_ns = time.monotonic_ns


def wall_us() -> int:
    """Microseconds since 1970 UTC; may jump, so it orders nothing by itself."""
    return time.time_ns() // 1000
