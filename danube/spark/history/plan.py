"""Plan of a read: from a selection to tasks, each with the bytes of its segments.

The driver knows segments by name, size and offsets alone (:mod:`danube.spark.history.places`).  It cuts at
any offset; a task that begins inside a segment finds its batch through the segment's own index.  Small
segments are packed together, also of several partitions, and large ones are cut, so that no task has more
than about one and a half times the bytes of the average and the number of tasks stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from danube.errors import Damage, DanubeError, OffsetOutOfRange, Unavailable
from danube.limits import MIB
from danube.spark.history.segments import PartitionHistory, SegmentRef
from danube.wal.segments.holes import Hole, HoleKind

SPLIT_BYTES: Final = 128 * MIB  # as Spark cuts files
PIECE_BYTES_MAX: Final = 128 * MIB  # of one read: a task holds two
SPLITS_MAX: Final = 10_000
EXPIRED: Final = "the records have expired"
WAITING: Final = "only the disk of a broker that is away may have them"
GIVEN_UP: Final = "an operator gave them up: the disk that may have had them was lost"
_SLACK: Final = 0.25  # a segment that is this little too large for a split is not cut


class Piece(NamedTuple):
    """Records ``start .. end`` of one segment, of about ``bytes`` bytes.

    ``place``: index into the list of places.  ``whole``: all of the segment's batches are wanted.
    """

    place: int
    segment: SegmentRef
    start: int
    end: int
    bytes: int

    @property
    def whole(self) -> bool:
        return self.start <= self.segment.base_offset and self.end >= self.segment.end_offset


class Lost(NamedTuple):
    """Records ``start .. end`` that are nowhere any more, and why."""

    topic: str
    partition: int
    start: int
    end: int
    why: str


class Run(NamedTuple):
    """Consecutive records ``start .. end`` of one partition: ``pieces`` in the order of their offsets.

    With ``physical``, the partition's name at the broker, they are asked of it, and there are no pieces.
    """

    topic: str
    topic_id: int
    partition: int
    start: int
    end: int
    pieces: tuple[Piece, ...]
    physical: str = ""

    @property
    def name(self) -> str:
        return f"{self.topic} partition {self.partition}"

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)


class Split(NamedTuple):
    """Runs that one task reads, in this order."""

    runs: tuple[Run, ...]

    @property
    def bytes(self) -> int:
        return sum(run.bytes for run in self.runs)


class Selection(NamedTuple):
    """Records ``start .. end`` of a partition, whose histories in all places are at hand."""

    topic: str
    topic_id: int
    partition: int
    start: int
    end: int
    histories: tuple[PartitionHistory, ...]


def pieces_of(selection: Selection) -> tuple[list[Piece], list[Lost]]:
    """Return the segments that hold a selection's records, each record once, and the lost ranges.

    If two places hold the same records, the first place is read.  Offsets below every place's start or
    between segments are lost.  Offsets behind the last segment are not, and neither are offsets that a
    manifest names as unused.
    """
    pieces: list[Piece] = []
    lost: list[Lost] = []
    at, ended = selection.start, max((each.end_offset for each in selection.histories), default=0)
    end = min(selection.end, ended)
    holes = sorted(hole for history in selection.histories for hole in history.holes)
    places = [_Walk(number, history.segments) for number, history in enumerate(selection.histories)]
    while at < end:
        holder = next((walk for walk in places if walk.holds(at)), None)
        if holder is None:
            following = min((walk.next_start(end) for walk in places), default=end)
            hole = next((one for one in holes if one.start <= at < one.end), None)
            if hole is not None:
                following = min(following, hole.end)
            else:
                following = min([following, *(one.start for one in holes if one.start > at)])
            why = _why(selection, following, hole)
            if why:
                lost.append(Lost(selection.topic, selection.partition, at, following, why))
            at = following
            continue
        segment = holder.segment
        stop = min(segment.end, end)
        for walk in places[: holder.number]:  # a place before this one takes over where it can
            stop = min(stop, walk.next_start(stop))
        pieces.append(Piece(holder.number, segment, at, stop, _bytes_between(segment, at, stop)))
        at = stop
    return pieces, lost


class _Walk:
    """One place's segments, passed in order."""

    def __init__(self, number: int, segments: Sequence[SegmentRef]) -> None:
        self.number = number
        self._segments = segments
        self._next = 0

    @property
    def segment(self) -> SegmentRef:
        return self._segments[self._next]

    def holds(self, offset: int) -> bool:
        segments = self._segments
        while self._next < len(segments) and segments[self._next].end <= offset:
            self._next += 1
        return self._next < len(segments) and segments[self._next].start <= offset

    def next_start(self, otherwise: int) -> int:
        """Where the next segment begins, once holds() said that none is here; at most ``otherwise``."""
        if self._next < len(self._segments):
            return min(self._segments[self._next].start, otherwise)
        return otherwise


def _why(selection: Selection, following: int, hole: Hole | None) -> str:
    """Why records are in no segment; empty if there never were any."""
    if hole is None:
        return EXPIRED if _expired(selection, following) else "a segment is missing"
    return why_in_hole(hole)


