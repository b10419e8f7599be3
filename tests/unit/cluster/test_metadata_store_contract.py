"""The metadata store's contract, over every log that can keep it (see tests/unit/metadata_stores.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from danube.cluster.metadata_store import ConsensusStore, Event, Resync
from danube.core.cluster.commands import KeyDeleted, KeyPut
from danube.core.metadata.commands import Change, CreateNamespace, CreateTopic, DeleteTopic, TopicCreated
from danube.core.partition.policy import TopicPolicy
from danube.errors import CallerError, InvalidArgument, InvalidName, LimitExceeded, NotFound, TopicExists
from danube.limits import METADATA_VALUE_BYTES_MAX
from tests.unit.metadata_stores import KINDS, ManualClock, OpenLog

if TYPE_CHECKING:
    from danube.cluster.etcd.place import EtcdPlace
    from tests.etcd_server import EtcdServer
    from tests.unit.raft_members import LeadersClock, RaftMembers


@pytest.fixture(scope="module")
def leaders_clock() -> Iterator[LeadersClock]:
    """Leaders go by the tests' clocks, and let the tests end leases."""
    from danube.cluster.control import duty_rounds, proposer
    from tests.unit.raft_members import LeadersClock

    with pytest.MonkeyPatch.context() as patch:
        clock = LeadersClock()
        patch.setattr(proposer, "clock", clock)
        patch.setattr(duty_rounds, "LOOK_S", 3_600.0)
        yield clock


@pytest.fixture(scope="module")
def raft_members(
    tmp_path_factory: pytest.TempPathFactory, leaders_clock: LeadersClock
) -> Iterator[RaftMembers]:
    """Three members that vote."""
    pytest.importorskip("raftos", reason="a cluster needs raftos; scripts/setup installs it")
    yield from _members(tmp_path_factory.mktemp("members"), leaders_clock)


@pytest.fixture(scope="module")
def etcd_members(
    tmp_path_factory: pytest.TempPathFactory, leaders_clock: LeadersClock, etcd_server: EtcdServer
) -> Iterator[RaftMembers]:
    """Three members that agree through a real etcd."""
    place = etcd_server.place(etcd_server.new_prefix())
    yield from _members(tmp_path_factory.mktemp("etcd"), leaders_clock, place)


def _members(directory: Path, clock: LeadersClock, etcd: EtcdPlace | None = None) -> Iterator[RaftMembers]:
    from tests.unit.raft_members import RaftMembers

    cluster = RaftMembers(directory, clock, etcd)
    yield cluster
    cluster.stop()


@pytest.fixture(params=sorted(KINDS))
def open_log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenLog]:
    with KINDS[request.param](request, tmp_path / "metadata") as opened:
        yield opened


@pytest.fixture
def time() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(open_log: OpenLog, time: ManualClock) -> ConsensusStore:
    return ConsensusStore(open_log(), time=time)


def other_store(open_log: OpenLog, time: ManualClock) -> ConsensusStore:
    return ConsensusStore(open_log(), time=time)


def told(events: list[Event]) -> list[tuple[str, bytes | None]]:
    """Events as (key, value), None for a deletion; fails on a resync."""
    found: list[tuple[str, bytes | None]] = []
    for event in events:
        assert not isinstance(event, Resync)
        found.append((event.record.key, event.record.value if isinstance(event, KeyPut) else None))
    return found


def test_what_is_put_is_read_with_its_version_and_revisions(store: ConsensusStore) -> None:
    assert store.get("/a") is None
    first = store.put("/a", b"1")
    second = store.put("/a", b"2")
    assert (first.version, second.version) == (1, 2)
    assert second.create_revision == first.mod_revision < second.mod_revision == store.revision
    assert store.get("/a") == second
    assert store.delete("/a") == second
    assert store.get("/a") is None and store.delete("/a") is None
    again = store.put("/a", b"3")
    assert again.version == 1 and again.create_revision == again.mod_revision > second.mod_revision


