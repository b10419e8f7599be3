"""The cache of objects, block by block: what is asked for, what is kept, what is never served."""

from __future__ import annotations

import errno
import os
from itertools import pairwise
from pathlib import Path

import pytest

from danube.core.batch.format import read_header
from danube.errors import ObjectMissing, StorageFailed, StoreDamaged, StoreUnavailable
from danube.host import files
from danube.wal.cold import cache as cold_cache
from danube.wal.cold import reads as cold_reads
from danube.wal.cold import segment as cold_segment
from danube.wal.cold.cache import ANSWER_MAX_NS, ColdCache, Fetch
from danube.wal.cold.reads import Ticket
from danube.wal.cold.segment import ColdReading, ColdSegment, Missing
from danube.wal.segments.segment import LogIdentity
from danube.wal.segments.stored_segment import StoredSegment
from danube.wal.tier.manifest import EntryFlag, SegmentEntry, entry_of
from tests.unit.tier_parts import sealed_files
from tests.unit.wal_samples import IDENTITY, append, open_log, records_in, roll, sync

BLOCK = 4096
pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cold_cache, cold_segment):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(cold_cache, "FETCH_BYTES_MAX", 4 * BLOCK)
    monkeypatch.setattr(cold_segment, "AHEAD_FIRST", BLOCK)
    monkeypatch.setattr(cold_segment, "AHEAD_MAX", 4 * BLOCK)


def sealed(directory: Path, batches: int = 60, size: int = 1_000) -> tuple[SegmentEntry, bytes]:
    """One sealed segment of batches of 4 records."""
    log = open_log(directory)
    for number in range(batches):
        append(
            log, *(b"%06d-" % (4 * number + one) + b"x" * size for one in range(4)), time_us=10**15 + number
        )
        log.write()
    sync(log)
    roll(log)
    (summary, data), *_ = sealed_files(directory)
    return entry_of(summary, len(data), 1), data


class Store:
    """One object, and the cache's requests for it."""

    def __init__(self, root: Path, entry: SegmentEntry, data: bytes, bytes_max: int = 1 << 20) -> None:
        self.data = data
        self.entry = entry
        self.asked: list[Fetch] = []
        self.all_asked: list[tuple[int, int]] = []
        self.woken: list[LogIdentity] = []
        self.cache = ColdCache(root / "cache", bytes_max, self._send, self.woken.append)
        self.now_ns = 10**9
        self.segment: ColdSegment = self.cache.segment(IDENTITY, entry)

    def _send(self, fetch: Fetch) -> None:
        self.asked.append(fetch)
        self.all_asked.append((fetch.start, fetch.end))

    def answer(self, count: int = 1_000) -> int:
        answered = 0
        while self.asked and answered < count:
            fetch = self.asked.pop(0)
            fd = os.open(fetch.segment.file.path, os.O_WRONLY)
            os.pwrite(fd, self.data[fetch.start : fetch.end], fetch.start)
            os.close(fd)
            self.cache.fetched(fetch.number, None, self.now_ns)
            answered += 1
        return answered

    def read(self, offset: int, bytes_max: int = BLOCK) -> ColdReading:
        """Read, fetching what is missing as often as it takes."""
        for _ in range(50):
            found = self.segment.read(offset, self.entry.end_offset, bytes_max)
            if isinstance(found, ColdReading):
                return found
            ticket = self.cache.need(self.segment, found, self.now_ns)
            assert not ticket.done
            assert self.answer()
            assert ticket.done
        raise AssertionError("never read")

    def read_all(self, bytes_max: int = BLOCK) -> list[tuple[int, bytes]]:
        offset, found = 0, []
        while offset < self.entry.end_offset:
            chunk = self.read(offset, bytes_max).chunk
            assert not chunk.damage and chunk.first_offset <= offset < chunk.next_offset
            found += [record for record in records_in(chunk.data) if record[0] >= offset]
            offset = chunk.next_offset
        return found


