"""Key compaction of local logs: what consumers get, and that a crash at any point loses nothing."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from danube.broker.shard import compactor
from danube.broker.shard.compactor import PAUSE_NS, Compactor
from danube.broker.worker.dead_letters import DeadLetters, _Target
from danube.broker.worker.worker import Worker
from danube.core.dispatch.grants import Mode
from danube.core.metadata.commands import TopicRecord
from danube.core.partition.compaction_plan import CompactionSettings
from danube.core.partition.policy import FailurePolicy, TopicPolicy
from danube.core.protocol import native as wire
from danube.core.protocol.native import FrameFlag, Kind
from danube.host import clock
from danube.wal.log.log import Log
from danube.wal.log.retention import UNNAMED_SUFFIX
from tests.log_oracle import verify
from tests.unit.broker_parts import TOPIC, Bench, RecordingSession, batch
from tests.unit.failing_files import FailingFiles, Killed
from tests.unit.merge_samples import stored_records
from tests.unit.tier_parts import TieredBench
from tests.unit.wal_samples import memory_directory

SETTINGS = CompactionSettings(dirty_bytes_min=0, lag_us=0, target_bytes=1 << 20)
Record = tuple[bytes | None, bytes]


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with memory_directory(tmp_path) as directory:
        yield directory


class CompactionBench(Bench):
    """A shard with one compacting topic and its compactor."""

    def __init__(self, root: Path, settings: CompactionSettings = SETTINGS, **policy: Any) -> None:
        super().__init__(root, **{"cleanup": "compact", "tombstone_retention_ms": 86_400_000, **policy})
        self.compactor = Compactor(
            self.shard.partitions.values, self.executor, lambda function, *args: function(*args),
            self.shard.storage.roll, settings,
        )  # fmt: skip
        self.producer = RecordingSession()
        self.open_producer(self.producer)
        self.published: list[Record] = []

    @property
    def log(self) -> Log:
        log = self.hosted.log
        assert log is not None
        return log

    @property
    def directory(self) -> Path:
        return self.log.directory

    def send(self, *records: Record, **fields: Any) -> None:
        """One batch, acknowledged."""
        keys = [key for key, _ in records]
        self.publish(self.producer, batch(*(payload for _, payload in records), keys=keys, **fields))
        self.turn()
        self.published += records

    def seal(self) -> None:
        """End the active segment; everything is on disk."""
        self.shard.storage.roll(self.hosted)
        self.sealer.step()
        self.shard.storage.sync_written()
        self.syncer.step()

    def fill(self, segments: int = 4, batches: int = 3, keys: int = 5) -> None:
        """Segments of batches of three records; the last one is active."""
        for segment in range(segments):
            for number in range(batches):
                start = (segment * batches + number) * 3
                self.send(*((b"k%d" % (n % keys), b"v%d" % n) for n in range(start, start + 3)))
            if segment < segments - 1:
                self.seal()

    def compact(self) -> None:
        self.compactor.look()
        assert not self.compactor.busy

    @property
    def compacted_end(self) -> int:
        return max((one.end_offset for one in self.log.front() if one.compacted), default=0)

    @property
    def expected(self) -> list[tuple[int, bytes]]:
        """What must be left: of what was compacted the latest of each key, and all that follows."""
        end = self.compacted_end
        latest = {key: offset for offset, (key, _) in enumerate(self.published[:end])}
        return [
            (offset, payload)
            for offset, (key, payload) in enumerate(self.published)
            if offset >= end or key is None or latest[key] == offset
        ]


def consumed(bench: CompactionBench, name: str, mode: Mode, **fields: Any) -> list[tuple[int, bytes]]:
    session = RecordingSession(connection_id=len(name) + 50)
    bench.subscribe(session, handle=9, name=name, mode=mode.label, start="earliest", **fields)
    bench.turn()
    found: list[tuple[int, bytes]] = []
    while records := session.records():
        found += records
        for offset, _ in records:
            bench.ack(session, offset, offset + 1, handle=9)
        bench.turn()
    return found


def statistics(bench: CompactionBench, name: str) -> dict[str, Any]:
    return bench.hosted.subscriptions[name].statistics(0)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_replay_gives_the_latest_record_of_each_key_at_its_offset(tmp_path: Path, mode: Mode) -> None:
    bench = CompactionBench(tmp_path)
    bench.send((None, b"no key"), (b"once", b"only"))
    bench.fill()
    before = bench.log.log_end
    bench.compact()
    assert len([one for one in bench.log.front() if one.compacted]) == 1
    assert 0 < bench.compacted_end < bench.log.front()[-1].end_offset, "the newest sealed one is left alone"
    expected = bench.expected
    assert len(expected) < len(bench.published) and (0, b"no key") in expected and (1, b"only") in expected
    assert sorted(consumed(bench, f"s-{mode.label}", mode)) == expected
    figures = statistics(bench, f"s-{mode.label}")
    assert figures["compacted"] == len(bench.published) - len(expected)
    assert figures["damaged"] == 0 and figures["lag"] == 0 and figures["state"] == "caught_up"
    assert bench.log.log_end == before and bench.counters["damaged_records"] == 0
    assert verify(bench.directory).sound
    bench.hosted.subscriptions[f"s-{mode.label}"].core.check()


def test_small_credit_and_filters_over_holes(tmp_path: Path) -> None:
    bench = CompactionBench(tmp_path)
    bench.fill(segments=6, keys=7)
    bench.compact()
    expected = bench.expected
    assert consumed(bench, "shared", Mode.SHARED) == expected
    session = RecordingSession(77)
    bench.subscribe(session, handle=9, name="slow", mode="key_shared", start="earliest", credit_records=1,
                    filters=["k1", "k2", "k3"])  # fmt: skip
    found = []
    for _ in range(100):
        bench.turn()
        for offset, payload in session.records():
            found.append((offset, payload))
            bench.ack(session, offset, offset + 1, handle=9)
            bench.frame(session, wire.credit_frame(9, 1, 0))
    chosen = [(o, p) for o, p in expected if bench.published[o][0] in (b"k1", b"k2", b"k3")]
    assert found == chosen


def test_what_was_in_flight_or_waits_is_settled_when_it_has_gone(tmp_path: Path) -> None:
    quick = FailurePolicy(base_redelivery_delay_ms=0, max_redelivery_count=9, ack_timeout_ms=60_000)
    bench = CompactionBench(tmp_path, failure=quick)
    bench.fill()
    session = RecordingSession(5)
    total = len(bench.published)
    bench.subscribe(session, start="earliest", credit_records=total)
    bench.turn()
    assert len(session.records()) == total
    bench.compact()
    expected = bench.expected
    bench.nack(session, 0, total)
    bench.turn()
    again = session.records()
    assert again == [], "no credit is left"
    bench.frame(session, wire.credit_frame(2, len(expected), 0))
    bench.turn()
    assert session.records() == expected, "what has gone gave its credit back"
    bench.ack(session, 0, total)
    figures = statistics(bench, "s")
    assert (figures["ack_floor"], figures["in_flight"]) == (total, 0)
    assert figures["compacted"] == total - len(expected) and figures["damaged"] == 0


def test_cursors_and_producers_go_on_after_a_restart(tmp_path: Path) -> None:
    bench = CompactionBench(tmp_path)
    numbering = RecordingSession(3)
    opened = bench.open_producer(numbering, name="numbered")
    fields: dict[str, Any] = {"producer_id": opened.producer_id, "producer_epoch": opened.epoch}
    fields |= {"producer_name": "numbered", "keys": [b"k"]}
    raws = [batch(b"v%d" % number, base_sequence=number, **fields) for number in range(6)]
    for number, raw in enumerate(raws):
        bench.publish(numbering, raw)
        bench.turn()
        bench.published.append((b"k", b"v%d" % number))
        bench.seal()
    session = RecordingSession(5)
    bench.subscribe(session, start="earliest")
    bench.turn()
    bench.ack(session, 0, 2)
    bench.compact()
    bench.shard.store_cursors()
    bench.shard.close()
    again = Bench(tmp_path, cleanup="compact")
    producer = RecordingSession()
    resumed = wire.OpenProducer(TOPIC, "numbered", opened.producer_id, opened.epoch)
    again.ask(producer, Kind.OPEN_PRODUCER, resumed, 1)
    producer.take()
    again.publish(producer, raws[1])
    again.turn()
    [answer] = producer.take()
    assert answer.kind == Kind.PUBLISHED and answer.flags == FrameFlag.DUPLICATE, answer.error
    assert again.hosted.core.log_end == 6, "what was removed is still known to its producer"
    assert again.hosted.subscriptions["s"].core.ack_floor == 2
    fresh = RecordingSession(6)
    again.subscribe(fresh)
    again.turn()
    assert fresh.records() == [(4, b"v4"), (5, b"v5")]


# -- crashes and refusals at every step -----------------------------------------------------------


def stored_now(log: Log) -> dict[int, Record]:
    found: dict[int, Record] = {}
    offset = log.start
    while offset < log.written_end:
        chunk = log.read(offset, log.written_end)
        assert chunk.damage == () and chunk.next_offset > offset
        found |= stored_records(chunk.data)
        offset = chunk.next_offset
    return found


def check_whole(found: dict[int, Record], published: list[Record]) -> None:
    """Nothing that was not published, and of every key, and without one, what compaction must leave."""
    assert all(published[offset] == record for offset, record in found.items())
    latest = {key: offset for offset, (key, _) in enumerate(published) if key is not None}
    assert set(latest.values()) <= set(found)
    assert {offset for offset, (key, _) in enumerate(published) if key is None} <= set(found)


def filled(root: Path) -> CompactionBench:
    settings = CompactionSettings(dirty_bytes_min=0, lag_us=0, target_bytes=1500, dirty_percent=1)
    bench = CompactionBench(root, settings)
    bench.send((None, b"no key"))
    bench.fill(segments=6)
    return bench


def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Calls that change the disk in one whole round."""
    bench = filled(tmp_path / "counted")
    with monkeypatch.context() as patch:
        faults = FailingFiles(patch)
        faults.arm(-1, 0)
        bench.compact()
        return len(faults.calls)