def why_in_hole(hole: Hole) -> str:
    """Why there are no records at these offsets; empty if there never were any."""
    return {HoleKind.OPEN: WAITING, HoleKind.UNUSED: "", HoleKind.GIVEN_UP: GIVEN_UP}[hole.kind]


def _expired(selection: Selection, following: int) -> bool:
    return all(following <= history.start_offset for history in selection.histories if history.segments)


def _bytes_between(segment: SegmentRef, start: int, end: int) -> int:
    """Bytes of the batches that hold ``start .. end``, as if all records were of one size."""
    whole = segment.end_offset - segment.base_offset
    if end - start >= whole:
        return segment.data_end
    return max(1, segment.data_end * (end - start) // whole)


def cut(piece: Piece, bytes_max: int) -> list[Piece]:
    """The piece in equal parts of at most ``bytes_max`` bytes each."""
    count = min(-(-piece.bytes // bytes_max), piece.end - piece.start)
    if count <= 1:
        return [piece]
    records = piece.end - piece.start
    bounds = [piece.start + records * number // count for number in range(count + 1)]
    return [
        piece._replace(start=first, end=last, bytes=max(1, piece.bytes * (last - first) // records))
        for first, last in pairwise(bounds)
    ]


def target_bytes(total: int, split_bytes: int, splits_min: int, splits_max: int) -> int:
    """How many bytes a split aims at."""
    target = min(split_bytes, -(-total // splits_min)) if splits_min > 0 else split_bytes
    return max(target, -(-total // splits_max), 1)


def plan_splits(
    selected: Iterable[tuple[Selection, Sequence[Piece]]],
    *,
    split_bytes: int = SPLIT_BYTES,
    splits_min: int = 0,
    splits_max: int = SPLITS_MAX,
    mixed: bool = True,
) -> list[Split]:
    """Pack the pieces of all selections into splits.

    ``splits_min`` is a wish that holds as far as there are records; ``mixed``: several partitions may
    share a split.  Inside a split, and from one split of a partition to the next, offsets ascend.
    """
    known = list(selected)
    total = sum(piece.bytes for _, pieces in known for piece in pieces)
    packer = _Packer(target_bytes(total, split_bytes, splits_min, splits_max), mixed)
    for selection, pieces in known:
        packer.begin(selection)
        for piece in pieces:
            packer.add(piece)
        packer.end()
    return packer.finish()


class _Packer:
    """Fills one split after the other."""

    def __init__(self, target: int, mixed: bool) -> None:
        self._target = target
        self._mixed = mixed
        self._splits: list[Split] = []
        self._runs: list[Run] = []
        self._pieces: list[Piece] = []
        self._bytes = 0
        self._selection: Selection | None = None

    def begin(self, selection: Selection) -> None:
        self._selection = selection

    def add(self, piece: Piece) -> None:
        """Append a piece, cut where the split is full."""
        while True:
            room = self._target - self._bytes
            if piece.bytes <= room + self._target * _SLACK or piece.end - piece.start == 1:
                self._take(piece)
                return
            if room < self._target * _SLACK:
                self._close()
                continue
            records = piece.end - piece.start
            taken = min(max(1, records * room // piece.bytes), records - 1)
            middle = piece.start + taken
            head_bytes = max(1, piece.bytes * taken // records)
            self._take(piece._replace(end=middle, bytes=head_bytes))
            piece = piece._replace(start=middle, bytes=max(1, piece.bytes - head_bytes))
            self._close()

    def _take(self, piece: Piece) -> None:
        self._pieces += cut(piece, PIECE_BYTES_MAX)
        self._bytes += piece.bytes
        if self._bytes >= self._target:
            self._close()

    def end(self) -> None:
        """The selection has no more pieces."""
        self._end_run()
        if not self._mixed:
            self._close()

    def finish(self) -> list[Split]:
        self._close()
        return self._splits

    def _end_run(self) -> None:
        selection = self._selection
        if self._pieces and selection is not None:
            first, last = self._pieces[0], self._pieces[-1]
            identity = (selection.topic, selection.topic_id, selection.partition)
            self._runs.append(Run(*identity, first.start, last.end, tuple(self._pieces)))
            self._pieces = []

    def _close(self) -> None:
        self._end_run()
        if self._runs:
            self._splits.append(Split(tuple(self._runs)))
            self._runs = []
        self._bytes = 0


def refuse_lost(lost: Sequence[Lost]) -> None:
    """Raise for records that a plan would need and that are gone."""
    if not lost:
        return
    first = lost[0]
    more = f" (and {len(lost) - 1} more ranges)" if len(lost) > 1 else ""
    kinds: dict[str, type[DanubeError]] = {
        EXPIRED: OffsetOutOfRange, GIVEN_UP: OffsetOutOfRange, WAITING: Unavailable,
    }  # fmt: skip
    kind = kinds.get(first.why, Damage)
    raise kind(
        f"records {first.start} to {first.end} of {first.topic} partition {first.partition} are gone{more}",
        why=first.why,
        hint="failOnDataLoss=false reads the remaining records and counts the lost ones",
        topic=first.topic,
        partition=first.partition,
        start=first.start,
        end=first.end,
    )
