"""When a process that ended is started again: at once, and more slowly when it dies young."""

from __future__ import annotations

from typing import Final

SECOND_NS: Final = 1_000_000_000
RESTART_DELAY_MIN_NS: Final = SECOND_NS // 10
RESTART_DELAY_MAX_NS: Final = 5 * SECOND_NS
RESTART_DELAY_SERVED_MAX_NS: Final = 4 * SECOND_NS // 10  # a worker that has served is back within 1 s
STABLE_NS: Final = SECOND_NS  # a process that served and lived this long did not die young


def restart_delay_ns(deaths: int, served: bool = False) -> int:
    """0, 100 ms, 200 ms, 400 ms ... for the first, second ... young death in a row."""
    if deaths <= 1:
        return 0
    delay_max_ns = RESTART_DELAY_SERVED_MAX_NS if served else RESTART_DELAY_MAX_NS
    return min(delay_max_ns, RESTART_DELAY_MIN_NS << min(deaths - 2, 10))
