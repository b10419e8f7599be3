"""Shares of the brokers of a cluster in what a namespace or tenant may take together.

Every broker computes the same shares from the same load reports, which are metadata; nobody has to decide or
to tell.  A broker that has taken less than it might keeps what it takes and a tenth more.  One that was held
back grows by a quarter, or by a tenth of the limit, from report to report.  What is left goes to those that
are held back, or to all if nobody is.  A small part is divided among all, so that new demand can begin
anywhere.  All shares together are the limit, whatever the reports say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

FLOOR: Final = 20  # one part in so many is divided among all brokers alike


class Demand(NamedTuple):
    """A broker's report of a sum: amounts a second, whether it was held back, and stored bytes."""

    records: float = 0.0
    size_bytes: float = 0.0
    held: bool = False
    stored_bytes: int = 0


NOTHING: Final = Demand()


def key_of(name: str) -> int:
    """The number that stands for a sum in shared memory and in load reports; never 0."""
    digest = blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


def share(limit: int, broker_id: int, taken: Mapping[int, tuple[float, bool]]) -> int:
    """The share of one of the brokers; ``taken``: by broker, how much a second, and whether it was held back.

    At least 1 of a limit that is not 0.
    """
    if not limit or len(taken) < 2 or broker_id not in taken:
        return limit
    floor = limit / FLOOR / len(taken)
    ids = sorted(taken)
    wanted = [_wanted(limit, *taken[one]) for one in ids]
    granted = _filled(limit - floor * len(ids), wanted)
    rest = limit - floor * len(ids) - sum(granted)
    held = [taken[one][1] for one in ids]
    heirs = held if any(held) else [True] * len(ids)
    place = ids.index(broker_id)
    more = max(0.0, rest) / sum(heirs) if heirs[place] else 0.0
    return max(1, int(floor + granted[place] + more))


def _wanted(limit: int, taken: float, held: bool) -> float:
    return max(taken * 1.25, taken + limit / 10) if held else taken * 1.1


def _filled(amount: float, wanted: Sequence[float]) -> list[float]:
    """Give everybody what is wanted; where that is too much, nobody more than others who want more."""
    granted = [0.0] * len(wanted)
    left = amount
    for count, place in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        granted[place] = min(wanted[place], left / (len(wanted) - count))
        left -= granted[place]
    return granted
