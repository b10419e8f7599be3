"""The protos: generated code is fresh, and names and numbers are those that clients speak."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

from danube.server.proto import (
    DanubeAdmin_pb2,
    DanubeApi_pb2,
    SchemaRegistry_pb2,
    health_pb2,
    reflection_v1_pb2,
    reflection_v1alpha,
)
from danube.server.proto.pool import POOL

ROOT = Path(__file__).resolve().parents[3]
PROTO = ROOT / "danube/server/proto"
OFFICIAL = ROOT / ".venv-official"
MODULES = [
    DanubeApi_pb2, SchemaRegistry_pb2, DanubeAdmin_pb2, health_pb2, reflection_v1_pb2,
]  # fmt: skip

# Newer than the client 0.5.0, whose protos were made before the broker served them; and what other clients
# exchange API keys by.
MISSING_IN_THE_CLIENT = {
    "DanubeApi.proto": {
        "service StorageService",
        "message danube.ListSegmentDescriptorsRequest",
        "message danube.ListSegmentDescriptorsResponse",
        "message danube.SegmentDescriptorProto",
        "service AuthService",
        "method AuthService.Authenticate",
        "message danube.AuthRequest",
        "message danube.AuthResponse",
    },
    "SchemaRegistry.proto": {
        "method SchemaRegistry.ListSubjects",
        "message danube_schema.ListSubjectsRequest",
        "message danube_schema.SubjectSummary",
        "message danube_schema.ListSubjectsResponse",
    },
}

# Administration is not in the client.  Every message: number, name and type of each field; ? is an
# optional field, * a repeated one.  Every service: method, request, response.
ADMIN_MESSAGES = """
Empty:
RoleDefinition: 1 name string, 2 permissions string*, 3 system bool
CreateRoleRequest: 1 role RoleDefinition
CreateRoleResponse DeleteRoleResponse CreateBindingResponse DeleteBindingResponse: 1 success bool
GetRoleRequest DeleteRoleRequest: 1 name string
GetRoleResponse: 1 role RoleDefinition
ListRolesResponse: 1 roles RoleDefinition*
BindingDefinition: 1 id string, 2 principal_type string, 3 principal_name string, 4 role_names string*, \
5 scope string, 6 resource_name string
CreateBindingRequest: 1 binding BindingDefinition
GetBindingRequest DeleteBindingRequest: 1 scope string, 2 resource_name string, 3 binding_id string
GetBindingResponse: 1 binding BindingDefinition
ListBindingsRequest: 1 scope string, 2 resource_name string
ListBindingsResponse: 1 bindings BindingDefinition*
NamespaceRequest: 1 name string
NamespaceResponse TopicResponse SubscriptionResponse ActivateBrokerResponse: 1 success bool
NewTopicRequest: 1 name string, 2 schema_subject string?, 3 dispatch_strategy DispatchStrategy
PartitionedTopicRequest: 1 base_name string, 2 partitions uint32, 3 schema_subject string?, \
4 dispatch_strategy DispatchStrategy
TopicRequest DescribeTopicRequest: 1 name string
SubscriptionRequest GetSubscriptionFailurePolicyRequest GetSubscriptionDispatchConfigRequest: \
1 topic string, 2 subscription string
SubscriptionFailurePolicy: 1 max_redelivery_count uint32, 2 ack_timeout_ms uint64, \
3 base_redelivery_delay_ms uint64, 4 max_redelivery_delay_ms uint64, \
5 backoff_strategy SubscriptionBackoffStrategy, 6 dead_letter_topic string?, \
7 poison_policy SubscriptionPoisonPolicy
SetSubscriptionFailurePolicyRequest: 1 topic string, 2 subscription string, \
3 failure_policy SubscriptionFailurePolicy
GetSubscriptionFailurePolicyResponse: 1 failure_policy SubscriptionFailurePolicy?, 2 subscription_type int32
SubscriptionDispatchConfig: 1 max_unacked_messages uint32
SetSubscriptionDispatchConfigRequest: 1 topic string, 2 subscription string, \
3 dispatch_config SubscriptionDispatchConfig
GetSubscriptionDispatchConfigResponse: 1 dispatch_config SubscriptionDispatchConfig?
BrokerListResponse: 1 brokers BrokerInfo*
BrokerInfo: 1 broker_id string, 2 broker_addr string, 3 broker_role string, 4 admin_addr string, \
5 metrics_addr string, 6 broker_status string
BrokerResponse: 1 leader string
NamespaceListResponse: 1 namespaces string*
TopicListResponse: 1 topics string*
TopicInfo: 1 name string, 2 broker_id string, 3 delivery string
TopicInfoListResponse: 1 topics TopicInfo*
BrokerRequest: 1 broker_id string
PolicyResponse: 1 policies string
SubscriptionListResponse: 1 subscriptions string*
DescribeTopicResponse: 1 name string, 2 subscriptions string*, 3 broker_id string, 4 delivery string, \
5 schema_subject string?, 6 schema_id uint64?, 7 schema_version uint32?, 8 schema_type string?, \
9 compatibility_mode string?
UnloadBrokerRequest: 1 broker_id string, 2 max_parallel uint32, 3 namespaces_include string*, \
4 namespaces_exclude string*, 5 dry_run bool, 6 timeout_seconds uint32
UnloadBrokerResponse: 1 started bool, 2 total uint32, 3 succeeded uint32, 4 failed uint32, \
5 pending uint32, 6 failed_topics string*
ActivateBrokerRequest: 1 broker_id string, 2 reason string
ClusterBalanceRequest:
ClusterBalanceResponse: 1 coefficient_of_variation double, 2 mean_load double, 3 max_load double, \
4 min_load double, 5 std_deviation double, 6 broker_count uint32, 7 brokers BrokerLoadInfo*, \
8 assignment_strategy string
BrokerLoadInfo: 1 broker_id uint64, 2 load double, 3 topic_count uint32, 4 is_overloaded bool, \
5 is_underloaded bool
RebalanceRequest: 1 dry_run bool, 2 max_moves uint32?
RebalanceResponse: 1 success bool, 2 moves_executed uint32, 3 proposed_moves ProposedMove*, \
4 error_message string
ProposedMove: 1 topic_name string, 2 from_broker uint64, 3 to_broker uint64, 4 estimated_load double, \
5 reason string
ClusterStatusResponse: 1 leader_id uint64, 2 current_term uint64, 3 last_applied uint64, \
4 voters uint64*, 5 learners uint64*, 6 self_node_id uint64, 7 raft_addr string
AddNodeRequest: 1 addr string, 2 node_id uint64
AddNodeResponse: 1 success bool, 2 node_id uint64, 3 message string
PromoteNodeRequest RemoveNodeRequest: 1 node_id uint64
PromoteNodeResponse RemoveNodeResponse: 1 success bool, 2 message string
"""

ADMIN_SERVICES = """
BrokerAdmin: ListBrokers Empty BrokerListResponse, GetLeaderBroker Empty BrokerResponse, \
ListNamespaces Empty NamespaceListResponse, UnloadBroker UnloadBrokerRequest UnloadBrokerResponse, \
ActivateBroker ActivateBrokerRequest ActivateBrokerResponse, \
GetClusterBalance ClusterBalanceRequest ClusterBalanceResponse, \
TriggerRebalance RebalanceRequest RebalanceResponse
ClusterAdmin: ClusterStatus Empty ClusterStatusResponse, AddNode AddNodeRequest AddNodeResponse, \
PromoteNode PromoteNodeRequest PromoteNodeResponse, RemoveNode RemoveNodeRequest RemoveNodeResponse
NamespaceAdmin: GetNamespaceTopics NamespaceRequest TopicListResponse, \
GetNamespacePolicies NamespaceRequest PolicyResponse, CreateNamespace NamespaceRequest NamespaceResponse, \
DeleteNamespace NamespaceRequest NamespaceResponse
TopicAdmin: ListNamespaceTopics NamespaceRequest TopicInfoListResponse, \
ListBrokerTopics BrokerRequest TopicInfoListResponse, CreateTopic NewTopicRequest TopicResponse, \
CreatePartitionedTopic PartitionedTopicRequest TopicResponse, DeleteTopic TopicRequest TopicResponse, \
UnloadTopic TopicRequest TopicResponse, ListSubscriptions TopicRequest SubscriptionListResponse, \
Unsubscribe SubscriptionRequest SubscriptionResponse, \
SetSubscriptionFailurePolicy SetSubscriptionFailurePolicyRequest SubscriptionResponse, \
GetSubscriptionFailurePolicy GetSubscriptionFailurePolicyRequest GetSubscriptionFailurePolicyResponse, \
DescribeTopic DescribeTopicRequest DescribeTopicResponse, \
SetSubscriptionDispatchConfig SetSubscriptionDispatchConfigRequest SubscriptionResponse, \
GetSubscriptionDispatchConfig GetSubscriptionDispatchConfigRequest GetSubscriptionDispatchConfigResponse
SecurityAdmin: CreateRole CreateRoleRequest CreateRoleResponse, GetRole GetRoleRequest GetRoleResponse, \
ListRoles Empty ListRolesResponse, DeleteRole DeleteRoleRequest DeleteRoleResponse, \
CreateBinding CreateBindingRequest CreateBindingResponse, \
GetBinding GetBindingRequest GetBindingResponse, ListBindings ListBindingsRequest ListBindingsResponse, \
ListAllBindings Empty ListBindingsResponse, DeleteBinding DeleteBindingRequest DeleteBindingResponse
"""

ADMIN_ENUMS = {
    "DispatchStrategy": {"NonReliable": 0, "Reliable": 1},
    "SubscriptionBackoffStrategy": {"Fixed": 0, "Exponential": 1},
    "SubscriptionPoisonPolicy": {"DeadLetter": 0, "Block": 1, "Drop": 2},
}


def file_of(module: ModuleType) -> FileDescriptorProto:
    return FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)


def facts(file: FileDescriptorProto) -> dict[str, Any]:
    """Everything of a file that is seen on the wire or by generated code, in no particular order."""
    found: dict[str, Any] = {"package": file.package, "syntax": file.syntax, "imports": set(file.dependency)}
    for message in file.message_type:
        found.update(_message_facts(f"{file.package}.{message.name}", message))
    for enum in file.enum_type:
        found[f"enum {file.package}.{enum.name}"] = {value.name: value.number for value in enum.value}
    for service in file.service:
        found[f"service {service.name}"] = True
        for method in service.method:
            found[f"method {service.name}.{method.name}"] = (
                *(method.input_type, method.output_type),
                *(method.client_streaming, method.server_streaming, method.options.SerializeToString()),
            )
    return found


def _message_facts(name: str, message: DescriptorProto) -> Iterator[tuple[str, Any]]:
    fields = {}
    for field in message.field:
        one_of = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else None
        json_name = field.json_name or re.sub("_(.)", lambda found: found[1].upper(), field.name)
        fields[field.number] = (
            *(field.name, field.type, field.label, field.type_name, json_name, one_of),
            *(field.proto3_optional, field.options.SerializeToString()),
        )
    yield (
        f"message {name}",
        (fields, message.options.map_entry, [(r.start, r.end) for r in message.reserved_range]),
    )
    for enum in message.enum_type:
        yield f"enum {name}.{enum.name}", {value.name: value.number for value in enum.value}
    for nested in message.nested_type:
        yield from _message_facts(f"{name}.{nested.name}", nested)


def test_every_proto_has_its_module() -> None:
    assert {path.name for path in PROTO.glob("*.proto")} == {file_of(module).name for module in MODULES}


def test_the_generated_code_is_that_of_the_protos(tmp_path: Path) -> None:
    """What fails here is mended by scripts/protos."""
    target = tmp_path / "set"
    files = [str(path) for path in PROTO.glob("*.proto")]
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{PROTO}",
        f"--descriptor_set_out={target}",
        *files,
    ]
    subprocess.run(command, check=True, timeout=60)
    compiled = FileDescriptorSet.FromString(target.read_bytes()).file
    assert len(compiled) == len(MODULES)
    module_by_name = {file_of(module).name: module for module in MODULES}
    for file in compiled:
        assert facts(file) == facts(file_of(module_by_name[file.name])), file.name


def test_the_generated_code_runs_with_the_oldest_allowed_protobuf() -> None:
    oldest = re.search(r'"protobuf>=([\d.]+),', (ROOT / "pyproject.toml").read_text())
    assert oldest
    for module in MODULES:
        text = Path(str(module.__file__)).read_text()
        made_with = re.search(r"^# Protobuf Python Version: (.+)$", text, re.MULTILINE)
        assert made_with
        assert made_with[1] == f"{oldest[1]}.0", module.__name__


def test_descriptors_do_not_enter_the_default_pool() -> None:
    default = descriptor_pool.Default()
    for module in [*MODULES, reflection_v1alpha]:
        assert POOL.FindFileByName(file_of(module).name) is module.DESCRIPTOR
        with pytest.raises(KeyError):
            default.FindFileByName(file_of(module).name)
    # A package that brings the same standard under another file name finds its place.
    other = file_of(health_pb2)
    other.name = "somewhere/else/health.proto"
    descriptor_pool.Default().AddSerializedFile(other.SerializeToString())
    assert descriptor_pool.Default().FindMessageTypeByName("grpc.health.v1.HealthCheckRequest")


@pytest.mark.parametrize("module", [DanubeApi_pb2, SchemaRegistry_pb2], ids=lambda m: m.DESCRIPTOR.name)
def test_names_and_numbers_are_those_of_the_official_client(module: ModuleType) -> None:
    """Compared with the descriptor in the client's own generated code, which is read, not imported."""
    ours = facts(file_of(module))
    theirs = facts(official_file(module.DESCRIPTOR.name))
    missing = MISSING_IN_THE_CLIENT[module.DESCRIPTOR.name]
    extra = set(ours) - set(theirs)
    assert {name for name in extra if not name.startswith("method StorageService.")} == missing
    assert {name: ours[name] for name in theirs} == theirs


