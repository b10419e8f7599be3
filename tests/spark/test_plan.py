"""Plans: every record once, no skew, many small segments in few tasks, and 100,000 segments in seconds."""

from __future__ import annotations

import pickle
import random
import resource
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.config.sections import StorageSettings
from danube.errors import Damage, OffsetOutOfRange, Unavailable
from danube.limits import MIB
from danube.spark.history.offsets import PartitionKey, limited, pack, unpack
from danube.spark.history.places import StorePlace
from danube.spark.history.plan import (
    PIECE_BYTES_MAX,
    Piece,
    Selection,
    Split,
    pieces_of,
    plan_splits,
    refuse_lost,
)
from danube.spark.history.segments import PartitionHistory, SegmentRef
from danube.wal.segments.holes import Hole, HoleKind
from danube.wal.segments.segment import LogIdentity
from danube.wal.stores.objects import ObjectStore
from danube.wal.tier.keys import manifest_key
from danube.wal.tier.manifest import SEGMENT_ENTRY, Manifest
from tests.broker_process import ROOT
from tests.processor_time import processor_time_within

IDENTITY = LogIdentity(7, 0)


def segment(base: int, end: int, size: int = 1_000, **more: object) -> SegmentRef:
    made = SegmentRef(
        f"{base}.seg", base, end, base, end, size + 200, size, end - base, base, end, 1, True, False, False
    )
    return made._replace(**more)  # type: ignore[arg-type]


def history(*segments: SegmentRef, start: int | None = None) -> PartitionHistory:
    first = segments[0].start if segments else 0
    return PartitionHistory(IDENTITY, first if start is None else start, list(segments))


def selection(start: int, end: int, *histories: PartitionHistory, partition: int = 0) -> Selection:
    return Selection("/default/t", 7, partition, start, end, histories)


def ranges(pieces: list[Piece]) -> list[tuple[int, int, int]]:
    return [(piece.place, piece.start, piece.end) for piece in pieces]


def covered(splits: list[Split]) -> list[tuple[int, int, int]]:
    runs = [run for split in splits for run in split.runs]
    return [(run.partition, piece.start, piece.end) for run in runs for piece in run.pieces]


def test_the_first_place_is_read_and_the_next_ones_fill_its_gaps() -> None:
    local = history(segment(100, 200), segment(200, 260))
    remote = history(segment(0, 50), segment(50, 150), segment(150, 220))
    pieces, lost = pieces_of(selection(0, 1_000, local, remote))
    assert ranges(pieces) == [(1, 0, 50), (1, 50, 100), (0, 100, 200), (0, 200, 260)]
    assert not lost
    pieces, lost = pieces_of(selection(10, 210, remote, local))
    assert ranges(pieces) == [(0, 10, 50), (0, 50, 150), (0, 150, 210)]
    assert not lost and not pieces[0].whole and pieces[1].whole


def holes_in(*kinds: HoleKind) -> PartitionHistory:
    """[0, 10), a hole of each kind of 10 offsets, and 5 records behind."""
    holes = [Hole(10 * place, 10 * place + 10, 7, 1, kind) for place, kind in enumerate(kinds, 1)]
    end = 10 * (len(kinds) + 1)
    return history(segment(0, 10), segment(end, end + 5))._replace(holes=tuple(holes))


def test_offsets_that_were_never_given_are_passed_and_holes_are_told_for_what_they_are() -> None:
    pieces, lost = pieces_of(selection(0, 100, holes_in(HoleKind.UNUSED)))
    assert ranges(pieces) == [(0, 0, 10), (0, 20, 25)] and not lost
    pieces, lost = pieces_of(selection(0, 100, holes_in(HoleKind.OPEN, HoleKind.UNUSED, HoleKind.GIVEN_UP)))
    assert [(one.start, one.end) for one in lost] == [(10, 20), (30, 40)]
    with pytest.raises(Unavailable, match="broker that is away"):
        refuse_lost(lost)
    with pytest.raises(OffsetOutOfRange, match="gave them up"):
        refuse_lost(lost[1:])


def test_a_hole_behind_the_last_segment_is_not_left_to_the_broker() -> None:
    one = history(segment(0, 10))._replace(holes=(Hole(10, 30, 7, 1),))
    assert one.end_offset == 30
    _, lost = pieces_of(selection(0, 100, one))
    assert [(gone.start, gone.end) for gone in lost] == [(10, 30)]


def test_what_another_place_holds_of_a_hole_is_read_there() -> None:
    local = history(segment(12, 18))
    pieces, lost = pieces_of(selection(0, 100, local, holes_in(HoleKind.OPEN)))
    assert ranges(pieces) == [(1, 0, 10), (0, 12, 18), (1, 20, 25)]
    assert [(one.start, one.end) for one in lost] == [(10, 12), (18, 20)]


