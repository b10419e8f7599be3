"""Selection of records: from options to partitions with their histories.

A restore, and a copy that is put back, begin a new history (:mod:`danube.core.placement.recovered`): records
after the copy are lost.  Offsets then continue far ahead, so a position behind the end of the copy lies in
the hole between.  Its records are lost, and so are those of a position beyond the end.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from danube.config.sections import StorageSettings
from danube.core.metadata.commands import TopicRecord
from danube.core.metadata.machine import Metadata
from danube.core.placement.recovered import History, recovery_of
from danube.errors import Conflict, InvalidArgument, NotFound, OffsetOutOfRange, TopicNotFound
from danube.host import telemetry
from danube.spark.history.decode import Losses, stretches
from danube.spark.history.fetch import Fetcher
from danube.spark.history.offsets import Ends, PartitionKey
from danube.spark.history.options import EARLIEST, EARLIEST_NUMBER, LATEST, LATEST_NUMBER, Bound, ReadOptions
from danube.spark.history.places import AnyPlace, open_place
from danube.spark.history.plan import (
    EXPIRED,
    Lost,
    Piece,
    Run,
    Selection,
    Split,
    pieces_of,
    plan_splits,
    why_in_hole,
)
from danube.spark.history.segments import PartitionHistory, SegmentRef
from danube.spark.history.tail import PartitionEnds, Tail
from danube.wal.segments.holes import Hole, HoleKind
from danube.wal.segments.segment import NO_LOG, LogIdentity, log_id_of_topic

ENDED = "the log ends before"
HINT = "failOnDataLoss=false goes on with what is there"
_NO_CUT = 1 << 62
_log = telemetry.events("spark")


class Known(NamedTuple):
    """One partition now: its segments in each place, and the broker's description (None without a broker).

    ``physical``: the partition's name at the broker.
    """

    key: PartitionKey
    histories: tuple[PartitionHistory, ...]
    told: PartitionEnds | None
    physical: str = ""

    @property
    def start(self) -> int:
        """The first record that can be read."""
        starts = [history.start_offset for history in self.histories if history.segments]
        return min([*starts, *([self.told.start] if self.told else [])], default=0)

    @property
    def stored_end(self) -> int:
        """Behind the last record that a place holds."""
        return max((history.end_offset for history in self.histories), default=0)

    @property
    def end(self) -> int:
        """Behind the last record that can be read: the broker's word counts where there is a broker."""
        return self.told.end if self.told is not None else max(self.stored_end, self.start)

    @property
    def holes(self) -> list[Hole]:
        """Offsets that no record has in this history, by offset, as any place or the broker knows them."""
        told = self.told.holes if self.told is not None else ()
        found = {hole for history in self.histories for hole in history.holes} | set(told)
        joined: list[Hole] = []
        for hole in sorted(hole for hole in found if hole.kind is HoleKind.UNUSED):
            if not joined or hole.start >= joined[-1].end:
                joined.append(hole)
        return joined

    def selection(self, start: int, end: int) -> Selection:
        return Selection(self.key.topic, self.key.topic_id, self.key.partition, start, end, self.histories)


class Held(NamedTuple):
    """Records of a partition: the ``pieces`` of places that hold them, then what only the broker has."""

    selection: Selection
    pieces: list[Piece]
    tails: list[Run]

    @property
    def split(self) -> Split:
        """All of them in the order of their offsets, for one task."""
        splits = plan_splits([(self.selection, self.pieces)], split_bytes=_NO_CUT, mixed=False)
        return Split((*(run for split in splits for run in split.runs), *self.tails))


def held(part: Known, start: int, end: int, lost: list[Lost]) -> Held:
    """Where the records ``start .. end`` are; what is nowhere is added to ``lost``."""
    stored = min(end, max(part.stored_end, start))
    selection = part.selection(start, stored)
    pieces, gone = pieces_of(selection)
    lost += gone
    return Held(selection, pieces, tail_runs(part, stored, end, lost) if stored < end else [])