def official_file(name: str) -> FileDescriptorProto:
    found = sorted(
        OFFICIAL.glob(f"lib/python*/site-packages/danube/proto/{name.removesuffix('.proto')}_pb2.py")
    )
    if not found:
        pytest.skip("the official client is not installed: scripts/official-python")
    for node in ast.walk(ast.parse(found[0].read_text())):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr == "AddSerializedFile":
            return FileDescriptorProto.FromString(ast.literal_eval(node.args[0]))  # type: ignore[attr-defined]
    raise AssertionError(f"no descriptor in {found[0]}")


def test_administration_has_its_messages() -> None:
    expected = {}
    for line in ADMIN_MESSAGES.strip().splitlines():
        names, _, fields = line.partition(":")
        for name in names.split():
            expected[name] = [tuple(field.split()) for field in fields.split(",") if field.strip()]
    file = file_of(DanubeAdmin_pb2)
    assert {message.name: _short(message) for message in file.message_type} == expected
    found = {enum.name: {value.name: value.number for value in enum.value} for enum in file.enum_type}
    assert (file.package, found) == ("danube_admin", ADMIN_ENUMS)


def _short(message: DescriptorProto) -> list[tuple[str, ...]]:
    kinds = DanubeAdmin_pb2.DESCRIPTOR.pool.FindMessageTypeByName("danube_admin." + message.name).fields
    names = {1: "double", 4: "uint64", 5: "int32", 8: "bool", 9: "string", 13: "uint32"}
    assert len(kinds) == len(message.field)
    return [
        (
            str(field.number),
            field.name,
            names.get(field.type, field.type_name.rpartition(".")[2])
            + ("?" if field.proto3_optional else "*" if field.label == 3 else ""),
        )
        for field in message.field
    ]


