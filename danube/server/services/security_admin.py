"""danube_admin.SecurityAdmin: roles and their bindings."""

from __future__ import annotations

from typing import Any, Final

from danube.core.metadata.roles import PERMISSIONS, SCOPES
from danube.errors import InvalidArgument, NotFound, WrongState
from danube.ids import check_label, check_namespace
from danube.server.proto import DanubeAdmin_pb2 as pb
from danube.server.services.calls import whole_list
from danube.server.services.naming import required, required_message
from danube.server.services.ports import BrokerCalls, Call

PRINCIPAL_TYPES: Final = ("user", "service_account", "broker_internal")


class SecurityAdmin:
    """Both creates replace an existing entry of the same name or id."""

    def __init__(self, broker: BrokerCalls) -> None:
        self._broker = broker

    async def create_role(self, request: pb.CreateRoleRequest, call: Call) -> pb.CreateRoleResponse:
        role = required_message(request, "role")
        _check_word(role.name, "role name")
        unknown = [one for one in role.permissions if one not in PERMISSIONS]
        if unknown:
            raise InvalidArgument(
                f"permission {unknown[0][:40]!r} is not known", hint=f"use {', '.join(PERMISSIONS)}"
            )
        permissions = list(dict.fromkeys(role.permissions))
        await self._broker.ask("put_role", name=role.name, permissions=permissions)
        return pb.CreateRoleResponse(success=True)

    async def get_role(self, request: pb.GetRoleRequest, call: Call) -> pb.GetRoleResponse:
        return pb.GetRoleResponse(role=_role(await self._find_role(request.name)))

    async def list_roles(self, request: pb.Empty, call: Call) -> pb.ListRolesResponse:
        return pb.ListRolesResponse(roles=[_role(one) for one in await whole_list(self._broker.ask, "roles")])

    async def delete_role(self, request: pb.DeleteRoleRequest, call: Call) -> pb.DeleteRoleResponse:
        role = await self._find_role(request.name)
        if role["system"]:
            raise WrongState(f"role {request.name} cannot be deleted", why="the system needs it")
        await self._broker.ask("delete_role", name=request.name)
        return pb.DeleteRoleResponse(success=True)

    async def create_binding(self, request: pb.CreateBindingRequest, call: Call) -> pb.CreateBindingResponse:
        binding = required_message(request, "binding")
        _check_word(binding.id, "binding id")
        _check_word(binding.principal_name, "principal_name")
        required(binding.principal_type, "principal_type", f"use {', '.join(PRINCIPAL_TYPES)}")
        if binding.principal_type not in PRINCIPAL_TYPES:
            raise InvalidArgument(
                f"principal_type {binding.principal_type[:40]!r} is not known",
                hint=f"use {', '.join(PRINCIPAL_TYPES)}",
            )
        if not binding.role_names:
            raise InvalidArgument("the binding has no role_names", hint="name at least one role")
        resource = resource_of(binding.scope, binding.resource_name)
        known = {one["name"] for one in await whole_list(self._broker.ask, "roles")}
        missing = [one for one in binding.role_names if one not in known]
        if missing:
            raise NotFound(f"role {missing[0][:80]!r} does not exist", hint="create the role first")
        await self._broker.ask(
            "put_binding",
            id=binding.id,
            principal_type=binding.principal_type,
            principal_name=binding.principal_name,
            role_names=list(dict.fromkeys(binding.role_names)),
            scope=binding.scope,
            resource_name=resource,
        )
        return pb.CreateBindingResponse(success=True)

    async def get_binding(self, request: pb.GetBindingRequest, call: Call) -> pb.GetBindingResponse:
        return pb.GetBindingResponse(binding=await self._find_binding(request))

    async def list_bindings(self, request: pb.ListBindingsRequest, call: Call) -> pb.ListBindingsResponse:
        resource = resource_of(request.scope, request.resource_name)
        return pb.ListBindingsResponse(bindings=await self._bindings(request.scope, resource))

    async def list_all_bindings(self, request: pb.Empty, call: Call) -> pb.ListBindingsResponse:
        found = await whole_list(self._broker.ask, "bindings")
        return pb.ListBindingsResponse(bindings=[_binding(one) for one in found])

    async def delete_binding(self, request: pb.DeleteBindingRequest, call: Call) -> pb.DeleteBindingResponse:
        binding = await self._find_binding(request)
        await self._broker.ask(
            "delete_binding", scope=binding.scope, resource_name=binding.resource_name, id=binding.id
        )
        return pb.DeleteBindingResponse(success=True)

    async def _find_role(self, name: str) -> dict[str, Any]:
        required(name, "role name", "ListRoles tells the names")
        for role in await whole_list(self._broker.ask, "roles"):
            if role["name"] == name:
                found: dict[str, Any] = role
                return found
        raise NotFound(f"role {name[:80]!r} does not exist", hint="ListRoles tells the names")

    async def _find_binding(
        self, request: pb.GetBindingRequest | pb.DeleteBindingRequest
    ) -> pb.BindingDefinition:
        required(request.binding_id, "binding_id", "ListBindings tells the ids")
        resource = resource_of(request.scope, request.resource_name)
        for binding in await self._bindings(request.scope, resource):
            if binding.id == request.binding_id:
                return binding
        raise NotFound(
            f"binding {request.binding_id[:80]!r} does not exist",
            why=f"scope {request.scope} {resource}".rstrip(),
            hint="ListAllBindings tells scope, resource and id of each",
        )

    async def _bindings(self, scope: str, resource: str) -> list[pb.BindingDefinition]:
        found = await whole_list(self._broker.ask, "bindings", scope=scope, resource=resource)
        return [_binding(one) for one in found]


def resource_of(scope: str, resource: str) -> str:
    """The resource name as it is stored: none for the cluster, ``default``, ``/default/t`` or a subject.

    A namespace may be written with a leading slash, as guides for the official commands show it.
    """
    if scope not in SCOPES:
        raise InvalidArgument(f"scope {scope[:40]!r} is not known", hint=f"use {', '.join(SCOPES)}")
    if scope == "cluster":
        if resource:
            raise InvalidArgument(
                "scope cluster takes no resource_name", hint="leave it empty, or use another scope"
            )
        return ""
    if scope == "namespace":
        return check_namespace(resource.removeprefix("/"))
    _check_word(resource, "resource_name")
    return resource


def _check_word(text: str, field: str) -> None:
    required(text, field, f"set {field}")
    check_label(text, field)


def _role(role: dict[str, Any]) -> pb.RoleDefinition:
    return pb.RoleDefinition(name=role["name"], permissions=role["permissions"], system=role["system"])


def _binding(binding: dict[str, Any]) -> pb.BindingDefinition:
    return pb.BindingDefinition(
        id=binding["id"],
        principal_type=binding["principal_type"],
        principal_name=binding["principal_name"],
        role_names=binding["role_names"],
        scope=binding["scope"],
        resource_name=binding["resource_name"],
    )
