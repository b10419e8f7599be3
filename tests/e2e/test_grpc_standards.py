"""Health and reflection over a real port, on the data and on the administration door."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from danube.server.proto import health_pb2, reflection_v1_pb2, reflection_v1alpha
from tests.broker_process import ROOT, BrokerProcess
from tests.grpc_client import GrpcClient, GrpcError

UNIMPLEMENTED = 12
HEALTH = "/grpc.health.v1.Health/"
DATA = {"danube.ProducerService", "danube.ConsumerService", "danube.Discovery", "danube.HealthCheck",
        "danube.StorageService", "danube.AuthService", "danube_schema.SchemaRegistry",
        "grpc.health.v1.Health"}  # fmt: skip
ADMIN = {"danube_admin.BrokerAdmin", "danube_admin.ClusterAdmin", "danube_admin.NamespaceAdmin",
         "danube_admin.SecurityAdmin", "danube_admin.TopicAdmin", "danube_schema.SchemaRegistry",
         "grpc.health.v1.Health"}  # fmt: skip


def test_health_of_each_port_and_service(shared_broker: Any) -> None:
    process = shared_broker()
    for address, served in ((process.grpc_address, DATA), (process.admin_address, ADMIN)):
        with GrpcClient(address) as client:
            listed = client.call(
                HEALTH + "List", health_pb2.HealthListRequest(), health_pb2.HealthListResponse
            )
            assert {name: one.status for name, one in listed.statuses.items()} == dict.fromkeys(
                {"", *served}, 1
            )
            for service in ("", *served):
                request = health_pb2.HealthCheckRequest(service=service)
                answer = client.call(HEALTH + "Check", request, health_pb2.HealthCheckResponse)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(GrpcError) as caught:
                client.call(
                    HEALTH + "Check",
                    health_pb2.HealthCheckRequest(service="no.Service"),
                    health_pb2.HealthCheckResponse,
                )
            assert caught.value.code == 5


# grpcio keeps threads, which a process that forks must not have; h2 reads nothing after a GOAWAY.
WATCHER = """
import sys, grpc
from danube.server.proto.health_pb2 import HealthCheckRequest, HealthCheckResponse
with grpc.insecure_channel(sys.argv[1]) as channel:
    watch = channel.unary_stream("/grpc.health.v1.Health/Watch", HealthCheckRequest.SerializeToString,
                                 HealthCheckResponse.FromString)
    for message in watch(HealthCheckRequest(service=sys.argv[2])):
        print(message.status, flush=True)
print("ended")
"""


def test_watch_tells_the_state_and_its_end(broker: Any) -> None:
    process = broker()
    command = [sys.executable, "-c", WATCHER, process.grpc_address, ""]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as watcher:
        try:
            assert watcher.stdout is not None
            assert watcher.stdout.readline() == "1\n"  # SERVING
            assert process.stop() == 0
            assert watcher.stdout.read() == "2\nended\n"  # NOT_SERVING, and no error
        finally:
            watcher.kill()


def test_watch_of_an_unknown_service_can_be_left(shared_broker: Any) -> None:
    process = shared_broker()
    with GrpcClient(process.grpc_address) as client:
        request = health_pb2.HealthCheckRequest(service="no.Service")
        watch = client.start(HEALTH + "Watch", request, health_pb2.HealthCheckResponse)
        assert watch.next().status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()
        check = client.call(HEALTH + "Check", health_pb2.HealthCheckRequest(), health_pb2.HealthCheckResponse)
        assert check.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("pb", [reflection_v1_pb2, reflection_v1alpha], ids=["v1", "v1alpha"])
def test_reflection_answers_while_the_call_is_open(shared_broker: Any, pb: Any) -> None:
    process = shared_broker()
    path = f"/{pb.DESCRIPTOR.package}.ServerReflection/ServerReflectionInfo"
    own = f"{pb.DESCRIPTOR.package}.ServerReflection"
    for address, served in ((process.grpc_address, DATA), (process.admin_address, ADMIN)):
        with GrpcClient(address) as client:
            stream = client.open(path, pb.ServerReflectionResponse)

            def ask(end: bool = False, **fields: Any) -> Any:
                data = pb.ServerReflectionRequest(**fields).SerializeToString()
                client.send_bytes(stream, b"\0" + struct.pack(">I", len(data)) + data, end=end)  # noqa: B023
                return stream.next()  # noqa: B023

            listed = ask(list_services="*").list_services_response.service
            assert {one.name for one in listed} == {*served, own}
            for service in served:
                [file] = ask(file_containing_symbol=service).file_descriptor_response.file_descriptor_proto
                parsed = FileDescriptorProto.FromString(file)
                assert service in {f"{parsed.package}.{one.name}" for one in parsed.service}
            hidden = "danube_admin.TopicAdmin" if served is DATA else "danube.ProducerService"
            assert ask(file_containing_symbol=hidden).error_response.error_code == 5
            assert ask(end=True, file_by_filename="nothing").error_response.error_code == 5
            assert stream.wait_ended().code == 0


@pytest.mark.parametrize("how", ["beyond this host", "turned off"])
def test_reflection_is_not_served_unasked(tmp_path: Path, how: str) -> None:
    arguments = ["--host", "0.0.0.0", "--insecure"] if how == "beyond this host" else []
    environment = {} if arguments else {"DANUBE_GRPC__REFLECTION": "off"}
    broker = BrokerProcess(tmp_path / "data", workers=1, arguments=arguments, environment=environment)
    with broker as process:
        for port in (process.grpc_port, process.admin_port):
            with GrpcClient(f"127.0.0.1:{port}") as client:
                for pb in (reflection_v1_pb2, reflection_v1alpha):
                    path = f"/{pb.DESCRIPTOR.package}.ServerReflection/ServerReflectionInfo"
                    request = pb.ServerReflectionRequest(list_services="*")
                    ended = client.start(path, request, pb.ServerReflectionResponse).wait_ended()
                    assert ended.code == UNIMPLEMENTED and "grpc.reflection" in ended.message
