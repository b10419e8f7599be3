"""The blocking client: the same promises over a plain socket, in threads, under gevent and around fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

import danube
import danube.sync
from danube.client.blocking import connection
from danube.core.dispatch.consumer_window import WINDOW_FIRST
from danube.core.protocol.native import Kind
from danube.errors import (
    ClosedError,
    ConnectionFailed,
    InvalidArgument,
    OperationTimeout,
    Overloaded,
    OwnerMoved,
    StorageFull,
    TopicNotFound,
)
from tests.fakes.broker import FakeBroker

TOPIC = "/default/orders"


def fill(client: danube.sync.Client, count: int) -> list[bytes]:
    payloads = [b"%d" % one for one in range(count)]
    with client.producer(TOPIC) as producer:
        producer.send_many(payloads)
    return payloads


def test_a_send_many_that_is_cut_off_tells_what_is_stored(fake: FakeBroker) -> None:
    payloads: list[Any] = [b"%03d" % one + b"x" * 200 for one in range(99)] + ["text"]
    with danube.sync.connect(fake.url) as client, client.producer(TOPIC, batch_bytes=2048) as producer:
        with pytest.raises(InvalidArgument, match="record 99") as refused:
            producer.send_many(payloads)
        stored = [one for places in refused.value.facts["places"] for one in places]
        assert stored == list(range(len(stored))) and len(stored) > 50
        assert sum(ack.record_count for ack in refused.value.facts["acks"]) == len(stored)
        assert fake.payloads(TOPIC) == payloads[: len(stored)]


@pytest.mark.parametrize("how", ["iterate", "receive", "batches"])
def test_records_beyond_the_first_window_come_without_a_pause(
    fake: FakeBroker, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credit that is given while a reader waits leaves at once, not with its next look."""
    monkeypatch.setattr(connection, "READ_TURN_S", 30.0)
    count = 8 * WINDOW_FIRST
    with danube.sync.connect(fake.url) as client:
        fill(client, count)
        with client.consumer(TOPIC, "s", start="earliest") as consumer:
            began, taken = time.monotonic(), 0
            messages, batches = iter(consumer), consumer.batches() if how == "batches" else None
            while taken < count:
                if batches is not None:
                    taken += next(batches).record_count
                else:
                    _ = next(messages) if how == "iterate" else consumer.receive(10)
                    taken += 1
            assert time.monotonic() - began < 10, "no turn of the reader was waited for"


@pytest.mark.parametrize("how", ["iterate", "receive"])
def test_threads_of_one_consumer_share_its_messages_and_lose_no_ack(fake: FakeBroker, how: str) -> None:
    count = 6000
    with danube.sync.connect(fake.url) as client:
        payloads = fill(client, count)
        with client.consumer(TOPIC, "s", start="earliest") as consumer:
            taken: list[bytes] = []
            enough = threading.Event()

            def work() -> None:
                messages = iter(consumer)
                while not enough.is_set():
                    message = next(messages) if how == "iterate" else consumer.receive(30)
                    if message.payload == b"end":
                        return
                    message.ack()
                    taken.append(message.payload)
                    if len(taken) >= count:
                        enough.set()

            threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
            switching = sys.getswitchinterval()
            sys.setswitchinterval(1e-5)
            try:
                for thread in threads:
                    thread.start()
                assert enough.wait(60)
            finally:
                sys.setswitchinterval(switching)
            with client.producer(TOPIC) as producer:
                producer.send_many([b"end"] * len(threads))
            for thread in threads:
                thread.join(30)
                assert not thread.is_alive()
            assert sorted(taken) == sorted(payloads), "each record once"
            consumer.flush()
        with client.consumer(TOPIC, "s") as again:
            left = {again.receive(10).payload for _ in threads}
        assert left == {b"end"}, "every ack arrived"


def test_the_names_are_those_of_the_asyncio_client() -> None:
    from danube.client.aio import client, consumer, producer

    for asynchronous, blocking in [
        (client.Client, danube.sync.Client),
        (client.Admin, danube.sync.Admin),
        (producer.Producer, danube.sync.Producer),
        (consumer.Consumer, danube.sync.Consumer),
        (danube.Message, danube.sync.Message),
        (danube.Batch, danube.sync.Batch),
    ]:
        public = {name for name in dir(asynchronous) if not name.startswith("_")}
        assert public == {name for name in dir(blocking) if not name.startswith("_")}


