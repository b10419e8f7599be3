"""Roles and bindings inside the metadata machine.  :mod:`danube.core.security.authority` judges by them.

A role names permissions.  A binding gives roles to a principal within a scope: ``cluster`` (no
resource), ``namespace`` (its name, with or without a slash before it) or ``topic`` (a topic's name or a
schema subject).  Bindings may name roles that do not exist; those give nothing.

Built-in roles are made by code and never stored.  A stored role of the same name takes the place of the
built-in one, because guides for the official commands make ``producer`` and ``consumer`` themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from danube.core.cluster.records import no_room
from danube.core.metadata.commands import (
    AccessCommand,
    Binding,
    CredentialCommand,
    DeleteBinding,
    DeleteRole,
    PutBinding,
    PutRole,
    Role,
)
from danube.core.metadata.credentials import KnownCredentials
from danube.errors import InvalidArgument, NotFound, WrongState
from danube.ids import check_label, split_partition_name
from danube.limits import BINDINGS_MAX, ROLES_MAX, ROLES_PER_BINDING_MAX

PERMISSIONS: Final = (
    "Lookup", "Produce", "Consume", "Replicate", "ManageNamespace", "ManageTopic", "ManageSchema",
    "ManageBroker", "ManageCluster", "View",
)  # fmt: skip
SCOPES: Final = ("cluster", "namespace", "topic")
BUILT_IN_ROLES: Final = {
    name: Role(name, permissions, system=True)
    for name, permissions in (
        ("admin", PERMISSIONS),
        ("consumer", ("Lookup", "Consume")),
        ("namespace-admin", ("ManageNamespace", "ManageTopic", "ManageSchema", "Produce", "Consume")),
        ("producer", ("Lookup", "Produce")),
        ("viewer", ("Lookup", "View")),
    )
}

Place = tuple[str, str, str]  # scope, resource, id
RoleCommand = PutRole | DeleteRole | PutBinding | DeleteBinding


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
    """All roles and bindings, and what is known of credentials.

    ``version`` is the index of the last command that changed them.  Where two machines have the same version,
    the same is allowed, so what was judged at a version holds until it moves.  A snapshot's index takes its
    place when one is loaded: it is not smaller, and nothing changed in between.
    """

    __slots__ = ("_bindings", "_of_principals", "_roles", "credentials", "version")

    def __init__(self) -> None:
        self.version = 0
        self.credentials = KnownCredentials()
        self._roles: dict[str, Role] = {}
        self._bindings: dict[Place, Binding] = {}
        self._of_principals: dict[tuple[str, str], dict[Place, Binding]] = {}

    def roles(self) -> list[Role]:
        """The stored roles by name."""
        return [self._roles[name] for name in sorted(self._roles)]

    def every_role(self) -> list[Role]:
        """Stored and built-in roles by name."""
        known = BUILT_IN_ROLES | self._roles
        return [known[name] for name in sorted(known)]

    def find_role(self, name: str) -> Role | None:
        """The stored or built-in role of this name."""
        return self._roles.get(name) or BUILT_IN_ROLES.get(name)

    def find_binding(self, scope: str, resource_name: str, binding_id: str) -> Binding | None:
        return self._bindings.get((scope, resource_in(scope, resource_name), binding_id))

    def bindings_of(self, principal_type: str, principal_name: str) -> Iterable[Binding]:
        """The bindings of one principal."""
        return self._of_principals.get((principal_type, principal_name), {}).values()

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
        if isinstance(command, CredentialCommand):
            return self.credentials.check(command)
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
        _refuse_partition(binding)
        if _place(binding) not in self._bindings and len(self._bindings) >= BINDINGS_MAX:
            raise no_room("bindings", BINDINGS_MAX)

    def _refuse(self, command: RoleCommand) -> None:
        """Raise a CallerError if applying would break the machine."""
        match command:
            case DeleteRole(name=name):
                role = self._roles.get(name)
                if role is None and name in BUILT_IN_ROLES:
                    raise WrongState(f"role {name!r} is built in", hint="it cannot be deleted")
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

    def apply(self, index: int, command: AccessCommand) -> None:
        """Take the command of this index; raises where ``_refuse`` does and changes nothing then."""
        if isinstance(command, CredentialCommand):
            self.credentials.apply(command)
            self.version = index
            return
        self._refuse(command)
        self.version = index
        match command:
            case PutRole(role=role):
                self._roles[role.name] = role
            case PutBinding(binding=binding):
                self._drop(_place(binding))
                self._keep(binding)
            case DeleteRole(name=name):
                del self._roles[name]
            case DeleteBinding(scope=scope, resource_name=resource_name, id=name):
                self._drop((scope, resource_in(scope, resource_name), name))

    def _keep(self, binding: Binding) -> None:
        place, whose = _place(binding), (binding.principal_type, binding.principal_name)
        self._bindings[place] = binding
        self._of_principals.setdefault(whose, {})[place] = binding

    def _drop(self, place: Place) -> None:
        """Forget the binding there, if there is one."""
        binding = self._bindings.pop(place, None)
        if binding is not None:
            whose = binding.principal_type, binding.principal_name
            own = self._of_principals[whose]
            del own[place]
            if not own:
                del self._of_principals[whose]

    def copy(self) -> Access:
        other = Access()
        other.version, other.credentials = self.version, self.credentials.copy()
        other._roles, other._bindings = dict(self._roles), dict(self._bindings)
        other._of_principals = {whose: dict(own) for whose, own in self._of_principals.items()}
        return other

    def load(self, version: int, roles: list[Role], bindings: list[Binding]) -> None:
        """Load the roles and bindings of a snapshot; ``version``: its own, or in older ones its index."""
        self.version = version
        self._roles = {role.name: role for role in roles}
        for binding in bindings:
            self._keep(binding)


def _refuse_partition(binding: Binding) -> None:
    """Refuse a partition as the resource: rights are a topic's, so such a binding would give nothing."""
    topic, partition = split_partition_name(binding.resource_name)
    if binding.scope == "topic" and partition is not None and topic.startswith("/"):
        raise InvalidArgument(
            f"{binding.resource_name} is a partition",
            why="all partitions of a topic have the rights of the topic",
            hint=f"bind it on {topic}",
        )


def _place(binding: Binding) -> Place:
    return binding.scope, binding.resource_name, binding.id
