"""Reading what a real broker wrote, killed and started again, without Spark: plans, fetching, decoding."""

from __future__ import annotations

import pickle
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import danube.sync
from danube.core import kernels
from danube.core.batch.format import HEADER_BYTES as BATCH_HEADER_BYTES
from danube.errors import Damage, OffsetOutOfRange
from danube.spark.history.decode import COLUMNS, Decoder, Losses
from danube.spark.history.options import read_options
from danube.spark.history.places import open_place
from danube.spark.history.plan import Selection, pieces_of, plan_splits
from danube.spark.history.reading import read_split
from danube.spark.history.selecting import Catalogue
from danube.wal.segments.segment import HEADER_BYTES, LogIdentity
from tests.broker_process import BrokerProcess
from tests.spark.history import TOPIC, Journal, digest_of_batches, publish
from tests.spark.segments import Shape, fill_partition, make_directory

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Journal]]:
    """A data directory whose broker was killed twice while producers were sending, and the journal."""
    data = tmp_path_factory.mktemp("history") / "data"
    journal = Journal()
    broker = BrokerProcess(data, workers=1).start()
    try:
        with danube.sync.connect(broker.address) as client:
            client.admin.create_topic(TOPIC)
        for life in range(3):
            sender = threading.Thread(
                target=publish, args=(broker, journal, random.Random(life)), kwargs={"rounds": 12}
            )
            sender.start()
            if life < 2:
                sender.join(0.4)
                broker.kill()
                broker.start()
            sender.join(60)
            assert not sender.is_alive()
    finally:
        broker.kill()
    yield data, journal


def read_all(
    data: Path, *, columns: Any = None, split_bytes: int = 100_000, losses: Losses | None = None, **given: str
) -> list[Any]:
    """All records that the options choose, through plans, pickled splits and the reader of tasks."""
    options = read_options({"topic": TOPIC, "storage": str(data), **given}, streaming=False)
    catalogue = Catalogue(options)
    known = catalogue.partitions(unsynced=True)
    start = catalogue.resolve(options.starting, known, ending=False)
    end = catalogue.resolve(options.ending, known, ending=True)
    planned = []
    for part in known:
        selection = part.selection(start[part.key], end[part.key])
        planned.append((selection, pieces_of(selection)[0]))
    decoder = Decoder(COLUMNS.names if columns is None else columns)
    batches: list[Any] = []
    for split in pickle.loads(pickle.dumps(plan_splits(planned, split_bytes=split_bytes))):
        batches += read_split(split, catalogue.places, decoder, losses or Losses())
    for batch in batches:
        batch.validate(full=True)
    return batches


def offsets_of(batches: list[Any]) -> list[int]:
    return [offset for batch in batches for offset in batch.column("offset").to_pylist()]


def test_every_record_comes_once_and_as_it_was_sent(stored: tuple[Path, Journal]) -> None:
    data, journal = stored
    batches = read_all(data)
    assert offsets_of(batches) == list(range(len(journal.records)))
    assert digest_of_batches(batches) == journal.digest()
    names = {name for batch in batches for name in batch.column("producer").to_pylist()}
    assert names == {"shop-0", "shop-1", "shop-2"}
    assert {batch.schema for batch in batches} == {COLUMNS}


def test_the_twins_of_the_kernels_give_the_same(stored: tuple[Path, Journal], monkeypatch: Any) -> None:
    data, journal = stored
    monkeypatch.setattr("danube.core.kernels.load", kernels.unload)
    try:
        assert digest_of_batches(read_all(data)) == journal.digest()
        assert not kernels.available
    finally:
        monkeypatch.undo()
        kernels.load()


@pytest.mark.parametrize("split_bytes", [1, 3_000, 1 << 30])
def test_splits_of_any_size_hold_each_record_once(stored: tuple[Path, Journal], split_bytes: int) -> None:
    data, journal = stored
    start = 0 if split_bytes > 1 else len(journal.records) - 1_000  # each batch is a task of its own then
    given = {"startingOffsets": f'{{"{TOPIC}": {{"0": {start}}}}}'}
    batches = read_all(data, columns=["partition", "offset"], split_bytes=split_bytes, **given)
    assert offsets_of(batches) == list(range(start, len(journal.records)))


def test_ranges_begin_and_end_inside_batches(stored: tuple[Path, Journal]) -> None:
    data, journal = stored
    for start, end in ((0, 1), (7, 9), (300, 2_000), (len(journal.records) - 1, len(journal.records))):
        batches = read_all(
            data,
            columns=["offset"],
            startingOffsets=f'{{"{TOPIC}": {{"0": {start}}}}}',
            endingOffsets=f'{{"{TOPIC}": {{"0": {end}}}}}',
        )
        assert offsets_of(batches) == list(range(start, end))


def test_times_choose_records_by_when_they_were_appended(stored: tuple[Path, Journal]) -> None:
    data, _ = stored
    times = [moment for batch in read_all(data, columns=["append_time"]) for moment in batch[0].to_pylist()]
    middle = times[len(times) // 2]
    first = times.index(middle)
    later = read_all(data, columns=["offset"], startingTimestamp=middle.isoformat())
    assert offsets_of(later) == list(range(first, len(times)))
    earlier = read_all(data, columns=["offset"], endingTimestamp=middle.isoformat())
    assert offsets_of(earlier) == list(range(first))
    assert read_all(data, columns=["offset"], startingTimestamp="2999-01-01T00:00:00Z") == []


def copied(stored: tuple[Path, Journal], tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored[0], tmp_path / "copy"))


