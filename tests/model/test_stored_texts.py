"""Every text file that is stored, and credentials in the metadata: what is written is read as it was.

`danube verify` has readers of its own; none of them may find a flaw in what a writer wrote.  Formats of bytes
are in test_stored_formats.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from danube.broker.mover.copies import DELETIONS_NAME, TopicDeletions
from danube.broker.processes import copied, data_dir, unbroken
from danube.broker.tiers.inheritance import OWNER_FILE, KeptOwner, write_owner
from danube.cluster.control import recovery
from danube.cluster.log.node_files import ETCD, FORMING, MEMBER, NODE_FILE, NodeRecord, load_node, store_node
from danube.core.metadata.commands import ApiKey, PutApiKey, Revocation, Revoke
from danube.core.metadata.credentials import REVOKED_KINDS
from danube.core.metadata.machine import Metadata
from danube.host import files
from danube.spark.jobs.export.state import ExportState, FilePlan, RoundPlan
from danube.spark.jobs.replay.state import ReplayState, load_state, save_state
from danube.spark.jobs.replay.target import LaneRange
from danube.wal.recovery.damage import FILE_NAME as DAMAGE_FILE
from danube.wal.recovery.damage import DamagedRange, DamageRegister
from danube.wal.recovery.witness import Witness
from danube.wal.segments.holes import HoleKind
from danube.wal.segments.local_holes import FILE_NAME as HOLES_FILE
from danube.wal.segments.local_holes import LocalHoles, OffsetJump
from danube.wal.tier import binding
from danube.wal.verify.broker import TOP_FILES, flaw_of_owner, read_witness
from danube.wal.verify.state import read_holes, read_snapshot
from tests.examples import examples

QUICK = settings(deadline=None, max_examples=examples(60))
FEW = settings(deadline=None, max_examples=examples(15))
u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
offset = st.integers(0, 2**62)
time_us = st.integers(0, 2**63 - 1)
hash_32 = st.binary(min_size=32, max_size=32)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
ids = st.uuids().map(str)
node_ids = st.integers(1, 2**63 - 1).map(str)


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def unflawed(directory: Path, name: str) -> bool:
    """Whether `danube verify` takes this file of a data directory."""
    return TOP_FILES[name][0]((directory / name).read_bytes()) is None


@QUICK
@given(st.lists(st.tuples(st.integers(1, 2**40), st.integers(1, 2**40), u32, time_us, texts), max_size=6))
def test_holes_of_a_host(drawn: list[tuple[int, int, int, int, str]]) -> None:
    with folder() as directory:
        holes, end, rows = LocalHoles(directory), 0, []
        for gap, size, epoch, since_us, why in drawn:
            rows.append((end + gap, end + gap + size, 0, epoch, HoleKind.UNUSED, since_us, since_us))
            holes.add(end + gap, end + gap + size, epoch, OffsetJump(epoch, since_us, why))
            end += gap + size
        again = LocalHoles.load(directory)
        assert [tuple(hole)[: len(rows[0])] for hole in again] == rows and again.end == end
        if drawn:
            found = read_holes((directory / HOLES_FILE).read_bytes())
            assert found == ([row[:2] for row in rows], [])


@QUICK
@given(hash_32, offset, offset, st.booleans(), st.sets(texts, max_size=5))
def test_witnesses(log_id: bytes, one: int, other: int, began: bool, names: set[str]) -> None:
    start, end = sorted((one, other))
    with folder() as directory:
        path = directory / "witness"
        written = Witness.load(path, log_id)
        written.note_log(start, start, began=began)
        written.reached(end)
        written.note_subscriptions(names)
        read = Witness.load(path, log_id)
        assert (read.known, read.began, read.start, read.end) == (True, began, start, end)
        assert read.subscriptions == names
        facts, flaw = read_witness(path.read_bytes())
        assert flaw is None and facts.log_id == log_id.hex() and facts.subscriptions == names
        assert (facts.began, facts.start, facts.end) == (began, start, end)


hosts = st.builds(
    unbroken.Host, st.builds(lambda boot, *numbers: " ".join((boot, *map(str, numbers))), ids, u64, u64, u64),
    u32, time_us, st.booleans(),
)  # fmt: skip


@QUICK
@given(hosts)
def test_where_a_broker_ran(host: unbroken.Host) -> None:
    with folder() as directory:
        path = directory / unbroken.FILE_NAME
        files.replace_durably(path, unbroken._encoded(host))
        assert unbroken._read(path) == host and path.stat().st_size == unbroken.FILE_BYTES
        assert unflawed(directory, unbroken.FILE_NAME)


@QUICK
@given(u64, st.integers(1, 2**64 - 1), st.integers(1, 2**64 - 1))
def test_the_place_where_a_directory_was_made(inode: int, born_ns: int, other_ns: int) -> None:
    written = b"%d %d\n" % (inode, born_ns)
    assert copied._same(written, written) and TOP_FILES[copied.FILE_NAME][0](written) is None
    assert copied._same(written, b"%d %d\n" % (inode, other_ns)) is (born_ns == other_ns)


@FEW
@given(st.integers(0, (1 << 24) - 3), st.integers(1, 2))
def test_incarnations(least: int, count: int) -> None:
    with folder() as directory:
        opened = data_dir.DataDir(directory)
        opened.advance_incarnation(least)
        opened.close()
        again = data_dir.DataDir(directory)
        assert again.next_incarnations(count) == least + 1
        again.close()
        assert unflawed(directory, "incarnation") and unflawed(directory, "format")


@QUICK
@given(node_ids, st.sampled_from(["", FORMING, MEMBER, ETCD]), ids, st.lists(ids, max_size=4))
def test_nodes(node_id: str, state: str, cluster_id: str, left: list[str]) -> None:
    record = NodeRecord(node_id, cluster_id if state else "", state, tuple(left))
    with folder() as directory:
        store_node(directory, record)
        assert load_node(directory) == record
        assert unflawed(directory, NODE_FILE)


@QUICK
@given(st.builds(
    binding._Moved, st.just(binding.FORMAT), ids, time_us, ids | st.just(""),
    held=st.lists(ids, max_size=binding.HOLDERS_REMEMBERED_MAX).map(tuple),
    former=st.lists(ids, max_size=binding.HOLDERS_REMEMBERED_MAX).map(tuple),
))  # fmt: skip
def test_bindings_to_a_store(bound: binding._Moved) -> None:
    with folder() as directory:
        binding.bind(directory, bound)
        found = binding.bound_store(directory)
        assert found == binding.StoreIdentity(bound.format, bound.store_id, bound.created_us, bound.holder)
        held = binding._binding(directory)
        assert held is not None and (held.held, binding._former_ids(directory)) == (bound.held, bound.former)
        assert unflawed(directory, binding.FILE_NAME)


@QUICK
@given(st.dictionaries(st.integers(1, 2**63), st.integers(1, 4096), min_size=1, max_size=8))
def test_topics_whose_objects_are_to_be_removed(topics: dict[int, int]) -> None:
    with folder() as directory:

        def block(work: Callable[[], object], then: Callable[[Any, None], None]) -> None:
            work()  # the list alone is stored: nothing is settled

        mover = SimpleNamespace(settled=lambda topic_id: False, block=block)
        deletions = TopicDeletions(cast(Any, mover), directory)
        for topic_id, partitions in topics.items():
            deletions.add(topic_id, partitions)
        deletions.begin()
        again = TopicDeletions(cast(Any, mover), directory)
        again.begin()
        assert again._partitions_by_topic == again._on_disk == topics
        assert unflawed(directory, DELETIONS_NAME)


@QUICK
@given(st.builds(recovery.Plan, node_ids, ids | st.just(""), ids | st.just(""), ids.map("left-{}".format)))
def test_plans_of_a_recovery(plan: recovery.Plan) -> None:
    with folder() as directory:
        recovery._store_plan(directory, plan)
        assert recovery.unfinished(directory) == plan and unflawed(directory, "recovering/plan")


@QUICK
@given(st.integers(0, 2**63), u32, u32)
def test_owners_that_verify_takes(broker_id: int, one: int, other: int) -> None:
    with folder() as directory:
        write_owner(directory, KeptOwner(broker_id, *sorted((one, other))))
        assert flaw_of_owner((directory / OWNER_FILE).read_bytes()) is None


rounds = st.builds(
    RoundPlan, topic=texts, topic_id=u64, number=st.integers(1, 10**10 - 1), shape=texts, schema=texts,
    ends=st.dictionaries(u32.map(str), offset, max_size=5),
    files=st.lists(st.builds(FilePlan, texts, u32, offset, offset), max_size=5), history=texts,
)  # fmt: skip


@QUICK
@given(rounds)
def test_rounds_of_an_export(plan: RoundPlan) -> None:
    with folder() as directory:
        state = ExportState(directory)
        state.prepare()
        assert state.plan(plan.number) is None
        state.begin(plan)
        assert ExportState(directory).plan(plan.number) == plan
        state.finish(plan)
        done = ExportState(directory).checkpoint(plan.topic, plan.topic_id)
        assert (done.number, done.ends, done.files) == (plan.number, plan.ends, [])
        assert (done.shape, done.schema, done.history) == (plan.shape, plan.schema, plan.history)


replays = st.builds(
    ReplayState, st.just(1), texts, texts,
    st.lists(st.builds(LaneRange, u32, texts, u64, u32, offset, offset), max_size=5),
    u32, st.booleans(), texts,
)  # fmt: skip


@QUICK
@given(replays)
def test_states_of_a_replay(state: ReplayState) -> None:
    with folder() as directory:
        path = directory / "below" / "state.json"
        save_state(path, state)
        assert load_state(path, state.job, state.work) == state


@QUICK
@given(st.lists(st.builds(DamagedRange, texts, offset, offset, offset, texts), max_size=4, unique=True))
def test_reports_of_damage_on_disk(ranges: list[DamagedRange]) -> None:
    with folder() as directory:
        register = DamageRegister(directory)
        kept = [one for one in ranges if register.note(one)]
        assert register.store() and list(DamageRegister(directory)) == kept
        assert (directory / DAMAGE_FILE).exists() is bool(kept)


keys = st.builds(
    ApiKey, st.from_regex(r"[A-Za-z0-9-]{1,64}", fullmatch=True), hash_32,
    st.sampled_from(["user:anna", "service_account:b"]),
    time_us, time_us, texts,
)  # fmt: skip
revocations = st.builds(
    Revocation, st.sampled_from(REVOKED_KINDS), st.from_regex(r"[a-z0-9:-]{1,40}", fullmatch=True),
    st.integers(2, 2**63 - 1), time_us, texts,
)  # fmt: skip


@QUICK
@given(st.lists(keys, max_size=5, unique_by=lambda key: key.id), st.lists(revocations, max_size=5))
def test_api_keys_and_revocations_of_the_metadata(drawn: list[ApiKey], revoked: list[Revocation]) -> None:
    machine = Metadata()
    for command in [PutApiKey(key=key) for key in drawn] + [
        Revoke(revocation=one, now_us=1) for one in revoked
    ]:
        if machine.check(command):
            assert machine.apply(machine.version + 1, command) == []
    content = machine.snapshot()
    again = Metadata.restore(content)
    kept, read = machine.access.credentials, again.access.credentials
    assert read.api_keys() == kept.api_keys() == sorted(drawn, key=lambda key: key.id)
    assert read.revocations() == kept.revocations()
    assert {(one.kind, one.value) for one in revoked} == {(one.kind, one.value) for one in read.revocations()}
    assert again.snapshot() == content and again.access.version == machine.access.version
    assert (content[:4] == b"DNM4") is bool(drawn or revoked)
    assert read_snapshot(content) == (machine.version, [])