def expected(entry: SegmentEntry, size: int = 1_000) -> list[tuple[int, bytes]]:
    return [(number, b"%06d-" % number + b"x" * size) for number in range(entry.end_offset)]


@pytest.mark.parametrize("bytes_max", [100, BLOCK, 10 * BLOCK])
def test_all_records_come_from_blocks(tmp_path: Path, bytes_max: int) -> None:
    entry, data = sealed(tmp_path / "log")
    store = Store(tmp_path, entry, data)
    assert store.read_all(bytes_max) == expected(entry)
    assert store.all_asked[0] == (entry.data_end, entry.size_bytes), "the footer first"
    fetched = sorted(store.all_asked[1:])
    assert fetched[0][0] == 0 and all(one[1] <= two[0] for one, two in pairwise(fetched))


def test_a_read_in_the_middle_takes_two_round_trips_and_one_block(tmp_path: Path) -> None:
    entry, data = sealed(tmp_path / "log")
    store = Store(tmp_path, entry, data)
    first = store.segment.read(130, entry.end_offset, BLOCK)
    assert isinstance(first, Missing)
    store.cache.need(store.segment, first, store.now_ns)
    assert store.answer() == 1
    second = store.segment.read(130, entry.end_offset, BLOCK)
    assert isinstance(second, Missing)
    store.cache.need(store.segment, second, store.now_ns)
    assert len(store.asked) == 1 and store.answer() == 1
    # A sparse index has an entry for every 64 KiB: here the walk from there needs more blocks.
    reading = store.read(130)
    assert records_in(reading.chunk.data)[0][0] <= 130


def test_a_batch_over_the_edge_of_a_block_is_fetched_in_one_trip(tmp_path: Path) -> None:
    entry, data = sealed(tmp_path / "log", batches=4, size=BLOCK)  # each of them an entry of the index
    store = Store(tmp_path, entry, data)
    store.cache.need(store.segment, Missing(entry.data_end, entry.size_bytes), store.now_ns)
    store.answer()
    index = store.segment.load_index()
    assert len(index) == 1 and entry.data_end > 12 * BLOCK, "batches of four blocks, closer than entries"
    index.offsets, index.positions = [0, 4], [index.positions[0], index.positions[0] + BLOCK + 500]
    found = store.segment.read(1, entry.end_offset, 1)
    assert found == Missing(0, index.positions[1], index.positions[0]), (
        "the batch's own end, not its header's"
    )
    index.positions[1] = 3 * BLOCK
    found = store.segment.read(1, entry.end_offset, 1)
    assert isinstance(found, Missing) and found.end < BLOCK, "too far to be worth it"


def test_what_nobody_asked_for_is_found_between_what_is_there_and_under_way(tmp_path: Path) -> None:
    entry, data = sealed(tmp_path / "log")
    store = Store(tmp_path, entry, data)
    whole = Missing(100, 10 * BLOCK)
    assert store.cache.unasked(store.segment, whole) == Missing(0, 10 * BLOCK)
    store.cache.ahead(store.segment, Missing(0, BLOCK), store.now_ns)
    store.answer()
    store.cache.ahead(store.segment, Missing(4 * BLOCK, 5 * BLOCK), store.now_ns)
    assert store.cache.unasked(store.segment, whole) == Missing(BLOCK, 4 * BLOCK)
    store.cache.ahead(store.segment, Missing(0, entry.data_end), store.now_ns)
    assert store.cache.unasked(store.segment, whole) is None
    store.cache.forget(IDENTITY)
    segment = store.cache.segment(IDENTITY, entry)
    end = Missing(entry.data_end - 1, entry.size_bytes)
    assert store.cache.unasked(segment, end) == Missing(entry.data_end // BLOCK * BLOCK, entry.data_end)


def test_asking_twice_is_one_fetch_and_urgent_ones_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_cache, "FETCHES_MAX", 1)
    entry, data = sealed(tmp_path / "log")
    store = Store(tmp_path, entry, data)
    store.cache.ahead(store.segment, Missing(0, BLOCK), store.now_ns)
    store.cache.ahead(store.segment, Missing(0, 8 * BLOCK), store.now_ns)
    ticket = store.cache.need(store.segment, Missing(10 * BLOCK, 11 * BLOCK), store.now_ns)
    promoted = store.cache.need(store.segment, Missing(6 * BLOCK, 7 * BLOCK), store.now_ns)
    assert len(store.asked) == 1
    assert store.answer(2) == 2 and ticket.done and not promoted.done
    assert store.answer(1) == 1 and promoted.done
    store.answer()
    assert sorted(store.all_asked) == [
        (0, BLOCK), (BLOCK, 5 * BLOCK), (5 * BLOCK, 8 * BLOCK), (10 * BLOCK, 11 * BLOCK)
    ]  # fmt: skip
    assert store.cache.need(store.segment, Missing(0, BLOCK), store.now_ns).done


