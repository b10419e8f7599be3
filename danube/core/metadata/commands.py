"""Commands, records and changes of the metadata: plain values and their bytes.

A *command* is a proposed edit; it is stored and replicated as MessagePack.  A *change* is the result of one
applied command.  Everything is stored in full, defaults included: a default that moves in a
later version must not move the topics that were made under the old one.

The cluster's own commands are in :mod:`danube.core.cluster.commands`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, get_args, get_type_hints

import msgspec

from danube.core.cluster.commands import (
    AnyClusterCommand,
    ClusterChange,
    ClusterRecord,
    CompareAndSet,
    PutKey,
)
from danube.core.metadata.policies import LATER as LATER_OF_NAMESPACES
from danube.core.metadata.policies import NamespacePolicy, Tenant
from danube.core.partition.policy import LATER as LATER_OF_TOPICS
from danube.core.partition.policy import LATER_OF_FAILURES, FailurePolicy, TopicPolicy
from danube.errors import DanubeError, InvalidArgument, InvalidName, LimitExceeded, StorageIncompatible
from danube.ids import partition_name
from danube.limits import (
    METADATA_COMMAND_BYTES_MAX,
    METADATA_KEY_COMMAND_BYTES_MAX,
    METADATA_SCHEMA_COMMAND_BYTES_MAX,
)


class TopicSchema(msgspec.Struct, frozen=True):
    """Schema subject that a topic's records are checked against; ``validation`` is none, warn or enforce.

    With ``validate_payload`` each payload is read with the version that its batch names.  Without it,
    only the batch's schema id is checked.
    """

    subject: str
    validation: str = "warn"
    validate_payload: bool = False


class SubscriptionSettings(msgspec.Struct, frozen=True):
    """Settings of an operator for one subscription of a topic, whether the subscription exists or not."""

    failure: FailurePolicy | None = None
    max_unacked: int = 0  # 0: the topic's


class KnownConsumer(msgspec.Struct, frozen=True):
    """A consumer that clients know by a number; see :mod:`danube.core.metadata.known_consumers`."""

    consumer_id: int
    topic_id: int
    partition: int
    subscription: str
    mode: str
    name: str
    filters: tuple[str, ...] = ()


class Role(msgspec.Struct, frozen=True):
    """A name for a set of permissions (see :mod:`danube.core.metadata.roles`)."""

    name: str
    permissions: tuple[str, ...]
    system: bool = False


class Binding(msgspec.Struct, frozen=True):
    """Gives roles to a principal within a scope: the whole cluster, one namespace or one topic."""

    id: str
    principal_type: str
    principal_name: str
    role_names: tuple[str, ...]
    scope: str
    resource_name: str = ""


class ApiKey(msgspec.Struct, frozen=True):
    """A key that proves a principal (see :mod:`danube.core.metadata.credentials`)."""

    id: str
    secret_hash: bytes  # SHA-256 of the whole key
    principal: str  # kind:name
    created_us: int
    expires_us: int = 0  # 0: never
    description: str = ""


class Revocation(msgspec.Struct, frozen=True):
    """Credentials that are good no longer; ``before_us``: of a principal, those issued before that time."""

    kind: str
    value: str
    end_us: int  # no credential that is meant lives longer
    before_us: int = 0
    reason: str = ""


class CreateTopic(msgspec.Struct, frozen=True, kw_only=True, tag="create_topic", tag_field="kind"):
    """Make a topic; ``partitions`` 0 is one that is not partitioned.

    With ``ensure`` an existing topic with the same partitions and policy is a success.
    """

    topic: str
    policy: TopicPolicy
    created_us: int
    partitions: int = 0
    ensure: bool = False


class DeleteTopic(msgspec.Struct, frozen=True, kw_only=True, tag="delete_topic", tag_field="kind"):
    """Delete a topic; with a ``topic_id`` only this incarnation of the name (0: whichever it is)."""

    topic: str
    topic_id: int = 0


class UpdatePolicy(msgspec.Struct, frozen=True, kw_only=True, tag="update_policy", tag_field="kind"):
    topic: str
    policy: TopicPolicy


class AddPartitions(msgspec.Struct, frozen=True, kw_only=True, tag="add_partitions", tag_field="kind"):
    """Let a partitioned topic have ``partitions``, where it has fewer."""

    topic: str
    partitions: int


class CreateNamespace(msgspec.Struct, frozen=True, kw_only=True, tag="create_namespace", tag_field="kind"):
    namespace: str
    ensure: bool = False


class DeleteNamespace(msgspec.Struct, frozen=True, kw_only=True, tag="delete_namespace", tag_field="kind"):
    """Delete a namespace that holds no topic."""

    namespace: str


class ConfigureTopicSchema(
    msgspec.Struct, frozen=True, kw_only=True, tag="configure_topic_schema", tag_field="kind"
):
    """Check a topic's records against a subject that exists; None checks nothing any more."""

    topic: str
    schema: TopicSchema | None = None


