"""TopicAdmin and NamespaceAdmin: each row of the contract's tables, over the real metadata machine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from danube.core.metadata.policies import NamespacePolicy
from danube.errors import DanubeError, OwnerMoved
from danube.server.proto import DanubeAdmin_pb2 as pb
from danube.server.services.namespace_admin import NamespaceAdmin
from danube.server.services.topic_admin import TopicAdmin
from tests.fakes.broker_calls import FakeBrokerCalls, FakeCall

POLICY = pb.SubscriptionFailurePolicy(
    max_redelivery_count=3,
    ack_timeout_ms=1_000,
    base_redelivery_delay_ms=100,
    max_redelivery_delay_ms=5_000,
    backoff_strategy=pb.Exponential,
    dead_letter_topic="/default/dead",
    poison_policy=pb.DeadLetter,
)


class Admin:
    """Both servicers on one broker; a call returns the response, or the error's status and text."""

    def __init__(self) -> None:
        self.broker = FakeBrokerCalls()
        self._servicers = [TopicAdmin(self.broker), NamespaceAdmin(self.broker)]

    def __call__(self, method: str, request: Any) -> Any:
        servicer = next(one for one in self._servicers if hasattr(one, method))
        return asyncio.run(getattr(servicer, method)(request, FakeCall()))

    def refused(self, method: str, request: Any) -> tuple[str, str]:
        with pytest.raises(DanubeError) as caught:
            self(method, request)
        return caught.value.status, f"{caught.value} {caught.value.hint}"

    def create(self, name: str, *, reliable: bool = True, partitions: int = 0, subject: str = "") -> None:
        strategy = pb.Reliable if reliable else pb.NonReliable
        subject_field = {"schema_subject": subject} if subject else {}
        if partitions:
            self(
                "create_partitioned_topic",
                pb.PartitionedTopicRequest(
                    base_name=name, partitions=partitions, dispatch_strategy=strategy, **subject_field
                ),
            )
        else:
            self("create_topic", pb.NewTopicRequest(name=name, dispatch_strategy=strategy, **subject_field))


@pytest.fixture
def admin() -> Admin:
    return Admin()


# Creation


@pytest.mark.parametrize(("reliable", "delivery"), [(True, "Reliable"), (False, "NonReliable")])
def test_create_topic_with_each_strategy(admin: Admin, reliable: bool, delivery: str) -> None:
    admin.create("/default/t", reliable=reliable)
    (one,) = admin("list_namespace_topics", pb.NamespaceRequest(name="default")).topics
    assert (one.name, one.broker_id, one.delivery) == ("/default/t", "4711", delivery)


def test_create_partitioned_topic_lists_physical_names(admin: Admin) -> None:
    admin.create("/default/p", partitions=3)
    listed = admin("list_namespace_topics", pb.NamespaceRequest(name="default")).topics
    assert [one.name for one in listed] == ["/default/p-part-0", "/default/p-part-1", "/default/p-part-2"]
    assert admin.broker.asked.count("create_topic") == 1, "one command makes all partitions"


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("/default/t", "ALREADY_EXISTS", "exists"),
        ("/default/p", "ALREADY_EXISTS", "3 partitions"),
        ("/default/t-part-0", "ALREADY_EXISTS", "look like a partition"),
        ("/default/p-part-9", "ALREADY_EXISTS", "look like a partition"),
        ("/default/free-part-0", "INVALID_ARGUMENT", "ends like a partition"),
        ("/none/t", "NOT_FOUND", "create the namespace first"),
        ("", "INVALID_ARGUMENT", "/namespace/name"),
        ("default/t", "INVALID_ARGUMENT", "/namespace/name"),
        ("a/b/c", "INVALID_ARGUMENT", "/namespace/name"),
        ("//", "INVALID_ARGUMENT", "/namespace/name"),
        ("/default/", "INVALID_ARGUMENT", "/namespace/name"),
        ("/default/ü", "INVALID_ARGUMENT", "/namespace/name"),
    ],
)
@pytest.mark.parametrize("partitions", [0, 2])
def test_creation_that_cannot_be(admin: Admin, name: str, status: str, says: str, partitions: int) -> None:
    admin.create("/default/t")
    admin.create("/default/p", partitions=3)
    method = "create_partitioned_topic" if partitions else "create_topic"
    request = (
        pb.PartitionedTopicRequest(base_name=name, partitions=partitions)
        if partitions
        else pb.NewTopicRequest(name=name)
    )
    got, text = admin.refused(method, request)
    assert got == status
    assert says in text
    assert admin.broker.metadata.topic_count == 2