def test_the_cache_stays_within_its_bytes_and_gives_space_back(tmp_path: Path) -> None:
    entry, data = sealed(tmp_path / "log")
    store = Store(tmp_path, entry, data, bytes_max=6 * BLOCK)
    for _ in range(3):
        assert store.read_all() == expected(entry)
        assert store.cache.bytes_used <= 6 * BLOCK
    assert store.cache.evicted_count > 60
    used = os.stat(store.segment.file.path).st_blocks * 512
    assert used <= 6 * BLOCK + (entry.size_bytes - entry.data_end) + 2 * BLOCK, "holes were punched"


def test_without_punching_whole_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, position: int, size: int) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr(files, "punch_hole", refuse)
    entry, data = sealed(tmp_path / "log")
    store = Store(tmp_path, entry, data, bytes_max=3 * BLOCK)
    path = store.segment.file.path
    store.cache.need(store.segment, Missing(0, 3 * BLOCK), store.now_ns)
    store.answer()
    other = entry._replace(content_hash=b"o" * 16)
    second = store.cache.segment(IDENTITY, other)
    store.cache.need(second, Missing(0, BLOCK), store.now_ns)
    assert not path.exists() and store.cache.bytes_used == 0


def test_many_objects_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_cache, "SEGMENTS_MAX", 3)
    entry, data = sealed(tmp_path / "log")
    store = Store(tmp_path, entry, data)
    for number in range(10):
        store.cache.segment(IDENTITY, entry._replace(content_hash=bytes([number]) * 16))
    assert len(list(store.cache.directory.iterdir())) == 3
    store.cache.forget(IDENTITY)
    assert list(store.cache.directory.iterdir()) == [] and store.cache.statistics()["segments"] == 0


def test_an_unusable_directory_is_a_storage_error(tmp_path: Path) -> None:
    entry, data = sealed(tmp_path / "log")
    store = Store(tmp_path, entry, data)
    store.cache.close()
    with pytest.raises(StorageFailed):
        store.cache.segment(IDENTITY, entry)


def test_a_full_disk_does_not_stop_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry, _ = sealed(tmp_path / "log")
    make_directory = files.make_directory

    def refuse(directory: Path) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(files, "make_directory", refuse)
    cache = ColdCache(tmp_path / "none-yet", 1 << 20, lambda fetch: None, lambda identity: None)
    with pytest.raises(StorageFailed):
        cache.segment(IDENTITY, entry)
    monkeypatch.setattr(files, "make_directory", make_directory)
    assert cache.segment(IDENTITY, entry) is not None


