"""Other HTTP/2 stacks against the gRPC ports: grpclib here, grpcio in a process of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from grpclib.client import Channel, UnaryStreamMethod, UnaryUnaryMethod
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from danube.server.proto import DanubeApi_pb2, reflection_v1_pb2
from tests.broker_process import ROOT, BrokerProcess
from tests.e2e.grpc_parts import DanubeCalls

pb = DanubeApi_pb2
TOPIC = "/default/interop"


def unary(channel: Channel, path: str, request: Any, response: Any) -> Any:
    return UnaryUnaryMethod(channel, path, type(request), response)(request, timeout=10)


async def with_grpclib(host: str, port: int) -> list[bytes]:
    channel = Channel(host, port)
    try:
        request = pb.ProducerRequest(producer_name="p", topic_name=TOPIC, dispatch_strategy=1)
        made = await unary(channel, "/danube.ProducerService/CreateProducer", request, pb.ProducerResponse)
        wanted = pb.ConsumerRequest(
            topic_name=TOPIC, consumer_name="c", subscription="s", subscription_type=1
        )
        joined = await unary(channel, "/danube.ConsumerService/Subscribe", wanted, pb.ConsumerResponse)
        place = pb.MsgID(producer_id=made.producer_id, topic_name=TOPIC)

        async def send(index: int) -> None:
            message = pb.StreamMessage(msg_id=place, payload=b"%d" % index * 5000, producer_name="p")
            await unary(channel, "/danube.ProducerService/SendMessage", message, pb.MessageResponse)

        got: list[bytes] = []
        receive = UnaryStreamMethod(
            channel, "/danube.ConsumerService/ReceiveMessages", pb.ReceiveRequest, pb.StreamMessage
        )
        async with receive.open(timeout=30) as stream:
            await stream.send_message(pb.ReceiveRequest(consumer_id=joined.consumer_id), end=True)
            await asyncio.gather(*(send(index) for index in range(100)))
            async for message in stream:
                got.append(message.payload)
                ack = pb.AckRequest(msg_id=message.msg_id, subscription_name="s")
                await unary(channel, "/danube.ConsumerService/Ack", ack, pb.AckResponse)
                if len(got) == 100:
                    break
            await stream.cancel()
        with pytest.raises(GRPCError) as refused:
            await unary(
                channel,
                "/danube.Discovery/TopicLookup",
                pb.TopicLookupRequest(topic="x"),
                pb.TopicLookupResponse,
            )
        assert refused.value.status is Status.INVALID_ARGUMENT
        return got
    finally:
        channel.close()


def test_grpclib_publishes_receives_and_acks(shared_broker: Callable[..., BrokerProcess]) -> None:
    process = shared_broker(workers=2)
    got = asyncio.run(with_grpclib("127.0.0.1", process.grpc_port))
    assert sorted(got) == sorted(b"%d" % index * 5000 for index in range(100))


GRPCIO = """
import sys, grpc
from danube.server.proto import DanubeApi_pb2 as pb, health_pb2, reflection_v1_pb2 as rf
channel = grpc.insecure_channel(sys.argv[1])

def call(path, request, response):
    out = channel.unary_unary(path, type(request).SerializeToString, response.FromString)
    return out(request, timeout=10)

health = call("/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest(), health_pb2.HealthCheckResponse)
assert health.status == health_pb2.HealthCheckResponse.SERVING
ask = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
                            rf.ServerReflectionRequest.SerializeToString,
                            rf.ServerReflectionResponse.FromString)
answer = next(ask(iter([rf.ServerReflectionRequest(list_services="")])))
print(sorted(one.name for one in answer.list_services_response.service))
wanted = pb.ProducerRequest(producer_name="p", topic_name="/default/grpcio", dispatch_strategy=1)
made = call("/danube.ProducerService/CreateProducer", wanted, pb.ProducerResponse)
place = pb.MsgID(producer_id=made.producer_id, topic_name="/default/grpcio")
send = channel.unary_unary("/danube.ProducerService/SendMessage", pb.StreamMessage.SerializeToString,
                           pb.MessageResponse.FromString)
futures = [send.future(pb.StreamMessage(request_id=n, msg_id=place, payload=bytes(20_000), producer_name="p"))
           for n in range(500)]
assert [future.result(20).request_id for future in futures] == list(range(500))
try:
    lookup = pb.TopicLookupRequest(topic="/default/none")
    call("/danube.Discovery/TopicLookup", lookup, pb.TopicLookupResponse)
except grpc.RpcError as error:
    print(error.code().name, error.details())
"""


def test_grpcio_with_health_and_reflection(shared_broker: Callable[..., BrokerProcess]) -> None:
    process = shared_broker(workers=1)
    ran = subprocess.run(
        [sys.executable, "-c", GRPCIO, process.grpc_address],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    names, refusal = ran.stdout.splitlines()
    for name in ("danube.ProducerService", "danube_schema.SchemaRegistry", "grpc.health.v1.Health"):
        assert name in names
    assert "danube_admin" not in names
    assert refusal.startswith("NOT_FOUND topic /default/none does not exist")


def test_reflection_knows_the_messages(shared_broker: Callable[..., BrokerProcess]) -> None:
    process = shared_broker(workers=1)
    with DanubeCalls(process.grpc_address) as calls:
        path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
        stream = calls.open(path, reflection_v1_pb2.ServerReflectionResponse)
        request = reflection_v1_pb2.ServerReflectionRequest(file_containing_symbol="danube.StreamMessage")
        data = request.SerializeToString()
        calls.send_bytes(stream, b"\0" + len(data).to_bytes(4, "big") + data)
        files = stream.next().file_descriptor_response.file_descriptor_proto
        assert any(b"StreamMessage" in file for file in files)
        calls.send_bytes(stream, b"", end=True)
        assert stream.wait_ended().code == 0


def test_idle_connections_cost_little(broker: Callable[..., BrokerProcess]) -> None:
    process = broker(workers=1)
    worker = psutil.Process(process.running_workers()[0])
    clients = [DanubeCalls(process.grpc_address) for _ in range(20)]
    before_bytes = worker.memory_info().rss
    clients += [DanubeCalls(process.grpc_address) for _ in range(400)]
    clients[-1].create(TOPIC)
    grown = worker.memory_info().rss - before_bytes
    assert grown / 400 < 64 * 1024, grown
    for client in clients:
        client.close()


def test_connections_are_bounded(broker: Callable[..., BrokerProcess]) -> None:
    process = broker(workers=1, environment={"DANUBE_LIMITS__CONNECTIONS_MAX": "3"})
    clients = [DanubeCalls(process.grpc_address) for _ in range(3)]
    for client in clients:
        client.create(TOPIC)
    late = DanubeCalls(process.grpc_address)
    late.wait(lambda: late.went_away is not None)
    assert late.went_away is not None and late.went_away.error_code == 11
    clients[0].create(TOPIC)
    for client in (*clients, late):
        client.close()