def test_what_is_missing_beside_a_hole_is_missing() -> None:
    one = history(segment(0, 10), segment(40, 50))._replace(holes=(Hole(20, 30, 7, 1, HoleKind.UNUSED),))
    _, lost = pieces_of(selection(0, 100, one))
    assert [(gone.start, gone.end, gone.why) for gone in lost] == [
        (10, 20, "a segment is missing"), (30, 40, "a segment is missing"),
    ]  # fmt: skip


def test_what_is_nowhere_is_told_with_its_reason() -> None:
    one = history(segment(20, 30), segment(50, 60))
    pieces, lost = pieces_of(selection(0, 60, one))
    assert ranges(pieces) == [(0, 20, 30), (0, 50, 60)]
    assert [(each.start, each.end, each.why) for each in lost] == [
        (0, 20, "the records have expired"),
        (30, 50, "a segment is missing"),
    ]
    with pytest.raises(OffsetOutOfRange, match=r"records 0 to 20 .* are gone \(and 1 more ranges\)"):
        refuse_lost(lost)
    with pytest.raises(Damage, match="a segment is missing"):
        refuse_lost(lost[1:])
    refuse_lost([])
    assert pieces_of(selection(0, 60)) == ([], [])


@given(st.integers(0, 2**32))
def test_two_places_together_give_each_record_once(seed: int) -> None:
    source = random.Random(seed)

    def some() -> PartitionHistory:
        segments, at = [], source.randrange(30)
        while at < 100:
            end = at + source.randrange(1, 25)
            if source.random() < 0.8:
                segments.append(segment(at, end))
            at = end
        return history(*segments)

    places = [some() for _ in range(source.randrange(1, 4))]
    start, end = sorted(source.sample(range(130), 2))
    pieces, lost = pieces_of(selection(start, end, *places))
    parts = sorted([(piece.start, piece.end) for piece in pieces] + [(one.start, one.end) for one in lost])
    assert all(one[1] == other[0] for one, other in pairwise(parts))
    held = max((each.end_offset for each in places), default=0)
    if parts:
        assert (parts[0][0], parts[-1][1]) == (start, min(end, held))
    else:
        assert min(end, held) <= start
    for piece in pieces:
        assert piece.segment.start <= piece.start < piece.end <= piece.segment.end
        assert piece.segment in places[piece.place].segments


