"""The authority: whether an identity has a permission on a resource.

Nothing is allowed unless a role gives it, and no role takes anything away.  Rights on a topic are those that
a principal has on the topic, on its namespace and on the cluster.  A partition is judged as its topic.  Some
permissions bring others along on the same resource (``IMPLIED``).

What a principal holds is put together once and kept until ``access.version`` moves; so are decisions.  A door
asks when a handle opens or a request comes, never for a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from danube.core.metadata.commands import Binding
from danube.core.metadata.roles import PERMISSIONS, Access
from danube.core.security.principals import BOOTSTRAP, GIVEN_KINDS, GROUP, Identity, Principal
from danube.errors import InvalidName, NotAllowed, NotAuthenticated
from danube.ids import NAMES_END, check_topic_name, split_partition_name
from danube.limits import DECISIONS_KEPT_MAX, PRINCIPALS_KEPT_MAX

IMPLIED: Final[dict[str, tuple[str, ...]]] = {
    "Produce": ("Lookup",),
    "Consume": ("Lookup",),
    "View": ("Lookup",),
    **{name: ("View", "Lookup") for name in PERMISSIONS if name.startswith("Manage")},
}


class Resource(NamedTuple):
    """``scope``: cluster, namespace or topic, as in bindings; ``name`` has the spelling that these store.

    A third word, ``somewhere``, is no place: a permission is held there if it is held on anything (without a
    name), or on anything in the namespace of the name.
    """

    scope: str
    name: str

    def __str__(self) -> str:
        if self.scope == "somewhere":
            return f"anything in namespace {self.name}" if self.name else "anything"
        return f"{self.scope} {self.name}" if self.name else self.scope


CLUSTER: Final = Resource("cluster", "")
SOMEWHERE: Final = Resource("somewhere", "")


def namespace_resource(name: str) -> Resource:
    """A namespace, with or without a slash before its name."""
    return Resource("namespace", name.removeprefix("/"))


def somewhere_in(namespace: str) -> Resource:
    """The namespace or anything in it; a list of it shows what the caller may see."""
    return Resource("somewhere", namespace.removeprefix("/"))


def topic_resource(name: str) -> Resource:
    """The topic of a logical or physical name; that of a partition is its topic."""
    return Resource("topic", split_partition_name(name)[0] if "-part-" in name else name)


def subject_resource(subject: str) -> Resource:
    """A schema subject.  One that is spelled like a topic belongs to that namespace."""
    return Resource("topic", subject)


def namespace_of(resource: Resource) -> str:
    """The namespace that a resource is or lies in; "" if there is none."""
    if resource.scope == "namespace":
        return resource.name
    try:
        return check_topic_name(resource.name)[0] if resource.scope == "topic" else ""
    except InvalidName:
        return ""


class Decision(NamedTuple):
    """``binding`` and ``role`` are what gives the permission, where that is not the code's own rule."""

    allowed: bool
    reason: str
    binding: Binding | None = None
    role: str = ""
    authenticated: bool = True  # whether it is known who asks


_UNGUARDED: Final = Decision(True, "access is not controlled (auth.mode: none)")
_BROKER: Final = Decision(True, "it is the broker itself")
_SUPER_ADMIN: Final = Decision(True, "it is one of auth.super_admins")
_ANONYMOUS: Final = Decision(False, "the request has no credential", authenticated=False)
_NO_ROLE: Final = Decision(False, "no role that is bound to it gives that there")
_FIRST: Final = Decision(True, "it is the first token, which makes roles, bindings, keys and tokens")
_FIRST_ONLY: Final = Decision(False, "the first token only makes roles, bindings, keys and tokens for others")

_Held = dict[str, Decision]  # by permission


