"""When the sync mark follows a sync: at once where it was acknowledged, else soon, and never as a burst."""

from __future__ import annotations

from pathlib import Path

import pytest

from danube.broker.shard import storage
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.wal.log.log import Log
from danube.wal.recovery.mark import read_mark
from tests.unit.broker_parts import TOPIC, Bench, RecordingSession, numbered
from tests.unit.wal_samples import IDENTITY, append, open_log, sync


@pytest.fixture
def session() -> RecordingSession:
    return RecordingSession()


def marked_end(log: Log) -> int:
    """What recovery would find in the mark's file now."""
    mark = read_mark(log.directory, log.identity).mark
    return 0 if mark is None else mark.synced_end


def log_of(bench: Bench, topic: str = TOPIC) -> Log:
    log = bench.shard.partitions[topic].log
    assert log is not None
    return log


def synced_but_not_marked(directory: Path) -> Log:
    log = open_log(directory)
    append(log, b"a")
    log.write()
    job = log.sync_job()
    assert job is not None
    job.run(set())
    log.synced(job)
    return log


def test_a_sync_that_answers_wait_for_is_marked_before_them(
    tmp_path: Path, session: RecordingSession
) -> None:
    bench = Bench(tmp_path, durability="fsync")
    bench.open_producer(session)
    bench.publish(session, numbered(3, 0))
    bench.turn()
    assert not session.take() and marked_end(log_of(bench)) == 0
    bench.syncer.step()
    session.only(Kind.PUBLISHED)
    assert marked_end(log_of(bench)) == 3
    bench.shard.close()


def test_a_background_sync_is_marked_with_the_next_interval(
    tmp_path: Path, session: RecordingSession
) -> None:
    bench = Bench(tmp_path)
    bench.open_producer(session)
    bench.publish(session, numbered(3, 0))
    bench.turn()
    bench.shard.storage.sync_written()
    bench.syncer.step()
    log = log_of(bench)
    assert log.synced_end == 3 and marked_end(log) == 0
    bench.shard.storage.sync_written()
    assert marked_end(log) == 3
    bench.shard.close()


def test_the_marks_of_many_logs_are_written_some_at_a_time_in_the_order_of_their_syncs(
    tmp_path: Path, session: RecordingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "MARKS_AT_ONCE", 1)
    monkeypatch.setattr(storage, "MARKS_CALLS", 4)
    bench = Bench(tmp_path)
    topics = [f"/default/marked-{number}" for number in range(8)]
    for handle, topic in enumerate(topics, 1):
        bench.add_topic(topic)
        bench.ask(session, Kind.OPEN_PRODUCER, wire.OpenProducer(topic, "p"), handle)
        bench.publish(session, numbered(1, 0), handle)
    bench.turn()
    bench.shard.storage.sync_written()
    bench.syncer.step()
    logs = [log_of(bench, topic) for topic in topics]
    counts = []
    for _ in range(6):
        bench.shard.storage.sync_written()
        marked = [marked_end(log) for log in logs]
        assert marked == sorted(marked, reverse=True), "the longest first"
        counts.append(sum(marked))
    assert counts == [3, 5, 6, 7, 8, 8]
    bench.shard.close()


def test_a_log_that_is_closed_marks_all_of_it(tmp_path: Path, session: RecordingSession) -> None:
    bench = Bench(tmp_path)
    bench.open_producer(session)
    bench.publish(session, numbered(3, 0))
    bench.turn()
    log = log_of(bench)
    bench.shard.close()
    assert marked_end(log) == 3
    again = Log.open(log.directory, log.identity, 1000)
    assert again.log_end == 3 and again.recovery.scanned_bytes == 0
    again.close()


def test_a_log_that_was_sealed_before_it_closes_is_marked_as_well(tmp_path: Path) -> None:
    log = synced_but_not_marked(tmp_path)
    seal = log.roll()
    assert seal is not None
    seal.run(set())
    log.sealed(seal)
    assert read_mark(tmp_path, IDENTITY).mark is None
    log.close()
    assert marked_end(log) == 1


def test_a_log_that_was_taken_over_leaves_the_newer_owner_s_mark_alone(tmp_path: Path) -> None:
    log = synced_but_not_marked(tmp_path)
    log.abandon()
    newer = open_log(tmp_path, epoch=2)
    append(newer, b"b")
    newer.write()
    sync(newer)
    found = read_mark(tmp_path, IDENTITY).mark
    log.store_mark()
    assert read_mark(tmp_path, IDENTITY).mark == found and found is not None and found.synced_end == 2
    newer.close()
