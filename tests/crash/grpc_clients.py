"""Producers and consumers over the Danube gRPC API that write down what they do, as grpcio speaks it.

They differ from the native ones in what the API does not have.  An answer to a send does not say where
the record lies, so the journal's ``ok`` has no offset and the checker takes the log's word for it.  A send
without an answer is neither repeated nor ordered with what follows: after one, the producer goes on under
another name in the journal, because the order of its records is promised within a connection only.  An ack
without an answer is not repeated either: it may have had its effect.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc

from danube.server.proto import DanubeApi_pb2 as pb
from tests.crash.clients import Receiver, Sender

CALL_TIMEOUT_S = 20.0
SETTLERS = 4  # calls side by side of one consumer
WAITING_MAX = 10_000
KINDS = pb.ConsumerRequest.SubscriptionType
KIND_OF = {
    "exclusive": KINDS.Exclusive,
    "shared": KINDS.Shared,
    "failover": KINDS.Failover,
    "key_shared": KINDS.KeyShared,
}
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # each client has a connection of its own, on some worker
    ("grpc.max_receive_message_length", 16 << 20),
]


class Calls:
    """The calls of one channel."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=_OPTIONS)

    async def __aenter__(self) -> Calls:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.channel.close()

    async def unary(self, method: str, request: Any, response: type[Any]) -> Any:
        call = self.channel.unary_unary(
            f"/danube.{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        return await call(request, timeout=CALL_TIMEOUT_S)

    def received(self, consumer_id: int) -> Any:
        """The stream of a consumer's messages."""
        call = self.channel.unary_stream(
            "/danube.ConsumerService/ReceiveMessages",
            request_serializer=pb.ReceiveRequest.SerializeToString,
            response_deserializer=pb.StreamMessage.FromString,
        )
        return call(pb.ReceiveRequest(request_id=1, consumer_id=consumer_id))


class GrpcSender(Sender):
    """One producer that waits for each SendMessage."""

    errors = (grpc.aio.AioRpcError,)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._producer_name = self.name
        self._unknown = 0

    async def work(self) -> None:
        async with Calls(self.options["grpc"]) as calls:
            request = pb.ProducerRequest(
                request_id=1,
                producer_name=self._producer_name,
                topic_name=self.topic,
                dispatch_strategy=pb.DispatchStrategy.Reliable,
            )
            answer = await calls.unary("ProducerService/CreateProducer", request, pb.ProducerResponse)
            place = pb.MsgID(
                producer_id=answer.producer_id, topic_name=self.topic, broker_addr=self.options["grpc"]
            )
            await self.send_until_stopped((calls, place))

    async def send_one(self, producer: Any) -> None:
        calls, place = producer
        first, payloads, keys = self.next_records(1)
        message = pb.StreamMessage(
            request_id=first,
            msg_id=place,
            payload=payloads[0],
            producer_name=self._producer_name,
            publish_time=time.time_ns() // 1_000_000,
        )
        if keys[0] is not None:
            message.routing_key = keys[0]
        try:
            await calls.unary("ProducerService/SendMessage", message, pb.MessageResponse)
        except grpc.aio.AioRpcError as error:
            self.journal.write("fail", self.name, self.topic, first, first + 1, error.code().name)
            self._unknown += 1
            self.name = f"{self._producer_name}.{self.options['part']}.{self._unknown}"
            raise
        self.acknowledged += 1
        self.journal.write(
            *("ok", self.name, self.topic, first, first + 1, 0, None, self.durability), time.monotonic_ns()
        )


class GrpcReceiver(Receiver):
    """One consumer whose acks are calls of their own.

    What comes is written down at once and settled beside: a record that waited unseen behind slow acks
    could time out, go to another consumer, and look as if the broker had sent its key out of order.
    """

    errors = (grpc.aio.AioRpcError,)

    async def work(self) -> None:
        async with Calls(self.options["grpc"]) as calls:
            await self.until_finished(self.take_messages(calls))

    async def take_messages(self, calls: Calls) -> None:
        request = pb.ConsumerRequest(
            request_id=1,
            topic_name=self.topic,
            consumer_name=self.name,
            subscription=self.subscription,
            subscription_type=KIND_OF[self.mode],
        )
        answer = await calls.unary("ConsumerService/Subscribe", request, pb.ConsumerResponse)
        waiting: asyncio.Queue[Any] = asyncio.Queue(WAITING_MAX)
        tasks = [asyncio.ensure_future(self.settle_all(calls, waiting)) for _ in range(SETTLERS)]
        tasks.append(asyncio.ensure_future(self.read(calls, answer.consumer_id, waiting)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def read(self, calls: Calls, consumer_id: int, waiting: asyncio.Queue[Any]) -> None:
        async for message in calls.received(consumer_id):
            key = message.routing_key if message.HasField("routing_key") else None
            self.note(0, message.msg_id.topic_offset, message.payload, key)
            await waiting.put(message)

    async def settle_all(self, calls: Calls, waiting: asyncio.Queue[Any]) -> None:
        while True:
            await self.settle(calls, await waiting.get())

    async def settle(self, calls: Calls, message: Any) -> None:
        fate = self.fate()
        if fate == "leave":
            return
        settled: dict[str, Any] = {
            "request_id": 1,
            "msg_id": message.msg_id,
            "subscription_name": self.subscription,
        }
        if fate == "nack":
            request = pb.NackRequest(**settled, delay_ms=20, reason="crash check")
            await calls.unary("ConsumerService/Nack", request, pb.NackResponse)
            return
        place = (self.topic, 0, message.msg_id.topic_offset)
        try:
            await calls.unary("ConsumerService/Ack", pb.AckRequest(**settled), pb.AckResponse)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            self.journal.write("ack_unknown", self.subscription, *place)
            raise
        self.journal.write("ack", self.subscription, *place)
