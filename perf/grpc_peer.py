"""The Python side of the gRPC measurements, each role in a process of its own.

``echo`` is the floor: a bare grpcio server (asyncio) that takes the same messages and does nothing with
them.  ``producer`` and ``consumer`` open one at the broker through grpcio and write the framed message that
the compiled client sends; ``stored`` and ``settled`` ask the broker afterwards what really happened.

A role prints one line of JSON (see perf/child.py), ``echo`` its port.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

import danube
from danube.server.proto import DanubeApi_pb2 as api
from perf.child import Options, serve
from perf.loads import make_topic, owner_in

SUBSCRIPTION = "bench"


def framed(message: Any) -> bytes:
    """A message as gRPC puts it into DATA: one byte, its size (uint32, big-endian), its bytes."""
    data = message.SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


def stream_message(topic: str, size: int, producer_id: int = 1) -> Any:
    return api.StreamMessage(
        request_id=1,
        msg_id=api.MsgID(producer_id=producer_id, topic_name=topic, broker_addr="http://127.0.0.1:6650"),
        payload=b"x" * size,
        publish_time=1_700_000_000_000,
        producer_name="bench",
    )


async def echo(options: Options) -> None:
    """Serve SendMessage, Ack and ReceiveMessages until the process is stopped."""
    message = stream_message("/default/echo", options["size"])

    async def send(request: Any, context: Any) -> Any:
        return api.MessageResponse(request_id=request.request_id)

    async def ack(request: Any, context: Any) -> Any:
        return api.AckResponse(request_id=request.request_id)

    async def receive(request: Any, context: Any) -> AsyncIterator[Any]:
        for number in range(request.request_id):
            message.msg_id.topic_offset = number
            yield message
        await asyncio.Event().wait()

    def handler(kind: Any, behaviour: Any, request: Any, response: Any) -> Any:
        return kind(
            behaviour, request_deserializer=request.FromString, response_serializer=response.SerializeToString
        )

    unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
    producing = {"SendMessage": handler(unary, send, api.StreamMessage, api.MessageResponse)}
    consuming = {
        "Ack": handler(unary, ack, api.AckRequest, api.AckResponse),
        "ReceiveMessages": handler(stream, receive, api.ReceiveRequest, api.StreamMessage),
    }
    server = grpc.aio.server()
    for name, handlers in (("ProducerService", producing), ("ConsumerService", consuming)):
        generic = grpc.method_handlers_generic_handler(f"danube.{name}", handlers)
        server.add_generic_rpc_handlers((generic,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


async def call(address: str, path: str, request: Any, response: Any) -> Any:
    async with grpc.aio.insecure_channel(address) as channel:
        method = channel.unary_unary(
            path,
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        return await method(request, timeout=30)


async def producer(options: Options) -> Options:
    """A topic at the durability level, a producer on it, and the file that a SendMessage carries."""
    async with danube.connect(options["url"]) as client:
        await make_topic(client, options)
        owner = await owner_in(client, options["topic"], options["workers"])
    request = api.ProducerRequest(
        request_id=1,
        producer_name="bench",
        topic_name=options["topic"],
        dispatch_strategy=int(options["durability"] != "memory"),
    )
    answer = await call(
        options["grpc"], "/danube.ProducerService/CreateProducer", request, api.ProducerResponse
    )
    message = stream_message(options["topic"], options["size"], answer.producer_id)
    Path(options["file"]).write_bytes(framed(message))
    return {"owner": owner}


async def consumer(options: Options) -> Options:
    """A topic at the durability level, a subscription on it, and the file that ReceiveMessages carries."""
    async with danube.connect(options["url"]) as client:
        await make_topic(client, options)
    request = api.ConsumerRequest(
        request_id=1, topic_name=options["topic"], consumer_name="bench", subscription=SUBSCRIPTION
    )
    answer = await call(options["grpc"], "/danube.ConsumerService/Subscribe", request, api.ConsumerResponse)
    message = api.ReceiveRequest(request_id=1, consumer_id=answer.consumer_id)
    Path(options["file"]).write_bytes(framed(message))
    return {"consumer_id": answer.consumer_id}


async def message(options: Options) -> Options:
    """The file that a SendMessage to ``echo`` carries."""
    Path(options["file"]).write_bytes(framed(stream_message("/default/echo", options["size"])))
    return {}


async def request(options: Options) -> Options:
    """The file that asks ``echo`` for ``count`` messages."""
    Path(options["file"]).write_bytes(framed(api.ReceiveRequest(request_id=options["count"], consumer_id=1)))
    return {}


async def stored(options: Options) -> Options:
    """How many records the topic holds, and at which level they were acknowledged."""
    async with danube.connect(options["url"]) as client:
        found = await client.admin.describe_topic(options["topic"])
    return {
        "records": sum(int(one["log_end"]) for one in found.partitions),
        "durability": found.topic.policy.get("durability"),
    }


async def settled(options: Options) -> Options:
    """What the subscription still waits for."""
    async with danube.connect(options["url"]) as client:
        found = await client.admin.describe_subscription(options["topic"], SUBSCRIPTION)
    return {"lag": found.lag_records, "in_flight": found.in_flight}


ROLES = {role.__name__: role for role in (echo, producer, consumer, message, request, stored, settled)}

if __name__ == "__main__":
    serve(ROLES)
