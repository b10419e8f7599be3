"""Next steps of the mover for a partition: upload, merge, delete.  Plain values in, decisions out.

The caller lists local files and objects, calls a function of this module, and carries out its answer; this
module remembers nothing.  Offsets are half-open, times are microseconds of 1970, sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from danube.core.partition.compaction_plan import CompactionSettings

SECOND_US: Final = 1_000_000
MERGE_COUNT_MIN: Final = 16  # so many small segments are merged although together they are small still
MERGE_COUNT_MAX: Final = 4_096  # sources of one merge: a bound of its work
MANIFESTS_KEPT: Final = 3
RETRY_MIN_US: Final = SECOND_US // 2
RETRY_MAX_US: Final = 60 * SECOND_US
OUTAGE_FAILURES_MIN: Final = 8
OUTAGE_PROBE_MAX_US: Final = 10 * SECOND_US


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """Configured settings of the mover, in the units of this module."""

    upload_parallel: int = 4
    merge_below: int = 64 << 20  # 0: nothing is merged
    merge_to: int = 256 << 20
    merge_after_us: int = 600 * SECOND_US  # a segment is left alone for so long after its upload
    orphan_age_us: int = 22 * 3_600 * SECOND_US  # with the rounds of an hour less than a day
    reader_grace_us: int = 600 * SECOND_US  # a reader may use an older manifest for so long
    compaction: CompactionSettings = field(default_factory=CompactionSettings)


class LocalSegment(NamedTuple):
    """One segment file of the partition's directory; ``sealed`` is False for one without a footer."""

    base_offset: int
    end_offset: int
    size_bytes: int
    first_append_us: int
    sealed: bool


class Backlog(NamedTuple):
    """Segments to upload, in order; ``flaw`` says in words why later ones have to wait, or is empty."""

    segments: list[LocalSegment]
    flaw: str


def backlog(local: Iterable[LocalSegment], uploaded_end: int) -> Backlog:
    """Return the sealed segments that are not uploaded, up to the first one that is not sealed.

    A segment behind an unsealed one waits, although it could be uploaded: the manifest would state a hole
    that does not exist.  A segment that begins below ``uploaded_end`` and ends above it was cut differently
    from the uploaded one.  Its records would be in the log twice, so it stops all uploads until a human
    decides.
    """
    found: list[LocalSegment] = []
    ordered = sorted(local)
    for index, segment in enumerate(ordered):
        # Where an unsealed one ends only the next one's beginning tells.
        next_base = ordered[index + 1].base_offset if index + 1 < len(ordered) else uploaded_end + 1
        if (segment.end_offset if segment.sealed else next_base) <= uploaded_end:
            continue
        if not segment.sealed:
            break
        if segment.base_offset < uploaded_end:
            return Backlog(found, f"segment {segment.base_offset} overlaps what is uploaded: {uploaded_end}")
        if found and segment.base_offset < found[-1].end_offset:
            return Backlog(found, f"segment {segment.base_offset} overlaps the one before it")
        if segment.end_offset > segment.base_offset:
            found.append(segment)
    return Backlog(found, "")


class Waiting(NamedTuple):
    """A partition with something to upload; ``oldest_us`` is of its next segment not yet being uploaded."""

    name: Any
    oldest_us: int
    running: int  # uploads of it that are under way


def choose(waiting: Iterable[Waiting], slots: int) -> list[Any]:
    """Names of at most ``slots`` partitions that may begin one upload each.

    The partition with the fewest uploads under way comes first, so that one long backlog does not delay the
    others.  Among equals the one with the oldest record comes first.
    """
    ordered = sorted(waiting, key=lambda one: (one.running, one.oldest_us))
    return [one.name for one in ordered[: max(0, slots)]]


def installable(in_order: Sequence[int], finished: Collection[int]) -> int:
    """How many segments, from the first on, are uploaded and verified; both hold base offsets."""
    count = 0
    for base_offset in in_order:
        if base_offset not in finished:
            break
        count += 1
    return count


def merge_next(entries: NDArray[np.void], now_us: int, settings: TierSettings) -> tuple[int, int] | None:
    """First and last index (included) of the oldest entries worth merging; None when there are none.

    ``entries`` has the fields base_offset, end_offset, size_bytes and uploaded_us.  Merged are adjacent
    entries without a hole between them, each smaller than merge_below and uploaded long enough ago,
    together at most merge_to.  Fewer than MERGE_COUNT_MIN wait for more unless they make up merge_below
    or can never become more; so a record is copied only a few times in its life.
    """
    if len(entries) < 2 or not settings.merge_below:
        return None
    sizes = entries["size_bytes"].astype(np.int64)
    settled = entries["uploaded_us"] <= now_us - settings.merge_after_us
    small = (sizes < settings.merge_below) & settled
    joined = np.zeros(len(entries), bool)  # to the one before
    joined[1:] = entries["base_offset"][1:] == entries["end_offset"][:-1]
    pairs = np.flatnonzero(small[1:] & small[:-1] & joined[1:])
    stop = 0
    for first in pairs.tolist():
        if first < stop:
            continue
        stop, total = _run_end(first, sizes, small, joined, settings)
        count = stop - first
        last = stop == len(entries) or (not settled[stop] and sizes[stop] < settings.merge_below)
        grown = total >= settings.merge_below or count >= MERGE_COUNT_MIN
        if count >= 2 and (grown or not last):
            return first, stop - 1
    return None


