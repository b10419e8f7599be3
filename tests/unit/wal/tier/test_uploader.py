"""Put, read back, name, confirm: each step with every fault, and two owners at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from danube.core.partition.tier_plan import MANIFESTS_KEPT
from danube.errors import Damage, DanubeError, Fenced, StorageFailed, StoreDamaged, StoreUnavailable
from danube.host import files
from danube.wal.segments.segment import LogIdentity, base_offset_of
from danube.wal.tier.keys import manifest_key, manifest_prefix, segment_key
from danube.wal.tier.manifest import EntryFlag, Manifest, SegmentEntry
from danube.wal.tier.rewriting import merge_objects
from danube.wal.tier.uploader import (
    Ownership,
    Uploader,
    adding,
    dropped_keys,
    in_turn,
    replacing,
    trimming,
)
from tests.unit.faulty_store import (
    TOPIC,
    Crash,
    Fault,
    FaultyStore,
    check_store,
    copy_segments,
    crash_after,
    crash_before,
    fail_after,
    fail_before,
    make_segments,
    newest_manifest,
)
from tests.unit.wal_samples import IDENTITY

COUNT = 4


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_segments(tmp_path_factory.mktemp("made") / IDENTITY.directory_name, COUNT)


@pytest.fixture
def directory(made: list[Path], tmp_path: Path) -> Path:
    copy_segments(made, tmp_path / "log")
    return tmp_path / "log"


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


def owner(directory: Path, epoch: int = 1, topic: str = TOPIC) -> Ownership:
    return Ownership(topic, IDENTITY, epoch, directory)


def local(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if base_offset_of(path.name) is not None)


def contents(paths: list[Path]) -> dict[int, bytes]:
    return {base_offset_of(path.name) or 0: path.read_bytes() for path in paths}


def upload(uploader: Uploader, path: Path, resumed: bool = False) -> SegmentEntry:
    entry = uploader.upload(path, resumed=resumed)
    assert entry is not None
    return entry


def loaded(store: FaultyStore, directory: Path, epoch: int = 1, start_count: int = 0) -> Uploader:
    uploader = Uploader(store, owner(directory, epoch), start_count=start_count)
    uploader.load()
    return uploader


# -- the plain way --------------------------------------------------------------------------------


def test_what_is_sealed_is_the_object_byte_for_byte(store: FaultyStore, directory: Path) -> None:
    uploader = loaded(store, directory)
    paths = local(directory)
    entries = [upload(uploader, path) for path in paths]
    manifest = uploader.install(adding(entries))
    assert newest_manifest(store.memory) == manifest == uploader.manifest
    assert (manifest.epoch, manifest.generation, len(manifest)) == (1, 1, COUNT)
    for path, entry in zip(paths, entries, strict=True):
        assert store.memory.get(segment_key(IDENTITY, entry)) == path.read_bytes()
    check_store(store.memory, contents(paths), set())


def test_several_changes_are_one_manifest(store: FaultyStore, directory: Path) -> None:
    uploader = loaded(store, directory)
    entries = [upload(uploader, path) for path in local(directory)]
    manifest = uploader.install(in_turn(adding(entries), trimming(entries[0].end_offset)))
    assert (len(manifest), manifest.start_offset) == (COUNT - 1, entries[0].end_offset)
    assert manifest_keys(store) == [manifest_key(IDENTITY, 1, manifest.generation)]


def manifest_keys(store: FaultyStore) -> list[str]:
    return [found.key for found in store.memory.list(manifest_prefix(IDENTITY))]


def test_a_change_that_changes_nothing_writes_nothing(store: FaultyStore, directory: Path) -> None:
    uploader = loaded(store, directory)
    entry = upload(uploader, local(directory)[0])
    uploader.install(adding([entry]))
    before = len(store.calls)
    assert uploader.install(in_turn(adding([entry]), trimming(0))) is uploader.manifest
    assert len(store.calls) == before


def test_a_hole_between_segments_is_stated(store: FaultyStore, directory: Path) -> None:
    uploader = loaded(store, directory)
    paths = local(directory)
    manifest = uploader.install(adding([upload(uploader, paths[0]), upload(uploader, paths[2])]))
    assert [entry_flags & EntryFlag.HOLE_BEFORE for entry_flags in manifest.entries["flags"]] == [0, 1]


def test_only_the_newest_manifests_are_kept(store: FaultyStore, directory: Path) -> None:
    uploader = loaded(store, directory)
    entries = [upload(uploader, path) for path in local(directory)]
    for entry in entries:
        uploader.install(adding([entry]))
    uploader.install(trimming(entries[0].end_offset))
    assert len(manifest_keys(store)) == MANIFESTS_KEPT
    assert newest_manifest(store.memory) == uploader.manifest


def test_a_resumed_upload_reads_back_and_puts_nothing(store: FaultyStore, directory: Path) -> None:
    uploader = loaded(store, directory)
    path = local(directory)[0]
    first = upload(uploader, path)
    store.calls.clear()
    again = upload(uploader, path, resumed=True)
    assert "put_file" not in store.calls
    assert again._replace(uploaded_us=0) == first._replace(uploaded_us=0)


def test_a_file_that_has_gone_is_no_error(store: FaultyStore, directory: Path) -> None:
    uploader = loaded(store, directory)
    assert uploader.upload(directory / "00000000000000009999.seg") is None

    def vanish(name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        arguments[1].unlink()
        return call()

    store.faults[len(store.calls)] = vanish
    assert uploader.upload(local(directory)[0]) is None


# -- what a store may do --------------------------------------------------------------------------


def test_a_flipped_bit_is_found_before_anything_names_the_object(store: FaultyStore, directory: Path) -> None:
    uploader = loaded(store, directory)
    path = local(directory)[0]

    def flip(name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        store.memory.put(arguments[0], bytes(data))

    store.faults[len(store.calls)] = flip
    with pytest.raises(StoreDamaged, match="is not what was uploaded"):
        uploader.upload(path)
    assert newest_manifest(store.memory) is None and path.exists()
    uploader.install(adding([upload(uploader, path, resumed=True)]))  # put again, not believed
    check_store(store.memory, contents([path]), set())


def test_an_object_of_another_length_is_found(store: FaultyStore, directory: Path) -> None:
    uploader = loaded(store, directory)
    path = local(directory)[0]

    def longer(name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        store.memory.put(arguments[0], path.read_bytes() + b"more")

    store.faults[len(store.calls)] = longer
    with pytest.raises(StoreDamaged):
        uploader.upload(path)


def test_a_manifest_that_reads_back_differently_is_put_again(store: FaultyStore, directory: Path) -> None:
    uploader = loaded(store, directory)
    uploader.install(trimming(1))
    entry = upload(uploader, local(directory)[0])

    def flip(name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        store.memory.put(arguments[0], arguments[1][:-1] + b"\xff")

    store.faults[len(store.calls)] = flip
    with pytest.raises(StoreDamaged, match="is not what was put"):
        uploader.install(adding([entry]))
    assert uploader.unsettled and not len(uploader.manifest)
    manifest = uploader.install(lambda _: None)
    assert newest_manifest(store.memory) == manifest and len(manifest) == 1
    assert uploader.install(lambda _: None) is manifest  # settled: nothing more to repeat


def test_a_listing_that_lags_does_not_make_an_owner_forget(store: FaultyStore, directory: Path) -> None:
    uploader = loaded(store, directory)
    uploader.install(adding([upload(uploader, local(directory)[0])]))
    store.faults[len(store.calls)] = lambda name, arguments, call: []
    again = Uploader(store, owner(directory, 2))
    assert again.load() == uploader.manifest


def test_a_damaged_manifest_is_healed_from_the_copy_or_named(store: FaultyStore, directory: Path) -> None:
    uploader = loaded(store, directory)
    manifest = uploader.install(adding([upload(uploader, local(directory)[0])]))
    key = manifest_keys(store)[-1]
    store.memory.put(key, manifest.encode()[:-9])
    assert Uploader(store, owner(directory)).load() == manifest
    assert store.memory.get(key) == manifest.encode()
    store.memory.put(key, b"nothing")
    (directory / "manifest").unlink()
    with pytest.raises(StoreDamaged, match="is damaged"):
        Uploader(store, owner(directory)).load()


def test_before_the_store_answers_the_local_copy_is_known(store: FaultyStore, directory: Path) -> None:
    uploader = loaded(store, directory)
    manifest = uploader.install(adding([upload(uploader, local(directory)[0])]))
    store.always = fail_before
    again = Uploader(store, owner(directory, 5))
    with pytest.raises(StoreUnavailable):
        again.load()
    assert again.manifest == manifest


@pytest.mark.parametrize("damage", [b"", b"DANUBMAN but no more"])
def test_a_local_copy_that_cannot_be_read_is_none(store: FaultyStore, directory: Path, damage: bytes) -> None:
    uploader = loaded(store, directory)
    manifest = uploader.install(adding([upload(uploader, local(directory)[0])]))
    (directory / "manifest").write_bytes(damage)
    again = Uploader(store, owner(directory))
    assert not len(again.manifest) and again.load() == manifest


def test_a_copy_that_cannot_be_written_stops_nothing(
    store: FaultyStore, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(files, "replace_durably", refuse)
    uploader = loaded(store, directory)
    assert len(uploader.install(adding([upload(uploader, local(directory)[0])]))) == 1


def test_a_manifest_of_another_topic_is_refused_by_name(store: FaultyStore, directory: Path) -> None:
    loaded(store, directory).install(trimming(5))
    (directory / "manifest").unlink()
    other = Uploader(store, owner(directory, topic="/default/other"))
    with pytest.raises(StoreDamaged, match="is of /default/orders"):
        other.load()


# -- what is wrong here ---------------------------------------------------------------------------


def test_a_damaged_local_segment_is_not_uploaded(store: FaultyStore, directory: Path) -> None:
    path = local(directory)[0]
    data = bytearray(path.read_bytes())
    data[90] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damage, match="another hash than its footer"):
        loaded(store, directory).upload(path)
    assert "put_file" not in store.calls


def test_a_segment_of_another_place_is_not_uploaded(store: FaultyStore, directory: Path) -> None:
    uploader = loaded(store, directory)
    paths = local(directory)
    paths[0].rename(paths[1])
    with pytest.raises(Damage, match="belongs elsewhere"):
        uploader.upload(paths[1])
    foreign = Uploader(store, Ownership(TOPIC, LogIdentity(9, 9), 1, directory))
    with pytest.raises(Damage, match="belongs elsewhere"):
        foreign.upload(paths[2])


def test_a_segment_that_lost_its_footer_is_not_uploaded(store: FaultyStore, directory: Path) -> None:
    path = local(directory)[0]
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(Damage, match="lost its footer"):
        loaded(store, directory).upload(path)


def test_a_file_that_cannot_be_read_fails_by_name(
    store: FaultyStore, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploader = loaded(store, directory)

    def refuse(fd: int, size: int, position: int) -> bytes:
        raise OSError(5, "input/output error")

    monkeypatch.setattr(files, "pread", refuse)
    with pytest.raises(StorageFailed, match=r"\.seg failed"):
        uploader.upload(local(directory)[0])


def test_records_that_the_store_holds_in_other_segments_are_refused(
    store: FaultyStore, directory: Path
) -> None:
    uploader = loaded(store, directory)
    entry = upload(uploader, local(directory)[0])
    uploader.install(adding([entry]))
    other = entry._replace(base_offset=entry.end_offset - 1, end_offset=entry.end_offset + 3)
    with pytest.raises(Damage, match="in other segments"):
        uploader.install(adding([other]))
    assert uploader.manifest == newest_manifest(store.memory)


# -- owners ---------------------------------------------------------------------------------------


def test_a_lower_epoch_is_fenced_and_writes_nothing(store: FaultyStore, directory: Path) -> None:
    loaded(store, directory, epoch=5).install(trimming(1))
    before = manifest_keys(store)
    with pytest.raises(Fenced, match="newer owner"):
        Uploader(store, owner(directory, 4)).load()
    assert manifest_keys(store) == before


def test_an_owner_that_was_replaced_stops_at_its_next_manifest(store: FaultyStore, directory: Path) -> None:
    old = loaded(store, directory, epoch=1)
    entry = upload(old, local(directory)[0])
    new = loaded(store, directory, epoch=2)
    new.install(adding([upload(new, local(directory)[0])]))
    with pytest.raises(Fenced):
        old.install(adding([entry]))
    with pytest.raises(Fenced):
        old.remove(
            ["partitions/0000000000001234-3/00000000000000000000-00000000000000000004-0000000000000000.seg"]
        )
    assert newest_manifest(store.memory) == new.manifest


def test_a_new_owner_goes_on_from_what_the_old_one_added_meanwhile(
    store: FaultyStore, directory: Path
) -> None:
    old, paths = loaded(store, directory, epoch=1), local(directory)
    old.install(adding([upload(old, paths[0])]))
    new = loaded(store, directory, epoch=2)
    old.install(adding([upload(old, paths[1]), upload(old, paths[2])]))  # it may evict these now
    manifest = new.install(adding([upload(new, paths[3])]))
    assert [int(base) for base in manifest.entries["base_offset"]] == [0, 4, 8, 12]
    assert manifest.epoch == 2 and newest_manifest(store.memory) == manifest


def test_a_claim_alone_stops_the_older_owner(store: FaultyStore, directory: Path) -> None:
    old, paths = loaded(store, directory, epoch=1), local(directory)
    old.install(adding([upload(old, paths[0])]))
    new = loaded(store, directory, epoch=2)
    store.faults[len(store.calls) + 1] = crash_before  # right behind the claim
    with pytest.raises(Crash):
        new.install(trimming(1))
    with pytest.raises(Fenced, match="newer owner"):
        old.install(adding([upload(old, paths[1])]))
    with pytest.raises(Fenced):
        Uploader(store, owner(directory, 1)).load()
    check_store(store.memory, contents(paths[:1]), set())


def test_a_mover_that_starts_again_never_reuses_a_generation(store: FaultyStore, directory: Path) -> None:
    paths = local(directory)
    first = loaded(store, directory)
    late: list[tuple[str, bytes]] = []

    def delay(name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        if name != "put" or "manifest" not in arguments[0]:
            return call()
        late.append((arguments[0], arguments[1]))
        raise Crash

    entry = upload(first, paths[0])
    for start_count in range(1, 4):
        store.always = delay
        with pytest.raises(Crash):
            first.install(adding([entry]))
        store.always = None
        first = loaded(store, directory, start_count=start_count)
        entry = upload(first, paths[start_count % 2])
    manifest = first.install(adding([upload(first, path) for path in paths]))
    keys = [key for key, _ in late]
    assert len(set(keys)) == len(keys) == 3
    for key, data in late:
        store.memory.put(key, data)
    assert newest_manifest(store.memory) == manifest


# -- merging and removing -------------------------------------------------------------------------


def merged(uploader: Uploader, work: Path, first: int, last: int) -> list[str]:
    before = uploader.manifest
    sources = [before.entry(index) for index in range(first, last + 1)]
    return dropped_keys(before, uploader.install(replacing(merge_objects(uploader, sources, work), sources)))


def test_merged_segments_take_the_place_of_their_sources(
    store: FaultyStore, directory: Path, tmp_path: Path
) -> None:
    uploader = loaded(store, directory)
    paths = local(directory)
    originals = contents(paths)
    uploader.install(adding([upload(uploader, path) for path in paths]))
    dropped = merged(uploader, tmp_path / "work", 1, 2)
    assert len(dropped) == 2 and len(uploader.manifest) == COUNT - 1
    assert uploader.manifest.entry(1).flags == EntryFlag.MERGED
    check_store(store.memory, originals, set())
    uploader.remove(dropped)
    assert all(store.memory.head(key) is None for key in dropped)
    check_store(store.memory, originals, set())
    assert not (tmp_path / "work").exists()


def test_sources_are_kept_when_what_replaced_them_is_missing(
    store: FaultyStore, directory: Path, tmp_path: Path
) -> None:
    uploader = loaded(store, directory)
    uploader.install(adding([upload(uploader, path) for path in local(directory)]))
    dropped = merged(uploader, tmp_path / "work", 0, 1)
    store.memory.delete([segment_key(IDENTITY, uploader.manifest.entry(0))])
    with pytest.raises(StoreDamaged, match="missing or has another size"):
        uploader.remove(dropped)
    assert all(store.memory.head(key) is not None for key in dropped)


def test_what_is_named_is_never_removed(store: FaultyStore, directory: Path) -> None:
    uploader = loaded(store, directory)
    uploader.install(adding([upload(uploader, path) for path in local(directory)]))
    uploader.remove(uploader.named())
    check_store(store.memory, contents(local(directory)), set())


def test_damaged_sources_are_not_merged(store: FaultyStore, directory: Path, tmp_path: Path) -> None:
    uploader = loaded(store, directory)
    uploader.install(adding([upload(uploader, path) for path in local(directory)]))
    key = segment_key(IDENTITY, uploader.manifest.entry(1))
    data = bytearray(store.memory.get(key))
    data[120] ^= 1
    store.memory.put(key, bytes(data))
    before = {found.key for found in store.memory.list("")}
    with pytest.raises(StoreDamaged, match="cannot be merged"):
        merged(uploader, tmp_path / "work", 0, 2)
    assert {found.key for found in store.memory.list("")} == before


def test_a_merge_of_what_is_not_named_any_more_changes_nothing(
    store: FaultyStore, directory: Path, tmp_path: Path
) -> None:
    uploader = loaded(store, directory)
    manifest = uploader.install(adding([upload(uploader, path) for path in local(directory)]))
    sources = [manifest.entry(index) for index in range(2)]
    entry = merge_objects(uploader, sources, tmp_path / "work")
    trimmed = uploader.install(trimming(sources[0].end_offset))
    assert uploader.install(replacing(entry, sources)) is trimmed


# -- every crash point ----------------------------------------------------------------------------


def way_of_a_partition(store: FaultyStore, directory: Path, work: Path, start_count: int) -> None:
    """Upload, name, evict, merge, remove: what a mover and its owner do, from whatever was left before."""
    uploader = loaded(store, directory, start_count=start_count)
    for path in local(directory):
        entry = uploader.upload(path, resumed=start_count > 0)
        assert entry is not None
        evict(directory, uploader.install(adding([entry])))
    if len(uploader.manifest) == COUNT:
        uploader.remove(merged(uploader, work, 0, COUNT - 1))


def evict(directory: Path, manifest: Manifest) -> None:
    """The owner drops the first local segment that was told to be in the store."""
    for path in local(directory)[:1]:
        if manifest.find(base_offset_of(path.name) or 0) < len(manifest):
            path.unlink()


FAULTS: list[Fault] = [fail_before, fail_after, crash_before, crash_after]


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_at_every_call_loses_nothing(made: list[Path], tmp_path: Path, fault: Fault) -> None:
    originals = contents(made)
    whole = FaultyStore()
    copy_segments(made, tmp_path / "whole")
    way_of_a_partition(whole, tmp_path / "whole", tmp_path / "work", 0)
    count = len(whole.calls)
    assert count > 40
    for number in range(count):
        store, directory = FaultyStore(), tmp_path / f"log-{number}"
        copy_segments(made, directory)
        store.faults[number] = fault
        try:
            way_of_a_partition(store, directory, tmp_path / "work", 0)
        except (Crash, DanubeError):
            pass
        check_store(store.memory, originals, set(contents(local(directory))))
        way_of_a_partition(store, directory, tmp_path / "work", 1)
        assert not local(directory)
        check_store(store.memory, originals, set())


def test_a_retry_in_the_same_process_repeats_an_unsettled_manifest(made: list[Path], tmp_path: Path) -> None:
    originals = contents(made)
    for fault in (fail_before, fail_after):
        for number in range(6):  # claim and list; put, get, list and prune of an install
            store, directory = FaultyStore(), tmp_path / f"{fault.__name__}-{number}"
            paths = copy_segments(made, directory)
            uploader = loaded(store, directory)
            entries = [upload(uploader, path) for path in paths]
            store.faults[len(store.calls) + number] = fault
            try:
                uploader.install(adding(entries[:2]))
            except StoreUnavailable:
                assert uploader.unsettled == (number > 1)
            manifest = uploader.install(adding(entries))
            assert len(manifest) == COUNT and newest_manifest(store.memory) == manifest
            check_store(store.memory, originals, set())


def test_each_upload_may_rest_after_each_piece_of_reading_putting_and_reading_back(
    store: FaultyStore, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("danube.wal.tier.sealed_files.READ_BYTES", 100)
    monkeypatch.setattr("danube.wal.tier.uploader.READ_BACK_BYTES", 150)
    rested: list[list[int]] = []

    def rests() -> Callable[[int], None]:
        rested.append([])
        return rested[-1].append

    uploader = Uploader(store, owner(directory), rests=rests)
    for path in local(directory)[:2]:
        upload(uploader, path)
        size = path.stat().st_size
        read, read_back = -(-size // 100), -(-size // 150)
        assert rested[-1][:read] == [100] * (read - 1) + [size - 100 * (read - 1)]
        assert rested[-1][read:-read_back] == [size]
        assert sum(rested[-1][-read_back:]) == size
    assert len(rested) == 2
