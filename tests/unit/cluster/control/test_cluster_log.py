"""A worker's metadata in a cluster: what LocalLog promises, over a controller's socket and its copy."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from danube.cluster.control.calls import (
    Barrier,
    Failed,
    Propose,
    Proposed,
    Reached,
    decode_outcomes,
    decode_request,
    encode,
    encode_outcomes,
    sent_error,
)
from danube.cluster.control.cluster_log import ClusterLog, copy_exists
from danube.cluster.control.door import serve_host
from danube.cluster.control.proposer import Proposer
from danube.cluster.log import applied_log
from danube.cluster.log.applied_log import AppliedLog
from danube.cluster.log.local_log import LocalLog
from danube.cluster.log.node_files import MEMBER, NodeRecord, check_journal, load_node, store_node
from danube.core.cluster.commands import Agreed, Allocated, AllocateId, PutKey
from danube.core.metadata.commands import (
    CreateNamespace,
    CreateTopic,
    DeleteTopic,
    NamespaceCreated,
    TopicCreated,
    TopicDeleted,
    TopicRecord,
    decode_commands,
    encode_command,
    join_commands,
)
from danube.core.metadata.ports import Consensus
from danube.core.partition.policy import FailurePolicy, TopicPolicy
from danube.errors import (
    AlreadyRunning,
    ClosedError,
    ConnectionFailed,
    Damage,
    DanubeError,
    InvariantBroken,
    LimitExceeded,
    NotFound,
    OutcomeUnknown,
    StorageFailed,
    StorageFull,
    StorageIncompatible,
    TopicExists,
    TopicNotFound,
)
from tests.fakes.raft_engine import FakeEngine


def create(name: str, ensure: bool = False, policy: TopicPolicy | None = None) -> CreateTopic:
    return CreateTopic(topic=f"/default/{name}", policy=policy or TopicPolicy(), created_us=7, ensure=ensure)


def entry(*commands: CreateTopic | AllocateId, origin: str = "", sequence: int = 0) -> bytes:
    agreed = Agreed(index=1, term=1, now_us=1, origin=origin, sequence=sequence)
    return join_commands([encode_command(agreed), *map(encode_command, commands)])


class Controller(threading.Thread):
    """A controller's socket over an engine in memory, on a loop and a thread of its own."""

    def __init__(self, directory: Path) -> None:
        super().__init__(daemon=True)
        self.directory = directory / "metadata"
        self.address = str(directory / "controller.sock")
        self.requests: list[object] = []
        self.lose_answers = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self.start()
        assert self._ready.wait(10)

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._machine = AppliedLog(self.directory)
        if not self._machine.visible:
            self._machine.publish()
        self._proposer = Proposer(FakeEngine(self._machine), self._machine, print)
        self._proposer.lead()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.bind(self.address)
        listener.listen()
        server = await serve_host(listener, self._asked)
        self._ready.set()
        await self._stopping.wait()
        server.close()
        await asyncio.sleep(0.01)
        self._proposer.resign("")
        self._machine.close()
        Path(self.address).unlink(missing_ok=True)  # from Python 3.13 on asyncio has removed it

    async def _asked(self, body: bytes) -> bytes:
        request = decode_request(body)
        self.requests.append(request)
        try:
            if isinstance(request, Barrier):
                return encode(Reached(self._machine.version))
            assert isinstance(request, Propose)
            commands = decode_commands(request.commands)
            outcomes = await self._proposer.propose(request.origin, request.sequence, commands)
            if self.lose_answers:
                self.lose_answers -= 1
                await asyncio.sleep(3600)
            return encode(Proposed(self._machine.version, encode_outcomes(outcomes)))
        except DanubeError as error:
            return encode(Failed(sent_error(error)))

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self.join(10)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    made = Controller(tmp_path)
    yield made
    if made.is_alive():
        made.stop()


