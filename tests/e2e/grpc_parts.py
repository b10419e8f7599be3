"""What the tests of the gRPC port share: the calls of an official client, as requests by field."""

from __future__ import annotations

import time
from typing import Any

from danube.server.proto import DanubeAdmin_pb2, DanubeApi_pb2, SchemaRegistry_pb2
from tests.grpc_client import GrpcClient, Stream

pb = DanubeApi_pb2
NON_RELIABLE, RELIABLE = 0, 1
EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED = range(4)
OK, UNKNOWN, INVALID, NOT_FOUND, EXISTS, DENIED, EXHAUSTED, PRECONDITION = 0, 2, 3, 5, 6, 7, 8, 9
UNIMPLEMENTED, UNAVAILABLE, UNAUTHENTICATED = 12, 14, 16


class DanubeCalls(GrpcClient):
    """One connection that speaks the Danube gRPC API."""

    def unary(self, path: str, request: Any, module: Any = pb) -> Any:
        service, method = path.split("/")
        one = module.DESCRIPTOR.services_by_name[service].methods_by_name[method]
        response = getattr(module, one.output_type.name)
        return self.call(f"/{module.DESCRIPTOR.package}.{path}", request, response)

    def admin(self, path: str, request: Any) -> Any:
        return self.unary(path, request, DanubeAdmin_pb2)

    def schema(self, method: str, request: Any) -> Any:
        return self.unary(f"SchemaRegistry/{method}", request, SchemaRegistry_pb2)

    def create(self, topic: str, name: str = "p", mode: int = RELIABLE, **fields: Any) -> int:
        request = pb.ProducerRequest(
            request_id=1, producer_name=name, topic_name=topic, dispatch_strategy=mode, **fields
        )
        answer = self.unary("ProducerService/CreateProducer", request)
        assert (answer.request_id, answer.producer_name) == (1, name)
        return int(answer.producer_id)

    @staticmethod
    def message(topic: str, producer_id: int, payload: bytes, name: str = "p", **fields: Any) -> Any:
        msg_id = pb.MsgID(producer_id=producer_id, topic_name=topic, broker_addr="http://broker:6650")
        fields = {"request_id": 7, "publish_time": int(time.time() * 1000), **fields}
        return pb.StreamMessage(msg_id=msg_id, payload=payload, producer_name=name, **fields)

    def send(self, topic: str, producer_id: int, payload: bytes, name: str = "p", **fields: Any) -> None:
        message = self.message(topic, producer_id, payload, name, **fields)
        assert self.unary("ProducerService/SendMessage", message).request_id == message.request_id

    def subscribe(
        self, topic: str, subscription: str = "s", name: str = "c", kind: int = SHARED, filters: Any = ()
    ) -> int:
        request = pb.ConsumerRequest(
            request_id=2, topic_name=topic, consumer_name=name, subscription=subscription,
            subscription_type=kind, key_filters=filters,
        )  # fmt: skip
        answer = self.unary("ConsumerService/Subscribe", request)
        assert (answer.request_id, answer.consumer_name) == (2, name)
        return int(answer.consumer_id)

    def receive(self, consumer_id: int) -> Stream:
        request = pb.ReceiveRequest(request_id=3, consumer_id=consumer_id)
        return self.start("/danube.ConsumerService/ReceiveMessages", request, pb.StreamMessage)

    def ack(self, message: Any, subscription: str = "s") -> None:
        request = pb.AckRequest(request_id=4, msg_id=message.msg_id, subscription_name=subscription)
        assert self.unary("ConsumerService/Ack", request).request_id == 4

    def nack(self, message: Any, subscription: str = "s", **fields: Any) -> None:
        request = pb.NackRequest(
            request_id=5, msg_id=message.msg_id, subscription_name=subscription, **fields
        )
        assert self.unary("ConsumerService/Nack", request).request_id == 5

    def health(self, client: int, number: int) -> int:
        request = pb.HealthCheckRequest(request_id=6, client=client, id=number)
        return int(self.unary("HealthCheck/HealthCheck", request).status)
