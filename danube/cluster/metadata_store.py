"""Keys, leases and watches for those who need no more of the metadata: the store's interface.

Writes:   durable and in one order with everything else when they return; they block.
Reads:    of what was applied here.  On a single host that is everything up to the last poll, and own
          writes; a member of a cluster may lag behind the leader.  ``read_barrier`` waits until reads see
          all that was acknowledged before the call.
Leases:   end by ``expire_leases``, which whoever leads calls now and then, so never too early.
Watches:  are asked (``take``), and cost nothing in between.  All share one bounded history; a watch that
          fell behind it, or asks for a revision before it, gets Resync: read again, then go on.
Revisions:  indexes of metadata commands, of any kind, so they have gaps.

Keys begin with a slash; a prefix ends with one.  An object belongs to one thread at a time.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final, NamedTuple, Protocol

from danube.core.cluster.agreement import AgreedTime
from danube.core.cluster.commands import (
    Allocated,
    AllocateId,
    CompareAndSet,
    DeleteKey,
    DeletePrefix,
    ExpireLeases,
    GrantLease,
    KeyDeleted,
    KeyPut,
    KeyRecord,
    Lease,
    PutKey,
    RenewLease,
    RevokeLease,
    Skipped,
)
from danube.core.cluster.keys import check_prefix
from danube.core.metadata.commands import Change
from danube.core.metadata.ports import Clock, Consensus
from danube.errors import InvalidArgument, WrongState, broken
from danube.host import clock
from danube.limits import LEASES_PER_COMMAND_MAX, MIB

HISTORY_EVENTS_MAX: Final = 4_096
HISTORY_BYTES_MAX: Final = 16 * MIB
_EVENT_BYTES: Final = 200


class Resync(NamedTuple):
    """Events are missing: read again what is watched, as it was at ``revision`` or later."""

    revision: int


class Compared(NamedTuple):
    """Whether the key was as expected and is set, and the key as it is now, as far as it is known here."""

    succeeded: bool
    record: KeyRecord | None


Event = KeyPut | KeyDeleted | Resync


class Watch(Protocol):
    def take(self) -> list[Event]:
        """What happened below the prefix since the last call, in order."""


class Leadership(Protocol):
    """Who decides, and how to see what it has decided."""

    @property
    def leading(self) -> bool:
        """Whether this member decides now, as far as it knows."""

    @property
    def leader_id(self) -> str:
        """The member that decides; "" while none is known."""

    def read_barrier(self) -> None:
        """Wait until all that was acknowledged before the call is applied here; raises Unavailable."""


class Alone:
    """The leadership of a host that has no cluster: its log is always up to date."""

    leading = True
    leader_id = ""

    def read_barrier(self) -> None:
        """There is nothing to wait for."""


class MetadataStore(Protocol):
    """What other parts may ask.  All raise CallerError for what is not allowed, else Unavailable."""

    @property
    def revision(self) -> int:
        """The last revision that reads here see."""

    def get(self, key: str) -> KeyRecord | None: ...

    def get_children(self, prefix: str) -> list[str]:
        """Keys below a prefix, in order."""

    def get_bulk(self, prefix: str) -> list[KeyRecord]:
        """Keys below a prefix with their values, in order."""

    def put(self, key: str, value: bytes, lease_id: int = 0) -> KeyRecord:
        """Set a key, which goes with a lease where one is named and else stays."""

    def put_with_ttl(self, key: str, value: bytes, ttl_ms: int) -> KeyRecord:
        """Set a key that is deleted when it is not put again in time."""

    def delete(self, key: str) -> KeyRecord | None:
        """Delete a key; return what it was, None where it was not there."""

    def delete_prefix(self, prefix: str) -> None: ...

    def compare_and_set(
        self, key: str, value: bytes | None, *, revision: int | None = None, expected: bytes | None = None,
        lease_id: int = 0, ttl_ms: int = 0,
    ) -> Compared:  # fmt: skip
        """Set a key (None: delete it) if it has this revision (0: is absent), or this value."""

    def allocate_id(self, counter: str) -> int:
        """A number that no one else got from this counter, from 1."""

    def grant_lease(self, ttl_ms: int) -> Lease: ...

    def renew_lease(self, lease_id: int) -> Lease:
        """Raises NotFound when it has ended."""

    def revoke_lease(self, lease_id: int) -> None: ...

    def expire_leases(self) -> int:
        """End what is over, where this member leads; return how many leases there were to end."""

    def watch(self, prefix: str, start_revision: int | None = None) -> Watch:
        """Events below a prefix from a revision on, else from now on."""

    def poll(self) -> None:
        """Take in what was agreed since, so that reads and watches see it."""

    def read_barrier(self) -> None:
        """As poll, and what was acknowledged anywhere before is among it."""

    @property
    def leadership(self) -> Leadership: ...


class ConsensusStore:
    """The store over any log that keeps the metadata machine.

    It takes the log's changes; ``on_changes`` gets all of them, whatever they are about.
    """

    def __init__(
        self,
        log: Consensus,
        *,
        leadership: Leadership | None = None,
        on_changes: Callable[[list[Change]], object] | None = None,
        time: Clock = clock,
        history_events_max: int = HISTORY_EVENTS_MAX,
    ) -> None:
        self._log = log
        self._leadership: Leadership = leadership or Alone()
        self._on_changes = on_changes
        self._clock = time
        self._time = AgreedTime()
        log.refresh()
        self._history = _History(log.version, history_events_max)

    @property
    def leadership(self) -> Leadership:
        return self._leadership

    @property
    def revision(self) -> int:
        return self._log.version

    # Read

    def get(self, key: str) -> KeyRecord | None:
        return self._log.state.cluster.keys.find(key)

    def get_children(self, prefix: str) -> list[str]:
        return [record.key for record in self.get_bulk(prefix)]

    def get_bulk(self, prefix: str) -> list[KeyRecord]:
        check_prefix(prefix)
        return self._log.state.cluster.keys.below(prefix)

    def watch(self, prefix: str, start_revision: int | None = None) -> Watch:
        check_prefix(prefix)
        self.poll()
        return _HistoryWatch(self._history, prefix, self._history.place_of(start_revision))

    def poll(self) -> None:
        changes = self._log.refresh()
        if changes:
            self._history.add(changes)
            if self._on_changes is not None:
                self._on_changes(changes)
        self._history.revision = self._log.version

    def read_barrier(self) -> None:
        self._leadership.read_barrier()
        self.poll()

    # Write

    def put(self, key: str, value: bytes, lease_id: int = 0) -> KeyRecord:
        return self._put(PutKey(key=key, value=value, lease_id=lease_id))

    def put_with_ttl(self, key: str, value: bytes, ttl_ms: int) -> KeyRecord:
        if ttl_ms < 1:
            raise InvalidArgument(f"a time to live of {ttl_ms} ms is none", hint="put keeps a key for good")
        return self._put(PutKey(key=key, value=value, ttl_ms=ttl_ms, now_us=self._now_us()))

    def _put(self, command: PutKey) -> KeyRecord:
        record = self._log.propose(command)
        self.poll()
        if not isinstance(record, KeyRecord):
            broken("a put gave no key", key=command.key)
        return record

    def delete(self, key: str) -> KeyRecord | None:
        record = self._log.propose(DeleteKey(key=key))
        self.poll()
        return record if isinstance(record, KeyRecord) else None

    def delete_prefix(self, prefix: str) -> None:
        self._log.propose(DeletePrefix(prefix=prefix))
        self.poll()

    def compare_and_set(
        self, key: str, value: bytes | None, *, revision: int | None = None, expected: bytes | None = None,
        lease_id: int = 0, ttl_ms: int = 0,
    ) -> Compared:  # fmt: skip
        if (revision is None) == (expected is None):
            raise InvalidArgument("a key is compared by its revision or by its value, one of them")
        command = CompareAndSet(
            key=key, value=value, revision=-1 if revision is None else revision, expected=expected or b"",
            lease_id=lease_id, ttl_ms=ttl_ms, now_us=self._now_us() if ttl_ms else 0,
        )  # fmt: skip
        try:
            record = self._log.propose(command)
        except WrongState:
            self.poll()
            return Compared(False, self.get(key))
        self.poll()
        return Compared(True, record if value is not None and isinstance(record, KeyRecord) else None)

    def allocate_id(self, counter: str) -> int:
        allocated = self._log.propose(AllocateId(counter=counter))
        self.poll()
        if not isinstance(allocated, Allocated):
            broken("a counter gave no number", counter=counter)
        return allocated.number

    # Leases

    def grant_lease(self, ttl_ms: int) -> Lease:
        lease_id = secrets.randbits(62) + 1
        return self._keep(GrantLease(lease_id=lease_id, ttl_ms=ttl_ms, now_us=self._now_us()))

    def renew_lease(self, lease_id: int) -> Lease:
        return self._keep(RenewLease(lease_id=lease_id, now_us=self._now_us()))

    def _keep(self, command: GrantLease | RenewLease) -> Lease:
        lease = self._log.propose(command)
        self.poll()
        if not isinstance(lease, Lease):
            broken("no lease was granted", lease_id=command.lease_id)
        return lease

    def revoke_lease(self, lease_id: int) -> None:
        self._log.propose(RevokeLease(lease_id=lease_id))
        self.poll()

    def expire_leases(self) -> int:
        self.poll()
        if not self._leadership.leading:
            return 0
        now_us = self._time_us()
        due = self._log.state.cluster.leases.due(now_us, LEASES_PER_COMMAND_MAX)
        if due:
            self._log.propose(ExpireLeases(leases=tuple(due), now_us=now_us))
            self.poll()
        return len(due)

    def _now_us(self) -> int:
        """What a command of leases says: nothing in a cluster, where only the leader's time counts."""
        now_us = self._time_us()
        return 0 if self._log.state.cluster.agreement.index else now_us

    def _time_us(self) -> int:
        agreed_us = self._log.state.cluster.agreement.now_us
        return self._time.now_us(agreed_us, self._clock.monotonic_ns(), self._clock.wall_us())


