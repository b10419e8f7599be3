"""Policies of namespaces and tenants through operations, and at the owner: at each limit, and one above."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from danube.broker.partition.limits import storage_refusal
from danube.core.metadata.commands import ConfigureTopicSchema, RegisterSchema, TopicSchema
from danube.core.metadata.policies import NamespacePolicy
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind, Lookup, OpenProducer, Subscribe
from danube.errors import (
    CallerError,
    Conflict,
    DanubeError,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    PolicyMismatch,
    QuotaExceeded,
    RecordTooLarge,
    SequenceGap,
    TopicNotFound,
)
from danube.host import clock
from tests.answers import fitting
from tests.unit.broker_parts import RecordingSession, RoutedBench, batch, numbered

ORDERS = "/default/some"


class Limited(RoutedBench):
    """A broker with topic ORDERS; what is committed reaches the shard as in a worker."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.session, self.client, self.handle = RecordingSession(7), RecordingSession(8), 0
        self.proposals.create(ORDERS)

    def _changed_metadata(self) -> None:
        super()._changed_metadata()
        for record in self.proposals.state.topics():
            self.shard.update_policy(record)
        self.shard.follow_limits(self.proposals.state.namespaces())

    def ask(self, op: str, **args: Any) -> Any:  # type: ignore[override]
        """The value, all steps done; raises what came instead."""
        self.request(self.session, Kind.ADMIN, wire.Admin(op, "", args))
        self.proposals.step()
        [frame] = self.session.take()
        if frame.kind == Kind.ERROR:
            raise frame.error
        return fitting(op, wire.decode_result(frame.body))

    def limit(self, **policy: Any) -> Any:
        return self.ask("set_namespace_policy", namespace="default", policy=policy)

    def produce(self, name: str, topic: str = ORDERS) -> int:
        """Open a producer; its handle.  Raises what came instead."""
        self.handle += 1
        self._opened(Kind.OPEN_PRODUCER, OpenProducer(topic, name), Kind.PRODUCER_OPENED)
        return self.handle

    def consume(
        self, subscription: str, consumer: str, topic: str = ORDERS, credit: int = 10, **fields: Any
    ) -> int:
        self.handle += 1
        body = Subscribe(topic, subscription, consumer, credit_records=credit, credit_bytes=1 << 20, **fields)
        self._opened(Kind.SUBSCRIBE, body, Kind.SUBSCRIBED)
        return self.handle

    def _opened(self, kind: int, body: Any, expected: int) -> None:
        self.client.take()
        self.request(self.client, kind, body, self.handle)
        self.syncer.step()
        [frame] = [one for one in self.client.take() if one.handle in (0, self.handle)]
        if frame.kind == Kind.ERROR:
            raise frame.error
        assert frame.kind == expected

    def close(self, kind: int, handle: int) -> None:
        self.request(self.client, kind, None, handle)

    def look_up(self, topic: str) -> str:
        """Use a topic that may be missing; its name."""
        self.request(self.session, Kind.LOOKUP, Lookup(topic, create=True))
        self.proposals.step()
        [frame] = self.session.take()
        if frame.kind == Kind.ERROR:
            raise frame.error
        return str(wire.decode_result(frame.body)["topic"])


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Limited]:
    made = Limited(tmp_path)
    yield made
    made.shard.close()


def refusal(limit: int, quota: str) -> Any:
    return pytest.raises(LimitExceeded, match=rf"the limit of its namespace is {limit} \({quota}\)")


# -- the operations -----------------------------------------------------------------------------------


def test_a_policy_is_changed_field_by_field_and_told_with_its_use(bench: Limited) -> None:
    assert bench.limit(max_topics=3) == {**_fields(), "max_topics": 3}
    assert bench.limit(max_topics=None, schema_required=True)["max_topics"] == 3
    bench.ask("put_tenant", name="acme", namespaces=["default"], quota={"max_producers_per_topic": 2})
    found = bench.ask("namespace_policy", namespace="/default")
    assert (found["namespace"], found["tenant"]) == ("default", "acme")
    assert found["policy"] == {**_fields(), "max_topics": 3, "schema_required": True}
    assert found["effective"]["max_producers_per_topic"] == 2
    assert found["usage"] == {"topics": 1, "partitions": 1, "subjects": 0}
    bench.limit(max_topics=0, schema_required=False)
    assert bench.ask("namespace_policy", namespace="default")["policy"] == _fields()


