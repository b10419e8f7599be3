"""Export: every record once in Parquet, Delta and Iceberg, run after run, also where a run is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest

from danube.core.batch.format import Compression
from danube.core.metadata.commands import (
    ConfigureTopicSchema,
    CreateTopic,
    RegisterSchema,
    TopicSchema,
    UpdatePolicy,
)
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import TopicPolicy
from danube.errors import Conflict, DanubeError, InvalidArgument, PayloadInvalid
from danube.wal.log.log import Log, LogOptions
from danube.wal.segments.segment import LogIdentity
from danube.wal.stores.directory import LocalStore
from tests.broker_process import ROOT, die_with_parent
from tests.spark.stored_history import append, metadata_of, put_history, write_history

pytest.importorskip("pyspark")
from danube.spark.history.decode import Decoder, Losses
from danube.spark.history.options import read_options
from danube.spark.history.plan import pieces_of, plan_splits
from danube.spark.history.reading import read_split
from danube.spark.history.selecting import Catalogue
from danube.spark.jobs.export import export
from danube.spark.jobs.export.state import ExportState
from danube.spark.source.values import TypedRows, find_schemas

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TOPIC = "/default/orders.v1"
TABLE = "default.orders~v1"
IDENTITY = LogIdentity(1, 0)
CREATE = CreateTopic(topic=TOPIC, policy=TopicPolicy(), created_us=1)


class Lake:
    """A store with one topic, and a folder for tables."""

    def __init__(self, root: Path, metadata: Metadata) -> None:
        self.data, self.store, self.target = root / "data", root / "store", root / "lake"
        self.store.mkdir()
        self.target.mkdir()
        self.metadata = metadata

    @property
    def table(self) -> Path:
        return self.target / TABLE

    def put(self) -> None:
        put_history(LocalStore(self.store), self.data, self.metadata, TOPIC)

    def options(self, **more: str) -> dict[str, str]:
        return {"storage": f"file://{self.store}", "target": str(self.target), "processes": "1", **more}

    def grow(self, count: int = 1, records: int = 50, **more: Any) -> None:
        """More sealed segments behind those that are there."""
        log = Log.open(self.data / "partitions" / IDENTITY.directory_name, IDENTITY, 1, LogOptions())
        for _ in range(count):
            append(log, records, **more)
            job = log.roll(b"snapshot")
            assert job is not None
            job.run(set())
            log.sealed(job)
        log.abandon()
        self.put()

    def rows(self) -> Any:
        tables = [pq.read_table(path) for path in sorted(self.table.glob("*.parquet"))]
        return pa.concat_tables(tables, promote_options="permissive")

    def offsets(self) -> list[int]:
        return sorted(self.rows()["offset"].to_pylist())


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    made = Lake(tmp_path, metadata_of(CREATE))
    write_history(made.data, IDENTITY, segments=6)
    made.put()
    return made


def test_every_record_is_exported_once_and_the_next_run_adds_what_is_new(lake: Lake) -> None:
    report = export.run(lake.options(fileBytes="4KiB"))
    assert report.counts["records"] == 600 and report.counts["files"] > 2
    assert lake.offsets() == list(range(600))
    first = lake.rows().sort_by("offset").slice(17, 1).to_pylist()[0]
    assert first["payload"] == b"payload 000017" and first["key"] == b"k3" and first["producer"] == "p"
    assert export.run(lake.options()).counts["records"] == 0
    lake.grow(3)
    again = export.run(lake.options())
    assert again.counts["records"] == 150 and again.facts[TABLE]["ends"] == {"0": 750}
    assert lake.offsets() == list(range(750))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_files_are_so_many_that_all_slots_end_together(lake: Lake, slots: int) -> None:
    """Three files of the size asked for become four where two or four run at once."""
    total = sum(path.stat().st_size for path in lake.store.rglob("*.seg"))
    report = export.run(lake.options(fileBytes=str(total // 3), processes=str(slots)))
    rows = [one["rows"] for one in report.facts[TABLE]["files"]]
    assert len(rows) == (3 if slots == 1 else 4) and sum(rows) == 600
    assert max(rows) <= 1.5 * min(rows)


def test_spark_exports_the_same(lake: Lake, spark: Any) -> None:
    report = export.run(lake.options(fileBytes="4KiB"), spark)
    assert report.counts["records"] == 600
    frame = spark.read.parquet(str(lake.table))
    assert frame.count() == 600 and frame.selectExpr("sum(offset)").first()[0] == sum(range(600))
    rows = export.frame_of(spark, report).orderBy("start").collect()
    assert [row.start for row in rows] == [0, *(row.end for row in rows[:-1])] and rows[-1].end == 600
    assert all(row.rows == row.end - row.start and row["round"] == 1 for row in rows)
    assert {row.file for row in rows} == {path.name for path in lake.table.glob("*.parquet")}


def test_progress_a_report_and_an_exit_code(
    lake: Lake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    words = [f"--{name}={value}" for name, value in lake.options(report=str(path)).items()]
    assert export.main(["--local", *words]) == 0
    told = json.loads(path.read_text())
    assert (told["job"], told["exit_code"], told["counts"]["records"]) == ("export", 0, 600)
    assert [one["rows"] for one in told["facts"][TABLE]["files"]] == [600]
    lines = capsys.readouterr().err.splitlines()
    assert "1 of 1 tasks" in lines[0] and "600 records in 1 new files" in lines[-1]


def test_every_topic_has_a_table_of_its_own() -> None:
    topics = [
        f"/{space}/{name}" for space in ("a", "a.b", "a-b", ".a") for name in ("b.c", "c", "b_c", "b-c", ".b")
    ]
    tables = {export.table_name(topic) for topic in topics}
    assert len(tables) == len(topics)
    assert all(table.count(".") == 1 and not table.startswith(".") for table in tables)


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_tables_hold_every_record_once(lake: Lake, kind: str) -> None:
    pytest.importorskip("deltalake" if kind == "delta" else "pyiceberg")
    for round_number in range(3):
        report = export.run(lake.options(format=kind, fileBytes="4KiB"))
        assert report.counts["records"] == (600 if not round_number else 50)
        assert sorted(_read(lake, kind)["offset"].to_pylist()) == list(range(600 + 50 * round_number))
        lake.grow()


def _read(lake: Lake, kind: str) -> Any:
    if kind == "delta":
        from deltalake import DeltaTable

        return DeltaTable(str(lake.table)).to_pyarrow_table()
    if kind == "iceberg":
        from pyiceberg.catalog.sql import SqlCatalog

        catalog = SqlCatalog("danube", uri=f"sqlite:///{lake.target / 'catalog.db'}")
        table = catalog.load_table(TABLE).scan().to_arrow()
        catalog.close()
        return table
    return lake.rows()


@pytest.mark.parametrize("kind", ["parquet", "delta", "iceberg"])
@pytest.mark.parametrize("step", ["begin", "export", "replace", "commit", "finish"])
def test_a_run_that_ends_anywhere_is_finished_by_the_next(
    lake: Lake, kind: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever step fails, before or after it is done, no record is lost and none comes twice."""
    if kind != "parquet":
        pytest.importorskip("deltalake" if kind == "delta" else "pyiceberg")
    options = lake.options(format=kind, fileBytes="4KiB")
    for after in (False, True):
        lake.grow()
        with monkeypatch.context() as patch:
            _break(patch, kind, step, after)
            with pytest.raises(_Stopped):
                export.run(options)
        lake.grow()  # what came meanwhile must not change the round that was begun
        export.run(options)
        export.run(options)
        end = lake.metadata and ExportState(lake.table).checkpoint(TOPIC, 1).ends["0"]
        assert sorted(_read(lake, kind)["offset"].to_pylist()) == list(range(end))
    assert end == 800


