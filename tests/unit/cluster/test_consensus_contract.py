"""The contract of the Consensus port, over every log that keeps the metadata machine.

A *kind* is a context manager that gives ``open``: each call opens another log of the same order, as
another process or member would.  Another kind of log is one more entry of KINDS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from danube.cluster.control.cluster_log import ClusterLog
from danube.cluster.log.local_log import LocalLog
from danube.core.cluster.commands import (
    Allocated,
    AllocateId,
    CompareAndSet,
    DeleteKey,
    DeletePrefix,
    GrantLease,
    KeyDeleted,
    KeyPut,
    KeyRecord,
    Lease,
    PutKey,
    RenewLease,
    RevokeLease,
)
from danube.core.metadata.commands import Change, CreateNamespace, CreateTopic, DeleteTopic, TopicCreated
from danube.core.metadata.ports import Consensus
from danube.core.partition.policy import TopicPolicy
from danube.errors import CallerError, InvalidName, LimitExceeded, NotFound, TopicExists, WrongState
from danube.limits import METADATA_VALUE_BYTES_MAX
from tests.unit.cluster.control.test_cluster_log import Controller

if TYPE_CHECKING:
    from danube.cluster.etcd.calls import EtcdPlace
    from tests.etcd_server import EtcdServer
    from tests.unit.raft_members import RaftMembers

OpenLog = Callable[[], Consensus]
Kind = Callable[[pytest.FixtureRequest, Path], AbstractContextManager[OpenLog]]


@contextmanager
def local(request: pytest.FixtureRequest, directory: Path) -> Iterator[OpenLog]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(LocalLog(directory))


@contextmanager
def controller(request: pytest.FixtureRequest, directory: Path) -> Iterator[OpenLog]:
    """A worker's log behind a controller that leads alone."""
    directory.mkdir()
    made = Controller(directory)
    try:
        with ExitStack() as stack:
            yield lambda: stack.enter_context(ClusterLog(made.directory, made.address))
    finally:
        made.stop()


@contextmanager
def members(
    request: pytest.FixtureRequest, directory: Path, fixture: str = "raft_members"
) -> Iterator[OpenLog]:
    """Workers' logs at three members, each the next one's; all tests of a module share one cluster."""
    cluster: RaftMembers = request.getfixturevalue(fixture)
    try:
        with ExitStack() as stack:
            yield lambda: stack.enter_context(cluster.log())
    finally:
        cluster.clear()


KINDS: dict[str, Kind] = {
    "local": local,
    "controller": controller,
    "members": members,
    "etcd": partial(members, fixture="etcd_members"),
}


@pytest.fixture(scope="module")
def raft_members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RaftMembers]:
    """Three members that vote."""
    pytest.importorskip("raftos", reason="a cluster needs raftos; scripts/setup installs it")
    yield from _members(tmp_path_factory.mktemp("members"))


@pytest.fixture(scope="module")
def etcd_members(tmp_path_factory: pytest.TempPathFactory, etcd_server: EtcdServer) -> Iterator[RaftMembers]:
    """Three members that agree through a real etcd."""
    place = etcd_server.place(etcd_server.new_prefix())
    yield from _members(tmp_path_factory.mktemp("etcd"), place)


def _members(directory: Path, etcd: EtcdPlace | None = None) -> Iterator[RaftMembers]:
    from tests.unit.raft_members import RaftMembers

    cluster = RaftMembers(directory, etcd)
    yield cluster
    cluster.stop()


@pytest.fixture(params=sorted(KINDS))
def open_log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenLog]:
    with KINDS[request.param](request, tmp_path / "metadata") as opened:
        yield opened


@pytest.fixture
def log(open_log: OpenLog) -> Consensus:
    log = open_log()
    log.refresh()
    return log


def put(log: Consensus, key: str, value: bytes = b"", lease_id: int = 0) -> KeyRecord:
    record = log.propose(PutKey(key=key, value=value, lease_id=lease_id))
    assert isinstance(record, KeyRecord)
    return record


def find(log: Consensus, key: str) -> KeyRecord | None:
    log.refresh()
    return log.state.cluster.keys.find(key)


def keys_below(log: Consensus, prefix: str) -> list[str]:
    log.refresh()
    return [record.key for record in log.state.cluster.keys.below(prefix)]


def test_what_is_put_is_read_with_its_version_and_revisions(log: Consensus) -> None:
    first = put(log, "/a", b"1")
    second = put(log, "/a", b"2")
    assert (first.version, second.version) == (1, 2)
    assert second.create_revision == first.mod_revision < second.mod_revision == log.version
    assert find(log, "/a") == second
    assert log.propose(DeleteKey(key="/a")) == second
    assert log.propose(DeleteKey(key="/a")) is None and find(log, "/a") is None
    again = put(log, "/a", b"3")
    assert again.version == 1 and again.create_revision == again.mod_revision > second.mod_revision


