"""Keys and counters inside the metadata machine: text keys that look like paths, and bytes as values.

A key begins with a slash and does not end with one; a prefix ends with one, so that ``/a/b/`` has
nothing to do with ``/a/bc``.  Every change has a revision, the index of its command.  A key that is
deleted and set again starts at version 1.  A counter gives each number once and is never deleted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import islice
from operator import attrgetter
from typing import Self

from danube.core.cluster.commands import Allocated, AllocateId, CompareAndSet, KeyRecord, PutKey
from danube.core.cluster.records import Records, no_room
from danube.errors import InvalidArgument, InvalidName, LimitExceeded, WrongState
from danube.limits import (
    COUNTERS_MAX,
    METADATA_KEY_BYTES_MAX,
    METADATA_KEYS_MAX,
    METADATA_VALUE_BYTES_MAX,
    METADATA_VALUES_BYTES_MAX,
)


def check_key(key: str) -> None:
    """Raise InvalidName where ``key`` is no key."""
    if not key.startswith("/") or key.endswith("/") or not _sound(key):
        raise InvalidName(
            f"key {key[:80]!r} is not valid",
            why=f"it begins with '/', does not end with it, and has up to {METADATA_KEY_BYTES_MAX} "
            "bytes of printable text",
        )


def check_prefix(prefix: str) -> None:
    """Raise InvalidName where ``prefix`` is no prefix of keys."""
    if not prefix.startswith("/") or not prefix.endswith("/") or not _sound(prefix):
        raise InvalidName(
            f"prefix {prefix[:80]!r} is not valid",
            why="it begins and ends with '/'; without the last one /a/b would mean /a/bc as well",
            hint=f"use {prefix[:80] + '/'!r}" if prefix.startswith("/") else "",
        )


def _sound(text: str) -> bool:
    return text.isprintable() and len(text.encode("utf-8", "surrogatepass")) <= METADATA_KEY_BYTES_MAX


class KeySpace(Records[str, KeyRecord]):
    """All keys and counters."""

    key_of = attrgetter("key")

    def __init__(self) -> None:
        super().__init__()
        self._sorted: list[str] = []
        self._counters: dict[str, int] = {}  # the last number given
        self._keys_by_lease: dict[int, dict[str, None]] = {}
        self.size_bytes = 0

    # Lookup

    def below(self, prefix: str, count_max: int | None = None) -> list[KeyRecord]:
        """Keys below a prefix that ends in a slash, in order; at most ``count_max``."""
        start = bisect_left(self._sorted, prefix)
        found: list[KeyRecord] = []
        for key in islice(self._sorted, start, None):
            if not key.startswith(prefix) or len(found) == count_max:
                break
            found.append(self._by_key[key])
        return found

    def records(self) -> list[KeyRecord]:
        """All keys in order."""
        return [self._by_key[key] for key in self._sorted]

    def of_lease(self, lease_id: int) -> list[str]:
        """Keys that go with a lease, in order."""
        return sorted(self._keys_by_lease.get(lease_id, ()))

    def counters(self) -> list[tuple[str, int]]:
        """Counters by name, with the last number of each."""
        return sorted(self._counters.items())

    def last_number(self, counter: str) -> int:
        """The last number that a counter gave; 0 when none."""
        return self._counters.get(counter, 0)

    # Check

    def check_put(self, command: PutKey | CompareAndSet) -> None:
        """Raise a CallerError if the value may not be set."""
        check_key(command.key)
        value = command.value or b""
        if len(value) > METADATA_VALUE_BYTES_MAX:
            raise LimitExceeded(
                f"the value of {command.key} has {len(value)} bytes",
                why=f"the limit is {METADATA_VALUE_BYTES_MAX}",
                limit=METADATA_VALUE_BYTES_MAX,
            )
        if command.value is None:
            return
        former = self._by_key.get(command.key)
        if former is None and len(self._by_key) >= METADATA_KEYS_MAX:
            raise no_room("keys", METADATA_KEYS_MAX)
        grown = len(value) - len(former.value) if former else len(value) + len(command.key)
        if self.size_bytes + grown > METADATA_VALUES_BYTES_MAX:
            raise no_room("keys", METADATA_VALUES_BYTES_MAX, of="bytes")

    def check_allocate(self, command: AllocateId) -> None:
        check_key(command.counter)
        if command.counter not in self._counters and len(self._counters) >= COUNTERS_MAX:
            raise no_room("counters", COUNTERS_MAX)

    def refuse_compare(self, command: CompareAndSet) -> None:
        """Raise WrongState, with the key's revision as a fact, where the key is not as expected."""
        record = self._by_key.get(command.key)
        revision = record.mod_revision if record else 0
        if command.revision < -1:
            raise InvalidArgument("a revision is at least 0", hint="-1 compares the value")
        if command.revision == -1:
            as_expected = record is not None and record.value == command.expected
        else:
            as_expected = command.revision == revision
        if not as_expected:
            raise WrongState(
                f"key {command.key} is not as expected",
                why=f"it has revision {revision}" if record else "it is not there",
                hint="read it again",
                revision=revision,
            )

    # Change

    def put(self, index: int, key: str, value: bytes, lease_id: int) -> KeyRecord:
        """Set a key with the command of this index."""
        former = self._by_key.get(key)
        if former is None:
            record = KeyRecord(key, value, 1, index, index, lease_id)
        else:
            record = KeyRecord(key, value, former.version + 1, former.create_revision, index, lease_id)
        return self._put(record)

    def _put(self, record: KeyRecord) -> KeyRecord:
        former = self._by_key.get(record.key)
        if former is None:
            insort(self._sorted, record.key)
            self.size_bytes += len(record.key) + len(record.value)
        else:
            self.size_bytes += len(record.value) - len(former.value)
            self._detach(former)
        self._by_key[record.key] = record
        if record.lease_id:
            self._keys_by_lease.setdefault(record.lease_id, {})[record.key] = None
        return record

    def _detach(self, record: KeyRecord) -> None:
        if record.lease_id:
            keys = self._keys_by_lease[record.lease_id]
            del keys[record.key]
            if not keys:
                del self._keys_by_lease[record.lease_id]

    def delete(self, key: str) -> KeyRecord:
        """Delete a key that is there."""
        record = self._by_key.pop(key)
        del self._sorted[bisect_left(self._sorted, key)]
        self.size_bytes -= len(record.key) + len(record.value)
        self._detach(record)
        return record

    def allocate(self, counter: str) -> Allocated:
        number = self.last_number(counter) + 1
        self._counters[counter] = number
        return Allocated(counter, number)

    # Copies

    def copy(self) -> Self:
        other = super().copy()
        other._sorted, other._counters = list(self._sorted), dict(self._counters)
        other._keys_by_lease = {lease_id: dict(keys) for lease_id, keys in self._keys_by_lease.items()}
        other.size_bytes = self.size_bytes
        return other

    def load(self, records: Iterable[KeyRecord], counters: Iterable[tuple[str, int]] = ()) -> None:
        """Load the keys and counters of a snapshot; keys are sorted."""
        for record in records:
            self._put(record)
        self._counters = dict(counters)
