"""Bounds of connections: of one address, of one principal, and how fast an address opens them.

They hold for the whole host: workers count together (:mod:`danube.ipc.tallies`).  Whoever is on this host
keeps some places, whatever the limits are, so that an operator gets in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from danube.errors import Overloaded
from danube.host import clock

LOCAL_PLACES: Final = 16
SECOND_NS: Final = 1_000_000_000
ADDRESSES_MAX: Final = 10_000  # whose rate is remembered; the others have saved all they may


class Counted(Protocol):
    """Counts by name, of all workers (:class:`danube.ipc.tallies.Tallies`)."""

    def add(self, name: str, amount: int) -> None: ...
    def total(self, name: str) -> int: ...


class Guests:
    """Judges new connections of one worker; a limit of 0 is none."""

    def __init__(
        self,
        counts: Counted,
        *,
        per_address: int,
        per_principal: int,
        per_second: int,
        now_ns: Callable[[], int] = clock.monotonic_ns,
    ) -> None:
        self._counts = counts
        self._per_address = per_address
        self._per_principal = per_principal
        self._per_second = per_second
        self._now_ns = now_ns
        self._rates: dict[
            str, tuple[int, int]
        ] = {}  # by address: openings seen, and until when they are paid

    def come(self, address: str, *, local: bool) -> None:
        """Count a connection; raises Overloaded if its address has too many, or opens them too fast."""
        count = self._counts.total(address)
        if not local or count >= LOCAL_PLACES:
            self._check("connections_per_address", self._per_address, count, f"address {address}")
            self._check_rate(address)
        self.arrive(address)

    def arrive(self, address: str) -> None:
        """Count a connection that another worker has judged and passed on."""
        self._counts.add(address, 1)

    def leave(self, address: str) -> None:
        self._counts.add(address, -1)

    def enter(self, principal: str, *, local: bool) -> None:
        """Count a connection for who shows a credential on it; raises Overloaded if there are too many."""
        name = f"principal {principal}"
        count = self._counts.total(name)
        if not local or count >= LOCAL_PLACES:
            self._check("connections_per_principal", self._per_principal, count, principal)
        self.carry(principal)

    def carry(self, principal: str) -> None:
        """Count a connection for its principal that another worker has judged."""
        self._counts.add(f"principal {principal}", 1)

    def exit(self, principal: str) -> None:
        self._counts.add(f"principal {principal}", -1)

    def _check(self, quota: str, limit: int, count: int, who: str) -> None:
        if limit and count >= limit:
            raise Overloaded(
                f"{who} has {count} connections to this broker",
                why=f"limits.{quota} is {limit}",
                hint="share a connection, close some, or have the limit raised",
                limit=limit, quota=quota, retry_after_ms=1_000,
            )  # fmt: skip

    def _check_rate(self, address: str) -> None:
        """Raise Overloaded if an address opens connections faster than it may; a second's worth is saved."""
        limit = self._per_second
        if not limit:
            return
        now_ns, name = self._now_ns(), f"opened {address}"
        total = self._counts.total(name)
        seen, paid_ns = self._rates.get(address, (total, 0))
        opened = total - seen & 0xFFFFFFFF  # by other workers meanwhile
        paid_ns = max(paid_ns, now_ns - SECOND_NS) + (opened + 1) * SECOND_NS // limit
        if paid_ns > now_ns:
            retry_after_ms = (paid_ns - now_ns) // 1_000_000 + 1
            raise Overloaded(
                f"address {address} opens connections too fast",
                why=f"limits.connection_rate is {limit} a second",
                hint=f"connect again in {retry_after_ms} ms, and keep connections open",
                limit=limit, quota="connection_rate", retry_after_ms=retry_after_ms,
            )  # fmt: skip
        self._counts.add(name, 1)
        if len(self._rates) >= ADDRESSES_MAX:
            self._rates = {one: kept for one, kept in self._rates.items() if kept[1] > now_ns - SECOND_NS}
        if len(self._rates) < ADDRESSES_MAX:
            self._rates[address] = total + 1, paid_ns
