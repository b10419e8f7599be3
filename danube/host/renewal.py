"""Renewal of what is made from files when they change: certificates, authorities, keys of tokens.

Whatever cannot be made leaves the former one in use, is told once, and is tried again at each look.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

from danube.errors import ConfigInvalid
from danube.host import clock

LOOK_NS: Final = 5_000_000_000

Source = TypeVar("Source")  # what names the files
Made = TypeVar("Made")


class Renewal(Generic[Source, Made]):
    """Follows the files of one such thing; a subclass says which they are, and tells of changes."""

    renew_ns = 0  # age at which it is made anew without a change; 0: never

    def __init__(self, source: Source, make: Callable[[Source], Made]) -> None:
        """Make the first one; raises ConfigInvalid."""
        self.source = source
        self.failed = False  # the files, as they are now, cannot be used
        self.renewed_count = 0
        self._make = make
        self._seen = self._state()  # before they are loaded: a change meanwhile is seen by the next look
        self.made = make(source)
        self._made_ns = self._looked_ns = clock.monotonic_ns()

    def paths(self) -> Iterable[str]:
        """Return the files that it is made from; "" stands for none."""
        raise NotImplementedError

    def renewed(self) -> None:
        """Log that changed files are in use."""
        raise NotImplementedError

    def kept(self, error: ConfigInvalid) -> None:
        """Log why changed files are not in use."""
        raise NotImplementedError

    def look(self, *, at_once: bool = False) -> None:
        """Make it anew if the files changed, or by its age; looks every LOOK_NS."""
        now_ns = clock.monotonic_ns()
        if not at_once and now_ns < self._looked_ns + LOOK_NS:
            return
        self._looked_ns = now_ns
        seen = self._state()
        changed = seen != self._seen
        old = self.renew_ns and now_ns > self._made_ns + self.renew_ns
        if not (changed or self.failed or old):
            return
        self._seen = seen
        try:
            self.made = self._make(self.source)
        except ConfigInvalid as error:
            if changed or not self.failed:
                self.kept(error)
            self.failed = True
            return
        self._made_ns = now_ns
        if changed or self.failed:
            self.renewed_count += 1
            self.renewed()
        self.failed = False

    def follow(self, source: Source) -> None:
        """Look at once, at the files that another source names."""
        if source != self.source:
            self.source = source
            self._seen = None
        self.look(at_once=True)

    def _state(self) -> tuple[object, ...] | None:
        return tuple(_state_of(path) for path in self.paths() if path)


def _state_of(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