class _Noted(NamedTuple):
    revision: int
    event: KeyPut | KeyDeleted
    size_bytes: int


class _History:
    """The last events of all keys.  A *place* counts events; ``start`` is that of the oldest one kept."""

    def __init__(self, revision: int, events_max: int) -> None:
        self.revision = revision  # as far as events are known
        self._complete_after = revision  # all events of later revisions are here
        self._events: deque[_Noted] = deque()
        self._events_max = events_max
        self._bytes = 0
        self.start = 0

    @property
    def end(self) -> int:
        return self.start + len(self._events)

    def add(self, changes: list[Change]) -> None:
        skipped_revision = 0
        for change in changes:
            if isinstance(change, Skipped):
                skipped_revision = change.revision
                self._forget_all(skipped_revision)
            elif isinstance(change, KeyPut) and change.record.mod_revision > skipped_revision:
                self._note(change.record.mod_revision, change)
            elif isinstance(change, KeyDeleted) and change.revision > skipped_revision:
                self._note(change.revision, change)

    def _note(self, revision: int, event: KeyPut | KeyDeleted) -> None:
        size_bytes = len(event.record.value) + _EVENT_BYTES
        self._events.append(_Noted(revision, event, size_bytes))
        self._bytes += size_bytes
        while len(self._events) > self._events_max or (
            self._bytes > HISTORY_BYTES_MAX and len(self._events) > 1
        ):
            oldest = self._events.popleft()
            self._bytes -= oldest.size_bytes
            self._complete_after = oldest.revision
            self.start += 1

    def _forget_all(self, revision: int) -> None:
        self.start = self.end + 1  # so that a watch that was level is behind, too
        self._events.clear()
        self._bytes = 0
        self._complete_after = revision

    def place_of(self, revision: int | None) -> int:
        """The place of the first event of this revision or a later one; -1 where it is gone."""
        if revision is None:
            return self.end
        if revision <= self._complete_after:
            return -1
        earlier = sum(1 for noted in self._events if noted.revision < revision)
        return self.start + earlier

    def since(self, place: int) -> list[_Noted]:
        return list(islice(self._events, place - self.start, None))


class _HistoryWatch:
    def __init__(self, history: _History, prefix: str, place: int) -> None:
        self._history = history
        self._prefix = prefix
        self._place = place

    def take(self) -> list[Event]:
        """What happened below the prefix since the last call, in order."""
        place, self._place = self._place, self._history.end
        if place < self._history.start:
            return [Resync(self._history.revision)]
        return [
            noted.event
            for noted in self._history.since(place)
            if noted.event.record.key.startswith(self._prefix)
        ]
