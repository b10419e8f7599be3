"""Every method of every admin service exists, and refuses what a stranger may send with our own errors."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

from danube.core.metadata.commands import PutRole, Role
from danube.errors import DanubeError, InvalidArgument, InvalidName
from danube.server.proto import DanubeAdmin_pb2, SchemaRegistry_pb2
from danube.server.services.broker_admin import BrokerAdmin
from danube.server.services.cluster_admin import ClusterAdmin
from danube.server.services.namespace_admin import NamespaceAdmin
from danube.server.services.schema_registry import SchemaRegistry
from danube.server.services.security_admin import SecurityAdmin
from danube.server.services.topic_admin import TopicAdmin
from tests.fakes.broker_calls import FakeBrokerCalls, FakeCall

SERVICERS = [BrokerAdmin, ClusterAdmin, NamespaceAdmin, TopicAdmin, SecurityAdmin, SchemaRegistry]
PROTOS = {cls.__name__: DanubeAdmin_pb2 for cls in SERVICERS} | {"SchemaRegistry": SchemaRegistry_pb2}
METHODS = [
    (cls, method)
    for cls in SERVICERS
    for method in PROTOS[cls.__name__].DESCRIPTOR.services_by_name[cls.__name__].methods
]
# Methods that take an empty message and so cannot refuse it, or whose answer does not depend on it.
ALWAYS_ANSWER = {
    "ListBrokers", "GetLeaderBroker", "ListNamespaces", "ListRoles", "ListAllBindings", "ListSubjects",
    "ClusterStatus", "GetClusterBalance", "TriggerRebalance",
}  # fmt: skip
NOT_FOUND_WHEN_EMPTY = {"GetSchema"}  # schema_id 0 is a number like any other
WORDS = [
    "", "default", "/default/t", "/default/p", "/default/p-part-1", "/default/none", "/default/t-part-3", "s",
    "a/b/c", "//", "/default/", "subject", "cluster", "namespace", "topic", "Produce", "reader", "user",
    "4711", "99999999999999999999", "-1", "json", "AVRO", "warn", "ENFORCE", "full", "\x00", "\u2028",
    "x" * 300, "é" * 200, "\U0001f600", "{", "'", "%s", "../..",
]  # fmt: skip


def snake(name: str) -> str:
    return "".join(f"_{one.lower()}" if one.isupper() else one for one in name).lstrip("_")


def request_class(method: MethodDescriptor) -> type[Message]:
    return message_factory.GetMessageClass(method.input_type)


def filled_broker() -> FakeBrokerCalls:
    broker = FakeBrokerCalls()
    broker.register("subject")
    broker._create_topic("/default/t", 0, {"reliable": True})
    broker._create_topic("/default/p", 3, {"reliable": False})
    broker.subscribe("/default/t", "s")
    broker.subscribe("/default/p-part-1", "s", "alice")
    broker.commit(PutRole(role=Role("reader", ("Consume",))))
    return broker


def run(servicer: Any, method: MethodDescriptor, request: Message) -> Message | DanubeError:
    """The response or the error; anything else than a DanubeError fails the test by itself."""
    try:
        response = asyncio.run(getattr(servicer, snake(method.name))(request, FakeCall()))
    except DanubeError as error:
        return error
    assert response.DESCRIPTOR.full_name == method.output_type.full_name
    response.SerializeToString()
    return response


def fill(message: Any, descriptor: Descriptor, source: random.Random) -> None:
    """Put something into some of the fields: words that mean something here, and some that do not."""
    for field in descriptor.fields:
        if source.random() < 0.25:
            continue
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            getattr(message, field.name).SetInParent()
            fill(getattr(message, field.name), field.message_type, source)
        elif field.is_repeated:
            getattr(message, field.name).extend(value_of(field, source) for _ in range(source.randrange(3)))
        else:
            setattr(message, field.name, value_of(field, source))


def value_of(field: FieldDescriptor, source: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return source.choice(WORDS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return source.choice(
            [b"", b"{}", b"unparsable", b"incompatible", source.randbytes(40), b"x" * 300_000]
        )
    if field.type == FieldDescriptor.TYPE_BOOL:
        return source.random() < 0.5
    if field.type == FieldDescriptor.TYPE_ENUM:
        return source.choice([0, 1, 2, 3, 77, -1, 2**31 - 1])
    bits = 64 if field.type == FieldDescriptor.TYPE_UINT64 else 32
    return source.choice([0, 1, 2, 3, 100, 10_000, 10_001, 2**bits - 1, source.getrandbits(bits)])


@pytest.mark.parametrize(("cls", "method"), METHODS, ids=lambda one: getattr(one, "name", ""))
def test_an_empty_request_is_answered_or_refused_with_a_sentence(cls: Any, method: MethodDescriptor) -> None:
    result = run(cls(filled_broker()), method, request_class(method)())
    if method.name in ALWAYS_ANSWER:
        assert isinstance(result, Message)
    elif isinstance(result, Message):
        pytest.fail(f"{method.name} took an empty request: {result}")
    elif cls is ClusterAdmin:
        assert result.status == "FAILED_PRECONDITION"
        assert "cluster of one" in str(result)
    elif method.name in NOT_FOUND_WHEN_EMPTY:
        assert result.status == "NOT_FOUND"
    else:
        assert isinstance(result, InvalidArgument | InvalidName), repr(result)
        assert result.hint, f"{method.name} does not say what to do: {result}"


@pytest.mark.parametrize(("cls", "method"), METHODS, ids=lambda one: getattr(one, "name", ""))
def test_random_requests_get_an_answer_or_an_error_of_ours(cls: Any, method: MethodDescriptor) -> None:
    source = random.Random(f"{cls.__name__}.{method.name}")
    for _ in range(200):
        request = request_class(method)()
        fill(request, method.input_type, source)
        # Over the wire and back: that is what the door hands in.
        run(cls(filled_broker()), method, request_class(method).FromString(request.SerializeToString()))


@pytest.mark.parametrize("cls", SERVICERS)
def test_a_servicer_has_no_other_public_methods(cls: Any) -> None:
    service = PROTOS[cls.__name__].DESCRIPTOR.services_by_name[cls.__name__]
    public = {name for name in vars(cls) if not name.startswith("_")}
    assert public == {snake(method.name) for method in service.methods}
