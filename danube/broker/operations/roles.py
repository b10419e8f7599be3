"""Operations on roles and bindings, by which :mod:`danube.core.security.authority` judges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from danube.broker.operations.arguments import Args, filled, listed, text
from danube.broker.operations.context import proposing
from danube.core.metadata.commands import Binding, DeleteBinding, DeleteRole, PutBinding, PutRole, Role
from danube.core.metadata.roles import resource_in
from danube.core.security.principals import BOUND_KINDS
from danube.errors import InvalidArgument

if TYPE_CHECKING:
    from danube.broker.operations.context import Answer, Operation, Operations


def _roles(operations: Operations, args: Args, answer: Answer) -> None:
    operations.refresh()
    answer(listed(args, operations.state.access.every_role(), lambda role: role.name, msgspec.structs.asdict))


def _put_role(operations: Operations, args: Args, answer: Answer) -> None:
    operations.propose(PutRole(role=filled(args, Role)), answer)


def _bindings(operations: Operations, args: Args, answer: Answer) -> None:
    operations.refresh()
    scope = text(args, "scope") if "scope" in args else None
    resource = text(args, "resource") if "resource" in args else None
    found = operations.state.access.bindings(scope, resource)
    answer(listed(args, found, _place, msgspec.structs.asdict))


def _place(binding: Binding) -> str:
    return f"{binding.scope}\n{binding.resource_name}\n{binding.id}"


def _put_binding(operations: Operations, args: Args, answer: Answer) -> None:
    resource = resource_in(text(args, "scope"), text(args, "resource_name", ""))
    if (kind := text(args, "principal_type")) not in BOUND_KINDS:
        raise InvalidArgument(
            f"principal_type {kind[:40]!r} is not known", hint=f"use {', '.join(BOUND_KINDS)}"
        )
    operations.propose(PutBinding(binding=filled(args, Binding, resource_name=resource)), answer)


def _delete_binding(operations: Operations, args: Args, answer: Answer) -> None:
    resource = resource_in(text(args, "scope"), text(args, "resource_name", ""))
    operations.propose(filled(args, DeleteBinding, resource_name=resource), answer)


TABLE: dict[str, Operation] = {
    "roles": _roles,
    "put_role": _put_role,
    "delete_role": proposing(DeleteRole),
    "bindings": _bindings,
    "put_binding": _put_binding,
    "delete_binding": _delete_binding,
}