def test_another_reader_sees_it_after_a_poll_and_everyone_after_opening(
    store: ConsensusStore, open_log: OpenLog, time: ManualClock
) -> None:
    other = other_store(open_log, time)
    record = store.put("/a/b", b"1")
    other.poll()
    assert other.get("/a/b") == record
    other.delete_prefix("/a/")
    store.read_barrier()
    assert store.get("/a/b") is None
    store.put("/x", b"2")
    late = other_store(open_log, time)
    assert [one.key for one in late.get_bulk("/")] == ["/x"]


def test_a_prefix_ends_with_a_slash_and_means_nothing_else(store: ConsensusStore) -> None:
    for key in ("/b/2", "/b/1", "/b", "/bb/1", "/b/1/deep", "/a"):
        store.put(key, key.encode())
    assert store.get_children("/b/") == ["/b/1", "/b/1/deep", "/b/2"]
    assert [record.value for record in store.get_bulk("/b/1/")] == [b"/b/1/deep"]
    assert store.get_children("/") == ["/a", "/b", "/b/1", "/b/1/deep", "/b/2", "/bb/1"]
    store.delete_prefix("/b/")
    assert store.get_children("/") == ["/a", "/b", "/bb/1"]
    store.delete_prefix("/nothing/")
    for prefix in ("/b", "b/", "", "/\n/"):
        with pytest.raises(InvalidName):
            store.get_children(prefix)
        with pytest.raises(InvalidName):
            store.delete_prefix(prefix)
        with pytest.raises(InvalidName):
            store.watch(prefix)