def _fields() -> dict[str, Any]:
    return {name: getattr(NamespacePolicy(), name) for name in NamespacePolicy.__struct_fields__}


@pytest.mark.parametrize(
    "op, args, error",
    [
        ("namespace_policy", {"namespace": "none"}, NotFound),
        ("set_namespace_policy", {"namespace": "none", "policy": {}}, NotFound),
        ("set_namespace_policy", {"namespace": "default", "policy": []}, InvalidArgument),
        ("set_namespace_policy", {"namespace": "default", "policy": {"max_birds": 1}}, InvalidArgument),
        ("set_namespace_policy", {"namespace": "default", "policy": {"max_topics": "x"}}, InvalidArgument),
        ("set_namespace_policy", {"namespace": "default", "policy": {"max_topics": -1}}, InvalidArgument),
        ("put_tenant", {"namespaces": []}, InvalidArgument),
        ("put_tenant", {"name": "t", "namespaces": "default"}, InvalidArgument),
        ("put_tenant", {"name": "t", "quota": {"max_birds": 1}}, InvalidArgument),
        ("delete_tenant", {"name": "none"}, NotFound),
    ],
)
def test_what_cannot_be_is_refused(
    bench: Limited, op: str, args: dict[str, Any], error: type[CallerError]
) -> None:
    with pytest.raises(error):
        bench.ask(op, **args)


def test_tenants_are_made_changed_listed_and_forgotten(bench: Limited) -> None:
    bench.ask("put_tenant", name="acme", namespaces=["default", "later"], quota={"max_topics": 2})
    bench.ask("put_tenant", name="acme", quota={"max_partitions": 4})
    [found] = bench.ask("tenants")
    assert (found["name"], found["namespaces"]) == ("acme", ["default", "later"])
    assert (found["quota"]["max_topics"], found["quota"]["max_partitions"]) == (2, 4)
    assert found["usage"] == {"topics": 1, "partitions": 1, "subjects": 0}
    with pytest.raises(Conflict):
        bench.ask("put_tenant", name="other", namespaces=["later"])
    bench.ask("put_tenant", name="acme", namespaces=[])
    assert bench.ask("tenants")[0]["namespaces"] == []
    bench.ask("delete_tenant", name="acme")
    assert bench.ask("tenants") == []


def test_quotas_tell_what_is_used(bench: Limited) -> None:
    bench.limit(max_topics=4, max_producers_per_topic=1)
    bench.ask("put_tenant", name="acme", namespaces=["default"], quota={"max_partitions": 9})
    assert bench.ask("quotas") == [
        {"of": "namespace", "name": "default", "quota": "max_topics", "used": 1, "limit": 4},
        {"of": "tenant", "name": "acme", "quota": "max_partitions", "used": 1, "limit": 9},
    ]


def test_topics_beyond_the_limit_are_refused_with_it(bench: Limited) -> None:
    bench.limit(max_topics=2)
    bench.ask("create_topic", topic="/default/second")
    with pytest.raises(LimitExceeded) as refused:
        bench.ask("create_topic", topic="/default/third")
    assert refused.value.facts == {"limit": 2, "quota": "max_topics"}
    with pytest.raises(LimitExceeded):
        bench.look_up("/default/third")
    assert bench.look_up("/default/second") == "/default/second"


# -- at the owner -------------------------------------------------------------------------------------


def test_producers_of_a_topic_are_counted_by_name(bench: Limited) -> None:
    first = bench.produce("p")
    bench.limit(max_producers_per_topic=2)
    bench.produce("q")
    bench.produce("q")  # the same one again
    with refusal(2, "max_producers_per_topic") as refused:
        bench.produce("r")
    assert refused.value.facts == {"limit": 2, "quota": "max_producers_per_topic"}
    bench.close(Kind.CLOSE_PRODUCER, first)
    bench.produce("r")


def test_consumers_of_a_subscription_are_counted(bench: Limited) -> None:
    first = bench.consume("s", "a")
    bench.limit(max_consumers_per_subscription=2)
    bench.consume("s", "b")
    bench.consume("s", "b")  # it takes over from its older connection
    with refusal(2, "max_consumers_per_subscription"):
        bench.consume("s", "c")
    bench.consume("other", "c")
    bench.close(Kind.CLOSE_CONSUMER, first)
    bench.consume("s", "c")


