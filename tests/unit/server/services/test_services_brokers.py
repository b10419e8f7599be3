"""BrokerAdmin, ClusterAdmin and SecurityAdmin: each row of the contract's tables on one host."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from danube.cluster.control.calls import Change, Changed, ClusterStatus
from danube.cluster.raft.engine import Members
from danube.core.metadata.commands import PutRole, Role
from danube.core.metadata.roles import PERMISSIONS
from danube.errors import DanubeError
from danube.server.proto import DanubeAdmin_pb2 as pb
from danube.server.services.broker_admin import BrokerAdmin
from danube.server.services.cluster_admin import ClusterAdmin
from danube.server.services.security_admin import SecurityAdmin
from tests.fakes.broker_calls import FakeBrokerCalls, FakeCall


class Admin:
    """The three servicers on one broker."""

    def __init__(self) -> None:
        self.broker = FakeBrokerCalls()
        self._servicers = [cls(self.broker) for cls in (BrokerAdmin, ClusterAdmin, SecurityAdmin)]

    def __call__(self, method: str, request: Any, authority: str = "127.0.0.1:50051") -> Any:
        servicer = next(one for one in self._servicers if hasattr(one, method))
        return asyncio.run(getattr(servicer, method)(request, FakeCall(authority)))

    def refused(self, method: str, request: Any) -> tuple[str, str]:
        with pytest.raises(DanubeError) as caught:
            self(method, request)
        return caught.value.status, f"{caught.value} {caught.value.hint}"


@pytest.fixture
def admin() -> Admin:
    return Admin()


# Brokers


def test_there_is_one_broker(admin: Admin) -> None:
    (one,) = admin("list_brokers", pb.Empty(), "broker.test:6650").brokers
    assert (one.broker_id, one.broker_role, one.broker_status) == ("4711", "Cluster_Leader", "active")
    assert one.broker_addr == "http://broker.test:6650", "the address that this caller can reach"
    assert one.admin_addr == "http://127.0.0.1:50051"


def test_it_leads_itself(admin: Admin) -> None:
    assert admin("get_leader_broker", pb.Empty()).leader == "4711"
    found = admin("cluster_status", pb.Empty())
    assert (found.leader_id, found.self_node_id, list(found.voters)) == (4711, 4711, [4711])
    assert (found.current_term, found.last_applied, found.raft_addr) == (1, admin.broker.metadata.version, "")


def test_namespaces_are_named_once(admin: Admin) -> None:
    admin.broker._create_namespace("sales")
    assert list(admin("list_namespaces", pb.Empty()).namespaces) == ["default", "sales", "system"]


def test_activate_this_broker(admin: Admin) -> None:
    assert admin("activate_broker", pb.ActivateBrokerRequest(broker_id="4711")).success
    assert admin.refused("activate_broker", pb.ActivateBrokerRequest(broker_id="1"))[0] == "NOT_FOUND"


@pytest.mark.parametrize("method", ["activate_broker", "unload_broker"])
@pytest.mark.parametrize("broker_id", ["", "one", "-1"])
def test_broker_ids_that_are_none(admin: Admin, method: str, broker_id: str) -> None:
    cls = pb.ActivateBrokerRequest if method == "activate_broker" else pb.UnloadBrokerRequest
    assert admin.refused(method, cls(broker_id=broker_id))[0] == "INVALID_ARGUMENT"


@pytest.mark.parametrize("dry_run", [True, False])
def test_unload_needs_two_brokers(admin: Admin, dry_run: bool) -> None:
    status, text = admin.refused("unload_broker", pb.UnloadBrokerRequest(broker_id="4711", dry_run=dry_run))
    assert status == "FAILED_PRECONDITION"
    assert "fewer than 2 brokers" in text


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("add_node", pb.AddNodeRequest(addr="127.0.0.1:7650", node_id=1)),
        ("promote_node", pb.PromoteNodeRequest(node_id=1)),
        ("remove_node", pb.RemoveNodeRequest(node_id=1)),
    ],
)
def test_what_only_a_cluster_has(admin: Admin, method: str, request_: Any) -> None:
    status, text = admin.refused(method, request_)
    assert status == "FAILED_PRECONDITION"
    assert "cluster of one" in text


# Roles


def role(name: str = "reader", *permissions: str) -> Any:
    definition = pb.RoleDefinition(name=name, permissions=permissions or ("Consume", "Lookup"))
    return pb.CreateRoleRequest(role=definition)


def test_roles_come_change_and_go(admin: Admin) -> None:
    assert admin("create_role", role()).success
    assert admin("create_role", role("reader", "Consume", "Consume")).success
    found = admin("get_role", pb.GetRoleRequest(name="reader")).role
    assert (found.name, list(found.permissions), found.system) == ("reader", ["Consume"], False)
    assert [one.name for one in admin("list_roles", pb.Empty()).roles if not one.system] == ["reader"]
    assert admin("delete_role", pb.DeleteRoleRequest(name="reader")).success
    built_in = ["admin", "consumer", "namespace-admin", "producer", "viewer"]
    assert [one.name for one in admin("list_roles", pb.Empty()).roles if one.system] == built_in


def test_every_permission_is_known(admin: Admin) -> None:
    assert len(PERMISSIONS) == 10
    assert admin("create_role", role("all", *PERMISSIONS)).success


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (pb.CreateRoleRequest(), "no role"),
        (role(""), "no role name"),
        (role("a\x00"), "role name"),
        (role("r", "Fly"), "use Lookup, Produce"),
        (role("r", "produce"), "use Lookup, Produce"),
    ],
)
def test_roles_that_cannot_be(admin: Admin, request_: Any, says: str) -> None:
    status, text = admin.refused("create_role", request_)
    assert status == "INVALID_ARGUMENT"
    assert says in text


def test_roles_that_are_missing(admin: Admin) -> None:
    assert admin.refused("get_role", pb.GetRoleRequest(name="x"))[0] == "NOT_FOUND"
    assert admin.refused("delete_role", pb.DeleteRoleRequest(name="x"))[0] == "NOT_FOUND"
    assert admin.refused("get_role", pb.GetRoleRequest())[0] == "INVALID_ARGUMENT"
    assert admin.refused("delete_role", pb.DeleteRoleRequest())[0] == "INVALID_ARGUMENT"


def test_a_system_role_stays(admin: Admin) -> None:
    admin.broker.commit(PutRole(role=Role("reader", ("Consume",), system=True)))
    status, _ = admin.refused("delete_role", pb.DeleteRoleRequest(name="reader"))
    assert status == "FAILED_PRECONDITION"
    assert admin("get_role", pb.GetRoleRequest(name="reader")).role.system


# Bindings


def binding(**fields: Any) -> Any:
    given = {
        "id": "b1",
        "principal_type": "user",
        "principal_name": "alice",
        "role_names": ["reader"],
        "scope": "topic",
        "resource_name": "/default/t",
    } | fields
    return pb.CreateBindingRequest(binding=pb.BindingDefinition(**given))


@pytest.mark.parametrize(
    ("scope", "resource", "stored"),
    [
        ("cluster", "", ""),
        ("namespace", "default", "default"),
        ("namespace", "/default", "default"),
        ("topic", "/default/t", "/default/t"),
        ("topic", "orders-value", "orders-value"),
    ],
)
def test_bindings_of_each_scope(admin: Admin, scope: str, resource: str, stored: str) -> None:
    admin("create_role", role())
    for _ in range(2):  # the same again is the same binding
        assert admin("create_binding", binding(scope=scope, resource_name=resource)).success
    asked = {"scope": scope, "resource_name": resource}
    found = admin("get_binding", pb.GetBindingRequest(binding_id="b1", **asked)).binding
    assert found == pb.BindingDefinition(
        id="b1",
        principal_type="user",
        principal_name="alice",
        role_names=["reader"],
        scope=scope,
        resource_name=stored,
    )
    assert list(admin("list_bindings", pb.ListBindingsRequest(**asked)).bindings) == [found]
    assert list(admin("list_all_bindings", pb.Empty()).bindings) == [found]
    assert admin("delete_binding", pb.DeleteBindingRequest(binding_id="b1", **asked)).success
    assert not admin("list_all_bindings", pb.Empty()).bindings
    for method, cls in (("get_binding", pb.GetBindingRequest), ("delete_binding", pb.DeleteBindingRequest)):
        assert admin.refused(method, cls(binding_id="b1", **asked))[0] == "NOT_FOUND"


def test_bindings_are_listed_by_their_exact_place(admin: Admin) -> None:
    admin("create_role", role())
    admin("create_binding", binding(id="t"))
    admin("create_binding", binding(id="longer", resource_name="/default/t2"))
    admin("create_binding", binding(id="n", scope="namespace", resource_name="default"))
    request = pb.ListBindingsRequest(scope="topic", resource_name="/default/t")
    assert [one.id for one in admin("list_bindings", request).bindings] == ["t"]


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (pb.CreateBindingRequest(), "no binding"),
        (binding(id=""), "binding id"),
        (binding(principal_type=""), "use user, service_account"),
        (binding(principal_type="robot"), "use user, service_account"),
        (binding(principal_name=""), "principal_name"),
        (binding(role_names=[]), "names 1 .. "),
        (binding(scope=""), "use cluster, namespace, topic"),
        (binding(scope="Topic"), "use cluster, namespace, topic"),
        (binding(scope="cluster"), "names no resource"),
        (binding(scope="namespace", resource_name=""), "namespace"),
        (binding(scope="namespace", resource_name="/default/t"), "namespace"),
        (binding(resource_name=""), "needs a resource name"),
    ],
)
def test_bindings_that_cannot_be(admin: Admin, request_: Any, says: str) -> None:
    admin("create_role", role())
    status, text = admin.refused("create_binding", request_)
    assert status == "INVALID_ARGUMENT"
    assert says in text
    assert not admin.broker.metadata.access.bindings()


def test_a_binding_to_a_role_that_is_not_there(admin: Admin) -> None:
    status, text = admin.refused("create_binding", binding())
    assert status == "NOT_FOUND"
    assert "create the role first" in text


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("get_binding", pb.GetBindingRequest(scope="cluster")),
        ("get_binding", pb.GetBindingRequest(scope="x", binding_id="b")),
        ("delete_binding", pb.DeleteBindingRequest(scope="cluster")),
        ("delete_binding", pb.DeleteBindingRequest(binding_id="b")),
        ("list_bindings", pb.ListBindingsRequest(scope="x")),
        ("list_bindings", pb.ListBindingsRequest(scope="topic")),
    ],
)
def test_places_that_cannot_be(admin: Admin, method: str, request_: Any) -> None:
    assert admin.refused(method, request_)[0] == "INVALID_ARGUMENT"


def test_the_members_of_a_cluster_are_asked_of_the_controller() -> None:
    admin = Admin()
    admin.broker.clustered = True
    members = Members({"7": "a:1", "5": "b:1"}, {"9": "c:1"})
    found = ClusterStatus(
        "5", "b:1", "danube", "c", "follower", "7", 3, 12, 12, 40, members.voters, members.learners
    )
    admin.broker.controller_answers = [found, Changed(members), Changed(members), Changed(members)]
    status = admin("cluster_status", pb.Empty())
    assert (status.leader_id, status.current_term, status.last_applied) == (7, 3, 12)
    assert (list(status.voters), list(status.learners)) == ([5, 7], [9])
    assert (status.self_node_id, status.raft_addr) == (5, "b:1")
    added = admin("add_node", pb.AddNodeRequest(addr="c:1", node_id=9))
    assert added.success and added.node_id == 9
    assert admin("promote_node", pb.PromoteNodeRequest(node_id=9)).success
    assert admin("remove_node", pb.RemoveNodeRequest(node_id=7)).success
    assert admin.broker.controller_requests[1:] == [
        Change("add", "9", "c:1"), Change("promote", "9"), Change("remove", "7"),
    ]  # fmt: skip
    for request in (pb.AddNodeRequest(addr="c:1"), pb.AddNodeRequest(node_id=9), pb.AddNodeRequest()):
        assert admin.refused("add_node", request)[0] == "INVALID_ARGUMENT"
    assert admin.refused("remove_node", pb.RemoveNodeRequest())[0] == "INVALID_ARGUMENT"