class SetSubscriptionSettings(
    msgspec.Struct, frozen=True, kw_only=True, tag="set_subscription_settings", tag_field="kind"
):
    topic: str
    subscription: str
    settings: SubscriptionSettings


class ForgetSubscription(
    msgspec.Struct, frozen=True, kw_only=True, tag="forget_subscription", tag_field="kind"
):
    """A subscription was deleted from one partition (-1: from all): so are its known consumers there.

    Its settings go with its last partition: at once where the topic has one, else with -1.
    """

    topic: str
    subscription: str
    partition: int = -1
    topic_id: int = 0


class RegisterSchema(msgspec.Struct, frozen=True, kw_only=True, tag="register_schema", tag_field="kind"):
    """Add a version to a subject, which is made where ``after_revision`` is 0.

    The proposer has compared the definition with the subject at that revision; a later change of the subject
    refuses it.  ``compatibility`` is the mode of a new subject.
    """

    subject: str
    after_revision: int
    schema_type: str
    definition: bytes
    fingerprint: str
    created_us: int
    compatibility: str
    compiled: bytes = b""
    description: str = ""
    created_by: str = ""
    tags: tuple[str, ...] = ()


class DeleteSchemaVersion(
    msgspec.Struct, frozen=True, kw_only=True, tag="delete_schema_version", tag_field="kind"
):
    subject: str
    version: int


class DeleteSubject(msgspec.Struct, frozen=True, kw_only=True, tag="delete_subject", tag_field="kind"):
    """Delete a subject that no topic is configured with."""

    subject: str


class SetCompatibility(msgspec.Struct, frozen=True, kw_only=True, tag="set_compatibility", tag_field="kind"):
    subject: str
    compatibility: str


class KnowConsumer(msgspec.Struct, frozen=True, kw_only=True, tag="know_consumer", tag_field="kind"):
    """Keep a consumer's number; beyond ``known_max`` the one that was kept first is forgotten.

    The bound travels with the command, so that machines of different versions forget the same.
    """

    consumer: KnownConsumer
    known_max: int


class PutRole(msgspec.Struct, frozen=True, kw_only=True, tag="put_role", tag_field="kind"):
    role: Role


class DeleteRole(msgspec.Struct, frozen=True, kw_only=True, tag="delete_role", tag_field="kind"):
    name: str


class PutBinding(msgspec.Struct, frozen=True, kw_only=True, tag="put_binding", tag_field="kind"):
    binding: Binding


class DeleteBinding(msgspec.Struct, frozen=True, kw_only=True, tag="delete_binding", tag_field="kind"):
    scope: str
    resource_name: str
    id: str


class PutApiKey(msgspec.Struct, frozen=True, kw_only=True, tag="put_api_key", tag_field="kind"):
    key: ApiKey


class DeleteApiKey(msgspec.Struct, frozen=True, kw_only=True, tag="delete_api_key", tag_field="kind"):
    id: str


class Revoke(msgspec.Struct, frozen=True, kw_only=True, tag="revoke", tag_field="kind"):
    """Take credentials back, and drop the revocations that have ended by ``now_us``."""

    revocation: Revocation
    now_us: int


class DeleteRevocation(msgspec.Struct, frozen=True, kw_only=True, tag="delete_revocation", tag_field="kind"):
    revoked: str  # its kind
    value: str


class SetNamespacePolicy(
    msgspec.Struct, frozen=True, kw_only=True, tag="set_namespace_policy", tag_field="kind"
):
    namespace: str
    policy: NamespacePolicy


class PutTenant(msgspec.Struct, frozen=True, kw_only=True, tag="put_tenant", tag_field="kind"):
    tenant: Tenant


class DeleteTenant(msgspec.Struct, frozen=True, kw_only=True, tag="delete_tenant", tag_field="kind"):
    """Forget a tenant; its namespaces and their policies stay."""

    name: str


TopicEdit = UpdatePolicy | AddPartitions | ConfigureTopicSchema | SetSubscriptionSettings | ForgetSubscription
TopicCommand = CreateTopic | DeleteTopic | TopicEdit
NamespaceCommand = CreateNamespace | DeleteNamespace
SchemaCommand = RegisterSchema | DeleteSchemaVersion | DeleteSubject | SetCompatibility
CredentialCommand = PutApiKey | DeleteApiKey | Revoke | DeleteRevocation
AccessCommand = PutRole | DeleteRole | PutBinding | DeleteBinding | CredentialCommand
QuotaCommand = SetNamespacePolicy | PutTenant | DeleteTenant
OtherCommand = NamespaceCommand | SchemaCommand | AccessCommand | QuotaCommand | KnowConsumer
Command = TopicCommand | OtherCommand | AnyClusterCommand


