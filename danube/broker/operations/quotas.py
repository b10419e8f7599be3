"""Operations on policies of namespaces, on tenants, and on what they use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from danube.broker.operations.arguments import changed, listed
from danube.broker.operations.context import proposing
from danube.core.metadata.commands import PutTenant, SetNamespacePolicy
from danube.core.metadata.policies import NOTHING, SUMS, SUMS_OF_ALL, NamespacePolicy, Tenant
from danube.errors import NotFound

if TYPE_CHECKING:
    from danube.broker.operations.context import Answer, Operation, Operations
    from danube.core.metadata.machine import Metadata
    from danube.core.security import arguments as of


def usage(state: Metadata, namespaces: Sequence[str]) -> dict[str, int]:
    """Return the numbers that sums are limited by, of these namespaces together."""
    return {
        "topics": sum(map(state.topics_in, namespaces)),
        "partitions": sum(map(state.partitions_in, namespaces)),
        "subjects": sum(map(state.subjects_in, namespaces)),
    }


def _namespace(operations: Operations, args: of.Namespace | of.NamespaceLimits) -> str:
    operations.refresh()
    namespace = args.namespace.removeprefix("/")
    if namespace not in operations.state.namespaces():
        raise NotFound(f"namespace {namespace[:80]!r} does not exist", hint="danube namespaces list")
    return namespace


def _namespace_policy(operations: Operations, args: of.Namespace, answer: Answer) -> None:
    """Answer a namespace's own policy, and what holds with that of its tenant."""
    namespace = _namespace(operations, args)
    state = operations.state
    tenant = state.quotas.tenant_of(namespace)
    answer(
        {
            "namespace": namespace,
            "tenant": None if tenant is None else tenant.name,
            "policy": msgspec.structs.asdict(state.quotas.policy(namespace)),
            "effective": msgspec.structs.asdict(state.quotas.effective(namespace) or NOTHING),
            "usage": usage(state, (namespace,)),
        }
    )


def _set_namespace_policy(operations: Operations, args: of.NamespaceLimits, answer: Answer) -> None:
    """Change the given fields of a namespace's policy."""
    namespace = _namespace(operations, args)
    policy = changed(operations.state.quotas.policy(namespace), args.policy)
    command = SetNamespacePolicy(namespace=namespace, policy=policy)
    operations.propose(command, answer, lambda made: msgspec.structs.asdict(policy))


def _tenants(operations: Operations, args: of.Page, answer: Answer) -> None:
    operations.refresh()
    state = operations.state

    def entry(tenant: Tenant) -> dict[str, Any]:
        fields = msgspec.structs.asdict(tenant)
        return {
            **fields,
            "quota": msgspec.structs.asdict(tenant.quota),
            "usage": usage(state, tenant.namespaces),
        }

    answer(listed(args, state.quotas.tenants(), lambda tenant: tenant.name, entry))


def _put_tenant(operations: Operations, args: of.TenantLimits, answer: Answer) -> None:
    """Make a tenant, or change what is given of it."""
    operations.refresh()
    present = operations.state.quotas.find_tenant(args.name) or Tenant(args.name, ())
    quota = changed(present.quota, args.quota)
    namespaces = present.namespaces if args.namespaces is None else args.namespaces
    operations.propose(PutTenant(tenant=Tenant(args.name, namespaces, quota)), answer)


def _quotas(operations: Operations, args: of.Page, answer: Answer) -> None:
    """List the namespaces and tenants that have a limit of a sum, with what they use of it.

    Rates are of the last seconds, over all brokers.
    """
    operations.refresh()
    state = operations.state
    rows: list[tuple[str, str, NamespacePolicy, Sequence[str]]] = [
        *(("namespace", name, policy, (name,)) for name, policy in state.quotas.policies()),
        *(("tenant", one.name, one.quota, one.namespaces) for one in state.quotas.tenants()),
    ]
    found = []
    for of, name, policy, namespaces in rows:
        used = {f"max_{what}": count for what, count in usage(state, namespaces).items()}
        if policy.limits_taking or policy.limits_dispatch:
            used |= operations.used_of(f"{of} {name}")
        for quota in (*SUMS, *SUMS_OF_ALL):
            if limit := getattr(policy, quota):
                row = {"of": of, "name": name, "quota": quota, "used": used.get(quota, 0), "limit": limit}
                found.append(row)
    answer(listed(args, found, _place, lambda row: row))


def _place(row: dict[str, Any]) -> str:
    return f"{row['of']}\n{row['name']}\n{row['quota']}"


TABLE: dict[str, Operation] = {
    "namespace_policy": _namespace_policy,
    "set_namespace_policy": _set_namespace_policy,
    "tenants": _tenants,
    "put_tenant": _put_tenant,
    "delete_tenant": proposing(),
    "quotas": _quotas,
}