@pytest.mark.parametrize("error", [StoreUnavailable("away"), ObjectMissing("gone")])
def test_a_failed_fetch_pauses_its_object_longer_each_time(tmp_path: Path, error: Exception) -> None:
    entry, data = sealed(tmp_path / "log")
    store = Store(tmp_path, entry, data)
    pauses = []
    for _ in range(8):
        ticket = store.cache.need(store.segment, Missing(0, BLOCK), store.now_ns)
        fetch = store.asked.pop()
        store.cache.fetched(fetch.number, error, store.now_ns)  # type: ignore[arg-type]
        assert ticket.done and store.cache.errors(IDENTITY) == [error]
        pause = store.cache.pause_of(store.segment, store.now_ns)
        assert pause is not None
        pauses.append(pause.end_ns - store.now_ns)
        waiting = store.cache.need(store.segment, Missing(0, BLOCK), store.now_ns)
        assert not waiting.done and not store.asked, "nothing is asked during a pause"
        store.cache.tick(pause.end_ns - 1)
        assert not waiting.done
        store.now_ns = pause.end_ns
        store.cache.tick(store.now_ns)
        assert waiting.done
    assert pauses[0] < 5 * 10**9 and max(pauses) <= 30 * 10**9 and pauses[-1] > pauses[0]
    store.read(0)
    store.cache.read_well(store.segment)
    assert store.cache.errors(IDENTITY) == []


def test_a_fetch_that_nobody_answers_is_given_up_and_a_late_answer_is_harmless(tmp_path: Path) -> None:
    entry, data = sealed(tmp_path / "log")
    store = Store(tmp_path, entry, data)
    ticket = store.cache.need(store.segment, Missing(0, BLOCK), store.now_ns)
    (fetch,) = store.asked
    store.cache.tick(store.now_ns + ANSWER_MAX_NS + 1)
    assert ticket.done and isinstance(store.cache.errors(IDENTITY)[0], StoreUnavailable)
    store.cache.fetched(fetch.number, None, store.now_ns)
    assert store.cache.statistics()["fetches"] == 0


def test_what_was_under_way_is_asked_again_and_forgotten_objects_wake_their_readers(tmp_path: Path) -> None:
    entry, data = sealed(tmp_path / "log")
    store = Store(tmp_path, entry, data)
    ticket = store.cache.need(store.segment, Missing(0, BLOCK), store.now_ns)
    store.asked.clear()
    store.cache.ask_again(store.now_ns)
    assert len(store.asked) == 1
    store.cache.forget(IDENTITY)
    assert ticket.done and store.cache.statistics()["fetches"] == 0


@pytest.mark.parametrize("flip", [70, 3 * BLOCK + 11, -200])
def test_wrong_bytes_are_fetched_once_more_then_told(tmp_path: Path, flip: int) -> None:
    entry, data = sealed(tmp_path / "log")
    wrong = bytearray(data)
    wrong[flip] ^= 4
    store = Store(tmp_path, entry, bytes(wrong))
    if flip < 0:  # in the footer
        store.cache.need(store.segment, Missing(entry.data_end, entry.size_bytes), store.now_ns)
        store.answer()
        (error,) = store.cache.errors(IDENTITY)
        assert isinstance(error, StoreDamaged) and error.facts["start"] == 0
        return
    with pytest.raises(StoreDamaged) as raised:
        store.read_all()
    found = raised.value.facts
    assert found["position"] <= flip and found["start"] * 1_000 <= flip + 8_000
    asked = [span for span in store.all_asked if span[0] <= flip < span[1]]
    assert len(asked) == 2, "once more, and no more"
    store.data = data
    store.segment.forget_attempts()
    assert store.read_all() == expected(entry)


def test_intact_batches_of_another_object_are_not_taken_for_this_one(tmp_path: Path) -> None:
    entry, data = sealed(tmp_path / "log")
    other = open_log(tmp_path / "other")
    for number in range(60):
        append(
            other,
            *(b"%06d-" % (4 * number + one) + b"y" * 1_000 for one in range(4)),
            time_us=10**15 + 7 + number,
        )
        other.write()
    sync(other)
    roll(other)
    _, theirs = sealed_files(tmp_path / "other")[0]
    assert read_header(theirs, 64).base_offset == 0 and len(theirs) == len(data)
    mixed = theirs[: entry.data_end] + data[entry.data_end :]
    store = Store(tmp_path, entry, mixed)
    with pytest.raises(StoreDamaged):
        store.read_all()


