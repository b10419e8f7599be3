"""One broker, several principals: who may do what, and what happens to what is open when that changes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from danube import sync
from danube.core.partition.policy import FailurePolicy
from danube.core.protocol.native import Admin, Kind
from danube.errors import DanubeError, NotAllowed, NotAuthenticated, TokenExpired
from danube.server.proto import DanubeAdmin_pb2 as admin_pb
from tests.broker_process import Brokers, wait_until
from tests.e2e.authority_site import Site, root, token
from tests.e2e.grpc_parts import DENIED, UNAUTHENTICATED, UNAVAILABLE, DanubeCalls, pb
from tests.grpc_client import GrpcError

WITHIN_S = 5.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    brokers = Brokers(tmp_path_factory.mktemp("authority"))
    made = Site(brokers.make)
    yield made
    made.close()
    brokers.kill()


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for what must come true within the time that a right may still hold."""
    wait_until(condition, WITHIN_S, what)


Calls = Callable[..., DanubeCalls]


@pytest.fixture
def grpc(site: Site) -> Iterator[Calls]:
    """Connections of gRPC clients, by the names of their principals."""
    opened: list[DanubeCalls] = []

    def of(name: str, address: str = "") -> DanubeCalls:
        calls = DanubeCalls(address or site.process.grpc_address)
        opened.append(calls)
        calls.fields = [("authorization", f"Bearer {token(name)}")]
        return calls

    yield of
    for calls in opened:
        calls.close()


# -- who comes in -----------------------------------------------------------------------------------


def test_a_stranger_is_answered_late_and_closed(site: Site) -> None:
    for shown in ("", "not a token", token("a") + "x"):
        began_s = time.monotonic()
        with pytest.raises(NotAuthenticated):
            sync.connect(site.process.address, token=shown).open()
        assert time.monotonic() - began_s >= 0.2


def test_an_expired_token_is_named_as_such(site: Site) -> None:
    with pytest.raises(TokenExpired):
        sync.connect(site.process.address, token=token("a", ttl_s=1, age_s=120)).open()


def test_a_client_learns_who_it_is(site: Site) -> None:
    with site.connect("alice") as client:
        welcome = client._session.welcome
    assert welcome.principal == "service_account:alice" and 3_500 < welcome.expires_s <= 3_600


# -- what roles give --------------------------------------------------------------------------------


def test_a_producer_and_a_consumer_do_their_part_and_no_more(site: Site) -> None:
    topic = "/default/parts"
    site.bind("parts-producer", "producer", "topic", topic)
    site.bind("parts-consumer", "consumer", "namespace", "default")
    with site.connect("parts-producer") as client:
        with client.producer(topic) as producer:
            producer.send(b"one")
        with pytest.raises(NotAllowed), client.consumer(topic, "s", start="earliest"):
            pass
        with pytest.raises(NotAllowed), client.producer("/default/other-parts"):
            pass
        with pytest.raises(NotAllowed):
            client.admin.delete_topic(topic)
    with site.connect("parts-consumer") as client:
        with client.consumer(topic, "s", start="earliest") as consumer:
            assert consumer.receive(timeout=10).payload == b"one"
        with pytest.raises(NotAllowed), client.producer(topic):
            pass
        with pytest.raises(NotAllowed):
            client.admin.create_topic("/default/parts-made")


def test_a_refusal_does_not_tell_whether_the_topic_exists(site: Site) -> None:
    site.admin.admin.create_topic("/default/hidden")
    told = []
    with site.connect("nobody") as client:
        for topic in ("/default/hidden", "/default/missing"):
            for ask in (
                lambda topic=topic: client.producer(topic).open(),
                lambda topic=topic: client.consumer(topic, "s").open(),
                lambda topic=topic: client.admin.describe_topic(topic),
            ):
                with pytest.raises(NotAllowed) as caught:
                    ask()
                told.append(str(caught.value).replace(topic, "TOPIC"))
    assert told[:3] == told[3:]


def test_lists_show_what_the_caller_may_see(site: Site, grpc: Calls) -> None:
    site.namespace("sights")
    for name in ("/sights/a", "/sights/b", "/default/sights"):
        site.admin.admin.create_topic(name)
    site.bind("looker", "viewer", "topic", "/sights/a")
    with site.connect("looker") as client:
        assert [one.topic for one in client.admin.list_topics()] == ["/sights/a"]
        assert site.namespaces(client) == ["sights"]
    with site.connect("nobody") as client, pytest.raises(NotAllowed):
        client.admin.list_topics()
    calls = grpc("looker", site.process.admin_address)
    listed = calls.admin("TopicAdmin/ListNamespaceTopics", admin_pb.NamespaceRequest(name="sights"))
    assert [one.name for one in listed.topics] == ["/sights/a"]
    assert list(calls.admin("BrokerAdmin/ListNamespaces", admin_pb.Empty()).namespaces) == ["sights"]


