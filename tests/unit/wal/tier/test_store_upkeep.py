"""What is removed from a store, whose store it is, and the copies beside segments."""

from __future__ import annotations

import errno
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from danube.broker.mover.copies import put_cursors, put_metadata
from danube.core.partition.tier_plan import MANIFESTS_KEPT, TierSettings
from danube.errors import (
    Fenced,
    StorageFailed,
    StorageIncompatible,
    StoreDamaged,
    StoreUnavailable,
    WrongState,
)
from danube.host import files
from danube.host.disk_reserve import Reserve
from danube.wal.log.cursors import pack_header
from danube.wal.tier import binding as store_binding
from danube.wal.tier import orphans
from danube.wal.tier.binding import (
    FILE_NAME,
    HOLDERS_REMEMBERED_MAX,
    bind,
    bound_store,
    ensure_bound,
    share,
    stored_identity,
    take_over,
)
from danube.wal.tier.keys import METADATA_PREFIX, STORE_KEY, cursors_prefix, partition_prefix, segment_key
from danube.wal.tier.orphans import delete_partition, sweep_partition
from danube.wal.tier.sealed_files import LocalListing
from danube.wal.tier.uploader import Ownership, Uploader, adding, trimming
from tests.fakes.memory_store import MemoryStore
from tests.unit.failing_files import FailingFiles
from tests.unit.faulty_store import (
    TOPIC,
    Crash,
    FaultyStore,
    crash_after,
    crash_before,
    fail_before,
    make_segments,
)
from tests.unit.wal_samples import IDENTITY

SETTINGS = TierSettings(orphan_age_us=0, reader_grace_us=0)
LATER_US = 1 << 60


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


def uploader_of(store: FaultyStore, directory: Path, epoch: int = 1, start_count: int = 0) -> Uploader:
    uploader = Uploader(store, Ownership(TOPIC, IDENTITY, epoch, directory), start_count=start_count)
    uploader.load()
    return uploader


def uploaded(store: FaultyStore, directory: Path, count: int = 3) -> Uploader:
    uploader = uploader_of(store, directory)
    entries = [uploader.upload(path) for path in make_segments(directory, count)]
    uploader.install(adding([entry for entry in entries if entry is not None]))
    return uploader


def segments(store: FaultyStore) -> set[str]:
    return {found.key for found in store.memory.list("") if found.key.endswith(".seg")}


# -- orphans --------------------------------------------------------------------------------------


def test_an_object_that_no_manifest_names_goes(store: FaultyStore, tmp_path: Path) -> None:
    uploader = uploaded(store, tmp_path / IDENTITY.directory_name)
    named = segments(store)
    orphan = partition_prefix(IDENTITY) + f"{0:020d}-{4:020d}-{'ab' * 8}.seg"
    coming = partition_prefix(IDENTITY) + f"{12:020d}-{16:020d}-{'ab' * 8}.seg"
    store.memory.put(orphan, b"orphan")
    store.memory.put(coming, b"not named yet")
    first = sweep_partition(uploader, (), {}, LATER_US, SETTINGS)
    patient = sweep_partition(uploader, (), {}, LATER_US, TierSettings(orphan_age_us=0))
    assert first.doomed == [orphan] and patient.doomed == [] and patient.unnamed_since == {}
    assert segments(store) == named | {coming}


def test_an_orphan_waits_for_readers_between_two_rounds(store: FaultyStore, tmp_path: Path) -> None:
    uploader = uploaded(store, tmp_path / IDENTITY.directory_name)
    orphan = partition_prefix(IDENTITY) + f"{0:020d}-{4:020d}-{'ab' * 8}.seg"
    store.memory.put(orphan, b"orphan")
    patient = TierSettings(orphan_age_us=0, reader_grace_us=10)
    first = sweep_partition(uploader, (), {}, LATER_US, patient)
    assert (first.doomed, first.unnamed_since) == ([], {orphan: LATER_US})
    assert sweep_partition(uploader, {orphan}, first.unnamed_since, LATER_US + 10, patient).doomed == []
    second = sweep_partition(uploader, (), first.unnamed_since, LATER_US + 10, patient)
    assert second.doomed == [orphan] and store.memory.head(orphan) is None


