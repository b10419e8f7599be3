"""Plan of key compaction: when a log is worth it, and which segments.  Plain values in, decisions out.

    | compacted before (clean) | sealed since (dirty) | too young | newest sealed | active |
      first ................... dirty ............... stop

Offsets are half-open, times are microseconds of 1970, sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

SECOND_US: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionSettings:
    """Configured settings of key compaction, in the units of this module."""

    dirty_percent: int = 50  # of the bytes of clean and dirty segments together
    dirty_bytes_min: int = 1 << 20
    dirty_age_us: int = 86_400 * SECOND_US  # older dirty records are compacted, however few they are
    lag_us: int = 60 * SECOND_US  # younger records are left alone
    roll_us: int = 600 * SECOND_US  # an active segment with records is ended at this age
    target_bytes: int = 256 << 20  # of the segments that become one
    dirty_bytes_max: int = 4 << 30  # of one round
    keys_max: int = 1_000_000  # in memory at a time


class Piece(NamedTuple):
    """A sealed segment in either tier.  ``whole``: no record is missing in it but by compaction."""

    base_offset: int
    end_offset: int
    size_bytes: int
    record_count: int
    last_append_us: int
    compacted: bool
    whole: bool


class CompactionRound(NamedTuple):
    """Segments ``first .. stop`` are to be compacted; those below ``dirty`` were before.

    ``from_start``: nothing lies before ``first``, and all keys can be expected to fit into memory.
    """

    first: int
    dirty: int
    stop: int
    from_start: bool


def next_round(pieces: Sequence[Piece], now_us: int, settings: CompactionSettings) -> CompactionRound | None:
    """Choose the sealed segments to compact next, given oldest first; None when no round is worth its work.

    The newest segment and young ones are left alone.  If records are missing by damage, only segments behind
    the damage are compacted.
    """
    stop = _old_enough(pieces, now_us, settings)
    first = _unbroken_from(pieces, stop)
    dirty = next((index for index in range(first, stop) if not pieces[index].compacted), stop)
    if dirty == stop:
        return None
    sizes = [piece.size_bytes for piece in pieces]
    clean_bytes, dirty_bytes = sum(sizes[first:dirty]), sum(sizes[dirty:stop])
    aged = pieces[dirty].last_append_us < now_us - settings.dirty_age_us
    much = dirty_bytes * 100 >= (clean_bytes + dirty_bytes) * settings.dirty_percent
    if not (aged or (much and dirty_bytes >= settings.dirty_bytes_min)):
        return None
    while stop - dirty > 1 and dirty_bytes > settings.dirty_bytes_max:
        stop -= 1
        dirty_bytes -= sizes[stop]
    records = sum(piece.record_count for piece in pieces[first:dirty])
    return CompactionRound(first, dirty, stop, first == 0 and records <= settings.keys_max // 2)


def _old_enough(pieces: Sequence[Piece], now_us: int, settings: CompactionSettings) -> int:
    """Index behind the last segment that may be compacted."""
    for index, piece in enumerate(pieces[:-1]):
        if piece.last_append_us > now_us - settings.lag_us:
            return index
    return max(0, len(pieces) - 1)


def _unbroken_from(pieces: Sequence[Piece], stop: int) -> int:
    """Index of the first segment from which on no record is missing up to ``stop``, but by compaction."""
    first = stop
    while first and pieces[first - 1].whole:
        if first < stop and pieces[first - 1].end_offset != pieces[first].base_offset:
            break
        first -= 1
    return first


def group_end(
    sizes: Sequence[int], ends_well: Sequence[bool], start: int, settings: CompactionSettings
) -> int | None:
    """Index behind the segments from ``start`` on that become one; None if nothing may end it any more.

    ``ends_well``: whether a segment may be the last one, because the state of the producers is in it.
    """
    total, found = 0, None
    for index in range(start, len(sizes)):
        total += sizes[index]
        if found is not None and total > settings.target_bytes:
            break
        if ends_well[index]:
            found = index + 1
    return found
