"""Whether a position that was kept outside the broker is still of what is read.

A restore and a copy that is put back begin a new history (:mod:`danube.core.placement.recovered`): what
came after the copy is gone.  Offsets go on far ahead then, so a position that was behind what the copy
holds lies in the hole between, and is of records that are nowhere.  A position beyond the end is, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from danube.core.placement.recovered import History
from danube.errors import Conflict, OffsetOutOfRange
from danube.spark.history.offsets import PartitionKey

if TYPE_CHECKING:
    from danube.spark.history.selecting import Known

HINT = "failOnDataLoss=false goes on with what is there"


def refuse_gone(
    what: str,
    positions: Mapping[PartitionKey, int],
    history_id: str,
    known: Iterable[Known],
    histories: Sequence[History],
) -> None:
    """Raise for the first of ``positions`` that is not of the history under way, or beyond the end of it.

    ``what`` names who kept them (``the checkpoint``) and ``history_id`` the history that they were found in.
    Conflict where that is none of ``histories``, OffsetOutOfRange for a position of records that are gone.
    """
    names = ["", *(history.history_id for history in histories)]
    if history_id not in names:
        raise Conflict(
            f"{what} is of history {name_of(history_id)}, and this is {name_of(names[-1])}",
            why="it was kept of another broker, or of a restore that another one took the place of",
            hint=f"begin anew without it; {HINT}",
        )
    later = {history.since_us: history for history in histories[names.index(history_id) :]}
    parts = {part.key: part for part in known}
    for key in sorted(positions):
        if key in parts:
            _check(what, positions[key], name_of(history_id), parts[key], later)


def name_of(history_id: str) -> str:
    """As a person is told of it."""
    return history_id[:8] or "first"


def _check(what: str, position: int, history: str, part: Known, later: Mapping[int, History]) -> None:
    topic, _, partition = part.key
    for hole in part.holes:
        if hole.start < position < hole.end and hole.since_us in later:
            successor = later[hole.since_us]
            raise OffsetOutOfRange(
                f"{what} is at offset {position} of {topic} partition {partition}, which is gone",
                why=f"history {history} ends at {hole.start} here; history {name_of(successor.history_id)}"
                f" goes on at {hole.end}: {successor.why}",
                hint=HINT, topic=topic, partition=partition, start=hole.start, end=hole.end,
            )  # fmt: skip
    if position > part.end:
        raise OffsetOutOfRange(
            f"{what} is at offset {position} of {topic} partition {partition}, which ends at {part.end}",
            why="what lay between is not there any more, or not in the places that are read",
            hint=f"name the places that it was kept of; {HINT}",
            topic=topic, partition=partition, start=part.start, end=part.end,
        )  # fmt: skip
