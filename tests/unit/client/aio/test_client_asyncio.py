"""The asyncio client over loopback, against a scripted broker that obeys the protocol."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow
import pytest

import danube
from danube.client.records.inbox import MESSAGES_AT_ONCE
from danube.core.dispatch.consumer_window import WINDOW_FIRST
from danube.core.protocol.native import Kind
from danube.errors import (
    ClosedError,
    ConnectionFailed,
    DanubeError,
    Fenced,
    InvalidArgument,
    OperationTimeout,
    Overloaded,
    OwnerMoved,
    PolicyMismatch,
    RecordTooLarge,
    StorageFull,
    SubscriptionBusy,
    TopicExists,
    TopicNotFound,
)
from tests.fakes.broker import FakeBroker
from tests.unit.asynchronous import asynchronous

TOPIC = "/default/orders"


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def take(consumer: danube.Consumer, count: int) -> list[danube.Message]:
    messages = []
    async for message in consumer:
        messages.append(message)
        await message.ack()
        if len(messages) == count:
            return messages
    raise AssertionError("unreachable")


# -- publishing -------------------------------------------------------------------------------------


@asynchronous
async def test_a_record_comes_back_whole(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        async with client.producer(TOPIC, name="p1", durability="fsync") as producer:
            before = datetime.now(UTC)
            ack = await producer.send(b"payload", key="k", attributes={"a": "b", "ü": ""})
            assert (ack.offset, ack.partition, ack.durability, ack.duplicate) == (0, 0, "fsync", False)
        async with client.consumer(TOPIC, subscription="s", start="earliest") as consumer:
            [message] = await take(consumer, 1)
    assert (message.payload, message.key, message.attributes) == (b"payload", "k", {"a": "b", "ü": ""})
    assert (message.offset, message.partition, message.topic) == (0, 0, TOPIC)
    assert (message.producer_name, message.redelivery_count) == ("p1", 0)
    assert abs((message.publish_time - before).total_seconds()) < 5


@pytest.mark.parametrize(
    "payloads",
    [
        [b"a", b"", b"ccc"],
        (b"a", b"", b"ccc"),
        np.array([b"a", b"", b"ccc"], dtype=object),
        pyarrow.array([b"a", b"", b"ccc"]),
        pyarrow.chunked_array([[b"a"], [b"", b"ccc"]], pyarrow.binary()),
    ],
    ids=["list", "tuple", "numpy", "arrow", "chunked"],
)
@asynchronous
async def test_send_many_takes_sequences_of_any_kind(fake: FakeBroker, payloads: Any) -> None:
    async with danube.connect(fake.url) as client, client.producer(TOPIC) as producer:
        [ack] = await producer.send_many(payloads)
        assert (ack.offset, ack.record_count, ack.end_offset) == (0, 3, 3)
    assert fake.payloads(TOPIC) == [b"a", b"", b"ccc"]


@asynchronous
async def test_send_many_cuts_batches_by_size_and_acknowledges_each(fake: FakeBroker) -> None:
    source = random.Random(1)
    payloads = [bytes([one % 256]) * source.choice((0, 10, 100, 3000)) for one in range(3000)]
    async with danube.connect(fake.url) as client, client.producer(TOPIC, batch_bytes=16_384) as producer:
        acks = await producer.send_many(payloads)
        assert await producer.send_many([]) == []
    assert fake.payloads(TOPIC) == payloads
    assert len(acks) > 100
    assert [one.offset for one in acks] == [0, *(one.end_offset for one in acks[:-1])]
    assert all(size <= 2 * 16_384 + 20_000 for kind, size in fake.frames_seen if kind == Kind.PUBLISH)


@asynchronous
async def test_the_same_key_always_goes_to_the_same_partition_in_order(fake: FakeBroker) -> None:
    keys = [f"key-{one % 7}" for one in range(200)]
    payloads = [f"{key}:{number}".encode() for number, key in enumerate(keys)]
    async with danube.connect(fake.url) as client, client.producer(TOPIC, partitions=4) as producer:
        await producer.send_many(payloads[:100], keys=keys[:100])
        futures = [
            producer.send_nowait(payload, key=key)
            for payload, key in zip(payloads[100:], keys[100:], strict=True)
        ]
        await producer.flush()
        acks = [future.result() for future in futures]
    stored = [fake.payloads(f"{TOPIC}-part-{one}") for one in range(4)]
    assert sorted(payload for each in stored for payload in each) == sorted(payloads)
    for key in set(keys):
        holders = [each for each in stored if any(one.startswith(f"{key}:".encode()) for one in each)]
        assert len(holders) == 1
        numbers = [int(one.split(b":")[1]) for one in holders[0] if one.startswith(f"{key}:".encode())]
        assert numbers == sorted(numbers)
    for payload, ack in zip(payloads[100:], acks, strict=True):
        assert stored[ack.partition][ack.offset] == payload


@asynchronous
async def test_without_keys_batches_go_round_robin(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client, client.producer(TOPIC, partitions=3) as producer:
        acks = [await producer.send(b"x") for _ in range(6)]
    assert [one.partition for one in acks] == [0, 1, 2, 0, 1, 2]


@asynchronous
async def test_send_nowait_coalesces_a_turn_into_one_batch(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client, client.producer(TOPIC) as producer:
        futures = [producer.send_nowait(b"%d" % one, attributes={"n": str(one)}) for one in range(100)]
        assert not futures[0].done()
        with pytest.raises(InvalidArgument, match="not answered"):
            futures[0].result()
        assert (await futures[42]).offset == 42
        assert futures[99].done() and futures[99].exception() is None
    assert fake.seen(Kind.PUBLISH) == 1


@asynchronous
async def test_concurrent_sends_share_batches_and_a_lone_send_waits_for_nobody(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client, client.producer(TOPIC) as producer:
        acks = await asyncio.gather(*(producer.send(b"%d" % one) for one in range(300)))
    assert sorted(one.offset for one in acks) == list(range(300))
    assert fake.seen(Kind.PUBLISH) < 20


@asynchronous
async def test_send_nowait_is_bounded_and_ready_waits_for_room(fake: FakeBroker) -> None:
    async with (
        danube.connect(fake.url) as client,
        client.producer(TOPIC, batch_bytes=4096, max_in_flight_bytes=16_384) as producer,
    ):
        fake.hold()
        with pytest.raises(Overloaded, match="max_in_flight_bytes"):
            for _ in range(1000):
                producer.send_nowait(b"x" * 1000)
        waiting = asyncio.ensure_future(producer.ready())
        await asyncio.sleep(0.02)
        assert not waiting.done()
        fake.release()
        await waiting
        await producer.send(b"last")
    assert len(fake.payloads(TOPIC)) < 30


@asynchronous
async def test_compressed_batches_are_read_like_plain_ones(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        for compression in ("lz4", "zstd"):
            async with client.producer(TOPIC, compression=compression) as producer:
                await producer.send_many([compression.encode() * 100] * 50)
        async with client.consumer(TOPIC, "s", start="earliest") as consumer:
            messages = await take(consumer, 100)
    assert [one.payload for one in messages] == [b"lz4" * 100] * 50 + [b"zstd" * 100] * 50


@asynchronous
async def test_bad_records_are_refused_at_the_call_and_spoil_no_others(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client, client.producer(TOPIC) as producer:
        good = producer.send_nowait(b"good")
        bad: list[tuple[Any, dict[str, Any]]] = [
            ("text", {}),
            (b"x" * (1024 * 1024 + 1), {}),
            (b"x", {"key": 7}),
            (b"x", {"key": "\ud800"}),
            (b"x", {"attributes": {"a": 1}}),
            (b"x", {"attributes": {"a": "x" * 40_000}}),
        ]
        for payload, options in bad:
            with pytest.raises((InvalidArgument, RecordTooLarge)):
                producer.send_nowait(payload, **options)
        with pytest.raises(InvalidArgument):
            await producer.send_many(b"not a sequence")
        with pytest.raises(InvalidArgument):
            await producer.send_many([b"a", b"b"], keys=["one"])
        await good
    assert fake.payloads(TOPIC) == [b"good"]


@asynchronous
@pytest.mark.parametrize("partitions", [0, 3])
@pytest.mark.parametrize(
    ("field", "wrong"), [("payloads", "text"), ("attributes", {"n": 5}), ("attributes", {"n": "x" * 100_000})]
)
async def test_an_error_names_a_record_by_its_place_in_the_whole_list(
    fake: FakeBroker, partitions: int, field: str, wrong: Any
) -> None:
    records: dict[str, list[Any]] = {
        "payloads": [b"x" * 100] * 100,
        "keys": [b"%d" % number for number in range(100)],
        "attributes": [{"n": "1"}] * 100,
    }
    records[field][77] = wrong
    async with (
        danube.connect(fake.url) as client,
        client.producer(TOPIC, partitions=partitions, batch_bytes=1024) as producer,
    ):
        with pytest.raises(DanubeError) as refused:
            await producer.send_many(**records)
        assert refused.value.facts["index"] == 77 and "record 77" in str(refused.value)


@asynchronous
@pytest.mark.parametrize("schema", [None, bytes])
async def test_an_iteration_goes_on_after_a_timeout(fake: FakeBroker, schema: Any) -> None:
    async with danube.connect(fake.url) as client:
        producer = await client.producer(TOPIC).open()
        async with client.consumer(TOPIC, "s", **({"schema": schema} if schema else {})) as consumer:
            messages = aiter(consumer)
            for number in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(messages), 0.02)
                await producer.send(b"%d" % number)
                assert (await asyncio.wait_for(anext(messages), 10)).payload == b"%d" % number
        await producer.close()


@asynchronous
@pytest.mark.parametrize("how", ["receive", "iterate"])
async def test_taking_messages_one_by_one_lets_others_run(fake: FakeBroker, how: str) -> None:
    async with danube.connect(fake.url) as client:
        async with client.producer(TOPIC) as producer:
            await producer.send_many([b"x"] * 20_000)
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with client.consumer(TOPIC, "s", start="earliest") as consumer:
            await consumer.receive(10)
            other = asyncio.create_task(count_turns())
            messages = aiter(consumer)
            in_turn: dict[int, int] = {}  # messages by the turn of the other task
            for _ in range(15_000):
                message = await (consumer.receive() if how == "receive" else anext(messages))
                message.ack_nowait()
                in_turn[turns] = in_turn.get(turns, 0) + 1
            other.cancel()
        assert max(in_turn.values()) <= 2 * MESSAGES_AT_ONCE


def stored_by(error: DanubeError) -> list[int]:
    """Places in the call of the records that the error says are stored."""
    pairs = zip(error.facts["acks"], error.facts["places"], strict=True)
    found: list[int] = []
    for ack, places in pairs:
        assert ack.record_count == len(places)
        found += places
    return sorted(found)


@asynchronous
@pytest.mark.parametrize("partitions", [0, 3])
async def test_a_send_many_that_is_cut_off_tells_what_is_stored(fake: FakeBroker, partitions: int) -> None:
    payloads: list[Any] = [b"%03d" % one + b"x" * 200 for one in range(99)] + ["text"]
    keys = [b"%d" % number for number in range(100)]
    async with (
        danube.connect(fake.url) as client,
        client.producer(TOPIC, partitions=partitions, batch_bytes=2048) as producer,
    ):
        with pytest.raises(InvalidArgument, match="record 99") as refused:
            await producer.send_many(payloads, keys=keys)
    stored = stored_by(refused.value)
    assert len(stored) > 50 and 99 not in stored
    names = [f"{TOPIC}-part-{one}" for one in range(partitions)] or [TOPIC]
    assert sorted(one for name in names for one in fake.payloads(name)) == [payloads[one] for one in stored]


@asynchronous
async def test_a_batch_of_send_many_that_the_broker_refuses_is_named_by_its_place(fake: FakeBroker) -> None:
    payloads = [b"%03d" % one + b"x" * 200 for one in range(40)]
    async with (
        danube.connect(fake.url) as client,
        client.producer(TOPIC, batch_bytes=2048) as producer,
    ):
        fake.refuse(Kind.PUBLISH, RecordTooLarge("record 3 of 203 bytes is too large", index=3, limit=5))
        with pytest.raises(RecordTooLarge, match="record 3 of") as refused:
            await producer.send_many(payloads)
        stored = stored_by(refused.value)
        assert fake.payloads(TOPIC) == [payloads[one] for one in stored]
        gone = sorted(set(range(40)) - set(stored))
        assert gone and gone[0] == 0, "the first batch was refused"
        assert refused.value.facts["limit"] == 5
        with pytest.raises(RecordTooLarge) as alone:
            fake.refuse(Kind.PUBLISH, RecordTooLarge("record 1 is too large", index=1))
            await producer.send_many(payloads[:5])
        assert (stored_by(alone.value), alone.value.facts["index"]) == ([], 1)


@asynchronous
async def test_a_refused_send_raises_the_brokers_error_and_the_next_one_is_stored(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client, client.producer(TOPIC) as producer:
        await producer.send(b"a")
        fake.refuse(Kind.PUBLISH, StorageFull("no space left", hint="free some"))
        with pytest.raises(StorageFull) as caught:
            await producer.send(b"b")
        assert caught.value.retryable and caught.value.hint == "free some"
        assert (await producer.send(b"c")).offset == 1
    assert fake.payloads(TOPIC) == [b"a", b"c"]


@asynchronous
async def test_a_newer_producer_of_the_same_name_fences_the_older(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as one, danube.connect(fake.url) as two:
        first = await one.producer(TOPIC, name="p").open()
        await first.send(b"a")
        async with two.producer(TOPIC, name="p") as second:
            await second.send(b"b")
            with pytest.raises(Fenced):
                await first.send(b"c")
            with pytest.raises(Fenced):
                first.send_nowait(b"d")
    assert fake.payloads(TOPIC) == [b"a", b"b"]


@asynchronous
async def test_leaving_the_block_delivers_what_was_sent(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client, client.producer(TOPIC) as producer:
        for one in range(50):
            producer.send_nowait(b"%d" % one)
    assert len(fake.payloads(TOPIC)) == 50


@asynchronous
async def test_closing_raises_what_was_not_delivered(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        producer = await client.producer(TOPIC).open()
        fake.hold()
        future = producer.send_nowait(b"x")
        with pytest.raises(OperationTimeout, match="1 batches not acknowledged"):
            await producer.close(timeout=0.05)
        assert isinstance(future.exception(), ClosedError)
        fake.release()
        with pytest.raises(ClosedError):
            await producer.send(b"y")
        with pytest.raises(ClosedError):
            producer.send_nowait(b"y")


@asynchronous
async def test_flush_raises_a_failure_nobody_looked_at_once(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client, client.producer(TOPIC) as producer:
        fake.refuse(Kind.PUBLISH, StorageFull("no space left"))
        producer.send_nowait(b"a")
        with pytest.raises(StorageFull):
            await producer.flush()
        await producer.flush()
        fake.refuse(Kind.PUBLISH, StorageFull("no space left"))
        future = producer.send_nowait(b"a")
        with pytest.raises(StorageFull):
            await future
        await producer.flush()


@asynchronous
async def test_a_cancelled_send_that_has_not_left_is_taken_back(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client, client.producer(TOPIC, linger_us=50_000) as producer:
        kept = producer.send_nowait(b"kept")
        task = asyncio.ensure_future(producer.send(b"cancelled"))
        after = None
        await asyncio.sleep(0.005)
        after = producer.send_nowait(b"after")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [(await kept).offset, (await after).offset] == [0, 1]
        assert (await producer.send(b"next")).offset == 2
    assert fake.payloads(TOPIC) == [b"kept", b"after", b"next"]


@asynchronous
async def test_a_cancelled_send_that_has_left_keeps_its_number(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client, client.producer(TOPIC) as producer:
        fake.hold()
        task = asyncio.ensure_future(producer.send(b"out already"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        fake.release()
        assert (await producer.send(b"next")).offset == 1
    assert fake.payloads(TOPIC) == [b"out already", b"next"]


@asynchronous
async def test_a_cancelled_send_that_waits_for_credit_is_taken_back() -> None:
    with FakeBroker(publish_credit_bytes=4_096) as fake:
        async with (
            danube.connect(fake.url) as client,
            client.producer("/default/busy") as busy,
            client.producer(TOPIC) as producer,
        ):
            fake.hold()
            first = asyncio.ensure_future(busy.send(bytes(4_000)))
            task = asyncio.ensure_future(producer.send(bytes(4_000)))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            fake.release()
            assert (await first).offset == 0
            assert (await producer.send(b"next")).offset == 0
        assert fake.payloads(TOPIC) == [b"next"]


@asynchronous
async def test_a_lone_send_that_is_refused_holds_up_nobody(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client, client.producer(TOPIC) as producer:
        wrong: Any = 7
        for payload, error in (
            (bytes(9 << 20), RecordTooLarge),
            ("text", InvalidArgument),
            (wrong, InvalidArgument),
        ):
            with pytest.raises(error):
                await producer.send(payload)  # type: ignore[arg-type]
        assert (await producer.send_nowait(b"after")).offset == 0
        assert (await producer.send(bytearray(b"a copy"))).offset == 1  # type: ignore[arg-type]
    assert fake.payloads(TOPIC) == [b"after", b"a copy"]


@asynchronous
async def test_lone_sends_take_turns_and_are_compressed_like_others(fake: FakeBroker) -> None:
    async with (
        danube.connect(fake.url) as client,
        client.producer(TOPIC, partitions=3, compression="lz4") as producer,
    ):
        acks = [await producer.send(bytes(1_000)) for _ in range(6)]
        assert [ack.partition for ack in acks] == [0, 1, 2] * 2
        assert [(ack.offset, ack.end_offset) for ack in acks] == [(0, 1)] * 3 + [(1, 2)] * 3


@asynchronous
async def test_a_send_times_out_and_says_that_the_outcome_is_not_known(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client, client.producer(TOPIC, timeout=0.1) as producer:
        fake.hold()
        with pytest.raises(OperationTimeout, match="not known"):
            await producer.send(b"x")
        fake.release()
        assert (await producer.send(b"y")).offset == 1


@asynchronous
async def test_publish_credit_of_the_connection_is_obeyed() -> None:
    with FakeBroker(publish_credit_bytes=40_000) as fake:
        async with (
            danube.connect(fake.url) as client,
            client.producer("/default/a", batch_bytes=8192) as one,
            client.producer("/default/b", batch_bytes=8192) as two,
        ):
            await asyncio.gather(one.send_many([b"x" * 500] * 1000), two.send_many([b"y" * 500] * 1000))
        assert fake.violations == []
        assert len(fake.payloads("/default/a")) == len(fake.payloads("/default/b")) == 1000


# -- consuming --------------------------------------------------------------------------------------


async def fill(client: danube.Client, count: int, **options: Any) -> list[bytes]:
    payloads = [b"%d" % one for one in range(count)]
    async with client.producer(TOPIC, **options) as producer:
        await producer.send_many(payloads)
    return payloads


@asynchronous
async def test_acknowledgements_are_merged_and_stored(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        await fill(client, 5000)
        async with client.consumer(TOPIC, "s", start="earliest") as consumer:
            messages = await take(consumer, 5000)
            await consumer.flush()
            subscription = fake.partitions[TOPIC].subscriptions["s"]
            assert subscription.acked == set(range(5000))
    assert [one.offset for one in messages] == list(range(5000))
    assert fake.seen(Kind.ACK) < 60
    assert fake.syncs == 1


@asynchronous
async def test_acknowledgements_out_of_order_are_exact(fake: FakeBroker, source: random.Random) -> None:
    async with danube.connect(fake.url) as client:
        await fill(client, 600)
        async with client.consumer(TOPIC, "s", start="earliest", prefetch_records=1000) as consumer:
            messages = [await consumer.receive() for _ in range(600)]
            chosen = source.sample(messages, 377)
            for message in chosen:
                message.ack_nowait()
                if source.random() < 0.05:
                    await asyncio.sleep(0)
            await consumer.flush()
            acked = fake.partitions[TOPIC].subscriptions["s"].acked
            assert acked == {one.offset for one in chosen}


@asynchronous
async def test_delivery_never_exceeds_the_prefetch(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        await fill(client, 100)
        async with client.consumer(TOPIC, "s", start="earliest", prefetch_records=10) as consumer:
            await until(lambda: client.statistics()["records_delivered"] == 10)
            await asyncio.sleep(0.02)
            assert client.statistics()["records_delivered"] == 10
            assert len(await take(consumer, 100)) == 100


@asynchronous
async def test_the_window_grows_for_a_fast_consumer(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        await fill(client, 20_000)
        async with client.consumer(TOPIC, "s", start="earliest") as consumer:
            await take(consumer, 20_000)
            assert consumer._box.partitions[0]._window.records > 4 * WINDOW_FIRST


@asynchronous
async def test_nacks_carry_delay_and_reason_and_the_record_comes_again(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        await fill(client, 2)
        async with client.consumer(TOPIC, "s", start="earliest") as consumer:
            first = await consumer.receive()
            await first.nack(delay=1.5, reason="not today")
            second = await consumer.receive()
            await second.ack()
            again = await consumer.receive()
            assert (again.offset, again.redelivery_count) == (first.offset, 1)
            async with again:
                pass
            await consumer.flush()
        subscription = fake.partitions[TOPIC].subscriptions["s"]
        [nack] = subscription.nacks
        assert (nack.delay_ms, nack.reason, nack.ranges) == (1500, "not today", [(0, 1)])
        assert subscription.acked == {0, 1}


@asynchronous
async def test_a_message_used_as_a_context_is_nacked_with_the_exception(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        await fill(client, 1)
        async with client.consumer(TOPIC, "s", start="earliest") as consumer:
            message = await consumer.receive()
            with pytest.raises(ValueError, match="bad"):
                async with message:
                    raise ValueError("bad order")
            await consumer.receive()
        assert fake.partitions[TOPIC].subscriptions["s"].nacks[0].reason == "ValueError: bad order"


@asynchronous
async def test_batches_hold_columns_and_are_acknowledged_whole(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        async with client.producer(TOPIC, name="p") as producer:
            await producer.send_many([b"a", b"bb", b""], keys=["k", None, b"\xff"], attributes={"x": "y"})
            await producer.send_many([b"c"])
        async with client.consumer(TOPIC, "s", start="earliest") as consumer:
            await until(lambda: client.statistics()["records_delivered"] == 4)
            batch = await anext(aiter(consumer.batches()))
            assert batch.payloads == [b"a", b"bb", b"", b"c"]
            assert batch.keys == ["k", None, b"\xff", None]
            assert batch.attributes == [{"x": "y"}] * 3 + [{}]
            assert batch.offsets.tolist() == [0, 1, 2, 3]
            assert (batch.record_count, batch.first_offset, batch.partition) == (4, 0, 0)
            assert batch.redelivery_counts.tolist() == [0, 0, 0, 0]
            table = batch.to_arrow()
            assert table["payload"].to_pylist() == batch.payloads
            assert table["key"].to_pylist() == [b"k", None, b"\xff", None]
            assert table["offset"].to_pylist() == [0, 1, 2, 3]
            assert table["producer_name"].to_pylist() == ["p"] * 4
            assert table["attributes"].to_pylist() == [[("x", "y")]] * 3 + [[]]
            assert table["publish_time"].cast(pyarrow.int64()).to_pylist() == batch.publish_times.tolist()
            table.validate(full=True)
            await batch.ack()
            await consumer.flush()
        assert fake.partitions[TOPIC].subscriptions["s"].acked == {0, 1, 2, 3}


@asynchronous
async def test_batches_are_cut_and_filled_to_max_records(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        payloads = await fill(client, 1000, batch_bytes=1024)
        async with client.consumer(TOPIC, "s", start="earliest") as consumer:
            got: list[bytes] = []
            counts = []
            # A batch is short only after `max_wait`: the full ones never meet it, however slow the host;
            # the last cannot be filled and is given after its own, short one.
            for max_wait, ends_at in ((60.0, 980), (0.05, 1000)):
                async for batch in consumer.batches(max_records=70, max_wait=max_wait):
                    got += batch.payloads
                    counts.append(batch.record_count)
                    assert batch.offsets.tolist() == list(range(len(got) - len(batch), len(got)))
                    await batch.ack()
                    if len(got) == ends_at:
                        break
                await until(lambda: client.statistics()["records_delivered"] == 1000)
            await consumer.flush()
        assert got == payloads
        assert counts == [70] * 14 + [20]
        assert fake.partitions[TOPIC].subscriptions["s"].acked == set(range(1000))


@asynchronous
async def test_going_from_messages_to_batches_loses_nothing(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        payloads = await fill(client, 100)
        async with client.consumer(TOPIC, "s", start="earliest") as consumer:
            got = [one.payload for one in await take(consumer, 30)]
            async for batch in consumer.batches(max_records=40):
                got += batch.payloads
                if len(got) >= 70:
                    break
            got += [one.payload for one in await take(consumer, 100 - len(got))]
    assert got == payloads


@asynchronous
async def test_partitions_are_merged_fairly_and_in_order_each(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        async with client.producer(TOPIC, partitions=3, batch_bytes=1024) as producer:
            await producer.send_many([b"%d" % one for one in range(900)])
        async with client.consumer(TOPIC, "s", start="earliest") as consumer:
            await until(lambda: all(one.ready for one in consumer._box.partitions))
            messages = await take(consumer, 900)
    for partition in range(3):
        offsets = [one.offset for one in messages if one.partition == partition]
        assert offsets == list(range(len(offsets)))
    assert {one.partition for one in messages[:400]} == {0, 1, 2}


@asynchronous
async def test_consumers_never_make_a_topic(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        with pytest.raises(TopicNotFound):
            async with client.consumer("/default/missing", "s"):
                pass
        assert fake.topics == {}


@asynchronous
async def test_a_busy_exclusive_subscription_is_refused(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        await fill(client, 1)
        async with client.consumer(TOPIC, "s", mode="exclusive"):
            with pytest.raises(SubscriptionBusy):
                await client.consumer(TOPIC, "s", mode="exclusive").open()


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "sharred"},
        {"start": "yesterday"},
        {"start": -1},
        {"start": datetime(2026, 1, 1)},  # noqa: DTZ001
        {"prefetch_records": 0},
        {"filters": "eu-*"},
        {"failure": {"poison": "explode"}},
        {"failure": {"poisson": "drop"}},
    ],
)
@asynchronous
async def test_wrong_options_are_refused_before_anything_is_sent(
    fake: FakeBroker, options: dict[str, Any]
) -> None:
    async with danube.connect(fake.url) as client:
        with pytest.raises(InvalidArgument):
            client.consumer(TOPIC, "s", **options)


@asynchronous
async def test_a_topic_of_another_kind_is_refused(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        await fill(client, 1)
        with pytest.raises(PolicyMismatch):
            await client.producer(TOPIC, reliable=False).open()


@asynchronous
async def test_acks_on_a_topic_that_is_not_reliable_send_nothing(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        await fill(client, 3, reliable=False)
        async with client.consumer(TOPIC, "s", start="earliest") as consumer:
            for message in await take(consumer, 3):
                await message.nack()
    assert fake.seen(Kind.ACK) == fake.seen(Kind.NACK) == 0


# -- faults -----------------------------------------------------------------------------------------


@asynchronous
async def test_a_damaged_batch_is_never_seen_and_comes_again_whole(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        payloads = await fill(client, 50)
        fake.damage_deliveries = 1
        async with client.consumer(TOPIC, "s", start="earliest") as consumer:
            messages = await take(consumer, 50)
            assert client.statistics()["damaged_batches"] == 1
            assert client.statistics()["connections"] == 2
    assert [one.payload for one in messages] == payloads


@asynchronous
async def test_a_resend_after_a_lost_answer_is_stored_once(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client, client.producer(TOPIC) as producer:
        await producer.send(b"a")
        fake.drop_after_publishes = 1
        ack = await producer.send(b"b")
        assert (ack.offset, ack.duplicate) == (1, True)
        assert client.statistics()["connections"] == 2
    assert fake.payloads(TOPIC) == [b"a", b"b"]


@asynchronous
async def test_producers_and_consumers_survive_a_broker_restart(fake: FakeBroker) -> None:
    async with (
        danube.connect(fake.url) as client,
        client.producer(TOPIC) as producer,
        client.consumer(TOPIC, "s", start="earliest") as consumer,
    ):
        await producer.send(b"before")
        held = await consumer.receive()
        fake.stop()
        await until(lambda: not client.connected)
        await held.ack()
        sending = asyncio.ensure_future(producer.send(b"during"))
        await asyncio.sleep(0.1)
        fake.again()
        assert (await sending).offset == 1
        await until(lambda: 0 in fake.partitions[TOPIC].subscriptions["s"].acked)
        while (message := await consumer.receive()).payload != b"during":
            await message.ack()
        await message.ack()


@asynchronous
async def test_a_moved_owner_is_followed_by_producer_and_consumer(fake: FakeBroker) -> None:
    async with (
        danube.connect(fake.url) as client,
        client.producer(TOPIC) as producer,
        client.consumer(TOPIC, "s", start="earliest") as consumer,
    ):
        await producer.send(b"0")
        for round_number in range(1, 4):
            fake.close_handles(OwnerMoved("the worker restarted"))
            await producer.send(b"%d" % round_number)
        seen: set[bytes] = set()
        async for message in consumer:
            seen.add(message.payload)
            await message.ack()
            if len(seen) == 4:
                break
        assert client.statistics()["connections"] == 1
    assert fake.payloads(TOPIC) == [b"0", b"1", b"2", b"3"]


@asynchronous
async def test_giving_up_fails_all_that_waits_with_the_reason(fake: FakeBroker) -> None:
    async with danube.connect(fake.url, reconnect_timeout=0.3) as client:
        producer = await client.producer(TOPIC).open()
        await client.producer("/default/other").open()
        consumer = await client.consumer(TOPIC, "s").open()
        fake.stop()
        receiving = asyncio.ensure_future(consumer.receive())
        with pytest.raises(ConnectionFailed, match="nothing listens"):
            await producer.send(b"x")
        with pytest.raises(ConnectionFailed):
            await receiving
        with pytest.raises(ConnectionFailed):
            await client.admin.list_topics()


@asynchronous
async def test_connecting_to_nobody_says_where_why_and_what_to_do() -> None:
    with FakeBroker() as fake:
        pass
    with pytest.raises(ConnectionFailed) as caught:
        await danube.connect(fake.url).open()
    assert f"127.0.0.1:{fake.port}" in str(caught.value) and "nothing listens" in str(caught.value)
    assert "danube start" in caught.value.hint


@asynchronous
async def test_the_next_address_is_tried_when_one_does_not_answer(fake: FakeBroker) -> None:
    with FakeBroker() as gone:
        pass
    async with danube.connect(f"danube://127.0.0.1:{gone.port},127.0.0.1:{fake.port}") as client:
        assert client.connected


@asynchronous
async def test_under_faults_every_acknowledged_record_is_stored_once_in_order(
    fake: FakeBroker, source: random.Random
) -> None:
    acked: dict[int, bytes] = {}

    async def record(payload: bytes, future: Awaitable[danube.Ack]) -> None:
        try:
            ack = await future
        except StorageFull:
            return
        assert ack.offset not in acked
        acked[ack.offset] = payload

    async with danube.connect(fake.url) as client, client.producer(TOPIC, batch_bytes=1024) as producer:
        waiting = []
        for number in range(4000):  # a full disk refuses whole batches; of 1,500 once 272 were left
            payload = b"%d" % number
            while not producer._box.has_room:
                await producer.ready()
            waiting.append(asyncio.ensure_future(record(payload, producer.send_nowait(payload))))
            fault = source.random()
            if fault < 0.004:
                fake.drop_connections()
            elif fault < 0.008:
                fake.close_handles(OwnerMoved("moved"))
            elif fault < 0.02:
                fake.refuse(Kind.PUBLISH, StorageFull("full"))
            elif fault < 0.03:
                fake.drop_after_publishes = source.randrange(1, 4)
            elif fault < 0.3:
                await asyncio.sleep(0.001)
        await asyncio.gather(*waiting)
        await producer.flush()
    stored = fake.payloads(TOPIC)
    assert stored == [acked[offset] for offset in range(len(stored))]
    assert [int(one) for one in stored] == sorted(int(one) for one in stored)
    assert len(stored) > 500


# -- administration, closing ------------------------------------------------------------------------


@asynchronous
async def test_administration_asks_the_owner_of_every_partition(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        admin = client.admin
        made = await admin.create_topic("/default/x", partitions=3, durability="fsync", retention_ms=1000)
        assert (made.topic, made.partition_count, made.durability) == ("/default/x", 3, "fsync")
        assert made.policy["retention_ms"] == 1000
        with pytest.raises(TopicExists):
            await admin.create_topic("/default/x")
        assert [one.topic for one in await admin.list_topics()] == ["/default/x"]
        assert await admin.list_topics("other") == []
        async with client.consumer("/default/x", "s", mode="failover"):
            described = await admin.describe_topic("/default/x")
            assert [one["partition"] for one in described.partitions] == made.partitions
            [subscription] = await admin.list_subscriptions("/default/x")
            assert (subscription.subscription, subscription.mode) == ("s", "failover")
            assert len(subscription.partitions) == 3
            one = await admin.describe_subscription("/default/x", "s")
            assert (one.consumer_count, one.lag_records) == (1, 0)
        await admin.seek("/default/x", "s", datetime(2026, 1, 1, tzinfo=UTC))
        seeks = [call for call in fake.admin_calls if call.op == "seek"]
        assert [call.partition for call in seeks] == made.partitions
        assert seeks[0].args["kind"] == "time" and seeks[0].args["value"] == 1_767_225_600_000_000
        await admin.unblock("/default/x", "s")
        await admin.set_failure_policy("/default/x", "s", {"poison": "drop"})
        await admin.update_topic("/default/x", retention_ms=5)
        assert (await admin.topic("/default/x")).policy["retention_ms"] == 5
        await admin.delete_subscription("/default/x", "s")
        await admin.delete_topic("/default/x")
        assert (await admin.status())["workers"] == 1


@asynchronous
async def test_use_after_close_raises_closed_error(fake: FakeBroker) -> None:
    client = danube.connect(fake.url)
    with pytest.raises(ClosedError, match="not connected"):
        client.producer(TOPIC)
    async with client:
        producer = await client.producer(TOPIC).open()
        consumer = await client.consumer(TOPIC, "s").open()
        waiting = asyncio.ensure_future(consumer.receive())
        await asyncio.sleep(0)
    with pytest.raises(ClosedError):
        await waiting
    for call in (producer.send(b"x"), consumer.receive(), client.admin.status(), client.open()):
        with pytest.raises(ClosedError):
            await call
    await client.close()


@asynchronous
async def test_closing_the_client_flushes_its_producers(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        producer = await client.producer(TOPIC).open()
        producer.send_nowait(b"x")
    assert fake.payloads(TOPIC) == [b"x"]
    await until(lambda: not fake.connections)


def test_importing_danube_imports_no_numpy() -> None:
    import subprocess
    import sys

    code = "import danube, sys; print('numpy' in sys.modules, 'asyncio' in sys.modules, danube.__version__)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "False", danube.__version__]
