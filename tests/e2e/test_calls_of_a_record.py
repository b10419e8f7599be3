"""How many Python functions a worker calls for one record: its work, measured as no busy host changes it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from danube import sync
from danube.server.proto import DanubeApi_pb2 as pb
from tests.broker_process import BrokerProcess, wait_until
from tests.e2e.authority_site import ENVIRONMENT, root

pytestmark = pytest.mark.e2e

RECORDS = 200
CALLS_MAX = 100  # taken, written, answered and delivered
ACK_CALLS_MAX = 60  # of an ack that comes alone
GRPC_CALLS_MAX = 200  # SendMessage, its delivery and its Ack, one after another
TOPIC = "/default/counted"
# Imported by each process of the broker at its start: SIGUSR1 begins to count, SIGUSR2 writes the counts.
COUNTING = """
import collections, json, os, signal, sys

calls = collections.Counter()


def count(frame, event, arg):
    if event == "call":
        calls[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1


def begin(*_):
    calls.clear()
    sys.setprofile(count)


def end(*_):
    sys.setprofile(None)
    path = f"{os.environ['CALLS_FOLDER']}/{os.getpid()}"
    with open(path + ".new", "w") as file:
        json.dump(calls, file)
    os.rename(path + ".new", path)


signal.signal(signal.SIGUSR1, begin)
signal.signal(signal.SIGUSR2, end)
"""


class Counting:
    """Counts calls in the one worker of a broker."""

    def __init__(self, broker: BrokerProcess, folder: Path) -> None:
        self._worker = broker.processes()["worker-0"]
        self._file = folder / str(self._worker)

    def during(self, work: Callable[[], None]) -> Counter[str]:
        """Calls while ``work`` ran, without those that the worker's timers make in as much time."""
        busy, elapsed_s = self._count(work)
        idle, _ = self._count(lambda: time.sleep(elapsed_s))
        return busy - idle

    def _count(self, work: Callable[[], None]) -> tuple[Counter[str], float]:
        os.kill(self._worker, signal.SIGUSR1)
        time.sleep(0.2)  # the worker sees the signal when its loop wakes
        began = time.monotonic()
        work()
        elapsed_s = time.monotonic() - began
        os.kill(self._worker, signal.SIGUSR2)
        wait_until(self._file.exists, 30, "the worker wrote its counts")
        calls: Counter[str] = Counter(json.loads(self._file.read_text()))
        self._file.unlink()
        return calls, elapsed_s


def told(what: str, calls: Counter[str]) -> float:
    each = calls.total() / RECORDS
    print(f"{what}: {each:.1f} calls")
    for name, count in calls.most_common(150):
        print(f"  {count / RECORDS:6.2f} {name}")
    return each


def counted(broker: Any, tmp_path: Path, **more: str) -> tuple[BrokerProcess, Counting]:
    """A broker with one worker that counts its calls."""
    folder = tmp_path / "calls"
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(COUNTING)
    environment = {
        "PYTHONPATH": str(folder), "CALLS_FOLDER": str(folder),
        # How often a worker syncs behind is a matter of time and no work for a record.
        "DANUBE_WAL__SYNC_INTERVAL": "1s",
        **more,
    }  # fmt: skip
    process = broker(workers=1, environment=environment)
    return process, Counting(process, folder)


def test_one_record_through_a_worker_costs_few_calls(broker: Any, tmp_path: Path) -> None:
    process, counting = counted(broker, tmp_path)
    with (
        sync.connect(process.address) as client,
        client.producer(TOPIC) as producer,
        client.consumer(TOPIC, subscription="s") as consumer,
    ):
        messages = iter(consumer)

        def through() -> Any:
            producer.send(b"x" * 100)
            return next(messages)

        for _ in range(50):
            through().ack()
        taken: list[Any] = []
        without = counting.during(lambda: taken.extend(through() for _ in range(RECORDS)))
        for message in taken:
            message.ack()
        consumer.flush()
        acked = counting.during(lambda: [through().ack() for _ in range(RECORDS)] and consumer.flush())
    each, with_ack = told("a record", without), told("a record and its ack", acked)
    assert each <= CALLS_MAX
    assert with_ack <= CALLS_MAX + ACK_CALLS_MAX


def test_access_control_costs_no_call_for_a_record(broker: Any, tmp_path: Path) -> None:
    """Rights are judged where a handle opens: a publish is the same with and without."""
    each = {}
    for mode, environment in (("none", {}), ("token", ENVIRONMENT)):
        process, counting = counted(broker, tmp_path / mode, **environment)
        with sync.connect(process.address, token=root()) as client, client.producer(TOPIC) as producer:
            for _ in range(50):
                producer.send(b"x" * 100)
            calls = counting.during(lambda p=producer: [p.send(b"x" * 100) for _ in range(RECORDS)] and None)
        each[mode] = told(f"a record with auth.mode {mode}", calls)
        process.kill()
    assert each["token"] <= each["none"] + 0.5, "half a call is what timers differ by"


def test_one_message_over_grpc_costs_few_calls(broker: Any, tmp_path: Path) -> None:
    """With grpcio, which the official Python client is made of: it sends WINDOW_UPDATE often."""
    process, counting = counted(broker, tmp_path)

    def method(channel: grpc.Channel, path: str, answer: Any, *, stream: bool = False) -> Any:
        kind = channel.unary_stream if stream else channel.unary_unary
        return kind(f"/danube.{path}", lambda request: request.SerializeToString(), answer.FromString)

    with grpc.insecure_channel(process.grpc_address) as channel:
        send = method(channel, "ProducerService/SendMessage", pb.MessageResponse)
        ack = method(channel, "ConsumerService/Ack", pb.AckResponse)
        create = method(channel, "ProducerService/CreateProducer", pb.ProducerResponse)
        subscribe = method(channel, "ConsumerService/Subscribe", pb.ConsumerResponse)
        receive = method(channel, "ConsumerService/ReceiveMessages", pb.StreamMessage, stream=True)
        producer_id = create(
            pb.ProducerRequest(topic_name=TOPIC, producer_name="p", dispatch_strategy=1)
        ).producer_id
        consumer_id = subscribe(
            pb.ConsumerRequest(topic_name=TOPIC, consumer_name="c", subscription="s")
        ).consumer_id
        messages = receive(pb.ReceiveRequest(consumer_id=consumer_id))
        place = pb.MsgID(producer_id=producer_id, topic_name=TOPIC)
        message = pb.StreamMessage(msg_id=place, payload=b"x" * 100, producer_name="p", request_id=7)

        def through() -> None:
            message.publish_time = time.time_ns() // 1_000_000
            send(message)
            ack(pb.AckRequest(msg_id=next(messages).msg_id, subscription_name="s"))

        for _ in range(50):
            through()
        calls = counting.during(lambda: [through() for _ in range(RECORDS)] and None)
        messages.cancel()
    assert told("a message over gRPC", calls) <= GRPC_CALLS_MAX
