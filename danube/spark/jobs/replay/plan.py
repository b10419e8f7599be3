"""Plan of a replay: one lane for each partition, and how a lane is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import pyarrow

from danube.errors import InvalidArgument
from danube.spark.history.access import BrokerAccess
from danube.spark.history.decode import COLUMNS, Decoder, Losses
from danube.spark.history.offsets import Ends, PartitionKey
from danube.spark.history.options import ReadOptions
from danube.spark.history.places import AnyPlace
from danube.spark.history.plan import Lost, Split, refuse_lost
from danube.spark.history.reading import read_split
from danube.spark.history.selecting import Catalogue, held, refuse_gone
from danube.spark.jobs.replay.target import LaneRange


class Lane(NamedTuple):
    """A range and its sources: segments first, then records that only the broker has."""

    range: LaneRange
    split: Split
    places: tuple[AnyPlace, ...]
    broker: str
    access: BrokerAccess
    allows_loss: bool
    history: str = ""


def plan_lanes(options: ReadOptions, pinned: Sequence[LaneRange] = (), history_id: str = "") -> list[Lane]:
    """Return the lanes of the selected topic; with ``pinned`` those of an earlier run, of that history.

    Raises an error for lost records, unless losses are allowed.  A record that the earlier run published and
    that is lost now would change the numbers of all later ones.
    """
    with closing(Catalogue(options)) as catalogue:
        known = {part.key: part for part in catalogue.partitions(unsynced=True, under_way=bool(pinned))}
        if len({key.topic for key in known}) > 1:
            names = sorted({key.topic for key in known})
            raise InvalidArgument(
                f"{len(names)} topics are meant", why=", ".join(names[:5]), hint="a replay takes one topic"
            )
        start = catalogue.resolve(options.starting, known.values(), ending=False)
        end = catalogue.resolve(options.ending, known.values(), ending=True)
        ranges = list(pinned) or _ranges(start, end)
        histories = catalogue.recorded_histories(known.values())
        if pinned and options.fail_on_data_loss:
            refuse_gone("the replay", _bounds(pinned), history_id, known.values(), histories)
        history_id = histories[-1].history_id if histories else ""
        places = tuple(catalogue.places)
        lost: list[Lost] = []
        lanes = []
        for one in ranges:
            part = known.get(PartitionKey(one.topic, one.topic_id, one.partition))
            split = Split(()) if part is None else held(part, one.start, one.end, lost).split
            if part is None:
                lost.append(Lost(one.topic, one.partition, one.start, one.end, "the topic was deleted"))
            allowed = not options.fail_on_data_loss
            lanes.append(Lane(one, split, places, options.broker, options.access, allowed, history_id))
        if options.fail_on_data_loss:
            refuse_lost(lost)
        return lanes


def _bounds(pinned: Sequence[LaneRange]) -> Ends:
    """Return the ends of the lanes; records before them are checked one by one."""
    return {PartitionKey(one.topic, one.topic_id, one.partition): one.end for one in pinned}


def _ranges(start: Ends, end: Ends) -> list[LaneRange]:
    return [
        LaneRange(number, key.topic, key.topic_id, key.partition, start[key], max(start[key], end[key]))
        for number, key in enumerate(sorted(end))
    ]


def read_lane(lane: Lane, columns: Sequence[str] = COLUMNS.names) -> Iterator[pyarrow.RecordBatch]:
    """A lane's records in order."""
    losses = Losses(allowed=lane.allows_loss)
    yield from read_split(lane.split, lane.places, Decoder(columns), losses, lane.broker, lane.access)