def test_consumers_of_a_topic_are_counted_over_its_subscriptions(bench: Limited) -> None:
    bench.limit(max_consumers_per_topic=2)
    bench.consume("s", "a")
    second = bench.consume("other", "a")
    for subscription in ("s", "new"):
        with refusal(2, "max_consumers_per_topic"):
            bench.consume(subscription, "b")
    assert "new" not in bench.shard.partitions[ORDERS].subscriptions
    bench.close(Kind.CLOSE_CONSUMER, second)
    bench.consume("s", "b")


@pytest.mark.parametrize("reliable", [True, False])
def test_subscriptions_of_a_topic_are_counted(bench: Limited, reliable: bool) -> None:
    topic = "/default/other"
    bench.proposals.create(topic, reliable=reliable, durability="written" if reliable else "memory")
    bench.consume("s", "a", topic)
    bench.limit(max_subscriptions_per_topic=2)
    bench.consume("t", "a", topic)
    bench.consume("t", "b", topic)  # joining makes none
    with refusal(2, "max_subscriptions_per_topic"):
        bench.consume("u", "a", topic)
    bench.limit(max_subscriptions_per_topic=0)
    bench.consume("u", "a", topic)


def test_a_tenants_quota_holds_at_the_owner_until_it_is_forgotten(bench: Limited) -> None:
    bench.ask("put_tenant", name="acme", namespaces=["default"], quota={"max_producers_per_topic": 1})
    bench.produce("p")
    with refusal(1, "max_producers_per_topic"):
        bench.produce("q")
    bench.ask("delete_tenant", name="acme")
    bench.produce("q")


def test_records_are_as_small_as_their_namespace_demands(bench: Limited) -> None:
    bench.limit(max_message_size=10)
    handle = bench.produce("p")
    body = bench.shard.partitions[ORDERS]
    assert (body.record_bytes_max, body.policy.max_record_bytes) == (10, 1 << 20)
    bench.publish(bench.client, batch(b"x" * 10, b"y" * 10), handle)
    bench.turn()
    assert [frame.kind for frame in bench.client.take()] == [Kind.PUBLISHED]
    bench.publish(bench.client, batch(b"x" * 11), handle)
    with pytest.raises(RecordTooLarge):
        raise bench.client.only(Kind.ERROR).error
    bench.limit(max_message_size=0)
    bench.publish(bench.client, batch(b"x" * 11), handle)
    bench.turn()
    assert [frame.kind for frame in bench.client.take()] == [Kind.PUBLISHED]


def test_the_dispatch_rate_of_a_namespace_is_shared_by_the_partitions(bench: Limited) -> None:
    bench.proposals.create("/default/wide", partitions=4, max_dispatch_rate=50)
    bench.limit(max_subscription_dispatch_rate=90)
    bench.produce("p", "/default/wide-part-1")
    hosted = bench.shard.partitions["/default/wide-part-1"]
    assert hosted.dispatch_limits.per_second == 23, "a quarter, rounded up"
    bench.limit(max_subscription_dispatch_rate=400)
    assert hosted.dispatch_limits.per_second == 50, "the topic's own is smaller"
    bench.limit(max_subscription_dispatch_rate=0)
    assert (hosted.dispatch_limits.per_second, hosted.limits) == (50, None)


def test_a_namespace_lowers_the_records_in_flight_of_open_and_later_subscriptions(bench: Limited) -> None:
    def bounds(topic: str = ORDERS) -> dict[str, int]:
        found = bench.shard.partitions[topic].subscriptions
        return {name: host.core.max_unacked for name, host in found.items()}

    bench.consume("plain", "c")
    bench.consume("asks", "c", max_unacked=20)
    bench.ask("set_subscription_settings", topic=ORDERS, subscription="set", max_unacked=70)
    bench.consume("set", "c")
    bench.limit(max_unacked=50)
    bench.consume("later", "c")
    assert bounds() == {"plain": 50, "asks": 20, "set": 50, "later": 50}
    bench.ask("put_tenant", name="acme", namespaces=["default"], quota={"max_unacked": 30})
    bench.ask("update_topic", topic=ORDERS, policy={"max_unacked": 10})
    assert bounds() == {"plain": 10, "asks": 20, "set": 30, "later": 10}
    bench.limit(max_unacked=0)
    bench.ask("delete_tenant", name="acme")
    assert bounds() == {"plain": 10, "asks": 20, "set": 70, "later": 10}