def tail_runs(part: Known, start: int, end: int, lost: list[Lost]) -> list[Run]:
    """Runs of the records ``start .. end`` of a partition, which lie behind all that places hold.

    Nothing is asked for that lies in a hole: no record comes for it, and a reader would wait.
    """
    topic, topic_id, partition = part.key
    told = part.told
    ended = max(start, told.end if told is not None else start)
    if ended < end:
        lost.append(Lost(topic, partition, ended, end, ENDED))
        end = ended
    if told is None:
        return []
    first = min(max(start, told.start), end)
    if first > start:
        lost.append(Lost(topic, partition, start, first, EXPIRED))
    runs: list[Run] = []

    def ask(stop: int) -> None:
        if first < stop:
            runs.append(Run(topic, topic_id, partition, first, stop, (), part.physical))

    for hole in sorted(told.holes):
        begin, stop = max(hole.start, first), min(hole.end, end)
        if begin >= stop:
            continue
        ask(begin)
        why = why_in_hole(hole)
        if why:
            lost.append(Lost(topic, partition, begin, stop, why))
        first = stop
    ask(end)
    return runs


def places_of(options: ReadOptions) -> list[AnyPlace]:
    """The places that ``storage`` names, in its order."""
    return [open_place(text, _settings(options, text)) for text in options.storage]