def _run_end(
    first: int,
    sizes: NDArray[np.int64],
    small: NDArray[np.bool_],
    joined: NDArray[np.bool_],
    settings: TierSettings,
) -> tuple[int, int]:
    """Index behind the run that begins at ``first``, and the bytes of the run."""
    total = int(sizes[first])
    index = first + 1
    while index < len(sizes) and index - first < MERGE_COUNT_MAX and small[index] and joined[index]:
        if total + int(sizes[index]) > settings.merge_to:
            break
        total += int(sizes[index])
        index += 1
    return index, total


class ListedObject(NamedTuple):
    """A segment object as the store lists it."""

    key: str
    base_offset: int
    modified_us: int


class Sweep(NamedTuple):
    """``doomed`` may be deleted now; ``unnamed_since`` is the argument of the next round."""

    doomed: list[str]
    unnamed_since: dict[str, int]


def sweep(
    listed: Iterable[ListedObject],
    named: Collection[str],
    uploaded_end: int,
    unnamed_since: Mapping[str, int],
    now_us: int,
    settings: TierSettings,
    count_max: int,
) -> Sweep:
    """Find unneeded segment objects: in no manifest, old, and unnamed for longer than readers may lag.

    ``unnamed_since`` holds the keys that were found unnamed before, with the time.  It also holds those that
    this owner removed from its manifest; for them the object's age does not matter.  An object at or above
    ``uploaded_end`` stays, because an upload may be about to name it.
    """
    doomed: list[str] = []
    waiting: dict[str, int] = {}
    for one in listed:
        if one.key in named or one.base_offset >= uploaded_end:
            continue
        since = unnamed_since.get(one.key)
        if since is None and one.modified_us > now_us - settings.orphan_age_us:
            continue
        since = now_us if since is None else since
        if now_us - since >= settings.reader_grace_us and len(doomed) < count_max:
            doomed.append(one.key)
        elif len(waiting) < count_max:
            waiting[one.key] = since
    return Sweep(doomed, waiting)


def due(dropped: Mapping[str, int], now_us: int, settings: TierSettings, count_max: int) -> list[str]:
    """Return the objects that left the manifest long enough ago that no reader uses them any more."""
    old = [key for key, since_us in dropped.items() if now_us - since_us >= settings.reader_grace_us]
    return old[:count_max]


def superseded(keys: Sequence[str]) -> list[str]:
    """Return the keys of manifests (or cursor copies), ascending, that are not kept."""
    return list(keys[:-MANIFESTS_KEPT])


def retry_delay_us(failures: int, chance: float) -> int:
    """How long to wait after the n-th failure in a row: full jitter below a doubling bound, never giving up.

    ``chance`` is in 0 .. 1.  A floor keeps a partition from trying again at once.
    """
    bound = min(RETRY_MAX_US, RETRY_MIN_US << min(max(failures, 1), 16))
    return RETRY_MIN_US // 2 + int((bound - RETRY_MIN_US // 2) * chance)


class OutageGate:
    """Lets one call at a time try a store that has failed several times in a row, at growing intervals.

    Without it every partition would knock on its own, and a broker with thousands of them would be a storm.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._told_us = -RETRY_MAX_US
        self._open_us = 0
        self._probing = False

    @property
    def closed(self) -> bool:
        return self._failures >= OUTAGE_FAILURES_MIN

    def admit(self, now_us: int) -> bool:
        """Whether a call may begin; each admitted one ends with succeeded() or failed()."""
        if not self.closed:
            return True
        if self._probing or now_us < self._open_us:
            return False
        self._probing = True
        return True

    def unused(self) -> None:
        """Note that the admitted attempt was not made."""
        self._probing = False

    def succeeded(self, now_us: int) -> bool:
        """Note a success; True when it ends an outage and all waiting work should be tried now.

        Not more often than each of them tries by itself, so a store that comes and goes gets at most twice
        the requests.
        """
        over = self.closed and not 0 <= now_us - self._told_us < RETRY_MAX_US
        self._failures = 0
        self._probing = False
        if over:
            self._told_us = now_us
        return over

    def failed(self, now_us: int, chance: float) -> None:
        """The store itself was the reason; ``chance`` as in retry_delay_us."""
        self._failures += 1
        self._probing = False
        beyond = self._failures - OUTAGE_FAILURES_MIN
        if beyond >= 0:
            bound = min(OUTAGE_PROBE_MAX_US, RETRY_MIN_US << min(beyond, 16))
            self._open_us = now_us + bound // 2 + int(bound * chance / 2)
