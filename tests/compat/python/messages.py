"""What a message carries, where it goes, and what is refused."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict

import grpc
from danube.proto import DanubeApi_pb2, DanubeApi_pb2_grpc
from official import connect, expect, numbers, open_inbox, producing, receiving, refused, run

from danube import SubType

MIB = 1024 * 1024


async def fields(url: str, topic: str) -> None:
    """Everything that was sent arrives as it was sent; what was absent stays absent."""
    client = await connect(url)
    async with producing(client, topic, "sender") as producer, receiving(client, topic, "consumer") as inbox:
        before_ms = int(time.time() * 1000)
        attributes = {"a": "b", "": "empty name", "umlaut": "Grüße", "empty": ""}
        first = await producer.send(b"payload", attributes)
        await producer.send_with_key(b"", None, "")
        await producer.send_with_key(b"\x00\xff", {}, "Schlüssel")
        after_ms = int(time.time() * 1000)
        full, empty, keyed = await inbox.take(3)
        expect(full.payload == b"payload" and dict(full.attributes) == attributes, "attributes", full)
        expect(full.request_id == first and full.producer_name == "sender", "request_id and name", full)
        expect(before_ms <= full.publish_time <= after_ms, "publish_time is in milliseconds", full)
        expect(full.msg_id.topic_name == topic and full.msg_id.broker_addr == url, "msg_id", full)
        expect(full.msg_id.producer_id > 0 and full.subscription_name == "", "ids and names", full)
        expect(not any(map(full.HasField, ("schema_id", "schema_version", "routing_key"))), "absent", full)
        expect(empty.payload == b"" and empty.HasField("routing_key"), "an empty key is a key", empty)
        expect(empty.routing_key == "" and not empty.attributes, "and nothing else", empty)
        expect(keyed.payload == b"\x00\xff" and keyed.routing_key == "Schlüssel", "any bytes", keyed)


async def large(url: str, topic: str) -> None:
    """Nearly 4 MiB goes through, several at once; more than 4 MiB is refused and hurts nobody."""
    client = await connect(url)
    async with producing(client, topic) as producer, receiving(client, topic, "consumer") as inbox:
        payloads = [bytes([65 + number]) * (4 * MIB - 1024 - number) for number in range(8)]
        await asyncio.gather(*map(producer.send, payloads))
        taken = await inbox.payloads(8)
        expect(Counter(taken) == Counter(payloads), "each once", [len(each) for each in taken])
        await refused(producer.send(bytes(4 * MIB + 1)), grpc.StatusCode.INVALID_ARGUMENT)
        await refused(producer.send(bytes(6 * MIB)), grpc.StatusCode.INVALID_ARGUMENT)
        await producer.send(b"after")
        expect(await inbox.payloads(1) == [b"after"], "the connection goes on")


async def many_at_once(url: str, topic: str) -> None:
    """500 sends in flight on one connection: all are answered and delivered in their order."""
    client = await connect(url)
    async with producing(client, topic) as producer, receiving(client, topic, "consumer") as inbox:
        answers = await asyncio.gather(*(producer.send(b"%d" % number) for number in range(500)))
        expect(len(set(answers)) == 500, "every call has its own answer", len(set(answers)))
        expect(sorted(numbers(await inbox.take(500))) == list(range(500)), "each once")


async def partitions(url: str, topic: str) -> None:
    """Four partitions: round robin without a key, one partition for each key, one consumer for all."""
    client = await connect(url)
    async with producing(client, topic, partitions=4) as producer:
        async with receiving(client, topic, "consumer", kind=SubType.SHARED) as inbox:
            for number in range(40):
                await producer.send(b"%d" % number)
            places: dict[str, list[int]] = defaultdict(list)
            for message in await inbox.take(40):
                places[message.msg_id.topic_name].append(int(message.payload))
            expect(set(places) == {f"{topic}-part-{index}" for index in range(4)}, "names", set(places))
            for index in range(4):
                own = places[f"{topic}-part-{index}"]
                expect(sorted(own) == list(range(index, 40, 4)), "round robin", own)
            for number in range(40):
                await producer.send_with_key(b"%d" % number, None, f"key-{number % 8}")
            home: dict[str, set[str]] = defaultdict(set)
            for message in await inbox.take(40):
                home[message.routing_key].add(message.msg_id.topic_name)
            expect(all(len(names) == 1 for names in home.values()), "a key has one partition", home)
            await inbox.silent(0.2)


async def non_reliable(url: str, topic: str) -> None:
    """Who is there gets the messages, who comes later does not; acks and nacks mean nothing."""
    client = await connect(url)
    async with producing(client, topic, reliable=False) as producer:
        await producer.send(b"nobody listens")
        async with receiving(client, topic, "consumer") as inbox:
            for number in range(20):
                await producer.send(b"%d" % number)
            messages = await inbox.take(20)
            expect(numbers(messages) == list(range(20)), "order", numbers(messages))
            await inbox.consumer.nack(messages[0])
            await inbox.silent()
        async with receiving(client, topic, "late", "another") as inbox:
            await inbox.silent(0.3)
            await producer.send(b"20")
            expect(await inbox.payloads(1) == [b"20"], "only what is sent now")


async def refusals(url: str, topic: str) -> None:
    """Each refusal with its code."""
    client = await connect(url)
    code = grpc.StatusCode

    async def produce(name: str, **options: bool) -> None:
        async with producing(client, name, **options):
            pass

    async with producing(client, topic):
        await refused(produce(topic, reliable=False), code.FAILED_PRECONDITION)
        await refused(produce("no-slashes"), code.INVALID_ARGUMENT)
        await refused(produce("/default/with space"), code.INVALID_ARGUMENT)
        nowhere = topic + "-nowhere"
        await refused(client.lookup_service.topic_partitions(url, "bad"), code.INVALID_ARGUMENT)
        await refused(client.lookup_service.lookup_topic(url, nowhere), code.NOT_FOUND)
        found = await client.lookup_service.lookup_topic(url, topic)
        expect(found.connect_url == found.broker_url == url and not found.proxy, "lookup", found)
        expect(found.response_type == DanubeApi_pb2.TopicLookupResponse.Connect, "lookup", found)
        expect(await client.lookup_service.topic_partitions(url, topic) == [topic], "no partitions")
        expect(await client.lookup_service.topic_partitions(url, nowhere) == [], "nothing there")
        connection = await client.connection_manager.get_connection(url, url)
        consumers = DanubeApi_pb2_grpc.ConsumerServiceStub(connection.channel)
        request = DanubeApi_pb2.ConsumerRequest(
            topic_name=nowhere, consumer_name="c", subscription="s", subscription_type=1
        )
        await refused(consumers.Subscribe(request), code.NOT_FOUND)
        producers = DanubeApi_pb2_grpc.ProducerServiceStub(connection.channel)
        await refused(producers.SendMessage(DanubeApi_pb2.StreamMessage()), code.INVALID_ARGUMENT)
        await refused(consumers.Ack(DanubeApi_pb2.AckRequest()), code.INVALID_ARGUMENT)
        await refused(consumers.Nack(DanubeApi_pb2.NackRequest()), code.INVALID_ARGUMENT)


async def health(url: str, topic: str) -> None:
    """A producer and a consumer are healthy at once; ids that nobody has are told to close."""
    client = await connect(url)
    connection = await client.connection_manager.get_connection(url, url)
    stub = DanubeApi_pb2_grpc.HealthCheckStub(connection.channel)
    response = DanubeApi_pb2.HealthCheckResponse

    async def status(kind: int, number: int) -> int:
        request = DanubeApi_pb2.HealthCheckRequest(request_id=1, client=kind, id=number)
        answer = await stub.HealthCheck(request)
        return int(answer.status)

    async with producing(client, topic) as producer:
        consumer = (
            client.new_consumer().with_topic(topic).with_consumer_name("c").with_subscription("s").build()
        )
        await consumer.subscribe()  # and not yet receiving
        [reader] = consumer._consumers.values()
        expect(await status(0, producer._producers[0].producer_id) == response.OK, "the producer")
        expect(await status(1, reader.consumer_id) == response.OK, "the consumer")
        expect(await status(0, 4_711) == await status(1, 4_711) == response.CLOSE, "ids of nobody")
        await refused(
            stub.HealthCheck(DanubeApi_pb2.HealthCheckRequest(client=7)), grpc.StatusCode.INVALID_ARGUMENT
        )
        await consumer.close()


async def nack(url: str, topic: str) -> None:
    """A message given back comes again, not before its delay, and others are not held up."""
    client = await connect(url)
    async with producing(client, topic) as producer:
        inbox = await open_inbox(client, topic, "consumer", kind=SubType.SHARED)
        await producer.send(b"1")
        [message] = await inbox.take(1, ack=False)
        started = time.monotonic()
        await inbox.consumer.nack(message, delay_ms=600, reason="not now")
        await producer.send(b"2")
        expect(await inbox.payloads(1) == [b"2"], "another one goes first")
        [again] = await inbox.take(1, ack=False)
        waited = time.monotonic() - started
        expect(again.payload == b"1" and again.msg_id == message.msg_id, "the same one", again)
        expect(0.6 <= waited < 5, "after its delay", waited)
        await inbox.consumer.nack(again)
        expect(await inbox.payloads(1) == [b"1"], "and once more, by the policy's delay")
        await inbox.silent(0.3)
        await inbox.consumer.close()


async def dead_letters(url: str, topic: str) -> None:
    """The topic's policy allows one redelivery; then the message is found in TOPIC-dead."""
    client = await connect(url)
    async with (
        producing(client, topic) as producer,
        receiving(client, topic, "consumer", "s", SubType.SHARED) as inbox,
        receiving(client, topic + "-dead", "undertaker") as dead,
    ):
        await producer.send(b"poison", {"kept": "yes"})
        [message] = await inbox.take(1, ack=False)
        await inbox.consumer.nack(message, reason="first")
        [message] = await inbox.take(1, ack=False)
        await inbox.consumer.nack(message, reason="cannot read it")
        [letter] = await dead.take(1)
        attributes = dict(letter.attributes)
        expect(letter.payload == b"poison" and attributes["kept"] == "yes", "the message itself", letter)
        expect(attributes["x-original-topic"] == topic, "where it was", attributes)
        expect(attributes["x-original-subscription"] == "s", "whose it was", attributes)
        expect(attributes["x-original-topic-offset"] == "0", "which it was", attributes)
        expect(attributes["x-poison-policy"] == "dead_letter", "what befell it", attributes)
        expect(attributes["x-delivery-attempt"] == "2", "how often it was tried", attributes)
        expect("cannot read it" in attributes["x-failure-reason"], "why", attributes)
        await producer.send(b"good")
        expect(await inbox.payloads(1) == [b"good"], "the subscription goes on")


if __name__ == "__main__":
    run("__main__")