def test_damage_from_before_the_upload_is_passed_like_in_a_local_file(tmp_path: Path) -> None:
    entry, data = sealed(tmp_path / "log")
    holed = bytearray(data)
    position = 64
    for _ in range(20):
        position += read_header(data, position).size
    lost = read_header(data, position)
    holed[position + 200] ^= 1
    entry = entry._replace(
        record_count=entry.record_count - lost.record_count, batch_count=entry.batch_count - 1
    )
    store = Store(tmp_path, entry, bytes(holed))
    offset, found, damage = 0, [], []
    while offset < entry.end_offset:
        chunk = store.read(offset).chunk
        damage += chunk.damage
        found += [record for record in records_in(chunk.data) if record[0] >= offset]
        offset = chunk.next_offset
    assert damage == [(lost.base_offset, lost.end_offset)]
    assert found == [one for one in expected(entry) if not lost.base_offset <= one[0] < lost.end_offset]


def test_times_are_found_to_the_batch(tmp_path: Path) -> None:
    entry, data = sealed(tmp_path / "log")
    store = Store(tmp_path, entry, data)

    def at(time_us: int) -> int | None:
        for _ in range(100):
            found = store.segment.offset_at_time(time_us)
            if not isinstance(found, Missing):
                return found
            store.cache.need(store.segment, found, store.now_ns)
            store.answer()
        raise AssertionError("never found")

    assert [at(10**15 + number) for number in (-5, 0, 17, 59, 60)] == [0, 0, 68, 236, None]


def test_a_ticket_starts_open() -> None:
    assert not Ticket().done and Ticket(done=True).done
    assert EntryFlag.COMPACTED and issubclass(ColdSegment, StoredSegment)


# -- reads that wait ------------------------------------------------------------------------------


def waiting(store: Store, reader: int, first: int, last: int) -> Ticket:
    span = Missing(first * BLOCK, (last + 1) * BLOCK)
    return store.cache.need(store.segment, span, store.now_ns, reader)


def made(tmp_path: Path, blocks: int) -> Store:
    return Store(tmp_path, *sealed(tmp_path / "log"), bytes_max=blocks * BLOCK)


def test_what_a_read_waits_for_stays_until_it_was_read(tmp_path: Path) -> None:
    store = made(tmp_path, 2)
    first, second = waiting(store, 0, 0, 1), waiting(store, 1, 4, 5)
    assert store.answer() and first.done and not second.done
    assert store.answer() == 0 and store.segment.blocks == {0, 1}, "the second one has to wait"
    store.cache.mark_read(store.segment, range(1), store.now_ns)
    assert store.answer() and second.done and store.segment.blocks == {4, 5}


def test_a_read_that_needs_more_pushes_the_youngest_out_which_comes_after_it(tmp_path: Path) -> None:
    store = made(tmp_path, 2)
    first, second = waiting(store, 0, 0, 0), waiting(store, 1, 4, 4)
    assert store.answer() == 2 and first.done and second.done
    more = waiting(store, 0, 1, 1)
    assert store.answer() == 1 and more.done and store.segment.blocks == {0, 1}
    store.cache.mark_read(store.segment, {0}, store.now_ns)
    again = waiting(store, 1, 4, 4)
    assert store.answer() == 1 and again.done and 4 in store.segment.blocks


def test_a_read_that_nobody_comes_back_for_is_let_go(tmp_path: Path) -> None:
    store = made(tmp_path, 2)
    waiting(store, 0, 0, 1)
    store.answer()
    second = waiting(store, 1, 4, 5)
    store.now_ns += cold_reads.KEPT_NS
    store.cache.tick(store.now_ns)
    assert store.answer() and second.done


def test_a_read_larger_than_the_cache_gets_its_blocks_alone(tmp_path: Path) -> None:
    store = made(tmp_path, 1)
    first, second = waiting(store, 0, 0, 2), waiting(store, 1, 5, 5)
    while store.answer():
        pass
    assert first.done and not second.done
    store.cache.mark_read(store.segment, {0}, store.now_ns)
    store.answer()
    assert second.done and store.segment.blocks == {5}