class _Stopped(BaseException):
    """As if the process was killed."""


def _break(patch: pytest.MonkeyPatch, kind: str, step: str, after: bool) -> None:
    calls = [0]

    def broken(real: Any, number: int = 1) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] < number:
                return real(*arguments, **named)
            if after:
                real(*arguments, **named)
            raise _Stopped

        return call

    if step == "begin":
        patch.setattr(ExportState, "begin", broken(ExportState.begin))
    elif step == "finish":
        patch.setattr(ExportState, "finish", broken(ExportState.finish))
    elif step == "export":
        patch.setattr(export, "export", broken(export.export))
    elif step == "replace":
        from danube.spark.jobs.export import tables as export_tables

        patch.setattr(export_tables, "_move", broken(export_tables._move))
    else:
        from danube.spark.jobs.export import tables as export_tables

        patch.setitem(export_tables.COMMITS, kind, broken(export_tables.COMMITS[kind]))


def test_runs_that_are_killed_lose_and_repeat_nothing(lake: Lake) -> None:
    """SIGKILL at many moments of real processes, until one of them comes to its end."""
    command = [
        sys.executable,
        "-m",
        "danube.spark.jobs.export.export",
        "--local",
        "--processes",
        "2",
        "--file-bytes",
        "4KiB",
    ]
    command += ["--storage", f"file://{lake.store}", "--target", str(lake.target)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = 0
    for delay in (0.7, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.4, 60):
        process = subprocess.Popen(
            command,
            env=environment,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            killed += 1
            continue
        assert process.returncode == 0
        break
    assert lake.offsets() == list(range(600))
    assert killed


def test_an_export_in_the_process_of_another_run_is_refused(lake: Lake) -> None:
    export.run(lake.options())
    state = ExportState(lake.table)
    with export._alone(state), pytest.raises(Conflict, match="another run"):
        export.run(lake.options())


def test_a_topic_that_was_made_again_does_not_go_on_in_its_old_table(lake: Lake) -> None:
    export.run(lake.options())
    with pytest.raises(Conflict, match="id 2"):
        ExportState(lake.table).checkpoint(TOPIC, 2)


def test_damage_stops_an_export_or_is_skipped_and_counted(lake: Lake) -> None:
    path = sorted(lake.store.rglob("*.seg"))[1]
    data = bytearray(path.read_bytes())
    data[400] ^= 1
    path.write_bytes(data)
    with pytest.raises(DanubeError, match="damaged at byte"):
        export.run(lake.options())
    report = export.run(lake.options(failOnDataLoss="false"))
    assert report.counts["lost"] == 20 and report.counts["records"] == 580
    assert len(lake.offsets()) == 580


def test_options_are_checked(lake: Lake) -> None:
    with pytest.raises(InvalidArgument, match="target is missing"):
        export.run({"storage": str(lake.store)})
    with pytest.raises(InvalidArgument, match="format"):
        export.run(lake.options(format="csv"))
    with pytest.raises(DanubeError, match="no topic /default/other"):
        export.run(lake.options(topic="/default/other"))
    assert (
        export.main(["--local", "--storage", str(lake.store), "--topic", "/default/x", "--target", "/tmp"])
        == 2
    )


# -- typed values -----------------------------------------------------------------------------------


def _registered(kind: str, definition: Any, *more: Any) -> Metadata:
    from danube.schema.kinds import examine
    from danube.schema.model import SchemaType

    commands: list[Any] = [CREATE]
    for one in (definition, *more):
        made = examine(SchemaType(kind), json.dumps(one).encode())
        commands.append(
            RegisterSchema(
                subject="orders", schema_type=kind, definition=made.text, compiled=made.compiled,
                fingerprint=made.fingerprint, created_us=1, after_revision=0, compatibility="none",
            )
        )  # fmt: skip
    commands.append(ConfigureTopicSchema(topic=TOPIC, schema=TopicSchema(subject="orders")))
    metadata = Metadata()
    for number, command in enumerate(commands, 1):
        if isinstance(command, RegisterSchema):
            known = metadata.registry.find("orders")
            command = msgspec.structs.replace(command, after_revision=known.revision if known else 0)
        metadata.apply(number, command)
    return metadata


ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"}, "name": {"type": "string"}, "paid": {"type": "boolean"},
        "lines": {"type": "array", "items": {"type": "object", "properties": {"price": {"type": "number"}}}},
        "extra": {},
    },
}  # fmt: skip