def test_a_name_that_only_begins_like_another_is_free(admin: Admin) -> None:
    admin.create("/default/foobar")
    admin.create("/default/foo")
    admin.create("/default/foo-part-x")


@pytest.mark.parametrize(
    ("method", "request_", "says"),
    [
        ("create_topic", pb.NewTopicRequest(name="/default/t", dispatch_strategy=7), "dispatch_strategy"),
        (
            "create_partitioned_topic",
            pb.PartitionedTopicRequest(base_name="/default/t", partitions=1, dispatch_strategy=-1),
            "dispatch_strategy",
        ),
        ("create_partitioned_topic", pb.PartitionedTopicRequest(base_name="/default/t"), "partitions"),
    ],
)
def test_creation_with_impossible_fields(admin: Admin, method: str, request_: Any, says: str) -> None:
    status, text = admin.refused(method, request_)
    assert status == "INVALID_ARGUMENT"
    assert says in text
    assert admin.broker.metadata.topic_count == 0


def test_too_many_partitions_make_none(admin: Admin) -> None:
    status, _ = admin.refused(
        "create_partitioned_topic", pb.PartitionedTopicRequest(base_name="/default/t", partitions=2**32 - 1)
    )
    assert status == "RESOURCE_EXHAUSTED"
    assert admin.broker.metadata.topic_count == 0


@pytest.mark.parametrize("partitions", [0, 2])
def test_creation_with_a_subject_configures_it(admin: Admin, partitions: int) -> None:
    admin.broker.register("orders")
    admin.create("/default/t", partitions=partitions, subject="orders")
    assert admin.broker.topic_schemas["/default/t"]["subject"] == "orders"


@pytest.mark.parametrize("partitions", [0, 2])
@pytest.mark.parametrize("name", ["String", "Bytes", "Int64", "JSON", "json_schema"])
def test_the_name_of_a_schema_type_is_no_subject(admin: Admin, name: str, partitions: int) -> None:
    admin.create("/default/t", partitions=partitions, subject=name)
    assert not admin.broker.topic_schemas
    assert "/default/t" in {record.topic for record in admin.broker.metadata.topics()}


def test_a_subject_may_be_called_as_a_schema_type(admin: Admin) -> None:
    admin.broker.register("String")
    admin.create("/default/t", subject="String")
    assert admin.broker.topic_schemas["/default/t"]["subject"] == "String"


def test_creation_with_an_unknown_subject_leaves_no_topic(admin: Admin) -> None:
    status, text = admin.refused("create_topic", pb.NewTopicRequest(name="/default/t", schema_subject="nope"))
    assert status == "NOT_FOUND"
    assert "nope" in text
    assert admin.broker.metadata.topic_count == 0


# Lists


def test_lists_of_brokers(admin: Admin) -> None:
    admin.create("/default/t")
    mine = admin("list_broker_topics", pb.BrokerRequest(broker_id="4711")).topics
    assert [one.name for one in mine] == ["/default/t"]
    assert not admin("list_broker_topics", pb.BrokerRequest(broker_id="1")).topics