class _Holdings:
    """Permissions that one principal holds, itself or by its groups, by resource."""

    __slots__ = ("_by_place",)

    def __init__(self, access: Access, principal: Principal, groups: Iterable[str]) -> None:
        self._by_place: dict[Resource, _Held] = {}
        holders = (principal, *(Principal(GROUP, name) for name in groups))
        for binding in (one for kind, name in holders for one in access.bindings_of(kind, name)):
            place = Resource(binding.scope, binding.resource_name)
            places = {place, SOMEWHERE, Resource("somewhere", namespace_of(place))}
            for name in binding.role_names:
                role = access.find_role(name)
                decision = Decision(True, _reason(binding, name), binding, name)
                for permission in role.permissions if role is not None else ():
                    for one in (permission, *IMPLIED.get(permission, ())):
                        for held in places:
                            self._by_place.setdefault(held, {}).setdefault(one, decision)

    def at(self, resource: Resource) -> _Held:
        """Permissions that are held on exactly this resource."""
        return self._by_place.get(resource, {})

    def places(self, scope: str) -> list[str]:
        """Names of the resources of a scope on which anything is held."""
        return [place.name for place in self._by_place if place.scope == scope]

    def find(self, permission: str, resource: Resource) -> Decision:
        namespace = namespace_of(resource)
        around = [Resource("namespace", namespace)] if namespace else []
        for place in (resource, *around, CLUSTER):
            if (found := self.at(place).get(permission)) is not None:
                return found
        return _NO_ROLE


def _reason(binding: Binding, role: str) -> str:
    place = Resource(binding.scope, binding.resource_name)
    group = binding.principal_type == GROUP
    holder = f"{GROUP}:{binding.principal_name}, which it is in," if group else "it"
    return f"role {role}, bound to {holder} on {place} by binding {binding.id}"


def super_admins_of(names: Iterable[str]) -> frozenset[Principal]:
    """The principals of ``auth.super_admins``: ``kind:name``, or a bare name, which is the user and the
    service account of that name."""
    found: list[Principal] = []
    for text in names:
        kinds = GIVEN_KINDS if ":" not in text else ("",)
        found += [Principal.parse(f"{kind}:{text}" if kind else text) for kind in kinds]
    return frozenset(found)