def test_json_payloads_become_columns(tmp_path: Path) -> None:
    metadata = _registered("json_schema", ORDER)
    lake = Lake(tmp_path, metadata)

    def payloads(start: int, count: int) -> list[bytes]:
        made = [
            {"id": n, "name": f"n{n}", "paid": n % 2 == 0, "lines": [{"price": n}], "extra": {"any": [n]}}
            for n in range(start, start + count)
        ]
        return [json.dumps(one).encode() if one["id"] % 10 else b"not json" for one in made]

    schema_id = metadata.registry.subject("orders").schema_id
    write_history(lake.data, IDENTITY, payloads=payloads, schema_id=schema_id, schema_version=1)
    lake.put()
    report = export.run(lake.options())
    assert report.counts["records"] == 400 and report.counts["unread"] == 40
    rows = {row["offset"]: row for row in lake.rows().to_pylist()}
    assert rows[7]["value"] == {
        "id": 7, "name": "n7", "paid": False, "lines": [{"price": 7.0}], "extra": '{"any":[7]}',
    }  # fmt: skip
    assert rows[10]["value"] is None and rows[10]["payload"] == b"not json"


def test_reads_and_exports_decode_alike(tmp_path: Path) -> None:
    """The same records through ``decode`` of a read: the same values, and null for the same ones."""
    metadata = _registered("json_schema", ORDER)
    lake = Lake(tmp_path, metadata)
    texts = [b'{"id": 1, "lines": [{"price": 2}]}', b"no json", b'{"id": 1e300}', b"[]", b'{"name": null}']
    schema_id = metadata.registry.subject("orders").schema_id
    write_history(
        lake.data, IDENTITY, segments=1, records=len(texts), payloads=lambda start, count: texts,
        schema_id=schema_id,
    )  # fmt: skip
    lake.put()
    exported = {row["offset"]: row["value"] for row in _exported(lake).to_pylist()}
    found = {row["offset"]: row["value"] for row in _typed_rows(lake, ["offset", "value"], allowed=True)}
    assert found == exported and len(found) == 5 * len(texts)
    assert [found[number] is None for number in range(5)] == [False, True, True, True, False]


