"""Every partition of the cluster as a row of columns, for questions about all of them at once.

Made from the metadata, then kept by its changes; a row costs some hundred bytes.  Brokers have *slots*, small
numbers that stay while the table lives; slot -1 is no broker.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from danube.core.cluster.commands import Ownership, OwnershipChanged
from danube.core.cluster.ownership import DELETED
from danube.core.metadata.commands import Change, TopicCreated, TopicDeleted, TopicRecord, TopicUpdated

if TYPE_CHECKING:
    from danube.core.metadata.machine import Metadata

NOBODY: Final = -1
_ROWS_FIRST: Final = 1_024

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class PartitionTable:
    """Columns by row: ``topic_id``, ``partition``, ``owner`` (a slot), ``epoch``, ``reliable``.

    ``topic`` is a small number for each topic.  Rows of deleted topics have ``topic`` -1 and are used again.
    """

    def __init__(self) -> None:
        self.broker_ids: list[int] = []
        self.unowned: dict[int, Ownership] = {}  # by row
        self.asked: dict[int, Ownership] = {}  # by row: owned, and to be released
        self.topic_count = 0  # numbers in use or used before
        self._slots: dict[int, int] = {}
        self._rows: dict[tuple[int, int], int] = {}
        self._rows_by_topic: dict[int, list[int]] = {}  # by topic id
        self._free_rows: list[int] = []
        self._free_topics: list[int] = []
        self._row_count = 0
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self._grow(_ROWS_FIRST)

    @classmethod
    def of(cls, state: Metadata) -> PartitionTable:
        """The table of a machine as it is now."""
        table = cls()
        table._load(state)
        return table

    def take(self, changes: Iterable[Change]) -> None:
        """Follow changes of the machine."""
        for change in changes:
            match change:
                case OwnershipChanged(record=ownership):
                    self._put_ownership(ownership)
                case TopicCreated(record=record) | TopicUpdated(record=record):
                    self._put_topic(record)
                case TopicDeleted(record=record):
                    self._drop_topic(record.topic_id)
                case _:
                    pass

    # Questions

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column up to the last row in use; not to be changed."""
        return self._columns[name][: self._row_count]

    def slot(self, broker_id: int) -> int:
        """The slot of a broker, made where it has none."""
        slot = self._slots.get(broker_id)
        if slot is None:
            slot = self._slots[broker_id] = len(self.broker_ids)
            self.broker_ids.append(broker_id)
        return slot

    def find_slot(self, broker_id: int) -> int:
        """The slot of a broker; NOBODY if it has none."""
        return self._slots.get(broker_id, NOBODY)

    def row(self, topic_id: int, partition: int) -> int | None:
        return self._rows.get((topic_id, partition))

    def rows_of_topic(self, topic_id: int) -> list[int]:
        return self._rows_by_topic.get(topic_id, [])

    def rows_of_slot(self, slot: int) -> Integers:
        return np.flatnonzero(self.column("owner") == slot)

    def counts(self) -> Integers:
        """How many partitions each slot owns."""
        owner = self.column("owner")
        return np.bincount(owner[owner >= 0], minlength=len(self.broker_ids)).astype(np.int64)

    def place(self, row: int) -> tuple[int, int, int]:
        """(topic id, partition, epoch), as commands name it."""
        columns = self._columns
        return int(columns["topic_id"][row]), int(columns["partition"][row]), int(columns["epoch"][row])

    def owner_id(self, row: int) -> int:
        """Return the broker that owns a row; 0 for none."""
        slot = int(self._columns["owner"][row])
        return self.broker_ids[slot] if slot >= 0 else 0

    # Change

    def _grow(self, rows: int) -> None:
        for name, kind, empty in (
            ("topic_id", np.int64, 0), ("partition", np.int64, 0), ("epoch", np.int64, 0),
            ("owner", np.int64, NOBODY), ("topic", np.int64, -1), ("reliable", np.bool_, False),
        ):  # fmt: skip
            grown = np.full(rows, empty, kind)
            former = self._columns.get(name)
            if former is not None:
                grown[: len(former)] = former
            self._columns[name] = grown

    def _load(self, state: Metadata) -> None:
        """As _put_topic and _put_ownership for all that there is, in columns at once."""
        found: list[tuple[int, int, int, bool, int, int]] = []  # topic id, partition, topic, reliable, ...
        of, slot = state.cluster.owners.find, self.slot
        for topic, record in enumerate(state.topics()):
            topic_id, first, reliable = record.topic_id, len(found), record.policy.reliable
            for partition in range(record.partition_count):
                ownership = of((topic_id, partition))
                row = len(found)
                self._rows[topic_id, partition] = row
                if ownership is None or not ownership.broker_id:
                    self.unowned[row] = ownership or Ownership(topic_id, partition, 0, 0)
                    owner = NOBODY
                else:
                    owner = slot(ownership.broker_id)
                    if ownership.reason:
                        self.asked[row] = ownership
                found.append(
                    (topic_id, partition, topic, reliable, owner, ownership.epoch if ownership else 0)
                )
            self._rows_by_topic[topic_id] = list(range(first, len(found)))
        self.topic_count, self._row_count = len(self._rows_by_topic), len(found)
        self._grow(max(_ROWS_FIRST, len(found)))
        names = ("topic_id", "partition", "topic", "reliable", "owner", "epoch")
        for name, values in zip(names, np.array(found, np.int64).reshape(-1, 6).T, strict=True):
            self._columns[name][: len(found)] = values

    def _put_topic(self, record: TopicRecord) -> None:
        """A topic that is new, or has more partitions, or another policy."""
        rows = self._rows_by_topic.get(record.topic_id)
        if rows is None:
            rows = self._rows_by_topic[record.topic_id] = []
            if not self._free_topics:
                self._free_topics.append(self.topic_count)
                self.topic_count += 1
            topic = self._free_topics.pop()
        else:
            topic = int(self._columns["topic"][rows[0]])
        for partition in range(len(rows), record.partition_count):
            row = self._new_row()
            columns = self._columns
            columns["topic_id"][row] = record.topic_id
            columns["partition"][row] = partition
            columns["topic"][row] = topic
            rows.append(row)
            self._rows[record.topic_id, partition] = row
            self.unowned[row] = Ownership(record.topic_id, partition, 0, 0)
        self._columns["reliable"][rows if len(rows) > 1 else rows[0]] = record.policy.reliable

    def _new_row(self) -> int:
        if self._free_rows:
            return self._free_rows.pop()
        if self._row_count == len(self._columns["owner"]):
            self._grow(2 * self._row_count)
        self._row_count += 1
        return self._row_count - 1

    def _put_ownership(self, record: Ownership) -> None:
        row = self._rows.get((record.topic_id, record.partition))
        if row is None or record.reason == DELETED:
            return
        columns = self._columns
        columns["epoch"][row] = record.epoch
        if record.broker_id:
            columns["owner"][row] = self.slot(record.broker_id)
            self.unowned.pop(row, None)
        else:
            columns["owner"][row] = NOBODY
            self.unowned[row] = record
        if record.broker_id and record.reason:
            self.asked[row] = record
        else:
            self.asked.pop(row, None)

    def _drop_topic(self, topic_id: int) -> None:
        rows = self._rows_by_topic.pop(topic_id, [])
        columns = self._columns
        for row in rows:
            del self._rows[topic_id, int(columns["partition"][row])]
            self.unowned.pop(row, None)
            self.asked.pop(row, None)
        if rows:
            self._free_topics.append(int(columns["topic"][rows[0]]))
            columns["owner"][rows] = columns["topic"][rows] = NOBODY
            columns["epoch"][rows] = 0
            columns["reliable"][rows] = False
            self._free_rows += reversed(rows)
