"""A data directory from a store: everything that was uploaded, nothing invented, nothing overwritten."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from danube.broker.partition.opening import ahead_of
from danube.broker.processes import directories
from danube.broker.processes.data_dir import DataDir
from danube.broker.tiers import restore
from danube.broker.tiers.restore import finish_restore, restore_from, restore_if_empty
from danube.cli.main import root as cli
from danube.cli.terminal.services import Services
from danube.cluster.log.local_log import LocalLog
from danube.core.dispatch.cursor import CursorState
from danube.core.dispatch.grants import Mode
from danube.core.metadata.commands import CreateTopic
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import TopicPolicy
from danube.core.placement.recovered import IDS_AHEAD, INCARNATIONS_AHEAD, OFFSETS_AHEAD, recovery_of
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import AlreadyRunning, ObjectMissing, StorageFailed, StoreDamaged, WrongState
from danube.host import files
from danube.wal.tier.binding import bound_store, ensure_bound
from danube.wal.tier.keys import cursors_key, manifest_key, metadata_key, segment_key
from tests.fakes.memory_store import MemoryStore
from tests.unit.broker_parts import TOPIC, RecordingSession, expected, numbered
from tests.unit.tier_parts import TieredBench


def metadata_with(*topics: str) -> Metadata:
    machine = Metadata()
    for topic in topics:
        command = CreateTopic(topic=topic, partitions=0, policy=TopicPolicy(), created_us=0)
        machine.apply(machine.version + 1, command)
    return machine


class Source:
    """A broker whose topic is uploaded, with copies of its metadata and cursors."""

    def __init__(self, root: Path) -> None:
        self.bench = bench = TieredBench(root / "source")
        self.session = session = RecordingSession()
        bench.open_producer(session)
        for number in range(3):
            bench.publish(session, numbered(20, start=20 * number))
            bench.seal()
        bench.publish(session, numbered(7, start=60))  # never uploaded: lost with the disk
        bench.turn()
        session.take()
        bench.subscribe(session, start="earliest")
        for _ in range(10):
            bench.turn()
        session.take()
        bench.ack(session, 0, 63)  # beyond what was uploaded
        bench.shard.store_cursors()
        bench.subscribe(session, handle=3, name="low", start="earliest")
        for _ in range(10):
            bench.turn()
        session.take()
        bench.ack(session, 0, 11, handle=3)
        bench.ack(session, 13, 15, handle=3)
        bench.shard.store_cursors()
        self.store: MemoryStore = bench.mover.store
        ensure_bound(self.store, _made(root / "bound"))
        self.manifest = bench.mover.manifests[bench.tier.identity]
        self.identity = bench.tier.identity
        self.store.put(manifest_key(self.identity, self.manifest.epoch, 9), self.manifest.encode())
        assert bench.hosted.cursors is not None
        self.store.put(cursors_key(self.identity, self.manifest.epoch, 1), bench.hosted.cursors.copy())
        self.metadata = metadata_with(TOPIC, "/default/other")
        self.store.put(metadata_key(self.metadata.version), self.metadata.snapshot())


def _made(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path)


def reopened(source: Source, data_dir: Path) -> TieredBench:
    """A worker on a restored directory."""
    bench = TieredBench(data_dir)
    bench.mover.store = source.store
    bench.mover.manifests[source.identity] = source.manifest
    with LocalLog(data_dir / "metadata", create=False) as log:
        state = log.state.copy()
    bench.shard.ahead_of = lambda topic_id: ahead_of(state, topic_id)
    bench.shard._epoch = recovery_of(state).histories[-1].first_epoch
    bench.shard.open(TOPIC, lambda outcome: None)
    return bench


def test_everything_uploaded_comes_back_and_numbering_goes_on(source: Source, tmp_path: Path) -> None:
    target = tmp_path / "target"
    restored = restore_from(source.store, target)
    assert (restored.topics, restored.partitions, restored.objects) == (2, 2, 3)
    assert restored.subscriptions == 2 and restored.problems == []
    with LocalLog(target / "metadata", create=False) as log:
        assert {record.topic for record in log.state.topics(None)} == {"/default/other", TOPIC}
        assert log.state.next_topic_id > source.metadata.next_topic_id + IDS_AHEAD
    identity = bound_store(target)
    assert identity is not None and not (target / "restoring").exists()
    bench = reopened(source, target)
    assert bench.hosted.log is not None
    ahead = bench.hosted.log.start
    assert (bench.hosted.log.log_end, bench.hosted.start) == (ahead, 0)
    assert ahead > 67 + OFFSETS_AHEAD, "60 to 67 were given to records that are gone"
    session = RecordingSession()
    opened = bench.open_producer(session)
    assert opened.epoch >= 0
    bench.publish(session, numbered(5, start=60))
    bench.turn()
    session.take()
    bench.subscribe(session, name="new", start="earliest", handle=5)
    found = []
    for _ in range(30):
        bench.turn()
        new = session.records()
        found += new
        if new:
            bench.ack(session, new[0][0], new[-1][0] + 1, handle=5)
    assert [value for _, value in found] == [value for _, value in expected(0, 65)]
    assert [offset for offset, _ in found] == [*range(60), *range(ahead, ahead + 5)]
    assert bench.hosted.damaged == []


def test_cursors_come_back_and_none_is_beyond_the_records(source: Source, tmp_path: Path) -> None:
    restore_from(source.store, tmp_path / "target")
    bench = reopened(source, tmp_path / "target")
    assert bench.hosted.log is not None
    ahead = bench.hosted.log.log_end
    assert bench.hosted.subscriptions["s"].core.ack_floor == ahead, "nothing is left of 60 .. ahead"
    assert bench.hosted.lag_from(11) == 49
    low = bench.hosted.subscriptions["low"].core.cursor_state()
    assert low.ack_floor == 11 and low.acked.tolist() == [[13, 15]]


def test_producers_are_remembered_from_footers_and_from_headers(source: Source, tmp_path: Path) -> None:
    """Batches of an idempotent producer that were uploaded are duplicates also after a restore."""
    bench = source.bench
    opened = bench.open_producer(source.session, handle=8, name="sure")
    fields: dict[str, Any] = {"producer_id": opened.producer_id, "producer_epoch": opened.epoch}
    sent = numbered(3, start=900, base_sequence=opened.next_sequence, **fields)
    bench.publish(source.session, sent, handle=8)
    bench.seal()
    manifest = bench.mover.manifests[source.identity]
    source.manifest = manifest
    source.store.put(manifest_key(source.identity, manifest.epoch, 10), manifest.encode())
    restore_from(source.store, tmp_path / "target")
    again = reopened(source, tmp_path / "target")
    session = RecordingSession()
    request = wire.OpenProducer(TOPIC, "sure", opened.producer_id, opened.epoch)
    again.ask(session, Kind.OPEN_PRODUCER, request, 4)
    reply = wire.decode_control(session.only(Kind.PRODUCER_OPENED).body, wire.ProducerOpened)
    assert reply.next_sequence == opened.next_sequence + 3, "its connection goes on where it was"


def test_epochs_go_on_above_those_in_the_store(source: Source, tmp_path: Path) -> None:
    high = source.manifest.taken_over(5_000 * 256 + 3)
    source.store.put(manifest_key(source.identity, high.epoch, 1), high.encode())
    restore_from(source.store, tmp_path / "target")
    data = DataDir(tmp_path / "target")
    assert data.next_incarnations(1) == 5_001 + INCARNATIONS_AHEAD
    data.close()


def test_a_directory_that_holds_data_is_refused(source: Source, tmp_path: Path) -> None:
    target = tmp_path / "target"
    (target / "partitions" / "0000000000000001-0").mkdir(parents=True)
    with pytest.raises(WrongState):
        restore_from(source.store, target)
    assert restore_if_empty(source.store, target) is None
    other = tmp_path / "other"
    with LocalLog(other / "metadata"):
        pass
    with pytest.raises(WrongState):
        restore_from(source.store, other)


def littered(data_dir: Path) -> list[Path]:
    """What a disk of its own and a desktop leave in each directory that a start reads."""
    found = []
    for name in ("", "partitions", "metadata"):
        (data_dir / name / "lost+found").mkdir(parents=True)
        (data_dir / name / ".DS_Store").write_bytes(bytes(100))
        found += [data_dir / name / "lost+found", data_dir / name / ".DS_Store"]
    return found


@pytest.mark.parametrize("restores", [restore_from, restore_if_empty])
def test_strangers_are_no_data_and_stay(source: Source, tmp_path: Path, restores: Any) -> None:
    target = tmp_path / "target"
    strangers = littered(target)
    with LocalLog(tmp_path / "used" / "metadata"):  # an unused broker's lock stays, too
        shutil.copy(tmp_path / "used" / "metadata" / "metadata.lock", target / "metadata")
    assert not restore.holds_data(target)
    restored = restores(source.store, target)
    assert restored is not None and (restored.topics, restored.objects) == (2, 3)
    assert all(path.exists() for path in strangers) and not (target / "restoring").exists()
    assert set(directories.strangers(target)) == {path for path in strangers if path.parent != target}
    bench = reopened(source, target)
    assert bench.hosted.log is not None and bench.hosted.log.log_end > 60


@pytest.mark.parametrize("cut_at", [0, 1, 2])
def test_a_disk_of_its_own_below_partitions_is_filled(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_at: int
) -> None:
    """Names cannot be given across file systems: what is staged is copied, again after it was cut off."""
    target, real, moved = tmp_path / "target", files.rename, 0

    def rename(before: Path, after: Path) -> None:
        nonlocal moved
        if "restoring" in before.parts and "restoring" not in after.parts:
            moved += 1
            if moved == cut_at:
                raise OSError(errno.EIO, "cut off")
            raise OSError(errno.EXDEV, "another file system")
        real(before, after)

    monkeypatch.setattr(files, "rename", rename)
    if cut_at:
        with pytest.raises(StorageFailed):
            restore_from(source.store, target)
        half = next((target / "partitions").glob("*"), target / "partitions" / source.identity.directory_name)
        half.with_name(half.name + ".new").mkdir(parents=True, exist_ok=True)
    assert restore_if_empty(source.store, target) is None if cut_at else restore_from(source.store, target)
    bench = reopened(source, target)
    assert bench.hosted.log is not None and bench.hosted.log.log_end > 60
    assert not (target / "restoring").exists() and bound_store(target) is not None


def test_names_of_others_in_a_store_are_no_copies_of_metadata(source: Source, tmp_path: Path) -> None:
    for key in ("metadata/notes.txt", "metadata/1"):
        source.store.put(key, b"x")
    assert restore_from(source.store, tmp_path / "target").problems == []
    empty = MemoryStore()
    empty.put("partitions/readme.txt", b"")
    empty.put("metadata/readme.txt", b"")
    ensure_bound(empty, _made(tmp_path / "first"))
    assert restore_if_empty(empty, tmp_path / "other") is None
    assert bound_store(tmp_path / "first") is not None


def test_a_directory_in_use_is_refused(source: Source, tmp_path: Path) -> None:
    data = DataDir(tmp_path / "target")
    try:
        with pytest.raises(AlreadyRunning):
            restore_from(source.store, tmp_path / "target")
    finally:
        data.close()


def test_a_store_without_data_is_refused_or_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ObjectMissing):
        restore_from(MemoryStore(), tmp_path / "target")
    assert restore_if_empty(MemoryStore(), tmp_path / "target") is None
    store = MemoryStore()
    ensure_bound(store, _made(tmp_path / "bound"))
    assert restore_if_empty(store, tmp_path / "target") is None
    with pytest.raises(ObjectMissing):
        restore_from(store, tmp_path / "target")


@pytest.mark.parametrize("step", range(1, 12))
def test_a_restore_cut_off_anywhere_is_done_by_the_next(
    source: Source, tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    real, calls = files.fsync_directory, 0

    def fails(directory: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == step:
            raise OSError(5, "power cut")
        real(directory)

    DataDir(target).close()
    monkeypatch.setattr(files, "fsync_directory", fails)
    try:
        restore_from(source.store, target)
    except (StorageFailed, OSError):
        pass
    monkeypatch.setattr(files, "fsync_directory", real)
    assert restore_if_empty(source.store, target) is not None or (target / "metadata").is_dir()
    bench = reopened(source, target)
    assert bench.hosted.log is not None and bench.hosted.lag_from(0) == 60
    assert bound_store(target) is not None and not finish_restore(target)


def test_damaged_copies_fall_back_to_older_ones(source: Source, tmp_path: Path) -> None:
    source.store.put(metadata_key(99), b"not a snapshot")
    source.store.put(manifest_key(source.identity, 700, 1), b"not a manifest")
    source.store.put(cursors_key(source.identity, 700, 1), b"not cursors")
    restored = restore_from(source.store, tmp_path / "target", older_metadata=True)
    assert len(restored.problems) == 2 and restored.subscriptions == 2 and restored.objects == 3


def test_one_cursor_that_cannot_be_decoded_is_taken_from_an_older_copy_and_harms_no_other(
    source: Source, tmp_path: Path
) -> None:
    cursors = source.bench.hosted.cursors
    assert cursors is not None
    cursors.store("low", b"nonsense")
    cursors.store("alone", b"nonsense")
    cursors.store("s", CursorState.at(Mode.EXCLUSIVE, 44).encode())
    cursors.write()
    source.store.put(cursors_key(source.identity, source.manifest.epoch, 2), cursors.copy())
    restored = restore_from(source.store, tmp_path / "target")
    assert restored.subscriptions == 2
    bench = reopened(source, tmp_path / "target")
    assert {name: host.core.ack_floor for name, host in bench.hosted.subscriptions.items()} == {
        "s": 44, "low": 11,
    }  # fmt: skip


def test_an_older_copy_of_the_metadata_is_taken_only_when_told_so(source: Source, tmp_path: Path) -> None:
    """Topics that it does not know would be missing without a word."""
    target = tmp_path / "target"
    source.store.put(metadata_key(99), b"not a snapshot")
    for restoring in (restore_from, restore_if_empty):
        with pytest.raises(StoreDamaged) as refused:
            restoring(source.store, target)
        assert metadata_key(99) in refused.value.why and "--older-metadata" in refused.value.hint
        assert f"version {source.metadata.version} and 2 topics" in refused.value.why
        assert not restore.holds_data(target) and bound_store(target) is None
    restored = restore_from(source.store, target, older_metadata=True)
    assert restored.topics == 2 and len(restored.problems) == 1


def never(*_: Any, **__: Any) -> Any:
    pytest.fail("a restore asks no broker")


def test_the_command_leaves_with_12_where_something_is_missing(source: Source, tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    for one in source.store.list(""):
        (root / one.key).parent.mkdir(parents=True, exist_ok=True)
        (root / one.key).write_bytes(source.store.get(one.key))

    services = Services(
        connect=never, connect_async=never, environ={}, can_ask=lambda: False, shows_progress=lambda: False
    )

    def run(target: str, *flags: str) -> tuple[int, str]:
        line = ["storage", "restore", f"file://{root}", "--data-dir", str(tmp_path / target), *flags]
        found = CliRunner().invoke(cli, line, obj=services, prog_name="danube")
        return found.exit_code, found.output

    assert run("whole")[0] == 0
    (root / metadata_key(99)).write_bytes(b"not a snapshot")
    code, said = run("damaged")
    assert code == 12 and "--older-metadata" in said and not (tmp_path / "damaged" / "metadata").exists()
    code, said = run("older", "--older-metadata")
    assert code == 12 and "not everything came back" in said and metadata_key(99) in said
    assert (tmp_path / "older" / "metadata" / "metadata.log").exists()


def test_no_readable_metadata_is_an_error_and_nothing_is_left(source: Source, tmp_path: Path) -> None:
    for version in (source.metadata.version, 99):
        source.store.put(metadata_key(version), b"not a snapshot")
    with pytest.raises(StoreDamaged):
        restore_from(source.store, tmp_path / "target")
    assert not restore.holds_data(tmp_path / "target")


def test_lost_footers_and_cursors_are_told(source: Source, tmp_path: Path) -> None:
    for number in range(3):
        entry = source.manifest.entry(number)
        source.store.put(segment_key(source.identity, entry), bytes(entry.size_bytes))
    source.store.put(cursors_key(source.identity, source.manifest.epoch, 1), b"gone")
    restored = restore_from(source.store, tmp_path / "target")
    assert any("producers are forgotten" in problem for problem in restored.problems)
    assert any("cursors are lost" in problem for problem in restored.problems)


def test_ids_of_topics_newer_than_the_metadata_are_not_given_again(source: Source, tmp_path: Path) -> None:
    source.store.put("partitions/0000000000000031-0/manifest-0000000512-0000000001", b"x")
    source.store.put("partitions/0000000000000031-1/manifest-0000000512-0000000001", b"x")
    source.store.put("partitions/0000000000000033-0/manifest-0000000512-0000000001", b"x")
    restored = restore_from(source.store, tmp_path / "target")
    assert len(restored.problems) == 2
    with LocalLog(tmp_path / "target" / "metadata", create=False) as log:
        assert log.state.next_topic_id > 0x34 + IDS_AHEAD


def test_a_cursor_is_cut_where_the_records_end() -> None:
    state = CursorState(Mode.SHARED, 5, np.array([[7, 9], [10, 20]], np.int64))
    assert CursorState.decode(restore._clamped(state.encode(), 12)).acked.tolist() == [[7, 9], [10, 12]]
    assert CursorState.decode(restore._clamped(state.encode(), 8)).acked.tolist() == [[7, 8]]
    cut = CursorState.decode(restore._clamped(state.encode(), 3))
    assert cut.ack_floor == 3 and not len(cut.acked)
