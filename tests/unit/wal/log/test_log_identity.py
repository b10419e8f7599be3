"""Segments say which log they are of: a stranger with the same ids is never served."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from danube.broker.tiers.restore import restore_cursors
from danube.cluster.log.local_log import LocalLog
from danube.core.dispatch.cursor import CursorState
from danube.core.dispatch.grants import Mode
from danube.core.metadata.commands import CreateTopic
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import TopicPolicy
from danube.errors import Damage, StoreDamaged
from danube.wal.cold.segment import ColdSegment
from danube.wal.log.cursors import CursorStore, read_cursor_file
from danube.wal.log.log import Log, LogOptions
from danube.wal.segments.key_compaction import LatestKeys, compact
from danube.wal.segments.merge import SealedRange, merge
from danube.wal.segments.segment import NO_LOG, LogIdentity, file_name, log_id_of, read_header
from danube.wal.tier.keys import cursors_key, metadata_key, segment_key
from danube.wal.tier.manifest import Manifest
from danube.wal.tier.returned import examine_returned
from danube.wal.tier.rewriting import merge_objects
from danube.wal.tier.uploader import Ownership, Uploader, adding
from danube.wal.verify.bytes import FindingKind
from danube.wal.verify.store import verify_store
from danube.wal.verify.tree import Verified, verify_tree
from tests.fakes.memory_store import MemoryStore
from tests.unit.store_samples import NOW_US, entry_for, put_manifest
from tests.unit.wal_samples import append, read_all, roll, sync

TOPIC = "/default/orders"
IDENTITY = LogIdentity(1, 0)
OURS, THEIRS = log_id_of(TOPIC, 1, 1_000), log_id_of(TOPIC, 1, 1_001)


def filled(data_dir: Path, log_id: bytes, word: bytes) -> Path:
    """Offsets 0 .. 2 and 2 .. 4 sealed, 4 .. 5 not."""
    directory = data_dir / "partitions" / IDENTITY.directory_name
    log = Log.open(directory, IDENTITY, 1, LogOptions(log_id=log_id))
    for number in range(2):
        append(log, word + b"%d" % number, word)
        log.write()
        roll(log, b"producers")
    append(log, word + b"last")
    log.write()
    sync(log)
    log.abandon()
    return directory


def header_of(path: Path) -> bytes:
    return read_header(path.read_bytes()[:64]).log_id


def test_every_file_of_a_log_has_its_id(tmp_path: Path) -> None:
    directory = filled(tmp_path, OURS, b"a")
    assert {header_of(path) for path in directory.glob("*.seg")} == {OURS}
    sources = [SealedRange(directory / file_name(start)) for start in (0, 2)]
    merge(sources, tmp_path / "merged")
    latest = LatestKeys()
    latest.add(sources)
    compact(sources, latest, tmp_path / "compacted")
    assert header_of(tmp_path / "merged") == header_of(tmp_path / "compacted") == OURS
    log = Log.open(directory, IDENTITY, 2, LogOptions(log_id=OURS))  # what was not synced is copied
    append(log, b"more")
    log.write()
    log.abandon()
    assert {header_of(path) for path in directory.glob("*.seg")} == {OURS}
    for path in directory.glob("*.seg"):
        path.unlink()
    Log.open(directory, IDENTITY, 3, LogOptions(log_id=OURS)).abandon()  # an empty one keeps the numbering
    assert {header_of(path) for path in directory.glob("*.seg")} == {OURS}


def test_the_id_follows_from_the_topic_alone() -> None:
    assert OURS == log_id_of(TOPIC, 1, 1_000) != THEIRS
    assert len({OURS, THEIRS, log_id_of("/default/order", 1, 1_000), log_id_of(TOPIC, 2, 1_000), NO_LOG}) == 5


@pytest.mark.parametrize("base", [0, 2, 4])
def test_a_stranger_is_set_aside_and_named(tmp_path: Path, base: int) -> None:
    ours, theirs = filled(tmp_path / "a", OURS, b"a"), filled(tmp_path / "b", THEIRS, b"b")
    shutil.copy(theirs / file_name(base), ours / file_name(base))
    log = Log.open(ours, IDENTITY, 2, LogOptions(log_id=OURS))
    held, _ = read_all(log)
    assert not any(payload.startswith(b"b") for payload in held.values())
    assert sorted(held) == [offset for offset in range(5) if offset not in range(base, min(base + 2, 5))]
    (told,) = [one for one in log.recovery.damaged if "another broker" in one.why]
    assert told.file.startswith(file_name(base)) and (ours / told.file).exists()
    assert log.log_end == 5
    log.abandon()


def test_files_of_before_are_read_and_go_on_with_an_id(tmp_path: Path) -> None:
    directory = filled(tmp_path, NO_LOG, b"old")
    log = Log.open(directory, IDENTITY, 2, LogOptions(log_id=OURS))
    append(log, b"new")
    log.write()
    assert len(read_all(log)[0]) == 6 and not log.recovery.damaged
    log.abandon()
    assert {header_of(path) for path in directory.glob("*.seg")} == {NO_LOG, OURS}


def test_segments_of_two_logs_are_not_merged(tmp_path: Path) -> None:
    ours, theirs = filled(tmp_path / "a", OURS, b"a"), filled(tmp_path / "b", THEIRS, b"a")
    sources = [SealedRange(ours / file_name(0)), SealedRange(theirs / file_name(2))]
    with pytest.raises(Damage):
        merge(sources, tmp_path / "merged")


def with_cursors(directory: Path, log_id: bytes, word: bytes) -> None:
    """Three generations of cursors, the newest in cursors-b."""
    store = CursorStore(directory, IDENTITY, log_id=log_id)
    store.load()
    for number in range(3):
        store.store("s", word + b"%d" % number)
        store._switch = True
        store.write()
    store.close()


@pytest.mark.parametrize("name", ["cursors-a", "cursors-b"])
def test_cursors_of_another_log_are_refused_and_named(tmp_path: Path, name: str) -> None:
    ours, theirs = filled(tmp_path / "a", OURS, b"a"), filled(tmp_path / "b", THEIRS, b"b")
    with_cursors(ours, OURS, b"ours")
    with_cursors(theirs, THEIRS, b"theirs")
    assert FindingKind.IDENTITY not in [kind for kind, _ in found_in(ours)]
    shutil.copy(theirs / name, ours / name)
    assert (FindingKind.IDENTITY, name) in found_in(ours)
    store = CursorStore(ours, IDENTITY, log_id=OURS)
    assert store.load()["s"].startswith(b"ours")
    (told,) = store.damage
    assert told.file == name and "another broker" in told.why
    for _ in range(2):
        store.store("s", b"ours again")
        store._switch = True
        store.write()
    store.close()
    again = CursorStore(ours, IDENTITY, log_id=OURS)
    assert again.load() == {"s": b"ours again"} and not again.damage
    again.close()


def test_cursors_of_another_log_alone_are_no_cursors(tmp_path: Path) -> None:
    with_cursors(tmp_path, THEIRS, b"theirs")
    store = CursorStore(tmp_path, IDENTITY, log_id=OURS)
    assert store.load() == {} and len(store.damage) == 2
    store.close()


def test_cursors_of_before_are_read_and_get_the_id_with_the_next_write(tmp_path: Path) -> None:
    with_cursors(tmp_path, NO_LOG, b"old")
    store = CursorStore(tmp_path, IDENTITY, log_id=OURS)
    assert store.load() == {"s": b"old2"} and not store.damage
    store.store("s", b"new")
    store.write()
    store.close()
    assert CursorStore(tmp_path, IDENTITY, log_id=OURS).load() == {"s": b"new"}
    found = read_cursor_file(tmp_path / "cursors-a", IDENTITY)
    assert found is not None and found.log_id == OURS


def test_copies_of_cursors_in_the_store_name_their_log(tmp_path: Path) -> None:
    store = stored([OURS, OURS], tmp_path)
    held = CursorStore(tmp_path, IDENTITY, log_id=OURS)
    held.load()
    held.store("s", CursorState.at(Mode.SHARED, 1).encode())
    held.write()
    key = cursors_key(IDENTITY, 1, 1)
    store.put(key, held.copy())
    assert identities(store) == []
    owner = Ownership(TOPIC, IDENTITY, 1, tmp_path / "restored", THEIRS)
    owner.directory.mkdir()
    with pytest.raises(Damage):
        restore_cursors(store, owner, Manifest.empty(TOPIC, IDENTITY, 1), owner.directory)
    held.log_id = THEIRS
    store.put(key, held.copy())
    assert identities(store) == [key]
    held.close()


def uploaded(store: MemoryStore, directory: Path, log_id: bytes) -> Uploader:
    """Offsets 0 .. 4 of a log, uploaded by the owner of epoch 1."""
    uploader = Uploader(store, Ownership(TOPIC, IDENTITY, 1, directory, log_id))
    uploader.load()
    entries = [uploader.upload(directory / file_name(base)) for base in (0, 2)]
    uploader.install(adding([entry for entry in entries if entry is not None]))
    return uploader


@pytest.mark.parametrize("local", [True, False], ids=["beside segments", "alone"])
def test_the_copy_of_a_strangers_manifest_is_told_and_not_used(tmp_path: Path, local: bool) -> None:
    ours, theirs = filled(tmp_path / "a", OURS, b"a"), filled(tmp_path / "b", THEIRS, b"b")
    store, strange = MemoryStore(), MemoryStore()
    uploaded(store, ours, OURS)
    other = uploaded(strange, theirs, THEIRS)
    other.install(lambda manifest: manifest)
    for info in strange.list(""):  # the objects came with it
        if info.key.endswith(".seg"):
            store.put(info.key, strange.get(info.key))
    if not local:
        for path in ours.glob("*.seg"):
            path.unlink()
    shutil.copy(theirs / "manifest", ours / "manifest")
    assert ((FindingKind.IDENTITY, "manifest") in found_in(ours)) is local
    verified = Verified()
    verify_store(store, NOW_US, verified, verify_tree(tmp_path / "a", verified))
    assert "manifest" in [
        Path(one.where).name for one in verified.findings if one.kind is FindingKind.IDENTITY
    ]
    again = Uploader(store, Ownership(TOPIC, IDENTITY, 2, ours, OURS))
    manifest = again.load()
    assert [manifest.entry(number).content_hash for number in range(2)] == [
        entry_for((filled(tmp_path / "c", OURS, b"a") / file_name(base)).read_bytes()).content_hash
        for base in (0, 2)
    ]


def test_a_strangers_manifest_in_the_store_is_refused(tmp_path: Path) -> None:
    theirs = filled(tmp_path / "b", THEIRS, b"b")
    store = MemoryStore()
    uploaded(store, theirs, THEIRS)
    for directory in (tmp_path / "empty", filled(tmp_path / "a", OURS, b"a")):
        with pytest.raises(StoreDamaged, match="another broker's"):
            Uploader(store, Ownership(TOPIC, IDENTITY, 2, directory, OURS)).load()
    for log_id in (THEIRS, NO_LOG):
        assert len(Uploader(store, Ownership(TOPIC, IDENTITY, 2, theirs, log_id)).load()) == 2


def test_the_mover_takes_no_segment_of_another_log(tmp_path: Path) -> None:
    theirs = filled(tmp_path / "b", THEIRS, b"b")
    other = uploaded(MemoryStore(), theirs, THEIRS)
    entries = [other.manifest.entry(number) for number in range(2)]
    strange = Uploader(other.store, Ownership(TOPIC, IDENTITY, 2, tmp_path / "ours", OURS))
    with pytest.raises(Damage, match="another broker"):
        strange.upload(theirs / file_name(0))
    with pytest.raises(StoreDamaged, match="another broker"):
        merge_objects(strange, entries, tmp_path / "work")
    with pytest.raises(Damage, match="another broker"):
        examine_returned(strange, entries[0], tmp_path / "returned")
    assert len(other.manifest) == 2 and merge_objects(other, entries, tmp_path / "work").end_offset == 4


def machine(created_us: int = 1_000) -> Metadata:
    state = Metadata()
    state.apply(1, CreateTopic(topic=TOPIC, policy=TopicPolicy(), created_us=created_us))
    return state


def found_in(data_dir: Path) -> list[tuple[FindingKind, str]]:
    verified = Verified()
    verify_tree(data_dir, verified)
    return [(one.kind, Path(one.where).name) for one in verified.findings]


def test_verify_names_a_stranger_with_and_without_the_metadata(tmp_path: Path) -> None:
    ours, theirs = filled(tmp_path / "a", OURS, b"a"), filled(tmp_path / "b", THEIRS, b"a")
    with LocalLog(tmp_path / "a" / "metadata") as log:
        log.propose(CreateTopic(topic=TOPIC, policy=TopicPolicy(), created_us=1_000))
    assert found_in(tmp_path / "a") == []
    shutil.copy(theirs / file_name(0), ours / file_name(0))
    assert (FindingKind.IDENTITY, file_name(0)) in found_in(tmp_path / "a")
    for path in theirs.glob("*.seg"):
        shutil.copy(path, ours)
    assert [kind for kind, _ in found_in(tmp_path / "a")] == [FindingKind.IDENTITY] * 3
    assert found_in(ours) == []  # alone, they agree with each other
    shutil.copy(filled(tmp_path / "c", OURS, b"a") / file_name(2), ours)
    assert (FindingKind.IDENTITY, file_name(2)) in found_in(ours)


def stored(log_ids: list[bytes], root: Path) -> MemoryStore:
    """Objects 0 .. 2 and 2 .. 4, of the logs with these ids."""
    store, manifest = MemoryStore(), Manifest.empty(TOPIC, IDENTITY, 1)
    store.put("store.json", b'{"format": 1, "store_id": "x", "created_us": 1}')
    for number, log_id in enumerate(log_ids):
        data = (filled(root / str(number), log_id, b"a") / file_name(2 * number)).read_bytes()
        entry = entry_for(data)._replace(previous_hash=bytes(16) if number else entry_for(data).previous_hash)
        store.put(segment_key(IDENTITY, entry), data)
        manifest = manifest.with_added(entry)
    put_manifest(store, manifest)
    return store


def identities(store: MemoryStore) -> list[str]:
    verified = Verified()
    verify_store(store, NOW_US, verified)
    return [one.where for one in verified.findings if one.kind is FindingKind.IDENTITY]


def test_verify_names_a_stranger_among_the_objects(tmp_path: Path) -> None:
    store = stored([OURS, OURS], tmp_path / "a")
    store.put(metadata_key(1), machine().snapshot())
    assert identities(store) == []
    mixed = stored([OURS, THEIRS], tmp_path / "b")
    (where,) = identities(mixed)
    assert f"{2:020d}-{4:020d}" in where
    strangers = stored([THEIRS, THEIRS], tmp_path / "c")
    assert identities(strangers) == []
    strangers.put(metadata_key(1), machine().snapshot())
    assert len(identities(strangers)) == 2
    strangers.put(metadata_key(2), b"not a snapshot")
    assert identities(strangers) == []


def test_an_object_of_another_log_is_not_read(tmp_path: Path) -> None:
    data = (filled(tmp_path, THEIRS, b"b") / file_name(0)).read_bytes()
    entry = entry_for(data)
    for log_id in (THEIRS, NO_LOG, OURS):
        path = tmp_path / f"cached-{log_id.hex()}"
        path.write_bytes(data)
        segment = ColdSegment(path, IDENTITY, entry, "key")
        segment.log_id = log_id
        if log_id == OURS:
            with pytest.raises(StoreDamaged, match="another broker"):
                segment.take(0, entry.size_bytes)
        else:
            segment.take(0, entry.size_bytes)
