"""Policies of namespaces and tenants inside the metadata machine, and the sums that they limit.

``check`` judges new topics, partitions and subjects for the proposer.  ``apply`` never does: what was agreed
stays applicable when a limit gets smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

from danube.core.cluster.records import no_room
from danube.core.metadata.commands import DeleteTenant, PutTenant, QuotaCommand, SetNamespacePolicy
from danube.core.metadata.policies import NOTHING, NamespacePolicy, Tenant, strictest
from danube.errors import Conflict, InvalidArgument, LimitExceeded, NotFound, PolicyMismatch, TopicNotFound
from danube.ids import check_label, check_namespace
from danube.limits import NAMESPACES_PER_TENANT_MAX, TENANTS_MAX

_COUNTED: Final = {"max_topics": "topics", "max_partitions": "partitions", "max_subjects": "schema subjects"}
CountIn = Callable[[str], int]
"""How many things of a kind a namespace has."""


class Limited(Protocol):
    """The part of :class:`danube.core.metadata.machine.Metadata` that is looked at."""

    quotas: Quotas


def namespace_of(name: str) -> str:
    """The namespace of a topic, or of a subject that is spelled like one; "" for another subject."""
    return name[1 : name.find("/", 1)] if name.startswith("/") and name.count("/") == 2 else ""


def check_auto_create(state: Limited, topic: str) -> None:
    """Raise TopicNotFound if a missing topic of its namespace is not made by being used."""
    namespace = namespace_of(topic)
    limits = state.quotas.effective(namespace)
    if limits is not None and not limits.auto_create:
        raise TopicNotFound(
            f"topic {topic} does not exist",
            why=f"auto_create is off in namespace {namespace}",
            hint="create the topic first",
        )


class Quotas:
    """The policy of each namespace that has one, and all tenants."""

    __slots__ = ("_policies", "_tenant_of", "_tenants")

    def __init__(self) -> None:
        self._policies: dict[str, NamespacePolicy] = {}
        self._tenants: dict[str, Tenant] = {}
        self._tenant_of: dict[str, Tenant] = {}  # by namespace

    def __bool__(self) -> bool:
        return bool(self._policies or self._tenants)

    def policies(self) -> list[tuple[str, NamespacePolicy]]:
        """The policies that namespaces were given, by name."""
        return sorted(self._policies.items())

    def policy(self, namespace: str) -> NamespacePolicy:
        """The namespace's own policy."""
        return self._policies.get(namespace, NOTHING)

    def tenants(self) -> list[Tenant]:
        """All tenants by name."""
        return [self._tenants[name] for name in sorted(self._tenants)]

    def find_tenant(self, name: str) -> Tenant | None:
        return self._tenants.get(name)

    def tenant_of(self, namespace: str) -> Tenant | None:
        """The tenant that the namespace belongs to."""
        return self._tenant_of.get(namespace)

    def effective(self, namespace: str) -> NamespacePolicy | None:
        """The policy that holds for each topic of a namespace; None if nothing is limited there."""
        if not self:
            return None
        own, tenant = self.policy(namespace), self._tenant_of.get(namespace)
        found = own if tenant is None else strictest(own, tenant.quota)
        return None if found == NOTHING else found

    def check_letters(self, topic: str, letters: str) -> None:
        """Raise PolicyMismatch if dead letters of a topic may not go to the topic ``letters``."""
        namespace, other = namespace_of(topic), namespace_of(letters)
        limits = self.effective(namespace)
        within = "" if limits is None else limits.dead_letter_within
        if not within or namespace == other:
            return
        tenant = self._tenant_of.get(namespace)
        if within == "tenant" and tenant is not None and tenant is self._tenant_of.get(other):
            return
        raise PolicyMismatch(
            f"dead letters of {topic} may not go to {letters}",
            why=f"namespace {namespace} keeps them within its {within} (dead_letter_within)",
            hint="choose a dead-letter topic there, or have the namespace's policy changed",
        )

    def _holds(self, namespace: str) -> tuple[object, ...]:
        """The effective policy of a namespace, and which sums its topics count in."""
        sums = [
            (who, policy.limits_taking, policy.limits_dispatch)
            for who, policy, _ in self._of(namespace)
            if policy.limits_taking or policy.limits_dispatch
        ]
        return self.effective(namespace), sums

    def limited(self) -> set[str]:
        """Namespaces that have a policy or belong to a tenant."""
        return {*self._policies, *self._tenant_of}

    def changes_since(self, earlier: Quotas) -> list[str]:
        """Namespaces where another policy holds than in ``earlier``."""
        named = self.limited() | earlier.limited()
        return sorted(name for name in named if self._holds(name) != earlier._holds(name))

    def check_room(self, limit: str, namespace: str, more: int, count_in: CountIn) -> None:
        """Raise LimitExceeded if a namespace or its tenant may not have ``more`` of what ``limit`` counts."""
        for who, policy, namespaces in self._of(namespace):
            most = getattr(policy, limit)
            if most and (count := sum(map(count_in, namespaces))) + more > most:
                raise LimitExceeded(
                    f"{who} has {count} {_COUNTED[limit]}",
                    why=f"its {limit} is {most}",
                    hint="delete some that are not used, or have the limit raised",
                    limit=most, quota=limit,
                )  # fmt: skip

    def _of(self, namespace: str) -> Iterator[tuple[str, NamespacePolicy, Iterable[str]]]:
        own, tenant = self._policies.get(namespace), self._tenant_of.get(namespace)
        if own is not None:
            yield f"namespace {namespace}", own, (namespace,)
        if tenant is not None:
            yield f"tenant {tenant.name}", tenant.quota, tenant.namespaces

    # Check and apply

    def check(self, command: QuotaCommand) -> bool:
        """Whether ``command`` would change anything; raises a CallerError if it is not allowed."""
        match command:
            case SetNamespacePolicy(namespace=namespace, policy=policy):
                policy.check()
                return self.policy(namespace) != policy
            case PutTenant(tenant=tenant):
                self._check_tenant(tenant)
                return self._tenants.get(tenant.name) != tenant
            case DeleteTenant():
                self._refuse(command)
                return True

    def _check_tenant(self, tenant: Tenant) -> None:
        check_label(tenant.name, "tenant")
        tenant.quota.check()
        if len(tenant.namespaces) > NAMESPACES_PER_TENANT_MAX:
            raise no_room("namespaces", NAMESPACES_PER_TENANT_MAX, of="of a tenant")
        if len(set(tenant.namespaces)) < len(tenant.namespaces):
            raise InvalidArgument(f"tenant {tenant.name!r} names a namespace twice")
        for namespace in tenant.namespaces:
            check_namespace(namespace)
        if tenant.name not in self._tenants and len(self._tenants) >= TENANTS_MAX:
            raise no_room("tenants", TENANTS_MAX)
        self._refuse(PutTenant(tenant=tenant))

    def _refuse(self, command: PutTenant | DeleteTenant) -> None:
        """Raise a CallerError if applying would break the machine."""
        if isinstance(command, DeleteTenant):
            if command.name not in self._tenants:
                raise NotFound(f"tenant {command.name[:80]!r} does not exist")
            return
        for namespace in command.tenant.namespaces:
            present = self._tenant_of.get(namespace)
            if present is not None and present.name != command.tenant.name:
                raise Conflict(
                    f"namespace {namespace} belongs to tenant {present.name!r}",
                    hint="a namespace has one tenant; take it out of the other first",
                )

    def apply(self, command: QuotaCommand) -> list[str]:
        """Take a command; return the namespaces where another policy holds now."""
        if not isinstance(command, SetNamespacePolicy):
            self._refuse(command)
        earlier = {namespace: self._holds(namespace) for namespace in self._touched(command)}
        match command:
            case SetNamespacePolicy(namespace=namespace, policy=policy):
                self._policies[namespace] = policy
                if policy == NOTHING:
                    del self._policies[namespace]
            case PutTenant(tenant=tenant):
                self._forget_tenant(tenant.name)
                self._keep(tenant)
            case DeleteTenant(name=name):
                self._forget_tenant(name)
        return [namespace for namespace, former in earlier.items() if self._holds(namespace) != former]

    def _touched(self, command: QuotaCommand) -> list[str]:
        if isinstance(command, SetNamespacePolicy):
            return [command.namespace]
        name = command.tenant.name if isinstance(command, PutTenant) else command.name
        former = self._tenants.get(name)
        found = dict.fromkeys(former.namespaces if former is not None else ())
        return [*(found | dict.fromkeys(command.tenant.namespaces if isinstance(command, PutTenant) else ()))]

    def forget(self, namespace: str) -> None:
        """A namespace was deleted: so is its policy.  Its tenant may make it again."""
        self._policies.pop(namespace, None)

    def _keep(self, tenant: Tenant) -> None:
        self._tenants[tenant.name] = tenant
        self._tenant_of.update(dict.fromkeys(tenant.namespaces, tenant))

    def _forget_tenant(self, name: str) -> None:
        former = self._tenants.pop(name, None)
        for namespace in former.namespaces if former is not None else ():
            del self._tenant_of[namespace]

    def copy(self) -> Quotas:
        other = Quotas()
        other._policies, other._tenants = dict(self._policies), dict(self._tenants)
        other._tenant_of = dict(self._tenant_of)
        return other

    def load(self, policies: Iterable[tuple[str, NamespacePolicy]], tenants: Iterable[Tenant]) -> None:
        """Load the policies and tenants of a snapshot."""
        self._policies = dict(policies)
        for tenant in tenants:
            self._keep(tenant)