def test_it_is_the_consensus_port(controller: Controller) -> None:
    with ClusterLog(controller.directory, controller.address) as log:
        consensus: Consensus = log
        record = consensus.propose(create("a"))
        assert record == TopicRecord("/default/a", 1, 0, TopicPolicy(), 7)
        assert log.state.topic("/default/a") == record
        with pytest.raises(TopicExists):
            consensus.propose(create("a"))
        with pytest.raises(TopicNotFound):
            log.propose(DeleteTopic(topic="/default/b"))
        assert log.propose(create("a", ensure=True)) == record
        assert log.propose(AllocateId(counter="/c")) == Allocated("/c", 1)
        policy = TopicPolicy(failure=FailurePolicy(poison="dead_letter", dead_letter_topic="x" * 20_000))
        with pytest.raises(LimitExceeded):
            log.propose(create("large", policy=policy))
        assert log.propose_many([]) == []
        log.read_barrier()


def test_every_change_is_told_once_to_everyone_in_order(controller: Controller) -> None:
    directory, address = controller.directory, controller.address
    with ClusterLog(directory, address) as one, ClusterLog(directory, address) as two:
        a = one.propose(create("a"))
        assert two.refresh() == [TopicCreated(a)]
        two.propose(CreateNamespace(namespace="team"))
        b = two.propose(create("b"))
        one.propose(DeleteTopic(topic="/default/a"))
        expected = [NamespaceCreated("team"), TopicCreated(b), TopicDeleted(a)]
        assert one.refresh() == [TopicCreated(a), *expected]
        assert two.refresh() == expected
        assert one.refresh() == two.refresh() == []


def test_many_are_split_into_proposals_that_fit(controller: Controller) -> None:
    with ClusterLog(controller.directory, controller.address) as log:
        outcomes = log.propose_many([create(f"t{number}") for number in range(300)])
        assert all(isinstance(outcome, TopicRecord) for outcome in outcomes)
        outcomes = log.propose_many([PutKey(key=f"/k{n}", value=bytes(900_000)) for n in range(10)])
        assert not any(isinstance(outcome, DanubeError) for outcome in outcomes)
        assert len(controller.requests) >= 3 + 3


def test_an_answer_that_was_lost_is_asked_for_again_and_nothing_is_done_twice(
    controller: Controller, tmp_path: Path
) -> None:
    controller.lose_answers = 1
    with ClusterLog(controller.directory, controller.address) as log:
        outcomes: list[object] = []
        asking = threading.Thread(target=lambda: outcomes.append(log.propose(AllocateId(counter="/c"))))
        asking.start()
        while not controller.requests:
            asking.join(0.01)
        controller.stop()
        again = Controller(tmp_path)
        asking.join(10)
        assert outcomes == [Allocated("/c", 1)], "the same number, from the next controller"
        assert log.propose(AllocateId(counter="/c")) == Allocated("/c", 2)
        again.stop()


def test_without_an_answer_the_outcome_is_not_known(controller: Controller) -> None:
    controller.lose_answers = 9
    with ClusterLog(controller.directory, controller.address, propose_timeout_s=0.1) as log:
        with pytest.raises(OutcomeUnknown):
            log.propose(create("a"))
        controller.stop()
        with pytest.raises(ConnectionFailed):
            log.propose(create("b"))


def test_a_copy_whose_beginning_is_damaged_is_none(tmp_path: Path) -> None:
    """The controller makes it anew; until then nobody ends for it."""
    (tmp_path / "metadata.log").write_bytes(bytes(64))
    assert not copy_exists(tmp_path)


def test_readers_need_a_copy_and_go_on_without_a_controller(controller: Controller, tmp_path: Path) -> None:
    assert not copy_exists(tmp_path)
    with pytest.raises(NotFound):
        ClusterLog(tmp_path, "none")
    with ClusterLog(controller.directory, controller.address) as log:
        log.propose(create("a"))
    controller.stop()
    assert copy_exists(controller.directory)
    with ClusterLog(controller.directory, controller.address) as log:
        assert [record.topic for record in log.state.topics()] == ["/default/a"]
        assert log.refresh() == []
        log.close()
        with pytest.raises(ClosedError):
            log.propose(create("b"))


