"""Decoding what a broker seldom writes: compacted segments, small and large batches, damage at any place."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from danube.config.sections import StorageSettings
from danube.core.batch.checksum import crc32c
from danube.core.batch.format import Compression, read_header
from danube.errors import Damage
from danube.spark.history.decode import COLUMNS, Decoder, Losses
from danube.spark.history.fetch import Fetcher
from danube.spark.history.local_segments import LocalSegments
from danube.spark.history.places import DataDirectory, StorePlace
from danube.spark.history.plan import Piece, Selection, pieces_of, plan_splits
from danube.spark.history.segments import PartitionHistory
from danube.wal.segments.key_compaction import LatestKeys, compact
from danube.wal.segments.segment import HEADER_BYTES, LogIdentity, file_name
from tests.spark.segments import MOMENT_US, Shape, fill_partition, make_directory
from tests.unit.merge_samples import random_segments, records_of, sealed_log
from tests.unit.wal_samples import IDENTITY

TOPIC = "/default/t"


def read(
    data: Path, identity: LogIdentity, *, split_bytes: int = 1 << 30, losses: Losses | None = None,
    columns: Any = COLUMNS.names, **options: Any,
) -> list[Any]:  # fmt: skip
    """All records of one partition's directory."""
    place = DataDirectory(str(data))
    history = place.history(identity)
    selection = Selection(TOPIC, *identity, history.start_offset, history.end_offset, (history,))
    decoder = Decoder(columns, **options)
    found: list[Any] = []
    for split in plan_splits([(selection, pieces_of(selection)[0])], split_bytes=split_bytes):
        for run in split.runs:
            for fetched in Fetcher([place]).each(identity, run.pieces):
                found += decoder.decode(fetched, run.topic, run.partition, losses or Losses())
    for batch in found:
        batch.validate(full=True)
    return found


def rows(batches: list[Any]) -> dict[int, tuple[bytes | None, bytes]]:
    found = [row for batch in batches for row in batch.to_pylist()]
    assert [row["offset"] for row in found] == sorted({row["offset"] for row in found})
    return {row["offset"]: (row["key"], row["payload"]) for row in found}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("split_bytes", [1, 1 << 30])
def test_compacted_segments_give_what_is_left_of_them(tmp_path: Path, seed: int, split_bytes: int) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    sources = sealed_log(folder, random_segments(seed))
    latest = LatestKeys()
    latest.add(sources)
    directory = tmp_path / "data" / "partitions" / IDENTITY.directory_name
    directory.mkdir(parents=True)
    compact(sources, latest, directory / file_name(0))
    before = records_of(sources)
    newest = {key: offset for offset, (key, _) in sorted(before.items()) if key is not None}
    expected = {
        offset: record for offset, record in before.items() if newest.get(record[0], offset) == offset
    }
    (segment,) = LocalSegments(directory, IDENTITY).found(unsynced=True)
    assert segment.compacted and segment.end == max(before) + 1
    assert rows(read(tmp_path / "data", IDENTITY, split_bytes=split_bytes)) == expected


@pytest.mark.parametrize("compression", list(Compression))
@pytest.mark.parametrize(("payload", "records"), [(10, 1), (100, 50), (2_000, 400)])
def test_batches_of_any_size_make_rows(
    tmp_path: Path, payload: int, records: int, compression: Compression
) -> None:
    identity = make_directory(tmp_path, TOPIC)
    shape = Shape(payload, records, compression=compression, attributes=True)
    end = fill_partition(
        tmp_path, identity, shape, segments=2, segment_bytes=3_000_000 if records > 1 else 30_000
    )
    batches = read(tmp_path, identity, rows_max=1_000)
    assert len(rows(batches)) == end
    assert max(batch.num_rows for batch in batches) <= max(1_000, records)
    assert sum(batch.num_rows for batch in read(tmp_path, identity, columns=[])) == end


