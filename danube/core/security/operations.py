"""The table of operations: everything that can be asked of a broker, and what it needs.

There is one row for each operation of ADMIN, each kind of frame that a native client sends, and each gRPC
method.  A law test compares the keys with what is served, so nothing is served without a row.

A row's needs are read from the request itself: an Admin, the body of a frame, or a message of gRPC.  All
needs of a request must be met.  Rows on a handle and on an id have none: the handle was judged when it was
opened, and the door that resolves the id judges the row's permission on the topic behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from functools import partial
from typing import Any, Final, NamedTuple

from msgspec import Struct

from danube.core.metadata.commands import (
    AddPartitions,
    Binding,
    CreateNamespace,
    DeleteApiKey,
    DeleteNamespace,
    DeleteRole,
    DeleteSchemaVersion,
    DeleteTenant,
    DeleteTopic,
    Role,
    SetCompatibility,
)
from danube.core.metadata.machine import Metadata
from danube.core.metadata.roles import resource_in
from danube.core.security import arguments as of
from danube.core.security.authority import (
    CLUSTER,
    SOMEWHERE,
    Authority,
    Resource,
    first_token_refusal,
    namespace_of,
    namespace_resource,
    refusal,
    somewhere_in,
    subject_resource,
    topic_resource,
)
from danube.core.security.principals import BOOTSTRAP, Identity
from danube.core.security.results import RESULTS
from danube.errors import InvalidArgument, InvalidName

OWN_TOKEN_TTL_S_MAX: Final = 86_400  # of a token that one has signed for oneself
OPEN: Final = "open"  # in the place of a permission: no credential is needed
SIGNED_IN: Final = "signed in"  # the same: any credential will do


class Effect(StrEnum):
    READ = "read"
    WRITE = "write"
    DESTROY = "destroy"  # what it takes away is gone for good


class Need(NamedTuple):
    """A permission on a resource; ``otherwise`` is another right to the same, asked where it is missing.

    ``why``: the reason of the need, where that is no rule of this table alone.
    """

    permission: str
    resource: Resource
    otherwise: Callable[[Authority, Identity, Metadata], bool] | None = None
    why: str = ""


Needs = Callable[[Any, Metadata], Iterable[Need]]


class Place(NamedTuple):
    """Where a row's permission is needed; ``find`` tells the resources of a request."""

    says: str
    find: Callable[[Any, Metadata], Iterable[Resource]]


class Row(NamedTuple):
    name: str
    effect: Effect
    permission: str  # or OPEN, or SIGNED_IN
    where: str
    says: str
    needs: tuple[Needs, ...] = ()
    args: type[Struct] = of.Nothing  # of an operation of ADMIN
    http: tuple[str, str] | None = None  # its method and path
    mcp: str | None = None  # its tool

    @property
    def result(self) -> Any:
        """The type of an operation's answer; None: an answer without content."""
        return RESULTS[self.name]

    @property
    def audited(self) -> bool:
        return self.effect is not Effect.READ


def judge(authority: Authority, identity: Identity, row: Row, request: Any, state: Metadata) -> None:
    """Raise NotAllowed or NotAuthenticated unless the identity may have this request carried out."""
    if not authority.enforced or row.permission == OPEN:
        return
    if identity.principal.kind == "anonymous":
        authority.demand(identity, row.permission, CLUSTER)
    if identity.principal == BOOTSTRAP:
        _judge_first_token(authority, identity, row)
        return
    for needs in row.needs:
        for need in needs(request, state):
            decision = authority.decide(identity, need.permission, need.resource)
            if decision.allowed or (need.otherwise and need.otherwise(authority, identity, state)):
                continue
            if need.why:
                decision = decision._replace(reason=need.why)
            raise refusal(identity, need.permission, need.resource, decision)


def _judge_first_token(authority: Authority, identity: Identity, row: Row) -> None:
    """The first token has its own list of rows, whatever ManageCluster is needed for besides."""
    if row.name not in FIRST_TOKEN:
        raise first_token_refusal(f"{row.name} is not open to the first token")
    authority.demand(identity, "ManageCluster", CLUSTER)


# -- what a request names -----------------------------------------------------------------------------


def value_in(request: Any, path: str) -> Any:
    """A field of the request, by names with dots between them; None if it is missing."""
    for name in path.split("."):
        request = request.get(name) if isinstance(request, dict) else getattr(request, name, None)
    return request


def _text(request: Any, path: str) -> str:
    """A text of the request; "" where it is missing or no text: then only the cluster's rights count."""
    value = value_in(request, path)
    return value if isinstance(value, str) else ""


def _texts(request: Any, path: str) -> tuple[str, ...]:
    """A list of texts; anything else in its place is taken for no role's name, which nobody may bind."""
    value = value_in(request, path)
    found = list(value) if isinstance(value, Iterable) else [value]
    return tuple(one if isinstance(one, str) else "" for one in found)


