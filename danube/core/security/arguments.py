"""Arguments of operations: a struct for each row of the table, or the command that the operation commits.

A client's map becomes such a struct in one place (:mod:`danube.broker.operations.arguments`).  Nil counts as
missing there, but where the default is UNSET.  A name that a struct does not have is ignored: clients may be
newer.  Additions therefore have defaults.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import UNSET, Meta, Struct, UnsetType

from danube.core.partition.policy import FailurePolicy

Count = Annotated[int, Meta(ge=0)]
OFFSET_MAX: Final = 1 << 62


class Nothing(Struct, frozen=True):
    pass


class Page(Struct, frozen=True):
    """Which entries of a list: with ``prefix``, behind ``after``; ``limit`` 0: all, in a plain list."""

    after: str = ""
    limit: Count = 0
    prefix: str = ""


# -- namespaces, tenants and topics -------------------------------------------------------------------


class AuditLines(Page, frozen=True):
    """Which audit lines; ``prefix`` is of the resource, and times are as in the lines.

    ``newest``: the last ones instead, of what each worker wrote last.
    """

    since: str = ""
    until: str = ""
    principal: str = ""
    operation: str = ""
    resource: str = ""
    outcome: str = ""
    newest: bool = False


class Namespace(Struct, frozen=True):
    namespace: str


class NamespaceLimits(Struct, frozen=True):
    namespace: str
    policy: dict[str, Any] = {}  # the fields that change


class TenantLimits(Struct, frozen=True):
    name: str
    namespaces: tuple[str, ...] | None = None
    quota: dict[str, Any] = {}  # the fields that change


class Topics(Page, frozen=True):
    namespace: str | None = None


class Topic(Struct, frozen=True):
    topic: str


class NewTopic(Struct, frozen=True):
    topic: str
    partitions: int = 0
    policy: dict[str, Any] = {}  # the fields that are not as usual
    ensure: bool = False


class TopicChange(Struct, frozen=True):
    topic: str
    policy: dict[str, Any] = {}  # the fields that change


class TopicSubscription(Struct, frozen=True):
    topic: str
    subscription: str


class SubscriptionChange(Struct, frozen=True):
    topic: str
    subscription: str
    failure: FailurePolicy | UnsetType | None = UNSET
    max_unacked: Count | UnsetType = UNSET


# -- a partition --------------------------------------------------------------------------------------


class Segments(Page, frozen=True):
    after_offset: Count = 0


class Subscription(Struct, frozen=True):
    subscription: str


class Start(Struct, frozen=True):
    """A place in a partition: ``kind`` is earliest, latest, offset or time."""

    kind: str = ""
    value: Count = 0


class RowMark(Struct, frozen=True):
    offset: Count


class Seek(Struct, frozen=True):
    subscription: str
    kind: str = ""
    value: int | UnsetType = UNSET  # 0, but nil is no place


class FailureChange(Struct, frozen=True):
    subscription: str
    failure: FailurePolicy = FailurePolicy()


class Settlement(Struct, frozen=True):
    """``acks``: uint64[n][2]; ``nacks``: offset, delay in ms (-1: the policy's) and reason of each."""

    subscription: str
    acks: bytes = b""
    nacks: list[tuple[int, int, str]] = []


class Loss(Struct, frozen=True):
    end_offset: Count = OFFSET_MAX
    dry_run: bool = False


class Staged(Struct, frozen=True):
    topic_id: Count
    objects: bytes


# -- schemas ------------------------------------------------------------------------------------------


class NewSchema(Struct, frozen=True):
    subject: str
    schema_type: str
    definition: bytes = b""
    description: str = ""
    created_by: str = ""
    tags: tuple[str, ...] = ()


class Named(Struct, frozen=True):
    """A subject by its name or, without one, by its id."""

    subject: str | None = None
    schema_id: Count | None = None


class Version(Named, frozen=True):
    version: Count = 0  # the latest


class Versions(Page, frozen=True):
    subject: str | None = None
    schema_id: Count | None = None


class SchemaCheck(Named, frozen=True, kw_only=True):
    schema_type: str
    definition: bytes = b""
    compatibility: str = ""  # the subject's


class Difference(Named, frozen=True, kw_only=True):
    old: Count
    new: Count


class TopicSchemaChange(Struct, frozen=True):
    topic: str
    subject: str | None = None
    validation: str | None = None
    validate_payload: bool | None = None


# -- access -------------------------------------------------------------------------------------------


class Bindings(Page, frozen=True):
    scope: str | None = None
    resource: str | None = None


class BindingPlace(Struct, frozen=True):
    id: str
    scope: str
    resource_name: str = ""


class NewApiKey(Struct, frozen=True):
    principal: str
    id: str = ""
    ttl_s: Count = 0  # for ever
    description: str = ""


class NewRevocation(Struct, frozen=True):
    kind: str
    value: str
    before_us: Count | None = None
    ttl_s: Count | None = None
    reason: str = ""


class Revoked(Struct, frozen=True):
    kind: str
    value: str


class NewToken(Struct, frozen=True):
    principal: str = ""  # who asks
    ttl_s: Count | None = None


class Question(Struct, frozen=True):
    permission: str
    principal: str = ""  # who asks
    scope: str = "topic"
    resource_name: str = ""
    groups: tuple[str, ...] = ()  # of a principal who is named


# -- storage and the cluster --------------------------------------------------------------------------


class StorageRows(Page, frozen=True):
    topic: str = ""


class Activation(Struct, frozen=True):
    broker_id: str
    reason: str = ""


class Unload(Struct, frozen=True):
    broker_id: str
    namespaces_include: list[str] = []
    namespaces_exclude: list[str] = []
    dry_run: bool = False


class Forget(Struct, frozen=True):
    broker_id: str
    accept_loss: bool = False


class Rebalance(Struct, frozen=True):
    max_moves: Count = 0  # as many as the settings say
    dry_run: bool = False
