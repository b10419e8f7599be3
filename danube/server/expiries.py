"""Ends of credentials: each connection is told before, and closed when its credential has ended.

One heap holds the next moment of each connection.  A connection that has authenticated again leaves its old
entry behind; the entry is dropped when it comes up, as it no longer fits the connection.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Final, Protocol

from danube.core.security.principals import Identity

NOTICE_US: Final = 30_000_000  # before the end, at the latest


class Holder(Protocol):
    """A connection with its present identity."""

    closed: bool
    identity: Identity

    def expire(self, left_s: int) -> None: ...


class Expiries:
    """Moments of one door's connections; looked at once a second."""

    def __init__(self, leeway_us: int) -> None:
        """``leeway_us``: credentials hold so much longer than they say, as clocks differ."""
        self._leeway_us = leeway_us
        self._order = itertools.count()
        self._heap: list[tuple[int, int, bool, Identity, Holder]] = []  # when, and whether that is the end

    def watch(self, holder: Holder, now_us: int) -> None:
        """Follow the holder's present credential, if it ends."""
        identity = holder.identity
        if identity.expires_us:
            lifetime_us = identity.expires_us - now_us
            notice_us = now_us + min(lifetime_us * 4 // 5, lifetime_us - NOTICE_US)
            self._push(max(now_us, notice_us), False, identity, holder)

    def due(self, now_us: int) -> Iterator[tuple[Holder, int]]:
        """Yield holders with the seconds that their credentials have left; 0: they have ended."""
        while self._heap and self._heap[0][0] <= now_us:
            _, _, ended, identity, holder = heapq.heappop(self._heap)
            if holder.closed or holder.identity is not identity:
                continue
            if ended:
                yield holder, 0
                continue
            self._push(identity.expires_us + self._leeway_us, True, identity, holder)
            yield holder, max(1, (identity.expires_us - now_us) // 1_000_000)

    def _push(self, moment_us: int, ended: bool, identity: Identity, holder: Holder) -> None:
        heapq.heappush(self._heap, (moment_us, next(self._order), ended, identity, holder))