_AT_CLUSTER: Final = Place("the cluster", lambda request, state: (CLUSTER,))
_SOMEWHERE: Final = Place("anything: it lists what may be looked up", lambda request, state: (SOMEWHERE,))
_HANDLE: Final = Place("the topic of a handle, judged when it is opened", lambda request, state: ())
_ID: Final = Place("the topic of an id, judged by the door that resolves it", lambda request, state: ())


def _topic(path: str) -> Place:
    return Place("the topic", lambda request, state: (topic_resource(_text(request, path)),))


def _namespace(path: str) -> Place:
    return Place("the namespace", lambda request, state: (namespace_resource(_text(request, path)),))


def _within(path: str) -> Place:
    says = "anything in the namespace: it lists what may be looked up"
    return Place(says, lambda request, state: (somewhere_in(_text(request, path)),))


def _subject(path: str) -> Place:
    return Place("the subject", lambda request, state: (subject_resource(_text(request, path)),))


def _topic_or_cluster(path: str) -> Place:
    def find(request: Any, state: Metadata) -> Iterable[Resource]:
        name = _text(request, path)
        return (topic_resource(name) if name else CLUSTER,)

    return Place("the topic, or the cluster if none is named", find)


# -- further needs ------------------------------------------------------------------------------------


def _also(permission: str, path: str, of: Callable[[str], Resource] = topic_resource) -> Needs:
    """The permission on one more resource, if the request names it."""

    def needs(request: Any, state: Metadata) -> Iterator[Need]:
        if name := _text(request, path):
            yield Need(permission, of(name))

    return needs


def _own_subscription(topic_path: str) -> Needs:
    """Where subscriptions are named after their consumers, another's needs the right to manage the topic."""

    def needs(request: Any, state: Metadata) -> Iterator[Need]:
        topic = topic_resource(_text(request, topic_path))
        limits = state.quotas.effective(namespace_of(topic))
        if limits is not None and limits.subscription_auth == "prefix":
            name = _text(request, "subscription") or _text(request, "args.subscription")

            def own(authority: Authority, identity: Identity, state: Metadata) -> bool:
                mine = identity.principal.name
                return name == mine or name.startswith(tuple(f"{mine}{mark}" for mark in "-._"))

            why = "the namespace has subscriptions named after who consumes (subscription_auth: prefix)"
            yield Need("ManageTopic", topic, own, why)

    return needs


def _ends_of(request: Any, state: Metadata) -> Iterator[Need]:
    """Whoever reads, writes or looks at a topic may know where it ends."""
    topic = topic_resource(_text(request, "partition"))

    def otherwise(authority: Authority, identity: Identity, state: Metadata) -> bool:
        return any(authority.decide(identity, one, topic).allowed for one in ("Produce", "View"))

    yield Need("Consume", topic, otherwise)


def _created_topic(request: Any, state: Metadata) -> Iterator[Need]:
    if value_in(request, "create"):
        yield Need("Produce", topic_resource(_text(request, "topic")))


def _schema_of_new_topic(topic_path: str) -> Needs:
    """A topic that is made with a subject is configured with it."""

    def needs(request: Any, state: Metadata) -> Iterator[Need]:
        if subject := _text(request, "schema_subject"):
            yield Need("ManageSchema", topic_resource(_text(request, topic_path)))
            yield _reading(subject)

    return needs


def _reading(subject: str, shown: Resource | None = None) -> Need:
    resource = subject_resource(subject)
    return Need("Lookup", shown or resource, partial(_may_read, subject))


def _read_subject(path: str) -> Needs:
    """To read a subject: Lookup on it, or on a topic that follows it."""

    def needs(request: Any, state: Metadata) -> Iterator[Need]:
        yield _reading(_text(request, path))

    return needs


def _read_named_subject(path: str) -> Needs:
    """Like _read_subject, if the request names one."""

    def needs(request: Any, state: Metadata) -> Iterator[Need]:
        if subject := _text(request, path):
            yield _reading(subject)

    return needs


def _read_schema(subject_path: str, id_path: str) -> Needs:
    """A schema by its subject, or by its id: then a refusal must not tell the subject's name."""

    def needs(request: Any, state: Metadata) -> Iterator[Need]:
        number = value_in(request, id_path)
        if (subject_path and value_in(request, subject_path) is not None) or not isinstance(number, int):
            yield _reading(_text(request, subject_path))
            return
        found = state.registry.with_id(number)
        yield _reading("" if found is None else found.subject, Resource("schema", str(number)))

    return needs


def _may_read(subject: str, authority: Authority, identity: Identity, state: Metadata) -> bool:
    if authority.decide(identity, "Lookup", subject_resource(subject)).allowed:
        return True
    for namespace in state.registry.namespaces_of(subject):
        if authority.decide(identity, "Lookup", namespace_resource(namespace)).allowed:
            return True
    for name in authority.topics_held(identity):
        record = state.find_topic(name)
        if record is not None and record.schema is not None and record.schema.subject == subject:
            return authority.decide(identity, "Lookup", topic_resource(name)).allowed
    return False


def _read_roles(request: Any, state: Metadata) -> Iterator[Need]:
    """Roles are read by whoever may view the cluster, or may bind any."""
    yield Need("View", CLUSTER, partial(_manages, SOMEWHERE))


