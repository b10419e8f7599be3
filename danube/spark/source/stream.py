"""``readStream.format("danube")``: micro-batches by offset, resumed from Spark's checkpoint.

Spark keeps the query's offsets; the broker keeps no state of it.  Without a broker a stream reads only
records that are synced or in the store, so no offset is ever seen with two records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from danube.core.placement.recovered import History
from danube.errors import OffsetOutOfRange
from danube.spark.failures import hinted
from danube.spark.history.offsets import Ends, behind, history_in, limited, pack, unpack
from danube.spark.history.options import EARLIEST, Bound, ReadOptions
from danube.spark.history.selecting import Catalogue, Known, refuse_gone
from danube.spark.source.splits import PlanReader

if TYPE_CHECKING:
    import pyarrow as pa


class DanubeStreamReader(PlanReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in one process on the driver for as long as the query; ``read`` runs in tasks."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._target: Ends | None = None
        self._newest: Ends | None = None
        self._catalogue: Catalogue | None = None
        self._followed: Sequence[History] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_catalogue": None, "_newest": None, "_target": None}

    def _known(self, *, under_way: bool = True) -> tuple[Catalogue, list[Known]]:
        with hinted():
            if self._catalogue is None:
                self._catalogue = Catalogue(self.options)
            return self._catalogue, self._catalogue.partitions(unsynced=False, under_way=under_way)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        catalogue, known = self._known(under_way=False)
        with hinted():
            self._followed = catalogue.recorded_histories(known)
        return pack(catalogue.resolve(self.options.starting, known, ending=False), self._history_id)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        most = self.options.records_per_trigger_max
        return ReadMaxRows(most) if most else ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        catalogue, known = self._known()
        before = unpack(start)
        with hinted():
            self._followed = catalogue.recorded_histories(known)
            self._refuse_other_history(start, known)
        end = self._target if self._target is not None else {part.key: part.end for part in known}
        self._newest = end
        began = self._began(catalogue, known, before)
        # A partition whose newest records are not on disk yet keeps its position; so does a missing one,
        # unless its topic was made again.
        topics = {key.topic for key in end}
        gone = {key: offset for key, offset in before.items() if key.topic not in topics}
        # One that is new begins with the next batch: where it begins is in the checkpoint then.
        end = {
            key: max(offset, began.get(key, offset)) if key in before else began[key]
            for key, offset in {**gone, **end}.items()
        }
        if isinstance(limit, ReadMaxRows):
            end = limited(began, end, limit.max_rows, {part.key: part.holes for part in known})
        return pack(end, self._history_id)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return None if self._newest is None else pack(self._newest, self._history_id)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        _, known = self._known()
        self._target = {part.key: part.end for part in known}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        if start == end:
            return []
        first, last = unpack(start), unpack(end)
        catalogue, known = self._known()
        with hinted():
            self._followed = catalogue.recorded_histories(known)
            self._refuse_other_history(start, known)
            self._refuse_other_history(end, known)
            self._refuse_gone(known, first, last)
            began = self._began(catalogue, known, first)
            there = [part for part in known if part.key in last]
            return self.planned_anew(catalogue, there, began, last)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.read_records(partition)

    def stop(self) -> None:
        catalogue, self._catalogue = self._catalogue, None
        if catalogue is not None:
            catalogue.close()

    @property
    def _history_id(self) -> str:
        """The history that is under way."""
        return self._followed[-1].history_id if self._followed else ""

    def _refuse_other_history(self, packed: dict[str, Any], known: Sequence[Known]) -> None:
        """Refuse a checkpoint of another history: records would be skipped, or come twice."""
        if self.options.fail_on_data_loss:
            refuse_gone("the checkpoint", unpack(packed), history_in(packed), known, self._followed)

    @staticmethod
    def _began(catalogue: Catalogue, known: Sequence[Known], before: Ends) -> Ends:
        """``before``, and the first record of each partition that came later."""
        earliest = catalogue.resolve(Bound(EARLIEST), known, ending=False)
        return {**earliest, **before}

    def _refuse_gone(self, known: Sequence[Known], first: Ends, last: Ends) -> None:
        """A topic that was deleted (and perhaps made again) takes records along that were not read."""
        there = {part.key for part in known}
        for key in behind(first, last):
            if key not in there and self.options.fail_on_data_loss:
                raise OffsetOutOfRange(
                    f"topic {key.topic} partition {key.partition} (id {key.topic_id}) is gone",
                    why=f"the query still needed its records {first.get(key, 0)} to {last[key]}",
                    hint="failOnDataLoss=false goes on without them",
                )
