"""The consistent-hash ring of a key-shared subscription.

Each consumer stands at 100 places, at the hashes of ``"<consumer_id>-<i>"``.  A key belongs to the
first consumer clockwise from its own hash whose filters it passes.  A consumer that comes or goes
moves only the keys of its own places.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from danube.core.batch.selection import ring_hash
from danube.core.dispatch.filters import KeyFilter

PLACES_PER_CONSUMER: Final = 100
NOBODY: Final = -2


class KeyRing:
    """Places of all consumers, sorted; a consumer is named by its seat.

    ``positions`` uint64[n] and ``seats`` int16[n] are replaced, never changed, when membership does.
    """

    __slots__ = ("_filters", "filtered", "positions", "seats")

    def __init__(self) -> None:
        self.positions: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        self.seats: npt.NDArray[np.int16] = np.empty(0, np.int16)
        self._filters: dict[int, KeyFilter] = {}
        self.filtered = False

    def add(self, seat: int, consumer_id: int, key_filter: KeyFilter) -> None:
        labels = (ring_hash(b"%d-%d" % (consumer_id, place)) for place in range(PLACES_PER_CONSUMER))
        places = np.sort(np.fromiter(labels, np.uint64, PLACES_PER_CONSUMER))
        where = np.searchsorted(self.positions, places)
        self.positions = np.insert(self.positions, where, places)
        self.seats = np.insert(self.seats, where, np.int16(seat))
        self._filters[seat] = key_filter
        self.filtered = self.filtered or not key_filter.everything

    def remove(self, seat: int) -> None:
        kept = self.seats != seat
        self.positions, self.seats = self.positions[kept], self.seats[kept]
        del self._filters[seat]
        self.filtered = any(not key_filter.everything for key_filter in self._filters.values())

    def seat_of(self, key_position: int, key: bytes | None) -> int:
        """The seat for a key, or NOBODY.  ``key`` may be None only while the ring is not filtered."""
        count = len(self.positions)
        if not count:
            return NOBODY
        start = int(np.searchsorted(self.positions, np.uint64(key_position)))
        if not self.filtered or key is None:
            return int(self.seats[start % count])
        refused: set[int] = set()
        for seat in np.concatenate((self.seats[start:], self.seats[:start])).tolist():
            if seat in refused:
                continue
            if self._filters[seat].passes(key):
                return int(seat)
            refused.add(seat)
            if len(refused) == len(self._filters):
                break
        return NOBODY