def test_a_failed_fetch_ends_the_waiting_and_the_rest_goes_on(tmp_path: Path) -> None:
    store = made(tmp_path, 2)
    first, second = waiting(store, 0, 0, 1), waiting(store, 1, 4, 5)
    fetch = store.asked.pop(0)
    store.cache.fetched(fetch.number, StoreUnavailable("away"), store.now_ns)
    assert first.done and second.done, "all of this object look again, and are told why it pauses"
    assert store.cache.statistics()["waiting_reads"] == 0 and not store.asked


def paused(store: Store) -> Ticket:
    """Have the fetch of block 4 fail; return what a read of block 4 waits for then."""
    waiting(store, 4, 4, 4)
    store.cache.fetched(store.asked.pop(0).number, StoreUnavailable("away"), store.now_ns)
    store.woken.clear()
    return waiting(store, 4, 4, 4)


def test_who_waits_for_the_end_of_a_pause_is_told_when_a_read_of_cached_bytes_ends_it(tmp_path: Path) -> None:
    store = made(tmp_path, 4)
    waiting(store, 0, 0, 0)
    store.answer()
    waits = paused(store)
    assert not waits.done
    store.cache.read_well(store.segment)
    assert waits.done and store.woken == [IDENTITY]
    store.cache.read_well(store.segment)
    assert store.woken == [IDENTITY], "told once"
    assert not waiting(store, 4, 4, 4).done and store.answer() == 1, "and it is fetched again"


def test_who_waits_for_the_end_of_a_pause_is_told_when_the_file_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = made(tmp_path, 4)
    waits = paused(store)
    monkeypatch.setattr(cold_cache, "SEGMENTS_MAX", 0)
    other = LogIdentity(9, 0)
    store.cache.segment(other, store.entry)
    assert waits.done and store.woken == [IDENTITY]


def test_a_later_pause_tells_who_waits_for_the_former(tmp_path: Path) -> None:
    store = made(tmp_path, 4)
    waits = paused(store)
    store.cache.pause(store.segment, StoreDamaged("damaged"), store.now_ns)
    assert waits.done and store.woken == [IDENTITY]


def test_who_has_no_room_yet_is_told_when_another_read_brings_what_it_wants(tmp_path: Path) -> None:
    store = made(tmp_path, 2)
    waiting(store, 0, 0, 1)
    store.answer()
    second = waiting(store, 7, 4, 5)
    assert not second.done
    store.woken.clear()
    store.cache.mark_read(store.segment, range(10), store.now_ns)
    assert second.done and store.woken == [IDENTITY]


def test_many_who_wait_for_the_same_are_told_as_one(tmp_path: Path) -> None:
    store = made(tmp_path, 2)
    waits = [waiting(store, reader, 0, 0) for reader in range(100)]
    store.woken.clear()
    store.answer()
    assert all(one.done for one in waits) and store.woken == [IDENTITY]


def test_who_is_admitted_with_everything_there_is_told_at_once(tmp_path: Path) -> None:
    store = made(tmp_path, 2)
    waiting(store, 0, 0, 1)
    store.answer()
    second = waiting(store, 1, 1, 1)
    assert second.done
    third = waiting(store, 2, 0, 2)
    assert not third.done
    store.woken.clear()
    store.cache.mark_read(store.segment, {0, 1}, store.now_ns)
    assert store.answer() and third.done and store.woken


def test_reading_ahead_takes_no_room_from_those_who_wait(tmp_path: Path) -> None:
    store = made(tmp_path, 2)
    waiting(store, 0, 0, 1)
    store.cache.ahead(store.segment, Missing(4 * BLOCK, 6 * BLOCK), store.now_ns)
    assert store.answer() == 1 and store.segment.blocks == {0, 1}
    store.cache.mark_read(store.segment, {0}, store.now_ns)
    assert store.answer() == 1 and store.segment.blocks == {4, 5}
