"""Work of a task: fetch the pieces of its split, decode them, and find records again that have moved.

While a long job runs the broker may seal, upload, merge, evict or delete segments.  If a piece's file or
object is gone, the piece is searched again by its offsets; only records that are nowhere count as lost.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from danube.core import kernels
from danube.errors import ObjectMissing, OffsetOutOfRange, TopicNotFound
from danube.host import telemetry
from danube.spark.history.access import ENVIRONMENT, BrokerAccess
from danube.spark.history.decode import Decoder, Losses, Skipped
from danube.spark.history.fetch import Fetcher
from danube.spark.history.plan import EXPIRED, Lost, Piece, Run, Selection, Split, pieces_of, refuse_lost
from danube.spark.history.tail import Tail
from danube.wal.segments.segment import NO_LOG, LogIdentity

if TYPE_CHECKING:
    import pyarrow as pa

    from danube.spark.history.places import AnyPlace

_log = telemetry.events("spark")
_ATTEMPTS: Final = 5
_frozen = False


def read_split(
    split: Split,
    places: Sequence[AnyPlace],
    decoder: Decoder,
    losses: Losses,
    broker: str = "",
    access: BrokerAccess = ENVIRONMENT,
) -> Iterator[pa.RecordBatch]:
    """Yield the records of a split, run after run; losses are noted or raised."""
    kernels.load()
    fetcher = Fetcher(places)
    tail = Tail(broker, access) if broker else None
    try:
        for run in split.runs:
            if run.physical:
                yield from _read_tail(run, tail, decoder, losses)
            else:
                yield from _read_run(run, places, fetcher, decoder, losses)
    finally:
        fetcher.close()
        if tail is not None:
            tail.close()
    for loss in losses.skipped:
        _log.warning(
            "records are lost", source=loss.where, position=loss.position, start=loss.start, end=loss.end,
            why=loss.why,
        )  # fmt: skip


def enable_logging() -> None:
    """Add a log handler if there is none, as in a Spark worker.

    Python's default handler would omit the lost ranges.
    """
    if not logging.getLogger(telemetry.ROOT).hasHandlers():
        telemetry.configure("warning", process="spark")


def freeze_heap() -> None:
    """Exempt the loaded modules from garbage collection, which Spark runs between tasks."""
    global _frozen
    if not _frozen:
        _frozen = True
        gc.collect()
        gc.freeze()


def _read_tail(run: Run, tail: Tail | None, decoder: Decoder, losses: Losses) -> Iterator[pa.RecordBatch]:
    if tail is None:
        raise ObjectMissing(f"records of {run.topic} are with a broker that is not named")

    def lose(count: int, why: str) -> None:
        if not losses.allowed:
            raise OffsetOutOfRange(
                f"{count} of the records {run.start} to {run.end} of {run.name} cannot be read",
                why=why, hint="failOnDataLoss=false reads the remaining records and counts the lost ones",
                topic=run.topic, partition=run.partition, start=run.start, end=run.end,
            )  # fmt: skip
        losses.note(Skipped(run.name, 0, run.start, run.end, f"{count} of these: {why}"))

    try:
        for octets, start in tail.read(run.physical, run.start, run.end, lose):
            yield from decoder.decode_batches(octets, run.topic, run.partition, start, run.end, losses)
    except TopicNotFound as error:  # deleted since the driver has planned
        if not losses.allowed:
            raise
        losses.note(Skipped(run.name, 0, run.start, run.end, f"what was left: {error}"))


def _read_run(
    run: Run, places: Sequence[AnyPlace], fetcher: Fetcher, decoder: Decoder, losses: Losses
) -> Iterator[pa.RecordBatch]:
    identity = LogIdentity(run.topic_id, run.partition)
    pieces, done = list(run.pieces), 0
    attempts = 0
    while done < len(pieces):
        try:
            for fetched in fetcher.each(identity, pieces[done:]):
                yield from decoder.decode(fetched, run.topic, run.partition, losses)
                done += 1
                attempts = 0
        except ObjectMissing as error:
            attempts += 1
            if attempts == _ATTEMPTS:
                piece = pieces[done]
                where = f"{run.name}, {piece.segment.key}"
                losses.note(Skipped(where, 0, piece.start, piece.end, str(error)))
                done += 1
                continue
            pieces, done = _found_again(run, pieces[done].start, places, losses), 0


def _found_again(run: Run, start: int, places: Sequence[AnyPlace], losses: Losses) -> list[Piece]:
    """Return pieces for the rest of a run, from the current content of the places."""
    identity = LogIdentity(run.topic_id, run.partition)
    log_ids = [piece.segment.log_id for piece in run.pieces]
    histories = tuple(place.history(identity).of_log((*log_ids, NO_LOG)[0]) for place in places)
    selection = Selection(run.topic, run.topic_id, run.partition, start, run.end, histories)
    pieces, lost = pieces_of(selection)
    reached = pieces[-1].end if pieces else start
    if reached < run.end:
        lost.append(Lost(run.topic, run.partition, reached, run.end, EXPIRED))
    if not losses.allowed:
        refuse_lost(lost)
    for one in lost:
        losses.note(Skipped(run.name, 0, one.start, one.end, one.why))
    return pieces