@pytest.mark.parametrize("kind", ["killed", "killed after"])
def test_a_crash_at_any_step_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    count = steps(tmp_path, monkeypatch)
    assert count > 20
    seen: set[int] = set()
    for at in range(count):
        bench = filled(tmp_path / f"{kind}-{at}")
        end = bench.log.log_end
        with monkeypatch.context() as patch:
            faults = FailingFiles(patch)
            faults.arm(at, kind, lasting=True)
            with pytest.raises(Killed):
                bench.compact()
            faults.disarm()
        names = [path.name for path in bench.directory.iterdir()]
        bench.log.abandon()
        log = Log.open(bench.directory, bench.log.identity, bench.log.epoch + 1, bench.log.options)
        assert log.recovery.damaged == () and log.log_end == end
        found = stored_now(log)
        check_whole(found, bench.published)
        seen.add(len(found))
        assert not [path for path in bench.directory.iterdir() if path.name.endswith((".new", ".aside"))]
        assert log.recovery.producer_snapshot is not None
        log.close(b"producers")
        assert verify(bench.directory).sound, (at, names)
    assert len(seen) > 2, "before, between and after the groups"


def test_a_disk_that_refuses_ends_the_round_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in range(steps(tmp_path, monkeypatch)):
        bench = filled(tmp_path / str(at))
        with monkeypatch.context() as patch:
            faults = FailingFiles(patch)
            faults.arm(at, errno.EIO)
            bench.compact()
            fired = faults.fired
            faults.disarm()
            check_whole(stored_now(bench.log), bench.published)
            bench.compact()  # it rests
        assert fired == 1
        now_ns = clock.monotonic_ns() + PAUSE_NS
        monkeypatch.setattr(clock, "monotonic_ns", lambda now_ns=now_ns: now_ns)
        bench.compact()
        monkeypatch.undo()
        assert stored_now(bench.log) == {o: bench.published[o] for o, _ in bench.expected}
        bench.send((b"k1", b"goes on"))
        bench.log.close(b"producers")
        log = Log.open(bench.directory, bench.log.identity, bench.log.epoch + 1, bench.log.options)
        check_whole(stored_now(log), bench.published)
        assert log.recovery.damaged == ()
        log.abandon()
        assert verify(bench.directory).sound


