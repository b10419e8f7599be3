"""Compaction of a store: the same records in fewer objects, the latest of each key, who may install."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from danube.core.metadata.commands import CreateTopic
from danube.core.partition.policy import TopicPolicy
from danube.errors import Fenced, InvalidArgument, StoreDamaged
from danube.spark.history.places import open_place
from danube.spark.jobs.compact import compact
from danube.spark.jobs.validate import validate
from danube.wal.segments.segment import LogIdentity
from danube.wal.stores.directory import LocalStore
from danube.wal.tier.keys import manifest_key
from danube.wal.tier.manifest import EntryFlag, Manifest
from tests.spark.stored_history import metadata_of, put_history, write_history

pa = pytest.importorskip("pyarrow")

TOPIC = "/default/orders"
CREATE = CreateTopic(topic=TOPIC, policy=TopicPolicy(), created_us=1, partitions=2)
SNAPSHOT = b"snapshot"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    root.mkdir()
    for partition in range(2):
        write_history(tmp_path / "data", LogIdentity(1, partition), segments=20)
    put_history(LocalStore(root), tmp_path / "data", metadata_of(CREATE), TOPIC)
    return root


def run(store: Path, spark: Any = None, **options: str) -> Any:
    return compact.run({"storage": f"file://{store}", "processes": "1", **options}, spark)


def manifest_of(store: Path, partition: int = 0) -> Manifest:
    found = open_place(f"file://{store}").manifest(LogIdentity(1, partition))  # type: ignore[union-attr]
    assert found is not None
    return found


def rows_of(store: Path) -> dict[tuple[int, int], tuple[bytes, bytes]]:
    """Key and payload of every record that a reader sees, by partition and offset."""
    from danube.spark.history.decode import Decoder, Losses
    from danube.spark.history.options import read_options
    from danube.spark.history.plan import pieces_of, plan_splits
    from danube.spark.history.reading import read_split
    from danube.spark.history.selecting import Catalogue

    catalogue = Catalogue(read_options({"storage": f"file://{store}", "topic": TOPIC}, streaming=False))
    found: dict[tuple[int, int], tuple[bytes, bytes]] = {}
    for part in catalogue.partitions(unsynced=True):
        selection = part.selection(part.start, part.end)
        for split in plan_splits([(selection, pieces_of(selection)[0])]):
            decoder = Decoder(("partition", "offset", "key", "payload"))
            for batch in read_split(split, catalogue.places, decoder, Losses()):
                for row in batch.to_pylist():
                    place = (row["partition"], row["offset"])
                    assert place not in found
                    found[place] = (row["key"], row["payload"])
    return found


def test_small_objects_become_one_with_the_same_records(store: Path) -> None:
    before = rows_of(store)
    report = run(store, install="offline")
    assert report.counts["source_objects"] == 40 and report.counts["objects"] == 2
    assert report.counts["installed"] == 2
    assert len(manifest_of(store)) == 1 and manifest_of(store).entry(0).flags & EntryFlag.MERGED
    assert rows_of(store) == before
    assert validate.run({"storage": f"file://{store}", "processes": "1"}).findings == []
    assert run(store, install="offline").counts["source_objects"] == 0, "nothing is left to do"


def test_spark_stages_the_same_objects(store: Path, spark: Any) -> None:
    one, other = run(store), run(store, spark)
    assert one.facts == other.facts and len(one.facts) == 2
    rows = compact.frame_of(spark, other).orderBy("partition").collect()
    assert [(row.partition, row.start, row.end, row.sources) for row in rows] == [
        (0, 0, 2_000, 20),
        (1, 0, 2_000, 20),
    ]
    assert {(row.topic, row.outcome, row.removed) for row in rows} == {(TOPIC, "staged", 0)}
    assert all((store / row.key).stat().st_size == row.bytes < row.source_bytes for row in rows)


def test_the_size_of_what_is_made_is_bounded(store: Path) -> None:
    size = manifest_of(store).entry(0).size_bytes
    report = run(store, below=str(size + 100), to=str(5 * size), install="offline")
    assert report.counts["objects"] == 8
    assert all(manifest_of(store).entry(n).size_bytes <= 5 * size for n in range(len(manifest_of(store))))


def test_nothing_is_installed_unless_it_is_asked_for(store: Path) -> None:
    before = manifest_of(store)
    report = run(store)
    assert manifest_of(store) == before
    assert report.counts["objects"] == 2 and "installed" not in report.counts
    assert all((store / one["key"]).exists() for fact in report.facts.values() for one in fact["objects"])
    (made,) = report.facts[before.identity.directory_name]["objects"]
    assert (made["sources"], made["outcome"]) == (20, "staged")
    found = validate.run({"storage": f"file://{store}", "processes": "1"})
    assert found.findings == [] and any("not in a manifest yet" in remark for remark in found.remarks)


def test_progress_a_report_and_an_exit_code(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    words = ["--local", "--processes", "1", "--storage", f"file://{store}", "--report", str(path)]
    assert compact.main([*words, "--install", "offline"]) == 0
    told = json.loads(path.read_text())
    assert told["job"] == "compact" and told["exit_code"] == 0 and told["counts"]["installed"] == 2
    (made,) = told["facts"][manifest_of(store).identity.directory_name]["objects"]
    assert made["outcome"] == "installed" and made["key"].endswith(".seg")
    lines = capsys.readouterr().err.splitlines()
    assert "2 of 2 tasks" in lines[0] and "40 objects became 2 (2 installed)" in lines[-1]


def test_a_dry_run_only_counts(store: Path) -> None:
    before = sorted(store.rglob("*"))
    report = run(store, dryRun="true")
    assert report.counts["planned_objects"] == 2 and sorted(store.rglob("*")) == before


def test_the_latest_record_of_each_key_stays(store: Path) -> None:
    before = rows_of(store)
    expected: dict[tuple[int, int], tuple[bytes, bytes]] = {}
    newest: dict[tuple[int, bytes], int] = {}
    for (partition, offset), (key, _) in sorted(before.items()):
        newest[partition, key] = offset
    for (partition, key), offset in newest.items():
        expected[partition, offset] = before[partition, offset]
        assert key is not None
    report = run(store, keys="true", to="16KiB", install="offline")
    assert report.counts["removed_records"] == len(before) - len(expected)
    assert rows_of(store) == expected
    assert manifest_of(store).entry(0).flags & EntryFlag.COMPACTED
    assert manifest_of(store).uploaded_end == 2_000
    assert validate.run({"storage": f"file://{store}", "processes": "1"}).findings == []


def test_what_is_compacted_already_is_not_written_again(store: Path) -> None:
    assert run(store, keys="true", install="offline").counts["installed"] == 2
    before = sorted(store.rglob("*.seg"))
    assert run(store, keys="true", install="offline").counts["objects"] == 0
    assert run(store, install="offline").counts["source_objects"] == 0, "and is not merged with others"
    assert sorted(store.rglob("*.seg")) == before


def test_a_key_compaction_is_installed_up_to_what_has_changed(store: Path) -> None:
    """What follows may lack tombstones, and older records of their keys would be back."""
    planned = manifest_of(store)
    place = open_place(f"file://{store}")
    objects = compact.decode_staged(compact.stage(compact_task_of(store, planned)))
    assert len(objects) == 10
    changed = [objects[0], msgspec.structs.replace(objects[1], sources=[b"x" * 16]), *objects[2:]]
    words = [one.word for one in compact.install(place, planned, changed)]  # type: ignore[arg-type]
    assert words == ["installed", *["refused"] * (len(objects) - 1)]


def compact_task_of(store: Path, planned: Manifest) -> Any:
    """One partition, two objects in each group."""
    entries = [planned.entry(index) for index in range(len(planned))]
    place = open_place(f"file://{store}")
    groups = tuple(tuple(entries[first : first + 2]) for first in range(0, len(entries), 2))
    work = str(store.parent)
    return compact.CompactTask(
        place,
        TOPIC,
        planned.identity,
        planned.epoch,
        groups,
        True,
        10_000,
        0,
        work,  # type: ignore[arg-type]
    )


def test_a_damaged_source_is_never_made_into_something_that_looks_whole(store: Path) -> None:
    path = sorted(store.rglob("*.seg"))[3]
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)
    before = manifest_of(store)
    for keys in ("false", "true"):
        with pytest.raises(StoreDamaged):
            run(store, keys=keys, install="offline")
    assert manifest_of(store) == before


def test_a_broker_that_goes_on_meanwhile_wins(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer owner's manifest between planning and installing: nothing of it is overwritten."""
    planned = manifest_of(store)
    report_of = compact.stage

    def stage(task: Any) -> bytes:
        newer = planned.taken_over(planned.epoch + 1)
        (store / manifest_key(planned.identity, newer.epoch, newer.generation)).write_bytes(newer.encode())
        return report_of(task)

    monkeypatch.setattr(compact, "stage", stage)
    with pytest.raises(Fenced, match="newer owner"):
        run(store, install="offline")
    assert manifest_of(store).epoch == planned.epoch + 1 and len(manifest_of(store)) == 20


def test_sources_that_were_merged_meanwhile_are_left_alone(store: Path) -> None:
    planned = manifest_of(store)
    place = open_place(f"file://{store}")
    run(store, install="offline")
    merged = manifest_of(store)
    objects = [compact.Staged(planned.entry(0)[:14], [b"x" * 16])]
    (outcome,) = compact.install(place, planned, objects)  # type: ignore[arg-type]
    assert outcome.word == "refused" and "sources" in outcome.why
    assert manifest_of(store) == merged


def test_a_data_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "metadata.log").touch()
    with pytest.raises(InvalidArgument, match="data directory"):
        compact.run({"storage": str(tmp_path)})
    with pytest.raises(InvalidArgument, match="install"):
        compact.run({"storage": str(tmp_path), "install": "now"})
    assert compact.main(["--local", "--storage", str(tmp_path)]) == 2
