"""What was put back from a copy: positions that others kept are of it, or refused; no record comes unseen."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from danube.broker.partition.opening import ahead_of
from danube.broker.processes.copied import note_place, settle_place
from danube.broker.processes.data_dir import DataDir
from danube.cluster.log import log_file
from danube.cluster.log.local_log import LocalLog
from danube.core.metadata.commands import CreateTopic
from danube.core.partition.policy import TopicPolicy
from danube.core.placement.recovered import OFFSETS_AHEAD, recovery_of
from danube.errors import Conflict, DanubeError, OffsetOutOfRange
from danube.spark.history.offsets import PartitionKey, history_in, limited, pack, unpack
from danube.spark.history.options import read_options
from danube.spark.jobs.export import export
from danube.spark.jobs.findings import Damage
from danube.spark.jobs.replay import replay
from danube.spark.jobs.validate import validate
from danube.spark.source.schema import columns_of
from danube.spark.source.source import DanubeReader
from danube.spark.source.stream import DanubeStreamReader
from danube.wal.log.log import Log, LogOptions
from danube.wal.segments.holes import Hole, HoleKind
from danube.wal.segments.local_holes import FILE_NAME as HOLES_NAME
from danube.wal.segments.segment import LogIdentity
from danube.wal.stores.directory import LocalStore
from tests.spark.stored_history import append, metadata_of, put_history

TOPIC = "/default/orders"
IDENTITY = LogIdentity(1, 0)
KEY = PartitionKey(TOPIC, 1, 0)


class Site:
    """A data directory without its broker: 100 records, then what a test does with it and its copies."""

    def __init__(self, root: Path) -> None:
        self.root, self.data = root, root / "data"
        data = DataDir(self.data)
        metadata = metadata_of(CreateTopic(topic=TOPIC, policy=TopicPolicy(), created_us=1))
        (self.data / "metadata").mkdir()
        (self.data / "metadata" / "metadata.log").write_bytes(log_file.new_file(1, metadata.snapshot()))
        data.close()
        note_place(self.data)
        self.grow(100)

    def start(self) -> int:
        """As a broker does; the epoch of the logs that it opens."""
        data = DataDir(self.data)
        settle_place(data)
        epoch = data.next_incarnations(1) * 256
        data.close()
        return epoch

    def grow(self, count: int) -> list[int]:
        """Start, append and stop; the offsets that the records got."""
        epoch = self.start()
        with LocalLog(self.data / "metadata", create=False) as log_of_metadata:
            ahead = ahead_of(log_of_metadata.state, IDENTITY.topic_id)
        directory = self.data / "partitions" / IDENTITY.directory_name
        log = Log.open(directory, IDENTITY, epoch, LogOptions(), ahead=ahead)
        start = log.log_end
        append(log, count, keys=None)
        log.close()
        return list(range(start, start + count))

    def back_up(self) -> Path:
        return Path(shutil.copytree(self.data, self.root / "backup"))

    def put_back(self) -> None:
        shutil.rmtree(self.data)
        shutil.copytree(self.root / "backup", self.data)

    def options(self, **more: str) -> dict[str, str]:
        return {"storage": str(self.data), "topic": TOPIC, **more}

    def stream(self, **more: str) -> DanubeStreamReader:
        options = read_options(self.options(startingOffsets="earliest", **more), streaming=True)
        return DanubeStreamReader(options, columns_of())

    def all(self, **more: str) -> list[int]:
        reader = DanubeReader(read_options(self.options(**more), streaming=False), columns_of())
        return offsets_of(reader, reader.partitions())


def offsets_of(reader: Any, splits: Any) -> list[int]:
    return [
        offset for split in splits for batch in reader.read(split) for offset in batch["offset"].to_pylist()
    ]


def take(stream: DanubeStreamReader, start: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """One micro-batch: its end, and the offsets of its records."""
    end = stream.latestOffset(start, ReadAllAvailable())
    return end, offsets_of(stream, stream.partitions(start, end))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def behind_the_copy(site: Site) -> tuple[dict[str, Any], list[int]]:
    """A stream has read 50 records that came after the copy, which was put back; 70 came since."""
    site.back_up()
    site.grow(50)
    stream = site.stream()
    checkpoint, read = take(stream, stream.initialOffset())
    assert read == list(range(150)) and history_in(checkpoint) == ""
    site.put_back()
    return checkpoint, site.grow(70)


def test_a_stream_behind_the_copy_is_told_both_histories_and_goes_on_where_that_is_allowed(
    site: Site,
) -> None:
    checkpoint, new = behind_the_copy(site)
    assert new[0] > 150 + OFFSETS_AHEAD
    with pytest.raises(OffsetOutOfRange) as caught:
        site.stream().latestOffset(checkpoint, ReadAllAvailable())
    with LocalLog(site.data / "metadata", create=False) as log:
        name = recovery_of(log.state).history_id
    for part in ("offset 150", "history first ends at 100", name[:8], str(new[0])):
        assert part in str(caught.value), part
    with pytest.raises(OffsetOutOfRange):  # a batch that was planned before and is repeated
        site.stream().partitions(pack({KEY: 120}), checkpoint)
    tolerant = site.stream(failOnDataLoss="false")
    end, read = take(tolerant, checkpoint)
    assert read == new and history_in(end) == name
    assert take(site.stream(), end)[1] == []
    assert site.all() == [*range(100), *new], "who begins at the start meets no loss"


def test_a_stream_that_had_read_only_what_the_copy_holds_goes_on(site: Site) -> None:
    stream = site.stream()
    checkpoint, _ = take(stream, stream.initialOffset())
    behind_the_copy(site)
    stream = site.stream()
    end, read = take(stream, checkpoint)
    assert len(read) == 70
    more = site.grow(5)
    assert take(stream, end)[1] == more


def test_small_steps_cross_the_hole_at_once(site: Site) -> None:
    _, new = behind_the_copy(site)
    stream, at, read, steps = site.stream(), None, [], 0
    at = stream.initialOffset()
    while True:
        end = stream.latestOffset(at, ReadMaxRows(40))
        if end == at:
            break
        got = offsets_of(stream, stream.partitions(at, end))
        assert len(got) <= 40
        read, at, steps = read + got, end, steps + 1
    assert read == [*range(100), *new] and steps <= 6


def test_a_copy_that_is_put_back_twice_is_a_history_of_its_own(site: Site) -> None:
    checkpoint, new = behind_the_copy(site)
    _, read = take(site.stream(failOnDataLoss="false"), checkpoint)
    end = site.stream(failOnDataLoss="false").latestOffset(checkpoint, ReadAllAvailable())
    assert read == new
    site.put_back()
    site.grow(10)
    with pytest.raises(Conflict) as caught:
        site.stream().latestOffset(end, ReadAllAvailable())
    assert history_in(end)[:8] in str(caught.value)


def test_a_position_beyond_the_end_is_told_with_both_numbers(site: Site) -> None:
    with pytest.raises(OffsetOutOfRange, match=r"(?s)offset 150.*ends at 100"):
        site.stream().latestOffset(pack({KEY: 150}), ReadAllAvailable())
    assert take(site.stream(failOnDataLoss="false"), pack({KEY: 150}))[1] == []


@pytest.mark.parametrize("name", ["startingOffsets", "endingOffsets"])
def test_offsets_that_were_noted_in_a_history_that_is_gone_are_refused(site: Site, name: str) -> None:
    _, new = behind_the_copy(site)
    with pytest.raises(OffsetOutOfRange, match=f"{name} is at offset 150"):
        site.all(**{name: f'{{"{TOPIC}": {{"0": 150}}}}'})
    with pytest.raises(OffsetOutOfRange, match=f"which ends at {new[-1] + 1}"):
        site.all(**{name: f'{{"{TOPIC}": {{"0": {new[-1] + 2}}}}}'})
    assert site.all(startingOffsets=f'{{"{TOPIC}": {{"0": 100}}}}') == new


def exported(site: Site, **more: str) -> list[int]:
    export.run(site.options(target=str(site.root / "lake"), processes="1", **more))
    paths = sorted((site.root / "lake" / "default.orders").glob("*.parquet"))
    return sorted(pa.concat_tables(pq.read_table(path) for path in paths)["offset"].to_pylist())


def test_an_export_behind_the_copy_is_refused_and_goes_on_where_that_is_allowed(site: Site) -> None:
    site.back_up()
    site.grow(50)
    assert exported(site) == list(range(150))
    site.put_back()
    new = site.grow(70)
    with pytest.raises(OffsetOutOfRange, match=r"the export is at offset 150"):
        exported(site)
    assert exported(site, failOnDataLoss="false") == [*range(150), *new]
    assert exported(site) == [*range(150), *new], "and now it is of this history"


def test_a_round_of_an_export_that_was_begun_in_another_history_is_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.back_up()
    site.grow(50)
    with monkeypatch.context() as patch:
        patch.setattr(export._Job, "_write", lambda *_: (_ for _ in ()).throw(DanubeError("killed")))
        with pytest.raises(DanubeError):
            exported(site)
    site.put_back()
    site.grow(70)
    with pytest.raises(OffsetOutOfRange, match="the export is at offset 150"):
        exported(site)


def test_a_replay_goes_on_with_its_lanes_or_says_that_they_are_gone(site: Site) -> None:
    site.back_up()
    site.grow(50)
    state = site.root / "state.json"
    files = str(site.root / "files")
    wanted = site.options(toDirectory=files, job="j", state=str(state), processes="1")
    report = replay.run(wanted)
    assert report.counts["records"] == 150 and "history" in msgspec.json.decode(state.read_bytes())
    site.put_back()
    site.grow(70)
    with pytest.raises(OffsetOutOfRange, match="the replay is at offset 150"):
        replay.run(wanted)


def test_a_store_tells_of_histories_and_holes_too(site: Site) -> None:
    checkpoint, new = behind_the_copy(site)
    store = site.root / "store"
    store.mkdir()
    with LocalLog(site.data / "metadata", create=False) as log:
        put_history(LocalStore(store), site.data, log.state.copy(), TOPIC)
    options = {"storage": f"file://{store}", "topic": TOPIC}
    with pytest.raises(OffsetOutOfRange, match="history first ends at 100"):
        DanubeStreamReader(read_options(options, streaming=True), columns_of()).latestOffset(
            checkpoint, ReadAllAvailable()
        )
    reader = DanubeReader(read_options(options, streaming=False), columns_of())
    assert offsets_of(reader, reader.partitions()) == [*range(100), *new]


def test_validation_knows_what_was_passed_over_and_tells_when_that_cannot_be_read(site: Site) -> None:
    behind_the_copy(site)
    directory = site.data / "partitions" / IDENTITY.directory_name
    assert validate.run({"storage": str(site.data), "processes": "1"}).findings == []
    (directory / HOLES_NAME).write_bytes(b"00000000 []")
    found = validate.run({"storage": str(site.data), "processes": "1"}).findings
    assert {one.kind for one in found} == {Damage.HOLES_DAMAGED, Damage.OFFSETS_MISSING}


# -- positions ----------------------------------------------------------------------------------------


def test_a_checkpoint_says_its_history_and_one_of_before_is_of_the_first() -> None:
    assert pack({KEY: 3}) == {TOPIC: {"id": 1, "offsets": {"0": 3}}}
    packed = pack({KEY: 3}, "h1")
    assert history_in(packed) == "h1" and unpack(packed) == {KEY: 3}
    assert history_in(pack({KEY: 3})) == ""


@pytest.mark.parametrize(
    ("start", "most", "end"),
    [(0, 5, 5), (0, 10, 1000), (0, 11, 1001), (5, 6, 1001), (10, 1, 1001), (999, 1, 1001)],
)
def test_offsets_in_a_hole_are_no_records(start: int, most: int, end: int) -> None:
    hole = Hole(10, 1000, 0, 1, HoleKind.UNUSED)
    assert limited({KEY: start}, {KEY: 2000}, most, {KEY: [hole]}) == {KEY: end}
