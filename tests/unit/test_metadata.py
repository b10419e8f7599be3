"""The metadata machine: names, conflicts, limits, ids, lookups and its snapshot."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube.core import metadata as metadata_module
from danube.core.checksum import crc32c
from danube.core.commands import (
    Change,
    Command,
    CreateNamespace,
    CreateTopic,
    DeleteNamespace,
    DeleteTopic,
    NamespaceCreated,
    NamespaceDeleted,
    TopicCreated,
    TopicDeleted,
    TopicRecord,
    TopicUpdated,
    UpdatePolicy,
    decode_commands,
    encode_command,
    join_commands,
)
from danube.core.metadata import Metadata
from danube.core.policy import FailurePolicy, TopicPolicy
from danube.errors import (
    CallerError,
    Conflict,
    Damage,
    InvalidArgument,
    InvalidName,
    InvariantBroken,
    LimitExceeded,
    NotFound,
    PolicyMismatch,
    StorageIncompatible,
    TopicExists,
    TopicNotFound,
)

POLICY = TopicPolicy()


def create(
    topic: str, partitions: int = 0, policy: TopicPolicy = POLICY, ensure: bool = False
) -> CreateTopic:
    return CreateTopic(topic=topic, partitions=partitions, policy=policy, created_us=7, ensure=ensure)


def propose(machine: Metadata, command: Command) -> list[Change]:
    if not machine.check(command):
        return []
    return machine.apply(machine.version + 1, command)


def machine_with(*topics: str, partitions: int = 0) -> Metadata:
    machine = Metadata()
    for topic in topics:
        propose(machine, create(topic, partitions))
    return machine


def test_default_and_system_are_always_there() -> None:
    machine = Metadata()
    assert machine.namespaces() == ["default", "system"]
    for namespace in machine.namespaces():
        with pytest.raises(InvalidArgument):
            propose(machine, DeleteNamespace(namespace=namespace))


def test_a_topic_is_found_by_name_by_id_and_by_its_physical_names() -> None:
    machine = machine_with("/default/plain")
    [change] = propose(machine, create("/default/wide", partitions=3))
    wide = machine.topic("/default/wide")
    assert change == TopicCreated(wide) == TopicCreated(TopicRecord("/default/wide", 2, 3, POLICY, 7))
    assert machine.topic_with_id(2) == wide
    assert wide.physical_names == [f"/default/wide-part-{n}" for n in range(3)]
    found = [machine.topic_of_partition(name) for name in wide.physical_names]
    assert found == [(wide, 0), (wide, 1), (wide, 2)]
    plain = machine.topic("/default/plain")
    assert machine.topic_of_partition("/default/plain") == (plain, 0)
    assert (machine.topic_count, machine.partition_count) == (2, 4)


@pytest.mark.parametrize(
    "name",
    [
        "/default/wide",
        "/default/wide-part-3",
        "/default/wide-part-03",
        "/default/plain-part-0",
        "/default/no",
    ],
)
def test_what_is_not_a_partition_is_not_found_as_one(name: str) -> None:
    machine = machine_with("/default/plain")
    propose(machine, create("/default/wide", partitions=3))
    with pytest.raises(TopicNotFound):
        machine.topic_of_partition(name)


@pytest.mark.parametrize(
    "name", ["", "/", "orders", "/default", "/default/", "//x", "/default/a/b", "/default/a b"]
)
def test_a_name_outside_the_grammar_is_an_invalid_name_everywhere(name: str) -> None:
    machine = Metadata()
    for ask in (machine.topic, machine.topic_of_partition):
        with pytest.raises(InvalidName):
            ask(name)
    assert machine.find_topic(name) is None
    with pytest.raises(InvalidName):
        machine.check(create(name))


def test_a_longer_name_with_the_same_beginning_is_no_conflict() -> None:
    machine = machine_with("/default/foobar", "/default/foo-part", "/default/foo-part-x")
    assert propose(machine, create("/default/foo"))
    assert propose(machine, create("/default/fo", partitions=2))


@pytest.mark.parametrize("partitions", [0, 2])
def test_a_name_like_a_partition_of_a_topic_conflicts_with_it(partitions: int) -> None:
    machine = machine_with("/default/foo", partitions=partitions)
    for name in ("/default/foo-part-0", "/default/foo-part-7"):
        with pytest.raises(TopicExists):
            propose(machine, create(name))


def test_a_name_like_a_partition_of_nothing_is_invalid() -> None:
    with pytest.raises(InvalidName):
        propose(Metadata(), create("/default/foo-part-0"))


@pytest.mark.parametrize("partitions", [0, 2])
def test_the_same_name_conflicts(partitions: int) -> None:
    machine = machine_with("/default/foo", partitions=2)
    with pytest.raises(TopicExists):
        propose(machine, create("/default/foo", partitions))


def test_ensuring_what_exists_changes_nothing() -> None:
    machine = machine_with("/default/foo", partitions=2)
    assert machine.check(create("/default/foo", 2, ensure=True)) is False
    assert machine.apply(2, create("/default/foo", 2, ensure=True)) == []
    with pytest.raises(PolicyMismatch):
        machine.check(create("/default/foo", 2, TopicPolicy(retention_ms=1), ensure=True))
    with pytest.raises(TopicExists):
        machine.check(create("/default/foo", 3, ensure=True))
    assert machine.check(create("/default/bar", ensure=True))


def test_a_deleted_topic_comes_back_as_another_incarnation() -> None:
    machine = machine_with("/default/foo")
    first = machine.topic("/default/foo")
    assert propose(machine, DeleteTopic(topic="/default/foo")) == [TopicDeleted(first)]
    assert machine.topic_with_id(first.topic_id) is None
    propose(machine, create("/default/foo"))
    second = machine.topic("/default/foo")
    assert second.topic_id > first.topic_id
    with pytest.raises(TopicNotFound):
        propose(machine, DeleteTopic(topic="/default/foo", topic_id=first.topic_id))
    assert propose(machine, DeleteTopic(topic="/default/foo", topic_id=second.topic_id)) == [
        TopicDeleted(second)
    ]
    assert machine.partition_count == 0


def test_ids_are_used_once_however_often_a_name_comes_back() -> None:
    machine = machine_with("/default/other")
    ids = []
    for _ in range(5):
        propose(machine, create("/default/foo"))
        ids.append(machine.topic("/default/foo").topic_id)
        propose(machine, DeleteTopic(topic="/default/foo"))
        machine = Metadata.restore(machine.snapshot())
    assert ids == [2, 3, 4, 5, 6]


def test_a_policy_is_updated_for_the_same_incarnation() -> None:
    machine = machine_with("/default/foo")
    policy = TopicPolicy(durability="fsync", retention_ms=0)
    [change] = propose(machine, UpdatePolicy(topic="/default/foo", policy=policy))
    assert change == TopicUpdated(machine.topic("/default/foo"))
    assert (machine.topic("/default/foo").topic_id, machine.topic("/default/foo").policy) == (1, policy)
    assert machine.topic_with_id(1) is machine.topic("/default/foo")
    assert propose(machine, UpdatePolicy(topic="/default/foo", policy=policy)) == []


def test_a_policy_that_cannot_be_kept_is_refused() -> None:
    machine = machine_with("/default/foo")
    for command in (
        create("/default/bar", policy=TopicPolicy(durability="quorum")),
        UpdatePolicy(topic="/default/foo", policy=TopicPolicy(max_record_bytes=0)),
    ):
        with pytest.raises(InvalidArgument):
            machine.check(command)
    with pytest.raises(PolicyMismatch):
        memory = TopicPolicy(reliable=False, durability="memory")
        machine.check(UpdatePolicy(topic="/default/foo", policy=memory))
    with pytest.raises(TopicNotFound):
        machine.check(UpdatePolicy(topic="/default/bar", policy=POLICY))


@pytest.mark.parametrize("partitions", [-1, 1025])
def test_the_number_of_partitions_is_bounded(partitions: int) -> None:
    with pytest.raises(LimitExceeded):
        Metadata().check(create("/default/foo", partitions))


def test_the_number_of_all_partitions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_module, "TOPICS_MAX", 5)
    machine = machine_with("/default/wide", partitions=4)
    propose(machine, create("/default/one"))
    with pytest.raises(LimitExceeded):
        propose(machine, create("/default/two"))
    propose(machine, DeleteTopic(topic="/default/wide"))
    propose(machine, create("/default/two"))


def test_namespaces_are_created_once_and_deleted_when_empty() -> None:
    machine = Metadata()
    with pytest.raises(NotFound):
        propose(machine, create("/team/foo"))
    assert propose(machine, CreateNamespace(namespace="team")) == [NamespaceCreated("team")]
    assert propose(machine, CreateNamespace(namespace="team", ensure=True)) == []
    with pytest.raises(Conflict):
        propose(machine, CreateNamespace(namespace="team"))
    propose(machine, create("/team/foo"))
    with pytest.raises(Conflict):
        propose(machine, DeleteNamespace(namespace="team"))
    propose(machine, DeleteTopic(topic="/team/foo"))
    assert propose(machine, DeleteNamespace(namespace="team")) == [NamespaceDeleted("team")]
    with pytest.raises(NotFound):
        machine.topics("team")


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "x" * 201, "é"])
def test_a_namespace_outside_the_grammar_is_refused(name: str) -> None:
    with pytest.raises(InvalidName):
        Metadata().check(CreateNamespace(namespace=name))


def test_the_number_of_namespaces_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_module, "NAMESPACES_MAX", 3)
    machine = Metadata()
    propose(machine, CreateNamespace(namespace="a"))
    with pytest.raises(LimitExceeded):
        propose(machine, CreateNamespace(namespace="b"))


def test_topics_are_listed_by_namespace_in_order_of_creation() -> None:
    machine = machine_with("/default/b", "/system/x", "/default/a")
    propose(machine, UpdatePolicy(topic="/default/b", policy=TopicPolicy(retention_ms=5)))
    assert [record.topic for record in machine.topics("default")] == ["/default/b", "/default/a"]
    assert {record.topic for record in machine.topics()} == {"/default/b", "/default/a", "/system/x"}


def test_an_unknown_topic_is_answered_with_similar_names() -> None:
    machine = machine_with("/default/orders", "/default/payments", "/system/orders")
    assert machine.suggestions("/default/order") == ["/default/orders"]
    with pytest.raises(TopicNotFound) as caught:
        machine.topic("/default/oders")
    assert "/default/orders" in caught.value.hint


def test_suggestions_look_at_a_bounded_number_of_topics_the_alike_first() -> None:
    machine = machine_with(*(f"/default/t{number}" for number in range(2_000)))
    assert "/default/t1777" in machine.suggestions("/default/t17777")


def test_a_refused_command_uses_up_its_index_and_changes_nothing() -> None:
    machine = machine_with("/default/foo")
    before = machine.copy()
    with pytest.raises(TopicExists):
        machine.apply(2, create("/default/foo"))
    assert machine.version == 2
    assert machine.changes_since(before) == []
    assert machine.apply(3, create("/default/bar")) == [TopicCreated(machine.topic("/default/bar"))]


def test_a_command_out_of_order_stops_the_shard() -> None:
    for index in (0, 2):
        with pytest.raises(InvariantBroken):
            Metadata().apply(index, create("/default/foo"))


def test_what_was_agreed_stays_applicable_when_limits_get_tighter(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Metadata()
    monkeypatch.setattr(metadata_module, "TOPICS_MAX", 0)
    assert machine.apply(1, create("/default/foo", policy=TopicPolicy(max_record_bytes=0)))


def test_commands_and_snapshots_are_stored_in_full() -> None:
    [stored] = msgspec.msgpack.decode(join_commands([encode_command(create("/default/foo"))]))
    assert stored["kind"] == "create_topic"
    assert set(stored["policy"]) == set(TopicPolicy.__struct_fields__)
    assert set(stored["policy"]["failure"]) == set(FailurePolicy.__struct_fields__)
    content = msgspec.msgpack.decode(machine_with("/default/foo", "/default/bar").snapshot()[8:])
    assert [set(policy) for policy in content[3]] == [set(TopicPolicy.__struct_fields__)]


COMMANDS: list[Command] = [
    create("/default/foo", 3, ensure=True),
    DeleteTopic(topic="/default/foo", topic_id=4),
    UpdatePolicy(topic="/default/foo", policy=TopicPolicy(failure=FailurePolicy(poison="drop"))),
    CreateNamespace(namespace="team", ensure=True),
    DeleteNamespace(namespace="team"),
]


def test_commands_survive_their_bytes() -> None:
    assert decode_commands(join_commands([encode_command(command) for command in COMMANDS])) == COMMANDS


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x91\x80", b"\x91\x81\xa4kind\xa3new", b"\x01"])
def test_commands_of_a_newer_version_are_told(content: bytes) -> None:
    with pytest.raises(StorageIncompatible):
        decode_commands(content)


def test_every_flipped_bit_and_every_cut_of_a_snapshot_is_found() -> None:
    snapshot = machine_with("/default/foo").snapshot()
    for bit in range(len(snapshot) * 8):
        flipped = bytearray(snapshot)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises((Damage, StorageIncompatible)):
            Metadata.restore(bytes(flipped))
    for cut in range(len(snapshot)):
        with pytest.raises(Damage):
            Metadata.restore(snapshot[:cut])


def test_snapshots_of_a_newer_version_are_told_apart_from_damage() -> None:
    snapshot = Metadata().snapshot()
    with pytest.raises(StorageIncompatible):
        Metadata.restore(b"DNM3" + snapshot[4:])
    content = msgspec.msgpack.encode({"another": "shape"})
    with pytest.raises(StorageIncompatible):
        Metadata.restore(b"DNM1" + crc32c(content).to_bytes(4, "little") + content)


NAMESPACE = st.sampled_from(["default", "system", "team", "ops"])
TOPIC = st.builds("/{}/{}".format, NAMESPACE, st.sampled_from(["a", "ab", "a-part-0", "a-part-1"]))
POLICIES = st.builds(
    TopicPolicy, durability=st.sampled_from(["written", "fsync"]), retention_ms=st.integers(0, 1)
)
COMMAND = st.one_of(
    st.builds(
        CreateTopic,
        topic=TOPIC,
        partitions=st.integers(0, 2),
        policy=POLICIES,
        created_us=st.just(1),
        ensure=st.booleans(),
    ),
    st.builds(DeleteTopic, topic=TOPIC, topic_id=st.integers(0, 3)),
    st.builds(UpdatePolicy, topic=TOPIC, policy=POLICIES),
    st.builds(CreateNamespace, namespace=NAMESPACE, ensure=st.booleans()),
    st.builds(DeleteNamespace, namespace=NAMESPACE),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(COMMAND, max_size=25), st.integers(0, 25))
def test_machines_that_apply_the_same_are_equal_and_a_snapshot_is_one_of_them(
    commands: list[Command], cut: int
) -> None:
    first, second, ids = Metadata(), Metadata(), []
    middle = Metadata()
    for number, command in enumerate(commands):
        if number == cut:
            middle = second = Metadata.restore(second.snapshot())
            middle = middle.copy()
        results = []
        for machine in (first, second):
            try:
                results.append(machine.apply(machine.version + 1, command))
            except CallerError as error:
                results.append(type(error))
        assert results[0] == results[1]
        if isinstance(results[0], list):
            ids += [change.record.topic_id for change in results[0] if isinstance(change, TopicCreated)]
    assert first.snapshot() == second.snapshot()
    for namespace in first.namespaces():
        assert first.topics(namespace) == second.topics(namespace)
    assert ids == sorted(set(ids)), "an id is used once"
    owners = [name for record in first.topics() for name in {record.topic, *record.physical_names}]
    assert len(owners) == len(set(owners)), "a name means one thing"
    assert first.partition_count == sum(record.partition_count for record in first.topics())
    replay(middle, first)


def replay(earlier: Metadata, later: Metadata) -> None:
    """The changes between two machines lead from the topics of one to those of the other."""
    topics = {record.topic: record for record in earlier.topics()}
    namespaces = set(earlier.namespaces())
    for change in later.changes_since(earlier):
        match change:
            case TopicDeleted(record):
                assert topics.pop(record.topic) == record
            case TopicCreated(record):
                assert record.topic not in topics and record.topic.split("/")[1] in namespaces
                topics[record.topic] = record
            case TopicUpdated(record):
                assert topics[record.topic].topic_id == record.topic_id
                topics[record.topic] = record
            case NamespaceCreated(namespace):
                namespaces.add(namespace)
            case NamespaceDeleted(namespace):
                namespaces.remove(namespace)
    assert topics == {record.topic: record for record in later.topics()}
    assert namespaces == set(later.namespaces())


@settings(deadline=None, max_examples=200)
@given(COMMAND, st.lists(COMMAND, max_size=8))
def test_what_check_allows_can_be_applied(command: Command, before: list[Command]) -> None:
    machine = Metadata()
    for earlier in before:
        try:
            propose(machine, earlier)
        except CallerError:
            pass
    try:
        changes_something = machine.check(command)
    except CallerError:
        return
    assert bool(machine.apply(machine.version + 1, command)) == changes_something