def test_a_subscription_that_is_read_from_its_cursor_has_the_bound_of_its_namespace(
    bench: Limited, tmp_path: Path
) -> None:
    bench.limit(max_unacked=5)
    bench.consume("s", "c")
    bench.shard.close()
    again = Limited(tmp_path)
    again.proposals.state = bench.proposals.state
    again.consume("other", "c")
    assert again.shard.partitions[ORDERS].subscriptions["s"].core.max_unacked == 5
    again.shard.close()


def test_a_bound_that_is_lowered_below_what_is_in_flight_waits_for_acks(bench: Limited) -> None:
    def delivered() -> list[int]:
        bench.turn()
        return [offset for offset, _ in bench.client.records()]

    bench.limit(max_unacked=6)
    consumer = bench.consume("s", "c", credit=100)
    bench.publish(bench.client, numbered(20), bench.produce("p"))
    assert delivered() == [*range(6)]
    bench.limit(max_unacked=2)
    bench.ack(bench.client, 0, 4, consumer)
    assert delivered() == [], "two are in flight"
    bench.ack(bench.client, 4, 5, consumer)
    assert delivered() == [6], "one came free"


def test_no_more_records_are_delivered_than_the_namespace_allows(
    bench: Limited, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 10**12
    monkeypatch.setattr(clock, "monotonic_ns", lambda: now)
    bench.limit(max_subscription_dispatch_rate=3)
    bench.consume("s", "c")
    handle = bench.produce("p")
    bench.publish(bench.client, numbered(8), handle)
    got = []
    for _ in range(4):
        bench.turn()
        got.append(len(bench.client.records()))
        now += 10**9
        bench.shard.tick()
    assert max(got) <= 3 and sum(got) == 8


def test_producers_of_topics_below_the_demanded_durability_are_refused(bench: Limited) -> None:
    bench.limit(durability_min="fsync")
    with pytest.raises(PolicyMismatch, match="demands fsync"):
        bench.produce("p")
    bench.ask("update_topic", topic=ORDERS, policy={"durability": "fsync"})
    bench.produce("p")
    with pytest.raises(PolicyMismatch):
        bench.ask("create_topic", topic="/default/weak", policy={"durability": "written"})
    bench.ask("create_topic", topic="/default/strong")
    assert bench.ask("topic", topic="/default/strong")["durability"] == "fsync", "the default follows"


@pytest.mark.parametrize("demand", [{"durability_min": "fsync"}, {"schema_required": True}])
def test_a_demand_that_comes_later_closes_producers_and_nothing_else(
    bench: Limited, demand: dict[str, Any]
) -> None:
    bench.proposals.create("/system/some")
    producer, consumer = bench.produce("p"), bench.consume("s", "c")
    outside = bench.produce("p", "/system/some")
    bench.publish(bench.client, numbered(1), producer)
    bench.limit(**demand)
    frames = bench.client.take()
    assert [(frame.kind, frame.handle) for frame in frames] == [(Kind.ERROR, producer)]
    assert isinstance(frames[0].error, PolicyMismatch) and next(iter(demand)) in str(frames[0].error)
    assert set(bench.client.producers) == {outside} and set(bench.client.consumers) == {consumer}
    bench.turn()
    assert [frame.kind for frame in bench.client.take()] == [Kind.PUBLISHED, Kind.DELIVER], (
        "it was taken before"
    )
    with pytest.raises(PolicyMismatch):
        bench.produce("p")
    bench.limit(durability_min="", schema_required=False)
    bench.produce("p")


def test_a_demand_that_is_met_and_a_smaller_number_close_nothing(bench: Limited) -> None:
    bench.ask("update_topic", topic=ORDERS, policy={"durability": "fsync"})
    handles = {bench.produce("p"), bench.produce("q")}
    consumers = {bench.consume("s", "a"), bench.consume("s", "b"), bench.consume("t", "a")}
    bench.limit(
        durability_min="fsync", auto_create=False, max_producers_per_topic=1, max_consumers_per_topic=1,
        max_subscriptions_per_topic=1, max_consumers_per_subscription=1, max_topics=1, max_partitions=1,
    )  # fmt: skip
    assert bench.client.take() == []
    assert set(bench.client.producers) == handles and set(bench.client.consumers) == consumers
    with refusal(1, "max_producers_per_topic"):
        bench.produce("r")


def test_new_topics_keep_records_as_long_as_their_namespace_allows(bench: Limited) -> None:
    bench.limit(retention_max_ms=5_000)
    with pytest.raises(PolicyMismatch, match="retention_max_ms"):
        bench.ask("create_topic", topic="/default/long", policy={"retention_ms": 5_001})
    bench.ask("create_topic", topic="/default/short", policy={"retention_ms": 4_000})
    bench.look_up("/default/used")
    kept = [
        bench.ask("topic", topic=f"/default/{name}")["policy"]["retention_ms"] for name in ("short", "used")
    ]
    assert kept == [4_000, 5_000]


def test_topics_are_not_made_by_being_used_where_the_namespace_says_no(bench: Limited) -> None:
    bench.limit(auto_create=False)
    with pytest.raises(TopicNotFound, match="auto_create is off in namespace default"):
        bench.look_up("/default/used")
    bench.limit(auto_create=True)
    bench.look_up("/default/used")


def test_producers_need_a_topic_with_a_schema_where_one_is_demanded(bench: Limited) -> None:
    bench.limit(schema_required=True)
    with pytest.raises(PolicyMismatch, match="schema_required"):
        bench.produce("p")
    registered = RegisterSchema(
        subject="s", after_revision=0, schema_type="string", definition=b"", fingerprint="f", created_us=1,
        compatibility="none",
    )  # fmt: skip
    for command in (registered, ConfigureTopicSchema(topic=ORDERS, schema=TopicSchema("s"))):
        bench.proposals.apply(command)
    bench._changed_metadata()
    bench.produce("p")
    with pytest.raises(PolicyMismatch):
        bench.ask("schema.configure_topic", topic=ORDERS, subject="")


def test_a_partition_that_is_opened_has_the_limits_of_its_namespace(bench: Limited) -> None:
    bench.limit(max_producers_per_topic=1)
    bench.produce("p")
    limits = bench.shard.partitions[ORDERS].limits
    assert limits == NamespacePolicy(max_producers_per_topic=1)


def test_a_shard_without_metadata_has_no_limits_to_follow(bench: Limited) -> None:
    bench.produce("p")
    metadata, bench.shard.metadata = bench.shard.metadata, None
    bench.proposals.state.quotas.load([("default", NamespacePolicy(max_topics=1))], [])
    bench.shard.follow_limits(("default",))
    assert bench.shard.partitions[ORDERS].limits is None
    bench.shard.metadata = metadata


def test_an_error_tells_the_limit_to_programs(bench: Limited) -> None:
    bench.limit(max_producers_per_topic=1)
    bench.produce("p")
    with pytest.raises(DanubeError) as refused:
        bench.produce("q")
    assert (refused.value.status, refused.value.retryable) == ("RESOURCE_EXHAUSTED", False)


# -- the publish rate ---------------------------------------------------------------------------------


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time, to be moved by hand."""
    now = [10**12]
    monkeypatch.setattr(clock, "monotonic_ns", lambda: now[0])
    return now


def kinds(bench: Limited) -> list[int]:
    return [frame.kind for frame in bench.client.take()]


def test_answers_wait_for_the_publish_rate_and_then_batches_are_refused(
    bench: Limited, at: list[int]
) -> None:
    bench.limit(max_publish_rate_per_topic=10)
    handle = bench.produce("p")
    bench.publish(bench.client, numbered(10), handle)
    bench.turn()
    assert (kinds(bench), bench.client.rest_ns) == ([Kind.PUBLISHED], 0)
    bench.publish(bench.client, numbered(10), handle)
    bench.turn()
    assert (kinds(bench), bench.client.rest_ns) == ([], at[0] + 10**9), "stored, and answered in a second"
    bench.publish(bench.client, numbered(1), handle)
    error = bench.client.only(Kind.ERROR).error
    assert isinstance(error, QuotaExceeded) and error.retryable
    assert bench.client.rest_ns == at[0] + 10**9, "who is refused is not read for a second"
    assert error.facts == {"limit": 10, "quota": "max_publish_rate_per_topic", "retry_after_ms": 1_001}
    at[0] += 999_000_000
    bench.shard.tick()
    bench.turn()
    assert kinds(bench) == []
    at[0] += 1_000_000
    bench.shard.tick()
    bench.turn()
    assert kinds(bench) == [Kind.PUBLISHED]
    assert not bench.shard._paced, "nothing more to look after"
    assert bench.shard.partitions[ORDERS].high_watermark == 20, "what was refused was not stored"


def test_a_limit_that_is_taken_away_answers_what_waits(bench: Limited, at: list[int]) -> None:
    bench.limit(max_publish_bytes_per_topic=100)
    handle = bench.produce("p")
    bench.publish(bench.client, numbered(10), handle)
    bench.turn()
    assert kinds(bench) == []
    bench.limit(max_publish_bytes_per_topic=0)
    bench.shard.tick()
    bench.turn()
    assert kinds(bench) == [Kind.PUBLISHED]
    assert bench.shard.partitions[ORDERS].publish_rate is None


def test_partitions_share_the_rate_of_their_topic(bench: Limited) -> None:
    bench.proposals.create("/default/wide", partitions=4)
    bench.limit(max_publish_rate_per_topic=10, max_publish_bytes_per_topic=400)
    bench.produce("p", "/default/wide-part-1")
    rate = bench.shard.partitions["/default/wide-part-1"].publish_rate
    assert rate is not None and rate.limits == (3, 100)
    bench.limit(max_publish_rate_per_topic=40)
    assert rate.limits == (10, 100), "what is owed stays owed"


def test_a_topic_has_a_publish_rate_of_its_own_also_without_a_policy(bench: Limited, at: list[int]) -> None:
    handle = bench.produce("p")
    bench.ask("update_topic", topic=ORDERS, policy={"max_publish_rate": 10, "max_publish_bytes": 1_000_000})
    bench.publish(bench.client, numbered(10), handle)
    bench.turn()
    assert kinds(bench) == [Kind.PUBLISHED]
    bench.publish(bench.client, numbered(10), handle)
    bench.turn()
    assert kinds(bench) == [], "it waits"
    bench.publish(bench.client, numbered(1), handle)
    error = bench.client.only(Kind.ERROR).error
    assert isinstance(error, QuotaExceeded) and error.facts["limit"] == 10
    rate = bench.shard.partitions[ORDERS].publish_rate
    bench.limit(max_publish_rate_per_topic=4)
    assert rate is not None and rate.limits == (4, 1_000_000), "the smallest holds"
    bench.limit(max_publish_rate_per_topic=0, max_publish_bytes_per_topic=500)
    assert rate.limits == (10, 500)
    bench.limit(max_publish_bytes_per_topic=0)
    bench.ask("update_topic", topic=ORDERS, policy={"max_publish_rate": 0, "max_publish_bytes": 0})
    assert bench.shard.partitions[ORDERS].publish_rate is None
    bench.turn()
    assert kinds(bench) == [Kind.PUBLISHED]
    with pytest.raises(InvalidArgument, match="max_publish_rate must not be negative"):
        bench.ask("update_topic", topic=ORDERS, policy={"max_publish_rate": -1})


def test_partitions_share_their_topic_s_own_rate_from_their_opening_on(bench: Limited) -> None:
    bench.proposals.create("/default/wide", partitions=4, max_publish_rate=10)
    bench.produce("p", "/default/wide-part-1")
    rate = bench.shard.partitions["/default/wide-part-1"].publish_rate
    assert rate is not None and rate.limits == (3, 0)


def test_a_batch_that_is_sent_again_is_answered_and_not_counted(bench: Limited, at: list[int]) -> None:
    bench.limit(max_publish_rate_per_topic=10)
    bench.request(bench.client, Kind.OPEN_PRODUCER, OpenProducer(ORDERS, "p"), 1)
    opened = wire.decode_control(bench.client.only(Kind.PRODUCER_OPENED).body, wire.ProducerOpened)
    again = numbered(10, producer_id=opened.producer_id, producer_epoch=opened.epoch, base_sequence=0)
    for _ in range(3):
        bench.publish(bench.client, again, 1)
        bench.turn()
        assert kinds(bench) == [Kind.PUBLISHED]


@pytest.mark.parametrize("limit", ["max_publish_rate_per_topic", "max_storage_bytes_per_topic"])
def test_a_stored_batch_that_is_sent_again_is_never_called_refused(
    bench: Limited, at: list[int], limit: str
) -> None:
    bench.limit(**{limit: 1})
    bench.request(bench.client, Kind.OPEN_PRODUCER, OpenProducer(ORDERS, "p"), 1)
    opened = wire.decode_control(bench.client.only(Kind.PRODUCER_OPENED).body, wire.ProducerOpened)
    numbers = {"producer_id": opened.producer_id, "producer_epoch": opened.epoch}
    stored = numbered(10, base_sequence=0, **numbers)
    bench.publish(bench.client, stored, 1)
    bench.turn()
    bench.shard.second()
    bench.client.take()
    bench.publish(bench.client, numbered(1, base_sequence=10, **numbers), 1)
    assert isinstance(bench.client.only(Kind.ERROR).error, QuotaExceeded), "too much by far"
    bench.publish(bench.client, stored, 1)  # its answer was lost with a connection
    bench.turn()
    assert kinds(bench) == [Kind.PUBLISHED]
    assert bench.shard.partitions[ORDERS].high_watermark == 10


def test_what_follows_a_refused_batch_lets_the_connection_rest_no_longer(
    bench: Limited, at: list[int]
) -> None:
    bench.limit(max_publish_rate_per_topic=1)
    bench.request(bench.client, Kind.OPEN_PRODUCER, OpenProducer(ORDERS, "p"), 1)
    opened = wire.decode_control(bench.client.only(Kind.PRODUCER_OPENED).body, wire.ProducerOpened)
    numbers = {"producer_id": opened.producer_id, "producer_epoch": opened.epoch}
    bench.publish(bench.client, numbered(10, base_sequence=0, **numbers), 1)
    bench.publish(bench.client, numbered(1, base_sequence=10, **numbers), 1)
    assert isinstance(bench.client.only(Kind.ERROR).error, QuotaExceeded)
    assert bench.client.rest_ns
    bench.client.rest_ns = 0  # it has rested
    bench.publish(bench.client, numbered(1, base_sequence=11, **numbers), 1)  # it was on its way already
    assert isinstance(bench.client.only(Kind.ERROR).error, SequenceGap)
    assert bench.client.rest_ns == 0


# -- stored bytes -------------------------------------------------------------------------------------


def test_publishes_are_refused_while_a_topic_stores_as_much_as_it_may(bench: Limited) -> None:
    handle = bench.produce("p")
    hosted = bench.shard.partitions[ORDERS]
    bench.publish(bench.client, numbered(10), handle)
    bench.turn()
    assert hosted.log is not None
    stored = hosted.log.local_bytes
    bench.limit(max_storage_bytes_per_topic=stored + 1)
    bench.publish(bench.client, numbered(10), handle)
    bench.turn()
    assert kinds(bench)[-1] == Kind.PUBLISHED, "it was below its limit when it was looked at"
    bench.shard.second()
    bench.publish(bench.client, numbered(1), handle)
    error = bench.client.only(Kind.ERROR).error
    assert isinstance(error, QuotaExceeded) and error.retryable
    limit = {"limit": stored + 1, "quota": "max_storage_bytes_per_topic", "retry_after_ms": 1_000}
    assert error.facts == limit
    bench.consume("s", "c")
    bench.ack(bench.client, 0, 1, bench.handle)
    bench.limit(max_storage_bytes_per_topic=0)
    bench.publish(bench.client, numbered(1), handle)
    bench.turn()
    assert Kind.PUBLISHED in kinds(bench)


def test_partitions_share_the_stored_bytes_of_their_topic(bench: Limited) -> None:
    bench.proposals.create("/default/wide", partitions=3)
    bench.limit(max_storage_bytes_per_topic=3)
    handle = bench.produce("p", "/default/wide-part-0")
    hosted = bench.shard.partitions["/default/wide-part-0"]
    bench.publish(bench.client, numbered(1), handle)
    bench.turn()
    bench.shard.second()
    assert hosted.publish_rate is not None and hosted.publish_rate.refusal is not None
    assert hosted.publish_rate.refusal.facts["limit"] == 1


def test_bytes_in_the_store_are_counted_and_those_on_both_sides_once(bench: Limited) -> None:
    bench.limit(max_storage_bytes_per_topic=1_000)
    bench.produce("p")
    hosted = bench.shard.partitions[ORDERS]
    pending = SimpleNamespace(size_bytes=99)
    store = SimpleNamespace(manifest=SimpleNamespace(size_bytes=900), pending=lambda: pending)
    hosted.tier = cast(Any, store)
    assert storage_refusal(hosted) is None
    pending.size_bytes = 100
    refused = storage_refusal(hosted)
    assert refused is not None and "stores 1000 bytes" in str(refused)
    store.manifest = None
    assert storage_refusal(hosted) is None, "what the store has is not known yet"
    hosted.tier = None