VALUES = [
    b"",
    bytes(range(256)),
    b"line\nline\r\n\0",
    b"\n" * 70_000,
    bytes(range(256)) * 257,
    b"[" * 50_000 + b"]" * 50_000,
    b"\xff" * METADATA_VALUE_BYTES_MAX,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{len(value)}-bytes")
def test_every_value_comes_back_also_for_who_opens_later(
    store: ConsensusStore, open_log: OpenLog, time: ManualClock, value: bytes
) -> None:
    record = store.put("/values/one", value)
    assert record.value == value
    assert other_store(open_log, time).get("/values/one") == record
    assert store.compare_and_set("/values/one", value, revision=record.mod_revision).succeeded


def test_a_value_over_the_limit_is_refused_before_the_log(store: ConsensusStore) -> None:
    revision = store.revision
    with pytest.raises(LimitExceeded):
        store.put("/big", bytes(METADATA_VALUE_BYTES_MAX + 1))
    assert store.get("/big") is None and store.revision == revision


@pytest.mark.parametrize("key", ["", "/", "a", "/a/", "/a\n", "/\0", "/" + "x" * 1024, "/\udc80"])
def test_what_is_no_key_is_refused(store: ConsensusStore, key: str) -> None:
    with pytest.raises(InvalidName):
        store.put(key, b"")
    with pytest.raises(InvalidName):
        store.delete(key)
    with pytest.raises(InvalidName):
        store.allocate_id(key)


def test_a_key_is_set_where_it_is_as_expected(store: ConsensusStore) -> None:
    made = store.compare_and_set("/a", b"1", revision=0)
    assert made.succeeded and made.record == store.get("/a") and made.record is not None
    assert store.compare_and_set("/a", b"2", revision=0) == (False, made.record)
    assert store.compare_and_set("/a", b"2", expected=b"x") == (False, made.record)
    set_by_value = store.compare_and_set("/a", b"2", expected=b"1")
    assert set_by_value.record is not None and set_by_value.record.version == 2
    assert not store.compare_and_set("/a", b"3", revision=made.record.mod_revision).succeeded
    assert store.compare_and_set("/a", None, revision=set_by_value.record.mod_revision) == (True, None)
    assert store.get("/a") is None
    assert store.compare_and_set("/a", None, revision=0) == (True, None)
    assert store.compare_and_set("/a", b"", expected=b"") == (False, None)
    for wrong in ({}, {"revision": 0, "expected": b""}, {"revision": -2}):
        with pytest.raises(InvalidArgument):
            store.compare_and_set("/a", b"", **wrong)  # type: ignore[arg-type]


def test_of_two_that_compare_one_wins(store: ConsensusStore, open_log: OpenLog, time: ManualClock) -> None:
    other = other_store(open_log, time)
    assert store.compare_and_set("/lock", b"mine", revision=0).succeeded
    lost = other.compare_and_set("/lock", b"theirs", revision=0)
    assert not lost.succeeded and lost.record is not None and lost.record.value == b"mine"


def test_numbers_are_given_once_to_whoever_asks(
    store: ConsensusStore, open_log: OpenLog, time: ManualClock
) -> None:
    other = other_store(open_log, time)
    numbers = [one.allocate_id("/ids/a") for one in (store, other, other, store)]
    assert numbers == [1, 2, 3, 4]
    assert store.allocate_id("/ids/b") == 1
    assert other_store(open_log, time).allocate_id("/ids/a") == 5


def test_a_lease_that_is_not_renewed_ends_with_its_keys(store: ConsensusStore, time: ManualClock) -> None:
    lease = store.grant_lease(1_000)
    store.put("/held/a", b"", lease.lease_id)
    store.put("/held/b", b"", lease.lease_id)
    store.put("/held/c", b"")
    time.pass_ms(900)
    assert store.expire_leases() == 0
    assert store.renew_lease(lease.lease_id).expires_us == lease.expires_us + 900_000
    time.pass_ms(900)
    assert store.expire_leases() == 0 and len(store.get_children("/held/")) == 3
    time.pass_ms(100)
    assert store.expire_leases() == 1
    assert store.get_children("/held/") == ["/held/c"]
    for ended in (store.renew_lease, store.revoke_lease):
        with pytest.raises(NotFound):
            ended(lease.lease_id)
    with pytest.raises(NotFound):
        store.put("/held/a", b"", lease.lease_id)


def test_a_revoked_lease_takes_its_keys_at_once(store: ConsensusStore) -> None:
    lease = store.grant_lease(60_000)
    store.put("/held/a", b"", lease.lease_id)
    store.revoke_lease(lease.lease_id)
    assert store.get_children("/held/") == []


def test_a_key_with_a_time_to_live_is_kept_by_putting_it_again(
    store: ConsensusStore, time: ManualClock
) -> None:
    first = store.put_with_ttl("/up", b"1", 1_000)
    time.pass_ms(800)
    second = store.put_with_ttl("/up", b"2", 1_000)
    assert (second.version, second.lease_id) == (2, first.lease_id)
    time.pass_ms(800)
    assert store.expire_leases() == 0
    time.pass_ms(200)
    assert store.expire_leases() == 1 and store.get("/up") is None
    with pytest.raises(InvalidArgument):
        store.put_with_ttl("/up", b"", 0)


def test_a_plain_put_lets_a_key_stay_that_had_a_lease(store: ConsensusStore, time: ManualClock) -> None:
    lease = store.grant_lease(1_000)
    for key in ("/plain", "/compared", "/left"):
        store.put(key, b"1", lease.lease_id)
    store.put_with_ttl("/own", b"1", 1_000)
    store.put("/plain", b"2")
    store.put("/own", b"2")
    assert store.compare_and_set("/compared", b"2", expected=b"1").succeeded
    time.pass_ms(5_000)
    store.expire_leases()
    assert store.get_children("/") == ["/compared", "/own", "/plain"]


def test_a_wall_clock_that_jumps_ends_no_lease_and_keeps_none(
    store: ConsensusStore, time: ManualClock, open_log: OpenLog
) -> None:
    store.put_with_ttl("/a", b"", 1_000)
    time.wall += 3_600_000_000
    assert store.expire_leases() == 0
    assert other_store(open_log, time).expire_leases() == 0
    time.wall -= 7_200_000_000
    time.pass_ms(1_000)
    assert store.expire_leases() == 1


def test_only_who_leads_expires(open_log: OpenLog, time: ManualClock) -> None:
    class Following:
        leading = False
        leader_id = "another"

        def read_barrier(self) -> None:
            pass

    store = ConsensusStore(open_log(), time=time, leadership=Following())
    store.put_with_ttl("/a", b"", 1)
    time.pass_ms(1_000)
    assert store.expire_leases() == 0
    assert store.leadership.leader_id == "another"


def test_a_watch_tells_what_happens_below_its_prefix_in_order(
    store: ConsensusStore, open_log: OpenLog, time: ManualClock
) -> None:
    other = other_store(open_log, time)
    store.put("/w/before", b"")
    watch = other.watch("/w/")
    lease = store.grant_lease(1_000)
    store.put("/w/a", b"1", lease.lease_id)
    store.put("/elsewhere", b"")
    store.put("/w/a", b"2", lease.lease_id)
    store.delete("/w/before")
    store.revoke_lease(lease.lease_id)
    assert watch.take() == []
    other.poll()
    events = watch.take()
    assert told(events) == [("/w/a", b"1"), ("/w/a", b"2"), ("/w/before", None), ("/w/a", None)]
    assert isinstance(events[-1], KeyDeleted) and events[-1].record.version == 2
    assert watch.take() == []
    other.delete_prefix("/elsewhere/")
    other.put("/w/own", b"")
    assert told(watch.take()) == [("/w/own", b"")]


def test_a_watch_goes_on_from_a_revision(store: ConsensusStore) -> None:
    revisions = [store.put(f"/w/{number}", b"").mod_revision for number in range(5)]
    assert told(store.watch("/w/", revisions[2]).take()) == [(f"/w/{number}", b"") for number in (2, 3, 4)]
    assert told(store.watch("/w/", revisions[4] + 1).take()) == []
    assert store.watch("/w/", 0).take() == [Resync(store.revision)]


def test_a_watch_that_fell_behind_is_told_to_read_again(open_log: OpenLog, time: ManualClock) -> None:
    store = ConsensusStore(open_log(), time=time, history_events_max=3)
    watch, level = store.watch("/w/"), store.watch("/w/")
    first = store.put("/w/0", b"")
    for number in range(1, 5):
        store.put(f"/w/{number}", b"")
        assert told(level.take())[-1] == (f"/w/{number}", b"")
    assert watch.take() == [Resync(store.revision)]
    store.put("/w/5", b"")
    assert told(watch.take()) == [("/w/5", b"")]
    assert store.watch("/w/", first.mod_revision).take() == [Resync(store.revision)]


def test_topics_and_keys_are_in_one_order_and_all_changes_are_handed_on(
    open_log: OpenLog, time: ManualClock
) -> None:
    seen: list[Change] = []
    log = open_log()
    store = ConsensusStore(log, time=time, on_changes=seen.extend)
    topic = CreateTopic(topic="/default/t", policy=TopicPolicy(), created_us=1)
    outcomes = log.propose_many([topic, CreateNamespace(namespace="n"), topic])
    record = store.put("/a", b"")
    assert [type(change).__name__ for change in seen] == ["TopicCreated", "NamespaceCreated", "KeyPut"]
    assert isinstance(seen[0], TopicCreated) and outcomes[0] == seen[0].record
    assert outcomes[1] is None and isinstance(outcomes[2], TopicExists)
    assert record.mod_revision == log.version
    assert log.propose(DeleteTopic(topic="/default/t")) == seen[0].record
    with pytest.raises(CallerError):
        log.propose(DeleteTopic(topic="/default/t"))