def test_a_reader_never_touches_what_lies_behind_the_mark(controller: Controller) -> None:
    with ClusterLog(controller.directory, controller.address) as log:
        log.propose(create("a"))
    path = controller.directory / "metadata.log"
    with path.open("ab") as file:
        file.write(b"half an entry")
    size = path.stat().st_size
    with ClusterLog(controller.directory, controller.address) as log:
        assert path.stat().st_size == size
        assert isinstance(log.propose(create("b")), TopicRecord)


# -- the copy -----------------------------------------------------------------------------------------


def test_the_copy_is_a_metadata_log_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    log = AppliedLog(tmp_path)
    assert not log.visible and log.applied_index == 0
    log.publish()
    log.apply(3, 2, entry(create("a"), origin="o", sequence=7))
    outcomes = log.apply(4, 2, entry(create("b"), AllocateId(counter="/c")))
    assert [type(one) for one in outcomes] == [TopicRecord, Allocated]
    snapshot = log.state.snapshot()
    log.close()
    with LocalLog(tmp_path, create=False) as reader:
        assert reader.state.snapshot() == snapshot
    again = AppliedLog(tmp_path)
    assert again.visible and again.state.snapshot() == snapshot
    assert (again.applied_index, again.state.cluster.agreement.term) == (4, 2), "stamped by the engine"
    remembered = again.remembered("o", 7)
    assert remembered is not None and [one.outcome for one in remembered] == [again.state.topic("/default/a")]
    with pytest.raises(InvariantBroken):
        again.apply(4, 2, entry(create("c")))
    again.close()


def test_what_was_written_and_not_marked_is_cut(tmp_path: Path) -> None:
    log = AppliedLog(tmp_path)
    log.publish()
    log.apply(1, 1, entry(create("a")))
    log.close()
    path = tmp_path / "metadata.log"
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(100))
    log = AppliedLog(tmp_path)
    assert path.stat().st_size == size and log.applied_index == 1
    log.close()


def test_a_copy_that_a_power_cut_left_damaged_is_no_copy_yet(tmp_path: Path) -> None:
    """It is never synced, so that is what can be left of it; the controller makes it anew."""
    log = AppliedLog(tmp_path)
    log.publish()
    for index in range(1, 4):
        log.apply(index, 1, entry(AllocateId(counter="/c")))
    log.stored(log.freeze()())
    log.apply(4, 1, entry(AllocateId(counter="/c")))
    log.close()
    path = tmp_path / "metadata.log"
    whole = path.read_bytes()
    assert copy_exists(tmp_path)
    for damaged in (b"", bytes(len(whole)), whole[:60], whole[:-8], whole[:60] + bytes(len(whole) - 60)):
        path.write_bytes(damaged)
        assert not copy_exists(tmp_path)
    for position in (*range(40, 43), *range(44, len(whole))):  # 43 is the snapshot's format
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert not copy_exists(tmp_path), position
    path.write_bytes(whole[:3] + b"9" + whole[4:])
    with pytest.raises(StorageIncompatible):
        copy_exists(tmp_path)


def test_a_damaged_copy_stays_until_a_newer_one_is_complete(tmp_path: Path) -> None:
    log = AppliedLog(tmp_path)
    log.publish()
    log.apply(1, 1, entry(create("a")))
    log.close()
    path = tmp_path / "metadata.log"
    content = bytearray(path.read_bytes())
    content[-30] ^= 1
    path.write_bytes(content)
    log = AppliedLog(tmp_path)
    assert not log.visible and log.applied_index == 0
    log.apply(1, 1, entry(create("a")))
    assert path.read_bytes() == bytes(content)
    log.publish()
    log.apply(2, 1, entry(create("b")))
    log.close()
    with LocalLog(tmp_path, create=False) as reader:
        assert reader.state.topic_count == 2