@given(st.integers(0, 2**32), st.integers(1, 40), st.booleans())
def test_splits_are_even_and_hold_each_record_once(seed: int, splits_min: int, mixed: bool) -> None:
    source = random.Random(seed)
    planned = []
    for partition in range(source.randrange(1, 5)):
        segments, at = [], 0
        for _ in range(source.randrange(1, 12)):
            end = at + source.randrange(1, 5_000)
            segments.append(segment(at, end, source.choice([100, 10_000, 5_000_000])))
            at = end
        chosen = selection(0, at, history(*segments), partition=partition)
        planned.append((chosen, pieces_of(chosen)[0]))
    splits = plan_splits(planned, split_bytes=1_000_000, splits_min=splits_min, mixed=mixed)
    expected = {(chosen.partition, at) for chosen, _ in planned for at in (0, chosen.end)}
    found = covered(splits)
    edges = {(partition, edge) for partition, start, end in found for edge in (start, end)}
    assert expected <= edges
    for one, other in pairwise(found):
        assert other[0] != one[0] or other[1] == one[2]
    if not mixed:
        assert all(len({run.partition for run in split.runs}) == 1 for split in splits)
    total = sum(piece.bytes for _, pieces in planned for piece in pieces)
    target = max(1, min(1_000_000, -(-total // splits_min)))
    largest_record = 5_000_000  # a segment of one record cannot be cut
    for split in splits:
        small = all(piece.end - piece.start > 1 for run in split.runs for piece in run.pieces)
        assert split.bytes <= (target * 1.6 + 5_000 if small else largest_record + target * 1.6)


def test_small_segments_share_a_task_and_large_ones_are_cut() -> None:
    small = [segment(at * 10, at * 10 + 10, 1_000) for at in range(1_000)]
    chosen = selection(0, 10_000, history(*small))
    splits = plan_splits([(chosen, pieces_of(chosen)[0])], split_bytes=100_000)
    assert len(splits) == 10 and {len(split.runs[0].pieces) for split in splits} == {100}
    large = selection(0, 10**6, history(segment(0, 10**6, 3_000 * MIB)))
    splits = plan_splits([(large, pieces_of(large)[0])], split_bytes=512 * MIB)
    assert 5 <= len(splits) <= 7
    pieces = [piece for split in splits for run in split.runs for piece in run.pieces]
    assert max(piece.bytes for piece in pieces) <= 1.01 * PIECE_BYTES_MAX
    assert len(plan_splits([(large, pieces_of(large)[0])], split_bytes=1_000_000, splits_max=20)) <= 21


def many_manifests(store: ObjectStore, partitions: int, segments: int) -> None:
    """``partitions`` manifests of ``segments`` segments of a thousand records and a megabyte each."""
    for partition in range(partitions):
        entries = np.zeros(segments, SEGMENT_ENTRY)
        base = np.arange(segments, dtype=np.uint64) * np.uint64(1_000)
        entries["base_offset"], entries["end_offset"] = base, base + np.uint64(1_000)
        entries["record_count"], entries["batch_count"] = 1_000, 10
        entries["size_bytes"], entries["data_end"] = 1_000_000, 990_000
        entries["content_hash"] = np.frombuffer(random.Random(partition).randbytes(16 * segments), "V16")
        entries["chain_hash"] = entries["content_hash"]
        identity = LogIdentity(1, partition)
        made = Manifest("/default/many", 1, partition, 1, 1, 0, entries)
        store.put(manifest_key(identity, 1, 1), made.encode())


def plan_many(folder: str) -> None:
    """Plan 100,000 segments; prints seconds and the most memory that the process ever had, in MiB."""
    place = StorePlace(StorageSettings(url=f"file://{folder}"))
    many_manifests(place.store(), 10, 10_000)
    started = time.process_time()
    planned = []
    for partition in range(10):
        found = place.history(LogIdentity(1, partition))
        chosen = Selection("/default/many", 1, partition, 0, found.end_offset, (found,))
        planned.append((chosen, pieces_of(chosen)[0]))
    splits = plan_splits(planned, split_bytes=64 * MIB)
    sizes = [len(pickle.dumps(split)) for split in splits]
    seconds = time.process_time() - started
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(len(splits), sum(sizes), round(seconds, 3), round(memory, 1))


def test_a_hundred_thousand_segments_are_planned_in_seconds(tmp_path: Path) -> None:
    """In a process of its own, so that its memory is that of the plan."""
    code = "import sys; from tests.spark.test_plan import plan_many; plan_many(sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    splits, pickled, seconds, memory = (float(word) for word in done.stdout.split())
    assert 1_000 < splits < 2_000
    assert pickled < 50 * MIB
    assert seconds < 10
    assert memory < 1_024


def test_a_hundred_thousand_files_are_found_in_seconds(tmp_path: Path) -> None:
    from danube.spark.history.places import open_place
    from tests.spark.segments import Shape, make_directory, sealed_segment

    identity = make_directory(tmp_path, "/default/t")
    directory = tmp_path / "partitions" / identity.directory_name
    directory.mkdir(parents=True)
    count, base = 2_000, 0
    for number in range(count):
        content, end, _ = sealed_segment(identity, Shape(10, 3), 500, base, number=number % 3)
        (directory / f"{base:020d}.seg").write_bytes(content)
        base = end
    place = open_place(str(tmp_path))
    with processor_time_within(20 * count / 100_000):  # of it much is the system's, which a busy host slows
        found = place.history(identity)
    assert len(found.segments) == count and found.end_offset == base
    assert not any(each.hole_before for each in found.segments)


# -- offsets ---------------------------------------------------------------------------------------


def test_offsets_are_the_same_text_whatever_the_order() -> None:
    ends = {PartitionKey("/a/b", 3, 10): 5, PartitionKey("/a/b", 3, 9): 1, PartitionKey("/a/a", 4, 0): 2}
    packed = pack(ends)
    assert repr(packed) == repr(pack(dict(reversed(ends.items()))))
    assert list(packed["/a/b"]["offsets"]) == ["9", "10"] and unpack(packed) == ends


@given(st.lists(st.integers(0, 200), min_size=1, max_size=8), st.integers(1, 100))
def test_a_limit_lets_everything_through_in_the_end(waiting: list[int], records_max: int) -> None:
    end = {PartitionKey("/a/b", 1, number): count for number, count in enumerate(waiting)}
    at = dict.fromkeys(end, 0)
    for _ in range(sum(waiting) + 1):
        following = limited(at, end, records_max)
        taken = sum(following[key] - at[key] for key in end)
        assert all(at[key] <= following[key] <= end[key] for key in end)
        assert taken == min(records_max, sum(end[key] - at[key] for key in end))
        if not taken:
            break
        at = following
    assert at == end
