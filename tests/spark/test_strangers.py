"""Segments of another broker's topic with the same name and id are damage to a reader, never records."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from danube.cluster.log.local_log import LocalLog
from danube.core.metadata.commands import CreateTopic
from danube.core.partition.policy import TopicPolicy
from danube.errors import Conflict, Damage, StoreDamaged
from danube.spark.history.decode import Decoder, Losses
from danube.spark.history.options import read_options
from danube.spark.history.places import StorePlace, open_place
from danube.spark.history.plan import pieces_of, plan_splits
from danube.spark.history.reading import read_split
from danube.spark.history.selecting import Catalogue
from danube.spark.jobs.compact.task import CompactTask, stage
from danube.spark.jobs.findings import Damage as Kind
from danube.spark.jobs.validate.directory import DirectoryPlan
from danube.spark.jobs.validate.segment import validate_segment
from danube.wal.segments.segment import file_name
from danube.wal.tier.keys import metadata_key, segment_key
from danube.wal.tier.manifest import Manifest
from danube.wal.tier.staged import decode_staged
from danube.wal.verify.bytes import BytesSource
from tests.unit.store_samples import entry_for, put_manifest
from tests.unit.wal.log.test_log_identity import IDENTITY, OURS, THEIRS, TOPIC, filled, machine


def read(storage: str, start: int = 0) -> list[int]:
    """Offsets of all records from ``start`` on, through a plan and the reader of tasks."""
    given = {"topic": TOPIC, "storage": storage}
    if start:
        given["startingOffsets"] = f'{{"{TOPIC}": {{"0": {start}}}}}'
    options = read_options(given, streaming=False)
    catalogue = Catalogue(options)
    (part,) = catalogue.partitions(unsynced=True)
    begin = catalogue.resolve(options.starting, [part], ending=False)[part.key]
    end = catalogue.resolve(options.ending, [part], ending=True)[part.key]
    selection = part.selection(begin, end)
    splits = pickle.loads(pickle.dumps(plan_splits([(selection, pieces_of(selection)[0])])))
    found: list[int] = []
    for split in splits:
        for batch in read_split(split, catalogue.places, Decoder(["offset"]), Losses()):
            found += batch.column("offset").to_pylist()
    return found


def with_metadata(data: Path, created_us: int = 1_000) -> Path:
    with LocalLog(data / "metadata") as log:
        log.propose(CreateTopic(topic=TOPIC, policy=TopicPolicy(), created_us=created_us))
    return data


@pytest.mark.parametrize("base", [0, 2, 4])
def test_a_strangers_file_is_damage(tmp_path: Path, base: int) -> None:
    data = with_metadata(tmp_path / "a")
    ours, theirs = filled(data, OURS, b"a"), filled(tmp_path / "b", THEIRS, b"b")
    assert read(str(data)) == [0, 1, 2, 3, 4]
    shutil.copy(theirs / file_name(base), ours / file_name(base))
    for start in (0, base + (base < 4)):
        with pytest.raises(Damage, match="belongs elsewhere"):
            read(str(data), start)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_strangers_object_is_damage_wherever_a_read_begins(tmp_path: Path, start: int) -> None:
    (tmp_path / "store").mkdir()
    place = open_place(f"file://{tmp_path / 'store'}")
    assert isinstance(place, StorePlace)
    for log_id in (OURS, THEIRS):
        store, manifest = place.store(), Manifest.empty(TOPIC, IDENTITY, 1)
        store.delete([info.key for info in list(store.list(""))])
        store.put("store.json", b'{"format": 1, "store_id": "x", "created_us": 1}')
        store.put(metadata_key(1), machine().snapshot())
        directory = filled(tmp_path / log_id.hex(), log_id, b"a")
        for base in (0, 2):
            data = (directory / file_name(base)).read_bytes()
            entry = entry_for(data)
            store.put(segment_key(IDENTITY, entry), data)
            manifest = manifest.with_added(entry)
        put_manifest(store, manifest)
        if log_id == OURS:
            assert read(place.settings.url, start) == list(range(start, 4))
            continue
        with pytest.raises(Damage, match="belongs elsewhere"):
            read(place.settings.url, start)


def test_places_of_two_brokers_with_the_same_ids_are_refused(tmp_path: Path) -> None:
    places = [with_metadata(tmp_path / name, moment) for name, moment in (("a", 1_000), ("b", 1_001))]
    filled(places[0], OURS, b"a")
    filled(places[1], THEIRS, b"b")
    with pytest.raises(Conflict, match="is another one than elsewhere"):
        read(",".join(str(place) for place in places))


def test_validation_names_a_strangers_file(tmp_path: Path) -> None:
    data = with_metadata(tmp_path / "a")
    ours, theirs = filled(data, OURS, b"a"), filled(tmp_path / "b", THEIRS, b"b")
    for path, log_id, strange in ((ours, OURS, False), (theirs, OURS, True), (theirs, THEIRS, False)):
        plan = DirectoryPlan(IDENTITY, path, log_id)
        sources = [BytesSource(Path(one.where).read_bytes()) for one in plan.work]
        plan.judge([validate_segment(*pair) for pair in zip(sources, plan.work, strict=True)])
        found = [(one.fault, one.position) for one in plan.part.findings]
        assert found == [(Kind.WRONG_PARTITION, 44)] * 3 * strange


@pytest.mark.parametrize("keys", [False, True])
def test_a_compaction_takes_no_strangers_objects(tmp_path: Path, keys: bool) -> None:
    (tmp_path / "store").mkdir()
    place = open_place(f"file://{tmp_path / 'store'}")
    assert isinstance(place, StorePlace)
    directory, group = filled(tmp_path / "b", THEIRS, b"b"), []
    for base in (0, 2):
        data = (directory / file_name(base)).read_bytes()
        group.append(entry_for(data))
        place.store().put(segment_key(IDENTITY, group[-1]), data)
    task = CompactTask(place, TOPIC, IDENTITY, 1, (tuple(group),), keys, 100, 0, str(tmp_path))
    assert len(decode_staged(stage(task))) == 1
    with pytest.raises((Damage, StoreDamaged), match="another broker"):
        stage(task._replace(log_id=OURS))
