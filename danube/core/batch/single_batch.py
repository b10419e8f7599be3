"""The columns of one stored batch in Arrow's layout, where they lie.

:class:`SingleBatch` answers as danube.core.batch.joined.BatchTable does for one batch.  A table's
arithmetic on arrays pays off for many small batches; for one large batch it would cost more than its bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from danube.core.batch.columns import BatchView
from danube.core.batch.format import HEADER_BYTES, Flag
from danube.core.batch.joined import AttributeColumns, BatchTable, Octets, VariableColumn

_KEYS = int(Flag.KEYS)
_ATTRIBUTES = int(Flag.ATTRIBUTES)


class SingleBatch:
    """An intact, uncompressed batch at ``position`` of ``octets`` (8-aligned, read-only).

    Every method raises ProtocolError where the columns that it reads are malformed.
    """

    __slots__ = ("_octets", "_position", "_view", "row_count")

    def __init__(self, octets: Octets, position: int) -> None:
        self._octets = octets
        self._position = position
        self._view = BatchView(octets.data, position=position)
        self.row_count = self._view.record_count

    @property
    def counts(self) -> NDArray[np.int64]:
        """int64[1]: the records of the batch."""
        return np.array([self.row_count], np.int64)

    def repeated(self, name: str, dtype: str = "<i8") -> NDArray[Any]:
        """A header's number for each record."""
        return np.full(self.row_count, getattr(self._view.header, name), dtype)

    def flagged(self, flag: Flag) -> NDArray[np.bool_] | None:
        """bool[rows], all false: the batch has no ``flag``; None where it has."""
        return None if self._view.header.flags & flag else np.zeros(self.row_count, np.bool_)

    def offsets(self) -> NDArray[np.int64]:
        """int64[rows]: the offset of each record."""
        return self._view.offsets

    def publish_times(self) -> NDArray[np.int64]:
        """int64[rows]: microseconds since 1970 UTC."""
        return self._view.publish_times

    def payloads(self) -> VariableColumn:
        """The payload column."""
        view = self._view
        return VariableColumn(view.payload_offsets, np.frombuffer(view.payload_bytes, np.uint8))

    def keys(self) -> VariableColumn | None:
        """The key column; None where no record has a key."""
        view = self._view
        if not view.header.flags & _KEYS:
            return None
        column = VariableColumn(view.key_offsets, np.frombuffer(view.key_bytes, np.uint8))
        present = view.key_validity
        if present is None:
            return column
        absent = self.row_count - int(present.sum())
        return column._replace(validity=np.packbits(present, bitorder="little"), null_count=absent)

    def attributes(self) -> AttributeColumns | None:
        """Names and values of all attributes; None where no record has any."""
        if not self._view.header.flags & _ATTRIBUTES:
            return None
        return BatchTable(self._octets, np.array([self._position])).attributes()

    def producers(self) -> list[bytes]:
        """The producer's name, as it stands there."""
        view = self._view
        return [bytes(view.data[HEADER_BYTES : HEADER_BYTES + view.header.name_size])]
