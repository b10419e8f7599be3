"""A cluster's log in a real etcd: order, lost answers, who may write, growth, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import pytest

from danube.cluster.etcd import log as etcd_log
from danube.cluster.etcd.calls import EtcdCalls, Guard, Put
from danube.cluster.etcd.log import Entry, EtcdLog, Head
from danube.errors import Conflict, Damage, OutcomeUnknown, StorageIncompatible
from tests.etcd_server import EtcdServer

LEASE_S = 60


class LossyCalls(EtcdCalls):
    """Loses the answers of transactions: before (0) or after (1) they are carried out; 2 answers."""

    plan: Sequence[int] = ()

    def put_if(self, guards: Sequence[Guard], puts: Sequence[Put]) -> int | None:
        what, self.plan = (self.plan[0], self.plan[1:]) if self.plan else (2, ())
        answer = None if what == 0 else super().put_if(guards, puts)
        if what == 2:
            return answer
        raise OutcomeUnknown("lost")


class Writer:
    """A log whose writer was elected."""

    def __init__(self, server: EtcdServer, prefix: str, node_id: str = "1") -> None:
        self.calls = LossyCalls([server.endpoint])
        self.log = EtcdLog(self.calls, prefix)
        self.log.make_cluster("c1", "test")
        self.log.add_member(node_id, f"h:{node_id}")
        self.lease_id = self.calls.grant_lease(LEASE_S)
        self.log.read()
        assert self.log.campaign(node_id, self.lease_id)
        self.known = self.log.read()

    def append(self, content: bytes) -> bool:
        return self.log.append(self.known.head.term, content)


@pytest.fixture
def prefix(etcd_server: EtcdServer) -> str:
    return etcd_server.new_prefix()


@pytest.fixture
def writer(etcd_server: EtcdServer, prefix: str) -> Iterator[Writer]:
    made = Writer(etcd_server, prefix)
    yield made
    made.log.close()


def entries(server: EtcdServer, prefix: str) -> list[Entry]:
    """All that a reader finds."""
    log, found = server.log(prefix), []
    end = log.read().head.index
    while len(found) < end:
        found += log.entries_after(len(found), end)
    log.close()
    return found


def keys_below(server: EtcdServer, prefix: str) -> list[str]:
    calls = server.calls()
    found, more = calls.get_range(prefix.encode(), prefix[:-1].encode() + b"0", 1_000)
    calls.close()
    assert not more
    return [one.key.decode().removeprefix(prefix) for one in found]


def put(server: EtcdServer, key: str, value: bytes) -> None:
    calls = server.calls()
    calls.put(key.encode(), value)
    calls.close()


def test_what_is_appended_is_read_in_order_whatever_its_size(
    etcd_server: EtcdServer, prefix: str, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_log, "PAGE_BYTES", 1_000_000)
    contents = [b"a", bytes(range(256)) * 12_000, b"", *(b"%d" % number for number in range(50))]
    for content in contents:
        assert writer.append(content)
    assert entries(etcd_server, prefix) == [Entry(n, 1, one) for n, one in enumerate(contents, 1)]
    assert len([name for name in keys_below(etcd_server, prefix) if name.startswith("pieces/")]) == 6


def test_the_bytes_in_etcd_are_those_of_the_format(etcd_server: EtcdServer, prefix: str) -> None:
    """docs/formats/metadata.md; what a broker has written is read by all later ones."""
    written = bytes.fromhex("9a02a26331a16e0705a1640203a139c4083132333435363738")
    head = Head(
        cluster_id="c1", name="n", index=7, snapshot_index=5, snapshot_directory="d", snapshot_chunks=2,
        term=3, leader_id="9", attempt=b"12345678",
    )  # fmt: skip
    assert msgspec.msgpack.encode(head) == written
    put(etcd_server, prefix + "head", written)
    put(etcd_server, f"{prefix}entries/{6:020}", bytes.fromhex("000000000000000300") + b"six")
    reference = bytes.fromhex("00000000000000030192a16402")
    put(etcd_server, f"{prefix}entries/{7:020}", reference)
    for number, piece in enumerate((b"se", b"ven")):
        put(etcd_server, f"{prefix}pieces/d/{number:06}", piece)
        put(etcd_server, f"{prefix}snapshots/d/{number:06}", piece)
    log = etcd_server.log(prefix)
    assert log.read().head == head
    assert log.entries_after(5, 7) == [Entry(6, 3, b"six"), Entry(7, 3, b"seven")]
    assert log.snapshot(head) == b"seven"
    log.close()


@pytest.mark.parametrize(
    "plan, stored",
    [((0,), False), ((1,), True), ((0, 1), None), ((0, 0), None), ((1, 0), None), ((1, 1), True)],
)
def test_a_lost_answer_is_found_out_or_said_to_be_unknown(
    etcd_server: EtcdServer, prefix: str, writer: Writer, plan: Sequence[int], stored: bool | None
) -> None:
    assert writer.append(b"before")
    writer.calls.plan = plan
    if stored is None or plan == (1, 1):
        with pytest.raises(OutcomeUnknown):
            writer.append(b"lost")
    else:
        assert writer.append(b"lost") is stored
    writer.log.read()
    assert writer.append(b"after")
    contents = [one.content for one in entries(etcd_server, prefix)]
    assert contents == [b"before", *([b"lost"] if plan[0] else []), b"after"]


def test_an_attempt_that_arrives_late_is_not_taken_for_a_later_one(writer: Writer) -> None:
    held: list[tuple[Sequence[Guard], Sequence[Put]]] = []
    plain = EtcdCalls.put_if

    def hold(guards: Sequence[Guard], puts: Sequence[Put]) -> None:
        held.append((guards, puts))
        raise OutcomeUnknown("lost")

    def arrive_first(guards: Sequence[Guard], puts: Sequence[Put]) -> int | None:
        writer.calls.put_if = lambda *asked: plain(writer.calls, *asked)  # type: ignore[method-assign]
        assert plain(writer.calls, *held[0]) is not None
        assert plain(writer.calls, guards, puts) is None
        raise OutcomeUnknown("lost")

    writer.calls.put_if = hold  # type: ignore[method-assign]
    with pytest.raises(OutcomeUnknown):
        writer.append(b"first")
    writer.calls.put_if = arrive_first  # type: ignore[method-assign]
    with pytest.raises(OutcomeUnknown):
        writer.append(b"second")
    writer.log.read()
    assert [one.content for one in writer.log.entries_after(0, 1) or []] == [b"first"]


def test_who_was_overtaken_stores_nothing(etcd_server: EtcdServer, prefix: str, writer: Writer) -> None:
    assert writer.append(b"one")
    assert not writer.log.campaign("1", writer.lease_id), "there is a leader"
    writer.calls.revoke_lease(writer.lease_id)
    assert writer.log.read().leader_id == "" and not writer.calls.keep_lease(writer.lease_id)
    writer.calls.revoke_lease(writer.lease_id)
    other = Writer(etcd_server, prefix, "2")
    assert (other.known.leader_id, other.known.head.term) == ("2", 2)
    assert not writer.log.append(1, b"late")
    assert not writer.log.adopt_snapshot(1, "d", 1)
    assert other.append(b"two")
    assert [(one.term, one.content) for one in entries(etcd_server, prefix)] == [(1, b"one"), (2, b"two")]
    other.log.close()


def test_entries_are_replaced_by_a_snapshot_in_pieces(
    etcd_server: EtcdServer, prefix: str, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_log, "CHUNK_BYTES", 100)
    monkeypatch.setattr(etcd_log, "INLINE_BYTES_MAX", 10)
    snapshot = bytes(range(256)) * 3
    calls = etcd_server.calls()
    for number in range(6):
        assert writer.append(b"%d" % number * 20)
    writer.log.put_snapshot(calls, 3, b"its writer died")
    for index in (4, 5):
        assert writer.log.adopt_snapshot(index, *writer.log.put_snapshot(calls, index, snapshot))
        writer.log.delete_before(calls, writer.log.known.head)
    names = keys_below(etcd_server, prefix)
    assert [name for name in names if name.startswith("entries/")] == [f"entries/{6:020}"]
    assert {name.split("/")[1][:20] for name in names if name.startswith("pieces/")} == {f"{6:020}"}
    assert {name.split("/")[1][:20] for name in names if name.startswith("snapshots/")} == {f"{5:020}"}
    late = etcd_server.log(prefix)
    head = late.read().head
    assert late.entries_after(0, head.index) is None
    assert (head.snapshot_index, late.snapshot(head)) == (5, snapshot)
    assert late.entries_after(5, head.index) == [Entry(6, 1, b"5" * 20)]
    assert late.snapshot(msgspec.structs.replace(head, snapshot_directory="gone")) is None
    late.close()
    calls.close()


def test_members_come_move_and_go(
    etcd_server: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = etcd_server.log(prefix)
    assert log.read().revision == 0
    log.make_cluster("c1", "test")
    log.make_cluster("c2", "test")
    assert log.read().head.cluster_id == "c1", "whoever is first makes it"
    log.add_member("1", "h:1")
    log.add_member("2", "h:2")
    with pytest.raises(Conflict, match="node 1 is at h:1"):
        log.add_member("3", "h:1")
    log.move_member("1", "h:9")
    log.remove_member("2")
    log.move_member("2", "h:8")
    assert log.read().members == {"1": "h:9"}
    monkeypatch.setattr(etcd_log, "RAFT_MEMBERS_MAX", 1)
    with pytest.raises(Conflict, match="the most"):
        log.add_member("4", "h:4")
    log.close()


@pytest.mark.parametrize(
    "name, value, error, says",
    [
        ("leader", b"x", StorageIncompatible, "no cluster's"),
        ("head", b"\xc1", StorageIncompatible, "not of a cluster"),
        ("head", b"text", StorageIncompatible, "not of a cluster"),
        ("head", msgspec.msgpack.encode([1, 0, 0, "", 0]), StorageIncompatible, "format 1"),
        ("head", msgspec.msgpack.encode([3]), StorageIncompatible, "format 3"),
        ("head", msgspec.msgpack.encode([2, 7]), Damage, "cannot be read"),
    ],
)
def test_a_prefix_that_is_anothers_is_refused(
    etcd_server: EtcdServer, prefix: str, name: str, value: bytes, error: type[Damage], says: str
) -> None:
    put(etcd_server, prefix + name, value)
    log = etcd_server.log(prefix)
    with pytest.raises(error, match=says):
        log.read()
    log.close()


@pytest.mark.parametrize(
    "value, error", [(bytes(8) + b"\2", StorageIncompatible), (bytes(8) + b"\1\xc1", Damage)]
)
def test_an_entry_that_cannot_be_read_is_refused(
    etcd_server: EtcdServer, prefix: str, writer: Writer, value: bytes, error: type[Damage]
) -> None:
    put(etcd_server, f"{prefix}entries/{1:020}", value)
    with pytest.raises(error):
        writer.log.entries_after(0, 1)
    put(etcd_server, f"{prefix}entries/{1:020}", bytes(8) + b"\1" + msgspec.msgpack.encode(("gone", 1)))
    assert writer.log.entries_after(0, 1) is None
