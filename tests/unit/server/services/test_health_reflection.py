"""Health and reflection: every answer, every refusal, and what a tool does with the descriptors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from types import ModuleType
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from danube.errors import LimitExceeded, NotFound
from danube.server.proto import DanubeApi_pb2, health_pb2, reflection_v1_pb2, reflection_v1alpha
from danube.server.proto.health_pb2 import HealthCheckRequest, HealthCheckResponse
from danube.server.services import grpc_health, reflection
from danube.server.services.grpc_health import Health
from danube.server.services.reflection import NAME_CHARACTERS_MAX, REQUESTS_PER_CALL_MAX, ServerReflection

SERVICES = ["danube.ProducerService", "danube.ConsumerService", "grpc.health.v1.Health"]
CALL: Any = None


class Broker:
    draining = False
    leased = True

    @property
    def ready(self) -> bool:
        return self.leased and not self.draining


def health(broker: Broker | None = None) -> Health:
    return Health(broker or Broker(), SERVICES)


# -- health -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", ["", *SERVICES])
def test_everything_serves_until_the_broker_drains(service: str) -> None:
    broker = Broker()
    servicer = health(broker)
    request = HealthCheckRequest(service=service)
    assert asyncio.run(servicer.check(request, CALL)).status == HealthCheckResponse.SERVING
    broker.draining = True
    assert asyncio.run(servicer.check(request, CALL)).status == HealthCheckResponse.NOT_SERVING


def test_a_broker_without_its_lease_is_not_ready_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_health, "WATCH_INTERVAL_S", 0.001)
    broker = Broker()
    broker.leased = False

    async def scenario() -> list[int]:
        watch = health(broker).watch(HealthCheckRequest(), CALL)
        told = [(await anext(watch)).status]
        broker.leased = True
        return [*told, (await anext(watch)).status]

    assert asyncio.run(scenario()) == [HealthCheckResponse.NOT_SERVING, HealthCheckResponse.SERVING]


def test_a_service_that_is_not_served_is_not_found() -> None:
    with pytest.raises(NotFound, match=r"danube_admin\.TopicAdmin"):
        asyncio.run(health().check(HealthCheckRequest(service="danube_admin.TopicAdmin"), CALL))


def test_list_names_everything() -> None:
    found = asyncio.run(health().list(health_pb2.HealthListRequest(), CALL))
    assert {name: one.status for name, one in found.statuses.items()} == dict.fromkeys(["", *SERVICES], 1)


def test_watch_tells_the_state_and_its_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_health, "WATCH_INTERVAL_S", 0.001)
    broker = Broker()

    async def scenario() -> list[int]:
        watch = health(broker).watch(HealthCheckRequest(), CALL)
        told = [(await anext(watch)).status]
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.02)
        assert not waiting.done()  # nothing is told while nothing changes
        broker.draining = True
        told.append((await waiting).status)
        return told + [message.status async for message in watch]  # and then it ends

    assert asyncio.run(scenario()) == [HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING]


def test_watch_of_an_unknown_service_stays_open() -> None:
    async def scenario() -> None:
        watch = health().watch(HealthCheckRequest(service="nothing"), CALL)
        assert (await anext(watch)).status == HealthCheckResponse.SERVICE_UNKNOWN
        await watch.aclose()  # type: ignore[attr-defined]

    asyncio.run(scenario())


def test_watches_are_bounded_and_those_that_end_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_health, "WATCHES_MAX", 2)

    async def scenario() -> None:
        servicer = health()
        watches = [servicer.watch(HealthCheckRequest(), CALL) for _ in range(3)]
        for watch in watches[:2]:
            await anext(watch)
        with pytest.raises(LimitExceeded, match="watch"):
            await anext(watches[2])
        await watches[0].aclose()  # type: ignore[attr-defined]
        another = servicer.watch(HealthCheckRequest(), CALL)
        assert (await anext(another)).status == HealthCheckResponse.SERVING
        for watch in (watches[1], another):
            await watch.aclose()  # type: ignore[attr-defined]

    asyncio.run(scenario())


# -- reflection -------------------------------------------------------------------------------------


@pytest.fixture(params=[reflection_v1_pb2, reflection_v1alpha], ids=["v1", "v1alpha"])
def pb(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.param
    return module


def own_name(pb: ModuleType) -> str:
    return str(pb.DESCRIPTOR.package) + ".ServerReflection"


async def _stream(requests: Iterable[Any]) -> AsyncIterator[Any]:
    for request in requests:
        yield request


def ask(pb: ModuleType, *requests: dict[str, Any]) -> list[Any]:
    async def scenario() -> list[Any]:
        messages = [pb.ServerReflectionRequest(**request) for request in requests]
        answers = ServerReflection(pb, SERVICES).server_reflection_info(_stream(messages), CALL)
        return [answer async for answer in answers]

    answers = asyncio.run(scenario())
    for request, answer in zip(requests, answers, strict=True):
        assert isinstance(answer, pb.ServerReflectionResponse)
        assert answer.valid_host == request.get("host", "")
    return answers


def files_of(answer: Any) -> list[str]:
    assert answer.WhichOneof("message_response") == "file_descriptor_response"
    return [
        FileDescriptorProto.FromString(each).name
        for each in answer.file_descriptor_response.file_descriptor_proto
    ]


def test_services_are_listed_in_order(pb: ModuleType) -> None:
    [answer] = ask(pb, {"host": "h", "list_services": ""})
    assert [one.name for one in answer.list_services_response.service] == sorted([*SERVICES, own_name(pb)])
    assert answer.original_request == pb.ServerReflectionRequest(host="h", list_services="")


@pytest.mark.parametrize(
    "symbol",
    [
        "danube.ProducerService",
        "danube.ProducerService.SendMessage",
        "danube.StreamMessage",
        "danube.StreamMessage.payload",
        "danube.StreamMessage.AttributesEntry",
        "danube.SchemaReference.version_ref",
        "danube.ConsumerRequest.SubscriptionType",
        "danube.ConsumerRequest.KeyShared",
        "danube.DispatchStrategy",
        "danube.Reliable",
    ],
)
def test_every_kind_of_symbol_leads_to_its_file(pb: ModuleType, symbol: str) -> None:
    [answer] = ask(pb, {"file_containing_symbol": symbol})
    assert files_of(answer) == ["DanubeApi.proto"]


@pytest.mark.parametrize("name", ["DanubeApi.proto", "health.proto", ""])
def test_files_by_name(pb: ModuleType, name: str) -> None:
    name = name or pb.DESCRIPTOR.name  # reflection shows itself, too
    [answer] = ask(pb, {"file_by_filename": name})
    assert files_of(answer) == [name]


@pytest.mark.parametrize(
    "request_fields",
    [
        {"file_by_filename": "nothing.proto"},
        {"file_by_filename": ""},
        {"file_by_filename": "DanubeAdmin.proto"},  # not served at this door
        {"file_containing_symbol": "danube.Nothing"},
        {"file_containing_symbol": "danube.StreamMessage.nothing"},
        {"file_containing_symbol": "danube.ProducerService.Nothing"},
        {"file_containing_symbol": "danube"},
        {"file_containing_symbol": ""},
        {"file_containing_symbol": "a\0b"},
        {"file_containing_symbol": ".danube.StreamMessage"},
        {"file_containing_symbol": "danube_admin.TopicAdmin"},
        {"file_containing_extension": {"containing_type": "danube.MsgID", "extension_number": 4}},
        {"all_extension_numbers_of_type": "danube.MsgID"},
    ],
    ids=str,
)
def test_what_is_not_here_is_answered_not_found(pb: ModuleType, request_fields: dict[str, Any]) -> None:
    refused, after = ask(pb, request_fields, {"list_services": ""})
    assert refused.error_response.error_code == 5
    assert refused.error_response.error_message
    assert refused.original_request == pb.ServerReflectionRequest(**request_fields)
    assert after.list_services_response.service  # the call goes on


@pytest.mark.parametrize(
    "request_fields",
    [
        {},
        {"file_containing_symbol": "x" * (NAME_CHARACTERS_MAX + 1)},
        {"file_by_filename": "x" * (NAME_CHARACTERS_MAX + 1)},
    ],
    ids=["nothing", "symbol", "file"],
)
def test_what_cannot_be_asked_is_answered_invalid(pb: ModuleType, request_fields: dict[str, Any]) -> None:
    [answer] = ask(pb, request_fields)
    assert answer.error_response.error_code == 3
    assert answer.ByteSize() < 500  # a long question does not come back


def test_a_long_host_does_not_come_back(pb: ModuleType) -> None:
    request = pb.ServerReflectionRequest(host="h" * 100_000, list_services="")
    answer = ServerReflection(pb, SERVICES)._answer(request)
    assert answer.error_response.error_code == 3
    assert answer.ByteSize() < 2 * NAME_CHARACTERS_MAX


def test_error_details_can_be_shown(pb: ModuleType) -> None:
    by_symbol, by_name = ask(
        pb,
        {"file_containing_symbol": "google.rpc.ErrorInfo"},
        {"file_by_filename": "google/protobuf/duration.proto"},
    )
    assert files_of(by_symbol) == ["google/rpc/error_details.proto", "google/protobuf/duration.proto"]
    assert files_of(by_name) == ["google/protobuf/duration.proto"]


def test_a_call_does_not_go_on_for_ever(pb: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert REQUESTS_PER_CALL_MAX >= 1_000
    monkeypatch.setattr(reflection, "REQUESTS_PER_CALL_MAX", 3)
    assert len(ask(pb, *[{"list_services": ""}] * 3)) == 3
    with pytest.raises(LimitExceeded, match="reflection"):
        ask(pb, *[{"list_services": ""}] * 4)


def test_a_tool_can_speak_from_the_descriptors_alone(pb: ModuleType) -> None:
    """As grpcurl does it: list, fetch each service's file, build messages of a pool of its own."""
    [listed] = ask(pb, {"list_services": ""})
    pool = DescriptorPool()
    known: set[str] = set()
    for service in listed.list_services_response.service:
        [answer] = ask(pb, {"file_containing_symbol": service.name})
        for data in answer.file_descriptor_response.file_descriptor_proto:
            name = FileDescriptorProto.FromString(data).name
            if name not in known:
                known.add(name)
                pool.AddSerializedFile(data)
    method = pool.FindServiceByName("danube.ProducerService").FindMethodByName("SendMessage")
    assert method is not None
    message = GetMessageClass(method.input_type)(payload=b"x", routing_key="k", attributes={"a": "b"})
    assert DanubeApi_pb2.StreamMessage.FromString(message.SerializeToString()).routing_key == "k"