@pytest.mark.parametrize("broker_id", ["", "x", "-1", "1.0", "١", str(1 << 64), "9" * 30])
def test_broker_ids_that_are_none(admin: Admin, broker_id: str) -> None:
    status, text = admin.refused("list_broker_topics", pb.BrokerRequest(broker_id=broker_id))
    assert status == "INVALID_ARGUMENT"
    assert "ListBrokers" in text


def test_lists_of_an_unknown_namespace_are_empty(admin: Admin) -> None:
    assert not admin("list_namespace_topics", pb.NamespaceRequest(name="none")).topics
    assert not admin("get_namespace_topics", pb.NamespaceRequest(name="none")).topics


def test_what_another_worker_committed_is_read_first(admin: Admin) -> None:
    before = admin.broker.refreshed
    admin("list_namespace_topics", pb.NamespaceRequest(name="default"))
    assert admin.broker.refreshed == before + 1


# Deletion


def test_delete_a_topic(admin: Admin) -> None:
    admin.create("/default/t")
    assert admin("delete_topic", pb.TopicRequest(name="/default/t")).success
    assert not admin("list_namespace_topics", pb.NamespaceRequest(name="default")).topics


def test_the_base_name_deletes_all_partitions(admin: Admin) -> None:
    admin.create("/default/p", partitions=3)
    assert admin("delete_topic", pb.TopicRequest(name="/default/p")).success
    assert not admin("list_namespace_topics", pb.NamespaceRequest(name="default")).topics


def test_one_partition_cannot_be_deleted(admin: Admin) -> None:
    admin.create("/default/p", partitions=4)
    status, text = admin.refused("delete_topic", pb.TopicRequest(name="/default/p-part-3"))
    assert status == "INVALID_ARGUMENT"
    assert "Cannot delete individual partition" in text
    assert "/default/p," in text
    assert admin.broker.metadata.partition_count == 4


def test_deleting_what_is_not_there(admin: Admin) -> None:
    assert admin.refused("delete_topic", pb.TopicRequest(name="/default/t"))[0] == "NOT_FOUND"


def test_unload_is_for_several_brokers(admin: Admin) -> None:
    admin.create("/default/t")
    status, text = admin.refused("unload_topic", pb.TopicRequest(name="/default/t"))
    assert status == "FAILED_PRECONDITION"
    assert "one host" in text


# Description


def test_describe_without_a_schema(admin: Admin) -> None:
    admin.create("/default/t")
    admin.broker.subscribe("/default/t", "b")
    admin.broker.subscribe("/default/t", "a")
    found = admin("describe_topic", pb.DescribeTopicRequest(name="/default/t"))
    assert (found.name, found.broker_id, found.delivery) == ("/default/t", "4711", "Reliable")
    assert list(found.subscriptions) == ["a", "b"]
    for field in ("schema_subject", "schema_id", "schema_version", "schema_type", "compatibility_mode"):
        assert not found.HasField(field)


def test_describe_with_a_schema_shows_the_latest_version(admin: Admin) -> None:
    admin.broker.register("orders", "avro", b"1")
    schema_id = admin.broker.register("orders", "avro", b"2")
    admin.create("/default/t", subject="orders")
    found = admin("describe_topic", pb.DescribeTopicRequest(name="/default/t"))
    assert (found.schema_subject, found.schema_id, found.schema_version) == ("orders", schema_id, 2)
    assert (found.schema_type, found.compatibility_mode) == ("avro", "BACKWARD")


def test_describe_where_the_subject_is_gone(admin: Admin) -> None:
    admin.broker.register("orders")
    admin.create("/default/t", subject="orders")
    admin.broker.schemas.clear()
    found = admin("describe_topic", pb.DescribeTopicRequest(name="/default/t"))
    assert found.schema_subject == "orders"
    assert not found.HasField("schema_id")


