"""Operations on roles and bindings, by which :mod:`danube.core.security.authority` judges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from danube.broker.operations.arguments import listed
from danube.broker.operations.context import proposing
from danube.core.metadata.commands import Binding, DeleteBinding, PutBinding, PutRole, Role
from danube.core.metadata.roles import resource_in
from danube.core.security.principals import BOUND_KINDS
from danube.errors import InvalidArgument

if TYPE_CHECKING:
    from danube.broker.operations.context import Answer, Operation, Operations
    from danube.core.security import arguments as of


def _roles(operations: Operations, args: of.Page, answer: Answer) -> None:
    operations.refresh()
    answer(listed(args, operations.state.access.every_role(), lambda role: role.name, msgspec.structs.asdict))


def _put_role(operations: Operations, args: Role, answer: Answer) -> None:
    operations.propose(PutRole(role=args), answer)


def _bindings(operations: Operations, args: of.Bindings, answer: Answer) -> None:
    operations.refresh()
    found = operations.state.access.bindings(args.scope, args.resource)
    answer(listed(args, found, _place, msgspec.structs.asdict))


def _place(binding: Binding) -> str:
    return f"{binding.scope}\n{binding.resource_name}\n{binding.id}"


def _put_binding(operations: Operations, args: Binding, answer: Answer) -> None:
    resource = resource_in(args.scope, args.resource_name)
    if (kind := args.principal_type) not in BOUND_KINDS:
        raise InvalidArgument(
            f"principal_type {kind[:40]!r} is not known", hint=f"use {', '.join(BOUND_KINDS)}"
        )
    operations.propose(PutBinding(binding=msgspec.structs.replace(args, resource_name=resource)), answer)


def _delete_binding(operations: Operations, args: of.BindingPlace, answer: Answer) -> None:
    resource = resource_in(args.scope, args.resource_name)
    operations.propose(DeleteBinding(scope=args.scope, resource_name=resource, id=args.id), answer)


TABLE: dict[str, Operation] = {
    "roles": _roles,
    "put_role": _put_role,
    "delete_role": proposing(),
    "bindings": _bindings,
    "put_binding": _put_binding,
    "delete_binding": _delete_binding,
}
