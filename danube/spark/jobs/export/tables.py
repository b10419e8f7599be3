"""Tables of exported files: a directory of Parquet, a Delta table, an Iceberg table.

Each commit may be repeated: the run after a killed one repeats its commit, and finds the parts that exist
already.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from danube.errors import ConfigInvalid, InvalidArgument, StorageFailed
from danube.host import files
from danube.host.clock import wall_us
from danube.spark.jobs.export.state import ExportState, RoundPlan
from danube.spark.jobs.export.task import Exported

FORMATS: Final = ("parquet", "delta", "iceberg")
COMMON_METADATA: Final = "_common_metadata"
_COMMIT: Final = "danube.export.round"
_ICEBERG_FILES_MAX: Final = 1_000  # of one commit: the driver reads every footer


class Table(Protocol):
    def commit(self, plan: RoundPlan, written: Sequence[Exported], shape: pa.Schema) -> None:
        """Make the round's files part of the table, once."""


def open_table(kind: str, state: ExportState, name: str, catalog: str) -> Table:
    """``name``: of the table in a catalog; ``catalog``: its SQL URL, empty for one beside the table."""
    if kind == "parquet":
        return ParquetTable(state)
    if kind == "delta":
        return DeltaTable(state, _library("deltalake"))
    if kind == "iceberg":
        return IcebergTable(state, name, catalog, _library("pyiceberg.catalog.sql"))
    raise InvalidArgument(f"format {kind!r} is not known", hint=f"use {', '.join(FORMATS)}")


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise ConfigInvalid(
            f"this format needs the package {package}", why="it is not installed",
            hint="pip install 'danube-broker[export]'",
        ) from None  # fmt: skip


def _move(state: ExportState, written: Sequence[Exported]) -> list[Path]:
    """Staged files to their places; those that are there were moved before."""
    moved: list[Path] = []
    try:
        for one in written:
            target = state.table / one.file
            if not target.exists():
                (state.staged / one.file).replace(target)
            moved.append(target)
    except OSError as error:
        raise StorageFailed(f"{state.table} cannot be written", why=error.strerror or str(error)) from None
    return moved


class ParquetTable:
    """A directory of whole files."""

    def __init__(self, state: ExportState) -> None:
        self._state = state

    def commit(self, plan: RoundPlan, written: Sequence[Exported], shape: pa.Schema) -> None:
        _move(self._state, written)
        self._tell(shape)

    def _tell(self, shape: pa.Schema) -> None:
        """Leave the table's columns where Spark looks for them: files of earlier rounds may have fewer."""
        content = pa.BufferOutputStream()
        pq.write_metadata(shape, content)
        try:
            files.replace_durably(self._state.table / COMMON_METADATA, content.getvalue().to_pybytes())
        except OSError as error:
            raise StorageFailed(f"{self._state.table} cannot be written", why=str(error)) from None


class DeltaTable:
    """A Delta table; its log remembers the round, so no round is added twice."""

    def __init__(self, state: ExportState, library: Any) -> None:
        self._state = state
        self._library = library

    def commit(self, plan: RoundPlan, written: Sequence[Exported], shape: pa.Schema) -> None:
        library, uri = self._library, str(self._state.table)
        transaction = import_module("deltalake.transaction")
        wanted = library.Schema.from_arrow(shape)
        if library.DeltaTable.is_deltatable(uri):
            table = library.DeltaTable(uri)
        else:
            table = library.DeltaTable.create(uri, schema=wanted)
        application = f"danube-export-{plan.topic_id}"
        done = table.transaction_version(application)
        if done is not None and done >= plan.number:
            return
        if table.schema() != wanted:
            table.alter.add_columns(list(wanted.fields))
        _move(self._state, written)
        actions = [
            transaction.AddAction(
                one.file, one.bytes, {}, wall_us() // 1_000, True, f'{{"numRecords":{one.rows}}}'
            )
            for one in written
        ]
        properties = library.CommitProperties(
            app_transactions=[library.Transaction(application, plan.number, wall_us() // 1_000)]
        )
        table.create_write_transaction(
            actions, mode="append", schema=table.schema(), partition_by=[], commit_properties=properties
        )


class IcebergTable:
    """A table of a SQL catalog; each snapshot names its round."""

    def __init__(self, state: ExportState, name: str, catalog: str, library: Any) -> None:
        self._state = state
        self._identifier = name
        self._root = state.table.parent
        self._uri = catalog or f"sqlite:///{self._root / 'catalog.db'}"
        self._library = library

    def commit(self, plan: RoundPlan, written: Sequence[Exported], shape: pa.Schema) -> None:
        catalog = self._library.SqlCatalog("danube", uri=self._uri, warehouse=f"file://{self._root}")
        try:
            self._commit(self._table(catalog, shape), plan, written)
        finally:
            catalog.close()

    def _commit(self, table: Any, plan: RoundPlan, written: Sequence[Exported]) -> None:
        known = {
            snapshot.summary.additional_properties.get(_COMMIT)
            for snapshot in table.snapshots()
            if snapshot.summary is not None
        }
        moved = [str(path) for path in _move(self._state, written)]
        for part, first in enumerate(range(0, len(moved), _ICEBERG_FILES_MAX)):
            word = f"{plan.topic_id}-{plan.number}-{part}"
            if word not in known:
                paths = [f"file://{path}" for path in moved[first : first + _ICEBERG_FILES_MAX]]
                table.add_files(paths, snapshot_properties={_COMMIT: word})

    def _table(self, catalog: Any, shape: pa.Schema) -> Any:
        catalog.create_namespace_if_not_exists(self._identifier.partition(".")[0])
        table = catalog.create_table_if_not_exists(
            self._identifier, schema=shape, location=f"file://{self._state.table}"
        )
        with table.update_schema() as update:
            update.union_by_name(shape)  # nothing where it has all columns
        return table


def rows_in(table: Path) -> int:
    """Records in the Parquet files of a table's directory."""
    return sum(pq.read_metadata(path).num_rows for path in sorted(table.glob("*.parquet")))
