"""Leases inside the metadata machine: rights that end when they are not renewed.

A lease ends only by a command.  The process that watches the time proposes to expire the leases that are due.
The machine then checks its own agreed time and the lease's revision, so an earlier renewal wins.  Proposers
choose ids above 0. A key with its own time to live has a lease with an id below 0, which ends with the key.
"""

from __future__ import annotations

import heapq
from operator import attrgetter

from danube.core.cluster.commands import ExpireLeases, GrantLease, Lease
from danube.core.cluster.records import Records, no_room
from danube.errors import Conflict, InvalidArgument, NotFound
from danube.limits import LEASE_TTL_MS_MAX, LEASES_MAX, LEASES_PER_COMMAND_MAX

LEASE_ID_MAX = (1 << 63) - 1


class Leases(Records[int, Lease]):
    """All leases by id."""

    key_of = attrgetter("lease_id")

    def lease(self, lease_id: int) -> Lease:
        """The lease of this id; raises NotFound, also for one that has ended."""
        found = self._by_key.get(lease_id)
        if found is None:
            raise NotFound(f"lease {lease_id} does not exist", why="or it has ended", hint="grant another")
        return found

    def due(self, now_us: int, count_max: int = LEASES_PER_COMMAND_MAX) -> list[tuple[int, int]]:
        """Ids and revisions of leases whose time is over at ``now_us``, the longest over first."""
        over = [
            (lease.expires_us, lease.lease_id, lease.revision)
            for lease in self._by_key.values()
            if lease.expires_us <= now_us
        ]
        return [(lease_id, revision) for _, lease_id, revision in heapq.nsmallest(count_max, over)]

    # Check

    def check_grant(self, command: GrantLease) -> None:
        check_ttl(command.ttl_ms)
        self.refuse_grant(command)
        self.check_room()

    def refuse_grant(self, command: GrantLease) -> None:
        if not 1 <= command.lease_id <= LEASE_ID_MAX:
            raise InvalidArgument("a lease's id is 1 .. 2**63 - 1", why=f"not {command.lease_id}")
        if command.lease_id in self._by_key:
            raise Conflict(f"lease {command.lease_id} exists", hint="choose another id, or renew it")

    def check_room(self) -> None:
        if len(self._by_key) >= LEASES_MAX:
            raise no_room("leases", LEASES_MAX)

    def over(self, command: ExpireLeases, now_us: int) -> list[Lease]:
        """Return the leases of the command that end at ``now_us``, once each and in its order."""
        found: dict[int, Lease] = {}
        for lease_id, revision in command.leases:
            lease = self._by_key.get(lease_id)
            if lease is not None and lease.revision == revision and lease.expires_us <= now_us:
                found[lease_id] = lease
        return list(found.values())

    # Change

    def keep(self, index: int, lease_id: int, ttl_ms: int, now_us: int) -> Lease:
        """Grant or renew a lease with the command of this index."""
        return self._put(Lease(lease_id, ttl_ms, now_us + ttl_ms * 1000, index))

    def end(self, lease_id: int) -> Lease:
        return self._by_key.pop(lease_id)


def check_ttl(ttl_ms: int) -> None:
    """Raise InvalidArgument if no lease may have this time to live."""
    if not 1 <= ttl_ms <= LEASE_TTL_MS_MAX:
        raise InvalidArgument(f"a time to live is 1 .. {LEASE_TTL_MS_MAX} ms", why=f"not {ttl_ms}")
