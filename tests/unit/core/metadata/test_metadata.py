"""The metadata machine: names, conflicts, limits, ids, lookups and its snapshot."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from danube.core.batch.checksum import crc32c
from danube.core.cluster.commands import AllocateId
from danube.core.metadata import machine as metadata_module
from danube.core.metadata import snapshot as metadata_snapshot
from danube.core.metadata import topic_settings
from danube.core.metadata.commands import (
    AddPartitions,
    Binding,
    Change,
    Command,
    ConfigureTopicSchema,
    CreateNamespace,
    CreateTopic,
    DeleteBinding,
    DeleteNamespace,
    DeleteRole,
    DeleteSchemaVersion,
    DeleteSubject,
    DeleteTopic,
    ForgetSubscription,
    KnowConsumer,
    KnownConsumer,
    NamespaceCreated,
    NamespaceDeleted,
    PutBinding,
    PutRole,
    RegisterSchema,
    Role,
    SetCompatibility,
    SetSubscriptionSettings,
    SubscriptionSettings,
    TopicCreated,
    TopicDeleted,
    TopicRecord,
    TopicSchema,
    TopicUpdated,
    UpdatePolicy,
    decode_commands,
    encode_command,
    join_commands,
)
from danube.core.metadata.machine import Metadata
from danube.core.metadata.snapshot import version_of
from danube.core.partition.policy import LATER, FailurePolicy, TopicPolicy
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
    WrongState,
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
    "name",
    [
        *("", "/", "orders", "/default", "/default/", "//x", "/default/a/b", "/default/a b", "/default/."),
        *("/default/..", "/./x", "/../x", "/default/a\n", "/default/\u00e9", "/default/" + "a" * 201),
    ],
)
def test_a_name_outside_the_grammar_is_an_invalid_name_everywhere(name: str) -> None:
    machine = Metadata()
    for ask in (machine.topic, machine.topic_of_partition):
        with pytest.raises(InvalidName):
            ask(name)
    assert machine.find_topic(name) is None
    with pytest.raises(InvalidName):
        machine.check(create(name))


@pytest.mark.parametrize("name", ["/shop/orders.v1", "/shop.eu/.a", "/shop.eu/a.", "/shop/...", "/shop/a..b"])
def test_parts_of_a_name_may_hold_dots(name: str) -> None:
    machine = Metadata()
    namespace = name.split("/")[1]
    propose(machine, CreateNamespace(namespace=namespace))
    propose(machine, create(name, partitions=2))
    assert machine.find_topic(name) == machine.topic(name)
    assert machine.topic_of_partition(f"{name}-part-1") == (machine.topic(name), 1)
    with pytest.raises(InvalidName):
        machine.check(create(f"/{namespace}/x.v1-part-0"))


@pytest.mark.parametrize("namespace", ["", ".", "..", "a/b", "/a", "a\n", "a" * 201])
def test_a_namespace_that_is_no_part_of_a_name_is_refused(namespace: str) -> None:
    with pytest.raises(InvalidName):
        Metadata().check(CreateNamespace(namespace=namespace))


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
    with pytest.raises(WrongState):
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
    assert set(stored["policy"]) == set(TopicPolicy.__struct_fields__) - set(LATER)
    assert set(stored["policy"]["failure"]) == set(FailurePolicy.__struct_fields__) - {"set_by"}
    content = msgspec.msgpack.decode(machine_with("/default/foo", "/default/bar").snapshot()[8:])
    # Those that came later are left out while they say nothing, so an earlier version's bytes stay.
    assert [set(policy) for policy in content[3]] == [
        set(TopicPolicy.__struct_fields__)
        - {"retention_segments", "cleanup", "tombstone_retention_ms", *LATER}
    ]
    kept = machine_with("/default/foo")
    policy = TopicPolicy(retention_segments=3, cleanup="compact", tombstone_retention_ms=0)
    kept.apply(2, UpdatePolicy(topic="/default/foo", policy=policy))
    assert Metadata.restore(kept.snapshot()).topic("/default/foo").policy == policy


COMMANDS: list[Command] = [
    create("/default/foo", 3, ensure=True),
    DeleteTopic(topic="/default/foo", topic_id=4),
    UpdatePolicy(topic="/default/foo", policy=TopicPolicy(failure=FailurePolicy(poison="drop"))),
    CreateNamespace(namespace="team", ensure=True),
    DeleteNamespace(namespace="team"),
    AddPartitions(topic="/default/foo", partitions=4),
    ConfigureTopicSchema(topic="/default/foo", schema=TopicSchema("s", "enforce", True)),
    ConfigureTopicSchema(topic="/default/foo"),
    SetSubscriptionSettings(
        topic="/default/foo", subscription="s",
        settings=SubscriptionSettings(FailurePolicy(poison="drop"), 7),
    ),
    ForgetSubscription(topic="/default/foo", subscription="s", partition=1, topic_id=3),
    RegisterSchema(
        subject="s", after_revision=3, schema_type="avro", definition=b"\x00", fingerprint="f", created_us=1,
        compatibility="full", compiled=b"c", description="d", created_by="e", tags=("t",),
    ),
    DeleteSchemaVersion(subject="s", version=1),
    DeleteSubject(subject="s"),
    SetCompatibility(subject="s", compatibility="none"),
    KnowConsumer(consumer=KnownConsumer(1, 2, 3, "s", "shared", "c", ("*",)), known_max=5),
    PutRole(role=Role("r", ("Lookup",), True)),
    DeleteRole(name="r"),
    PutBinding(binding=Binding("b", "user", "anna", ("r",), "topic", "/default/foo")),
    DeleteBinding(scope="topic", resource_name="/default/foo", id="b"),
]  # fmt: skip


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
        Metadata.restore(b"DNM9" + snapshot[4:])
    content = msgspec.msgpack.encode({"another": "shape"})
    with pytest.raises(StorageIncompatible):
        Metadata.restore(b"DNM1" + crc32c(content).to_bytes(4, "little") + content)


SNAPSHOT_BEFORE_SCHEMAS = bytes.fromhex(
    "444e4d31e43f22ee95050493a764656661756c74a673797374656da47465616d9288a872656c6961626c65c3aa647572"
    "6162696c697479a77772697474656eac726574656e74696f6e5f6d73ce240c8400af726574656e74696f6e5f62797465"
    "7300b06d61785f7265636f72645f6279746573ce00100000ab6d61785f756e61636b6564ce00040000b16d61785f6469"
    "7370617463685f7261746500a76661696c75726587b46d61785f726564656c69766572795f636f756e7405ae61636b5f"
    "74696d656f75745f6d73cd7530b8626173655f726564656c69766572795f64656c61795f6d73cd03e8b76d61785f7265"
    "64656c69766572795f64656c61795f6d73cdea60a76261636b6f6666ab6578706f6e656e7469616ca6706f69736f6ea5"
    "626c6f636bb1646561645f6c65747465725f746f706963a088a872656c6961626c65c3aa6475726162696c697479a566"
    "73796e63ac726574656e74696f6e5f6d73ce240c8400af726574656e74696f6e5f627974657300b06d61785f7265636f"
    "72645f6279746573ce00100000ab6d61785f756e61636b656407b16d61785f64697370617463685f7261746500a76661"
    "696c75726587b46d61785f726564656c69766572795f636f756e7405ae61636b5f74696d656f75745f6d73cd7530b862"
    "6173655f726564656c69766572795f64656c61795f6d73cd03e8b76d61785f726564656c69766572795f64656c61795f"
    "6d73cdea60a76261636b6f6666ab6578706f6e656e7469616ca6706f69736f6ea464726f70b1646561645f6c65747465"
    "725f746f706963a09295ae2f64656661756c742f706c61696e0100000195ac2f7465616d2f70617274656402030102"
)


def test_a_snapshot_of_the_first_format_is_read_and_written_as_it_was() -> None:
    machine = Metadata.restore(SNAPSHOT_BEFORE_SCHEMAS)
    assert [record.topic for record in machine.topics()] == ["/default/plain", "/team/parted"]
    parted = machine.topic("/team/parted")
    assert parted.partitions == 3 and parted.schema is None and parted.settings == {}
    assert machine.version == 5 and machine.next_topic_id == 4 and machine.registry.next_schema_id == 1
    assert machine.snapshot() == SNAPSHOT_BEFORE_SCHEMAS, "an earlier version can read it still"
    machine.apply(6, PutRole(role=Role("r", ("Lookup",))))
    assert machine.snapshot()[:4] == b"DNM2"
    machine.apply(7, DeleteRole(name="r"))
    assert machine.snapshot()[:4] == b"DNM1"


def settings(subscription: str, topic: str = "/default/foo", **fields: object) -> SetSubscriptionSettings:
    return SetSubscriptionSettings(
        topic=topic, subscription=subscription, settings=SubscriptionSettings(**fields)
    )


def test_settings_of_a_subscription_are_kept_until_it_or_its_topic_goes() -> None:
    machine = machine_with("/default/foo")
    propose(machine, create("/default/parted", 2))
    drop = FailurePolicy(poison="drop")
    [change] = propose(machine, settings("s", failure=drop, max_unacked=5))
    assert change == TopicUpdated(machine.topic("/default/foo"))
    assert propose(machine, settings("s", failure=drop, max_unacked=5)) == []
    propose(machine, settings("t", max_unacked=9))
    propose(machine, settings("s", "/default/parted", max_unacked=1))
    assert machine.settings_count == 3
    restored = Metadata.restore(machine.snapshot())
    assert restored.topics() == machine.topics() and restored.settings_count == 3
    for partition in (0, 1):
        command = ForgetSubscription(topic="/default/parted", subscription="s", partition=partition)
        assert propose(machine, command) == [], "settings are the topic's, not one partition's"
    propose(machine, ForgetSubscription(topic="/default/parted", subscription="s"))
    propose(machine, ForgetSubscription(topic="/default/foo", subscription="s", partition=0))
    propose(machine, settings("t"))
    assert machine.settings_count == 0 and machine.topic("/default/foo").settings == {}
    propose(machine, settings("s", max_unacked=3))
    propose(machine, DeleteTopic(topic="/default/foo"))
    propose(machine, create("/default/foo"))
    assert machine.topic("/default/foo").settings == {} and machine.settings_count == 0


@pytest.mark.parametrize(
    "command, error",
    [
        (settings("s", "/default/none", max_unacked=1), TopicNotFound),
        (settings("s", "/default/lossy", max_unacked=1), PolicyMismatch),
        (settings("", max_unacked=1), InvalidName),
        (settings("s", max_unacked=-1), InvalidArgument),
        (settings("s", max_unacked=4_194_305), InvalidArgument),
        (settings("s", failure=FailurePolicy(poison="dead_letter")), InvalidArgument),
        (settings("s", failure=FailurePolicy(backoff="never")), InvalidArgument),
        (ForgetSubscription(topic="/default/none", subscription="s"), TopicNotFound),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(command: Command, error: type[CallerError]) -> None:
    machine = machine_with("/default/foo")
    lossy = TopicPolicy(reliable=False, durability="memory")
    propose(machine, create("/default/lossy", policy=lossy))
    with pytest.raises(error):
        machine.check(command)


def test_the_number_of_settings_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machine_with("/default/foo")
    propose(machine, settings("s", max_unacked=1))
    monkeypatch.setattr(topic_settings, "SUBSCRIPTION_SETTINGS_MAX", 1)
    assert propose(machine, settings("s", max_unacked=2)), "one that is there may change"
    with pytest.raises(LimitExceeded):
        propose(machine, settings("t", max_unacked=1))
    assert machine.apply(machine.version + 1, settings("t", max_unacked=1))


def test_partitions_are_added_and_never_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machine_with("/default/foo")
    propose(machine, create("/default/parted", 2))
    topic_id = machine.topic("/default/parted").topic_id
    assert propose(machine, AddPartitions(topic="/default/parted", partitions=4))
    assert propose(machine, AddPartitions(topic="/default/parted", partitions=3)) == []
    record = machine.topic("/default/parted")
    assert (record.partitions, record.topic_id, machine.partition_count) == (4, topic_id, 5)
    assert machine.topic_of_partition("/default/parted-part-3") == (record, 3)
    with pytest.raises(WrongState):
        machine.check(AddPartitions(topic="/default/foo", partitions=2))
    assert machine.apply(machine.version + 1, AddPartitions(topic="/default/foo", partitions=2)) == []
    for partitions in (0, 1025):
        with pytest.raises(LimitExceeded):
            machine.check(AddPartitions(topic="/default/parted", partitions=partitions))
    monkeypatch.setattr(topic_settings, "TOPICS_MAX", 6)
    assert machine.check(AddPartitions(topic="/default/parted", partitions=5))
    with pytest.raises(LimitExceeded):
        machine.check(AddPartitions(topic="/default/parted", partitions=6))


NAMESPACE = st.sampled_from(["default", "system", "team", "ops"])
TOPIC = st.builds("/{}/{}".format, NAMESPACE, st.sampled_from(["a", "ab", "a-part-0", "a-part-1"]))
SUBJECT = LABEL = st.sampled_from(["a", "b"])
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
    st.builds(AddPartitions, topic=TOPIC, partitions=st.integers(0, 4)),
    st.builds(
        ConfigureTopicSchema,
        topic=TOPIC,
        schema=st.none() | st.builds(TopicSchema, SUBJECT, st.sampled_from(["none", "warn", "enforce"])),
    ),
    st.builds(
        SetSubscriptionSettings,
        topic=TOPIC,
        subscription=LABEL,
        settings=st.builds(SubscriptionSettings, max_unacked=st.integers(0, 2)),
    ),
    st.builds(ForgetSubscription, topic=TOPIC, subscription=LABEL, partition=st.integers(-1, 1)),
    st.builds(
        RegisterSchema,
        subject=SUBJECT,
        after_revision=st.integers(0, 8),
        schema_type=st.sampled_from(["avro", "string"]),
        definition=st.binary(max_size=3),
        fingerprint=st.sampled_from(["f", "g"]),
        created_us=st.just(1),
        compatibility=st.just("full"),
    ),
    st.builds(DeleteSchemaVersion, subject=SUBJECT, version=st.integers(0, 3)),
    st.builds(DeleteSubject, subject=SUBJECT),
    st.builds(SetCompatibility, subject=SUBJECT, compatibility=st.sampled_from(["none", "full"])),
    st.builds(
        KnowConsumer,
        consumer=st.builds(
            KnownConsumer,
            st.integers(1, 3), st.integers(1, 3), st.integers(0, 1), LABEL, st.just("shared"), LABEL,
        ),
        known_max=st.integers(1, 3),
    ),
    st.builds(PutRole, role=st.builds(Role, LABEL, st.just(("Lookup",)))),
    st.builds(DeleteRole, name=LABEL),
    st.builds(
        PutBinding,
        binding=st.builds(
            Binding, LABEL, st.just("user"), LABEL, st.just(("r",)), st.just("namespace"), LABEL
        ),
    ),
    st.builds(DeleteBinding, scope=st.just("namespace"), resource_name=LABEL, id=LABEL),
)  # fmt: skip


@examples(deadline=None, max_examples=150)
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
    restored = Metadata.restore(first.snapshot())
    assert restored.snapshot() == first.copy().snapshot() == first.snapshot()
    by_id = [sorted(machine.topics(), key=lambda record: record.topic_id) for machine in (restored, first)]
    assert by_id[0] == by_id[1]
    check_parts(first)
    check_parts(restored)
    for namespace in first.namespaces():
        assert first.topics(namespace) == second.topics(namespace)
    assert ids == sorted(set(ids)), "an id is used once"
    owners = [name for record in first.topics() for name in {record.topic, *record.physical_names}]
    assert len(owners) == len(set(owners)), "a name means one thing"
    assert first.partition_count == sum(record.partition_count for record in first.topics())
    replay(middle, first)


def check_parts(machine: Metadata) -> None:
    """What is counted agrees with what is there."""
    records = machine.topics()
    assert machine.settings_count == sum(len(record.settings) for record in records)
    subjects = machine.registry.subjects()
    for subject in subjects:
        used = [record for record in records if record.schema and record.schema.subject == subject.subject]
        assert machine.registry.topic_count(subject.subject) == len(used)
        assert machine.registry.with_id(subject.schema_id) is subject
        numbers = [version.number for version in subject.versions]
        assert numbers == sorted(set(numbers)) and all(one <= subject.last_version for one in numbers)
        same = {(version.schema_type, version.fingerprint) for version in subject.versions}
        assert len(same) == len(numbers)
    assert all(record.schema is None or machine.registry.find(record.schema.subject) for record in records)
    assert machine.registry.size_bytes == sum(
        version.size_bytes for subject in subjects for version in subject.versions
    )
    for one in machine.consumers:
        assert machine.topic_with_id(one.topic_id) is not None
        assert machine.consumers.of(one.topic_id, one.partition, one.subscription, one.name) is one
        assert one.consumer_id in machine.consumers.ids_of(one.topic_id, one.subscription)


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


@examples(deadline=None, max_examples=200)
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
    former = machine.copy()
    machine.apply(machine.version + 1, command)
    former.version = machine.version
    assert (machine.snapshot() != former.snapshot()) == changes_something


@pytest.mark.parametrize("version", [0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**50])
def test_a_snapshot_says_its_version_at_its_beginning(version: int) -> None:
    for used in (False, True):
        machine = Metadata()
        if used:
            machine.apply(1, AllocateId(counter="/c"))
        machine.version = version
        assert version_of(machine.snapshot()) == version == Metadata.restore(machine.snapshot()).version


@pytest.mark.parametrize("content", [b"", b"\xdc\x00", b"\x92\xcf\x00", b"\x92\xa1x"])
def test_a_snapshot_without_a_version_is_damage(content: bytes) -> None:
    with pytest.raises(Damage, match="does not begin with a version"):
        version_of(b"DNM1" + crc32c(content).to_bytes(4, "little") + content)
    with pytest.raises(Damage, match="checksum"):
        version_of(b"DNM1" + bytes(4) + b"x" + content)


@pytest.mark.parametrize("count", [0, 15, 16, 1_024, 1_025, 65_535, 65_536, 70_000])
def test_long_lists_are_encoded_in_parts_to_the_same_bytes(count: int) -> None:
    numbers = list(range(count))
    expected = msgspec.msgpack.encode(numbers)
    assert metadata_snapshot._encoded(numbers) == expected
    assert metadata_snapshot._encoded(metadata_snapshot._Many(numbers, str)) == msgspec.msgpack.encode(
        [str(number) for number in numbers]
    )