def test_an_administrator_may_do_all(site: Site) -> None:
    site.bind("boss", "admin", "cluster", "")
    with site.connect("boss") as client:
        client.admin.create_topic("/default/boss")
        client.admin.delete_topic("/default/boss")


def test_dead_letters_go_where_their_author_may_write(site: Site) -> None:
    """A consumer's failure policy has the broker copy records, and only where the consumer may write."""
    site.namespace("foreign")
    source, planted = "/default/letters", "/foreign/planted"
    site.bind("letters", "producer", "topic", source)
    site.bind("letters", "consumer", "topic", source)
    policy = FailurePolicy(
        max_redelivery_count=0, poison="dead_letter", dead_letter_topic=planted, base_redelivery_delay_ms=0
    )
    with site.connect("letters") as client:
        with client.producer(source) as producer:
            producer.send(b"secret of default")
        with pytest.raises(NotAllowed, match="/foreign/planted"):
            client.consumer(source, "s", start="earliest", failure=policy).open()
    assert planted not in [one.topic for one in site.admin.admin.list_topics()]
    site.bind("letters", "producer", "topic", planted)
    with site.connect("letters") as client:
        with client.consumer(source, "s", start="earliest", failure=policy) as consumer:
            consumer.receive(timeout=10).nack(reason="x")
            consumer.flush()
            until(lambda: planted in [one.topic for one in site.admin.admin.list_topics()], "no dead letter")


def test_nobody_says_that_he_is_a_broker(site: Site) -> None:
    with site.connect("nobody") as client:
        connection = client._connection
        for more in ({"forwarded": True}, {"on_behalf": "user:root"}):
            with connection.lock:
                reply = client._session.request(Kind.ADMIN, Admin("status", "", {}, **more), repeatable=False)
            with pytest.raises(NotAllowed):
                connection.wait(reply)


# -- what is taken away ends ------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [0, 4])
def test_a_producer_ends_with_its_binding(site: Site, partitions: int) -> None:
    topic, name = f"/default/ends-{partitions}", f"ends-{partitions}"
    site.admin.admin.create_topic(topic, partitions=partitions)
    site.bind(name, "producer", "topic", topic)
    with site.connect(name) as client:
        producer = client.producer(topic).open()
        producer.send(b"before")
        site.unbind(name, "producer", "topic", topic)

        def refused() -> bool:
            try:
                producer.send(b"after")
            except NotAllowed:
                return True
            except DanubeError:
                return False
            return False

        until(refused, "it still publishes")


def test_a_consumer_ends_with_its_role(site: Site) -> None:
    topic = "/default/ends-with-role"
    site.put_role("reader-of-one", "Consume")
    site.bind("role-reader", "reader-of-one", "topic", topic)
    with site.admin.producer(topic) as producer, site.connect("role-reader") as client:
        producer.send(b"before")
        consumer = client.consumer(topic, "s", start="earliest").open()
        assert consumer.receive(timeout=10).payload == b"before"
        site.put_role("reader-of-one", "Lookup")
        until(lambda: _ended(consumer), "it still receives")
        producer.send(b"after")
        with pytest.raises(NotAllowed):
            consumer.receive(timeout=1)


def _ended(consumer: object) -> bool:
    try:
        consumer.receive(timeout=0.2)  # type: ignore[attr-defined]
    except NotAllowed:
        return True
    except DanubeError:
        return False
    return False


def test_other_clients_keep_what_they_have(site: Site) -> None:
    topic = "/default/kept"
    site.bind("kept", "producer", "topic", topic)
    with site.connect("kept") as client, client.producer(topic) as producer:
        producer.send(b"one")
        site.put_role("unrelated", "Lookup")
        time.sleep(2.5)
        producer.send(b"two")
        assert client.statistics()["connections"] == 1


# -- credentials that end ---------------------------------------------------------------------------


def test_a_newer_token_keeps_the_connection(site: Site) -> None:
    """A token of half a minute is about to end at once: the client sends the next one by itself."""
    topic = "/default/renewed"
    site.bind("renewed", "producer", "topic", topic)
    given: list[str] = []

    def supply() -> str:
        given.append(token("renewed", ttl_s=30 if not given else 3_600))
        return given[-1]

    with sync.connect(site.process.address, token=supply) as client, client.producer(topic) as producer:
        producer.send(b"one")
        until(lambda: bool(producer.send(b"two")) and len(given) == 2, "it was not told")
        producer.send(b"three")
        assert client.statistics()["connections"] == 1


