"""The keys of a key-shared window: the home of each, the consumer that has it, counts of its records.

An open hash table over plain arrays, filled to a half at most; a key's place in it is its number
until the table is built anew (then the window's numbers are changed with it).

    hash      uint64   the key's hash; its low 32 bits are its position on the ring
    used      uint8
    route     int16    seat that the ring names now; UNKNOWN: filters not asked yet; NOBODY: none match
    owner     int16    seat of its last grant: while anything is in flight, the only one to get more
    counters  int32[9] records of the window by state (ACKED is not counted)

A key that has no record in the window may be forgotten at any time; it is then only found anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from danube.core import kernels
from danube.core.dispatch.grants import Offsets
from danube.core.dispatch.key_ring import NOBODY, KeyRing
from danube.core.kernels import cursor
from danube.errors import broken

UNKNOWN: Final = -1
REFUSED: Final = -1
SKIPPED: Final = -2
_ACKED, _IN_FLIGHT, _STATES = 1, 2, 9
_CAPACITY_FIRST: Final = 1024
_KEYS_REMEMBERED_MAX: Final = 65_536
_KEY_BYTES_REMEMBERED_MAX: Final = 16 * 1024 * 1024

Keys = npt.NDArray[np.int32]
Seats = npt.NDArray[np.int16]
Hashes = npt.NDArray[np.uint64]


def cursor_kernels() -> Any:
    """The kernels, or the functions that they are compiled from."""
    return kernels.compiled if kernels.available else cursor


class KeyTable:
    """Keys of one subscription, routed by its ring."""

    def __init__(self, ring: KeyRing) -> None:
        self._ring = ring
        self._remembered: dict[int, bytes] = {}
        self._remembered_bytes = 0
        self._stale = False
        self.key_count = 0
        self._allocate(_CAPACITY_FIRST)

    def _allocate(self, capacity: int) -> None:
        self.hash: npt.NDArray[np.uint64] = np.zeros(capacity, np.uint64)
        self.used: npt.NDArray[np.uint8] = np.zeros(capacity, np.uint8)
        self.route: Seats = np.full(capacity, UNKNOWN, np.int16)
        self.owner: Seats = np.full(capacity, -1, np.int16)
        self.counters: npt.NDArray[np.int32] = np.zeros((capacity, _STATES), np.int32)

    def reset(self) -> None:
        """Forget every key."""
        self.key_count = 0
        self._allocate(_CAPACITY_FIRST)

    def ring_changed(self) -> None:
        """Consumers came or went: ask the ring again before the next use."""
        self._stale = True

    def refresh(self) -> None:
        """Route every key anew if the ring has changed."""
        if not self._stale:
            return
        self._stale = False
        ring = self._ring
        if not len(ring.positions):
            self.route[:] = NOBODY
        elif ring.filtered:
            self.route[:] = UNKNOWN
        else:
            where = np.searchsorted(ring.positions, self.hash & np.uint64(0xFFFFFFFF))
            where[where == len(ring.positions)] = 0
            self.route[:] = ring.seats[where]

    # -- keys of new records -----------------------------------------------------------------------

    def find(self, hashes: Hashes, renumber: Callable[[Keys], None]) -> Keys:
        """Numbers of the keys with these hashes, int32[n]; new keys are added.

        ``renumber`` gets the new number by old number when the table is built anew.
        """
        found = np.empty(len(hashes), np.int32)
        start = 0
        while True:
            stop = self._find_or_add(hashes, start, len(self.hash) // 2 - self.key_count, found)
            if stop == len(hashes):
                return found
            moved = self._rebuild(found[:stop])
            renumber(moved)
            found[:stop] = moved[found[:stop]]
            start = stop

    def _find_or_add(self, hashes: Hashes, start: int, room: int, found: Keys) -> int:
        """Write numbers to ``found`` from ``start`` on; return where more than ``room`` would be new."""
        ring = self._ring
        added = np.zeros(1, np.int64)
        stop: int = cursor_kernels().find_keys(
            hashes, start, self.hash, self.used, self.route, room,
            ring.positions, ring.seats, ring.filtered, found, added,
        )  # fmt: skip
        self.key_count += int(added[0])
        return stop

    def _rebuild(self, needed: Keys) -> Keys:
        """Keep keys with records in the window and those of ``needed``, in a table of fitting size."""
        records = self.counters.sum(axis=1)
        records[needed] = 1
        kept = np.flatnonzero(records)
        hashes, counters = self.hash[kept], self.counters[kept]
        route, owner = self.route[kept], self.owner[kept]
        moved = np.full(len(self.hash), -1, np.int32)
        self.key_count = 0
        # At most an eighth full, so that building anew is rare even when every key is a new one.
        self._allocate(max(_CAPACITY_FIRST, 1 << (8 * len(kept)).bit_length()))
        places = np.empty(len(kept), np.int32)
        self._find_or_add(hashes, 0, len(kept), places)
        moved[kept] = places
        self.route[places], self.owner[places], self.counters[places] = route, owner, counters
        return moved

    # -- filters -----------------------------------------------------------------------------------

    def resolve(self, keys: Keys, offsets: Offsets, key_of: Callable[[int], bytes] | None) -> None:
        """Ask the filters where keys with an UNKNOWN route go; one question for each key."""
        unknown = np.flatnonzero(self.route[keys] == UNKNOWN)
        if not len(unknown):
            return
        for index in unknown.tolist():
            number = keys[index]
            if self.route[number] != UNKNOWN:
                continue
            value = int(self.hash[number])
            key = self._remembered.get(value)
            if key is None and self._ring.filtered:
                if key_of is None:
                    continue
                key = key_of(int(offsets[index]))
                self._remember(value, key)
            self.route[number] = self._ring.seat_of(value & 0xFFFFFFFF, key)

    def _remember(self, value: int, key: bytes) -> None:
        full = len(self._remembered) >= _KEYS_REMEMBERED_MAX
        if full or self._remembered_bytes + len(key) > _KEY_BYTES_REMEMBERED_MAX:
            self._remembered.clear()
            self._remembered_bytes = 0
        self._remembered[value] = key
        self._remembered_bytes += len(key)

    # -- records -----------------------------------------------------------------------------------

    def assign(
        self, keys: Keys, old: int, limit: int, credit: npt.NDArray[np.int64], ready: npt.NDArray[np.uint8]
    ) -> Seats:
        """Seat for each record (their keys in offset order; all in state ``old``), REFUSED or SKIPPED.

        A new record is refused while an earlier one of its key waits, so a key's first deliveries
        keep their order; any is refused while its key is in flight at another seat than the ring's
        or that seat cannot take it.  At most ``limit`` are granted.  ``credit`` is spent.
        """
        seats = np.empty(len(keys), np.int16)
        assign = cursor_kernels().assign_keys
        assign(keys, old, limit, self.route, self.owner, self.counters, credit, ready, seats)
        return seats

    def move(self, keys: Keys, old: npt.NDArray[np.uint8], new: int) -> bool:
        """Count records that went from states ``old`` (uint8[n]) to ``new``; True if others may go on."""
        return bool(cursor_kernels().move_keys(keys, old, new, self.counters))

    def check(self, keys: Keys, states: npt.NDArray[np.uint8], seats: Seats) -> None:
        """Raise InvariantBroken where counters differ from the window or a key is in flight at two seats."""
        counted = np.zeros_like(self.counters)
        open_records = states != _ACKED
        np.add.at(counted, (keys[open_records], states[open_records]), 1)
        if not np.array_equal(counted, self.counters):
            broken("a key's counters differ from its records")
        in_flight = states == _IN_FLIGHT
        if (self.owner[keys[in_flight]] != seats[in_flight]).any():
            broken("a key is in flight at two consumers")
        if int(self.used.sum()) != self.key_count or self.key_count * 2 > len(self.hash):
            broken("the key table is counted wrongly", keys=self.key_count, size=len(self.hash))
