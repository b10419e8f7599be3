"""Policies of namespaces and tenants: at each limit and one above, which holds, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube.core.cluster.brokers import COMMANDS, COMMANDS_PREFIX
from danube.core.cluster.commands import GrantLease, PutKey, RegisterBroker, RevokeLease
from danube.core.metadata import quotas as quotas_module
from danube.core.metadata.commands import (
    AddPartitions,
    Change,
    Command,
    ConfigureTopicSchema,
    CreateNamespace,
    CreateTopic,
    DeleteNamespace,
    DeleteTenant,
    DeleteTopic,
    PutTenant,
    QuotasChanged,
    RegisterSchema,
    SetNamespacePolicy,
    SetSubscriptionSettings,
    SubscriptionSettings,
    TopicSchema,
    UpdatePolicy,
    decode_commands,
    encode_command,
    join_commands,
)
from danube.core.metadata.machine import Metadata
from danube.core.metadata.policies import (
    LIMIT_MAX,
    LIMITS,
    NOTHING,
    NamespacePolicy,
    Tenant,
    check_durability,
    fitting,
    smallest,
    strictest,
)
from danube.core.metadata.quotas import namespace_of
from danube.core.partition.policy import FailurePolicy, TopicPolicy
from danube.errors import (
    CallerError,
    Conflict,
    InvalidArgument,
    InvalidName,
    LimitExceeded,
    NotFound,
    PolicyMismatch,
    WrongState,
)


def propose(machine: Metadata, command: Command) -> list[Change]:
    if not machine.check(command):
        return []
    return machine.apply(machine.version + 1, command)


def limit(machine: Metadata, namespace: str = "default", **policy: Any) -> list[Change]:
    return propose(machine, SetNamespacePolicy(namespace=namespace, policy=NamespacePolicy(**policy)))


def tenant(machine: Metadata, name: str, *namespaces: str, **quota: Any) -> list[Change]:
    return propose(machine, PutTenant(tenant=Tenant(name, namespaces, NamespacePolicy(**quota))))


def topic(name: str, partitions: int = 0, **policy: Any) -> CreateTopic:
    return CreateTopic(topic=name, partitions=partitions, policy=TopicPolicy(**policy), created_us=1)


def subject(name: str) -> RegisterSchema:
    return RegisterSchema(
        subject=name, after_revision=0, schema_type="string", definition=b"", fingerprint="f", created_us=1,
        compatibility="none",
    )  # fmt: skip


def test_as_many_topics_as_the_namespace_allows_and_no_more() -> None:
    machine = Metadata()
    limit(machine, max_topics=2)
    propose(machine, topic("/default/a"))
    propose(machine, topic("/default/b", partitions=7))
    propose(machine, topic("/system/c"))
    with pytest.raises(LimitExceeded, match=r"namespace default has 2 topics.*max_topics is 2") as refused:
        propose(machine, topic("/default/c"))
    assert refused.value.facts == {"limit": 2, "quota": "max_topics"}
    propose(machine, DeleteTopic(topic="/default/a"))
    propose(machine, topic("/default/c"))


def test_a_topic_that_is_there_is_no_new_one() -> None:
    machine = Metadata()
    propose(machine, topic("/default/a"))
    limit(machine, max_topics=1, durability_min="fsync")
    assert not machine.check(msgspec.structs.replace(topic("/default/a"), ensure=True))


def test_as_many_partitions_as_the_namespace_allows_and_no_more() -> None:
    machine = Metadata()
    limit(machine, max_partitions=5)
    propose(machine, topic("/default/a", partitions=3))
    propose(machine, topic("/default/b"))
    with pytest.raises(LimitExceeded, match=r"has 4 partitions.*max_partitions is 5"):
        propose(machine, topic("/default/c", partitions=2))
    with pytest.raises(LimitExceeded, match="max_partitions"):
        propose(machine, AddPartitions(topic="/default/a", partitions=5))
    propose(machine, AddPartitions(topic="/default/a", partitions=4))
    assert machine.partitions_in("default") == 5


def test_as_many_subjects_as_the_namespace_allows_and_no_more() -> None:
    machine = Metadata()
    limit(machine, max_subjects=1)
    propose(machine, subject("/default/a"))
    for elsewhere in ("plain", "/system/a", "/default/a/b"):
        propose(machine, subject(elsewhere))
    with pytest.raises(LimitExceeded, match=r"has 1 schema subjects.*max_subjects is 1"):
        propose(machine, subject("/default/b"))
    second = msgspec.structs.replace(
        subject("/default/a"), fingerprint="g", after_revision=machine.registry.subject("/default/a").revision
    )
    propose(machine, second)  # another version is no new subject


@pytest.mark.parametrize(
    "name, namespace", [("/ns/t", "ns"), ("plain", ""), ("/ns", ""), ("/a/b/c", ""), ("a/b/c", "")]
)
def test_a_subject_spelled_like_a_topic_has_a_namespace(name: str, namespace: str) -> None:
    assert namespace_of(name) == namespace


def test_a_tenant_has_a_sum_over_its_namespaces() -> None:
    machine = Metadata()
    propose(machine, CreateNamespace(namespace="one"))
    tenant(machine, "acme", "one", "later", max_topics=2, max_partitions=3)
    propose(machine, topic("/one/a", partitions=2))
    propose(machine, CreateNamespace(namespace="later"))
    with pytest.raises(LimitExceeded, match=r"tenant acme has 2 partitions.*max_partitions is 3"):
        propose(machine, topic("/later/b", partitions=2))
    propose(machine, topic("/later/b"))
    with pytest.raises(LimitExceeded, match=r"tenant acme has 2 topics.*max_topics is 2"):
        propose(machine, topic("/one/c"))
    propose(machine, topic("/default/c"))
    propose(machine, DeleteTenant(name="acme"))
    propose(machine, topic("/one/c"))


def test_a_namespace_has_one_tenant() -> None:
    machine = Metadata()
    tenant(machine, "acme", "one")
    for judge in (machine.check, lambda command: machine.apply(machine.version + 1, command)):
        with pytest.raises(Conflict, match="namespace one belongs to tenant 'acme'"):
            judge(PutTenant(tenant=Tenant("other", ("two", "one"))))
    assert machine.quotas.find_tenant("other") is None
    tenant(machine, "acme", "two")
    tenant(machine, "other", "one")
    owners = [machine.quotas.tenant_of(name) for name in ("one", "two", "three")]
    assert [one.name if one is not None else "" for one in owners] == ["other", "acme", ""]


def test_the_strictest_of_namespace_and_tenant_holds_and_changes_are_told() -> None:
    machine = Metadata()
    assert machine.quotas.effective("default") is None
    assert limit(machine, max_producers_per_topic=5, auto_create=False) == [QuotasChanged(("default",))]
    assert tenant(machine, "acme", "default", "one", max_producers_per_topic=3) == [
        QuotasChanged(("default", "one"))
    ]
    found = machine.quotas.effective("default")
    assert found == NamespacePolicy(max_producers_per_topic=3, auto_create=False)
    assert machine.quotas.policy("default").max_producers_per_topic == 5
    assert tenant(machine, "acme", "default", max_producers_per_topic=7) == [
        QuotasChanged(("default", "one"))
    ]
    found = machine.quotas.effective("default")
    assert found is not None and found.max_producers_per_topic == 5
    assert limit(machine, max_producers_per_topic=5, auto_create=False) == []
    assert propose(machine, DeleteTenant(name="acme")) == [], "nothing else holds than before"
    assert limit(machine) == [QuotasChanged(("default",))] and not machine.quotas


def test_a_deleted_namespace_takes_its_policy_along() -> None:
    machine = Metadata()
    propose(machine, CreateNamespace(namespace="one"))
    limit(machine, "one", max_topics=1)
    propose(machine, DeleteNamespace(namespace="one"))
    propose(machine, CreateNamespace(namespace="one"))
    assert machine.quotas.effective("one") is None


def test_topics_are_as_durable_and_as_short_lived_as_their_namespace_demands() -> None:
    machine = Metadata()
    propose(machine, topic("/default/old", durability="written"))
    limit(machine, durability_min="fsync", retention_max_ms=1_000)
    wrong_ones: list[dict[str, Any]] = [
        {"durability": "written", "retention_ms": 1_000},
        {"durability": "fsync", "retention_ms": 1_001},
        {"durability": "fsync", "retention_ms": 0},
        {"durability": "fsync", "retention_ms": 1_000, "cleanup": "compact"},
        {"durability": "memory", "reliable": False},
    ]
    for wrong in wrong_ones:
        with pytest.raises(PolicyMismatch):
            propose(machine, topic("/default/new", **wrong))
    propose(machine, topic("/default/new", durability="fsync", retention_ms=1_000))
    for name in ("/default/new", "/default/old"):
        with pytest.raises(PolicyMismatch, match=r"1001 ms: its namespace allows 1000 ms"):
            propose(
                machine, UpdatePolicy(topic=name, policy=TopicPolicy(durability="fsync", retention_ms=1_001))
            )
    limit(machine, retention_max_ms=1_000)
    propose(machine, topic("/default/lossy", durability="memory", reliable=False))


def test_a_policy_is_fitted_as_far_as_it_goes() -> None:
    limits = NamespacePolicy(durability_min="fsync", retention_max_ms=1_000)
    fitted = fitting(TopicPolicy(), limits)
    assert (fitted.durability, fitted.retention_ms) == ("fsync", 1_000)
    assert fitting(fitted, limits) is fitted and fitting(TopicPolicy(), NOTHING) == TopicPolicy()
    lossy = TopicPolicy(reliable=False, durability="memory")
    assert fitting(lossy, limits) is lossy
    with pytest.raises(PolicyMismatch, match="demands fsync"):
        check_durability("/default/t", lossy, limits)


def test_a_schema_that_is_demanded_is_not_taken_away() -> None:
    machine = Metadata()
    propose(machine, topic("/default/a"))
    propose(machine, subject("s"))
    configured = ConfigureTopicSchema(topic="/default/a", schema=TopicSchema("s"))
    propose(machine, configured)
    limit(machine, schema_required=True)
    with pytest.raises(PolicyMismatch, match="has no schema"):
        propose(machine, ConfigureTopicSchema(topic="/default/a"))
    limit(machine)
    propose(machine, ConfigureTopicSchema(topic="/default/a"))


@pytest.mark.parametrize(
    "command, error",
    [
        (SetNamespacePolicy(namespace="none", policy=NOTHING), NotFound),
        (SetNamespacePolicy(namespace="default", policy=NamespacePolicy(max_topics=-1)), InvalidArgument),
        (
            SetNamespacePolicy(namespace="default", policy=NamespacePolicy(retention_max_ms=LIMIT_MAX + 1)),
            InvalidArgument,
        ),
        (
            SetNamespacePolicy(namespace="default", policy=NamespacePolicy(durability_min="memory")),
            InvalidArgument,
        ),
        (PutTenant(tenant=Tenant("", ())), InvalidName),
        (PutTenant(tenant=Tenant("t", ("a/b",))), InvalidName),
        (PutTenant(tenant=Tenant("t", ("a", "a"))), InvalidArgument),
        (PutTenant(tenant=Tenant("t", (), NamespacePolicy(max_subjects=-1))), InvalidArgument),
        (DeleteTenant(name="none"), NotFound),
    ],
)
def test_what_is_refused_changes_nothing(command: Command, error: type[CallerError]) -> None:
    machine = Metadata()
    before = machine.snapshot()
    with pytest.raises(error):
        machine.check(command)
    assert machine.snapshot() == before


def test_tenants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Metadata()
    monkeypatch.setattr(quotas_module, "TENANTS_MAX", 1)
    monkeypatch.setattr(quotas_module, "NAMESPACES_PER_TENANT_MAX", 2)
    tenant(machine, "a", "one", "two")
    tenant(machine, "a", "two")
    for wrong in (Tenant("b", ()), Tenant("a", ("one", "two", "three"))):
        with pytest.raises(LimitExceeded):
            propose(machine, PutTenant(tenant=wrong))
    machine.apply(machine.version + 1, PutTenant(tenant=Tenant("b", ())))
    assert len(machine.quotas.tenants()) == 2, "what was agreed stays applicable"


def test_what_was_agreed_stays_applicable_when_limits_get_smaller() -> None:
    machine = Metadata()
    limit(machine, max_topics=1)
    for name in ("/default/a", "/default/b"):
        machine.apply(machine.version + 1, topic(name))
    assert machine.topics_in("default") == 2


def test_dead_letters_stay_where_the_namespace_or_its_tenant_says() -> None:
    machine = Metadata()
    for namespace in ("one", "two", "far"):
        machine.apply(machine.version + 1, CreateNamespace(namespace=namespace))
    machine.apply(machine.version + 1, PutTenant(tenant=Tenant("acme", ("one", "two"))))

    def allowed(letters: str) -> bool:
        failure = FailurePolicy(poison="dead_letter", dead_letter_topic=letters)
        policy = TopicPolicy(failure=failure)
        try:
            return machine.check(CreateTopic(topic="/one/orders", policy=policy, created_us=1))
        except PolicyMismatch:
            return False

    places = ("/one/letters", "/two/letters", "/far/letters")
    for within, expected in (("", 3), ("tenant", 2), ("namespace", 1)):
        policy = NamespacePolicy(dead_letter_within=within)
        machine.apply(machine.version + 1, SetNamespacePolicy(namespace="one", policy=policy))
        assert [allowed(place) for place in places] == [True] * expected + [False] * (3 - expected)
    machine.apply(machine.version + 1, CreateTopic(topic="/one/t", policy=TopicPolicy(), created_us=1))
    settings = SubscriptionSettings(
        failure=FailurePolicy(poison="dead_letter", dead_letter_topic="/far/letters")
    )
    with pytest.raises(PolicyMismatch, match="dead_letter_within"):
        machine.check(SetSubscriptionSettings(topic="/one/t", subscription="s", settings=settings))
    with pytest.raises(PolicyMismatch, match="dead_letter_within"):
        machine.check(UpdatePolicy(topic="/one/t", policy=TopicPolicy(failure=settings.failure)))


def test_demands_that_are_words_know_their_words_and_the_strictest_holds() -> None:
    for name in ("subscription_auth", "dead_letter_within"):
        with pytest.raises(InvalidArgument, match=name):
            NamespacePolicy(**{name: "else"}).check()
    both = strictest(
        NamespacePolicy(dead_letter_within="tenant", subscription_auth="prefix"),
        NamespacePolicy(dead_letter_within="namespace"),
    )
    assert (both.dead_letter_within, both.subscription_auth) == ("namespace", "prefix")


LIMIT = st.integers(0, 3)
POLICY = st.builds(
    NamespacePolicy,
    max_topics=LIMIT,
    max_producers_per_topic=LIMIT,
    max_unacked=LIMIT,
    durability_min=st.sampled_from(["", "written", "fsync"]),
    auto_create=st.booleans(),
    schema_required=st.booleans(),
    dead_letter_within=st.sampled_from(["", "tenant", "namespace"]),
)
NAMESPACE = st.sampled_from(["default", "system", "one"])
TENANT = st.builds(
    Tenant,
    st.sampled_from(["a", "b"]),
    st.lists(NAMESPACE, unique=True, max_size=3).map(tuple),
    POLICY,
)
COMMAND = st.one_of(
    st.builds(SetNamespacePolicy, namespace=NAMESPACE, policy=POLICY | st.just(NOTHING)),
    st.builds(PutTenant, tenant=TENANT),
    st.builds(DeleteTenant, name=st.sampled_from(["a", "b"])),
    st.builds(CreateNamespace, namespace=NAMESPACE),
    st.builds(DeleteNamespace, namespace=NAMESPACE),
    st.builds(topic, st.builds("/{}/{}".format, NAMESPACE, st.sampled_from(["a", "b", "c"]))),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(COMMAND, max_size=20), st.integers(0, 20))
def test_machines_agree_on_policies_whatever_they_read(commands: list[Command], cut: int) -> None:
    first, second = Metadata(), Metadata()
    for number, command in enumerate(commands):
        assert decode_commands(join_commands([encode_command(command)])) == [command]
        if number == cut:
            second = Metadata.restore(second.snapshot())
        before, results = first.copy(), []
        for machine in (first, second):
            try:
                results.append(machine.apply(machine.version + 1, command))
            except CallerError as error:
                results.append([])
                assert type(error) in (Conflict, NotFound) or not isinstance(command, SetNamespacePolicy)
        assert results[0] == results[1]
        told = {
            name for change in results[0] if isinstance(change, QuotasChanged) for name in change.namespaces
        }
        if not isinstance(command, DeleteNamespace):
            assert told == set(first.quotas.changes_since(before.quotas))
    assert first.snapshot() == second.snapshot() == Metadata.restore(first.snapshot()).snapshot()
    for name in ("default", "system", "one"):
        assert first.quotas.effective(name) == second.quotas.effective(name)
    assert first.changes_since(second) == []


@given(st.lists(LIMIT, max_size=4))
def test_the_smallest_limit_is_the_smallest_that_is_one(limits: list[int]) -> None:
    real = [one for one in limits if one]
    assert smallest(*limits) == (min(real) if real else 0)


@given(POLICY, POLICY)
def test_the_strictest_is_as_strict_as_both(first: NamespacePolicy, second: NamespacePolicy) -> None:
    found = strictest(first, second)
    assert found == strictest(second, first)
    assert strictest(found, first) == found and strictest(first, first) == first
    assert strictest(first, NOTHING) == first
    assert all(
        getattr(found, name) == smallest(getattr(first, name), getattr(second, name)) for name in LIMITS
    )


def test_a_snapshot_with_policies_is_of_the_fourth_format() -> None:
    machine = Metadata()
    plain = machine.snapshot()
    limit(machine, max_topics=4)
    tenant(machine, "acme", "default", max_topics=9)
    snapshot = machine.snapshot()
    assert (plain[:4], snapshot[:4]) == (b"DNM1", b"DNM4")
    restored = Metadata.restore(snapshot)
    assert restored.quotas.policies() == [("default", NamespacePolicy(max_topics=4))]
    assert restored.quotas.tenants() == [Tenant("acme", ("default",), NamespacePolicy(max_topics=9))]
    assert not Metadata.restore(plain).quotas
    assert restored.changes_since(Metadata.restore(plain)) == [QuotasChanged(("default",))]


# -- brokers of an older version -----------------------------------------------------------------------


def test_policies_wait_until_every_broker_that_is_alive_knows_them() -> None:
    machine = Metadata()
    for command in (
        GrantLease(lease_id=1, ttl_ms=10_000),
        GrantLease(lease_id=2, ttl_ms=10_000),
        RegisterBroker(broker_id=1, lease_id=1, native_address="a:1", version="0.2"),
        RegisterBroker(broker_id=2, lease_id=2, native_address="b:1", version="0.1"),
        PutKey(key=f"{COMMANDS_PREFIX}1", value=b"%d" % COMMANDS, lease_id=1),
    ):
        propose(machine, command)
    setting = SetNamespacePolicy(namespace="default", policy=NamespacePolicy(max_topics=1))
    for command in (setting, PutTenant(tenant=Tenant("acme", ("default",))), DeleteTenant(name="acme")):
        with pytest.raises(WrongState, match=r"broker 2 does not know policies.* older version, 0\.1"):
            machine.check(command)
    propose(machine, PutKey(key=f"{COMMANDS_PREFIX}2", value=b"what", lease_id=2))
    with pytest.raises(WrongState):
        machine.check(setting)
    propose(machine, RevokeLease(lease_id=2))
    assert machine.check(setting), "it is not alive, and learns of policies when it is"
    propose(machine, setting)


def test_what_was_agreed_is_applied_whoever_is_alive() -> None:
    machine = Metadata()
    propose(machine, GrantLease(lease_id=1, ttl_ms=10_000))
    propose(machine, RegisterBroker(broker_id=1, lease_id=1, native_address="a:1"))
    setting = SetNamespacePolicy(namespace="default", policy=NamespacePolicy(max_topics=1))
    machine.apply(machine.version + 1, setting)
    assert machine.quotas.policy("default").max_topics == 1


def test_fields_that_came_later_are_stored_where_they_say_something() -> None:
    plain, limited = TopicPolicy(), TopicPolicy(max_publish_rate=5)
    for policy, found in ((plain, False), (limited, True)):
        command = CreateTopic(topic="/default/t", policy=policy, created_us=1)
        encoded = encode_command(command)
        assert (b"max_publish_rate" in encoded) == found and b"max_publish_bytes" not in encoded
        assert decode_commands(join_commands([encoded])) == [command]
    machine = Metadata()
    propose(machine, CreateTopic(topic="/default/t", policy=limited, created_us=1))
    setting = SetNamespacePolicy(namespace="default", policy=NamespacePolicy(max_storage_bytes=7))
    [stored] = msgspec.msgpack.decode(join_commands([encode_command(setting)]))
    assert set(NamespacePolicy.__struct_fields__) - set(stored["policy"]) == {
        "max_publish_rate", "max_publish_bytes", "max_dispatch_rate", "max_dispatch_bytes",
        "subscription_auth", "dead_letter_within", "max_unacked",
    }  # fmt: skip
    propose(machine, setting)
    again = Metadata.restore(machine.snapshot())
    assert again.topic("/default/t").policy == limited
    assert again.quotas.policy("default").max_storage_bytes == 7
