"""danube_admin.SecurityAdmin: roles and their bindings; and danube.AuthService: a token for an API key."""

from __future__ import annotations

import msgspec

from danube.core.metadata.commands import Binding
from danube.core.metadata.roles import resource_in
from danube.errors import NotFound
from danube.ids import check_label, check_namespace
from danube.server.proto import DanubeAdmin_pb2 as pb
from danube.server.proto.DanubeApi_pb2 import AuthRequest, AuthResponse
from danube.server.services.calls import BrokerCalls, Call
from danube.server.services.naming import current, required, required_message


class AuthService:
    """Needs no credential beside the key, whose failures count like those at every door."""

    def __init__(self, broker: BrokerCalls) -> None:
        self._broker = broker

    async def authenticate(self, request: AuthRequest, call: Call) -> AuthResponse:
        return AuthResponse(token=self._broker.exchange(request.api_key, call.connection.host))


class SecurityAdmin:
    """Both creates replace an existing entry of the same name or id."""

    def __init__(self, broker: BrokerCalls) -> None:
        self._broker = broker

    async def create_role(self, request: pb.CreateRoleRequest, call: Call) -> pb.CreateRoleResponse:
        role = required_message(request, "role")
        _check_word(role.name, "role name")
        permissions = list(dict.fromkeys(role.permissions))
        await self._broker.ask("put_role", name=role.name, permissions=permissions)
        return pb.CreateRoleResponse(success=True)

    async def get_role(self, request: pb.GetRoleRequest, call: Call) -> pb.GetRoleResponse:
        required(request.name, "role name", "ListRoles tells the names")
        role = current(self._broker).access.find_role(request.name)
        if role is None:
            raise NotFound(f"role {request.name[:80]!r} does not exist", hint="ListRoles tells the names")
        return pb.GetRoleResponse(role=pb.RoleDefinition(**msgspec.structs.asdict(role)))

    async def list_roles(self, request: pb.Empty, call: Call) -> pb.ListRolesResponse:
        found = current(self._broker).access.every_role()
        return pb.ListRolesResponse(roles=[pb.RoleDefinition(**msgspec.structs.asdict(one)) for one in found])

    async def delete_role(self, request: pb.DeleteRoleRequest, call: Call) -> pb.DeleteRoleResponse:
        required(request.name, "role name", "ListRoles tells the names")
        await self._broker.ask("delete_role", name=request.name)
        return pb.DeleteRoleResponse(success=True)

    async def create_binding(self, request: pb.CreateBindingRequest, call: Call) -> pb.CreateBindingResponse:
        binding = required_message(request, "binding")
        _check_word(binding.id, "binding id")
        _check_word(binding.principal_name, "principal_name")
        resource = _resource_of(binding.scope, binding.resource_name)
        access = current(self._broker).access
        missing = [one for one in binding.role_names if access.find_role(one) is None]
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
        return pb.GetBindingResponse(binding=_shown(self._find_binding(request)))

    async def list_bindings(self, request: pb.ListBindingsRequest, call: Call) -> pb.ListBindingsResponse:
        found = self._bindings(request.scope, request.resource_name)
        return pb.ListBindingsResponse(bindings=map(_shown, found))

    async def list_all_bindings(self, request: pb.Empty, call: Call) -> pb.ListBindingsResponse:
        return pb.ListBindingsResponse(bindings=map(_shown, current(self._broker).access.bindings()))

    async def delete_binding(self, request: pb.DeleteBindingRequest, call: Call) -> pb.DeleteBindingResponse:
        found = self._find_binding(request)
        place = {"scope": found.scope, "resource_name": found.resource_name, "id": found.id}
        await self._broker.ask("delete_binding", **place)
        return pb.DeleteBindingResponse(success=True)

    def _find_binding(self, request: pb.GetBindingRequest | pb.DeleteBindingRequest) -> Binding:
        required(request.binding_id, "binding_id", "ListBindings tells the ids")
        for binding in self._bindings(request.scope, request.resource_name):
            if binding.id == request.binding_id:
                return binding
        raise NotFound(
            f"binding {request.binding_id[:80]!r} does not exist",
            why=f"scope {request.scope} {request.resource_name}".rstrip(),
            hint="ListAllBindings tells scope, resource and id of each",
        )

    def _bindings(self, scope: str, resource: str) -> list[Binding]:
        return current(self._broker).access.bindings(scope, _resource_of(scope, resource))


def _resource_of(scope: str, resource: str) -> str:
    """Return the stored resource name: empty for the cluster, else ``default``, ``/default/t`` or a subject.

    A namespace may have a leading slash, as in guides for the official commands.
    """
    found = resource_in(scope, resource)
    return check_namespace(found) if scope == "namespace" else found


def _check_word(text: str, field: str) -> None:
    required(text, field, f"set {field}")
    check_label(text, field)


def _shown(binding: Binding) -> pb.BindingDefinition:
    return pb.BindingDefinition(**msgspec.structs.asdict(binding))