class Authority:
    """Judges by the present roles and bindings, which ``access`` returns: the machine may be replaced."""

    def __init__(
        self,
        access: Callable[[], Access],
        super_admins: frozenset[Principal] = frozenset(),
        *,
        enforced: bool = True,
    ) -> None:
        """Without ``enforced`` everything is allowed to everybody."""
        self.enforced = enforced
        self._access = access
        self._super_admins = super_admins
        self._version = -1
        self._held: dict[tuple[Principal, tuple[str, ...]], _Holdings] = {}
        self._decisions: dict[tuple[Identity, str, Resource], Decision] = {}

    @property
    def version(self) -> int:
        """Moves when what is allowed may have changed: what was judged before is to be judged again."""
        return self._access().version

    def decide(self, identity: Identity, permission: str, resource: Resource) -> Decision:
        """Whether the identity has the permission on the resource, and why."""
        if not self.enforced:
            return _UNGUARDED
        self._catch_up()
        key = (identity, permission, resource)
        found = self._decisions.get(key)
        if found is None:
            if len(self._decisions) >= DECISIONS_KEPT_MAX:
                self._decisions.clear()
            found = self._decisions[key] = self._judge(*key)
        return found

    def demand(self, identity: Identity, permission: str, *resources: Resource) -> None:
        """Raise NotAllowed, or NotAuthenticated, unless the identity has the permission on all of them."""
        for resource in resources:
            decision = self.decide(identity, permission, resource)
            if not decision.allowed:
                raise refusal(identity, permission, resource, decision)

    def visible(self, identity: Identity, resource: Resource) -> bool:
        """Whether a list shows the resource to the identity; whoever may View may Lookup."""
        return self.decide(identity, "Lookup", resource).allowed

    def sees_topic(self, identity: Identity) -> Callable[[str], bool]:
        """Return a test of stored topics' names for a list; it keeps no decision of its own."""
        everywhere = self.decide(identity, "Lookup", CLUSTER)
        if everywhere.allowed or not everywhere.authenticated:
            return lambda topic: everywhere.allowed
        held = self._holdings(identity)

        def seen(topic: str) -> bool:
            namespace = Resource("namespace", topic[1 : topic.find("/", 1)])
            return "Lookup" in held.at(namespace) or "Lookup" in held.at(Resource("topic", topic))

        return seen

    def topic_spans(self, identity: Identity) -> list[tuple[str, str]]:
        """Return spans of names, in their order, which hold the topics that a list shows to the identity."""
        everywhere = self.decide(identity, "Lookup", CLUSTER)
        if everywhere.allowed or not everywhere.authenticated:
            return [("", NAMES_END)] if everywhere.allowed else []
        held = self._holdings(identity)
        seen = {name for name in held.places("namespace") if "Lookup" in held.at(namespace_resource(name))}
        spans = [(f"/{name}/", f"/{name}/{NAMES_END}") for name in seen]
        for topic in held.places("topic"):
            place = Resource("topic", topic)
            if "Lookup" in held.at(place) and namespace_of(place) not in seen:
                spans.append((topic, f"{topic}\0"))
        return sorted(spans)

    def topics_held(self, identity: Identity) -> list[str]:
        """Topics and subjects on which roles are bound to the identity by name."""
        self._catch_up()
        return self._holdings(identity).places("topic")

    def may_bind(self, identity: Identity, binding: Binding) -> Decision:
        """Whether the identity may make, replace or delete this binding.

        With ManageCluster it may bind anything.  With ManageNamespace on a namespace it may give away within
        the namespace what it holds there itself.
        """
        everything = self.decide(identity, "ManageCluster", CLUSTER)
        if everything.allowed:
            return everything
        place = Resource(binding.scope, binding.resource_name)
        namespace = namespace_of(place)
        if not namespace or binding.principal_type not in (*GIVEN_KINDS, GROUP):
            return everything
        delegated = self.decide(identity, "ManageNamespace", Resource("namespace", namespace))
        if not delegated.allowed:
            return delegated
        access = self._access()
        for name in binding.role_names:
            role = access.find_role(name)
            if role is None:
                return Decision(False, f"role {name!r} does not exist, so it could give anything later")
            for permission in role.permissions:
                if not self.decide(identity, permission, place).allowed:
                    return Decision(False, f"role {name!r} gives {permission}, which it does not hold there")
        return delegated

    # -- what is kept -----------------------------------------------------------------------------

    def _catch_up(self) -> None:
        version = self._access().version
        if version != self._version:
            self._version = version
            self._held.clear()
            self._decisions.clear()

    def _holdings(self, identity: Identity) -> _Holdings:
        key = identity.principal, identity.groups
        found = self._held.get(key)
        if found is None:
            if len(self._held) >= PRINCIPALS_KEPT_MAX:
                self._held.clear()
            found = self._held[key] = _Holdings(self._access(), *key)
        return found

    def _judge(self, identity: Identity, permission: str, resource: Resource) -> Decision:
        principal = identity.principal
        if why := self._access().credentials.revoked(identity):
            return Decision(False, why, authenticated=False)
        if principal.kind == "broker_internal":
            return _BROKER
        if principal == BOOTSTRAP:
            return _FIRST if (permission, resource) == ("ManageCluster", CLUSTER) else _FIRST_ONLY
        if principal.kind not in GIVEN_KINDS:
            return _ANONYMOUS
        if principal in self._super_admins:
            return _SUPER_ADMIN
        return self._holdings(identity).find(permission, resource)


def refusal(
    identity: Identity, permission: str, resource: Resource, decision: Decision
) -> NotAllowed | NotAuthenticated:
    """The error of a decision.  Its text is the same whether the resource exists or not."""
    if not decision.authenticated:
        return NotAuthenticated(
            "this broker wants to know who asks", why=decision.reason, hint="give the client a token"
        )
    if identity.principal == BOOTSTRAP:
        return first_token_refusal(f"the first token has no permission {permission} on {resource}")
    return NotAllowed(
        f"{identity.principal} has no permission {permission} on {resource}",
        why=decision.reason,
        hint="an administrator binds a role to it; `danube security can` tells what applies",
    )


def first_token_refusal(what: str) -> NotAllowed:
    """The error of who goes on with the first token where an administrator's own is needed."""
    return NotAllowed(
        what,
        why=_FIRST_ONLY.reason,
        hint="make an administrator and use its token: `danube security bindings create admins user:NAME"
        " --role admin --on cluster`, then `danube security tokens issue user:NAME`",
    )


EVERYBODY: Final = Authority(Access, enforced=False)