def _read_bindings(scope_path: str, name_path: str) -> Needs:
    """Bindings are read by whoever may view the cluster; those in a namespace also by whoever manages it."""

    def needs(request: Any, state: Metadata) -> Iterator[Need]:
        scope, name = _text(request, scope_path), _text(request, name_path)
        namespace = namespace_of(Resource(scope, name.removeprefix("/") if scope == "namespace" else name))
        delegated = partial(_manages, Resource("namespace", namespace)) if namespace else None
        yield Need("View", CLUSTER, delegated)

    return needs


def _manages(resource: Resource, authority: Authority, identity: Identity, state: Metadata) -> bool:
    return authority.decide(identity, "ManageNamespace", resource).allowed


def _bind(path: str, name_path: str, *, makes: bool) -> Needs:
    """Make, replace or delete a binding: ManageCluster, or what a namespace's administrator may give away."""

    def needs(request: Any, state: Metadata) -> Iterator[Need]:
        yield Need("ManageCluster", CLUSTER, partial(_may_bind, request, path, name_path, makes))

    return needs


def _may_bind(
    request: Any, path: str, name_path: str, makes: bool,
    authority: Authority, identity: Identity, state: Metadata,
) -> bool:  # fmt: skip
    scope, name = _text(request, f"{path}scope"), _text(request, name_path)
    try:
        resource_name = resource_in(scope, _text(request, f"{path}resource_name"))
    except (InvalidArgument, InvalidName):
        return False
    present = state.access.find_binding(scope, resource_name, name)
    bindings = [present] if present is not None else []
    if makes:
        roles = _texts(request, f"{path}role_names")
        kind, who = _text(request, f"{path}principal_type"), _text(request, f"{path}principal_name")
        bindings.append(Binding(name, kind, who, roles, scope, resource_name))
    return bool(bindings) and all(authority.may_bind(identity, one).allowed for one in bindings)


def _for_oneself(request: Any, state: Metadata) -> Iterator[Need]:
    """Whatever anybody may ask about himself, and about others with ManageCluster."""

    def own(authority: Authority, identity: Identity, state: Metadata) -> bool:
        ttl_s = value_in(request, "args.ttl_s")
        short = ttl_s is None or (isinstance(ttl_s, int) and ttl_s <= OWN_TOKEN_TTL_S_MAX)
        named = value_in(request, "args.principal")
        alone = named is None or named in ("", str(identity.principal))
        return short and alone and not value_in(request, "args.groups")

    yield Need("ManageCluster", CLUSTER, own)


# -- the table ----------------------------------------------------------------------------------------

READ, WRITE, DESTROY = Effect


def _row(
    name: str, effect: Effect, permission: str, place: Place, says: str, *more: Needs, **columns: Any
) -> Row:
    def needs(request: Any, state: Metadata) -> Iterator[Need]:
        for resource in place.find(request, state):
            yield Need(permission, resource)

    return Row(name, effect, permission, place.says, says, (needs, *more), **columns)


def _special(
    name: str, effect: Effect, permission: str, where: str, says: str, *needs: Needs, **columns: Any
) -> Row:
    return Row(name, effect, permission, where, says, needs, **columns)


_ARGS_TOPIC: Final = _topic("args.topic")
_PARTITION: Final = _topic("partition")
_NAMESPACE: Final = "/v1/namespaces/{namespace}"
_TOPIC: Final = "/v1/topics/{namespace}/{name}"
_SUBSCRIPTION: Final = f"{_TOPIC}/subscriptions/{{subscription}}"
_SUBJECT: Final = "/v1/schemas/{subject}"
_LETTERS: Final = "dead_letter_topic"
_READABLE: Final = "the subject, or a topic that follows it"
_BINDERS: Final = "the cluster; also with ManageNamespace anywhere"
_DELEGATED: Final = "the cluster, or within a namespace that the caller manages"

