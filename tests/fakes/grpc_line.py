"""Channels for the compatibility commands that lead straight to servicers, without a network."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from danube.cli.upstream.endpoint import Endpoint
from danube.errors import DanubeError
from danube.load.links.grpc_client import status_error
from danube.server.proto import DanubeApi_pb2 as pb
from danube.server.services.broker_admin import BrokerAdmin
from danube.server.services.cluster_admin import ClusterAdmin
from danube.server.services.namespace_admin import NamespaceAdmin
from danube.server.services.schema_registry import SchemaRegistry
from danube.server.services.security_admin import SecurityAdmin
from danube.server.services.topic_admin import TopicAdmin
from tests.fakes.broker_calls import FakeBrokerCalls, FakeCall

_END = object()


@dataclass
class FakeTopic:
    """What one topic of the data port holds and answers."""

    messages: list[pb.StreamMessage] = field(default_factory=list)
    acked: list[int] = field(default_factory=list)


class FakeStream:
    """Messages put by the test; ends when the test, or the command, says so."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[Any] = queue.Queue()

    def put(self, message: Any) -> None:
        self._waiting.put(message)

    def end(self) -> None:
        self._waiting.put(_END)

    cancel = end

    def __iter__(self) -> Iterator[Any]:
        while (one := self._waiting.get(timeout=10)) is not _END:
            if isinstance(one, BaseException):
                raise one
            yield one


class FakeLine:
    """A broker behind ``open``: the admin services, the registry, and a data port in a few dicts."""

    def __init__(self) -> None:
        self.broker = FakeBrokerCalls()
        self.endpoints: list[Endpoint] = []
        self.closed = 0
        self.slept: list[float] = []
        self.calls: list[tuple[str, Any]] = []
        self.timeouts: set[float | None] = set()
        self.topics: dict[str, FakeTopic] = {}
        self.partitions: list[str] = []
        self.failures: dict[str, list[str]] = {}  # method -> statuses that its next calls end with
        self.streams: list[FakeStream] = []
        self.opened = 0
        self.redirect = ""
        services = (BrokerAdmin, ClusterAdmin, NamespaceAdmin, TopicAdmin, SecurityAdmin, SchemaRegistry)
        self._services: dict[str, Any] = {cls.__name__: cls(self.broker) for cls in services}

    def open(self, endpoint: Endpoint) -> FakeChannel:
        self.endpoints.append(endpoint)
        return FakeChannel(self)

    def requests(self, method: str) -> list[Any]:
        return [request for name, request in self.calls if name == method]

    def answer(self, path: str, request: Any) -> Any:
        service, method = path.rpartition(".")[2].split("/")
        self.calls.append((method, request))
        waiting = self.failures.get(method)
        if waiting:
            status = waiting.pop(0)
            if status:
                raise status_error(status, f"{method} failed")
        name = "".join(f"_{one.lower()}" if one.isupper() else one for one in method).lstrip("_")
        if path.startswith("/danube."):
            return getattr(self, f"_{name}")(request)
        try:
            return asyncio.run(getattr(self._services[service], name)(request, FakeCall()))
        except DanubeError as error:
            text = f"{error} ({error.hint})" if error.hint else str(error)
            raise status_error(error.status, text) from None

    def _topic_lookup(self, request: Any) -> Any:
        url = self.redirect or "http://127.0.0.1:6650"
        kind = pb.TopicLookupResponse.Redirect if self.redirect else pb.TopicLookupResponse.Connect
        return pb.TopicLookupResponse(
            request_id=request.request_id, response_type=kind, connect_url=url, broker_url=url
        )

    def _topic_partitions(self, request: Any) -> Any:
        return pb.TopicPartitionsResponse(request_id=request.request_id, partitions=self.partitions)

    def _create_producer(self, request: Any) -> Any:
        self.topics.setdefault(request.topic_name, FakeTopic())
        return pb.ProducerResponse(
            request_id=request.request_id, producer_id=77, producer_name=request.producer_name
        )

    def _send_message(self, request: Any) -> Any:
        self.topics[request.msg_id.topic_name].messages.append(request)
        return pb.MessageResponse(request_id=request.request_id)

    def _subscribe(self, request: Any) -> Any:
        self.topics.setdefault(request.topic_name, FakeTopic())
        return pb.ConsumerResponse(
            request_id=request.request_id, consumer_id=5, consumer_name=request.consumer_name
        )

    def _ack(self, request: Any) -> Any:
        self.topics.setdefault(request.msg_id.topic_name, FakeTopic()).acked.append(
            request.msg_id.topic_offset
        )
        return pb.AckResponse(request_id=request.request_id)


class FakeChannel:
    """One channel of the line."""

    def __init__(self, line: FakeLine) -> None:
        self._line = line

    def call(self, method: str, request: Any, reply: type[Any], timeout_s: float | None) -> Any:
        self._line.timeouts.add(timeout_s)
        response = self._line.answer(method, type(request).FromString(request.SerializeToString()))
        return reply.FromString(response.SerializeToString())

    def stream(self, method: str, request: Any, reply: type[Any]) -> FakeStream:
        """The prepared streams in turn, then one that ends with PERMISSION_DENIED."""
        line = self._line
        line.calls.append((method.rpartition("/")[2], request))
        line.opened += 1
        if line.opened <= len(line.streams):
            return line.streams[line.opened - 1]
        last = FakeStream()
        last.put(status_error("PERMISSION_DENIED", "the test is over"))
        return last

    def close(self) -> None:
        self._line.closed += 1
