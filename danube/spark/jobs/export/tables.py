"""Tables of exported files: a directory of Parquet, a Delta table, an Iceberg table.

Each commit may be repeated: the run after a killed one repeats its commit, and finds the parts that exist
already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from danube.errors import ConfigInvalid, StorageFailed
from danube.host import files
from danube.host.clock import wall_us
from danube.spark.jobs.export.state import ExportState, RoundPlan
from danube.spark.jobs.export.task import Exported

COMMON_METADATA: Final = "_common_metadata"
_COMMIT: Final = "danube.export.round"
_ICEBERG_FILES_MAX: Final = 1_000  # of one commit: the driver reads every footer


class Round(NamedTuple):
    """One round, whose files are written.  ``name``: of the table in a catalog.

    ``catalog``: its SQL URL, empty for one beside the table.  ``shape``: the table's columns.
    """

    state: ExportState
    plan: RoundPlan
    written: Sequence[Exported]
    shape: pa.Schema
    name: str
    catalog: str


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


def _commit_parquet(made: Round) -> None:
    """A directory of whole files.

    The columns are left where Spark looks for them: files of earlier rounds may have fewer.
    """
    table = made.state.table
    _move(made.state, made.written)
    content = pa.BufferOutputStream()
    pq.write_metadata(made.shape, content)
    try:
        files.replace_durably(table / COMMON_METADATA, content.getvalue().to_pybytes())
    except OSError as error:
        raise StorageFailed(f"{table} cannot be written", why=str(error)) from None


def _commit_delta(made: Round) -> None:
    """A Delta table; its log remembers the round, so no round is added twice."""
    plan, library, uri = made.plan, _library("deltalake"), str(made.state.table)
    transaction = import_module("deltalake.transaction")
    wanted = library.Schema.from_arrow(made.shape)
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
    _move(made.state, made.written)
    actions = [
        transaction.AddAction(
            one.file, one.bytes, {}, wall_us() // 1_000, True, f'{{"numRecords":{one.rows}}}'
        )
        for one in made.written
    ]
    properties = library.CommitProperties(
        app_transactions=[library.Transaction(application, plan.number, wall_us() // 1_000)]
    )
    table.create_write_transaction(
        actions, mode="append", schema=table.schema(), partition_by=[], commit_properties=properties
    )


def _commit_iceberg(made: Round) -> None:
    """A table of a SQL catalog; each snapshot names its round."""
    root = made.state.table.parent
    uri = made.catalog or f"sqlite:///{root / 'catalog.db'}"
    catalog = _library("pyiceberg.catalog.sql").SqlCatalog("danube", uri=uri, warehouse=f"file://{root}")
    try:
        table = _iceberg_table(catalog, made)
        known = {
            snapshot.summary.additional_properties.get(_COMMIT)
            for snapshot in table.snapshots()
            if snapshot.summary is not None
        }
        moved = [str(path) for path in _move(made.state, made.written)]
        for part, first in enumerate(range(0, len(moved), _ICEBERG_FILES_MAX)):
            word = f"{made.plan.topic_id}-{made.plan.number}-{part}"
            if word not in known:
                paths = [f"file://{path}" for path in moved[first : first + _ICEBERG_FILES_MAX]]
                table.add_files(paths, snapshot_properties={_COMMIT: word})
    finally:
        catalog.close()


def _iceberg_table(catalog: Any, made: Round) -> Any:
    catalog.create_namespace_if_not_exists(made.name.partition(".")[0])
    table = catalog.create_table_if_not_exists(
        made.name, schema=made.shape, location=f"file://{made.state.table}"
    )
    with table.update_schema() as update:
        update.union_by_name(made.shape)  # nothing where it has all columns
    return table


COMMITS: Final[dict[str, Callable[[Round], None]]] = {
    "parquet": _commit_parquet,
    "delta": _commit_delta,
    "iceberg": _commit_iceberg,
}
"""Each makes the round's files part of the table of its format, once."""