@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_bit_anywhere_loses_its_batch_alone(tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    identity = make_directory(tmp_path, TOPIC)
    end = fill_partition(tmp_path, identity, Shape(40, 10), segments=2, segment_bytes=400_000)
    path = source.choice(sorted(tmp_path.glob("partitions/*/*.seg")))
    (segment,) = [
        one for one in DataDirectory(str(tmp_path)).history(identity).segments if one.key == path.name
    ]
    content = bytearray(path.read_bytes())
    position = source.randrange(HEADER_BYTES, segment.data_end)
    content[position] ^= 1 << source.randrange(8)
    path.write_bytes(content)
    with pytest.raises(Damage) as failure:
        read(tmp_path, identity)
    facts = failure.value.facts
    assert facts["file"] == str(path) and facts["position"] <= position
    for split_bytes in (1 << 30, 60_000):
        losses = Losses(allowed=True)
        found = rows(read(tmp_path, identity, losses=losses, split_bytes=split_bytes))
        assert losses.record_count == 10
        assert len(found) == end - 10
    assert facts["start"] not in found and facts["start"] + 10 in found


def test_a_damaged_footer_and_header_are_no_obstacle(tmp_path: Path) -> None:
    identity = make_directory(tmp_path, TOPIC)
    end = fill_partition(tmp_path, identity, Shape(40, 10), segments=1, segment_bytes=400_000)
    place = DataDirectory(str(tmp_path))
    history = place.history(identity)
    (path,) = tmp_path.glob("partitions/*/*.seg")
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    content[-60] ^= 1
    path.write_bytes(content)
    selection = Selection(TOPIC, *identity, 0, end, (PartitionHistory(*history),))
    found: list[Any] = []
    for split in plan_splits([(selection, pieces_of(selection)[0])], split_bytes=60_000):
        for run in split.runs:
            for fetched in Fetcher([place]).each(identity, run.pieces):
                found += Decoder(["offset", "key", "payload"]).decode(fetched, TOPIC, 0, Losses())
    assert len(rows(found)) == end


@pytest.mark.parametrize("compression", [Compression.NONE, Compression.LZ4])
def test_a_batch_that_was_stored_malformed_is_lost_alone(tmp_path: Path, compression: Compression) -> None:
    identity = make_directory(tmp_path, TOPIC)
    end = fill_partition(tmp_path, identity, Shape(40, 10), segments=1, segment_bytes=40_000)
    (path,) = tmp_path.glob("partitions/*/*.seg")
    content = bytearray(path.read_bytes())
    header = read_header(content, HEADER_BYTES)
    second = HEADER_BYTES + header.size
    batch = bytearray(content[second : second + header.size])
    if compression is Compression.NONE:  # the first payload ends behind the second
        batch[-header.columns_size + 4 : -header.columns_size + 8] = (2_000).to_bytes(4, "little")
    else:
        batch[36] |= compression
    batch[28:32] = crc32c(bytes(batch[36:])).to_bytes(4, "little")
    batch[32:36] = crc32c(bytes(batch[:32])).to_bytes(4, "little")
    content[second : second + header.size] = batch
    path.write_bytes(content)
    with pytest.raises(Damage, match=f"is damaged at byte {second}"):
        read(tmp_path, identity)
    losses = Losses(allowed=True)
    found = rows(read(tmp_path, identity, losses=losses))
    assert [(one.start, one.end) for one in losses.skipped] == [(10, 20)]
    assert sorted(found) == [*range(10), *range(20, end)]


def test_one_piece_is_used_while_one_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "store").mkdir()
    identity = make_directory(tmp_path / "data", TOPIC)
    end = fill_partition(tmp_path / "data", identity, Shape(40, 10), segments=8, segment_bytes=40_000)
    place = DataDirectory(str(tmp_path / "data"))
    selection = Selection(TOPIC, *identity, 0, end, (place.history(identity),))
    pieces, _ = pieces_of(selection)
    begun: list[int] = []
    fetcher = Fetcher([StorePlace(StorageSettings(url=f"file://{tmp_path}/store"))])

    def fetch(_: LogIdentity, piece: Any) -> Any:
        begun.append(piece.start)
        return Fetcher([place]).fetch(identity, piece)

    monkeypatch.setattr(fetcher, "fetch", fetch)
    for number, fetched in enumerate(fetcher.each(identity, pieces)):
        assert fetched.piece == pieces[number]
        assert len(begun) <= number + 2
    fetcher.close()
    assert begun == [piece.start for piece in pieces]


def test_times_are_found_through_the_index(tmp_path: Path) -> None:
    identity = make_directory(tmp_path, TOPIC)
    end = fill_partition(tmp_path, identity, Shape(100, 10), segments=1, segment_bytes=2_000_000)
    place = DataDirectory(str(tmp_path))
    (segment,) = place.history(identity).segments
    whole = Piece(0, segment, segment.start, segment.end, segment.data_end)
    fetcher = Fetcher([place])
    for offset in (0, 10, 5_000, end - 10):
        part = fetcher.since(identity, whole, MOMENT_US + offset)
        assert part.start <= offset < part.end and part.end - part.start < 1_500
        assert len(fetcher.fetch(identity, part).octets) < 300_000