def test_a_snapshot_is_a_new_generation_that_readers_follow(tmp_path: Path) -> None:
    other = AppliedLog(tmp_path / "other")
    for index in range(1, 20):
        other.apply(index, 1, entry(create(f"t{index}")))
    log = AppliedLog(tmp_path / "one")
    log.publish()
    log.apply(1, 1, entry(create("t1")))
    with ClusterLog(tmp_path / "one", "none") as reader:
        snapshot = other.freeze()()
        log.restore(19, snapshot, log.thaw(snapshot))
        assert log.applied_index == 19
        assert len(reader.refresh()) >= 18
        log.apply(20, 2, entry(create("t20")))
        reader.refresh()
        assert reader.state.topic_count == 20
        with pytest.raises(InvariantBroken):
            empty = AppliedLog(tmp_path / "empty").freeze()()
            log.restore(21, empty, log.thaw(empty))
    log.close()
    other.close()


def test_the_copy_begins_anew_with_what_the_engine_stored_and_a_full_disk_only_delays_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AppliedLog(tmp_path)
    log.publish()
    path = tmp_path / "metadata.log"
    for index in range(1, 200):
        log.apply(index, 1, entry(AllocateId(counter="/c")))
    size = path.stat().st_size
    encode_state = log.freeze()
    log.apply(200, 1, entry(AllocateId(counter="/c")))
    snapshot = encode_state()
    log.apply(201, 1, entry(AllocateId(counter="/c")))
    with ClusterLog(tmp_path, "none") as reader:
        with monkeypatch.context() as full:
            full.setattr(os, "rename", failing)
            log.stored(snapshot)
        assert path.stat().st_size > size, "it goes on"
        encode_state = log.freeze()
        log.apply(202, 1, entry(AllocateId(counter="/c")))
        log.stored(encode_state())
        assert path.stat().st_size < size / 10
        log.apply(203, 1, entry(AllocateId(counter="/c")))
        assert reader.state.cluster.keys.last_number("/c") == 201
        reader.refresh()
        assert reader.state.cluster.keys.last_number("/c") == 203, "what came since the freeze is there"
    log.close()
    with LocalLog(tmp_path, create=False) as reader:
        assert reader.state.cluster.keys.last_number("/c") == 203


