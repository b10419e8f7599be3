"""The data port, row by row of what official clients rely on; one broker with two workers serves all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from danube.server.proto import DanubeAdmin_pb2 as ap
from tests.broker_process import BrokerProcess
from tests.e2e.grpc_parts import (
    DENIED,
    EXCLUSIVE,
    EXISTS,
    FAILOVER,
    INVALID,
    KEY_SHARED,
    NON_RELIABLE,
    NOT_FOUND,
    PRECONDITION,
    RELIABLE,
    SHARED,
    UNAVAILABLE,
    UNIMPLEMENTED,
    DanubeCalls,
    pb,
)  # fmt: skip
from tests.grpc_client import GrpcError


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    directory: Path = tmp_path_factory.mktemp("grpc")
    with BrokerProcess(directory / "data", workers=2) as process:
        yield process


@pytest.fixture
def calls(served: BrokerProcess) -> Iterator[DanubeCalls]:
    with DanubeCalls(served.grpc_address) as client:
        yield client


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return "/default/" + "".join(c if c.isalnum() else "-" for c in request.node.name)


def refused(code: int, words: str, call: object, *args: object, **fields: object) -> GrpcError:
    with pytest.raises(GrpcError) as caught:
        call(*args, **fields)  # type: ignore[operator]
    assert caught.value.code == code, caught.value
    assert words in caught.value.message
    return caught.value


# -- discovery --------------------------------------------------------------------------------------


def lookup(calls: DanubeCalls, topic: str) -> object:
    return calls.unary("Discovery/TopicLookup", pb.TopicLookupRequest(request_id=9, topic=topic))


def test_lookup_answers_the_address_that_the_client_dialled(
    served: BrokerProcess, calls: DanubeCalls, topic: str
) -> None:
    refused(NOT_FOUND, "does not exist", lookup, calls, topic)
    calls.create(topic)
    answer = lookup(calls, topic)
    url = f"http://{served.grpc_address}"
    assert (answer.request_id, answer.connect_url, answer.broker_url) == (9, url, url)  # type: ignore[attr-defined]
    assert answer.response_type == pb.TopicLookupResponse.Connect and not answer.proxy  # type: ignore[attr-defined]
    with DanubeCalls(served.grpc_address, authority=f"localhost:{served.grpc_port}") as other:
        assert lookup(other, topic).connect_url == f"http://localhost:{served.grpc_port}"  # type: ignore[attr-defined]
    with DanubeCalls(served.grpc_address, authority="no port here") as odd:
        assert lookup(odd, topic).connect_url == url  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "name", ["", "orders", "/default", "/default/", "//", "/a/b/c", "/default/a b", "a/b/c"]
)
def test_names_that_are_none_are_refused_everywhere(calls: DanubeCalls, name: str) -> None:
    refused(INVALID, "/namespace/name", lookup, calls, name)
    request = pb.TopicLookupRequest(topic=name)
    refused(INVALID, "/namespace/name", calls.unary, "Discovery/TopicPartitions", request)
    refused(INVALID, "/namespace/name", calls.create, name)
    refused(INVALID, "/namespace/name", calls.subscribe, name)
    segments = pb.ListSegmentDescriptorsRequest(topic=name)
    refused(INVALID, "/namespace/name", calls.unary, "StorageService/ListSegmentDescriptors", segments)


def partitions(calls: DanubeCalls, topic: str) -> list[str]:
    answer = calls.unary("Discovery/TopicPartitions", pb.TopicLookupRequest(request_id=8, topic=topic))
    assert answer.request_id == 8
    return list(answer.partitions)


def test_partitions_are_made_one_by_one_and_listed_in_order(calls: DanubeCalls, topic: str) -> None:
    assert partitions(calls, topic) == []
    for index in range(12):
        calls.create(f"{topic}-part-{index}", f"p-{index}")
    names = [f"{topic}-part-{index}" for index in range(12)]
    assert partitions(calls, topic) == names
    assert partitions(calls, names[3]) == [names[3]]
    assert partitions(calls, f"{topic}-part-12") == []
    assert lookup(calls, names[11]).response_type == pb.TopicLookupResponse.Connect  # type: ignore[attr-defined]
    refused(EXISTS, "conflicts", calls.create, topic)


def test_a_plain_topic_and_its_longer_namesake_have_nothing_in_common(calls: DanubeCalls, topic: str) -> None:
    calls.create(topic + "bar")
    calls.create(topic)
    assert partitions(calls, topic) == [topic]
    refused(EXISTS, "conflicts", calls.create, f"{topic}-part-0")


# -- producers --------------------------------------------------------------------------------------


def test_a_producer_name_has_one_id_on_every_connection(
    served: BrokerProcess, calls: DanubeCalls, topic: str
) -> None:
    number = calls.create(topic, "same")
    assert 1 <= number < 1 << 63
    for _ in range(4):  # connections land on both workers
        with DanubeCalls(served.grpc_address) as other:
            assert other.create(topic, "same") == number
            assert other.health(0, number) == pb.HealthCheckResponse.OK
    assert calls.create(topic, "other") != number


def test_what_a_producer_asks_must_fit_the_topic(calls: DanubeCalls, topic: str) -> None:
    calls.create(topic)
    refused(PRECONDITION, "is reliable", calls.create, topic, "q", NON_RELIABLE)
    refused(PRECONDITION, "is reliable", calls.create, topic, "q", 17)  # out of range: non-reliable
    refused(NOT_FOUND, "namespace", calls.create, "/nowhere/orders")
    reference = pb.SchemaReference(subject="no-such-subject")
    refused(PRECONDITION, "not found", calls.create, topic, "q", schema_ref=reference)
    fresh = topic + "-fresh"
    refused(PRECONDITION, "not found", calls.create, fresh, schema_ref=reference)
    assert partitions(calls, fresh) == [], "nothing was made for a producer that was refused"
    refused(INVALID, "producer name", calls.create, topic, "")
    refused(INVALID, "producer name", calls.create, topic, "a\nb")


def test_an_exclusive_producer_is_alone(served: BrokerProcess, calls: DanubeCalls, topic: str) -> None:
    calls.create(topic, "first", producer_access_mode=pb.ProducerAccessMode.Exclusive)
    with DanubeCalls(served.grpc_address) as other:
        refused(DENIED, "exclusive", other.create, topic, "second")
    refused(DENIED, "exclusive", calls.create, topic, "second")
    calls.close()
    with DanubeCalls(served.grpc_address) as other:
        deadline = time.monotonic() + 5
        while True:  # the closed connection is noticed by its own worker
            try:
                other.create(topic, "second")
                break
            except GrpcError:
                assert time.monotonic() < deadline
        refused(DENIED, "exclusive", other.create, topic, "third", producer_access_mode=1)


def test_messages_that_cannot_be_sent(calls: DanubeCalls, topic: str) -> None:
    number = calls.create(topic)
    path = "ProducerService/SendMessage"
    refused(INVALID, "msg_id is missing", calls.unary, path, pb.StreamMessage(producer_name="p"))
    refused(INVALID, "not a danube.StreamMessage", calls.unary, path, b"\xff\xff\xff")
    refused(UNAVAILABLE, "create the producer again", calls.send, topic, number + 1, b"x")
    refused(NOT_FOUND, "does not exist", calls.send, topic + "-none", number, b"x")
    refused(INVALID, "4194305 bytes", calls.send, topic, number, bytes(4194305))
    refused(INVALID, "milliseconds", calls.send, topic, number, b"x", publish_time=1 << 63)
    refused(
        INVALID, "attributes", calls.send, topic, number, b"x", attributes={str(n): "" for n in range(65)}
    )
    calls.send(topic, number, bytes(4194304))


def test_one_bad_message_does_not_fail_its_neighbours(calls: DanubeCalls, topic: str) -> None:
    number = calls.create(topic)
    consumer = calls.subscribe(topic)
    stream = calls.receive(consumer)
    started = []
    for index in range(20):
        fields = {"publish_time": 1 << 63} if index in (3, 11) else {}
        message = calls.message(topic, number, b"%d" % index, request_id=index, **fields)
        started.append(calls.start("/danube.ProducerService/SendMessage", message, pb.MessageResponse))
    for index, call in enumerate(started):
        if index in (3, 11):
            assert call.wait_ended().code == INVALID
        else:
            assert calls.result(call).request_id == index
    got = [int(stream.next().payload) for _ in range(18)]
    assert sorted(got) == [index for index in range(20) if index not in (3, 11)]


# -- what arrives -----------------------------------------------------------------------------------


def test_every_field_arrives_as_it_was_sent(calls: DanubeCalls, topic: str) -> None:
    number = calls.create(topic)
    stream = calls.receive(calls.subscribe(topic))
    sent = [
        calls.message(topic, number, b"\0\xff", request_id=2**64 - 1, attributes={"a": "1", "ü": "ß"}),
        calls.message(topic, number, b"", routing_key="", schema_id=0, schema_version=0),
        calls.message(topic, number, b"k", routing_key="key", schema_id=2**64 - 1, schema_version=2**32 - 1),
        calls.message(topic, number, b"t", publish_time=0),
    ]
    for offset, message in enumerate(sent):
        assert calls.unary("ProducerService/SendMessage", message).request_id == message.request_id
        got = stream.next()
        message.msg_id.topic_offset = offset
        assert got == message
        for field in ("schema_id", "schema_version", "routing_key"):
            assert got.HasField(field) == message.HasField(field)
        calls.ack(got)


def test_headers_come_before_any_message(calls: DanubeCalls, topic: str) -> None:
    calls.create(topic)
    stream = calls.receive(calls.subscribe(topic))
    calls.wait(lambda: stream.headers is not None)
    assert stream.headers is not None and stream.headers[":status"] == "200"
    assert stream.headers["content-type"].startswith("application/grpc") and stream.trailers is None


def test_a_new_subscription_starts_at_the_latest(calls: DanubeCalls, topic: str) -> None:
    number = calls.create(topic)
    calls.send(topic, number, b"before")
    stream = calls.receive(calls.subscribe(topic))
    calls.send(topic, number, b"after")
    got = stream.next()
    assert (got.payload, got.msg_id.topic_offset) == (b"after", 1)


def test_what_was_sent_between_subscribe_and_receive_arrives(calls: DanubeCalls, topic: str) -> None:
    for mode in (NON_RELIABLE, RELIABLE):
        name = f"{topic}-{mode}"
        number = calls.create(name, mode=mode)
        consumer = calls.subscribe(name)
        for index in range(50):
            calls.send(name, number, b"%d" % index)
        stream = calls.receive(consumer)
        got = [stream.next() for _ in range(50)]
        assert [int(message.payload) for message in got] == list(range(50))
        offsets = list(range(50)) if mode == RELIABLE else [0] * 50  # what is not kept has no offset
        assert [message.msg_id.topic_offset for message in got] == offsets


# -- subscriptions ----------------------------------------------------------------------------------


def test_subscribe_refuses_what_cannot_be(served: BrokerProcess, calls: DanubeCalls, topic: str) -> None:
    refused(NOT_FOUND, "does not exist", calls.subscribe, topic)
    calls.create(topic)
    refused(INVALID, "subscription", calls.subscribe, topic, "s", "c", 9)
    refused(INVALID, "consumer name", calls.subscribe, topic, "s", "")
    refused(INVALID, "subscription name", calls.subscribe, topic, "", "c")
    refused(INVALID, "key filters", calls.subscribe, topic, "s", "c", KEY_SHARED, ["x"] * 101)
    calls.subscribe(topic, "s", "c", EXCLUSIVE)
    with DanubeCalls(served.grpc_address) as other:
        refused(DENIED, "", other.subscribe, topic, "s", "d", EXCLUSIVE)
        refused(DENIED, "", other.subscribe, topic, "s", "d", SHARED)


def test_the_same_name_takes_over_with_the_same_id(
    served: BrokerProcess, calls: DanubeCalls, topic: str
) -> None:
    number = calls.create(topic)
    consumer = calls.subscribe(topic, kind=EXCLUSIVE)
    stream = calls.receive(consumer)
    for index in range(5):
        calls.send(topic, number, b"%d" % index)
    for _ in range(3):
        calls.ack(stream.next())
    assert stream.next().payload == b"3"  # delivered and not acked
    for _ in range(3):  # connections land on both workers
        with DanubeCalls(served.grpc_address) as other:
            assert other.subscribe(topic, kind=EXCLUSIVE) == consumer
            again = other.receive(consumer)
            assert [again.next().payload for _ in range(2)] == [b"3", b"4"]
    assert stream.wait_ended().code == 0, "the stream that was taken over ends well"


def test_a_cancelled_stream_gives_back_what_it_held(calls: DanubeCalls, topic: str) -> None:
    number = calls.create(topic)
    consumer = calls.subscribe(topic)
    stream = calls.receive(consumer)
    for index in range(4):
        calls.send(topic, number, b"%d" % index)
    assert [stream.next().payload for _ in range(4)] == [b"0", b"1", b"2", b"3"]
    stream.cancel()
    again = calls.receive(consumer)
    assert [again.next().payload for _ in range(4)] == [b"0", b"1", b"2", b"3"]
    newest = calls.receive(consumer)  # the newest call wins
    assert again.wait_ended().code == 0
    assert [newest.next().payload for _ in range(4)] == [b"0", b"1", b"2", b"3"]


def test_an_unknown_consumer_is_told_to_come_again(calls: DanubeCalls) -> None:
    for number in (0, 1, 2**63, 2**64 - 1):
        assert calls.receive(number).wait_ended().code == UNAVAILABLE
        assert calls.health(1, number) == pb.HealthCheckResponse.CLOSE
        assert calls.health(0, number) == pb.HealthCheckResponse.CLOSE


def test_health_of_a_consumer_that_has_not_received_yet(calls: DanubeCalls, topic: str) -> None:
    calls.create(topic)
    assert calls.health(1, calls.subscribe(topic)) == pb.HealthCheckResponse.OK
    refused(INVALID, "client type", calls.health, 5, 1)


def test_shared_consumers_take_turns(served: BrokerProcess, calls: DanubeCalls, topic: str) -> None:
    number = calls.create(topic)
    streams = [calls.receive(calls.subscribe(topic, name=f"c{index}")) for index in range(3)]
    for index in range(36):
        calls.send(topic, number, b"%d" % index)
    counts = [0, 0, 0]
    for index, stream in enumerate(streams):
        for _ in range(12):
            calls.ack(stream.next())
            counts[index] += 1
    assert counts == [12, 12, 12]


def test_a_failover_standby_is_promoted(served: BrokerProcess, calls: DanubeCalls, topic: str) -> None:
    number = calls.create(topic)
    first = DanubeCalls(served.grpc_address)
    active = first.receive(first.subscribe(topic, name="one", kind=FAILOVER))
    standby = calls.receive(calls.subscribe(topic, name="two", kind=FAILOVER))
    for index in range(3):
        calls.send(topic, number, b"%d" % index)
    first.ack(active.next())
    assert active.next().payload == b"1"
    first.close()
    assert [standby.next().payload for _ in range(2)] == [b"1", b"2"]


def test_key_shared_keeps_a_key_on_one_consumer(calls: DanubeCalls, topic: str) -> None:
    number = calls.create(topic)
    streams = [calls.receive(calls.subscribe(topic, name=f"c{n}", kind=KEY_SHARED)) for n in range(2)]
    only = calls.receive(calls.subscribe(topic, "filtered", "f", KEY_SHARED, ["key-1*"]))
    for index in range(60):
        calls.send(topic, number, b"%d" % index, routing_key=f"key-{index % 12}")
    keys: list[set[str]] = [set(), set()]
    left = 60
    while left:
        calls.wait(lambda: any(stream.messages for stream in streams))
        for number_of, stream in enumerate(streams):
            while stream.messages:
                message = stream.messages.popleft()
                keys[number_of].add(message.routing_key)
                calls.ack(message)
                left -= 1
    assert not keys[0] & keys[1] and keys[0] and keys[1]
    got = []
    for _ in range(15):  # key-1, key-10 and key-11, each five times
        message = only.next()
        got.append(message.routing_key)
        calls.ack(message, "filtered")
    assert set(got) == {"key-1", "key-10", "key-11"}


# -- acks -------------------------------------------------------------------------------------------


def test_acks_of_what_is_not_in_flight_have_no_effect(calls: DanubeCalls, topic: str) -> None:
    number = calls.create(topic)
    stream = calls.receive(calls.subscribe(topic))
    calls.send(topic, number, b"one")
    message = stream.next()
    for offset in (5, 2**40):
        late = pb.StreamMessage(msg_id=message.msg_id)
        late.msg_id.topic_offset = offset
        calls.ack(late)
        calls.nack(late)
    calls.ack(message)
    calls.ack(message)
    refused(INVALID, "cannot be an offset", calls.ack, pb.StreamMessage(
        msg_id=pb.MsgID(topic_name=topic, topic_offset=2**64 - 1)
    ))  # fmt: skip


def test_acks_that_name_nothing(calls: DanubeCalls, topic: str) -> None:
    calls.create(topic)
    for method in ("Ack", "Nack"):
        request = getattr(pb, f"{method}Request")
        path = f"ConsumerService/{method}"
        refused(INVALID, "msg_id is missing", calls.unary, path, request())
        refused(INVALID, f"danube.{method}Request", calls.unary, path, b"\xff")
        named = pb.MsgID(topic_name=topic)
        refused(INVALID, "subscription name", calls.unary, path, request(msg_id=named))
        refused(NOT_FOUND, "nobody", calls.unary, path, request(msg_id=named, subscription_name="nobody"))
        missing = pb.MsgID(topic_name=topic + "-none")
        refused(
            NOT_FOUND, "does not exist", calls.unary, path, request(msg_id=missing, subscription_name="s")
        )


def test_anybody_may_ack_what_another_connection_holds(
    served: BrokerProcess, calls: DanubeCalls, topic: str
) -> None:
    number = calls.create(topic)
    consumer = calls.subscribe(topic)
    stream = calls.receive(consumer)
    for index in range(3):
        calls.send(topic, number, b"%d" % index)
    held = [stream.next() for _ in range(3)]
    with DanubeCalls(served.grpc_address) as other:
        for message in held[:2]:
            other.ack(message)
    stream.cancel()
    assert calls.receive(consumer).next().payload == b"2"


def test_a_nack_comes_again_after_its_delay(calls: DanubeCalls, topic: str) -> None:
    number = calls.create(topic)
    stream = calls.receive(calls.subscribe(topic))
    calls.send(topic, number, b"again")
    message = stream.next()
    began = time.monotonic()
    calls.nack(message, delay_ms=1500, reason="not now")
    again = stream.next()
    assert again == message and time.monotonic() - began >= 1.4
    calls.ack(again)


def test_a_dead_letter_says_where_it_came_from(served: BrokerProcess, calls: DanubeCalls, topic: str) -> None:
    number = calls.create(topic)
    policy = ap.SubscriptionFailurePolicy(
        max_redelivery_count=0, ack_timeout_ms=60_000, dead_letter_topic=topic + "-dead",
        poison_policy=ap.SubscriptionPoisonPolicy.DeadLetter,
    )  # fmt: skip
    request = ap.SetSubscriptionFailurePolicyRequest(topic=topic, subscription="s", failure_policy=policy)
    with DanubeCalls(served.admin_address) as admin:  # before the subscription exists
        assert admin.admin("TopicAdmin/SetSubscriptionFailurePolicy", request).success
    stream = calls.receive(calls.subscribe(topic))
    calls.create(topic + "-dead", "q")
    dead = calls.receive(calls.subscribe(topic + "-dead"))
    calls.send(topic, number, b"poison", attributes={"own": "kept"})
    calls.nack(stream.next(), reason="cannot read it")
    letter = dead.next()
    assert letter.payload == b"poison" and letter.attributes["own"] == "kept"
    assert letter.attributes["x-original-topic"] == topic
    assert letter.attributes["x-original-producer-id"] == str(number)
    assert letter.attributes["x-failure-reason"] == "cannot read it"


def test_a_dispatch_window_holds_back(served: BrokerProcess, calls: DanubeCalls, topic: str) -> None:
    number = calls.create(topic)
    config = ap.SubscriptionDispatchConfig(max_unacked_messages=2)
    request = ap.SetSubscriptionDispatchConfigRequest(topic=topic, subscription="s", dispatch_config=config)
    with DanubeCalls(served.admin_address) as admin:
        assert admin.admin("TopicAdmin/SetSubscriptionDispatchConfig", request).success
    stream = calls.receive(calls.subscribe(topic))
    for index in range(5):
        calls.send(topic, number, b"%d" % index)
    held = [stream.next(), stream.next()]
    with pytest.raises(TimeoutError):
        stream.next(0.5)
    calls.ack(held[0])
    assert stream.next().payload == b"2"


# -- the port itself --------------------------------------------------------------------------------


def test_methods_that_are_not_there(calls: DanubeCalls) -> None:
    for path in ("/danube.ProducerService/Nothing", "/danube_admin.TopicAdmin/CreateTopic", "/", "/x"):
        refused(UNIMPLEMENTED, "not served on this port", calls.call, path, b"", pb.MessageResponse)


def test_every_method_refuses_an_empty_call_with_a_sentence(calls: DanubeCalls) -> None:
    for service in pb.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            stream = calls.open(f"/{service.full_name}/{method.name}", pb.MessageResponse, more=False)
            calls.flush()
            error = stream.wait_ended()
            assert error.code == INVALID and "needs a message" in error.message


def test_bodies_that_are_no_message(calls: DanubeCalls) -> None:
    path = "/danube.ProducerService/SendMessage"
    cases = {
        b"\0\0\0": (INVALID, "ended inside"),
        b"\0\0\0\0\x05abc": (INVALID, "ended inside"),
        b"\x01\0\0\0\x01a": (UNIMPLEMENTED, "compressed"),
        b"\x07\0\0\0\x01a": (INVALID, "first byte"),
        b"\0\0\0\0\0" * 2: (UNIMPLEMENTED, "got two"),
        b"\0\xff\xff\xff\xff" + b"a" * 100: (INVALID, "bytes"),
    }
    for body, (code, words) in cases.items():
        stream = calls.open(path, pb.MessageResponse)
        calls.send_bytes(stream, body, end=True)
        error = stream.wait_ended()
        assert (error.code, words in error.message) == (code, True), (body[:12], error)


def test_a_message_in_pieces_is_one_message(calls: DanubeCalls, topic: str) -> None:
    number = calls.create(topic)
    body = calls.message(topic, number, b"x" * 300_000).SerializeToString()
    framed = b"\0" + len(body).to_bytes(4, "big") + body
    for cut in (1, 4, 5, 6, 1000, len(framed) - 1, len(framed)):
        stream = calls.open("/danube.ProducerService/SendMessage", pb.MessageResponse)
        calls.send_bytes(stream, framed[:cut])
        calls.send_bytes(stream, framed[cut:], end=True)
        assert calls.result(stream).request_id == 7


def test_an_error_carries_its_reason(calls: DanubeCalls, topic: str) -> None:
    error = refused(NOT_FOUND, "create the topic first", calls.subscribe, topic)
    status = Status.FromString(error.details)
    info = ErrorInfo()
    assert status.code == NOT_FOUND and status.details[0].Unpack(info)
    assert (info.reason, info.domain, info.metadata["code"]) == ("TopicNotFound", "danube", "1121")


def test_segments_of_a_topic_that_is_not_tiered(calls: DanubeCalls, topic: str) -> None:
    request = pb.ListSegmentDescriptorsRequest(topic=topic)
    refused(NOT_FOUND, "does not exist", calls.unary, "StorageService/ListSegmentDescriptors", request)
    calls.create(topic)
    assert not calls.unary("StorageService/ListSegmentDescriptors", request).segments


def test_lookups_behind_a_wildcard_and_an_advertised_address(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "any", workers=1, arguments=["--host", "0.0.0.0", "--insecure"]) as process:
        with DanubeCalls(process.grpc_address) as calls:
            calls.create("/default/t")
            url = f"http://{process.grpc_address}"
            assert lookup(calls, "/default/t").connect_url == url  # type: ignore[attr-defined]
        with DanubeCalls(process.grpc_address, authority="nobody") as calls:
            assert lookup(calls, "/default/t").broker_url == url  # type: ignore[attr-defined]
    environment = {"DANUBE_GRPC__ADVERTISED": "broker.example:7000"}
    with (
        BrokerProcess(tmp_path / "told", workers=1, environment=environment) as process,
        DanubeCalls(process.grpc_address) as calls,
    ):
        calls.create("/default/t")
        assert lookup(calls, "/default/t").connect_url == "http://broker.example:7000"  # type: ignore[attr-defined]