def largest_segment(data: Path) -> Path:
    return max(data.glob("partitions/*/*.seg"), key=lambda path: path.stat().st_size)


def test_damage_is_named_or_skipped_and_counted(stored: tuple[Path, Journal], tmp_path: Path) -> None:
    data, journal = copied(stored, tmp_path), stored[1]
    path = sorted(data.glob("partitions/*/*.seg"))[0]
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES + BATCH_HEADER_BYTES + 20] ^= 4
    path.write_bytes(content)
    with pytest.raises(Damage, match=f"{path.name} is damaged at byte {HEADER_BYTES}"):
        read_all(data, columns=["offset"])
    losses = Losses(allowed=True)
    found = offsets_of(read_all(data, columns=["offset"], losses=losses))
    assert found == sorted(set(found))
    assert losses.record_count == len(journal.records) - len(found) > 0
    assert losses.skipped[0].start == 0 and "checksum" in losses.skipped[0].why


def test_a_file_that_was_cut_is_damage(tmp_path: Path) -> None:
    data = tmp_path / "data"
    identity = make_directory(data, TOPIC)
    shape = Shape(50, 20)
    rows = fill_partition(data, identity, shape, segments=2, segment_bytes=20_000)
    place = open_place(str(data))
    history = place.history(identity)
    selection = Selection(TOPIC, identity.topic_id, 0, 0, rows, (history,))
    pieces, lost = pieces_of(selection)
    first = sorted(data.glob("partitions/*/*.seg"))[0]
    first.write_bytes(first.read_bytes()[:9_000])
    losses = Losses(allowed=True)
    (split,) = plan_splits([(selection, pieces)])
    found = offsets_of(list(read_split(split, [place], Decoder(["offset"]), losses)))
    assert not lost
    assert len(found) + losses.record_count == rows
    assert found == sorted(set(found)) and found[-1] == rows - 1


def test_a_segment_of_another_partition_is_never_read(tmp_path: Path) -> None:
    data = tmp_path / "data"
    identity = make_directory(data, TOPIC)
    stranger = LogIdentity(identity.topic_id, 5)
    fill_partition(data, stranger, Shape(50, 20), segments=1, segment_bytes=20_000)
    (path,) = data.glob("partitions/*/*.seg")
    own = data / "partitions" / identity.directory_name
    own.mkdir()
    shutil.copy(path, own / path.name)
    assert open_place(str(data)).history(identity).segments == []


def test_records_that_have_expired_are_an_error_or_counted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    identity = make_directory(data, TOPIC)
    rows = fill_partition(data, identity, Shape(50, 20), segments=3, segment_bytes=20_000)
    segments = open_place(str(data)).history(identity).segments
    sorted(data.glob("partitions/*/*.seg"))[0].unlink()
    assert offsets_of(read_all(data, columns=["offset"])) == list(range(segments[1].start, rows))
    history = open_place(str(data)).history(identity)
    _, lost = pieces_of(Selection(TOPIC, identity.topic_id, 0, 0, rows, (history,)))
    assert [(one.start, one.end, one.why) for one in lost] == [
        (0, segments[1].start, "the records have expired")
    ]


def test_a_missing_segment_is_told(tmp_path: Path) -> None:
    data = tmp_path / "data"
    identity = make_directory(data, TOPIC)
    rows = fill_partition(data, identity, Shape(50, 20), segments=3, segment_bytes=20_000)
    segments = open_place(str(data)).history(identity).segments
    sorted(data.glob("partitions/*/*.seg"))[1].unlink()
    history = open_place(str(data)).history(identity)
    _, lost = pieces_of(Selection(TOPIC, identity.topic_id, 0, 0, rows, (history,)))
    assert [(one.start, one.end, one.why) for one in lost] == [
        (segments[1].start, segments[1].end, "a segment is missing")
    ]
    assert history.segments[1].hole_before


def planned_split(data: Path, identity: LogIdentity, rows: int) -> tuple[Any, Any]:
    place = open_place(str(data))
    selection = Selection(TOPIC, identity.topic_id, 0, 0, rows, (place.history(identity),))
    (split,) = plan_splits([(selection, pieces_of(selection)[0])])
    return place, split


def test_a_segment_that_goes_while_a_task_runs_is_looked_for_again(tmp_path: Path) -> None:
    data = tmp_path / "data"
    identity = make_directory(data, TOPIC)
    rows = fill_partition(data, identity, Shape(50, 20), segments=3, segment_bytes=20_000)
    place, split = planned_split(data, identity, rows)
    sorted(data.glob("partitions/*/*.seg"))[0].unlink()
    with pytest.raises(OffsetOutOfRange, match=r"records 0 to \d+ .* are gone"):
        list(read_split(split, [place], Decoder(["offset"]), Losses()))
    losses = Losses(allowed=True)
    found = offsets_of(list(read_split(split, [place], Decoder(["offset"]), losses)))
    assert len(found) + losses.record_count == rows and found[-1] == rows - 1


def test_an_active_segment_is_read_beside_its_broker(broker: Callable[..., BrokerProcess]) -> None:
    running = broker()
    with danube.sync.connect(running.address) as client:
        client.admin.create_topic(TOPIC)
        with client.producer(TOPIC) as producer:
            for number in range(30):
                producer.send(b"%d" % number)
                assert offsets_of(read_all(running.data_dir, columns=["offset"])) == list(range(number + 1))