ADMIN_ROWS: Final = (
    # topics
    _row("status", READ, "View", _AT_CLUSTER, "the broker's state",
         args=of.Nothing, http=("GET", "/v1/status")),
    _row("audit", READ, "ManageCluster", _AT_CLUSTER, "audit lines of this broker's host",
         args=of.AuditLines, http=("GET", "/v1/audit"), mcp="list_audit_events"),
    _row("namespaces", READ, "Lookup", _SOMEWHERE, "namespaces",
         args=of.Page, http=("GET", "/v1/namespaces"), mcp="list_namespaces"),
    _row("create_namespace", WRITE, "ManageNamespace", _namespace("args.namespace"), "make a namespace",
         args=CreateNamespace, http=("PUT", _NAMESPACE), mcp="create_namespace"),
    _row("delete_namespace", DESTROY, "ManageNamespace", _namespace("args.namespace"), "delete an empty one",
         args=DeleteNamespace, http=("DELETE", _NAMESPACE), mcp="delete_namespace"),
    _row("namespace_policy", READ, "View", _namespace("args.namespace"), "limits of a namespace",
         args=of.Namespace, http=("GET", _NAMESPACE + "/policy"), mcp="get_namespace_policies"),
    _row("set_namespace_policy", WRITE, "ManageNamespace", _namespace("args.namespace"), "change them",
         args=of.NamespaceLimits, http=("PUT", _NAMESPACE + "/policy"), mcp="set_namespace_policy"),
    _row("tenants", READ, "View", _AT_CLUSTER, "tenants with their quotas",
         args=of.Page, http=("GET", "/v1/tenants")),
    _row("put_tenant", WRITE, "ManageCluster", _AT_CLUSTER, "make or change a tenant",
         args=of.TenantLimits, http=("PUT", "/v1/tenants/{tenant}")),
    _row("delete_tenant", DESTROY, "ManageCluster", _AT_CLUSTER, "forget a tenant",
         args=DeleteTenant, http=("DELETE", "/v1/tenants/{tenant}")),
    _row("quotas", READ, "View", _AT_CLUSTER, "what is used of quotas",
         args=of.Page, http=("GET", "/v1/quotas"), mcp="get_quota_usage"),
    _row("list_topics", READ, "Lookup", _within("args.namespace"), "topics of a namespace, or all",
         args=of.Topics, http=("GET", "/v1/topics"), mcp="list_topics"),
    _row("topic", READ, "View", _ARGS_TOPIC, "a topic with its policy",
         args=of.Topic, http=("GET", _TOPIC), mcp="describe_topic"),
    _row("create_topic", WRITE, "ManageTopic", _ARGS_TOPIC, "make a topic",
         _also("Produce", f"args.policy.failure.{_LETTERS}"),
         args=of.NewTopic, http=("POST", "/v1/topics"), mcp="create_topic"),
    _row("delete_topic", DESTROY, "ManageTopic", _ARGS_TOPIC, "delete a topic and its records",
         args=DeleteTopic, http=("DELETE", _TOPIC), mcp="delete_topic"),
    _row("update_topic", WRITE, "ManageTopic", _ARGS_TOPIC, "change a topic's policy",
         _also("Produce", f"args.policy.failure.{_LETTERS}"), args=of.TopicChange, http=("PATCH", _TOPIC)),
    _row("add_partitions", WRITE, "ManageTopic", _ARGS_TOPIC, "give a topic more partitions",
         args=AddPartitions, http=("POST", _TOPIC + "/partitions")),
    _row("subscription_settings", READ, "View", _ARGS_TOPIC, "settings of a subscription",
         args=of.TopicSubscription, http=("GET", _SUBSCRIPTION + "/failure-policy"),
         mcp="get_subscription_failure_policy"),
    _row("set_subscription_settings", WRITE, "ManageTopic", _ARGS_TOPIC, "change them",
         _also("Produce", f"args.failure.{_LETTERS}"),
         args=of.SubscriptionChange, http=("PUT", _SUBSCRIPTION + "/failure-policy"),
         mcp="set_subscription_failure_policy"),
    _row("forget_subscription", DESTROY, "ManageTopic", _ARGS_TOPIC, "forget a subscription's settings",
         args=of.TopicSubscription),
    # at the owner of a partition
    _row("describe_partition", READ, "View", _PARTITION, "ends, sizes, producers",
         args=of.Nothing, http=("GET", _TOPIC + "/partitions")),
    _special("partition_ends", READ, "Consume", "the topic; with Produce or View as well",
             "first and last offsets, and what lies between without a record", _ends_of, args=of.Nothing),
    _row("row_mark", READ, "Produce", _PARTITION, "digest of the rows that a job has stored",
         args=of.RowMark),
    _row("storage", READ, "View", _PARTITION, "bytes of the partition by tier",
         args=of.Nothing, http=("GET", _TOPIC + "/storage")),
    _row("list_segments", READ, "Consume", _PARTITION, "uploaded segments",
         args=of.Segments, http=("GET", _TOPIC + "/segments")),
    _row("list_subscriptions", READ, "View", _PARTITION, "subscriptions of the partition",
         args=of.Page, http=("GET", _TOPIC + "/subscriptions"), mcp="list_subscriptions"),
    _row("describe_subscription", READ, "View", _PARTITION, "lag, consumers, what is in flight",
         args=of.Subscription, http=("GET", _SUBSCRIPTION), mcp="analyze_consumer_lag"),
    _row("subscription_progress", READ, "Consume", _PARTITION, "how far a subscription is, and what it lost",
         _own_subscription("partition"), args=of.Subscription),
    _row("offset_at", READ, "Consume", _PARTITION, "the offset of a start position", args=of.Start),
    _row("seek", DESTROY, "ManageTopic", _PARTITION, "move a subscription",
         args=of.Seek, http=("POST", _SUBSCRIPTION + "/seek"), mcp="seek_subscription"),
    _row("delete_subscription", DESTROY, "ManageTopic", _PARTITION, "delete a subscription",
         args=of.Subscription, http=("DELETE", _SUBSCRIPTION), mcp="unsubscribe"),
    _row("unblock", DESTROY, "ManageTopic", _PARTITION, "skip the record that blocks a subscription",
         args=of.Subscription, http=("POST", _SUBSCRIPTION + "/unblock"), mcp="unblock_subscription"),
    _row("set_failure_policy", WRITE, "ManageTopic", _PARTITION, "change a subscription's failure policy",
         _also("Produce", f"args.failure.{_LETTERS}"), args=of.FailureChange),
    _row("settle", WRITE, "Consume", _PARTITION, "acks and nacks of whoever holds the record",
         _own_subscription("partition"), args=of.Settlement),
    _row("seal", WRITE, "ManageTopic", _PARTITION, "seal what was written so far",
         args=of.Nothing, http=("POST", _TOPIC + "/seal")),
    _row("accept_loss", DESTROY, "ManageCluster", _AT_CLUSTER, "give up records that no disk has",
         args=of.Loss, http=("DELETE", _TOPIC + "/holes")),
    _row("install_staged", WRITE, "Replicate", _PARTITION, "take objects that a job made",
         _also("ManageTopic", "partition"), args=of.Staged),
    # schemas
    _row("schema.register", WRITE, "ManageSchema", _subject("args.subject"), "add a version",
         args=of.NewSchema, http=("POST", _SUBJECT), mcp="register_schema"),
    _special("schema.get", READ, "Lookup", _READABLE, "a version with its definition",
             _read_schema("args.subject", "args.schema_id"),
         args=of.Version, http=("GET", _SUBJECT + "/versions/{version}"), mcp="get_schema"),
    _special("schema.versions", READ, "Lookup", _READABLE, "versions of a subject",
             _read_schema("args.subject", "args.schema_id"),
         args=of.Versions, http=("GET", _SUBJECT + "/versions"), mcp="list_schema_versions"),
    _row("schema.subjects", READ, "Lookup", _SOMEWHERE, "subjects",
         args=of.Page, http=("GET", "/v1/schemas"), mcp="list_subjects"),
    _special("schema.check", READ, "Lookup", _READABLE, "compare a definition with a subject",
             _read_schema("args.subject", "args.schema_id"),
         args=of.SchemaCheck, http=("POST", _SUBJECT + "/check"), mcp="check_schema_compatibility"),
    _special("schema.diff", READ, "Lookup", _READABLE, "compare two versions",
             _read_schema("args.subject", "args.schema_id"),
         args=of.Difference, http=("GET", _SUBJECT + "/diff")),
    _row("schema.set_compatibility", WRITE, "ManageSchema", _subject("args.subject"), "change the mode",
         args=SetCompatibility, http=("PUT", _SUBJECT + "/compatibility"),
         mcp="set_schema_compatibility_mode"),
    _row("schema.delete_version", DESTROY, "ManageSchema", _subject("args.subject"), "delete a version",
         args=DeleteSchemaVersion, http=("DELETE", _SUBJECT + "/versions/{version}"),
         mcp="delete_schema_version"),
    _row("schema.delete", DESTROY, "ManageSchema", _subject("args.subject"), "delete a subject",
         args=of.Named, http=("DELETE", _SUBJECT)),
    _row("schema.configure_topic", WRITE, "ManageSchema", _ARGS_TOPIC, "let a topic follow a subject",
         _read_named_subject("args.subject"),
         args=of.TopicSchemaChange, http=("PUT", _TOPIC + "/schema"), mcp="configure_topic_schema"),
    _row("schema.topic", READ, "Lookup", _ARGS_TOPIC, "the subject that a topic follows",
         args=of.Topic, http=("GET", _TOPIC + "/schema"), mcp="get_topic_schema_config"),
    # access
    _special("roles", READ, "View", _BINDERS, "roles", _read_roles,
         args=of.Page, http=("GET", "/v1/roles"), mcp="list_roles"),
    _row("put_role", WRITE, "ManageCluster", _AT_CLUSTER, "make or change a role",
         args=Role, http=("POST", "/v1/roles"), mcp="create_role"),
    _row("delete_role", DESTROY, "ManageCluster", _AT_CLUSTER, "delete a role",
         args=DeleteRole, http=("DELETE", "/v1/roles/{role}"), mcp="delete_role"),
    _special("bindings", READ, "View", _DELEGATED, "bindings",
             _read_bindings("args.scope", "args.resource"),
         args=of.Bindings, http=("GET", "/v1/bindings"), mcp="list_bindings"),
    _special("put_binding", WRITE, "ManageCluster", _DELEGATED, "bind roles",
             _bind("args.", "args.id", makes=True),
         args=Binding, http=("POST", "/v1/bindings"), mcp="create_binding"),
    _special("delete_binding", DESTROY, "ManageCluster", _DELEGATED, "delete a binding",
             _bind("args.", "args.id", makes=False),
         args=of.BindingPlace, http=("DELETE", "/v1/bindings/{id}"), mcp="delete_binding"),
    _row("api_keys", READ, "ManageCluster", _AT_CLUSTER, "API keys, without their secrets",
         args=of.Page, http=("GET", "/v1/keys")),
    _row("create_api_key", WRITE, "ManageCluster", _AT_CLUSTER, "make an API key",
         args=of.NewApiKey, http=("POST", "/v1/keys")),
    _row("delete_api_key", DESTROY, "ManageCluster", _AT_CLUSTER, "delete an API key",
         args=DeleteApiKey, http=("DELETE", "/v1/keys/{id}")),
    _row("revocations", READ, "ManageCluster", _AT_CLUSTER, "credentials that are good no longer",
         args=of.Page, http=("GET", "/v1/revocations")),
    _row("revoke", DESTROY, "ManageCluster", _AT_CLUSTER, "take credentials back",
         args=of.NewRevocation, http=("POST", "/v1/revocations")),
    _row("delete_revocation", WRITE, "ManageCluster", _AT_CLUSTER, "let them be good again",
         args=of.Revoked, http=("DELETE", "/v1/revocations/{kind}/{value}")),
    _special("issue_token", WRITE, "ManageCluster", "the cluster; one's own, for a day at most: nothing",
             "sign a token", _for_oneself, args=of.NewToken, http=("POST", "/v1/tokens"), mcp="create_token"),
    _special("can", READ, "ManageCluster", "the cluster; about oneself: nothing",
             "whether a principal has a permission, and why", _for_oneself,
         args=of.Question, http=("GET", "/v1/can"), mcp="check_access"),
    # storage and cluster
    _row("storage_status", READ, "View", _topic_or_cluster("args.topic"), "bytes that are only on this host",
         args=of.StorageRows, http=("GET", "/v1/storage"), mcp="storage_status"),
    _row("brokers", READ, "View", _AT_CLUSTER, "brokers",
         args=of.Page, http=("GET", "/v1/brokers"), mcp="list_brokers"),
    _row("member_status", READ, "View", _AT_CLUSTER, "this member of the agreement",
         args=of.Nothing, http=("GET", "/v1/cluster"), mcp="cluster_status"),
    _row("deciding_broker", READ, "View", _AT_CLUSTER, "the broker that decides",
         args=of.Nothing, http=("GET", "/v1/leader"), mcp="get_leader"),
    _row("activate_broker", WRITE, "ManageBroker", _AT_CLUSTER, "let a broker take partitions",
         args=of.Activation, http=("POST", "/v1/brokers/{id}/activate"), mcp="activate_broker"),
    _row("unload_broker", WRITE, "ManageBroker", _AT_CLUSTER, "move a broker's partitions away",
         args=of.Unload, http=("POST", "/v1/brokers/{id}/unload"), mcp="unload_broker"),
    _row("forget_broker", DESTROY, "ManageBroker", _AT_CLUSTER, "forget a broker that is gone",
         args=of.Forget, http=("DELETE", "/v1/brokers/{id}")),
    _row("balance", READ, "View", _AT_CLUSTER, "load of the brokers",
         args=of.Nothing, http=("GET", "/v1/balance"), mcp="get_cluster_balance"),
    _row("rebalance", WRITE, "ManageCluster", _AT_CLUSTER, "even out the load",
         args=of.Rebalance, http=("POST", "/v1/rebalance"), mcp="trigger_rebalance"),
    _row("unload_topic", WRITE, "ManageTopic", _ARGS_TOPIC, "let other brokers take a topic",
         args=of.Topic, http=("POST", _TOPIC + "/unload"), mcp="unload_topic"),
)  # fmt: skip