# -- what happens meanwhile -----------------------------------------------------------------------


def test_a_topic_that_changes_meanwhile_makes_it_waste(tmp_path: Path) -> None:
    def retained(bench: CompactionBench) -> None:
        bench.log.evict(bench.log.front()[0].end_offset)

    def deleted(bench: CompactionBench) -> None:
        bench.shard.delete_topic(bench.record)

    def kept(bench: CompactionBench) -> None:
        policy = TopicPolicy(cleanup="delete")
        bench.hosted.update(TopicRecord(TOPIC, bench.record.topic_id, 0, policy, 0))

    for number, change in enumerate((retained, deleted, kept)):
        for steps_before in (1, 2):
            bench = CompactionBench(tmp_path / f"{number}-{steps_before}")
            bench.fill(segments=4)
            log = bench.log
            bench.executor.held = True
            bench.compactor.look()
            assert bench.compactor.busy
            for _ in range(steps_before - 1):
                bench.executor.step()
            change(bench)
            bench.executor.step()
            bench.executor.step()
            assert not bench.compactor.busy
            assert not [one for one in log._segments if one.compacted]
            assert not list(log.directory.glob(f"*{UNNAMED_SUFFIX}"))
            log.abandon()


def test_tombstones_go_when_they_are_old(tmp_path: Path) -> None:
    bench = CompactionBench(tmp_path, tombstone_retention_ms=0)
    bench.send((b"a", b"1"), (b"b", b"1"))
    bench.seal()
    bench.send((b"a", b""))
    bench.seal()
    bench.send((b"c", b"1"))
    bench.seal()
    bench.compact()
    assert consumed(bench, "s", Mode.EXCLUSIVE) == [(1, b"1"), (3, b"1")]
    kept = CompactionBench(tmp_path / "kept")
    kept.send((b"a", b"1"), (b"b", b"1"))
    kept.seal()
    kept.send((b"a", b""))
    kept.seal()
    kept.send((b"c", b"1"))
    kept.seal()
    kept.compact()
    assert consumed(kept, "s", Mode.EXCLUSIVE) == [(1, b"1"), (2, b""), (3, b"1")]


