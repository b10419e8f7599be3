"""One stream over objects, local files and the tail: what a consumer sees while segments move under it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from danube.broker.partition import tier as tier_module
from danube.broker.tiers.retention import LocalRetention
from danube.broker.tiers.worker_tiers import TierOptions
from danube.broker.worker.housekeeping import Housekeeping
from danube.broker.worker.worker import Worker
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import (
    DanubeError,
    FetchPending,
    ObjectMissing,
    OffsetOutOfRange,
    StorageFailed,
    StoreDamaged,
    StoreUnavailable,
)
from danube.host import clock
from danube.wal.cold import cache as cold_cache
from danube.wal.cold import segment as cold_segment
from danube.wal.segments.segment import HEADER_BYTES, pack_header, read_header
from danube.wal.tier.keys import segment_key
from danube.wal.tier.manifest import Manifest
from tests.answers import fitting
from tests.examples import examples
from tests.unit.broker_parts import TOPIC, RecordingSession, expected, numbered
from tests.unit.tier_parts import TieredBench
from tests.unit.wal_samples import memory_directory


class Time:
    """A monotonic and a wall clock that the test turns."""

    def __init__(self) -> None:
        self.ns = 1_000_000_000_000

    def monotonic_ns(self) -> int:
        return self.ns

    def wall_us(self) -> int:
        return self.ns // 1000

    def pass_s(self, seconds: float) -> None:
        self.ns += int(seconds * 1e9)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(clock, "monotonic_ns", made.monotonic_ns)
    monkeypatch.setattr(clock, "wall_us", made.wall_us)
    return made


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cold_cache, cold_segment):
        monkeypatch.setattr(module, "BLOCK_BYTES", 512)
    monkeypatch.setattr(cold_cache, "FETCH_BYTES_MAX", 1024)


def publish(bench: TieredBench, session: RecordingSession, start: int, count: int) -> None:
    bench.publish(session, numbered(count, start=start))
    bench.turn()


def filled(
    root: Path, segments: int = 3, records: int = 20, **options: Any
) -> tuple[TieredBench, RecordingSession]:
    """A topic with so many uploaded and evicted segments, and as many records again that are active."""
    bench = TieredBench(root, **options)
    session = RecordingSession()
    bench.open_producer(session)
    for number in range(segments):
        publish(bench, session, number * records, records)
        bench.seal()
    publish(bench, session, segments * records, records)
    bench.evict()
    session.take()
    return bench, session


def drain(bench: TieredBench, session: RecordingSession, turns: int = 50) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    for _ in range(turns):
        bench.turn()
        found += session.records()
    return found


def test_a_consumer_reads_objects_then_files_then_the_tail(tmp_path: Path) -> None:
    bench, session = filled(tmp_path)
    assert bench.hosted.log is not None and bench.hosted.log.start == 60
    assert bench.hosted.start == 0 and bench.tier.uploaded_end == 60
    bench.subscribe(session, start="earliest")
    assert drain(bench, session) == expected(0, 80)
    publish(bench, session, 80, 5)
    assert drain(bench, session) == expected(80, 85)


def test_reading_waits_while_the_manifest_is_unknown(tmp_path: Path) -> None:
    bench, session = filled(tmp_path)
    bench.mover.prompt = False
    bench.shard.close()
    again = TieredBench(tmp_path)
    again.mover.prompt = False
    again.mover.store = bench.mover.store
    again.mover.manifests = bench.mover.manifests
    answers: list[Any] = []
    again.shard.open(TOPIC, answers.append)
    assert again.hosted.log is not None and again.hosted.log.start == 60
    with pytest.raises(FetchPending):
        _ = again.hosted.start
    assert again.tier.known_start is None and again.tier.statistics()["start"] is None
    assert again.hosted.statistics()["start"] is None, "unknown is neither 0 nor where the local log begins"
    with pytest.raises(FetchPending) as raised:
        again.hosted.chunk(3)
    assert not raised.value.ready()
    again.ask(session, Kind.SUBSCRIBE, _subscribe("earliest"), 2)
    assert session.take() == [], "the answer waits for the mover's word"
    again.mover.prompt = True
    again.mover.step()
    assert raised.value.ready()
    again.syncer.step()
    assert [frame.kind for frame in session.take()] == [Kind.SUBSCRIBED]
    assert again.hosted.start == 0
    assert drain(again, session) == expected(0, 80)


def test_a_word_about_an_earlier_ownership_expires_nothing(tmp_path: Path) -> None:
    """Its manifest ends before this log begins, so what lies between would be passed over as expired."""
    bench, session = filled(tmp_path)
    bench.shard.close()
    again = TieredBench(tmp_path)
    again.mover.prompt = False
    again.mover.store, again.mover.manifests = bench.mover.store, bench.mover.manifests
    again.shard.open(TOPIC, lambda outcome: None)
    identity, epoch = again.tier.identity, again.hosted.core.epoch
    earlier = replace(Manifest.empty(TOPIC, identity, epoch - 1), generation=7)
    late = {"epoch": epoch - 1, "manifest": earlier.encode(), "error": "", "loaded": True}
    assert earlier.uploaded_end < again.tier.log.start
    assert not again.tier.on_state(late) and again.tier.manifest is None
    with pytest.raises(FetchPending):
        _ = again.hosted.start
    assert not again.tier.on_state({**late, "epoch": epoch + 1, "error": "it has a newer owner"})
    assert again.tier.error == "it has a newer owner", "that is told"
    again.ask(session, Kind.SUBSCRIBE, _subscribe("earliest"), 2)
    again.mover.prompt = True
    again.mover.step()
    again.syncer.step()
    assert drain(again, session) == expected(0, 80)


def reopened(root: Path, bench: TieredBench, **policy: Any) -> TieredBench:
    """The partition after a restart, before the mover has said a word."""
    bench.shard.close()
    again = TieredBench(root, TierOptions(local_retention=LocalRetention(ms=1)), **policy)
    again.mover.prompt = False
    again.mover.store, again.mover.manifests = bench.mover.store, dict(bench.mover.manifests)
    again.shard.open(TOPIC, lambda outcome: None)
    return again


def round_of_retention(bench: TieredBench) -> None:
    worker = SimpleNamespace(
        shard=bench.shard, config=SimpleNamespace(wal=SimpleNamespace(sync_interval_ms=10))
    )
    Housekeeping(cast(Worker, worker))._retain(bench.hosted, clock.wall_us())


@pytest.mark.parametrize("retention_ms", [0, 3_600_000])
def test_retention_moves_no_cursor_while_the_manifest_is_unknown(tmp_path: Path, retention_ms: int) -> None:
    """A restart with a mover or a store that is slow: where the local log begins is not the start."""
    bench, session = filled(tmp_path, retention_ms=retention_ms)
    bench.subscribe(session, start="earliest", credit_records=5)
    assert drain(bench, session) == expected(0, 5)
    bench.ack(session, 0, 5)
    bench.turn()
    again = reopened(tmp_path, bench, retention_ms=retention_ms)
    for _ in range(3):
        round_of_retention(again)
    core = again.hosted.subscriptions["s"].core
    assert (core.ack_floor, core.statistics()["expired"]) == (5, 0)
    assert again.tiers.retain(again.hosted, 1 << 60) is None, "nothing expires either"
    assert again.hosted.log is not None and again.hosted.log.start == 60
    again.mover.prompt = True
    again.mover.step()
    round_of_retention(again)
    reader = RecordingSession(9)
    again.subscribe(reader)
    assert drain(again, reader) == expected(5, 80)


def test_an_older_copy_of_the_manifest_expires_and_evicts_nothing(tmp_path: Path, time: Time) -> None:
    """Its file could not be replaced (a full disk), and the store is away at the next start."""
    bench, session = filled(tmp_path, retention_ms=86_400_000)
    bench.subscribe(session, start="earliest", credit_records=5)
    drain(bench, session)
    older = bench.tier.manifest
    assert older is not None and len(older) == 3
    older = replace(older, entries=older.entries[:2])
    again = reopened(tmp_path, bench, retention_ms=86_400_000)
    word = {"epoch": again.hosted.core.epoch, "manifest": older.encode(), "error": "", "loaded": False}
    assert older.uploaded_end < again.tier.log.start and again.tier.on_state(word)
    time.pass_s(60)
    round_of_retention(again)
    core = again.hosted.subscriptions["s"].core
    assert (core.ack_floor, core.statistics()["expired"]) == (0, 0) and again.hosted.start == 0
    reader = RecordingSession(9)
    again.subscribe(reader)
    assert drain(again, reader) == [], "nothing is fetched yet"
    with pytest.raises(FetchPending) as raised:
        again.tier.read(45, 80, 1 << 20)
    assert not raised.value.ready(), "45 may be in an object that the copy does not know"
    again.mover.prompt = True
    again.mover.step()
    assert raised.value.ready() and again.tier.confirmed
    assert drain(again, reader) == expected(0, 80)


def test_only_what_was_read_from_the_store_lets_a_file_leave(tmp_path: Path, time: Time) -> None:
    bench = TieredBench(tmp_path)
    session = RecordingSession()
    bench.open_producer(session)
    publish(bench, session, 0, 20)
    bench.seal()
    manifest = bench.tier.manifest
    assert manifest is not None and manifest.uploaded_end == 20
    again = reopened(tmp_path, bench)
    time.pass_s(60)
    word = {"epoch": again.hosted.core.epoch, "manifest": manifest.encode(), "error": "", "loaded": False}
    assert again.tier.on_state(word)
    again.tiers.retain(again.hosted, clock.wall_us())
    assert again.tier.log.start == 0, "a copy on this host says what the store had"
    assert again.tier.on_state({**word, "loaded": True})
    again.tiers.retain(again.hosted, clock.wall_us())
    assert again.tier.log.start == 20


def test_what_neither_tier_has_is_told_as_missing_unless_it_expired(
    tmp_path: Path, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    bench, session = filled(tmp_path, retention_ms=3_600_000)
    bench.mover.upload = False
    for start in (80, 90):
        bench.seal()
        publish(bench, session, start, 10)
    bench.seal()
    assert bench.tier.uploaded_end == 60
    bench.tier.log.evict(90, sealed=False)  # files that were lost: retention would have told the mover
    assert bench.hosted.start == 0, "what the store has is still there"
    session.take()
    bench.subscribe(session, start="earliest", credit_records=1000)
    assert drain(bench, session) == [*expected(0, 60), *expected(90, 100)]
    assert "records are passed over" in caplog.text and bench.hosted.damaged == [(60, 90)]
    facts = [getattr(one, "danube_facts", {}) for one in caplog.records]
    told = [one for one in facts if one.get("subscription") == "s"]
    assert [(one["start"], one["end"], one["records"], one["fact"]) for one in told] == [
        (60, 90, 30, "damaged")
    ]
    time.pass_s(7_200)
    publish(bench, session, 100, 1)
    caplog.clear()
    with caplog.at_level("INFO", logger="danube"):
        round_of_retention(bench)
    assert bench.tier.trimmed == 100 and bench.hosted.start == 100
    (expiry,) = [one for one in caplog.records if one.getMessage() == "records expired"]
    assert expiry.danube_facts["start"] == 0 and expiry.danube_facts["end"] == 100  # type: ignore[attr-defined]
    assert "retention_ms" in expiry.danube_facts["fact"]  # type: ignore[attr-defined]


def test_what_was_deleted_as_expired_before_a_crash_expires_with_the_objects_before_it(
    tmp_path: Path, time: Time
) -> None:
    """The mover had not heard of it, so no manifest says so: the objects before it have expired, too."""
    bench, session = filled(tmp_path, retention_ms=3_600_000)
    bench.subscribe(session, start="earliest", credit_records=5)
    bench.mover.upload = False
    bench.seal()
    time.pass_s(7_200)
    publish(bench, session, 80, 4)
    bench.mover.prompt = False  # its "trim" is lost
    assert bench.tiers.retain(bench.hosted, clock.wall_us()) == 80
    again = reopened(tmp_path, bench, retention_ms=3_600_000)
    again.mover.prompt = True
    again.mover.step()
    assert again.hosted.start == 0 and again.tier.uploaded_end == 84
    round_of_retention(again)
    assert again.hosted.start == 80 and again.hosted.subscriptions["s"].core.ack_floor == 80
    assert not again.hosted.damaged


def test_a_cursor_that_retention_moves_is_told_with_its_range(
    tmp_path: Path, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    bench, session = filled(tmp_path, retention_ms=10_000)
    bench.subscribe(session, start="earliest", credit_records=5)
    drain(bench, session)
    bench.ack(session, 0, 5)
    time.pass_s(60)
    bench.seal()
    publish(bench, session, 80, 4)
    round_of_retention(bench)
    (told,) = [one for one in caplog.records if one.getMessage() == "records are passed over"]
    assert told.danube_facts == {  # type: ignore[attr-defined]
        "partition": TOPIC, "subscription": "s", "records": 75, "start": 5, "end": 80, "fact": "expired",
    }  # fmt: skip


def _subscribe(start: str, value: int = 0, **fields: Any) -> Any:
    from danube.core.protocol import native as wire

    fields = {"consumer": "c", "credit_records": 1000, "credit_bytes": 1 << 20, **fields}
    return wire.Subscribe(TOPIC, "s", start=start, start_value=value, **fields)


def test_a_place_on_this_host_needs_no_store(tmp_path: Path) -> None:
    bench, session = filled(tmp_path)
    bench.shard.close()
    again = TieredBench(tmp_path)
    again.mover.prompt = False
    for handle, (start, value) in enumerate([("offset", 60), ("offset", 75), ("latest", 0)], 2):
        again.subscribe(session, handle=handle, name=f"s{handle}", start=start, start_value=value)
    assert drain(again, session)[:20] == expected(60, 80)


def test_a_request_that_waits_too_long_is_told_so(tmp_path: Path, time: Time) -> None:
    bench, session = filled(tmp_path)
    bench.shard.close()
    again = TieredBench(tmp_path)
    again.mover.prompt = False
    again.ask(session, Kind.SUBSCRIBE, _subscribe("earliest"), 2)
    time.pass_s(10)
    again.tiers.tick()
    assert session.take() == []
    time.pass_s(11)
    again.tiers.tick()
    assert isinstance(session.only(Kind.ERROR).error, FetchPending)


@pytest.mark.parametrize("kind", ["offset", "time"])
def test_a_start_in_the_cold_tier_is_exact(tmp_path: Path, time: Time, kind: str) -> None:
    bench = TieredBench(tmp_path)
    session = RecordingSession()
    bench.open_producer(session)
    moments = []
    for number in range(30):
        time.pass_s(1)
        moments.append(clock.wall_us())
        publish(bench, session, number, 1)
        if number % 10 == 9:
            bench.seal()
    bench.evict()
    session.take()
    value = 17 if kind == "offset" else moments[17]
    bench.subscribe(session, start=kind, start_value=value)
    assert drain(bench, session) == expected(17, 30)


def test_a_time_between_the_tiers_finds_the_local_one(tmp_path: Path, time: Time) -> None:
    bench = TieredBench(tmp_path)
    session = RecordingSession()
    bench.open_producer(session)
    publish(bench, session, 0, 5)
    bench.seal()
    bench.evict()
    time.pass_s(100)
    between = clock.wall_us()
    time.pass_s(100)
    publish(bench, session, 5, 5)
    session.take()
    bench.subscribe(session, start="time", start_value=between)
    assert drain(bench, session) == expected(5, 10)


def test_seek_goes_back_into_the_cold_tier(tmp_path: Path) -> None:
    bench, session = filled(tmp_path)
    bench.subscribe(session, start="latest")
    assert drain(bench, session) == []
    bench.admin(session, "seek", subscription="s", kind="offset", value=35)
    assert drain(bench, session) == expected(35, 80)


def test_an_outage_stops_cold_readers_only_and_says_why(tmp_path: Path, time: Time) -> None:
    bench, session = filled(tmp_path)
    bench.mover.fetch_error = StoreUnavailable("the store does not answer")
    hot = RecordingSession(2)
    bench.subscribe(session, start="earliest")
    bench.subscribe(hot, handle=3, name="hot", start="latest")
    assert drain(bench, session) == []
    publish(bench, session, 80, 3)
    assert drain(bench, hot) == expected(80, 83)
    host = bench.hosted.subscriptions["s"]
    assert "does not answer" in host.statistics(0)["state"]
    assert "does not answer" in bench.tier.statistics()["read_error"]
    asked = bench.mover.kinds().count("fetch")
    drain(bench, session)
    assert bench.mover.kinds().count("fetch") == asked, "it is not asked again before the pause is over"
    bench.mover.fetch_error = None
    session.take()
    for _ in range(100):
        time.pass_s(1)
        bench.tiers.tick()
        bench.turn()
    assert session.records() == expected(0, 83)
    assert bench.tier.statistics()["read_error"] == ""
    assert host.statistics(0)["state"] == "caught_up"


def test_a_missing_object_is_never_skipped(tmp_path: Path, time: Time) -> None:
    bench, session = filled(tmp_path)
    key = segment_key(bench.tier.identity, bench.entry(1))
    kept = bench.mover.store.get(key)
    bench.mover.store.delete([key])
    bench.subscribe(session, start="earliest")
    for _ in range(200):
        time.pass_s(1)
        bench.tiers.tick()
        bench.turn()
    assert session.records() == expected(0, 20), "up to what is missing, and no further"
    assert isinstance(bench.tiers.cache.errors(bench.tier.identity)[0], ObjectMissing)
    assert key in bench.tier.statistics()["read_error"]
    asked = bench.mover.kinds().count("fetch")
    assert asked < 60, "a store that has lost an object is asked slowly"
    bench.mover.store.put(key, kept)
    for _ in range(100):
        time.pass_s(1)
        bench.tiers.tick()
        bench.turn()
    assert session.records() == expected(20, 80)


@pytest.mark.parametrize("damage", ["data", "footer", "other", "zeros"])
def test_damage_in_the_store_is_told_and_never_served(tmp_path: Path, time: Time, damage: str) -> None:
    bench, session = filled(tmp_path)
    key = segment_key(bench.tier.identity, bench.entry(1))
    kept = bench.mover.store.get(key)
    if damage == "data":
        wrong = bytearray(kept)
        wrong[200] ^= 1
    elif damage == "footer":
        wrong = bytearray(kept)
        wrong[bench.entry(1).data_end + 20] ^= 1
    elif damage == "other":  # whole and intact, but another segment
        wrong = bytearray(bench.mover.store.get(segment_key(bench.tier.identity, bench.entry(0))))
        wrong += bytes(len(kept) - len(wrong))
        wrong = wrong[: len(kept)]
    else:
        wrong = bytearray(len(kept))
    bench.mover.store.put(key, bytes(wrong))
    bench.subscribe(session, start="earliest")
    for _ in range(100):
        time.pass_s(1)
        bench.tiers.tick()
        bench.turn()
    assert session.records() == expected(0, 20)
    (error,) = bench.tiers.cache.errors(bench.tier.identity)
    assert isinstance(error, StoreDamaged) and error.facts["key"] == key
    assert 20 <= error.facts["start"] < error.facts["end"] <= 40
    bench.mover.store.put(key, kept)
    for _ in range(100):
        time.pass_s(1)
        bench.tiers.tick()
        bench.turn()
    assert session.records() == expected(20, 80)


def reasons(session: RecordingSession) -> list[DanubeError | None]:
    """What a consumer was told since, why it waits."""
    return [
        wire.decode_error(frame.body) if frame.body else None
        for frame in session.take()
        if frame.kind == Kind.WAITING
    ]


def test_a_consumer_is_told_why_it_waits_once_and_that_it_goes_on(tmp_path: Path, time: Time) -> None:
    bench, session = filled(tmp_path)
    key = segment_key(bench.tier.identity, bench.entry(1))
    kept = bench.mover.store.get(key)
    bench.mover.store.delete([key])
    bench.subscribe(session, start="earliest", mode="shared")
    drain(bench, session)
    bench.shard.second()
    (reason,) = reasons(session)
    assert isinstance(reason, ObjectMissing) and key in str(reason)
    assert bench.hosted.statistics()["damaged"] == [[20, 40]], "describe shows what cannot be read"
    (unreadable,) = bench.hosted.statistics()["unreadable"]
    assert key in unreadable
    second = RecordingSession(5)
    bench.subscribe(second, handle=4, mode="shared")
    for _ in range(100):
        time.pass_s(1)
        bench.tiers.tick()
        bench.turn()
        bench.shard.second()
    assert reasons(session) == [], "it is said once, however often it is tried"
    assert len(reasons(second)) == 1, "whoever comes later is told, too"
    bench.mover.store.put(key, kept)
    for _ in range(100):
        time.pass_s(1)
        bench.tiers.tick()
        bench.turn()
    bench.shard.second()
    delivered = [frame.kind for frame in second.take() if frame.kind in (Kind.DELIVER, Kind.WAITING)]
    told = reasons(session)
    assert Kind.DELIVER in delivered or told == [None], "a delivery, or the word that it goes on"
    assert bench.hosted.statistics()["unreadable"] == [] == bench.hosted.statistics()["damaged"]
    bench.shard.second()
    assert reasons(session) == []


def test_a_consumer_is_told_that_this_host_s_disk_gives_nothing(
    tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = TieredBench(tmp_path)
    session = RecordingSession()
    bench.open_producer(session)
    publish(bench, session, 0, 5)
    session.take()

    def broken_read(*_: Any) -> Any:
        raise StorageFailed("segment 0 cannot be read", why="Input/output error")

    monkeypatch.setattr(type(bench.tier.log), "read", broken_read)
    bench.subscribe(session, start="earliest")
    assert drain(bench, session) == []
    bench.shard.second()
    (reason,) = reasons(session)
    assert isinstance(reason, StorageFailed) and "Input/output error" in str(reason)
    assert "Input/output error" in bench.hosted.statistics()["unreadable"][0]
    monkeypatch.undo()
    for _ in range(5):
        time.pass_s(2)
        bench.shard.tick()
        bench.turn()
    assert session.records() == expected(0, 5)


def test_one_wrong_answer_is_asked_for_again_at_once(tmp_path: Path, time: Time) -> None:
    bench, session = filled(tmp_path)
    bench.subscribe(session, name="other", handle=9, start="latest")
    key = segment_key(bench.tier.identity, bench.entry(0))
    kept = bench.mover.store.get(key)
    wrong = bytearray(kept)
    wrong[200] ^= 8
    bench.mover.store.put(key, bytes(wrong))
    bench.mover.prompt = False
    bench.ask(session, Kind.SUBSCRIBE, _subscribe("earliest"), 2)
    bench.syncer.step()
    bench.turn()
    bench.mover.step()
    bench.mover.store.put(key, kept)  # only the first answer was wrong
    bench.mover.prompt = True
    assert drain(bench, session) == expected(0, 80), "without a pause"


def test_a_cut_cache_file_is_fetched_again(tmp_path: Path) -> None:
    bench, session = filled(tmp_path)
    bench.subscribe(session, start="earliest")
    assert drain(bench, session) == expected(0, 80)
    for path in (tmp_path / "cache").iterdir():
        data = bytearray(path.read_bytes())
        data[100:] = bytes(len(data) - 100)
        path.write_bytes(data)
    bench.admin(session, "seek", subscription="s", kind="earliest")
    assert drain(bench, session) == expected(0, 80)


def test_a_redelivery_from_the_cold_tier_keeps_its_count_and_its_credit(tmp_path: Path) -> None:
    bench, session = filled(tmp_path)
    bench.subscribe(session, mode="shared", start="earliest", credit_records=20)
    assert drain(bench, session) == expected(0, 20)
    bench.tiers.cache.forget(bench.tier.identity)  # as if evicted from the cache
    bench.mover.prompt = False
    session.closed = False
    bench.shard.drop_session(session)
    second = RecordingSession(5)
    bench.subscribe(second, handle=4, mode="shared", credit_records=20)
    host = bench.hosted.subscriptions["s"]
    assert drain(bench, second) == [] and host.pending_again is not None
    assert host.core.statistics()["in_flight"] == 0 and host.core.statistics()["waiting_redelivery"] == 20
    host.core.check()
    bench.mover.prompt = True
    bench.mover.step()
    bench.turn()
    frames = second.take(Kind.DELIVER)
    assert [record for frame in frames for record in frame.records] == expected(0, 20)
    bench.ack(second, 0, 20, handle=4)
    assert host.core.ack_floor == 20
    host.core.check()


def test_retention_trims_both_tiers_and_a_late_reader_is_told_the_new_start(
    tmp_path: Path, time: Time
) -> None:
    bench, session = filled(tmp_path, retention_ms=10_000)
    bench.subscribe(session, start="earliest", credit_records=5)
    assert drain(bench, session) == expected(0, 5)
    time.pass_s(60)
    bench.seal()
    publish(bench, session, 80, 4)
    start = bench.tiers.retain(bench.hosted, clock.wall_us())
    assert start == 80 and bench.hosted.log is not None and bench.hosted.log.start == 80
    manifest = bench.mover.manifests[bench.tier.identity]
    assert manifest.start_offset == 80 and not len(manifest)
    with pytest.raises(OffsetOutOfRange) as raised:
        bench.hosted.chunk(7)
    assert raised.value.facts["start"] == 80
    bench.hosted.subscriptions.clear()
    session.take()
    bench.ask(session, Kind.SUBSCRIBE, _subscribe("offset", 7), 8)
    error = session.only(Kind.ERROR).error
    assert isinstance(error, OffsetOutOfRange) and error.facts["start"] == 80


def test_nothing_unverified_leaves_this_host_while_it_has_not_expired(tmp_path: Path, time: Time) -> None:
    options = TierOptions(local_retention=LocalRetention(ms=1), cache_bytes=1 << 20)
    bench = TieredBench(tmp_path, options, retention_ms=3_600_000)
    session = RecordingSession()
    bench.open_producer(session)
    bench.mover.upload = False
    for number in range(3):
        publish(bench, session, number * 10, 10)
        bench.seal()
    time.pass_s(60)
    bench.tiers.retain(bench.hosted, clock.wall_us())
    assert bench.hosted.log is not None and bench.hosted.log.start == 0, "the mover is paused"
    bench.mover.upload = True
    bench.mover.look(bench.tier.identity)
    bench.tiers.second()
    assert bench.hosted.log.start == 30 and bench.hosted.start == 0
    publish(bench, session, 30, 10)
    bench.mover.upload = False
    bench.seal()
    time.pass_s(7200)
    bench.tiers.retain(bench.hosted, clock.wall_us())
    assert bench.hosted.start == 40, "what has expired goes, uploaded or not"


def test_a_number_of_segments_stays_on_this_host(tmp_path: Path, time: Time) -> None:
    options = TierOptions(local_retention=LocalRetention(segments=2), cache_bytes=1 << 20)
    bench = TieredBench(tmp_path, options)
    session = RecordingSession()
    bench.open_producer(session)
    for number in range(5):
        publish(bench, session, number * 10, 10)
        bench.seal()
    bench.mover.look(bench.tier.identity)
    bench.tiers.retain(bench.hosted, clock.wall_us())
    assert bench.hosted.log is not None and bench.hosted.log.start == 30 and bench.hosted.start == 0


def test_an_object_of_other_content_keeps_the_local_segment(tmp_path: Path, time: Time) -> None:
    bench = TieredBench(tmp_path, TierOptions(local_retention=LocalRetention(ms=1), cache_bytes=1 << 20))
    session = RecordingSession()
    bench.open_producer(session)
    bench.mover.upload = False
    publish(bench, session, 0, 10)
    bench.seal()
    identity = bench.tier.identity
    bench.mover.upload = True
    bench.mover.look(identity)
    manifest = bench.mover.manifests[identity]
    entry = manifest.entry(0)._replace(content_hash=bytes(range(16)), chain_hash=bytes(range(16)))
    empty = manifest.trimmed(0)
    bench.mover.manifests[identity] = type(empty)(
        empty.topic, empty.topic_id, empty.partition, empty.epoch, empty.generation + 1, 0, empty.entries[:0]
    ).with_added(entry)
    bench.mover.tell(identity)
    time.pass_s(60)
    bench.tiers.second()
    bench.tiers.retain(bench.hosted, clock.wall_us())
    assert bench.hosted.log is not None and bench.hosted.log.start == 0


@pytest.mark.parametrize(
    ("policy", "left"),
    [({"retention_bytes": 4000, "retention_ms": 0}, 40), ({"retention_segments": 2, "retention_ms": 0}, 40)],
)
def test_bytes_and_segments_are_counted_over_both_tiers(
    tmp_path: Path, policy: dict[str, int], left: int
) -> None:
    bench = TieredBench(tmp_path, **policy)
    session = RecordingSession()
    bench.open_producer(session)
    payload = b"x" * 100
    from tests.unit.broker_parts import batch

    for _ in range(4):
        bench.publish(session, batch(*([payload] * 20)))
        bench.seal()
        if bench.tier.uploaded_end == 40:
            bench.evict()
    start = bench.tiers.retain(bench.hosted, 1)
    assert start == left and bench.hosted.start == left


def test_old_active_segments_are_sealed_and_uploaded(tmp_path: Path, time: Time) -> None:
    bench = TieredBench(tmp_path, TierOptions(seal_after_ms=5_000, cache_bytes=1 << 20))
    session = RecordingSession()
    bench.open_producer(session)
    publish(bench, session, 0, 10)
    bench.tiers.second()
    time.pass_s(4)
    bench.tiers.second()
    bench.sealer.step()
    assert bench.tier.uploaded_end == 0
    assert bench.tier.statistics()["pending_seconds"] == pytest.approx(4)
    assert bench.tier.statistics()["pending_bytes"] > 0
    time.pass_s(2)
    bench.tiers.second()
    bench.sealer.step()
    assert bench.tier.uploaded_end == 10
    assert bench.tier.statistics()["pending_seconds"] == 0
    assert bench.tier.statistics()["pending_bytes"] == 0


@pytest.mark.parametrize("known", [True, False])
def test_retention_by_time_ends_the_active_segment_of_a_quiet_topic(
    tmp_path: Path, time: Time, known: bool
) -> None:
    """As it does without a store: ``seal_after`` may be days."""
    bench = TieredBench(
        tmp_path, TierOptions(seal_after_ms=86_400_000, cache_bytes=1 << 20), retention_ms=4_000
    )
    session = RecordingSession()
    bench.open_producer(session)
    publish(bench, session, 0, 10)
    bench.shard.storage.request_sync(bench.hosted)
    bench.syncer.step()
    manifest = bench.tier.manifest
    if not known:
        bench.tier.manifest = None
    bench.tiers.retain(bench.hosted, clock.wall_us())
    assert bench.tier.log.active is not None, "it is young"
    time.pass_s(2)
    bench.tiers.retain(bench.hosted, clock.wall_us())
    assert bench.tier.log.active is None
    bench.sealer.step()
    bench.tier.manifest = bench.tier.manifest or manifest
    time.pass_s(3)
    assert bench.tiers.retain(bench.hosted, clock.wall_us()) == 10
    assert bench.hosted.start == bench.tier.log.start == 10


def test_a_compacted_topic_s_active_segment_does_not_grow_old_for_retention(
    tmp_path: Path, time: Time
) -> None:
    bench = TieredBench(
        tmp_path, TierOptions(seal_after_ms=86_400_000), cleanup="compact", retention_ms=4_000
    )
    session = RecordingSession()
    bench.open_producer(session)
    publish(bench, session, 0, 10)
    time.pass_s(60)
    bench.tiers.retain(bench.hosted, clock.wall_us())
    assert bench.tier.log.active is not None and not bench.tier.log.should_roll


def test_a_new_connection_is_told_everything_again(tmp_path: Path) -> None:
    bench, session = filled(tmp_path)
    bench.subscribe(session, start="earliest")
    bench.mover.prompt = False
    bench.tiers.delete(bench.add_topic("/default/gone", 9))
    bench.tiers.second()
    bench.turn()
    waiting = bench.mover.kinds().count("fetch")
    bench.mover.frames.clear()  # the mover died
    bench.mover.said.clear()
    bench.tiers.on_connected()
    bench.tiers.copy_cursors()
    kinds = bench.mover.kinds()
    assert {"attach", "delete", "cursors"} <= set(kinds) and waiting and kinds.count("fetch")
    bench.mover.prompt = True
    bench.mover.step()
    assert drain(bench, session) == expected(0, 80)


def test_a_new_subscription_is_told_to_the_mover_once_it_is_on_disk(tmp_path: Path) -> None:
    bench, session = filled(tmp_path)
    bench.subscribe(session, start="earliest")
    (told,) = [frame for frame in bench.mover.said if frame["kind"] == "cursors"]
    assert told["soon"]
    bench.subscribe(session, handle=3, consumer="another", mode="shared", name="t")
    bench.subscribe(session, handle=4, consumer="a third", mode="shared", name="t")
    assert bench.mover.kinds().count("cursors") == 2, "and the second consumer found it"


@pytest.mark.parametrize(
    ("op", "args"), [("delete_subscription", {}), ("seek", {"kind": "earliest"})], ids=["delete", "seek"]
)
def test_a_subscription_that_was_deleted_or_set_is_told_to_the_mover_at_once(
    tmp_path: Path, op: str, args: dict[str, Any]
) -> None:
    """Else it would be there again, as it was, where its owner dies before the next copy."""
    bench, session = filled(tmp_path)
    bench.subscribe(session, start="earliest")
    drain(bench, session)
    bench.ack(session, 0, 33)
    bench.ask(session, Kind.CLOSE_CONSUMER, handle=2)
    bench.mover.said.clear()
    session.take()
    assert bench.admin(session, op, subscription="s", **args).kind == Kind.RESULT
    copies = [frame for frame in bench.mover.said if frame["kind"] == "cursors"]
    assert len(copies) == 1 and copies[0]["soon"], bench.mover.kinds()
    assert bench.hosted.cursors is not None and copies[0]["blob"] == bench.hosted.cursors.copy()


def test_copies_of_cursors_and_metadata_are_sent_once_for_each_change(tmp_path: Path, time: Time) -> None:
    bench, session = filled(tmp_path)
    bench.subscribe(session, start="earliest")
    bench.mover.said.clear()  # that it was made
    drain(bench, session)
    bench.ack(session, 0, 33)
    bench.turn()
    bench.shard.store_cursors()
    for _ in range(5):
        time.pass_s(6)
        bench.tiers.second()
    frames = [frame for frame in bench.mover.said if frame["kind"] == "cursors"]
    assert len(frames) == 1
    target = tmp_path / "restored"
    target.mkdir()
    (target / "cursors-a").write_bytes(frames[0]["blob"])
    (target / "cursors-b").touch()
    from danube.core.dispatch.cursor import CursorState
    from danube.wal.log.cursors import CursorStore

    store = CursorStore(target, bench.tier.identity)
    assert CursorState.decode(store.load()["s"]).ack_floor == 33 and not store.damage
    metadata = [frame for frame in bench.mover.said if frame["kind"] == "metadata"]
    assert [(frame["version"], frame["blob"]) for frame in metadata] == [(7, b"snapshot")]


def test_a_log_shorter_than_its_objects_is_named_and_nothing_is_evicted(tmp_path: Path) -> None:
    bench, _ = filled(tmp_path)
    other = TieredBench(tmp_path / "other")
    other.mover.manifests = bench.mover.manifests
    other.shard.open(TOPIC, lambda outcome: None)
    assert "local data was lost" in other.tier.statistics()["upload_error"]
    assert other.tier.manifest is None


def test_seal_on_demand_answers_when_all_is_sealed(tmp_path: Path) -> None:
    bench = TieredBench(tmp_path)
    session = RecordingSession()
    bench.open_producer(session)
    publish(bench, session, 0, 10)
    session.take()
    from danube.core.protocol import native as wire

    bench.ask(session, Kind.ADMIN, wire.Admin("seal", TOPIC, {}))
    assert session.take() == []
    bench.sealer.step()
    assert fitting("seal", wire.decode_result(session.only(Kind.RESULT).body)) == {"sealed_end": 10}
    bench.ask(session, Kind.ADMIN, wire.Admin("seal", TOPIC, {}))
    bench.sealer.step()
    assert wire.decode_result(session.only(Kind.RESULT).body) == {"sealed_end": 10}
    bench.shard.storage.request_sync(bench.hosted)
    bench.syncer.step()
    value = fitting("storage", wire.decode_result(bench.admin(session, "storage").body))
    assert value["uploaded_end"] == 10 and value["objects"] == 1
    (segment,) = fitting(
        "list_segments", wire.decode_result(bench.admin(session, "list_segments", after_offset=0).body)
    )
    assert (segment["start_offset"], segment["end_offset"]) == (0, 10)


@pytest.mark.usefixtures("small_blocks")
def test_many_cold_readers_share_a_small_cache_and_hot_ones_go_on(tmp_path: Path, time: Time) -> None:
    bench, session = filled(tmp_path, segments=8, records=40, options=TierOptions(cache_bytes=4096))
    bench.mover.prompt = False
    readers = []
    for number in range(100):
        reader = RecordingSession(10 + number)
        readers.append((reader, number * 3))
        bench.subscribe(
            reader, handle=number + 10, name=f"cold-{number}", start="offset", start_value=number * 3
        )
    hot = RecordingSession(5)
    bench.subscribe(hot, handle=5, name="hot", start="latest")
    found: dict[int, list[tuple[int, bytes]]] = {start: [] for _, start in readers}
    published = 360
    for _ in range(600):
        if published < 380:
            publish(bench, session, published, 1)
            assert hot.records() == expected(published, published + 1), "in the turn of its publish"
            published += 1
        time.pass_s(0.01)
        bench.mover.step(1)
        bench.turn()
        assert bench.tiers.cache.bytes_used <= 4096
        assert bench.tiers.cache.statistics()["fetches"] <= 600
        for reader, start in readers:
            found[start] += reader.records()
    assert all(found[start] == expected(start, 380) for _, start in readers)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("blocks", [2, 4, 8, 32])
def test_readers_far_apart_all_go_on_however_small_the_cache_is(
    tmp_path: Path, time: Time, blocks: int
) -> None:
    readers, records = 64, 20
    bench = TieredBench(tmp_path, TierOptions(cache_bytes=512 * blocks))
    bench.tiers._wake = bench.shard.wake  # all look all the time: the bounds below are those of the cache
    session = RecordingSession()
    bench.open_producer(session)
    for number in range(readers):
        publish(bench, session, number * records, records)
        if number % 16 == 15:
            bench.seal()
    bench.evict()
    session.take()
    size = sum(bench.entry(number).data_end for number in range(4))
    bench.mover.prompt = False
    found: dict[int, list[tuple[int, bytes]]] = {}
    sessions = [RecordingSession(10 + number) for number in range(readers)]
    for number, reader in enumerate(sessions):
        place = {"start": "offset", "start_value": number * records}
        bench.subscribe(reader, handle=number + 10, name=f"cold-{number}", **place, credit_records=10_000)
        found[number] = []
    for _ in range(300):
        time.pass_s(0.01)
        bench.mover.step(1)
        bench.turn()
        bench.tiers.tick()
        if blocks > 4:  # with fewer one read alone may need more
            assert bench.tiers.cache.bytes_used <= 512 * blocks
        for number, reader in enumerate(sessions):
            found[number] += reader.records()
    for number in range(readers):
        assert found[number] == expected(number * records, readers * records)
    assert bench.tiers.cache.fetched_bytes < 6 * size, "nobody pushes out what another one waits for"
    assert bench.tiers.cache.statistics()["waiting_reads"] == 0


# -- a model: any schedule of publishing, sealing, uploading, evicting and fetching ---------------------

STEPS = st.lists(
    st.sampled_from(["publish", "seal", "upload", "evict", "turn", "fetch", "forget", "seek", "restart"]),
    min_size=10, max_size=60,
)  # fmt: skip


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with memory_directory(tmp_path_factory.mktemp("tiers")) as path:
        yield path


@pytest.mark.usefixtures("small_blocks")
@settings(
    max_examples=examples(300), deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(steps=STEPS, mode=st.sampled_from(["exclusive", "shared", "key_shared"]))
def test_every_record_comes_once_and_in_order_under_any_schedule(
    scratch: Path, steps: list[str], mode: str
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory(dir=scratch) as name:
        bench = TieredBench(Path(name), TierOptions(cache_bytes=2048))
        try:
            _schedule(bench, steps, mode)
        finally:
            bench.shard.close()
            bench.tiers.close()


def _schedule(bench: TieredBench, steps: list[str], mode: str) -> None:
    session = RecordingSession()
    bench.open_producer(session)
    bench.mover.prompt = False
    bench.subscribe(session, mode=mode, start="earliest", credit_records=100_000)
    published, found = 0, []
    for step in steps:
        if step == "publish":
            publish(bench, session, published, 7)
            published += 7
        elif step == "seal":
            bench.seal()
        elif step == "upload":
            bench.mover.step(1)
        elif step == "evict":
            bench.tiers._evict(bench.tier, 1 << 60)
            bench.evict()
        elif step == "fetch":
            bench.mover.step()
        elif step == "forget":
            bench.tiers.cache.forget(bench.tier.identity)
        elif step == "restart":
            bench.tiers.on_connected()
        elif step == "seek":
            found += session.records()
            assert found == expected(0, published)[: len(found)]
            bench.hosted.subscriptions["s"].core.seek(bench.hosted.start, bench.hosted.high_watermark, 0)
            bench.shard.wake(bench.hosted)
            found = []
        bench.turn()
        found += session.records()
        bench.hosted.subscriptions["s"].core.check()
        assert found == expected(0, published)[: len(found)]
    bench.mover.prompt = True
    bench.mover.step()
    found += drain(bench, session, turns=200)
    assert found == expected(0, published)


def with_many_batches(
    root: Path, monkeypatch: pytest.MonkeyPatch, *, large: bool
) -> tuple[TieredBench, RecordingSession]:
    """One object of 30 batches of a record each, most of which its index names, and one record behind it."""
    monkeypatch.setattr(tier_module, "WHOLE_BYTES_MAX", 0 if large else 1 << 20)
    monkeypatch.setattr("danube.wal.segments.index.ENTRY_EVERY_BYTES", 64)
    monkeypatch.setattr("danube.wal.segments.stored_segment.ENTRY_EVERY_BYTES", 64)
    monkeypatch.setattr("danube.wal.segments.writer.ENTRY_EVERY_BYTES", 64)
    bench, session = TieredBench(root), RecordingSession()
    bench.open_producer(session)
    for number in range(30):
        publish(bench, session, number, 1)
    bench.seal()
    publish(bench, session, 30, 1)
    bench.evict()
    session.take()
    return bench, session


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("begins_at", [0, 10, 29])
def test_an_object_of_another_log_is_refused_wherever_a_read_begins(
    tmp_path: Path,
    time: Time,
    monkeypatch: pytest.MonkeyPatch,
    small_blocks: None,
    large: bool,
    begins_at: int,
) -> None:
    bench, session = with_many_batches(tmp_path, monkeypatch, large=large)
    store, key = bench.mover.store, segment_key(bench.tier.identity, bench.entry(0))
    kept = store.get(key)
    header = read_header(kept[:HEADER_BYTES])
    assert any(header.log_id) and bench.entry(0).end_offset == 30
    store.put(key, pack_header(header._replace(log_id=b"x" * 16)) + kept[HEADER_BYTES:])
    bench.subscribe(session, start="offset", start_value=begins_at)
    for _ in range(10):
        time.pass_s(1)
        bench.tiers.tick()
        bench.turn()
    assert session.records() == []
    assert ["another broker's" in str(one) for one in bench.tiers.cache.errors(bench.tier.identity)] == [True]
    store.put(key, kept)
    for _ in range(200):
        time.pass_s(1)
        bench.tiers.tick()
        bench.turn()
    assert session.records() == expected(begins_at, 31)


def test_an_object_is_asked_for_its_header_once(
    tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch, small_blocks: None
) -> None:
    bench, session = with_many_batches(tmp_path, monkeypatch, large=True)
    asked: list[tuple[int, int]] = []
    send = bench.tiers.cache._send
    monkeypatch.setattr(
        bench.tiers.cache, "_send", lambda fetch: (asked.append((fetch.start, fetch.end)), send(fetch))[1]
    )
    for number in (2, 3, 4):
        bench.subscribe(session, handle=number, name=f"s{number}", start="offset", start_value=25)
        drain(bench, session)
    assert asked.count((0, HEADER_BYTES)) == 1 and [start for start, _ in asked].count(0) == 1