def test_a_record_comes_back_whole(fake: FakeBroker) -> None:
    with danube.sync.connect(fake.url) as client:
        with client.producer(TOPIC, name="p1") as producer:
            ack = producer.send(b"payload", key="k", attributes={"a": "b"})
            assert (ack.offset, ack.durability) == (0, "written")
        with client.consumer(TOPIC, subscription="s", start="earliest") as consumer:
            for message in consumer:
                message.ack()
                break
        assert (message.payload, message.key, message.attributes) == (b"payload", "k", {"a": "b"})
        assert message.producer_name == "p1"
        fake.wait_for(lambda: fake.partitions[TOPIC].subscriptions["s"].acked == {0})


def test_send_nowait_leaves_when_someone_waits(fake: FakeBroker) -> None:
    with danube.sync.connect(fake.url) as client, client.producer(TOPIC) as producer:
        futures = [producer.send_nowait(b"%d" % one) for one in range(10)]
        assert fake.seen(Kind.PUBLISH) == 0
        assert futures[7].result().offset == 7
        assert futures[9].done()
        producer.send_nowait(b"10")
    assert len(fake.payloads(TOPIC)) == 11


def test_send_nowait_is_bounded(fake: FakeBroker) -> None:
    with (
        danube.sync.connect(fake.url) as client,
        client.producer(TOPIC, batch_bytes=4096, max_in_flight_bytes=16_384) as producer,
    ):
        fake.hold()
        with pytest.raises(Overloaded):
            for _ in range(1000):
                producer.send_nowait(b"x" * 1000)
        fake.release()
        producer.ready()
        producer.send(b"last")


def test_messages_batches_and_nacks(fake: FakeBroker) -> None:
    with danube.sync.connect(fake.url) as client:
        payloads = fill(client, 3000)
        with client.consumer(TOPIC, "s", start="earliest") as consumer:
            got = []
            for message in consumer:
                with message:
                    got.append(message.payload)
                if len(got) == 500:
                    break
            for batch in consumer.batches(max_records=400, max_wait=0.02):
                with batch:
                    got += batch.payloads
                assert batch.record_count <= 400
                if len(got) == 3000:
                    break
            consumer.flush()
            assert got == payloads
            assert fake.partitions[TOPIC].subscriptions["s"].acked == set(range(3000))
            with client.producer(TOPIC) as producer:
                producer.send(b"again")
            first = consumer.receive(timeout=5)
            first.nack(delay=0, reason="later")
            second = consumer.receive(timeout=5)
            assert (second.offset, second.redelivery_count) == (first.offset, 1)
            with pytest.raises(OperationTimeout):
                consumer.receive(timeout=0.05)


def test_faults_are_survived(fake: FakeBroker) -> None:
    with danube.sync.connect(fake.url) as client, client.producer(TOPIC) as producer:
        producer.send(b"0")
        fake.drop_after_publishes = 1
        assert producer.send(b"1").duplicate
        fake.close_handles(OwnerMoved("moved"))
        producer.send(b"2")
        fake.refuse(Kind.PUBLISH, StorageFull("full"))
        with pytest.raises(StorageFull):
            producer.send(b"refused")
        fake.stop()
        threading.Timer(0.2, fake.again).start()
        assert producer.send(b"3").offset == 3
    assert fake.payloads(TOPIC) == [b"0", b"1", b"2", b"3"]


def test_giving_up_and_refusal_say_why(fake: FakeBroker) -> None:
    with danube.sync.connect(fake.url, reconnect_timeout=0.2) as client, client.producer(TOPIC) as producer:
        producer.send(b"x")
        fake.stop()
        with pytest.raises(ConnectionFailed, match="nothing listens"):
            producer.send(b"y")
    with pytest.raises(ConnectionFailed) as caught:
        danube.sync.connect(fake.url).open()
    assert "danube start" in caught.value.hint


def test_who_polls_without_waiting_receives_and_connects_again(fake: FakeBroker) -> None:
    def polled() -> bytes:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with suppress(OperationTimeout):
                return bytes(consumer.receive(timeout=0).payload)
        raise AssertionError("nothing was received")

    with danube.sync.connect(fake.url) as other, other.producer(TOPIC) as producer:
        producer.send(b"0")
        with (
            danube.sync.connect(fake.url) as client,
            client.consumer(TOPIC, "s", start="earliest") as consumer,
        ):
            assert polled() == b"0"
            fake.stop()
            fake.again()
            producer.send(b"1")
            assert b"1" in {polled(), polled()}  # the first may come again


