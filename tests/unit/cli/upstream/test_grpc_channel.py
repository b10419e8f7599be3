"""The door to grpcio: calls, streams, deadlines, the token and statuses, against a grpcio server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from danube.cli.upstream.endpoint import Endpoint
from danube.cli.upstream.grpc_channel import open_channel, status_of
from danube.errors import (
    Conflict,
    ConnectionFailed,
    DanubeError,
    InvalidArgument,
    NotFound,
    NotSupported,
    OperationTimeout,
    Overloaded,
    WrongState,
)
from danube.load.links.grpc_client import GrpcChannel
from danube.server.proto import DanubeApi_pb2 as pb
from tests.broker_process import free_port

SERVICE = "/test.Service"


class Served(grpc.GenericRpcHandler):
    """Echo tells the caller's authorization; Fail ends with the asked status; Wait waits; Many streams."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def service(self, details: Any) -> Any:
        method = details.method.rpartition("/")[2]
        read, write = pb.TopicLookupRequest.FromString, pb.TopicLookupResponse.SerializeToString
        if method == "Many":
            return grpc.unary_stream_rpc_method_handler(self.many, read, write)
        return grpc.unary_unary_rpc_method_handler(getattr(self, method.lower()), read, write)

    def echo(self, request: Any, context: Any) -> Any:
        token = dict(context.invocation_metadata()).get("authorization", "none")
        return pb.TopicLookupResponse(request_id=request.request_id, connect_url=token)

    def fail(self, request: Any, context: Any) -> Any:
        context.abort(grpc.StatusCode[request.topic], "because")

    def wait(self, request: Any, context: Any) -> Any:
        self.over.wait(30)
        return pb.TopicLookupResponse()

    def many(self, request: Any, context: Any) -> Iterator[Any]:
        for number in range(3):
            yield pb.TopicLookupResponse(request_id=number)
        if request.topic:
            context.abort(grpc.StatusCode[request.topic], "because")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    served = Served()
    server = grpc.server(futures.ThreadPoolExecutor(4), handlers=[served])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    served.over.set()
    server.stop(0).wait()


@pytest.fixture
def channel(port: int) -> Iterator[GrpcChannel]:
    opened = open_channel(Endpoint(f"127.0.0.1:{port}"))
    yield opened
    opened.close()


def ask(channel: GrpcChannel, method: str, topic: str = "", timeout_s: float | None = 10.0) -> Any:
    request = pb.TopicLookupRequest(request_id=7, topic=topic)
    return channel.call(f"{SERVICE}/{method}", request, pb.TopicLookupResponse, timeout_s)


def test_a_call(channel: GrpcChannel) -> None:
    answer = ask(channel, "Echo")
    assert (answer.request_id, answer.connect_url) == (7, "none")


def test_the_token_goes_with_every_call(port: int) -> None:
    channel = open_channel(Endpoint(f"127.0.0.1:{port}", token="abc"))
    assert ask(channel, "Echo").connect_url == "Bearer abc"
    channel.close()


@pytest.mark.parametrize(
    ("status", "cls"),
    [
        ("INVALID_ARGUMENT", InvalidArgument),
        ("NOT_FOUND", NotFound),
        ("ALREADY_EXISTS", Conflict),
        ("FAILED_PRECONDITION", WrongState),
        ("UNIMPLEMENTED", NotSupported),
        ("UNAVAILABLE", ConnectionFailed),
        ("DEADLINE_EXCEEDED", OperationTimeout),
        ("RESOURCE_EXHAUSTED", Overloaded),
        ("PERMISSION_DENIED", DanubeError),
        ("UNAUTHENTICATED", DanubeError),
        ("INTERNAL", DanubeError),
    ],
)
def test_statuses_are_errors_of_ours(channel: GrpcChannel, status: str, cls: type[DanubeError]) -> None:
    with pytest.raises(DanubeError) as caught:
        ask(channel, "Fail", status)
    assert type(caught.value) is cls
    assert status_of(caught.value) == status
    assert str(caught.value) == f"status {status}: because"


def test_a_deadline(channel: GrpcChannel) -> None:
    with pytest.raises(OperationTimeout):
        ask(channel, "Wait", timeout_s=0.1)


def test_nobody_listens() -> None:
    channel = open_channel(Endpoint(f"127.0.0.1:{free_port()}"))
    with pytest.raises(ConnectionFailed) as caught:
        ask(channel, "Echo")
    assert "is a broker running there" in caught.value.hint
    channel.close()


@pytest.mark.parametrize("status", ["", "UNAVAILABLE"])
def test_a_stream_and_how_it_ends(channel: GrpcChannel, status: str) -> None:
    request = pb.TopicLookupRequest(topic=status)
    stream = channel.stream(f"{SERVICE}/Many", request, pb.TopicLookupResponse)
    received = []
    if status:
        with pytest.raises(ConnectionFailed):
            received.extend(iter(stream))  # what came before the error is kept by extend
    else:
        received.extend(stream)
    assert [one.request_id for one in received] == [0, 1, 2]


def test_a_cancelled_stream(channel: GrpcChannel) -> None:
    stream = channel.stream(f"{SERVICE}/Many", pb.TopicLookupRequest(), pb.TopicLookupResponse)
    stream.cancel()
    with pytest.raises(DanubeError) as caught:
        list(stream)
    assert status_of(caught.value) == "CANCELLED"
