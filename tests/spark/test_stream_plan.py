"""A micro-batch that is planned again gives each task the same records, wherever they lie by then."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from pyspark.sql.streaming.datasource import ReadAllAvailable

from danube.cluster.log import log_file
from danube.core.metadata.commands import CreateTopic
from danube.core.partition.policy import TopicPolicy
from danube.spark.history.offsets import PartitionKey, pack, unpack
from danube.spark.history.options import read_options
from danube.spark.history.plan import SPLIT_BYTES, SPLITS_MAX
from danube.spark.source.schema import columns_of
from danube.spark.source.splits import RECORDS, Range, cut_ranges
from danube.spark.source.stream import DanubeStreamReader
from danube.wal.log.log import Log, LogOptions
from danube.wal.segments.holes import Hole, HoleKind
from danube.wal.segments.segment import LogIdentity
from danube.wal.stores.directory import LocalStore
from tests.spark.stored_history import append, metadata_of, put_history

TOPIC = "/default/orders"
A, B = PartitionKey(TOPIC, 1, 0), PartitionKey(TOPIC, 1, 1)


def growing(start: int, count: int) -> list[bytes]:
    return [b"x" * (9 * number) for number in range(start, start + count)]


def written(directory: Path, number: int, batches: int, *, each: bool = False) -> None:
    """Records that grow with their offsets, in one sealed segment, or one for ``each`` batch."""
    identity = LogIdentity(1, number)
    log = Log.open(directory / "partitions" / identity.directory_name, identity, 1, LogOptions())
    for size in range(batches):
        append(log, 5 + size, payloads=growing)
        if each or size + 1 == batches:
            seal = log.roll(b"snapshot")
            assert seal is not None
            seal.run(set())
            log.sealed(seal)
    log.abandon()


def tasks(reader: DanubeStreamReader, start: Any, end: Any) -> list[list[tuple[int, int]]]:
    """What each task reads: partition and offset of every record, in order."""
    return [
        [
            row
            for batch in reader.read(split)
            for row in zip(batch["partition"].to_pylist(), batch["offset"].to_pylist(), strict=True)
        ]
        for split in reader.partitions(start, end)
    ]


@pytest.mark.parametrize("more", [{}, {"minPartitions": "6"}, {"splitBytes": "5KiB"}])
def test_a_batch_that_is_planned_again_after_an_upload_has_the_same_tasks(
    tmp_path: Path, more: dict[str, str]
) -> None:
    data, store = tmp_path / "data", tmp_path / "store"
    metadata = metadata_of(CreateTopic(topic=TOPIC, policy=TopicPolicy(), created_us=1, partitions=2))
    (data / "metadata").mkdir(parents=True)
    store.mkdir()
    (data / "metadata" / "metadata.log").write_bytes(log_file.new_file(1, metadata.snapshot()))
    (tmp_path / "merged" / "partitions").mkdir(parents=True)
    put_history(LocalStore(store), tmp_path / "merged", metadata, TOPIC)  # nothing is uploaded yet
    for number in (0, 1):
        written(data, number, 12 + number, each=True)
        written(tmp_path / "merged", number, 12 + number)
    options = {"topic": TOPIC, "storage": f"{data},file://{store}", "startingOffsets": "earliest", **more}

    def reader() -> DanubeStreamReader:
        return DanubeStreamReader(read_options(options, streaming=True), columns_of())

    first = reader()
    start = first.initialOffset()
    end = first.latestOffset(start, ReadAllAvailable())
    before = tasks(first, start, end)
    assert sum(map(len, before)) == sum(unpack(end).values())
    put_history(
        LocalStore(store), tmp_path / "merged", metadata, TOPIC
    )  # uploaded, merged, and removed there
    shutil.rmtree(data / "partitions")
    assert tasks(reader(), start, end) == before
    if "minPartitions" in more:
        assert len(before) >= 6
    for part in (A, B):
        assert [offset for rows in before for number, offset in rows if number == part.partition] == list(
            range(unpack(end)[part])
        )


def test_a_partition_that_is_new_begins_where_the_checkpoint_says(tmp_path: Path) -> None:
    data = tmp_path / "data"
    metadata = metadata_of(CreateTopic(topic=TOPIC, policy=TopicPolicy(), created_us=1, partitions=2))
    (data / "metadata").mkdir(parents=True)
    (data / "metadata" / "metadata.log").write_bytes(log_file.new_file(1, metadata.snapshot()))
    for number in (0, 1):
        written(data, number, 2)
    options = read_options({"topic": TOPIC, "storage": str(data)}, streaming=True)
    reader = DanubeStreamReader(options, columns_of())
    known = pack({A: 3})
    end = reader.latestOffset(known, ReadAllAvailable())
    assert unpack(end) == {A: 11, B: 0}
    assert unpack(reader.latestOffset(end, ReadAllAvailable())) == {A: 11, B: 11}


def test_ranges_are_cut_by_offset_and_small_ones_share_a_task() -> None:
    assert cut_ranges({A: 0, B: 5}, {A: 10, B: 9}, {}) == [[Range(A, 0, 10), Range(B, 5, 9)]]
    assert cut_ranges({A: 0}, {A: 0}, {}) == [] and cut_ranges({}, {A: 9}, {}) == []
    six = cut_ranges({A: 0, B: 0}, {A: 300, B: 30}, {}, 6)
    assert len(six) == 6 and six[5] == [Range(A, 275, 300), Range(B, 0, 30)]
    whole = cut_ranges({A: 0}, {A: 3 * RECORDS}, {})
    assert whole == [[Range(A, number * RECORDS, (number + 1) * RECORDS)] for number in range(3)]
    assert len(cut_ranges({A: 0}, {A: RECORDS}, {}, 0, SPLIT_BYTES // 4)) == 4
    assert len(cut_ranges({A: 0}, {A: 10**12}, {}, 0, 1)) <= SPLITS_MAX


def test_a_hole_takes_no_task() -> None:
    hole = Hole(100, 1 << 50, 0, 1, HoleKind.UNUSED)
    found = cut_ranges({A: 0}, {A: (1 << 50) + 100}, {A: [hole]}, 2)
    assert found == [[Range(A, 0, 1 << 50)], [Range(A, 1 << 50, (1 << 50) + 100)]]
    assert cut_ranges({A: 100}, {A: 1 << 50}, {A: [hole]}) == [[Range(A, 100, 1 << 50)]]