def test_another_principal_on_the_same_connection_is_refused(site: Site) -> None:
    given: list[str] = []

    def supply() -> str:
        given.append(token("one" if not given else "two", ttl_s=30))
        return given[-1]

    with sync.connect(site.process.address, token=supply) as client:

        def ended() -> bool:
            with contextlib.suppress(NotAllowed):
                client.admin.list_topics()
            return client.statistics()["connections"] == 2

        until(ended, "it went on as another")
        assert client._session.welcome.principal == "service_account:two"


# -- gRPC -------------------------------------------------------------------------------------------


def test_grpc_calls_need_a_credential(grpc: Calls) -> None:
    calls = grpc("nobody")
    for fields in ([], [("authorization", "Bearer x")], [("authorization", f"Basic {root()}")],
                   [("authorization", f"Bearer {root()}"), ("authorization", f"Bearer {root()}")],
                   [("x-danube-internal-broker", "1")]):  # fmt: skip
        calls.fields = fields
        began_s = time.monotonic()
        with pytest.raises(GrpcError) as caught:
            calls.create("/default/g")
        assert caught.value.code == UNAUTHENTICATED and time.monotonic() - began_s >= 0.2
    calls.fields = [("authorization", f"bearer {root()}")]
    assert calls.create("/default/g")


def test_grpc_calls_are_judged_one_by_one(site: Site, grpc: Calls) -> None:
    topic = "/default/grpc-parts"
    site.bind("g-producer", "producer", "topic", topic)
    site.bind("g-consumer", "consumer", "topic", topic)
    writes, reads = grpc("g-producer"), grpc("g-consumer")
    producer_id = writes.create(topic)
    writes.send(topic, producer_id, b"one")
    for attempt in (
        lambda: reads.create(topic),
        lambda: reads.send(topic, producer_id, b"forged"),
        lambda: writes.subscribe(topic),
        lambda: writes.create("/default/grpc-other"),
    ):
        with pytest.raises(GrpcError) as caught:
            attempt()
        assert caught.value.code == DENIED
    consumer_id = reads.subscribe(topic)
    with pytest.raises(GrpcError) as caught:
        writes.receive(consumer_id).next()
    assert caught.value.code == UNAVAILABLE, "as if the id were not known"


def test_messages_of_one_turn_are_judged_by_their_callers(site: Site, grpc: Calls) -> None:
    topic = "/default/grpc-lots"
    site.bind("lots", "producer", "topic", topic)
    good, bad = grpc("lots"), grpc("stranger")
    producer_id = good.create(topic)
    message = good.message(topic, producer_id, b"x")
    path = "/danube.ProducerService/SendMessage"
    sent = [(one, one.start(path, message, pb.MessageResponse)) for one in [good, bad] * 20]
    codes = [stream.wait_ended().code for _, stream in sent]
    assert codes == [0, DENIED] * 20


def test_a_grpc_stream_ends_with_its_binding(site: Site, grpc: Calls) -> None:
    topic = "/default/grpc-ends"
    site.admin.admin.create_topic(topic)
    site.bind("g-ends", "consumer", "topic", topic)
    calls = grpc("g-ends")
    stream = calls.receive(calls.subscribe(topic))
    site.unbind("g-ends", "consumer", "topic", topic)
    assert stream.wait_ended(WITHIN_S).code == DENIED


def test_sending_ends_with_its_binding(site: Site, grpc: Calls) -> None:
    topic = "/default/grpc-sends"
    site.bind("g-sends", "producer", "topic", topic)
    calls = grpc("g-sends")
    producer_id = calls.create(topic)
    calls.send(topic, producer_id, b"one")
    site.unbind("g-sends", "producer", "topic", topic)

    def refused() -> bool:
        try:
            calls.send(topic, producer_id, b"two")
        except GrpcError as error:
            return error.code == DENIED
        return False

    until(refused, "it still sends")


def test_good_load_goes_on_beside_wrong_tokens(site: Site) -> None:
    topic = "/default/beside"
    site.bind("beside", "producer", "topic", topic)
    failures: list[Exception] = []

    def guess() -> None:
        for _ in range(10):
            try:
                sync.connect(site.process.address, token=token("a") + "A").open()
            except NotAuthenticated:
                continue
            except Exception as error:
                failures.append(error)

    guessing = [threading.Thread(target=guess) for _ in range(4)]
    with site.connect("beside") as client, client.producer(topic) as producer:
        for one in guessing:
            one.start()
        count = 0
        while any(one.is_alive() for one in guessing):
            producer.send(b"x")
            count += 1
        assert count > 20
    assert failures == []
