"""The one door to time: clocks for deadlines and for rights that others end, the wall clock for stamps."""

from __future__ import annotations

import time

monotonic_ns = time.monotonic_ns


def elapsed_ns() -> int:
    """Return a time that also counts while the host is suspended, unlike the monotonic clock."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def wall_us() -> int:
    """Microseconds since 1970 UTC; may jump, so it orders nothing by itself."""
    return time.time_ns() // 1000