def test_another_log_sees_it_when_it_refreshes_and_everyone_who_opens_later(
    log: Consensus, open_log: OpenLog
) -> None:
    other = open_log()
    record = put(log, "/a/b", b"1")
    put(log, "/ab")
    assert find(other, "/a/b") == record
    other.propose(DeletePrefix(prefix="/a/"))
    assert keys_below(log, "/") == keys_below(open_log(), "/") == ["/ab"]


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
    log: Consensus, open_log: OpenLog, value: bytes
) -> None:
    record = put(log, "/values/one", value)
    assert record.value == value
    assert find(open_log(), "/values/one") == record
    compared = CompareAndSet(key="/values/one", value=value, revision=record.mod_revision)
    assert isinstance(log.propose(compared), KeyRecord)


def test_a_value_over_the_limit_is_refused_before_the_log(log: Consensus) -> None:
    version = log.version
    with pytest.raises(LimitExceeded):
        put(log, "/big", bytes(METADATA_VALUE_BYTES_MAX + 1))
    assert find(log, "/big") is None and log.version == version


@pytest.mark.parametrize("key", ["", "/", "a", "/a/", "/a\n", "/\0", "/" + "x" * 1024, "/\udc80"])
def test_what_is_no_key_is_refused(log: Consensus, key: str) -> None:
    for command in (PutKey(key=key, value=b""), DeleteKey(key=key), AllocateId(counter=key)):
        with pytest.raises(InvalidName):
            log.propose(command)


def test_of_two_that_compare_one_wins(log: Consensus, open_log: OpenLog) -> None:
    other = open_log()
    made = log.propose(CompareAndSet(key="/lock", value=b"mine", revision=0))
    assert isinstance(made, KeyRecord)
    with pytest.raises(WrongState):
        other.propose(CompareAndSet(key="/lock", value=b"theirs", revision=0))
    assert find(other, "/lock") == made
    other.propose(CompareAndSet(key="/lock", value=b"theirs", revision=-1, expected=b"mine"))
    assert other.propose(CompareAndSet(key="/lock", value=None, revision=-1, expected=b"theirs")) is not None
    assert find(log, "/lock") is None


def test_numbers_are_given_once_to_whoever_asks(log: Consensus, open_log: OpenLog) -> None:
    other = open_log()
    numbers = [one.propose(AllocateId(counter="/ids/a")) for one in (log, other, other, log)]
    assert numbers == [Allocated("/ids/a", number) for number in (1, 2, 3, 4)]
    assert log.propose(AllocateId(counter="/ids/b")) == Allocated("/ids/b", 1)
    assert open_log().propose(AllocateId(counter="/ids/a")) == Allocated("/ids/a", 5)


def test_a_lease_is_renewed_by_anyone_and_takes_its_keys_when_it_is_revoked(
    log: Consensus, open_log: OpenLog
) -> None:
    other = open_log()
    granted = log.propose(GrantLease(lease_id=7, ttl_ms=60_000))
    renewed = other.propose(RenewLease(lease_id=7))
    assert isinstance(granted, Lease) and isinstance(renewed, Lease)
    assert granted.expires_us <= renewed.expires_us
    put(log, "/held/a", lease_id=7)
    put(other, "/held/b")
    other.propose(RevokeLease(lease_id=7))
    assert keys_below(log, "/held/") == ["/held/b"]
    for command in (RenewLease(lease_id=7), RevokeLease(lease_id=7), PutKey(key="/c", value=b"", lease_id=7)):
        with pytest.raises(NotFound):
            log.propose(command)


def test_every_change_is_told_once_in_order_to_each_log(log: Consensus, open_log: OpenLog) -> None:
    other = open_log()
    other.refresh()
    put(log, "/w/a", b"1")
    put(log, "/w/a", b"2")
    log.propose(DeleteKey(key="/w/a"))
    told = other.refresh()
    assert [change for change in told if isinstance(change, KeyPut | KeyDeleted)] == told
    assert [type(change) for change in told] == [KeyPut, KeyPut, KeyDeleted]
    assert other.refresh() == [] and log.refresh() == told


def test_topics_and_keys_are_in_one_order_and_refusals_take_their_places(log: Consensus) -> None:
    topic = CreateTopic(topic="/default/t", policy=TopicPolicy(), created_us=1)
    outcomes = log.propose_many([topic, CreateNamespace(namespace="n"), topic])
    record = put(log, "/a", b"")
    seen: list[Change] = log.refresh()
    assert [type(change).__name__ for change in seen] == ["TopicCreated", "NamespaceCreated", "KeyPut"]
    assert isinstance(seen[0], TopicCreated) and outcomes[0] == seen[0].record
    assert outcomes[1] is None and isinstance(outcomes[2], TopicExists)
    assert record.mod_revision == log.version
    assert log.propose(DeleteTopic(topic="/default/t")) == seen[0].record
    with pytest.raises(CallerError):
        log.propose(DeleteTopic(topic="/default/t"))
