"""What reading costs: no segment is opened for a plan, no byte is fetched or copied without need."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from danube.core.metadata.commands import CreateTopic
from danube.core.partition.policy import TopicPolicy
from danube.spark.history import fetch, places
from danube.spark.history.decode import COLUMNS, Decoder, Losses
from danube.spark.history.fetch import Fetcher
from danube.spark.history.options import read_options
from danube.spark.history.places import AnyPlace, DataDirectory, open_place
from danube.spark.history.plan import Selection, pieces_of, plan_splits
from danube.spark.history.reading import read_split
from danube.spark.history.selecting import Catalogue
from danube.wal.stores.directory import LocalStore
from tests.spark.segments import MOMENT_US, Shape, fill_partition, make_directory
from tests.spark.stored_history import metadata_of, put_history

TOPIC = "/default/wide"
SEGMENTS = 6
SEGMENT_BYTES = 1_500_000


class WatchedStore(LocalStore):
    """A directory as a store that notes what is read of it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read: list[tuple[str, int]] = []

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = super().get(key, start, end)
        self.read.append((key, len(data)))
        return data

    def mapped(self, key: str, start: int, end: int) -> memoryview | None:
        view = super().mapped(key, start, end)
        if view is not None:
            self.read.append((key, len(view)))
        return view

    def segments(self) -> dict[str, int]:
        """Bytes that were read, by object."""
        found: dict[str, int] = {}
        for key, size in self.read:
            if key.endswith(".seg"):
                found[key] = found.get(key, 0) + size
        return found


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The folder of a store with some large segments of one topic, and the number of records."""
    folder = tmp_path_factory.mktemp("wide")
    identity = make_directory(folder / "data", TOPIC)
    shape = Shape(100, 10)
    end = fill_partition(
        folder / "data", identity, shape, segments=SEGMENTS, segment_bytes=SEGMENT_BYTES
    )  # fmt: skip
    (folder / "store").mkdir()
    created = CreateTopic(topic=TOPIC, policy=TopicPolicy(), created_us=1)
    put_history(LocalStore(folder / "store"), folder / "data", metadata_of(created), TOPIC)
    return folder, end


@pytest.fixture
def store(wide: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> WatchedStore:
    watched = WatchedStore(wide[0] / "store")
    monkeypatch.setattr(places, "_opened", lambda settings: watched)
    return watched


def planned(storage: str, split_bytes: int = 1 << 30, **given: str) -> tuple[Catalogue, list[Any]]:
    options = read_options({"topic": TOPIC, "storage": storage, **given}, streaming=False)
    catalogue = Catalogue(options)
    known = catalogue.partitions(unsynced=True)
    start = catalogue.resolve(options.starting, known, ending=False)
    end = catalogue.resolve(options.ending, known, ending=True)
    chosen = [part.selection(start[part.key], end[part.key]) for part in known]
    return catalogue, plan_splits([(one, pieces_of(one)[0]) for one in chosen], split_bytes=split_bytes)


def offsets(catalogue: Catalogue, splits: list[Any]) -> Iterator[int]:
    for split in splits:
        for batch in read_split(split, catalogue.places, Decoder(["offset"]), Losses()):
            yield from batch.column("offset").to_pylist()


def test_a_plan_is_made_of_manifests_alone(wide: tuple[Path, int], store: WatchedStore) -> None:
    folder, end = wide
    catalogue, splits = planned(f"file://{folder / 'store'}", split_bytes=200_000)
    assert len(splits) > SEGMENTS and splits[-1].runs[-1].end == end
    assert store.read and store.segments() == {}
    assert list(offsets(catalogue, splits)) == list(range(end))


def test_a_range_of_offsets_fetches_its_place_in_one_object(
    wide: tuple[Path, int], store: WatchedStore
) -> None:
    folder, end = wide
    first = end // 2 + 100
    bounds = {
        "startingOffsets": f'{{"{TOPIC}": {{"0": {first}}}}}',
        "endingOffsets": f'{{"{TOPIC}": {{"0": {first + 5}}}}}',
    }
    found = list(offsets(*planned(f"file://{folder / 'store'}", **bounds)))
    assert found == list(range(first, first + 5))
    ((_, size),) = store.segments().items()
    assert size < SEGMENT_BYTES // 5, "the index and what it leads to"


def test_a_range_of_time_fetches_its_place(wide: tuple[Path, int], store: WatchedStore) -> None:
    """Records are appended a microsecond after another; a timestamp option has milliseconds."""
    folder, end = wide
    begin_ms = MOMENT_US // 1_000 + (end // 2) // 1_000
    given = {"startingTimestamp": str(begin_ms), "endingTimestamp": str(begin_ms + 1)}
    found = list(offsets(*planned(f"file://{folder / 'store'}", **given)))
    assert 900 <= len(found) <= 1_100 and found == list(range(found[0], found[-1] + 1))
    assert sum(store.segments().values()) < SEGMENT_BYTES


@pytest.mark.parametrize("where", ["directory", "store"])
def test_columns_lie_where_the_segment_does(where: str, tmp_path: Path) -> None:
    """Payloads and keys of a large batch, and their bounds, are views of the mapped file."""
    data = tmp_path / "data"
    identity = make_directory(data, TOPIC)
    end = fill_partition(data, identity, Shape(1_000, 2_000), segments=1, segment_bytes=5_000_000)
    place: AnyPlace = DataDirectory(str(data))
    if where == "store":
        (tmp_path / "store").mkdir()
        created = CreateTopic(topic=TOPIC, policy=TopicPolicy(), created_us=1)
        put_history(LocalStore(tmp_path / "store"), data, metadata_of(created), TOPIC)
        place = open_place(f"file://{tmp_path / 'store'}")
    (piece,) = pieces_of(Selection(TOPIC, *identity, 0, end, (place.history(identity),)))[0]
    fetched = Fetcher([place]).fetch(identity, piece)
    first = fetched.octets.ctypes.data
    mapped = range(first, first + len(fetched.octets))
    columns = ["payload", "key"]
    batches = list(Decoder(columns).decode(fetched, TOPIC, 0, Losses()))
    assert sum(len(batch) for batch in batches) == end > 4_000
    for batch in batches:
        for name in columns:
            _, bounds, content = batch.column(name).buffers()
            assert bounds.address in mapped and content.address in mapped, name
    whole = [batch.to_pylist() for batch in Decoder(COLUMNS.names).decode(fetched, TOPIC, 0, Losses())]
    assert [row["payload"] for rows in whole for row in rows] == [
        payload for batch in batches for payload in batch.column("payload").to_pylist()
    ]


def test_a_task_holds_two_pieces(wide: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is decoded and the one that is fetched, whatever the partition's size."""
    folder, end = wide
    alive: set[int] = set()
    most: list[int] = []
    original = fetch._fetch_object

    def fetching(*arguments: Any) -> Any:
        found = original(*arguments)
        alive.add(id(found.octets))
        weakref.finalize(found.octets, alive.discard, id(found.octets))
        return found

    monkeypatch.setattr(fetch, "_fetch_object", fetching)
    catalogue, splits = planned(f"file://{folder / 'store'}")
    assert len(splits) == 1 and sum(len(run.pieces) for run in splits[0].runs) >= SEGMENTS
    rows = 0
    reading = read_split(splits[0], catalogue.places, Decoder(COLUMNS.names), Losses())
    while True:
        batch = next(reading, None)
        most.append(len(alive))
        if batch is None:
            break
        rows += len(batch)
        del batch
    assert rows == end and 1 <= max(most) <= 2
    assert not alive