def _methods(file: FileDescriptorProto) -> dict[str, list[tuple[str, ...]]]:
    return {
        service.name: [
            (
                *(["client-stream"] if method.client_streaming else []),
                *(["stream"] if method.server_streaming else []),
                *(method.name, method.input_type.lstrip("."), method.output_type.lstrip(".")),
            )
            for method in service.method
        ]
        for service in file.service
    }


def test_administration_has_its_methods() -> None:
    expected = {}
    for line in ADMIN_SERVICES.strip().splitlines():
        name, _, methods = line.partition(":")
        expected[name] = [
            (each[0], f"danube_admin.{each[1]}", f"danube_admin.{each[2]}")
            for each in (method.split() for method in methods.split(","))
        ]
    assert _methods(file_of(DanubeAdmin_pb2)) == expected


def test_health_is_the_standard() -> None:
    file = file_of(health_pb2)
    name = "grpc.health.v1"
    assert file.package == name
    assert _methods(file)["Health"] == [
        ("Check", f"{name}.HealthCheckRequest", f"{name}.HealthCheckResponse"),
        ("List", f"{name}.HealthListRequest", f"{name}.HealthListResponse"),
        ("stream", "Watch", f"{name}.HealthCheckRequest", f"{name}.HealthCheckResponse"),
    ]
    assert health_pb2.HealthCheckRequest(service="s").SerializeToString() == b"\x0a\x01s"
    assert health_pb2.HealthCheckResponse(status="SERVICE_UNKNOWN").SerializeToString() == b"\x08\x03"
    statuses = health_pb2.HealthCheckResponse.ServingStatus
    assert dict(statuses.items()) == {"UNKNOWN": 0, "SERVING": 1, "NOT_SERVING": 2, "SERVICE_UNKNOWN": 3}


