"""Runs over the tail: how records that no place holds are fetched from the broker, and what is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danube.spark.history.plan import EXPIRED, Lost, Run, why_in_hole

if TYPE_CHECKING:
    from danube.spark.history.selecting import Known

ENDED = "the log ends before"


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
