"""A partition at its owner: publishing, its refusals, a full disk, duplicates, levels and deletion."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from danube.broker.partition.hosted import HostedPartition
from danube.core.batch.format import Flag
from danube.core.dispatch.cursor import CursorState
from danube.core.dispatch.grants import Mode
from danube.core.partition.policy import Durability
from danube.core.protocol import native as wire
from danube.core.protocol.native import FrameFlag, Kind
from danube.errors import (
    InvalidArgument,
    OwnerMoved,
    ProtocolError,
    RecordTooLarge,
    SequenceConflict,
    StorageFailed,
    StorageFull,
    TopicNotFound,
)
from danube.limits import HANDLES_PER_CONNECTION_MAX
from tests.unit.broker_parts import TOPIC, Bench, RecordingSession, batch, expected, numbered
from tests.unit.failing_files import FailingFiles


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.shard.close()


@pytest.fixture
def session() -> RecordingSession:
    return RecordingSession()


def published(session: RecordingSession) -> list[tuple[int, int]]:
    """``(correlation, base offset)`` of what was acknowledged; nothing else may have come."""
    frames = session.take()
    assert all(frame.kind == Kind.PUBLISHED for frame in frames), frames
    return [(frame.correlation, wire.decode_published(frame.body).base_offset) for frame in frames]


# -- handles --------------------------------------------------------------------------------------


def test_every_frame_for_an_unknown_handle_is_answered_with_owner_moved(
    bench: Bench, session: RecordingSession
) -> None:
    correlation = bench.publish(session, numbered(1), handle=9)
    frame = session.only(Kind.ERROR)
    assert isinstance(frame.error, OwnerMoved) and frame.correlation == correlation
    bench.ack(session, 0, 1, handle=9)
    frame = session.only(Kind.ERROR)
    assert isinstance(frame.error, OwnerMoved) and (frame.correlation, frame.handle) == (0, 9)
    bench.frame(session, wire.credit_frame(9, 1, 1))
    assert isinstance(session.only(Kind.ERROR).error, OwnerMoved)
    bench.nack(session, 0, 1, handle=9)
    assert isinstance(session.only(Kind.ERROR).error, OwnerMoved)
    for kind in (Kind.CLOSE_PRODUCER, Kind.CLOSE_CONSUMER):
        bench.ask(session, kind, handle=9)
        assert session.only(Kind.RESULT)


def test_a_closed_handle_is_unknown_and_can_be_opened_again(bench: Bench, session: RecordingSession) -> None:
    bench.open_producer(session)
    bench.ask(session, Kind.CLOSE_PRODUCER, handle=1)
    session.only(Kind.RESULT)
    assert not bench.hosted.producers
    bench.publish(session, numbered(1))
    assert isinstance(session.only(Kind.ERROR).error, OwnerMoved)
    bench.open_producer(session)
    correlation = bench.publish(session, numbered(1))
    bench.turn()
    assert published(session) == [(correlation, 0)]


def test_a_handle_serves_one_thing_and_zero_none(bench: Bench, session: RecordingSession) -> None:
    bench.open_producer(session)
    for kind, body, handle in (
        (Kind.OPEN_PRODUCER, wire.OpenProducer(TOPIC, "q"), 1),
        (Kind.SUBSCRIBE, wire.Subscribe(TOPIC, "s", "c"), 1),
        (Kind.OPEN_PRODUCER, wire.OpenProducer(TOPIC, "q"), 0),
    ):
        bench.ask(session, kind, body, handle)
        assert isinstance(session.only(Kind.ERROR).error, InvalidArgument)
    assert list(session.producers) == [1] and not session.consumers and not bench.hosted.subscriptions


def test_a_connection_holds_a_bounded_number_of_handles(bench: Bench, session: RecordingSession) -> None:
    bench.open_producer(session)
    link = session.producers[1]
    session.producers.update(dict.fromkeys(range(2, HANDLES_PER_CONNECTION_MAX + 1), link))
    bench.ask(session, Kind.OPEN_PRODUCER, wire.OpenProducer(TOPIC, "q"), HANDLES_PER_CONNECTION_MAX + 7)
    assert isinstance(session.only(Kind.ERROR).error, InvalidArgument)


def test_a_draining_owner_opens_nothing_and_still_stores(bench: Bench, session: RecordingSession) -> None:
    bench.open_producer(session)
    bench.shard.draining = True
    bench.ask(session, Kind.OPEN_PRODUCER, wire.OpenProducer(TOPIC, "q"), 5)
    assert isinstance(session.only(Kind.ERROR).error, OwnerMoved)
    correlation = bench.publish(session, numbered(2))
    bench.turn()
    assert published(session) == [(correlation, 0)]


def test_frames_that_are_not_for_an_owner_are_refused(bench: Bench, session: RecordingSession) -> None:
    bench.ask(session, Kind.LOOKUP, wire.Lookup(TOPIC))
    assert isinstance(session.only(Kind.ERROR).error, ProtocolError)
    bench.frame(session, wire.frame_header(Kind.ACK, 8, 0, 2) + bytes(8))
    assert isinstance(session.only(Kind.ERROR).error, ProtocolError)
    bench.frame(session, wire.frame_header(Kind.SUBSCRIBE, 8, 3, 2) + b"\xff" * 8)
    assert isinstance(session.only(Kind.ERROR).error, ProtocolError)


# -- batches that are refused ---------------------------------------------------------------------


def _damaged() -> bytes:
    raw = bytearray(numbered(3))
    raw[-9] ^= 1
    return bytes(raw)


def _selected() -> bytes:
    from danube.broker.partition.chunks import Chunk

    raw = numbered(4)
    part = Chunk(raw, 0, 4).cut(1, 3)[0]
    return bytes(part)


@pytest.mark.parametrize(
    "raw, error",
    [
        (_damaged(), ProtocolError),
        (numbered(1) + numbered(1), ProtocolError),
        (numbered(1)[:64], ProtocolError),
        (b"", ProtocolError),
        (numbered(1, producer_id=77, base_sequence=0), InvalidArgument),
        (batch(b"x" * (1 << 20) + b"y"), RecordTooLarge),
        (_selected(), ProtocolError),
    ],
    ids=[
        "damaged",
        "two batches",
        "half a batch",
        "nothing",
        "another producer",
        "large record",
        "selection",
    ],
)
def test_a_refused_batch_leaves_no_trace(
    bench: Bench, session: RecordingSession, raw: bytes, error: type[Exception]
) -> None:
    bench.open_producer(session)
    correlation = bench.publish(session, raw)
    frame = session.only(Kind.ERROR)
    assert type(frame.error) is error and frame.correlation == correlation
    assert bench.hosted.core.log_end == 0 and not bench.hosted.waiting
    good = bench.publish(session, numbered(1))
    bench.turn()
    assert published(session) == [(good, 0)]
    assert bench.stored() == expected(0, 1)


def test_the_selection_flag_is_what_was_refused() -> None:
    from danube.core.batch.format import read_header

    assert read_header(_selected()).flags & Flag.SELECTED


# -- answers --------------------------------------------------------------------------------------


def test_one_turn_is_one_write_and_answers_in_order(
    bench: Bench, session: RecordingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.open_producer(session)
    disk = FailingFiles(monkeypatch)
    correlations = [bench.publish(session, numbered(2, number * 2)) for number in range(5)]
    assert session.take() == []
    bench.turn()
    assert [name for name, _ in disk.calls].count("pwritev") <= 2, "the header of the first segment, and all"
    assert published(session) == [(each, number * 2) for number, each in enumerate(correlations)]
    assert bench.stored() == expected(0, 10)


def test_fsync_is_answered_after_the_sync_alone(tmp_path: Path, session: RecordingSession) -> None:
    bench = Bench(tmp_path, durability="fsync")
    bench.open_producer(session)
    first = bench.publish(session, numbered(1))
    bench.turn()
    second = bench.publish(session, numbered(1, 1))
    bench.turn()
    assert session.take() == [] and bench.hosted.high_watermark == 0
    assert bench.syncer.step() == 1
    assert published(session) == [(first, 0)], "the second was written after that sync began"
    assert bench.syncer.step() == 1, "what came meanwhile is synced without being asked again"
    assert published(session) == [(second, 1)]
    assert bench.syncer.jobs == []
    bench.shard.close()


def test_a_duplicate_is_answered_at_its_level_only(tmp_path: Path, session: RecordingSession) -> None:
    bench = Bench(tmp_path, durability="fsync")
    opened = bench.open_producer(session)
    fields = {"producer_id": opened.producer_id, "producer_epoch": opened.epoch}
    raw = numbered(2, base_sequence=0, **fields)
    first = bench.publish(session, raw)
    bench.turn()
    again = bench.publish(session, raw)
    bench.turn()
    assert session.take() == [], "neither is on the disk yet"
    bench.syncer.step()
    frames = session.take()
    assert [(frame.correlation, frame.flags) for frame in frames] == [
        (first, 0),
        (again, FrameFlag.DUPLICATE),
    ]
    assert [wire.decode_published(frame.body).base_offset for frame in frames] == [0, 0]
    late = bench.publish(session, raw)
    frame = session.only(Kind.PUBLISHED)
    assert (frame.correlation, frame.flags) == (late, FrameFlag.DUPLICATE)
    bench.publish(session, numbered(2, 5, base_sequence=0, **fields))
    assert isinstance(session.only(Kind.ERROR).error, SequenceConflict)
    assert bench.counters["duplicates"] == 2 and bench.hosted.core.log_end == 2
    bench.shard.close()


def test_raising_the_level_holds_what_comes_and_lowering_it_answers_what_waits(
    bench: Bench, session: RecordingSession
) -> None:
    bench.open_producer(session)
    first = bench.publish(session, numbered(1))
    bench.turn()
    assert published(session) == [(first, 0)]

    def follow(durability: str) -> None:
        record = bench.record
        policy = msgspec.structs.replace(record.policy, durability=durability)
        bench.shard.update_policy(msgspec.structs.replace(record, policy=policy))

    follow("fsync")
    assert bench.hosted.high_watermark == 1, "what was shown stays shown"
    second = bench.publish(session, numbered(1, 1))
    bench.turn()
    assert session.take() == [] and bench.hosted.high_watermark == 1
    follow("written")
    frame = session.only(Kind.PUBLISHED)
    assert frame.correlation == second and bench.hosted.high_watermark == 2


def raise_level(bench: Bench, durability: str = "fsync") -> None:
    policy = msgspec.structs.replace(bench.record.policy, durability=durability)
    bench.shard.update_policy(msgspec.structs.replace(bench.record, policy=policy))


def test_a_duplicate_of_before_the_level_was_raised_waits_for_the_sync(
    bench: Bench, session: RecordingSession
) -> None:
    opened = bench.open_producer(session)
    fields = {"producer_id": opened.producer_id, "producer_epoch": opened.epoch}
    raw = numbered(2, base_sequence=0, **fields)
    bench.publish(session, raw)
    bench.turn()
    assert wire.decode_published(session.only(Kind.PUBLISHED).body).level == Durability.WRITTEN
    raise_level(bench)
    again = bench.publish(session, raw)
    bench.turn()
    assert session.take() == [], "it is not on the disk"
    bench.syncer.step()
    frame = session.only(Kind.PUBLISHED)
    assert (frame.correlation, frame.flags) == (again, FrameFlag.DUPLICATE)
    assert wire.decode_published(frame.body).level == Durability.FSYNC
    assert bench.hosted.core.synced_end == 2


def test_what_was_not_shown_before_the_level_was_raised_is_shown_when_it_is_synced(
    bench: Bench, session: RecordingSession
) -> None:
    bench.open_producer(session)
    bench.subscribe(session, start="earliest", credit_records=3)
    bench.publish(session, numbered(5))
    bench.turn()
    assert session.records() == expected(0, 3)
    raise_level(bench)
    bench.frame(session, wire.credit_frame(2, 10, 0))
    bench.nack(session, 0, 1)
    for _ in range(3):
        bench.turn()
    assert session.records() == [], "neither a new record nor one again"
    bench.syncer.step()
    for _ in range(3):
        bench.turn()
    assert session.records() == expected(3, 5)
    raise_level(bench, "written")
    bench.publish(session, numbered(1, 5))
    bench.turn()
    assert session.records() == expected(5, 6)


def test_a_failed_sync_fails_a_duplicate_that_waits_for_the_raised_level(
    bench: Bench, session: RecordingSession
) -> None:
    """And the log is opened anew with the records that were acknowledged at the former level."""
    opened = bench.open_producer(session)
    fields = {"producer_id": opened.producer_id, "producer_epoch": opened.epoch}
    raw = numbered(2, base_sequence=0, **fields)
    bench.publish(session, raw)
    bench.turn()
    session.take()
    raise_level(bench)
    again = bench.publish(session, raw)
    bench.syncer.step(OSError(errno.EIO, "input/output error"))
    frame = session.only(Kind.ERROR)
    assert frame.correlation == again and isinstance(frame.error, StorageFailed)
    bench.run_later()
    assert bench.hosted.failure is None and bench.hosted.core.log_end == 2
    assert bench.stored() == expected(0, 2)
    late = bench.publish(session, raw)
    frame = session.only(Kind.PUBLISHED)
    assert (frame.correlation, frame.flags) == (late, FrameFlag.DUPLICATE)


# -- a full disk ----------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["written", "fsync"])
def test_a_full_disk_answers_everything_and_the_resend_is_stored_once(
    tmp_path: Path, session: RecordingSession, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    bench = Bench(tmp_path, durability=durability)
    opened = bench.open_producer(session)
    fields = {"producer_id": opened.producer_id, "producer_epoch": opened.epoch}
    raws = [numbered(2, number * 2, base_sequence=number * 2, **fields) for number in range(4)]
    bench.publish(session, raws[0])
    bench.turn()
    bench.syncer.step()
    assert len(published(session)) == 1

    disk = FailingFiles(monkeypatch)
    disk.arm(0, errno.ENOSPC, lasting=True)
    sent = [bench.publish(session, raw) for raw in raws[1:]]
    bench.turn()
    frames = session.take()
    assert [frame.correlation for frame in frames] == sent
    assert all(isinstance(frame.error, StorageFull) for frame in frames)
    hosted = bench.hosted
    assert (hosted.core.log_end, hosted.high_watermark, hosted.failure) == (2, 2, None)
    assert not hosted.waiting and bench.later == [], "a full disk is not a broken one"

    disk.disarm()
    again = [bench.publish(session, raw) for raw in raws[1:]]
    bench.turn()
    bench.syncer.step()
    assert published(session) == [(each, 2 * number + 2) for number, each in enumerate(again)]
    assert bench.stored() == expected(0, 8)
    bench.shard.close()


def test_consumers_never_see_what_a_full_disk_refused(
    bench: Bench, session: RecordingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.open_producer(session)
    bench.subscribe(session)
    bench.publish(session, numbered(1))
    bench.turn()
    bench.publish(session, numbered(1, 1))  # the reader follows the end: batches are kept hot
    bench.turn()
    assert session.records() == expected(0, 2)
    disk = FailingFiles(monkeypatch)
    disk.arm(0, errno.ENOSPC, lasting=True)
    bench.publish(session, batch(b"refused"))
    bench.turn()
    assert [frame.kind for frame in session.take()] == [Kind.ERROR]
    disk.disarm()
    bench.publish(session, numbered(1, 2))
    bench.turn()
    assert session.records() == expected(2, 3)


# -- opening and deleting -------------------------------------------------------------------------


def test_requests_share_one_opening_and_each_is_answered(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.executor.held = True
    sessions = [RecordingSession(number) for number in range(3)]
    for number, session in enumerate(sessions):
        bench.ask(session, Kind.OPEN_PRODUCER, wire.OpenProducer(TOPIC, f"p{number}"), 1)
    bench.shard.drop_session(sessions[2])
    assert len(bench.executor.waiting) == 1
    bench.executor.step()
    assert [len(session.take(Kind.PRODUCER_OPENED)) for session in sessions] == [1, 1, 0]
    assert len(bench.hosted.producers) == 2 and not sessions[2].producers
    bench.shard.close()


def test_a_topic_deleted_while_it_opens_is_not_served(tmp_path: Path, session: RecordingSession) -> None:
    bench = Bench(tmp_path)
    bench.executor.held = True
    bench.ask(session, Kind.OPEN_PRODUCER, wire.OpenProducer(TOPIC, "p"), 1)
    deleted = bench.topics.pop(TOPIC)
    bench.shard.delete_topic(deleted)
    bench.executor.step()
    assert isinstance(session.only(Kind.ERROR).error, TopicNotFound)
    assert not bench.shard.partitions and not session.producers
    bench.executor.step()
    assert list(tmp_path.iterdir()) == [], "its files are gone too"
    assert bench.counters["partitions_open"] == 0


def test_a_name_made_again_while_the_old_topic_opens_is_the_new_topic(
    tmp_path: Path, session: RecordingSession
) -> None:
    bench = Bench(tmp_path)
    bench.executor.held = True
    bench.ask(session, Kind.OPEN_PRODUCER, wire.OpenProducer(TOPIC, "p"), 1)
    bench.add_topic(TOPIC, 99)
    bench.executor.step()
    assert isinstance(session.only(Kind.ERROR).error, TopicNotFound)
    bench.executor.held = False
    bench.executor.step()
    bench.open_producer(session)
    assert bench.hosted.topic_id == 99
    bench.shard.close()


def test_a_policy_changed_while_the_topic_opens_is_the_one_in_force(
    tmp_path: Path, session: RecordingSession
) -> None:
    bench = Bench(tmp_path)
    bench.executor.held = True
    bench.ask(session, Kind.OPEN_PRODUCER, wire.OpenProducer(TOPIC, "p"), 1)
    policy = msgspec.structs.replace(bench.record.policy, durability="fsync")
    changed = bench.topics[TOPIC] = msgspec.structs.replace(bench.record, policy=policy)
    bench.shard.update_policy(changed)
    bench.executor.step()
    opened = wire.decode_control(session.only(Kind.PRODUCER_OPENED).body, wire.ProducerOpened)
    assert opened.durability == "fsync"
    bench.publish(session, numbered(1))
    bench.turn()
    assert session.take() == [], "it is answered when it is synced, not before"
    bench.syncer.step()
    assert len(published(session)) == 1
    bench.shard.close()


def test_deleting_a_topic_tells_every_handle_and_every_publish(tmp_path: Path) -> None:
    bench = Bench(tmp_path, durability="fsync")
    producer, consumer = RecordingSession(1), RecordingSession(2)
    bench.open_producer(producer)
    bench.subscribe(consumer)
    correlation = bench.publish(producer, numbered(1))
    bench.turn()
    hosted = bench.hosted
    bench.shard.delete_topic(bench.topics.pop(TOPIC))
    frames = producer.take()
    assert [(frame.correlation, frame.handle) for frame in frames] == [(correlation, 1), (0, 1)]
    assert all(isinstance(frame.error, TopicNotFound) for frame in frames)
    frame = consumer.only(Kind.ERROR)
    assert (frame.correlation, frame.handle) == (0, 2) and isinstance(frame.error, TopicNotFound)
    assert not producer.producers and not consumer.consumers
    bench.syncer.step()  # the sync that was under way comes back to a topic that is gone
    bench.turn()
    bench.shard.tick()
    bench.shard.store_cursors()
    bench.shard.storage.sync_cursors()
    assert producer.take() == [] and hosted.deleted and list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_open_a_partition_is_told(
    tmp_path: Path, session: RecordingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    (tmp_path / f"{bench.record.topic_id:016x}-0").write_text("a file is where the directory belongs")
    bench.ask(session, Kind.OPEN_PRODUCER, wire.OpenProducer(TOPIC, "p"), 1)
    assert isinstance(session.only(Kind.ERROR).error, StorageFailed)
    assert not bench.shard.partitions and bench.counters["storage_errors"] == 1
    (tmp_path / f"{bench.record.topic_id:016x}-0").unlink()
    bench.open_producer(session)
    bench.shard.close()


def test_a_lost_connection_frees_its_handles_and_gives_back_its_records(
    bench: Bench, session: RecordingSession
) -> None:
    bench.open_producer(session)
    other = RecordingSession(2)
    bench.subscribe(session, consumer="first")
    bench.publish(session, numbered(3))
    bench.turn()
    assert session.records() == expected(0, 3)
    bench.subscribe(other, consumer="second")
    bench.shard.drop_session(session)
    bench.turn()
    assert other.records() == expected(0, 3)
    assert not bench.hosted.producers and not session.consumers and session.closed


def test_what_was_stored_is_there_after_closing_and_opening_again(
    tmp_path: Path, session: RecordingSession
) -> None:
    first = Bench(tmp_path)
    first.open_producer(session)
    first.subscribe(session, consumer="c")
    first.publish(session, numbered(4))
    first.turn()
    assert session.records() == expected(0, 4)
    first.ack(session, 0, 2)
    first.shard.close()
    second = Bench(tmp_path)
    later = RecordingSession(2)
    view: Any = second.subscribe(later, consumer="c")
    assert (view.ack_floor, view.high_watermark) == (2, 4)
    second.turn()
    assert later.records() == expected(2, 4)
    second.shard.close()


# -- cursors at the opening -----------------------------------------------------------------------


def test_an_undecodable_cursor_falls_back_is_told_and_harms_nobody_else(
    tmp_path: Path, session: RecordingSession, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path)
    bench.open_producer(session)
    bench.publish(session, numbered(20))
    bench.turn()
    session.take()
    for handle, name in ((2, "fine"), (3, "bad"), (4, "new")):
        bench.subscribe(session, handle, name, start="earliest")
    bench.turn()
    session.take()
    bench.ack(session, 0, 5, handle=3)
    bench.shard.store_cursors()
    bench.ack(session, 0, 9, handle=2)
    bench.shard.store_cursors()
    cursors = bench.hosted.cursors
    assert cursors is not None
    cursors.store("bad", b"nonsense")
    cursors.write()
    bench.shard.close()

    again = Bench(tmp_path)
    again.shard._epoch = 256 * 9
    assert {name: host.core.ack_floor for name, host in opened(again).subscriptions.items()} == {
        "fine": 9, "bad": 5, "new": 0,
    }  # fmt: skip
    (line,) = [record for record in caplog.records if "stored cursor is damaged" in record.getMessage()]
    assert "'bad'" in str(vars(line)) and TOPIC in str(vars(line))
    assert again.counters["damaged_records"] == 1
    later = RecordingSession(2)
    again.open_producer(later)
    again.publish(later, numbered(1, start=20))
    again.turn()
    assert published(later) == [(again.correlation, 20)]
    again.shard.close()


@pytest.mark.parametrize("acked", [[(0, 30)], [(0, 5), (7, 9), (15, 30)], [(25, 30)]])
def test_a_cursor_ahead_of_its_log_goes_back_to_the_end_and_passes_nothing_new(
    tmp_path: Path, session: RecordingSession, caplog: pytest.LogCaptureFixture, acked: list[tuple[int, int]]
) -> None:
    """A power cut took the last records of a topic, and not the cursor that had passed them."""
    bench = Bench(tmp_path)
    bench.open_producer(session)
    bench.publish(session, numbered(20))
    bench.turn()
    bench.subscribe(session, name="s", start="earliest")
    cursors = bench.hosted.cursors
    assert cursors is not None
    floor = acked[0][1] if acked[0][0] == 0 else 0
    ranges = np.array([span for span in acked if span[0]], np.int64).reshape(-1, 2)
    cursors.store("s", CursorState(Mode.SHARED, floor, ranges).encode())
    cursors.write()
    bench.shard.partitions.clear()  # no orderly stop

    again = Bench(tmp_path)
    again.shard._epoch = 256 * 9
    core = opened(again).subscriptions["s"].core
    assert core.next == core.ack_floor == (20 if acked == [(0, 30)] else 5 if floor else 0)
    (line,) = [record for record in caplog.records if "cursor was ahead of the log" in record.getMessage()]
    assert "'s'" in str(vars(line))
    later = RecordingSession(2)
    again.open_producer(later)
    again.subscribe(later, name="s", mode="shared")
    again.publish(later, numbered(20, start=20))
    end = again.hosted.core.log_end
    for _ in range(5):
        again.turn()
    passed = {offset for start, stop in acked for offset in range(start, min(stop, 20))}
    assert later.records() == [(o, b"%d" % o) for o in range(end) if o not in passed]
    again.shard.close()


def opened(bench: Bench) -> HostedPartition:
    outcomes: list[Any] = []
    bench.shard.open(TOPIC, outcomes.append)
    return bench.hosted