class Catalogue:
    """The places and the broker of one read, on the driver."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self.places = places_of(options)
        self._tail = Tail(options.broker, options.access) if options.broker else None
        self._histories: tuple[History, ...] = ()  # as the places knew them last
        self._log_ids: dict[int, bytes] = {}  # by topic id
        self._gone: set[str] = set()  # topics of which it was told that they are not there

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()

    def topics(self, *, under_way: bool = False) -> list[tuple[str, int, int]]:
        """Return ``(topic, id, partitions)`` of the selected topics, by name.

        TopicNotFound for a name that is nowhere; Conflict where two places know a topic by different ids.
        Where losses are allowed a name that is nowhere is left out, with a warning: a topic was deleted.  It
        is an error also then if no other is there, unless the read was ``under_way`` before: a mistyped name.
        """
        known: dict[str, tuple[int, int]] = {}
        for place in self.places:
            metadata = place.metadata()
            self._histories = max(self._histories, recovery_of(metadata).histories, key=len)
            for record in metadata.topics():
                self._note(known, record.topic, record.topic_id, record.partition_count, place.name)
                self._note_log(record, place.name)
        if self._tail is not None:
            for info in self._tail.topics():
                self._note(known, info.topic, info.topic_id, info.partition_count, self.options.broker)
        lenient = not self.options.fail_on_data_loss and (under_way or bool(known))
        for name in self.options.topics:
            if not any(mark in name for mark in "*?[") and name not in known:
                if not lenient:
                    raise TopicNotFound(f"there is no topic {name}", hint=_suggestion(name, known))
                self._tell_gone(name)
        return [(topic, *known[topic]) for topic in sorted(known)]

    def _tell_gone(self, name: str) -> None:
        if name not in self._gone:
            self._gone.add(name)
            _log.warning("a topic is not there, and is left out", topic=name, hint="was it deleted?")

    def _note(
        self, known: dict[str, tuple[int, int]], topic: str, topic_id: int, partitions: int, where: str
    ) -> None:
        if not self.options.wants(topic):
            return
        before = known.get(topic)
        if before is not None and before[0] != topic_id:
            raise Conflict(
                f"topic {topic} has id {topic_id} in {where} and {before[0]} elsewhere",
                why="the places belong to different brokers, or the topic was deleted and made again",
                hint="name places of one broker",
            )
        known[topic] = (topic_id, max(partitions, before[1] if before else 0))

    def _note_log(self, record: TopicRecord, where: str) -> None:
        """Two brokers may give the same id to topics of the same name, and still they are two."""
        if not self.options.wants(record.topic):
            return
        log_id = log_id_of_topic(record)
        if self._log_ids.setdefault(record.topic_id, log_id) != log_id:
            raise Conflict(
                f"topic {record.topic} in {where} is another one than elsewhere",
                why=f"both have the id {record.topic_id}, and they were made at different moments",
                hint="name places of one broker",
            )

    def partitions(self, *, unsynced: bool, under_way: bool = False) -> list[Known]:
        """Return every selected partition as it is now; see topics()."""
        found: list[Known] = []
        for topic, topic_id, count in self.topics(under_way=under_way):
            told = self._ends(topic)
            for partition in range(count):
                histories = self.histories(LogIdentity(topic_id, partition), unsynced=unsynced)
                name, ends = told[partition] if partition < len(told) else ("", None)
                found.append(Known(PartitionKey(topic, topic_id, partition), histories, ends, name))
        return found

    def _ends(self, topic: str) -> list[tuple[str, PartitionEnds]]:
        """Return the ends that the broker reports; none of a topic deleted there, if losses are allowed.

        A place may know such a topic longer: a store's copy of the metadata is older than the broker's.
        """
        try:
            return self._tail.ends(topic) if self._tail is not None else []
        except TopicNotFound:
            if self.options.fail_on_data_loss:
                raise
            self._tell_gone(topic)
            return []

    def histories(self, identity: LogIdentity, *, unsynced: bool) -> tuple[PartitionHistory, ...]:
        log_id = self._log_ids.get(identity.topic_id, NO_LOG)
        return tuple(place.history(identity, unsynced=unsynced).of_log(log_id) for place in self.places)

    def recorded_histories(self, known: Iterable[Known]) -> Sequence[History]:
        """Return the histories that followed the first one, by the place that knows most of them."""
        told = [part.told.histories for part in known if part.told is not None]
        return max([*told, self._histories], key=len)

    def metadata(self) -> Metadata:
        """Return the metadata of the first place that has any; NotFound with a broker alone."""
        for place in self.places:
            return place.metadata()
        raise NotFound("there is no storage that holds the schemas", hint="set the option storage")

    def resolve(self, bound: Bound, known: Iterable[Known], *, ending: bool) -> Ends:
        """The offset that ``bound`` means in every partition."""
        parts = list(known)
        _refuse_strangers(bound, parts, self._gone)
        strict = self.options.fail_on_data_loss
        if strict:
            name = "endingOffsets" if ending else "startingOffsets"
            refuse_gone(name, _numbers(bound, parts), "", parts, self.recorded_histories(parts))
        found = {part.key: self._resolved(bound, part, ending) for part in parts}
        # No record behind the end can be waited for, and later records begin there.
        return found if strict else {part.key: min(found[part.key], part.end) for part in parts}

    def _resolved(self, bound: Bound, known: Known, ending: bool) -> int:
        if bound.time_us is not None:
            return self.offset_at_time(known, bound.time_us)
        otherwise = LATEST_NUMBER if ending or bound.word == LATEST else EARLIEST_NUMBER
        if bound.word == EARLIEST:
            otherwise = EARLIEST_NUMBER
        offset = bound.offsets.get(known.key.topic, {}).get(known.key.partition, otherwise)
        return known.start if offset == EARLIEST_NUMBER else known.end if offset == LATEST_NUMBER else offset

    def offset_at_time(self, known: Known, time_us: int) -> int:
        """Offset of the first record that was appended at ``time_us`` or later; the end where none was.

        Reads an index and a few batches of one segment of each place, as one may begin later than another.
        Where none has such a record the broker is asked for those that only it has.
        """
        fetcher = Fetcher(self.places)
        try:
            stored = [
                _first_in_place(fetcher, number, history, time_us)
                for number, history in enumerate(known.histories)
            ]
        finally:
            fetcher.close()
        found = [offset for offset in stored if offset is not None]
        if found:
            return min(found)
        if known.told is None or self._tail is None or known.told.end <= known.stored_end:
            return known.end
        told = self._tail.offset_at_time(known.physical, time_us)
        return min(max(told, known.stored_end, known.start), known.end)


def _first_in_place(fetcher: Fetcher, place: int, history: PartitionHistory, time_us: int) -> int | None:
    """The first record of one place that was appended at ``time_us`` or later."""
    for segment in history.segments:
        if segment.last_append_us and segment.last_append_us < time_us:
            continue
        found = _first_since(fetcher, history.identity, place, segment, time_us)
        if found is not None:
            return found
    return None


def _first_since(
    fetcher: Fetcher, identity: LogIdentity, place: int, segment: SegmentRef, time_us: int
) -> int | None:
    """The first record of a segment that was appended at ``time_us`` or later."""
    if segment.first_append_us >= time_us:
        return segment.start
    whole = Piece(place, segment, segment.start, segment.end, segment.data_end)
    fetched = fetcher.fetch(identity, fetcher.since(identity, whole, time_us))
    for stretch in stretches(fetched, Losses(allowed=True)):
        late = np.flatnonzero(stretch.headers["append_time_us"] >= time_us)
        if len(late):
            return max(segment.start, int(stretch.headers["base_offset"][int(late[0])]))
    return None


def _settings(options: ReadOptions, place: str) -> StorageSettings | None:
    return options.store if "://" in place and not place.startswith("file:") else None


def _numbers(bound: Bound, known: Iterable[Known]) -> Ends:
    """The offsets that were given as such."""
    given = {
        part.key: bound.offsets.get(part.key.topic, {}).get(part.key.partition, LATEST_NUMBER)
        for part in known
    }
    return {key: offset for key, offset in given.items() if offset >= 0}


def _refuse_strangers(bound: Bound, known: list[Known], gone: Container[str]) -> None:
    """Offsets of a partition that is not read are a mistake worth telling, unless its topic is gone."""
    there = {(part.key.topic, part.key.partition) for part in known}
    for topic, offsets in bound.offsets.items():
        for partition in offsets:
            if (topic, partition) not in there and topic not in gone:
                raise InvalidArgument(
                    f"offsets are given for {topic} partition {partition}, which is not read",
                    hint="name partitions of the topics in the option topic",
                )


def _suggestion(name: str, known: Iterable[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, list(known), 3)
    return f"did you mean {' or '.join(near)}?" if near else "list them with `danube topics list`"


def refuse_gone(
    what: str,
    positions: Mapping[PartitionKey, int],
    history_id: str,
    known: Iterable[Known],
    histories: Sequence[History],
) -> None:
    """Raise for the first of ``positions`` that is not of the current history, or beyond its end.

    ``what`` names their source (``the checkpoint``) and ``history_id`` the history in which they were found.
    Raises Conflict if that is none of ``histories``, OffsetOutOfRange for a position of lost records.
    """
    names = ["", *(history.history_id for history in histories)]
    if history_id not in names:
        raise Conflict(
            f"{what} is of history {_history_name(history_id)}, and this is {_history_name(names[-1])}",
            why="it was kept of another broker, or of a restore that another one took the place of",
            hint=f"begin anew without it; {HINT}",
        )
    later = {history.since_us: history for history in histories[names.index(history_id) :]}
    parts = {part.key: part for part in known}
    for key in sorted(positions):
        if key in parts:
            _check_position(what, positions[key], _history_name(history_id), parts[key], later)


def _history_name(history_id: str) -> str:
    """Name a history for people."""
    return history_id[:8] or "first"


def _check_position(
    what: str, position: int, history: str, part: Known, later: Mapping[int, History]
) -> None:
    topic, _, partition = part.key
    for hole in part.holes:
        if hole.start < position < hole.end and hole.since_us in later:
            successor = later[hole.since_us]
            raise OffsetOutOfRange(
                f"{what} is at offset {position} of {topic} partition {partition}, which is gone",
                why=f"history {history} ends at {hole.start} here; history"
                f" {_history_name(successor.history_id)} goes on at {hole.end}: {successor.why}",
                hint=HINT, topic=topic, partition=partition, start=hole.start, end=hole.end,
            )  # fmt: skip
    if position > part.end:
        raise OffsetOutOfRange(
            f"{what} is at offset {position} of {topic} partition {partition}, which ends at {part.end}",
            why="what lay between is not there any more, or not in the places that are read",
            hint=f"name the places that it was kept of; {HINT}",
            topic=topic, partition=partition, start=part.start, end=part.end,
        )  # fmt: skip
