"""Roles and bindings inside the metadata machine: kept and listed, not enforced yet.

A role names permissions.  A binding gives roles to a principal within a scope: ``cluster`` (no
resource), ``namespace`` (its name, with or without a slash before it) or ``topic`` (a topic's name or a
schema subject).  Bindings may name roles that do not exist; those give nothing.
"""

from __future__ import annotations

from typing import Final

from danube.core.cluster.records import no_room
from danube.core.metadata.commands import (
    AccessCommand,
    Binding,
    DeleteBinding,
    DeleteRole,
    PutBinding,
    PutRole,
    Role,
)
from danube.errors import InvalidArgument, NotFound, WrongState
from danube.ids import check_label
from danube.limits import BINDINGS_MAX, ROLES_MAX, ROLES_PER_BINDING_MAX

PERMISSIONS: Final = (
    "Lookup", "Produce", "Consume", "Replicate", "ManageNamespace", "ManageTopic", "ManageSchema",
    "ManageBroker", "ManageCluster",
)  # fmt: skip
SCOPES: Final = ("cluster", "namespace", "topic")

Place = tuple[str, str, str]  # scope, resource, id


def resource_in(scope: str, resource_name: str) -> str:
    """The one spelling of a resource in its scope; raises InvalidArgument."""
    if scope not in SCOPES:
        raise InvalidArgument(f"scope {scope[:40]!r} is not known", hint=f"use {', '.join(SCOPES)}")
    if scope == "cluster":
        if resource_name:
            raise InvalidArgument(
                "a binding of the cluster names no resource", why=f"not {resource_name[:80]!r}"
            )
        return ""
    if not resource_name:
        raise InvalidArgument(f"a binding of scope {scope} needs a resource name")
    check_label(resource_name, "resource")
    return resource_name.removeprefix("/") if scope == "namespace" else resource_name


class Access:
    """All roles and bindings."""

    __slots__ = ("_bindings", "_roles")

    def __init__(self) -> None:
        self._roles: dict[str, Role] = {}
        self._bindings: dict[Place, Binding] = {}

    def roles(self) -> list[Role]:
        """All roles by name."""
        return [self._roles[name] for name in sorted(self._roles)]

    def find_role(self, name: str) -> Role | None:
        return self._roles.get(name)

    def bindings(self, scope: str | None = None, resource_name: str | None = None) -> list[Binding]:
        """Bindings by scope, resource and id; of one scope, or of exactly one resource."""
        resource = None
        if scope is not None and resource_name is not None:
            resource = resource_in(scope, resource_name)
        places = sorted(self._bindings)
        return [
            self._bindings[place]
            for place in places
            if (scope is None or place[0] == scope) and (resource is None or place[1] == resource)
        ]

    def check(self, command: AccessCommand) -> bool:
        """Whether ``command`` would change anything; raises a CallerError if it is not allowed."""
        match command:
            case PutRole(role=role):
                self._check_role(role)
                return self._roles.get(role.name) != role
            case PutBinding(binding=binding):
                self._check_binding(binding)
                return self._bindings.get(_place(binding)) != binding
            case _:
                self._refuse(command)
                return True

    def _check_role(self, role: Role) -> None:
        check_label(role.name, "role")
        unknown = [name for name in role.permissions if name not in PERMISSIONS]
        if unknown:
            raise InvalidArgument(
                f"permission {unknown[0][:40]!r} is not known", hint=f"use {', '.join(PERMISSIONS)}"
            )
        if len(set(role.permissions)) < len(role.permissions):
            raise InvalidArgument(f"role {role.name!r} names a permission twice")
        if role.name not in self._roles and len(self._roles) >= ROLES_MAX:
            raise no_room("roles", ROLES_MAX)

    def _check_binding(self, binding: Binding) -> None:
        check_label(binding.id, "binding")
        check_label(binding.principal_type, "principal type")
        check_label(binding.principal_name, "principal")
        if not 1 <= len(binding.role_names) <= ROLES_PER_BINDING_MAX:
            raise InvalidArgument(f"a binding names 1 .. {ROLES_PER_BINDING_MAX} roles")
        for name in binding.role_names:
            check_label(name, "role")
        if resource_in(binding.scope, binding.resource_name) != binding.resource_name:
            raise InvalidArgument(f"resource {binding.resource_name!r} is not in its one spelling")
        if _place(binding) not in self._bindings and len(self._bindings) >= BINDINGS_MAX:
            raise no_room("bindings", BINDINGS_MAX)

    def _refuse(self, command: AccessCommand) -> None:
        """Raise a CallerError if applying would break the machine."""
        match command:
            case DeleteRole(name=name):
                role = self._roles.get(name)
                if role is None:
                    raise NotFound(f"role {name[:80]!r} does not exist")
                if role.system:
                    raise WrongState(f"role {name!r} belongs to the system", hint="it cannot be deleted")
            case DeleteBinding(scope=scope, resource_name=resource_name, id=name):
                if (scope, resource_in(scope, resource_name), name) not in self._bindings:
                    raise NotFound(
                        f"binding {name[:80]!r} does not exist", why=f"in scope {scope} {resource_name}"
                    )
            case _:
                pass

    def apply(self, command: AccessCommand) -> None:
        """Take a command; raises where ``_refuse`` does and changes nothing then."""
        self._refuse(command)
        match command:
            case PutRole(role=role):
                self._roles[role.name] = role
            case PutBinding(binding=binding):
                self._bindings[_place(binding)] = binding
            case DeleteRole(name=name):
                del self._roles[name]
            case DeleteBinding(scope=scope, resource_name=resource_name, id=name):
                del self._bindings[scope, resource_in(scope, resource_name), name]

    def copy(self) -> Access:
        other = Access()
        other._roles, other._bindings = dict(self._roles), dict(self._bindings)
        return other

    def load(self, roles: list[Role], bindings: list[Binding]) -> None:
        """Load the roles and bindings of a snapshot."""
        self._roles = {role.name: role for role in roles}
        self._bindings = {_place(binding): binding for binding in bindings}


def _place(binding: Binding) -> Place:
    return binding.scope, binding.resource_name, binding.id