def test_describe_of_base_and_partition(admin: Admin) -> None:
    admin.create("/default/p", partitions=3, reliable=False)
    for number, name in ((0, "first"), (2, "last"), (2, "first")):
        admin.broker.subscribe(f"/default/p-part-{number}", name)
    base = admin("describe_topic", pb.DescribeTopicRequest(name="/default/p"))
    assert list(base.subscriptions) == ["first", "last"], "each name once"
    part = admin("describe_topic", pb.DescribeTopicRequest(name="/default/p-part-0"))
    assert list(part.subscriptions) == ["first"]
    assert (part.name, part.delivery) == ("/default/p-part-0", "NonReliable")


@pytest.mark.parametrize("name", ["/default/none", "/none/t", "/default/p-part-3", "/default/t-part-0"])
def test_describe_never_fails_for_unknown_topics(admin: Admin, name: str) -> None:
    admin.create("/default/p", partitions=3)
    admin.create("/default/t")
    found = admin("describe_topic", pb.DescribeTopicRequest(name=name))
    assert (found.name, found.broker_id, found.delivery) == (name, "", "NonReliable")
    assert not admin("list_subscriptions", pb.TopicRequest(name=name)).subscriptions


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("describe_topic", pb.DescribeTopicRequest(name="t")),
        ("list_subscriptions", pb.TopicRequest(name="t")),
        ("delete_topic", pb.TopicRequest(name="t")),
        ("unload_topic", pb.TopicRequest(name="t")),
        ("unsubscribe", pb.SubscriptionRequest(topic="t", subscription="s")),
        (
            "set_subscription_failure_policy",
            pb.SetSubscriptionFailurePolicyRequest(topic="t", subscription="s"),
        ),
        (
            "get_subscription_failure_policy",
            pb.GetSubscriptionFailurePolicyRequest(topic="t", subscription="s"),
        ),
        (
            "set_subscription_dispatch_config",
            pb.SetSubscriptionDispatchConfigRequest(topic="t", subscription="s"),
        ),
        (
            "get_subscription_dispatch_config",
            pb.GetSubscriptionDispatchConfigRequest(topic="t", subscription="s"),
        ),
    ],
)
def test_malformed_topic_names_are_told(admin: Admin, method: str, request_: Any) -> None:
    status, text = admin.refused(method, request_)
    assert status == "INVALID_ARGUMENT"
    assert "/namespace/name" in text


# Subscriptions


def test_many_partitions_are_asked_in_groups(admin: Admin) -> None:
    admin.create("/default/p", partitions=200)
    admin.broker.subscribe("/default/p-part-199", "s")
    assert list(admin("list_subscriptions", pb.TopicRequest(name="/default/p")).subscriptions) == ["s"]
    assert admin.broker.asked.count("list_subscriptions") == 200