def test_an_old_active_segment_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = CompactionBench(tmp_path)
    bench.send((b"a", b"1"))
    bench.compact()
    assert bench.sealer.jobs == []
    later_us = clock.wall_us() + SETTINGS.roll_us + 1_000_000
    monkeypatch.setattr(clock, "wall_us", lambda: later_us)
    bench.compact()
    assert len(bench.sealer.jobs) == 1 and bench.log.active is None


def test_more_keys_than_fit_are_compacted_over_several_rounds(tmp_path: Path) -> None:
    settings = CompactionSettings(dirty_bytes_min=0, lag_us=0, dirty_percent=1, keys_max=4)
    bench = CompactionBench(tmp_path, settings)
    bench.fill(segments=8, keys=5)
    before = len(stored_now(bench.log))
    for _ in range(12):
        bench.compact()
        bench.compactor._pauses.clear()
        check_whole(stored_now(bench.log), bench.published)
    assert len(stored_now(bench.log)) < before
    assert bench.compacted_end == bench.log.front()[-2].end_offset


# -- what else is told ----------------------------------------------------------------------------


def test_a_record_that_is_removed_before_its_letter_is_written_is_settled(tmp_path: Path) -> None:
    failure = FailurePolicy(
        max_redelivery_count=0,
        base_redelivery_delay_ms=0,
        poison="dead_letter",
        dead_letter_topic="/default/d",
    )
    bench = CompactionBench(tmp_path, failure=failure)
    bench.fill()
    session = RecordingSession(5)
    total = len(bench.published)
    bench.subscribe(session, start="earliest")
    bench.turn()
    bench.nack(session, 0, total)
    bench.turn()
    assert len(bench.letters) == total
    bench.compact()
    letters = DeadLetters(cast(Worker, SimpleNamespace(index=0, shard=bench.shard)))
    target = letters._targets["/default/d"] = _Target()
    kept: list[int] = []
    letters._route = lambda frame: not kept.append(1)  # type: ignore[method-assign,func-returns-value]
    target.waiting.extend(bench.letters)
    letters._publish_waiting(target)
    assert len(kept) == len(bench.expected), "letters of what is still there"
    figures = statistics(bench, "s")
    assert figures["compacted"] == total - len(bench.expected) and figures["damaged"] == 0
    assert figures["dead"] == len(bench.expected)


def test_the_mover_hears_whether_to_compact(tmp_path: Path) -> None:
    bench = TieredBench(tmp_path)
    bench.open_producer(RecordingSession())

    def said() -> list[tuple[bool, int]]:
        frames = [frame for frame in bench.mover.said if frame["kind"] == "policy"]
        return [(frame["compacts"], frame["tombstone_retention_ms"]) for frame in frames]

    def changed(**policy: Any) -> list[tuple[bool, int]]:
        bench.hosted.update(msgspec.structs.replace(bench.record, policy=TopicPolicy(**policy)))
        bench.tiers.second()
        return said()

    bench.tiers.second()
    assert said() == [], "nothing is compacted unless it is told"
    assert changed(cleanup="compact", tombstone_retention_ms=5) == [(True, 5)]
    assert changed(cleanup="compact", tombstone_retention_ms=5) == [(True, 5)]
    bench.tiers.on_connected()
    assert said() == [(True, 5), (True, 5)], "a new mover hears it again"
    assert changed() == [(True, 5), (True, 5), (False, 0)]


def test_of_many_partitions_some_are_looked_at_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = CompactionBench(tmp_path)
    bench.fill(segments=4)
    others = [SimpleNamespace(policy=TopicPolicy(), failure=None, deleted=False) for _ in range(4)]
    monkeypatch.setattr(compactor, "LOOKED_AT_MAX", 2)
    bench.compactor._partitions = lambda: cast(Any, [bench.hosted, *others])  # looked at from the end
    for _ in range(2):
        bench.compact()
        assert bench.compacted_end == 0
    bench.compact()
    assert bench.compacted_end > 0
    left = [*bench.compactor._unseen]
    bench.compactor.look()
    assert left == [] and bench.compactor._unseen == [bench.hosted, *others[:2]]
    bench.compactor.look()
    bench.hosted.deleted = True
    monkeypatch.setattr(bench.compactor, "_begin", lambda hosted: pytest.fail("it is gone"))
    bench.compactor.look()
