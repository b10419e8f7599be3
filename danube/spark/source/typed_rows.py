"""Record batches with a column of decoded values in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from danube.errors import PayloadInvalid
from danube.host import telemetry
from danube.spark.source.schema import VALUE
from danube.spark.source.values import Schemas, ValueDecoder, tombstones_of

_log = telemetry.events("spark")
_SOURCES: Final = ("payload", "schema_id", "schema_version", "partition", "offset")
_OF_TOMBSTONES: Final = ("key", "topic")


class TypedRows:
    """Adds the decoded value to what was read, in the order of ``columns``.

    ``needed`` are the columns that must be read.  ``allowed``: a payload that is no value becomes null.
    """

    def __init__(self, schemas: Schemas, columns: Sequence[str], schema: pa.Schema, *, allowed: bool) -> None:
        self._decoder = ValueDecoder(schemas)
        self._compacted = pa.array(sorted(schemas.compacted), pa.string())
        self._schema = schema
        self._columns = columns
        self._allowed = allowed
        plain = [name for name in columns if name != VALUE]
        sources = [*_SOURCES, *(_OF_TOMBSTONES if schemas.compacted else ())]
        self.needed = [*plain, *(name for name in sources if name not in plain)]

    def take(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with its values; PayloadInvalid names the first record that is none."""
        payloads, ids, versions = (batch.column(name) for name in _SOURCES[:3])
        found = self._decoder.decode(payloads, ids, versions, self._tombstones(batch))
        if found.bad:
            self._note(batch, found.bad, found.why)
        values = found.values.cast(self._schema.field(VALUE).type)
        made = [values if name == VALUE else batch.column(name) for name in self._columns]
        return pa.RecordBatch.from_arrays(made, schema=self._schema)

    def _tombstones(self, batch: pa.RecordBatch) -> pa.Array | None:
        if not len(self._compacted):
            return None
        among = pc.is_in(batch.column("topic"), self._compacted)
        return pc.and_(tombstones_of(batch.column("payload"), batch.column("key")), among)

    def _note(self, batch: pa.RecordBatch, bad: list[int], why: str) -> None:
        partition, offset = (batch.column(name)[bad[0]].as_py() for name in ("partition", "offset"))
        if not self._allowed:
            raise PayloadInvalid(
                f"record {offset} of partition {partition} cannot be decoded",
                why=why,
                hint="failOnDataLoss=false makes such values null",
                partition=partition,
                offset=offset,
            )
        _log.warning(
            "payloads cannot be decoded", partition=partition, offset=offset, count=len(bad), why=why
        )