def test_a_client_that_was_not_used_connects_again_however_long(fake: FakeBroker) -> None:
    with (
        danube.sync.connect(fake.url, reconnect_timeout=0.5) as client,
        client.producer(TOPIC) as producer,
        client.consumer(TOPIC, "s", start="earliest") as consumer,
    ):
        fake.stop()
        while client._session.ready:
            with pytest.raises(OperationTimeout):  # it learns of the loss, and has no time to dial
                consumer.receive(timeout=0)
        fake.again()
        time.sleep(1)  # longer than it would try
        producer.send(b"x")
        assert consumer.receive(timeout=30).payload == b"x"


def test_a_send_times_out(fake: FakeBroker) -> None:
    with danube.sync.connect(fake.url) as client, client.producer(TOPIC, timeout=0.1) as producer:
        fake.hold()
        began = time.monotonic()
        with pytest.raises(OperationTimeout, match="not known"):
            producer.send(b"x")
        assert time.monotonic() - began < 5
        fake.release()


def test_threads_share_a_client(fake: FakeBroker) -> None:
    errors: list[BaseException] = []
    seen: list[bytes] = []

    def work(number: int, client: danube.sync.Client) -> None:
        try:
            with client.producer(TOPIC, name=f"p{number}") as producer:
                for one in range(50):
                    producer.send(b"%d:%d" % (number, one))
        except BaseException as error:
            errors.append(error)

    def consume(client: danube.sync.Client) -> None:
        try:
            with client.consumer(TOPIC, "s", start="earliest") as consumer:
                for message in consumer:
                    message.ack()
                    seen.append(message.payload)
                    if len(seen) == 200:
                        return
        except BaseException as error:
            errors.append(error)

    with danube.sync.connect(fake.url) as client:
        with client.producer(TOPIC):
            pass
        threads = [threading.Thread(target=work, args=(number, client)) for number in range(4)]
        threads.append(threading.Thread(target=consume, args=(client,)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
    assert errors == []
    assert sorted(seen) == sorted(fake.payloads(TOPIC))


def test_use_after_close_raises_closed_error(fake: FakeBroker) -> None:
    with danube.sync.connect(fake.url) as client:
        producer = client.producer(TOPIC).open()
        consumer = client.consumer(TOPIC, "s").open()
        with pytest.raises(TopicNotFound):
            client.consumer("/default/missing", "s").open()
        with pytest.raises(InvalidArgument):
            client.consumer(TOPIC, "s", mode="x")
    for call in (
        lambda: producer.send(b"x"),
        consumer.receive,
        client.admin.status,
        client.open,
        lambda: client.producer(TOPIC),
    ):
        with pytest.raises(ClosedError):
            call()


def test_a_client_used_after_a_fork_says_so_and_harms_nobody(fake: FakeBroker) -> None:
    with danube.sync.connect(fake.url) as client, client.producer(TOPIC) as producer:
        producer.send(b"parent")
        child = os.fork()
        if child == 0:
            try:
                producer.send(b"child")
            except ClosedError as error:
                os._exit(0 if "fork" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        producer.send(b"parent again")
    assert fake.payloads(TOPIC) == [b"parent", b"parent again"]


def test_it_works_under_gevent() -> None:
    code = """
from gevent import monkey; monkey.patch_all()
import gevent
import time
import danube.sync
from tests.fakes.broker import FakeBroker
with FakeBroker() as fake, danube.sync.connect(fake.url) as client:
    ticks = []
    def tick():
        while True:
            ticks.append(time.monotonic()); gevent.sleep(0.01)
    ticker = gevent.spawn(tick)
    options = {"subscription": "s", "start": "earliest"}
    with client.producer("/default/t") as producer, client.consumer("/default/t", **options) as consumer:
        late = gevent.spawn_later(0.2, producer.send, b"late")
        assert consumer.receive(timeout=5).payload == b"late"
        late.get(timeout=5)
        sends = [gevent.spawn(producer.send, b"%d" % one) for one in range(20)]
        gevent.joinall(sends, timeout=10, raise_error=True)
    ticker.kill()
    print(len(ticks) > 8, len(fake.payloads("/default/t")))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=os.getcwd(), check=False
    )
    assert ran.stdout.split() == ["True", "21"], ran.stderr


def test_records_left_in_an_unclosed_producer_are_told_at_exit(fake: FakeBroker) -> None:
    code = f"""
import danube.sync
client = danube.sync.connect({fake.url!r}).open()
producer = client.producer({TOPIC!r}, name="forgetful").open()
producer.send_nowait(b"x")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert "never closed" in ran.stderr