NATIVE_ROWS: Final = (
    Row("HELLO", READ, OPEN, "", "present a credential"),
    Row("PING", READ, OPEN, "", "ask whether the broker is there"),
    _row("LOOKUP", READ, "Lookup", _topic("topic"), "find a topic; with `create` make it", _created_topic),
    _row("OPEN_PRODUCER", WRITE, "Produce", _PARTITION, "open a producer"),
    _row("CLOSE_PRODUCER", WRITE, "Produce", _HANDLE, "close it"),
    _row("PUBLISH", WRITE, "Produce", _HANDLE, "send a batch"),
    _row("SUBSCRIBE", WRITE, "Consume", _PARTITION, "open a consumer, and make its subscription",
         _own_subscription("partition"), _also("Produce", f"failure.{_LETTERS}")),
    _row("CLOSE_CONSUMER", WRITE, "Consume", _HANDLE, "close it"),
    _row("CREDIT", WRITE, "Consume", _HANDLE, "let more records come"),
    _row("ACK", WRITE, "Consume", _HANDLE, "acknowledge records"),
    _row("NACK", WRITE, "Consume", _HANDLE, "give records back"),
    Row("ADMIN", READ, SIGNED_IN, "", "carry out an operation, which has a row of its own"),
    Row("AUTHENTICATE", READ, SIGNED_IN, "", "present a newer credential"),
    Row("SHARE_MEMORY", READ, SIGNED_IN, "", "refused; earlier clients send it"),
)  # fmt: skip

