"""The broker copies records for others: each time it asks whether who wanted it may write there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from danube import sync
from danube.core.partition.policy import FailurePolicy
from danube.errors import DanubeError, NotAllowed, PolicyMismatch, TopicNotFound
from danube.server.proto import DanubeAdmin_pb2 as admin_pb
from tests.broker_process import Brokers, wait_until
from tests.e2e.authority_site import Site, root, token
from tests.e2e.grpc_parts import DENIED, UNAVAILABLE, DanubeCalls
from tests.grpc_client import GrpcError

WITHIN_S = 60.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    brokers = Brokers(tmp_path_factory.mktemp("copies"))
    made = Site(brokers.make, workers=1)  # a right that was given is known at once
    made.namespace("other")
    yield made
    made.close()
    brokers.kill()


def until(condition: Callable[[], Any], what: str) -> None:
    wait_until(condition, WITHIN_S, what)


def letters_to(topic: str) -> FailurePolicy:
    return FailurePolicy(
        max_redelivery_count=0, poison="dead_letter", dead_letter_topic=topic, base_redelivery_delay_ms=0
    )


def count_of(site: Site, topic: str) -> int:
    try:
        return sum(one["log_end"] for one in site.admin.admin.describe_topic(topic).partitions)
    except TopicNotFound:
        return 0


def nack_one(client: sync.Client, topic: str, failure: FailurePolicy | None = None) -> None:
    with client.consumer(topic, "s", start="earliest", failure=failure) as consumer:
        consumer.receive(timeout=30).nack(reason="x")
        consumer.flush()


def ask_partition(site: Site, op: str, partition: str, client: sync.Client | None = None, **args: Any) -> Any:
    client = client or site.admin
    with client._connection.lock:
        reply = client._session.admin(op, partition, **args)
    return client._connection.wait(reply)


def set_by_consumer(site: Site, client: sync.Client, topic: str, failure: FailurePolicy) -> None:
    with client.consumer(topic, "s", start="earliest", failure=failure):
        pass


def set_by_operation(site: Site, client: sync.Client, topic: str, failure: FailurePolicy) -> None:
    with client.consumer(topic, "s", start="earliest"):
        pass
    client.admin.set_failure_policy(topic, "s", failure)


def set_by_topic(site: Site, client: sync.Client, topic: str, failure: FailurePolicy) -> None:
    client.admin.update_topic(topic, failure=failure)


def set_over_grpc(site: Site, client: sync.Client, topic: str, failure: FailurePolicy) -> None:
    calls = DanubeCalls(site.process.admin_address)
    calls.fields = [("authorization", f"Bearer {token(topic[9:])}")]
    policy = admin_pb.SubscriptionFailurePolicy(
        max_redelivery_count=0, ack_timeout_ms=30_000, max_redelivery_delay_ms=1_000,
        dead_letter_topic=failure.dead_letter_topic,
    )  # fmt: skip
    request = admin_pb.SetSubscriptionFailurePolicyRequest(
        topic=topic, subscription="s", failure_policy=policy
    )
    try:
        calls.admin("TopicAdmin/SetSubscriptionFailurePolicy", request)
    except GrpcError as error:
        if error.code == DENIED:
            raise NotAllowed("refused") from error
        raise
    finally:
        calls.close()


WAYS = {
    "consumer": set_by_consumer, "operation": set_by_operation, "topic": set_by_topic, "grpc": set_over_grpc,
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_dead_letters_go_only_where_who_set_the_policy_may_write(site: Site, way: str) -> None:
    """Not without the right; with it; and no longer once it is taken away, though the policy is kept."""
    topic, letters = f"/default/copies-{way}", f"/other/letters-{way}"
    name = topic[9:]
    site.admin.admin.create_topic(topic)
    site.bind(name, "namespace-admin", "topic", topic)
    with site.connect(name) as client, client.producer(topic) as producer:
        producer.send(b"one")
        with pytest.raises(NotAllowed):
            WAYS[way](site, client, topic, letters_to(letters))
        site.bind(name, "producer", "topic", letters)
        WAYS[way](site, client, topic, letters_to(letters))
        nack_one(client, topic)
        until(lambda: count_of(site, letters) == 1, "no dead letter")
        site.unbind(name, "producer", "topic", letters)
        producer.send(b"two")
        until(lambda: refuses(client, letters), "the right still holds")
        nack_one(client, topic)
        until(lambda: f"service_account:{name} has no permission Produce" in told_of(site, topic), "not told")
        assert count_of(site, letters) == 1
        site.bind(name, "producer", "topic", letters)
        until(lambda: count_of(site, letters) == 2, "the record is not copied any more")


def refuses(client: sync.Client, topic: str) -> bool:
    try:
        client.producer(topic).open().close()
    except NotAllowed:
        return True
    except DanubeError:
        return False
    return False


def told_of(site: Site, topic: str) -> str:
    [one] = ask_partition(site, "list_subscriptions", topic)
    error: str = one["dead_letter_error"]
    return error


def test_dead_letters_stay_within_the_namespace_that_says_so(site: Site) -> None:
    topic = "/default/within"
    site.admin.admin.create_topic(topic)
    site.admin.admin.set_namespace_policy("default", dead_letter_within="namespace")
    try:
        with pytest.raises(PolicyMismatch, match="dead_letter_within"):
            site.admin.admin.update_topic(topic, failure=letters_to("/other/within"))
        with site.admin.producer(topic) as producer:
            producer.send(b"one")
        nack_one(site.admin, topic, letters_to("/other/within"))
        until(lambda: "dead_letter_within" in told_of(site, topic), "not told")
        assert count_of(site, "/other/within") == 0
    finally:
        site.admin.admin.set_namespace_policy("default", dead_letter_within="")
    until(lambda: count_of(site, "/other/within") == 1, "the record is not copied any more")


def test_subscriptions_are_named_after_who_consumes(site: Site) -> None:
    site.namespace("named")
    topic = "/named/orders"
    site.admin.admin.create_topic(topic)
    site.bind("carol", "consumer", "namespace", "named")
    site.admin.admin.set_namespace_policy("named", subscription_auth="prefix")
    calls = DanubeCalls(site.process.grpc_address)
    calls.fields = [("authorization", f"Bearer {token('carol')}")]
    with site.connect("carol") as client:
        with client.consumer(topic, "carol-1"):
            pass
        with pytest.raises(NotAllowed, match="subscription_auth"):
            client.consumer(topic, "dave-1").open()
    try:
        calls.subscribe(topic, subscription="carol-2")
        with pytest.raises(GrpcError) as caught:
            calls.subscribe(topic, subscription="dave-2")
        assert caught.value.code == DENIED
    finally:
        calls.close()


def test_a_policy_that_names_subscriptions_ends_live_consumers_of_others(site: Site) -> None:
    site.namespace("renamed")
    topic = "/renamed/orders"
    site.admin.admin.create_topic(topic)
    site.bind("carol", "consumer", "namespace", "renamed")
    calls = DanubeCalls(site.process.grpc_address)
    calls.fields = [("authorization", f"Bearer {token('carol')}")]
    try:
        with site.connect("carol") as client, site.admin.producer(topic) as producer:
            own = client.consumer(topic, "carol-1").open()
            other = client.consumer(topic, "dave-1").open()
            ids = [calls.subscribe(topic, subscription=name) for name in ("carol-2", "dave-2")]
            streams = [calls.receive(one) for one in ids]
            producer.send(b"one")
            messages = [stream.next() for stream in streams]
            assert own.receive(timeout=30).payload == other.receive(timeout=30).payload == b"one"
            site.admin.admin.set_namespace_policy("renamed", subscription_auth="prefix")
            assert streams[1].wait_ended(WITHIN_S).code == DENIED
            with pytest.raises(NotAllowed, match="subscription_auth"):
                while True:
                    other.receive(timeout=30)
            producer.send(b"two")
            assert own.receive(timeout=30).payload == b"two" and streams[0].next().payload == b"two"
            with pytest.raises(GrpcError) as refused:
                calls.ack(messages[1], subscription="dave-2")
            assert refused.value.code == DENIED
            calls.ack(messages[0], subscription="carol-2")
            assert calls.receive(ids[1]).wait_ended(WITHIN_S).code == UNAVAILABLE, (
                "as of an id that nobody has"
            )
            assert [calls.health(1, one) for one in (*ids, ids[1] ^ 1)] == [0, 1, 1]
            own.close()
    finally:
        calls.close()


def test_a_topic_is_made_by_use_only_for_who_may_write_there(site: Site) -> None:
    site.bind("maker", "producer", "topic", "/other/made")
    site.bind("reader", "consumer", "namespace", "other")
    with site.connect("reader") as client:
        with pytest.raises(DanubeError):
            client.consumer("/other/made-by-reading", "s").open()
        with pytest.raises(NotAllowed):
            client.producer("/other/made").open()
    with site.connect("maker") as client:
        with pytest.raises(NotAllowed):
            client.producer("/other/made-elsewhere").open()
        assert [one.topic for one in site.admin.admin.list_topics("other") if "made" in one.topic] == []
        with client.producer("/other/made") as producer:
            producer.send(b"x")


def test_objects_of_a_job_are_taken_only_from_who_may_replicate(site: Site) -> None:
    topic = "/default/staged"
    site.admin.admin.create_topic(topic)
    site.bind("job", "namespace-admin", "topic", topic)
    with site.connect("job") as client:
        with pytest.raises(NotAllowed, match="Replicate"):
            ask_partition(site, "install_staged", topic, client, topic_id=1, objects=b"")
        site.put_role("installer", "Replicate")
        site.bind("job", "installer", "topic", topic)
        with pytest.raises(DanubeError, match="object store"):
            ask_partition(site, "install_staged", topic, client, topic_id=1, objects=b"")


def test_a_missing_name_does_not_tell_of_others_like_it(site: Site) -> None:
    """Who has a right on the missing name alone learns no other; the administrator is helped."""
    site.admin.admin.create_topic("/other/secrets-1")
    site.bind("guesser", "viewer", "topic", "/other/secrets-2")
    calls = DanubeCalls(site.process.admin_address)
    try:
        with site.connect("guesser") as client:
            for one, shown in ((client, False), (site.admin, True)):
                with pytest.raises(TopicNotFound) as caught:
                    one.admin.describe_topic("/other/secrets-2")
                assert ("/other/secrets-1" in caught.value.hint) == shown
        for shown, bearer in ((False, token("guesser")), (True, root())):
            calls.fields = [("authorization", f"Bearer {bearer}")]
            request = admin_pb.GetSubscriptionDispatchConfigRequest(
                topic="/other/secrets-2", subscription="s"
            )
            with pytest.raises(GrpcError) as refused:
                calls.admin("TopicAdmin/GetSubscriptionDispatchConfig", request)
            assert "does not exist" in str(refused.value)
            assert ("/other/secrets-1" in str(refused.value)) == shown
    finally:
        calls.close()
