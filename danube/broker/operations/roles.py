"""Operations on roles and bindings.  They are kept and listed; nothing is refused by them yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from danube.broker.operations.arguments import Args, flag, text, texts
from danube.broker.operations.paging import listed
from danube.core.metadata.commands import Binding, DeleteBinding, DeleteRole, PutBinding, PutRole, Role
from danube.core.metadata.roles import resource_in

if TYPE_CHECKING:
    from danube.broker.operations.context import Answer, Operation, Operations


def _roles(operations: Operations, args: Args, answer: Answer) -> None:
    operations.refresh()
    answer(listed(args, operations.state.access.roles(), lambda role: role.name, _map_of))


def _put_role(operations: Operations, args: Args, answer: Answer) -> None:
    role = Role(text(args, "name"), texts(args, "permissions"), flag(args, "system", False))
    operations.propose(PutRole(role=role), answer)


def _delete_role(operations: Operations, args: Args, answer: Answer) -> None:
    operations.propose(DeleteRole(name=text(args, "name")), answer)


def _bindings(operations: Operations, args: Args, answer: Answer) -> None:
    operations.refresh()
    scope = text(args, "scope") if "scope" in args else None
    resource = text(args, "resource") if "resource" in args else None
    found = operations.state.access.bindings(scope, resource)
    answer(listed(args, found, _place, _map_of))


def _place(binding: Binding) -> str:
    return f"{binding.scope}\n{binding.resource_name}\n{binding.id}"


def _put_binding(operations: Operations, args: Args, answer: Answer) -> None:
    scope = text(args, "scope")
    binding = Binding(
        text(args, "id"),
        text(args, "principal_type"),
        text(args, "principal_name"),
        texts(args, "role_names"),
        scope,
        resource_in(scope, text(args, "resource_name", "")),
    )
    operations.propose(PutBinding(binding=binding), answer)


def _delete_binding(operations: Operations, args: Args, answer: Answer) -> None:
    scope, name = text(args, "scope"), text(args, "id")
    resource = resource_in(scope, text(args, "resource_name", ""))
    operations.propose(DeleteBinding(scope=scope, resource_name=resource, id=name), answer)


def _map_of(struct: msgspec.Struct) -> dict[str, Any]:
    return msgspec.structs.asdict(struct)


TABLE: dict[str, Operation] = {
    "roles": _roles,
    "put_role": _put_role,
    "delete_role": _delete_role,
    "bindings": _bindings,
    "put_binding": _put_binding,
    "delete_binding": _delete_binding,
}