def test_an_owner_that_moved_is_told_as_unavailable(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    admin.create("/default/t")

    async def moved(partition: str, op: str, **args: Any) -> Any:
        raise OwnerMoved("the owner started again")

    monkeypatch.setattr(admin.broker, "ask_partition", moved)
    assert admin.refused("list_subscriptions", pb.TopicRequest(name="/default/t"))[0] == "UNAVAILABLE"


def test_unsubscribe_on_every_partition_that_has_it(admin: Admin) -> None:
    admin.create("/default/p", partitions=3)
    for number in (0, 2):
        admin.broker.subscribe(f"/default/p-part-{number}", "s")
    admin.broker.subscribe("/default/p-part-0", "other")
    request = pb.SubscriptionRequest(topic="/default/p", subscription="s")
    assert admin("unsubscribe", request).success
    assert list(admin.broker.subscriptions) == [("/default/p-part-0", "other")]
    assert admin.refused("unsubscribe", request)[0] == "NOT_FOUND"


def test_a_deleted_subscription_leaves_no_settings(admin: Admin) -> None:
    admin.create("/default/p", partitions=2)
    admin("set_subscription_failure_policy", set_policy("/default/p"))
    for number in range(2):
        admin.broker.subscribe(f"/default/p-part-{number}", "s")
    admin("unsubscribe", pb.SubscriptionRequest(topic="/default/p-part-0", subscription="s"))
    assert admin("get_subscription_failure_policy", get_policy("/default/p")).failure_policy == POLICY
    admin("unsubscribe", pb.SubscriptionRequest(topic="/default/p", subscription="s"))
    assert not admin("get_subscription_failure_policy", get_policy("/default/p")).HasField("failure_policy")


def test_unsubscribe_of_one_partition(admin: Admin) -> None:
    admin.create("/default/p", partitions=2)
    admin.broker.subscribe("/default/p-part-0", "s")
    admin.broker.subscribe("/default/p-part-1", "s")
    admin("unsubscribe", pb.SubscriptionRequest(topic="/default/p-part-1", subscription="s"))
    assert list(admin.broker.subscriptions) == [("/default/p-part-0", "s")]


def test_unsubscribe_with_consumers_deletes_nothing(admin: Admin) -> None:
    admin.create("/default/p", partitions=2)
    admin.broker.subscribe("/default/p-part-0", "s")
    admin.broker.subscribe("/default/p-part-1", "s", "alice")
    status, text = admin.refused("unsubscribe", pb.SubscriptionRequest(topic="/default/p", subscription="s"))
    assert status == "FAILED_PRECONDITION"
    assert "alice" in text
    assert len(admin.broker.subscriptions) == 2


@pytest.mark.parametrize("joined", [True, False], ids=["joined", "deleted"])
def test_unsubscribe_that_races(admin: Admin, joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer joins, or somebody else deletes it, between the look and the deletion."""
    admin.create("/default/t")
    admin.broker.subscribe("/default/t", "s")
    delete = admin.broker._partition_delete_subscription

    def meanwhile(partition: str, subscription: str) -> None:
        if joined:
            admin.broker.subscriptions[partition, subscription].append("bob")
        else:
            del admin.broker.subscriptions[partition, subscription]
        delete(partition, subscription)

    monkeypatch.setattr(admin.broker, "_partition_delete_subscription", meanwhile)
    request = pb.SubscriptionRequest(topic="/default/t", subscription="s")
    if joined:
        assert admin.refused("unsubscribe", request)[0] == "FAILED_PRECONDITION"
    else:
        assert admin("unsubscribe", request).success


def test_unsubscribe_on_an_unknown_topic(admin: Admin) -> None:
    status, _ = admin.refused("unsubscribe", pb.SubscriptionRequest(topic="/default/t", subscription="s"))
    assert status == "NOT_FOUND"


@pytest.mark.parametrize(
    "method", ["unsubscribe", "get_subscription_failure_policy", "get_subscription_dispatch_config"]
)
@pytest.mark.parametrize("name", ["", "a\x00b", "x" * 257])
def test_malformed_subscription_names(admin: Admin, method: str, name: str) -> None:
    admin.create("/default/t")
    request = pb.SubscriptionRequest(topic="/default/t", subscription=name)
    assert admin.refused(method, request)[0] == "INVALID_ARGUMENT"


# Failure policy


def set_policy(topic: str, policy: Any = POLICY) -> Any:
    return pb.SetSubscriptionFailurePolicyRequest(topic=topic, subscription="s", failure_policy=policy)


def get_policy(topic: str) -> Any:
    return pb.GetSubscriptionFailurePolicyRequest(topic=topic, subscription="s")


@pytest.mark.parametrize("topic", ["/default/t", "/default/p", "/default/p-part-1"])
def test_a_failure_policy_set_before_the_subscription_exists(admin: Admin, topic: str) -> None:
    admin.create("/default/t")
    admin.create("/default/p", partitions=2)
    assert admin("set_subscription_failure_policy", set_policy(topic)).success
    found = admin("get_subscription_failure_policy", get_policy(topic))
    assert found.failure_policy == POLICY
    assert found.subscription_type == 0


@pytest.mark.parametrize(
    ("mode", "number"), [("exclusive", 0), ("shared", 1), ("failover", 2), ("key_shared", 3)]
)
def test_an_existing_subscription_tells_its_type_and_the_policy_that_it_has(
    admin: Admin, mode: str, number: int
) -> None:
    admin.create("/default/t")
    admin.broker.subscribe("/default/t", "s", mode=mode)
    found = admin("get_subscription_failure_policy", get_policy("/default/t"))
    assert found.subscription_type == number
    assert found.failure_policy.max_redelivery_count == 5
    assert found.failure_policy.backoff_strategy == pb.Exponential
    assert found.failure_policy.poison_policy == pb.Block
    assert not found.failure_policy.HasField("dead_letter_topic")


def test_no_subscription_and_no_policy_is_unset(admin: Admin) -> None:
    admin.create("/default/t")
    assert not admin("get_subscription_failure_policy", get_policy("/default/t")).HasField("failure_policy")


def test_a_non_reliable_subscription_has_no_policy(admin: Admin) -> None:
    admin.create("/default/t", reliable=False)
    admin.broker.subscribe("/default/t", "s")
    found = admin("get_subscription_failure_policy", get_policy("/default/t"))
    assert not found.HasField("failure_policy")
    assert found.subscription_type == 1


def test_policies_of_an_unknown_topic(admin: Admin) -> None:
    assert admin.refused("get_subscription_failure_policy", get_policy("/default/t"))[0] == "NOT_FOUND"
    assert admin.refused("set_subscription_failure_policy", set_policy("/default/t"))[0] == "NOT_FOUND"


def changed(**fields: Any) -> Any:
    policy = pb.SubscriptionFailurePolicy()
    policy.CopyFrom(POLICY)
    for name, value in fields.items():
        setattr(policy, name, value)
    return policy


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (None, "failure_policy"),
        (changed(dead_letter_topic=""), "dead_letter_topic"),
        (changed(dead_letter_topic="dead"), "/namespace/name"),
        (changed(backoff_strategy=9), "backoff_strategy"),
        (changed(poison_policy=-1), "poison_policy"),
        (changed(ack_timeout_ms=0), "ack_timeout_ms"),
        (changed(ack_timeout_ms=2**64 - 1), "3650 days"),
        (changed(base_redelivery_delay_ms=2**63), "3650 days"),
        (changed(max_redelivery_delay_ms=2**40), "3650 days"),
    ],
)
def test_failure_policies_that_cannot_be(admin: Admin, policy: Any, says: str) -> None:
    admin.create("/default/t")
    status, text = admin.refused("set_subscription_failure_policy", set_policy("/default/t", policy))
    assert status == "INVALID_ARGUMENT"
    assert says in text


@pytest.mark.parametrize("method", ["failure_policy", "dispatch_config"])
def test_a_non_reliable_topic_takes_no_policy(admin: Admin, method: str) -> None:
    admin.create("/default/t", reliable=False)
    request = set_policy("/default/t") if method == "failure_policy" else set_unacked(10)
    status, text = admin.refused(f"set_subscription_{method}", request)
    assert status == "FAILED_PRECONDITION"
    assert "not reliable" in text


# Dispatch config


def set_unacked(value: int) -> Any:
    config = pb.SubscriptionDispatchConfig(max_unacked_messages=value)
    return pb.SetSubscriptionDispatchConfigRequest(
        topic="/default/t", subscription="s", dispatch_config=config
    )


@pytest.mark.parametrize("value", [1, 10, 10_000])
def test_dispatch_config_is_kept(admin: Admin, value: int) -> None:
    admin.create("/default/t")
    request = pb.GetSubscriptionDispatchConfigRequest(topic="/default/t", subscription="s")
    assert not admin("get_subscription_dispatch_config", request).HasField("dispatch_config")
    assert admin("set_subscription_dispatch_config", set_unacked(value)).success
    found = admin("get_subscription_dispatch_config", request)
    assert found.dispatch_config.max_unacked_messages == value


@pytest.mark.parametrize("value", [0, 10_001, 2**32 - 1])
def test_dispatch_config_out_of_range(admin: Admin, value: int) -> None:
    admin.create("/default/t")
    status, text = admin.refused("set_subscription_dispatch_config", set_unacked(value))
    assert status == "INVALID_ARGUMENT"
    assert "1 .. 10000" in text


def test_dispatch_config_must_be_there(admin: Admin) -> None:
    request = pb.SetSubscriptionDispatchConfigRequest(topic="/default/t", subscription="s")
    assert admin.refused("set_subscription_dispatch_config", request)[0] == "INVALID_ARGUMENT"


# Namespaces


def test_namespaces_come_and_go(admin: Admin) -> None:
    one = pb.NamespaceRequest(name="sales")
    assert admin("create_namespace", one).success
    assert admin.refused("create_namespace", one)[0] == "ALREADY_EXISTS"
    admin.create("/sales/p", partitions=2)
    names = list(admin("get_namespace_topics", one).topics)
    assert names == ["/sales/p-part-0", "/sales/p-part-1"]
    status, text = admin.refused("delete_namespace", one)
    assert status == "FAILED_PRECONDITION"
    assert "/sales/p" in text
    admin("delete_topic", pb.TopicRequest(name="/sales/p"))
    assert admin("delete_namespace", one).success
    assert admin.refused("delete_namespace", one)[0] == "NOT_FOUND"


def test_default_and_system_stay(admin: Admin) -> None:
    for name in ("default", "system"):
        assert admin.refused("delete_namespace", pb.NamespaceRequest(name=name))[0] == "INVALID_ARGUMENT"


def test_policies_are_seven_integers(admin: Admin) -> None:
    found = json.loads(admin("get_namespace_policies", pb.NamespaceRequest(name="default")).policies)
    assert set(found) == {
        "max_producers_per_topic", "max_subscriptions_per_topic", "max_consumers_per_topic",
        "max_consumers_per_subscription", "max_publish_rate", "max_subscription_dispatch_rate",
        "max_message_size",
    }  # fmt: skip
    assert all(type(value) is int and value >= 0 for value in found.values())
    assert found["max_message_size"] == admin.broker.config.topics.max_record_bytes


def test_policies_are_the_namespaces_own(admin: Admin) -> None:
    limits = NamespacePolicy(
        max_producers_per_topic=3, max_subscription_dispatch_rate=9, max_message_size=1 << 40, max_topics=8,
        max_publish_rate_per_topic=5,
    )  # fmt: skip
    admin.broker.metadata.quotas.load([("default", limits)], [])
    found = json.loads(admin("get_namespace_policies", pb.NamespaceRequest(name="default")).policies)
    assert (found["max_producers_per_topic"], found["max_publish_rate"]) == (3, 5)
    assert found["max_subscription_dispatch_rate"] == 9
    assert found["max_message_size"] == admin.broker.config.topics.max_record_bytes, "the broker's is smaller"
    assert len(found) == 7


def test_policies_of_an_unknown_namespace(admin: Admin) -> None:
    assert admin.refused("get_namespace_policies", pb.NamespaceRequest(name="none"))[0] == "NOT_FOUND"


@pytest.mark.parametrize(
    "method",
    [
        "create_namespace", "delete_namespace", "get_namespace_topics", "get_namespace_policies",
        "list_namespace_topics",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["", "/default", "a/b", "a b", "é", "x" * 201])
def test_malformed_namespaces(admin: Admin, method: str, name: str) -> None:
    status, text = admin.refused(method, pb.NamespaceRequest(name=name))
    assert status == "INVALID_ARGUMENT"
    assert "for example default" in text