def test_an_owner_that_was_replaced_sweeps_nothing(store: FaultyStore, tmp_path: Path) -> None:
    uploader = uploaded(store, tmp_path / IDENTITY.directory_name)
    orphan = partition_prefix(IDENTITY) + f"{0:020d}-{4:020d}-{'ab' * 8}.seg"
    store.memory.put(orphan, b"orphan")
    uploader_of(store, tmp_path / "other", epoch=2).install(trimming(1))
    with pytest.raises(Fenced):
        sweep_partition(uploader, (), {}, LATER_US, SETTINGS)
    assert store.memory.head(orphan) is not None


def test_a_deleted_partition_goes_piece_by_piece(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploaded(store, tmp_path / IDENTITY.directory_name)
    monkeypatch.setattr(orphans, "ROUND_OBJECTS_MAX", 2)
    rounds = 1
    while delete_partition(store, IDENTITY):
        rounds += 1
    assert rounds > 1 and not list(store.memory.list(""))


# -- whose store it is ----------------------------------------------------------------------------


def test_a_first_start_binds_store_and_data_directory(store: FaultyStore, tmp_path: Path) -> None:
    assert bound_store(tmp_path) is None and stored_identity(store) is None
    identity = ensure_bound(store, tmp_path)
    assert ensure_bound(store, tmp_path) == identity == bound_store(tmp_path) == stored_identity(store)


@pytest.mark.parametrize("fault", [crash_before, crash_after])
def test_a_first_start_may_crash_at_every_call(store: FaultyStore, tmp_path: Path, fault: Any) -> None:
    for number in range(1, 3):
        place, other = FaultyStore(), tmp_path / str(number)
        other.mkdir()
        place.faults[number] = fault
        with pytest.raises(Crash):
            ensure_bound(place, other)
        assert ensure_bound(place, other) == bound_store(other)


def test_a_used_store_and_an_empty_directory_do_not_meet(store: FaultyStore, tmp_path: Path) -> None:
    identity = ensure_bound(store, tmp_path)
    put_metadata(store, 1, b"metadata")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(WrongState, match="is not the store of") as caught:
        ensure_bound(store, empty)
    assert "another broker's data" in str(caught.value) and not (empty / FILE_NAME).exists()
    bind(empty, identity)  # what a restore does
    assert ensure_bound(store, empty) == identity


def test_a_directory_does_not_change_its_store(store: FaultyStore, tmp_path: Path) -> None:
    ensure_bound(store, tmp_path)
    with pytest.raises(WrongState, match="objects are elsewhere"):
        ensure_bound(FaultyStore(), tmp_path)


def test_identities_that_cannot_be_read_are_refused(store: FaultyStore, tmp_path: Path) -> None:
    store.memory.put(STORE_KEY, b"{")
    with pytest.raises(StoreDamaged, match="cannot be read"):
        ensure_bound(store, tmp_path)
    store.memory.put(STORE_KEY, json.dumps({"format": 9, "store_id": "x", "created_us": 1}).encode())
    with pytest.raises(StorageIncompatible, match="format 9"):
        ensure_bound(store, tmp_path)
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(StorageFailed, match="cannot be read"):
        bound_store(tmp_path)


def test_a_binding_that_cannot_be_written_is_no_binding(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise OSError(errno.EIO, "the disk fails")

    monkeypatch.setattr(files, "replace_durably", refuse)
    with pytest.raises(StorageFailed, match="cannot be written"):
        ensure_bound(store, tmp_path)


def test_who_starts_on_a_full_disk_takes_the_store_over_with_what_was_kept_for_that(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Reserve()
    monkeypatch.setattr(store_binding, "reserve", kept)
    take_over(store, tmp_path, "while there was room")
    kept.keep(tmp_path / "reserve")
    full = FailingFiles(monkeypatch, ("open_new",))
    full.arm(0, errno.ENOSPC, lasting=True)
    take_over(store, tmp_path, "on the full disk")
    assert bound_store(tmp_path) is not None and not (tmp_path / "reserve").exists()
    with pytest.raises(StorageFailed, match="No space"):
        take_over(store, tmp_path, "with nothing left")
    full.disarm()
    take_over(store, tmp_path, "and again")


# -- who uses it -----------------------------------------------------------------------------------


def test_a_host_takes_over_again_and_again(store: FaultyStore, tmp_path: Path) -> None:
    for number in range(3 * HOLDERS_REMEMBERED_MAX):
        take_over(store, tmp_path, f"process {number}")
        found = stored_identity(store)
        assert found is not None and found.holder == f"process {number}"
    assert ensure_bound(store, tmp_path) == stored_identity(store)


@pytest.mark.parametrize("winner", [0, 1])
def test_of_two_copies_of_a_data_directory_the_first_to_start_stays(
    store: FaultyStore, tmp_path: Path, winner: int
) -> None:
    hosts = [tmp_path / "a", tmp_path / "b"]
    hosts[0].mkdir()
    take_over(store, hosts[0], "before")
    shutil.copytree(*hosts)
    take_over(store, hosts[winner], "first")
    with pytest.raises(WrongState, match="another host has taken over"):
        take_over(store, hosts[1 - winner], "second")
    take_over(store, hosts[winner], "and again")
    found = stored_identity(store)
    assert found is not None and found.holder == "and again"


def test_members_of_a_cluster_that_use_a_new_store_at_the_same_time_all_go_on_using_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finds no word in the store and puts its own; the last one stays."""
    times = itertools.count(1)
    monkeypatch.setattr(store_binding, "wall_us", lambda: next(times))
    members = [tmp_path / "a", tmp_path / "b"]

    class Slow(MemoryStore):
        def put(self, key: str, data: Any) -> Any:
            if not (members[1] / FILE_NAME).exists():
                members[1].mkdir()
                share(quick, members[1], "the cluster")
            return quick.put(key, data)

        def get(self, key: str, *more: Any) -> Any:
            return quick.get(key, *more)

    quick = MemoryStore()
    members[0].mkdir()
    share(Slow(), members[0], "the cluster")
    assert bound_store(members[0]) != bound_store(members[1])
    for member in members:
        share(quick, member, "the cluster")
        assert bound_store(member) == stored_identity(quick)


def test_a_member_of_a_cluster_is_refused_at_a_store_that_was_never_its_own(tmp_path: Path) -> None:
    first, wrong = MemoryStore(), MemoryStore()
    share(first, tmp_path, "the cluster")
    with pytest.raises(WrongState, match="not the store of this cluster"):
        share(wrong, tmp_path, "the cluster")
    assert not list(wrong.list(""))


def test_a_host_that_a_restore_took_the_place_of_is_refused(store: FaultyStore, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir(), new.mkdir()
    take_over(store, old, "old")
    identity = stored_identity(store)
    assert identity is not None
    bind(new, identity)  # what a restore does
    take_over(store, old, "old still")  # a drill: nobody has started on what was restored
    with pytest.raises(WrongState):
        take_over(store, new, "new")
    restored = stored_identity(store)
    assert restored is not None
    bind(new, restored)
    take_over(store, new, "new")
    with pytest.raises(WrongState):
        take_over(store, old, "old again")


@pytest.mark.parametrize("fault", [crash_before, crash_after])
def test_taking_over_may_crash_at_every_call(store: FaultyStore, tmp_path: Path, fault: Any) -> None:
    take_over(store, tmp_path, "first")
    calls = len(store.calls)
    take_over(store, tmp_path, "second")
    for number in range(len(store.calls) - calls):
        store.faults[len(store.calls) + number] = fault
        with pytest.raises(Crash):
            take_over(store, tmp_path, f"killed {number}")
        take_over(store, tmp_path, f"next {number}")


def test_a_put_of_a_killed_process_that_arrives_late_makes_no_stranger(
    store: FaultyStore, tmp_path: Path
) -> None:
    take_over(store, tmp_path, "killed")
    late = store.memory.get(STORE_KEY)
    take_over(store, tmp_path, "next")
    store.memory.put(STORE_KEY, late)
    take_over(store, tmp_path, "and the one after")


# -- copies ---------------------------------------------------------------------------------------


def test_the_newest_copies_are_kept(store: FaultyStore, tmp_path: Path) -> None:
    uploader, generation = uploader_of(store, tmp_path), 0
    for number in range(6):
        put_metadata(store, number, b"%d" % number)
        generation = put_cursors(uploader, b"%d" % number, generation)
    for prefix in (METADATA_PREFIX, cursors_prefix(IDENTITY)):
        found = [store.memory.get(one.key) for one in store.memory.list(prefix)]
        assert found == [b"3", b"4", b"5"] and len(found) == MANIFESTS_KEPT


def test_a_copy_without_a_subscription_is_stored_only_in_the_place_of_another(
    store: FaultyStore, tmp_path: Path
) -> None:
    nothing = pack_header(IDENTITY, 1, b"")
    assert put_cursors(uploader_of(store, tmp_path), nothing, 0) == 0 and not list(store.list(""))
    assert put_cursors(uploader_of(store, tmp_path), b"a", 0) == 1
    assert put_cursors(uploader_of(store, tmp_path), nothing, 0) == 2, "the subscription was deleted"


def test_a_mover_that_starts_again_goes_on_behind_the_last_copy(store: FaultyStore, tmp_path: Path) -> None:
    first = put_cursors(uploader_of(store, tmp_path), b"a", 0)
    again = put_cursors(uploader_of(store, tmp_path, start_count=1), b"b", 0)
    newer = put_cursors(uploader_of(store, tmp_path, epoch=2), b"c", 0)
    assert (first, again, newer) == (1, 3, 1)
    found = [store.memory.get(one.key) for one in store.memory.list(cursors_prefix(IDENTITY))]
    assert found == [b"a", b"b", b"c"]


def test_a_copy_that_reads_back_differently_removes_nothing(store: FaultyStore) -> None:
    put_metadata(store, 1, b"good")
    store.faults[len(store.calls)] = lambda name, arguments, call: store.memory.put(arguments[0], b"bad")
    with pytest.raises(StoreDamaged, match="is not what was put"):
        put_metadata(store, 2, b"better")
    store.always = fail_before
    with pytest.raises(StoreUnavailable):
        put_metadata(store, 3, b"best")
    assert store.memory.get(METADATA_PREFIX + f"{1:020d}") == b"good"


# -- the local listing ----------------------------------------------------------------------------


def test_a_footer_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_segments(tmp_path, 3)
    listing = LocalListing(tmp_path)
    first = listing.refresh()
    assert [one.sealed for one in first] == [True, True, True, False]
    opened: list[Path] = []
    real = files.open_existing

    def note(path: Path, *, writable: bool) -> int:
        opened.append(path)
        return real(path, writable=writable)

    monkeypatch.setattr(files, "open_existing", note)
    assert listing.refresh() == first and len(opened) == 1  # the active one
    first_path = tmp_path / f"{0:020d}.seg"
    first_path.unlink()
    assert listing.refresh() == first[1:]


def test_a_directory_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert LocalListing(tmp_path / "absent").refresh() == []


def test_a_directory_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_segments(tmp_path, 1)

    def refuse(path: Path, *, writable: bool) -> int:
        raise OSError(5, "input/output error")

    monkeypatch.setattr(files, "open_existing", refuse)
    with pytest.raises(StorageFailed):
        LocalListing(tmp_path).refresh()


def test_nothing_of_a_store_names_what_a_user_chose(store: FaultyStore, tmp_path: Path) -> None:
    uploader = uploaded(store, tmp_path / IDENTITY.directory_name)
    assert segment_key(IDENTITY, uploader.manifest.entry(0)) in segments(store)
    assert not any("orders" in found.key for found in store.memory.list(""))
