"""A line on the terminal that says how far long work is; silent anywhere else."""

from __future__ import annotations

import sys
import time

INTERVAL_S = 0.2
QUIET_S = 1.0  # short work shows nothing


class Progress:
    """Call ``update`` as often as you like; it writes a few times a second, and only to a terminal."""

    def __init__(self, shown: bool, what: str, total: int = 0) -> None:
        self._shown = shown
        self._what = what
        self._total = total
        self._began = self._last = time.monotonic()
        self._width = 0

    def update(self, done: int) -> None:
        if not self._shown:
            return
        now = time.monotonic()
        if now - self._last < INTERVAL_S or now - self._began < QUIET_S:
            return
        self._last = now
        of = f" of {self._total:,}" if self._total else ""
        rate = done / (now - self._began)
        self._write(f"{done:,}{of} {self._what}, {rate:,.0f}/s")

    def close(self) -> None:
        """Remove the line."""
        if self._width:
            self._write("")
            sys.stderr.write("\r")
            sys.stderr.flush()

    def _write(self, text: str) -> None:
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)