class TopicRecord(msgspec.Struct, frozen=True):
    """One topic as it is now.  ``topic_id`` is never used again, not even by the same name."""

    topic: str
    topic_id: int
    partitions: int
    policy: TopicPolicy
    created_us: int
    schema: TopicSchema | None = None
    settings: dict[str, SubscriptionSettings] = {}  # by subscription; never changed in place

    @property
    def partition_count(self) -> int:
        """Partitions that exist: 1 for a topic that is not partitioned."""
        return max(1, self.partitions)

    def physical_name(self, partition: int) -> str:
        """Name of partition ``partition``: the topic's own where it is not partitioned."""
        return partition_name(self.topic, partition) if self.partitions else self.topic

    @property
    def physical_names(self) -> list[str]:
        """Names of all partitions, in order."""
        return [self.physical_name(partition) for partition in range(self.partition_count)]


class TopicCreated(msgspec.Struct, frozen=True):
    record: TopicRecord


class TopicDeleted(msgspec.Struct, frozen=True):
    record: TopicRecord


class TopicUpdated(msgspec.Struct, frozen=True):
    """``record`` is the topic with its new policy, schema or subscription settings."""

    record: TopicRecord


class NamespaceCreated(msgspec.Struct, frozen=True):
    namespace: str


class NamespaceDeleted(msgspec.Struct, frozen=True):
    namespace: str


class QuotasChanged(msgspec.Struct, frozen=True):
    """Other limits hold for the topics of these namespaces."""

    namespaces: tuple[str, ...]


TopicChange = TopicCreated | TopicDeleted | TopicUpdated
Change = TopicChange | NamespaceCreated | NamespaceDeleted | QuotasChanged | ClusterChange

# Result for the proposer: the record that its command made, changed or found; or why nothing was done.
Outcome = TopicRecord | ClusterRecord | DanubeError | None

_LATER: Final[dict[type, tuple[str, ...]]] = {
    NamespacePolicy: LATER_OF_NAMESPACES, TopicPolicy: LATER_OF_TOPICS, FailurePolicy: LATER_OF_FAILURES,
}  # fmt: skip
_SCALARS: Final = {int, float, str, bytes, bool, type(None)}
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(list[Command])


def in_full(value: Any) -> Any:
    """``value`` as maps and lists, with the fields that equal their default as well.

    Fields of a policy that came later are left out where they limit nothing: so the bytes of old ones stay.
    """
    if isinstance(value, msgspec.Struct):
        fields = {name: in_full(field) for name, field in msgspec.structs.asdict(value).items()}
        later = _LATER.get(type(value))
        if later is not None:
            fields = {name: field for name, field in fields.items() if field or name not in later}
        settings = value.__struct_config__
        return {settings.tag_field: settings.tag, **fields} if settings.tag_field else fields
    if isinstance(value, list | tuple):
        return [in_full(entry) for entry in value]
    if isinstance(value, dict):
        return {name: in_full(entry) for name, entry in value.items()}
    return value


@cache
def _flat(kind: type[msgspec.Struct]) -> bool:
    """Whether the encoder by itself writes every field: the usual commands need no detour then."""
    named = get_type_hints(kind).values()
    return not kind.__struct_config__.omit_defaults and all(
        set(get_args(one) or (one,)) <= _SCALARS for one in named
    )


def encode_command(command: Command) -> bytes:
    """Encode the command in full; raises a CallerError if it is too large or cannot be stored."""
    try:
        encoded = _encoder.encode(command if _flat(type(command)) else in_full(command))
    except UnicodeEncodeError as error:
        raise InvalidName("a text is not Unicode", why=str(error)) from None
    except OverflowError as error:
        raise InvalidArgument("a number is out of range", why=str(error)) from None
    limit = METADATA_COMMAND_BYTES_MAX
    if isinstance(command, RegisterSchema):
        limit = METADATA_SCHEMA_COMMAND_BYTES_MAX
    elif isinstance(command, PutKey | CompareAndSet):
        limit = METADATA_KEY_COMMAND_BYTES_MAX
    if len(encoded) > limit:
        why = f"it has {len(encoded)} bytes; the limit is {limit}"
        raise LimitExceeded("metadata command is too large", why=why, limit=limit)
    return encoded


def join_commands(encoded: list[bytes]) -> bytes:
    """A list of encoded commands, as decode_commands reads it."""
    return _encoder.encode([msgspec.Raw(command) for command in encoded])


def decode_commands(content: bytes | memoryview) -> list[Command]:
    """Decode a joined list of commands; raises StorageIncompatible for those of a newer version."""
    try:
        return _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StorageIncompatible(
            "metadata command cannot be read", why=str(error), hint="it was written by a newer version"
        ) from None
