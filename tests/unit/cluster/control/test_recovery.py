"""One member goes on after the journals of most are gone, others come to it: steps, refusals, crashes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from danube.broker.processes.data_dir import DataDir
from danube.cli.main import root
from danube.cli.terminal.services import Services
from danube.cluster.control import recovery
from danube.cluster.control.calls import Introduction
from danube.cluster.control.formation import Formation
from danube.cluster.control.recovery import recover, refuse_unsound, rejoin, unfinished
from danube.cluster.control.survey import survey
from danube.cluster.log.applied_log import AppliedLog
from danube.cluster.log.node_files import MEMBER, NodeRecord, load_node, store_node
from danube.cluster.raft.disk import DirectoryDisk
from danube.cluster.raft.engine import Members
from danube.cluster.raft.entry import COMMAND, NOTHING, Entry, members_entry
from danube.cluster.raft.journal import Base, Identity, Journal, Promise, read_prefix
from danube.core.cluster.commands import Agreed
from danube.core.metadata.commands import Command, CreateTopic, encode_command, join_commands
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import TopicPolicy
from danube.core.placement.recovered import COMMANDS_AHEAD, recovery_of
from danube.errors import (
    Damage,
    InvalidArgument,
    NotFound,
    StorageFailed,
    StorageIncompatible,
    WrongState,
)
from danube.wal.tier.binding import bound_store, rebind, share, stored_identity
from tests.fakes.memory_store import MemoryStore
from tests.unit.failing_files import FailingFiles, Killed
from tests.unit.wal_samples import memory_directory

NODE, OTHER, OLD = "11", "22", "0ld0"
MEMBERS = Members({NODE: "a:7650", OTHER: "b:7650"})


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    with memory_directory(tmp_path) as directory:
        yield directory / "data"


def entry(*commands: Command, term: int = 3) -> Entry:
    agreed = Agreed(index=1, term=1, now_us=5)
    return Entry(term, COMMAND, join_commands([encode_command(one) for one in (agreed, *commands)]))


def topic(number: int) -> CreateTopic:
    return CreateTopic(topic=f"/default/t{number}", policy=TopicPolicy(), created_us=1)


def live(place: Path, *, topics: int = 6, applied: int = 3, snapshot_at: int = 0) -> list[Entry]:
    """A member of two: ``topics`` entries in its journal, of which the copy has the first ``applied``."""
    place.mkdir()
    store_node(place, NodeRecord(NODE, OLD, MEMBER))
    entries = [Entry(2, NOTHING, b""), *(entry(topic(number)) for number in range(1, topics + 1))]
    copy = AppliedLog(place / "metadata")
    copy.publish()
    journal = Journal(DirectoryDisk(place / "raft"))
    journal.create(Identity(OLD, NODE), MEMBERS)
    for index, one in enumerate(entries, 1):
        journal.promise(one.term, None)
        journal.put(index, [one])
        journal.sync()
        if one.kind == COMMAND and index <= applied + 1:
            copy.apply(index, one.term, one.content)
        if index == snapshot_at:
            base = Base(index, one.term, index, one.term, MEMBERS, 0)
            journal.complete(journal.stage(base, copy.freeze()()), Promise(one.term, None), [])
    journal.close()
    copy.close()
    return entries


def journal_file(place: Path) -> Path:
    return place / "raft" / "raft.log"


def flip(path: Path, position: int) -> bytes:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x40
    path.write_bytes(content)
    return bytes(content)


def position_of(place: Path, number: int) -> int:
    """Where the content of the entry that makes this topic lies."""
    return journal_file(place).read_bytes().index(f"/default/t{number}".encode())


def not_bound(place: Path, cluster_id: str, former_id: str) -> None:
    pass


def begun(place: Path) -> tuple[Journal, Any]:
    journal = Journal(DirectoryDisk(place / "raft"))
    return journal, journal.recover()


def topics_of(state: Metadata) -> list[str]:
    return [record.topic.rsplit("/", 1)[-1] for record in state.topics()]


def machine_of(place: Path) -> Metadata:
    """The machine that the member will start with."""
    journal, _ = begun(place)
    with_snapshot = Metadata.restore(journal.snapshot())
    journal.close()
    return with_snapshot


# -- looking ---------------------------------------------------------------------------------------


def test_what_lies_before_the_damage_is_read_and_nothing_behind_it(place: Path) -> None:
    live(place)
    damaged = flip(journal_file(place), position_of(place, 5))
    found = survey(place)
    assert found.state is not None and topics_of(found.state) == ["t1", "t2", "t3", "t4"]
    told = found.told()
    assert (told["journal"], told["last_index"], told["last_term"]) == ("damaged", 5, 3)
    assert told["damaged_position"] < position_of_bytes(damaged, b"/default/t6")
    assert (told["undecided_entries"], told["topics"], told["recoverable"]) == (1, 4, True)
    assert told["members"] == [f"{NODE} a:7650", f"{OTHER} b:7650"]
    assert journal_file(place).read_bytes() == damaged, "looking changes nothing"


def position_of_bytes(content: bytes, what: bytes) -> int:
    return content.index(what)


@pytest.mark.parametrize("position", [3, 12, 26])
def test_a_damaged_header_or_mark_costs_no_entry(place: Path, position: int) -> None:
    live(place)
    flip(journal_file(place), position)
    try:
        found = survey(place)
    except StorageIncompatible:
        assert position == 3, "it may be a newer version's"
        return
    assert found.state is not None and len(topics_of(found.state)) == 6
    assert found.prefix is not None and found.prefix.damage is not None


def test_a_cut_journal_is_read_to_its_end(place: Path) -> None:
    live(place)
    content = journal_file(place).read_bytes()
    journal_file(place).write_bytes(content[: position_of(place, 6)])
    found = survey(place)
    assert found.state is not None and topics_of(found.state)[-1] == "t5"


def test_every_bit_flip_leaves_a_beginning_of_what_was_agreed_on(place: Path) -> None:
    entries = live(place, applied=0)
    content = journal_file(place).read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        try:
            prefix = read_prefix(bytes(damaged), "raft.log")
        except StorageIncompatible:
            continue
        assert prefix.entries == entries[: len(prefix.entries)], position


def test_the_last_members_are_those_of_the_last_sound_entry(place: Path) -> None:
    live(place)
    journal, found = begun(place)
    journal.put(len(found.entries) + 1, [members_entry(3, Members({NODE: "c:1"}))])
    journal.sync()
    journal.close()
    assert survey(place).address == "c:1"


def test_the_copy_stands_in_for_a_damaged_snapshot(place: Path) -> None:
    live(place, applied=4, snapshot_at=3)
    flip(journal_file(place), position_of(place, 1))
    found = survey(place)
    assert found.prefix is not None and found.prefix.snapshot is None
    assert found.state is not None and topics_of(found.state) == ["t1", "t2", "t3", "t4"]
    assert found.address == "a:7650" and found.index == 5


def test_a_copy_that_is_further_than_the_sound_journal_counts(place: Path) -> None:
    live(place, applied=5)
    flip(journal_file(place), position_of(place, 2))
    found = survey(place)
    assert found.state is not None and topics_of(found.state) == ["t1", "t2", "t3", "t4", "t5"]


def test_a_damaged_copy_counts_as_far_as_it_is_sound(place: Path) -> None:
    live(place, applied=5, snapshot_at=0)
    flip(journal_file(place), 60)
    copy = place / "metadata" / "metadata.log"
    flip(copy, copy.read_bytes().index(b"/default/t4"))
    found = survey(place)
    assert found.state is not None and topics_of(found.state) == ["t1", "t2", "t3"]


def test_with_snapshot_and_copy_damaged_nothing_can_be_recovered(place: Path) -> None:
    live(place, applied=4, snapshot_at=3)
    flip(journal_file(place), position_of(place, 1))
    flip(place / "metadata" / "metadata.log", 10)
    assert not survey(place).told()["recoverable"]
    before = sorted(path for path in place.rglob("*") if path.name != "raft.lock")
    with pytest.raises(Damage, match=r"nothing of .* can be recovered"):
        recover(place, not_bound)
    assert sorted(path for path in place.rglob("*") if path.name != "raft.lock") == before


def test_who_is_no_member_is_told_so(place: Path) -> None:
    place.mkdir()
    with pytest.raises(NotFound, match="not the data directory of a member"):
        survey(place)
    store_node(place, NodeRecord(NODE))
    for action in (survey, rejoin):
        with pytest.raises(WrongState, match="part of no cluster"):
            action(place)
    store_node(place, NodeRecord(NODE, OLD, MEMBER))
    assert survey(place).told()["journal"] == "missing"
    with pytest.raises(Damage, match="can be recovered"):
        recover(place, not_bound)


def test_another_node_s_journal_is_refused(place: Path) -> None:
    live(place)
    store_node(place, NodeRecord("33", OLD, MEMBER))
    with pytest.raises(WrongState, match="journal is that of node 11"):
        survey(place)


# -- recovering ------------------------------------------------------------------------------------


def test_one_member_becomes_the_only_voter_of_a_new_cluster(place: Path) -> None:
    live(place)
    damaged = flip(journal_file(place), position_of(place, 5))
    told: list[tuple[Path, str, str]] = []
    plan = recover(place, lambda *words: told.append(words))
    assert load_node(place) == NodeRecord(NODE, plan.cluster_id, MEMBER) and plan.cluster_id != OLD
    assert told == [(place, plan.cluster_id, OLD)]
    journal, found = begun(place)
    assert found.identity == Identity(plan.cluster_id, NODE) and not found.entries
    assert found.base.members == Members({NODE: "a:7650"}) and found.base.index == 5 + COMMANDS_AHEAD
    assert found.promise == Promise(4, None) and found.base.term == 4
    journal.close()
    state = machine_of(place)
    assert topics_of(state) == ["t1", "t2", "t3", "t4"] and recovery_of(state).count == 1
    assert state.cluster.agreement.index == found.base.index
    assert (place / plan.kept / "raft" / "raft.log").read_bytes() == damaged, "it is kept"
    assert (place / plan.kept / "metadata" / "metadata.log").exists()
    assert unfinished(place) is None and not (place / "recovering").exists()


def test_the_address_may_have_to_be_given(place: Path) -> None:
    live(place, applied=6)
    flip(journal_file(place), 60)  # the first step, which says who the members are
    with pytest.raises(InvalidArgument, match="not known where"):
        recover(place, not_bound)
    recover(place, not_bound, "z:1")
    journal, found = begun(place)
    journal.close()
    assert found.base.members == Members({NODE: "z:1"})


def test_it_may_be_recovered_again(place: Path) -> None:
    live(place)
    first = recover(place, not_bound)
    second = recover(place, not_bound)
    assert (second.left, recovery_of(machine_of(place)).count) == (first.cluster_id, 2)


def test_a_member_that_runs_is_refused(place: Path) -> None:
    live(place)
    disk = DirectoryDisk(place / "raft")
    for action in (lambda: recover(place, not_bound), lambda: rejoin(place)):
        with pytest.raises(StorageFailed, match="a running member's"):
            action()
    disk.close()
    recover(place, not_bound)


def test_a_node_that_rejoins_keeps_its_id_and_its_partitions(place: Path) -> None:
    live(place)
    (place / "partitions" / "x").mkdir(parents=True)
    (place / "store").write_text("{}")
    damaged = flip(journal_file(place), 60)
    plan = rejoin(place)
    assert load_node(place) == NodeRecord(NODE, left=(OLD,)) and plan.cluster_id == ""
    assert not (place / "raft").exists() and not (place / "metadata").exists()
    assert not (place / "store").exists() and (place / "partitions" / "x").exists()
    assert (place / plan.kept / "raft" / "raft.log").read_bytes() == damaged
    with pytest.raises(WrongState, match="part of no cluster"):
        rejoin(place)


def test_a_node_that_let_go_of_a_cluster_is_never_part_of_it_again(place: Path) -> None:
    """There it may have voted, and has forgotten it."""
    live(place)
    rejoin(place)

    def decided(cluster_id: str) -> object:
        formation = Formation(None, load_node(place), seeds=(), join=("b:1",))  # type: ignore[arg-type]
        return formation._decide({"b:1": Introduction(OTHER, cluster_id, OTHER, MEMBERS)})

    assert decided(OLD) is None and decided("new") is not None
    store_node(place, NodeRecord(NODE, "new", MEMBER, ("a", "b")))
    assert load_node(place) == NodeRecord(NODE, "new", MEMBER, ("a", "b"))


def test_one_recovery_is_ended_before_another_begins(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live(place)

    def fails(*_: object) -> None:
        raise Killed

    with pytest.raises(Killed):
        recover(place, fails)
    with pytest.raises(WrongState, match="was begun"):
        rejoin(place)
    recover(place, not_bound)


@pytest.mark.parametrize("how", ["killed", "killed after"])
@pytest.mark.parametrize("what", ["recover", "rejoin"])
def test_cut_off_at_any_call_it_does_not_start_wrongly_and_is_done_by_the_next(
    place: Path, monkeypatch: pytest.MonkeyPatch, what: str, how: str
) -> None:
    failing = FailingFiles(monkeypatch)
    act: Callable[[Path], Any] = rejoin if what == "rejoin" else lambda one: recover(one, rebind)
    at = 0
    while True:
        one = place.with_name(f"{what}-{at}")
        live(one)
        (one / "store").write_text(json.dumps({"format": 1, "store_id": OLD, "created_us": 1}))
        damaged = flip(journal_file(one), position_of(one, 5))
        failing.arm(at, how)
        try:
            act(one)
            fired = failing.fired
        except Killed:
            fired = 1
        failing.disarm()
        if not fired:
            break
        starts_as_something_whole(one, what)
        try:
            act(one)
        except WrongState:
            assert what == "rejoin" and load_node(one).left == (OLD,)
        kept = [path for path in one.glob("left-*/raft*/raft.log") if path.read_bytes() == damaged]
        assert len(kept) == 1, "the damaged journal is kept, once"
        if what == "recover":
            assert topics_of(machine_of(one))[:4] == ["t1", "t2", "t3", "t4"]
            assert bound_store(one).store_id == load_node(one).cluster_id  # type: ignore[union-attr]
        else:
            assert load_node(one) == NodeRecord(NODE, left=(OLD,)) and not (one / "metadata").exists()
        assert unfinished(one) is None
        at += 1
    assert at > 8


def starts_as_something_whole(place: Path, what: str) -> None:
    """What a start would find: a refusal, or a member that is what it is to be."""
    node = load_node(place)
    journal = Journal(DirectoryDisk(place / "raft")) if journal_file(place).exists() else None
    try:
        found = journal.recover() if journal is not None else None
    except Damage:
        return
    finally:
        if journal is not None:
            journal.close()
    if found is None:
        assert node.state == MEMBER or (what == "rejoin" and node.left == (OLD,))
    else:
        assert found.identity == Identity(node.cluster_id, NODE) and node.cluster_id != OLD


def test_a_broker_does_not_start_on_a_damaged_journal_or_half_way(place: Path) -> None:
    live(place)
    refuse_unsound(place)
    flip(journal_file(place), position_of(place, 5))
    with pytest.raises(Damage, match="journal is damaged at position") as raised:
        refuse_unsound(place)
    assert "cluster recover" in raised.value.hint

    def fails(*_: object) -> None:
        raise Killed

    with pytest.raises(Killed):
        recover(place, fails)
    with pytest.raises(WrongState, match="was begun"):
        refuse_unsound(place)
    recover(place, not_bound)
    refuse_unsound(place)


@pytest.mark.parametrize("proofs", [("raft.id", "raft.log"), ("raft.id",), ("raft.log",)])
def test_a_member_without_its_node_id_is_told_which_file_is_missing(
    place: Path, proofs: tuple[str, ...]
) -> None:
    live(place)
    (place / "node_id").unlink()
    for name in {"raft.id", "raft.log"} - set(proofs):
        (place / "raft" / name).unlink()
    for look in (refuse_unsound, survey):
        with pytest.raises(Damage) as raised:
            look(place)
        error = raised.value
        assert error.facts["file"] == str(place / "node_id") in error.what and proofs[0] in error.why
        assert f"`{NODE}`" in error.hint and f"`cluster {OLD} member`" in error.hint
    (place / "node_id").write_text(f"{NODE}\ncluster {OLD} member\n")
    if "raft.log" in proofs:
        refuse_unsound(place)  # what the hint says helps
    (place / "node_id").unlink()
    for path in (place / "raft").iterdir():
        path.write_bytes(b"x")
    with pytest.raises(Damage, match="node_id is missing"):
        refuse_unsound(place)


def test_a_member_without_its_journal_is_refused_before_a_controller_starts(place: Path) -> None:
    live(place)
    journal_file(place).unlink()
    with pytest.raises(StorageFailed, match="the journal of node 11 is gone"):
        refuse_unsound(place)


# -- the store -------------------------------------------------------------------------------------


def test_the_store_goes_with_the_recovered_member_and_refuses_the_others(tmp_path: Path) -> None:
    store = MemoryStore()
    old, again, late = (tmp_path / name for name in ("old", "again", "late"))
    for one in (old, again, late):
        one.mkdir()
    share(store, old, OLD)
    share(store, late, OLD)
    rebind(old, "new", OLD)
    rebind(old, "new", OLD)
    share(store, old, "new")
    assert stored_identity(store).store_id == "new" == bound_store(old).store_id  # type: ignore[union-attr]
    share(store, old, "new")
    share(store, again, "new")  # rejoined: it has no binding
    with pytest.raises(WrongState):
        share(store, late, OLD)
    rebind(late, "other", OLD)
    with pytest.raises(WrongState):
        share(store, late, "other")  # a second member was recovered from the same cluster


def test_a_store_that_moved_very_often_is_still_known(tmp_path: Path) -> None:
    for number in range(120):
        rebind(tmp_path, f"{number:036d}", OLD)
    here = bound_store(tmp_path)
    assert here is not None and here.store_id == f"{119:036d}"


def test_a_member_that_is_recovered_twice_before_it_starts_finds_its_store(tmp_path: Path) -> None:
    store = MemoryStore()
    (tmp_path / "a").mkdir()
    share(store, tmp_path / "a", OLD)
    rebind(tmp_path / "a", "new", OLD)
    rebind(tmp_path / "a", "newer", "new")
    share(store, tmp_path / "a", "newer")
    assert stored_identity(store).store_id == "newer"  # type: ignore[union-attr]


def test_a_member_that_never_saw_the_store_takes_it_over_too(tmp_path: Path) -> None:
    store = MemoryStore()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    share(store, tmp_path / "a", OLD)
    rebind(tmp_path / "b", "new", OLD)
    share(store, tmp_path / "b", "new")
    assert stored_identity(store).store_id == "new"  # type: ignore[union-attr]


# -- the command -----------------------------------------------------------------------------------


def run(*words: str, exit_code: int = 0) -> Result:
    services = Services(environ={}, can_ask=lambda: False, shows_progress=lambda: False)
    result = CliRunner().invoke(root, ["cluster", "recover", *words], obj=services, prog_name="danube")
    assert result.exit_code == exit_code, result.output
    return result


def test_without_the_flag_it_tells_and_changes_nothing(place: Path) -> None:
    live(place)
    damaged = flip(journal_file(place), position_of(place, 5))
    told = run("--data-dir", str(place), "-o", "json", exit_code=2)
    assert json.loads(told.stdout)["last_index"] == 5 and "nothing was changed" in told.stderr
    assert "--unsafe-recover" in run("--data-dir", str(place), exit_code=2).stderr
    assert journal_file(place).read_bytes() == damaged and load_node(place).cluster_id == OLD


def test_the_flags_do_it(place: Path) -> None:
    live(place)
    shown = json.loads(run("--data-dir", str(place), "--unsafe-recover", "-o", "json").stdout)
    assert shown["cluster_id"] == load_node(place).cluster_id and Path(shown["kept"]).is_dir()
    shown = json.loads(run("--data-dir", str(place), "--rejoin", "-o", "json").stdout)
    assert load_node(place).left == (shown["left"],)


def test_refusals_and_their_exit_codes(place: Path) -> None:
    run("--data-dir", str(place), exit_code=3)
    assert not place.exists(), "a wrong path is not made a data directory"
    live(place)
    assert "for different nodes" in run("--unsafe-recover", "--rejoin", exit_code=2).stderr
    held = DataDir(place)
    for words in ((), ("--unsafe-recover",), ("--rejoin",)):
        assert "a broker is running" in run("--data-dir", str(place), *words, exit_code=4).stderr
    held.close()
    flip(journal_file(place), 60)
    flip(place / "metadata" / "metadata.log", 10)
    assert "cannot be recovered" in run("--data-dir", str(place), exit_code=2).stderr
    run("--data-dir", str(place), "--unsafe-recover", exit_code=12)
    store_node(place, NodeRecord(NODE))
    run("--data-dir", str(place), "--unsafe-recover", exit_code=4)


def test_one_that_was_cut_off_is_told_by_looking(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live(place)
    monkeypatch.setattr(recovery, "_finish_rejoin", lambda *_: None)
    run("--data-dir", str(place), "--rejoin")
    assert "--rejoin" in run("--data-dir", str(place), exit_code=2).stderr
    run("--data-dir", str(place), "--unsafe-recover", exit_code=4)
    monkeypatch.undo()
    run("--data-dir", str(place), "--rejoin")
    assert load_node(place).left == (OLD,)