@pytest.mark.parametrize("cleanup", ["compact", "delete"])
def test_reads_and_exports_have_no_value_for_tombstones(tmp_path: Path, cleanup: str) -> None:
    """Offset 0 is a tombstone where the topic is compacted; offset 1 has no key, so it is no value."""
    metadata = _registered("json_schema", ORDER)
    metadata.apply(metadata.version + 1, UpdatePolicy(topic=TOPIC, policy=TopicPolicy(cleanup=cleanup)))
    lake = Lake(tmp_path, metadata)
    write_history(
        lake.data, IDENTITY, segments=1, batches=1, records=3, keys=[b"k", None, b"k"],
        payloads=[b"", b"", b'{"id": 1}'], schema_id=metadata.registry.subject("orders").schema_id,
    )  # fmt: skip
    lake.put()
    assert export.run(lake.options(keepPayload="false")).counts["unread"] == (
        1 if cleanup == "compact" else 2
    )
    rows = sorted(lake.rows().to_pylist(), key=lambda row: row["offset"])
    assert [row["value"] and row["value"]["id"] for row in rows] == [None, None, 1]
    kept = {"compact": [None, b"", None], "delete": [b"", b"", None]}
    assert [row["payload"] for row in rows] == kept[cleanup]
    with pytest.raises(PayloadInvalid) as caught:
        _typed_rows(lake, ["value"], allowed=False)
    assert caught.value.facts["offset"] == (1 if cleanup == "compact" else 0)


def _typed_rows(lake: Lake, columns: list[str], *, allowed: bool) -> list[dict[str, Any]]:
    """What a read with ``decode=true`` gives of these columns."""
    catalogue = Catalogue(read_options({"topic": TOPIC, "storage": f"file://{lake.store}"}, streaming=False))
    schemas = find_schemas(lake.metadata, [TOPIC], "true")
    kinds = {"offset": pa.int64(), "value": schemas.target.value_type}
    shape = pa.schema([(name, kinds[name]) for name in columns])
    typed = TypedRows(schemas, columns, shape, allowed=allowed)
    (part,) = catalogue.partitions(unsynced=True)
    selection = part.selection(0, part.end)
    return [
        row
        for split in plan_splits([(selection, pieces_of(selection)[0])])
        for batch in read_split(split, catalogue.places, Decoder(typed.needed), Losses())
        for row in typed.take(batch).to_pylist()
    ]


def _exported(lake: Lake) -> Any:
    assert export.run(lake.options()).counts["unread"] == 15
    return lake.rows()


def test_avro_payloads_of_two_versions_become_one_column(tmp_path: Path) -> None:
    import fastavro

    old = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
    new = {**old, "fields": [*old["fields"], {"name": "note", "type": ["null", "string"], "default": None}]}
    metadata = _registered("avro", old, new)
    lake = Lake(tmp_path, metadata)
    schema_id = metadata.registry.subject("orders").schema_id

    def encoded(schema: Any) -> Any:
        parsed = fastavro.parse_schema(schema)

        def payloads(start: int, count: int) -> list[bytes]:
            made = []
            for number in range(start, start + count):
                data = BytesIO()
                fastavro.schemaless_writer(data, parsed, {"id": number, "note": f"note {number}"})
                made.append(data.getvalue())
            return made

        return payloads

    named = {"schema_id": schema_id, "compression": Compression.NONE}
    write_history(lake.data, IDENTITY, segments=1, payloads=encoded(old), schema_version=1, **named)
    lake.grow(payloads=encoded(new), schema_version=2, **named)
    report = export.run(lake.options(keepPayload="false"))
    assert report.counts["unread"] == 0
    rows = {row["offset"]: row for row in lake.rows().to_pylist()}
    assert rows[3]["value"] == {"id": 3, "note": None} and rows[3]["payload"] is None
    assert rows[120]["value"] == {"id": 120, "note": "note 120"}