_SCHEMA_TOPIC: Final = _topic("topic_name")
GRPC_ROWS: Final = (
    _row("/danube.ProducerService/CreateProducer", WRITE, "Produce", _topic("topic_name"),
         "open a producer, and make its topic", _read_named_subject("schema_ref.subject")),
    _row("/danube.ProducerService/SendMessage", WRITE, "Produce", _ID, "send a record"),
    _row("/danube.ConsumerService/Subscribe", WRITE, "Consume", _topic("topic_name"), "open a consumer",
         _own_subscription("topic_name")),
    _row("/danube.ConsumerService/ReceiveMessages", READ, "Consume", _ID, "receive records"),
    _row("/danube.ConsumerService/Ack", WRITE, "Consume", _ID, "acknowledge a record"),
    _row("/danube.ConsumerService/Nack", WRITE, "Consume", _ID, "give a record back"),
    _row("/danube.Discovery/TopicLookup", READ, "Lookup", _topic("topic"), "who serves a topic"),
    _row("/danube.Discovery/TopicPartitions", READ, "Lookup", _topic("topic"), "partitions of a topic"),
    Row("/danube.HealthCheck/HealthCheck", READ, SIGNED_IN, "", "whether an own producer or consumer lives"),
    _row("/danube.StorageService/ListSegmentDescriptors", READ, "Consume", _topic("topic"),
         "uploaded segments"),
    Row("/danube.AuthService/Authenticate", READ, OPEN, "", "exchange an API key for a token"),
    _row("/danube_schema.SchemaRegistry/RegisterSchema", WRITE, "ManageSchema", _subject("subject"),
         "add a version"),
    _special("/danube_schema.SchemaRegistry/GetSchema", READ, "Lookup", _READABLE, "a version by id",
             _read_schema("", "schema_id")),
    _special("/danube_schema.SchemaRegistry/GetLatestSchema", READ, "Lookup", _READABLE, "the latest version",
             _read_subject("subject")),
    _special("/danube_schema.SchemaRegistry/ListVersions", READ, "Lookup", _READABLE, "versions of a subject",
             _read_subject("subject")),
    _special("/danube_schema.SchemaRegistry/CheckCompatibility", READ, "Lookup", _READABLE,
             "compare a definition with a subject", _read_subject("subject")),
    _row("/danube_schema.SchemaRegistry/DeleteSchemaVersion", DESTROY, "ManageSchema", _subject("subject"),
         "delete a version"),
    _row("/danube_schema.SchemaRegistry/SetCompatibilityMode", WRITE, "ManageSchema", _subject("subject"),
         "change the mode"),
    _row("/danube_schema.SchemaRegistry/ConfigureTopicSchema", WRITE, "ManageSchema", _SCHEMA_TOPIC,
         "let a topic follow a subject", _read_named_subject("schema_subject")),
    _row("/danube_schema.SchemaRegistry/UpdateTopicValidationPolicy", WRITE, "ManageSchema", _SCHEMA_TOPIC,
         "change what is validated"),
    _row("/danube_schema.SchemaRegistry/GetTopicSchemaConfig", READ, "Lookup", _SCHEMA_TOPIC,
         "the subject that a topic follows"),
    _row("/danube_schema.SchemaRegistry/ListSubjects", READ, "Lookup", _SOMEWHERE, "subjects"),
    _row("/danube_admin.BrokerAdmin/ListBrokers", READ, "View", _AT_CLUSTER, "brokers"),
    _row("/danube_admin.BrokerAdmin/GetLeaderBroker", READ, "View", _AT_CLUSTER, "the broker that decides"),
    _row("/danube_admin.BrokerAdmin/ListNamespaces", READ, "Lookup", _SOMEWHERE, "namespaces"),
    _row("/danube_admin.BrokerAdmin/UnloadBroker", WRITE, "ManageBroker", _AT_CLUSTER,
         "move partitions away"),
    _row("/danube_admin.BrokerAdmin/ActivateBroker", WRITE, "ManageBroker", _AT_CLUSTER,
         "let a broker take partitions"),
    _row("/danube_admin.BrokerAdmin/GetClusterBalance", READ, "View", _AT_CLUSTER, "load of the brokers"),
    _row("/danube_admin.BrokerAdmin/TriggerRebalance", WRITE, "ManageCluster", _AT_CLUSTER,
         "even out the load"),
    _row("/danube_admin.ClusterAdmin/ClusterStatus", READ, "View", _AT_CLUSTER, "members"),
    _row("/danube_admin.ClusterAdmin/AddNode", WRITE, "ManageCluster", _AT_CLUSTER, "add a member"),
    _row("/danube_admin.ClusterAdmin/PromoteNode", WRITE, "ManageCluster", _AT_CLUSTER, "make a voter"),
    _row("/danube_admin.ClusterAdmin/RemoveNode", DESTROY, "ManageCluster", _AT_CLUSTER, "remove a member"),
    _row("/danube_admin.NamespaceAdmin/GetNamespaceTopics", READ, "Lookup", _within("name"), "topics"),
    _row("/danube_admin.NamespaceAdmin/GetNamespacePolicies", READ, "View", _namespace("name"), "limits"),
    _row("/danube_admin.NamespaceAdmin/CreateNamespace", WRITE, "ManageNamespace", _namespace("name"),
         "make a namespace"),
    _row("/danube_admin.NamespaceAdmin/DeleteNamespace", DESTROY, "ManageNamespace", _namespace("name"),
         "delete an empty one"),
    _row("/danube_admin.TopicAdmin/ListNamespaceTopics", READ, "Lookup", _within("name"), "topics"),
    _row("/danube_admin.TopicAdmin/ListBrokerTopics", READ, "Lookup", _SOMEWHERE, "topics of a broker"),
    _row("/danube_admin.TopicAdmin/CreateTopic", WRITE, "ManageTopic", _topic("name"), "make a topic",
         _schema_of_new_topic("name")),
    _row("/danube_admin.TopicAdmin/CreatePartitionedTopic", WRITE, "ManageTopic", _topic("base_name"),
         "make a partitioned topic", _schema_of_new_topic("base_name")),
    _row("/danube_admin.TopicAdmin/DeleteTopic", DESTROY, "ManageTopic", _topic("name"), "delete a topic"),
    _row("/danube_admin.TopicAdmin/UnloadTopic", WRITE, "ManageTopic", _topic("name"),
         "let other brokers take it"),
    _row("/danube_admin.TopicAdmin/ListSubscriptions", READ, "View", _topic("name"), "subscriptions"),
    _row("/danube_admin.TopicAdmin/Unsubscribe", DESTROY, "ManageTopic", _topic("topic"),
         "delete a subscription"),
    _row("/danube_admin.TopicAdmin/SetSubscriptionFailurePolicy", WRITE, "ManageTopic", _topic("topic"),
         "change a failure policy", _also("Produce", f"failure_policy.{_LETTERS}")),
    _row("/danube_admin.TopicAdmin/GetSubscriptionFailurePolicy", READ, "View", _topic("topic"), "read it"),
    _row("/danube_admin.TopicAdmin/DescribeTopic", READ, "View", _topic("name"), "a topic"),
    _row("/danube_admin.TopicAdmin/SetSubscriptionDispatchConfig", WRITE, "ManageTopic", _topic("topic"),
         "bound the records in flight"),
    _row("/danube_admin.TopicAdmin/GetSubscriptionDispatchConfig", READ, "View", _topic("topic"), "read it"),
    _row("/danube_admin.SecurityAdmin/CreateRole", WRITE, "ManageCluster", _AT_CLUSTER,
         "make or change a role"),
    _special("/danube_admin.SecurityAdmin/GetRole", READ, "View", _BINDERS, "a role", _read_roles),
    _special("/danube_admin.SecurityAdmin/ListRoles", READ, "View", _BINDERS, "roles", _read_roles),
    _row("/danube_admin.SecurityAdmin/DeleteRole", DESTROY, "ManageCluster", _AT_CLUSTER, "delete a role"),
    _special("/danube_admin.SecurityAdmin/CreateBinding", WRITE, "ManageCluster", _DELEGATED, "bind roles",
             _bind("binding.", "binding.id", makes=True)),
    _special("/danube_admin.SecurityAdmin/GetBinding", READ, "View", _DELEGATED, "a binding",
             _read_bindings("scope", "resource_name")),
    _special("/danube_admin.SecurityAdmin/ListBindings", READ, "View", _DELEGATED, "bindings of a resource",
             _read_bindings("scope", "resource_name")),
    _row("/danube_admin.SecurityAdmin/ListAllBindings", READ, "View", _AT_CLUSTER, "all bindings"),
    _special("/danube_admin.SecurityAdmin/DeleteBinding", DESTROY, "ManageCluster", _DELEGATED,
             "delete a binding", _bind("", "binding_id", makes=False)),
    Row("/grpc.health.v1.Health/Check", READ, OPEN, "", "whether the broker serves"),
    Row("/grpc.health.v1.Health/List", READ, OPEN, "", "the same for every service"),
    Row("/grpc.health.v1.Health/Watch", READ, OPEN, "", "the same, again and again"),
    Row("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", READ, SIGNED_IN, "", "what is served"),
    Row("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", READ, SIGNED_IN, "",
        "the same for older tools"),
)  # fmt: skip

ADMIN: Final = {row.name: row for row in ADMIN_ROWS}
NATIVE: Final = {row.name: row for row in NATIVE_ROWS}
GRPC: Final = {row.name: row for row in GRPC_ROWS}
# What the first token may ask for: it makes an administrator, who then does the rest.
FIRST_TOKEN: Final = frozenset(
    (
        "ADMIN", "AUTHENTICATE", "roles", "put_role", "bindings", "put_binding", "api_keys", "create_api_key",
        "issue_token", "can",
        *(
            f"/danube_admin.SecurityAdmin/{name}"
            for name in (
                "CreateRole", "GetRole", "ListRoles", "CreateBinding", "GetBinding", "ListBindings",
                "ListAllBindings",
            )
        ),
    )
)  # fmt: skip


def row_of(op: str) -> Row:
    """The row of an operation of ADMIN; raises InvalidArgument."""
    row = ADMIN.get(op)
    if row is None:
        raise unknown(op)
    return row


def unknown(op: str) -> InvalidArgument:
    """The error of an operation that is not there, or not where it was asked for."""
    return InvalidArgument(f"operation {op[:80]!r} is not known", hint="the client may be newer")