@pytest.mark.parametrize("module", [reflection_v1_pb2, reflection_v1alpha], ids=["v1", "v1alpha"])
def test_reflection_is_the_standard(module: ModuleType) -> None:
    name = "grpc.reflection." + module.DESCRIPTOR.name.removesuffix(".proto").partition("_")[2]
    file = file_of(module)
    assert file.package == name
    assert _methods(file)["ServerReflection"] == [
        ("client-stream", "stream", "ServerReflectionInfo",
         f"{name}.ServerReflectionRequest", f"{name}.ServerReflectionResponse")
    ]  # fmt: skip
    numbers = {
        message.name: {field.number: field.name for field in message.field} for message in file.message_type
    }
    assert numbers == {
        "ServerReflectionRequest": {
            1: "host", 3: "file_by_filename", 4: "file_containing_symbol", 5: "file_containing_extension",
            6: "all_extension_numbers_of_type", 7: "list_services",
        },
        "ExtensionRequest": {1: "containing_type", 2: "extension_number"},
        "ServerReflectionResponse": {
            1: "valid_host", 2: "original_request", 4: "file_descriptor_response",
            5: "all_extension_numbers_response", 6: "list_services_response", 7: "error_response",
        },
        "FileDescriptorResponse": {1: "file_descriptor_proto"},
        "ExtensionNumberResponse": {1: "base_type_name", 2: "extension_number"},
        "ListServiceResponse": {1: "service"},
        "ServiceResponse": {1: "name"},
        "ErrorResponse": {1: "error_code", 2: "error_message"},
    }  # fmt: skip