def test_a_copy_that_cannot_be_written_is_named_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bare OSError would be taken for that of a peer's socket, and nobody would ever see the copy again."""
    log = AppliedLog(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(os, "rename", failing)
        with pytest.raises(StorageFull, match="stored"):
            log.publish()
    assert not log.visible
    log.publish()
    log.apply(1, 1, entry(AllocateId(counter="/c")))
    snapshot = log.freeze()()
    with monkeypatch.context() as full:
        full.setattr(applied_log.log_file, "write_all", failing)
        with pytest.raises(StorageFull) as raised:
            log.apply(2, 1, entry(AllocateId(counter="/c")))
        assert raised.value.facts["file"] == str(tmp_path / "metadata.log") and raised.value.hint
    log.close()
    behind = AppliedLog(tmp_path)
    assert behind.state.snapshot() == snapshot
    behind.apply(2, 1, entry(AllocateId(counter="/c")))
    later = behind.freeze()()
    behind.close()
    ahead = AppliedLog(tmp_path / "other")
    ahead.publish()
    with monkeypatch.context() as full:
        full.setattr(os, "rename", failing)
        with pytest.raises(StorageFull):
            ahead.restore(2, later, ahead.thaw(later))
    ahead.close()


def test_garbage_is_collected_again_after_a_snapshot_was_read(tmp_path: Path) -> None:
    log = AppliedLog(tmp_path)
    log.thaw(log.freeze()())
    assert gc.isenabled()
    with pytest.raises(Damage):
        log.thaw(b"nothing")
    assert gc.isenabled()
    log.close()


def test_a_freeze_that_a_leaders_snapshot_overtook_changes_nothing(tmp_path: Path) -> None:
    other = AppliedLog(tmp_path / "other")
    other.apply(5, 1, entry(AllocateId(counter="/c"), AllocateId(counter="/c")))
    newer = other.freeze()()
    log = AppliedLog(tmp_path / "one")
    log.publish()
    log.apply(1, 1, entry(AllocateId(counter="/c")))
    older = log.freeze()()
    log.restore(5, newer, log.thaw(newer))
    log.stored(older)
    with ClusterLog(tmp_path / "one", "none") as reader:
        assert reader.state.cluster.keys.last_number("/c") == 2
    log.close()
    other.close()


def failing(*_: object) -> None:
    raise OSError(errno.ENOSPC, "full")


def test_one_controller_at_a_time(tmp_path: Path) -> None:
    log = AppliedLog(tmp_path)
    with pytest.raises(AlreadyRunning):
        AppliedLog(tmp_path)
    log.close()


def test_outcomes_cross_a_socket(tmp_path: Path) -> None:
    error = TopicExists("exists", why="because", hint="do", topic_id=4)
    sent = encode_outcomes([None, Allocated("/c", 3), error])
    nothing, record, raised = decode_outcomes(sent)
    assert (nothing, record) == (None, Allocated("/c", 3))
    assert isinstance(raised, TopicExists)
    assert (raised.what, raised.why, raised.hint, raised.facts) == (
        "exists",
        "because",
        "do",
        {"topic_id": 4},
    )


# -- who this node is ---------------------------------------------------------------------------------


def test_a_node_keeps_its_id_and_its_cluster(tmp_path: Path) -> None:
    record = load_node(tmp_path)
    assert load_node(tmp_path) == record and int(record.node_id) > 0
    store_node(tmp_path, NodeRecord(record.node_id, "c1", MEMBER))
    assert load_node(tmp_path) == NodeRecord(record.node_id, "c1", MEMBER)
    assert (tmp_path / "node_id").read_text().splitlines()[0] == record.node_id
    with pytest.raises(StorageFailed, match="journal"):
        check_journal(load_node(tmp_path), False, tmp_path)
    check_journal(load_node(tmp_path), True, tmp_path)


@pytest.mark.parametrize("text", ["", "x\n", "0\n", "12\ncluster\n", "12\ncluster a odd\n", "12", "-1\n"])
def test_a_node_file_that_was_changed_is_damage(tmp_path: Path, text: str) -> None:
    (tmp_path / "node_id").write_text(text)
    if text == "12":
        assert load_node(tmp_path).node_id == "12", "written by hand"
        return
    with pytest.raises(Damage):
        load_node(tmp_path)
    shutil.rmtree(tmp_path)


def test_what_is_remembered_of_origins_is_bounded_in_number_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applied_log, "ORIGINS_REMEMBERED_MAX", 3)
    log = AppliedLog(tmp_path)
    for index in range(1, 6):
        log.apply(index, 1, entry(AllocateId(counter="/c"), origin=f"o{index}", sequence=1))
    known = [index for index in range(1, 6) if log.remembered(f"o{index}", 1) is not None]
    assert known == [3, 4, 5], "the newest"
    monkeypatch.setattr(applied_log, "REMEMBERED_BYTES_MAX", 300)
    many = [AllocateId(counter=f"/{number}") for number in range(20)]
    log.apply(6, 1, entry(*many, origin="o4", sequence=2))
    known = [index for index in range(1, 6) if log.remembered(f"o{index}", 1) is not None]
    assert known == [] and log.remembered("o4", 2) is not None, "one is kept, however large"
    log.apply(7, 1, entry(AllocateId(counter="/c"), origin="o4", sequence=3))
    log.apply(8, 1, entry(AllocateId(counter="/c"), origin="o5", sequence=2))
    assert log.remembered("o4", 3) is not None, "its former size counts no more"
    assert log.remembered("o5", 2) is not None
    log.close()
