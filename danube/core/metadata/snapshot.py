"""The metadata machine as bytes.

Little-endian: 4 bytes magic, 4 bytes CRC32C of what follows, then a MessagePack list.  The magic's digit is
the format version.  ``DNM1`` ends after the topics.  A machine with nothing else is still written as
``DNM1``, so earlier versions can read it.  ``DNM2`` adds the topics' records and the other parts of the
machine.  ``DNM3`` adds the cluster's part, and is written only if there is any.  ``DNM4`` adds API keys and
revocations, and is written only if there are any: an earlier version refuses it, where it would otherwise let
revoked credentials in.  The same holds for policies of namespaces and tenants, which it would not obey.
Fields may only be added at the end, each with a default.  See docs/formats/metadata.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from danube.core.batch.checksum import crc32c
from danube.core.cluster.commands import BrokerRecord, KeyRecord, Lease, Ownership, Reservation
from danube.core.cluster.state import ClusterState
from danube.core.metadata.commands import (
    ApiKey,
    Binding,
    KnownConsumer,
    Revocation,
    Role,
    SubscriptionSettings,
    TopicRecord,
    TopicSchema,
    in_full,
)
from danube.core.metadata.known_consumers import KnownConsumers
from danube.core.metadata.policies import NamespacePolicy, Tenant
from danube.core.metadata.quotas import Quotas
from danube.core.metadata.roles import Access
from danube.core.metadata.schemas import Registry, Subject
from danube.core.partition.policy import TopicPolicy
from danube.errors import Damage, StorageIncompatible

_MAGIC_TOPICS: Final = b"DNM1"
_MAGIC_PARTS: Final = b"DNM2"
_MAGIC: Final = b"DNM3"
_MAGIC_CREDENTIALS: Final = b"DNM4"
_MAGICS: Final = (_MAGIC_TOPICS, _MAGIC_PARTS, _MAGIC, _MAGIC_CREDENTIALS)
_INTEGER_BYTES: Final = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}  # behind MessagePack's mark of an integer
_MANY_FIELDS: Final = 0xDC  # how a MessagePack list of 16 and more begins: DNM3 and DNM4


class Stored(msgspec.Struct, array_like=True):
    """Content of a snapshot.  Policies are listed once each; a topic names its own by number, and others name
    topics by id."""

    index: int
    next_topic_id: int
    namespaces: list[str]
    policies: list[TopicPolicy]
    topics: list[tuple[str, int, int, int, int]]  # name, id, partitions, policy, created_us
    schemas: list[tuple[int, TopicSchema]] = []
    settings: list[tuple[int, dict[str, SubscriptionSettings]]] = []
    next_schema_id: int = 1
    subjects: list[Subject] = []
    known: list[KnownConsumer] = []
    roles: list[Role] = []
    bindings: list[Binding] = []
    agreed: tuple[int, int, int] = (0, 0, 0)  # index, term, now_us
    origins: list[tuple[str, int]] = []  # the one heard of longest ago first
    keys: list[KeyRecord] = []  # in order
    counters: list[tuple[str, int]] = []  # by name
    leases: list[Lease] = []  # by id
    brokers: list[BrokerRecord] = []  # by id
    owners: list[Ownership] = []  # by topic id and partition
    reservations: list[Reservation] = []  # the same; DNM3 leaves it out where there are none
    access_version: int = 0  # 0 without credentials; of DNM4, as are those that follow
    api_keys: list[ApiKey] = []  # by id
    revocations: list[Revocation] = []  # by kind and value
    policies_of_namespaces: list[tuple[str, NamespacePolicy]] = []  # by name
    tenants: list[Tenant] = []  # by name; both are left out where there are none


_LATER: Final = {
    name: getattr(TopicPolicy(), name) for name in ("retention_segments", "cleanup", "tombstone_retention_ms")
}
_PART_VALUES: Final = 1_024  # less than 0.1 ms
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Stored)


def encode(
    version: int, next_topic_id: int, namespaces: list[str], topics: list[TopicRecord], registry: Registry,
    consumers: KnownConsumers, access: Access, quotas: Quotas, cluster: ClusterState | None,
) -> bytes:  # fmt: skip
    """The bytes of a machine with these parts (topics by id, a cluster's where it is used); equal machines
    give equal bytes."""
    policies: dict[TopicPolicy, int] = {}
    for record in topics:
        policies.setdefault(record.policy, len(policies))

    def topic(record: TopicRecord) -> tuple[str, int, int, int, int]:
        return (
            record.topic, record.topic_id, record.partitions, policies[record.policy], record.created_us,
        )  # fmt: skip

    fields: list[Any] = [
        version, next_topic_id, namespaces, _in_full(list(policies)), _Many(topics, topic)
    ]  # fmt: skip
    more: list[Any] = [
        [(record.topic_id, in_full(record.schema)) for record in topics if record.schema is not None],
        [
            (record.topic_id, in_full(dict(sorted(record.settings.items()))))
            for record in topics
            if record.settings
        ],
        registry.next_schema_id, registry.stored(), in_full(list(consumers)), in_full(access.roles()),
        in_full(access.bindings()),
    ]  # fmt: skip
    magic = _MAGIC_TOPICS
    if access.credentials or quotas:
        magic, known = _MAGIC_CREDENTIALS, access.credentials
        fields += more + _of_cluster(cluster or ClusterState(), whole=True)
        access_version = access.version if known else 0  # one that DNM2 forgets is not told here either
        fields += [access_version, in_full(known.api_keys()), in_full(known.revocations())]
        if quotas:
            fields += [in_full(quotas.policies()), in_full(quotas.tenants())]
    elif cluster is not None:
        magic, fields = _MAGIC, fields + more + _of_cluster(cluster)
    elif registry.next_schema_id != 1 or any(part for part in more if part != 1):
        magic, fields = _MAGIC_PARTS, fields + more
    content = b"".join([_list_head(len(fields)), *map(_encoded, fields)])
    return magic + crc32c(content).to_bytes(4, "little") + content


class _Many:
    """Values of a long list, each made of its source when it is encoded."""

    def __init__(self, sources: Sequence[Any], value_of: Callable[[Any], Any]) -> None:
        self.sources, self.value_of = sources, value_of


def _encoded(field: Any) -> bytes:
    """Like the encoder, with long lists in parts, so that other threads run in between."""
    if isinstance(field, list):
        field = _Many(field, _itself)
    if not isinstance(field, _Many):
        return _encoder.encode(field)
    parts = [_list_head(len(field.sources))]
    for start in range(0, len(field.sources), _PART_VALUES):
        values = [field.value_of(source) for source in field.sources[start : start + _PART_VALUES]]
        parts.append(_encoder.encode(values)[len(_list_head(len(values))) :])
    return b"".join(parts)


def _list_head(length: int) -> bytes:
    """How a MessagePack list of this length begins."""
    if length < 16:
        return bytes([0x90 | length])
    if length < 1 << 16:
        return bytes([_MANY_FIELDS]) + length.to_bytes(2, "big")
    return b"\xdd" + length.to_bytes(4, "big")


def _itself(value: Any) -> Any:
    return value


def _of_cluster(cluster: ClusterState, *, whole: bool = False) -> list[Any]:
    agreement, keys = cluster.agreement, cluster.keys
    return [
        (agreement.index, agreement.term, agreement.now_us), agreement.origins(),
        keys.records(), keys.counters(), cluster.leases.records(),
        in_full(cluster.brokers.records()), cluster.owners.records(),
        *([cluster.reservations.records()] if whole or len(cluster.reservations) else []),
    ]  # fmt: skip


def cluster_of(stored: Stored) -> ClusterState:
    cluster = ClusterState()
    cluster.agreement.load(*stored.agreed, stored.origins)
    cluster.keys.load(stored.keys, stored.counters)
    cluster.leases.load(stored.leases)
    cluster.brokers.load(stored.brokers)
    cluster.owners.load(stored.owners)
    cluster.reservations.load(stored.reservations)
    return cluster


def _in_full(policies: list[TopicPolicy]) -> list[dict[str, Any]]:
    """Every field but those that came later and say nothing: so the bytes of old policies stay."""
    found: list[dict[str, Any]] = in_full(policies)
    return [
        {name: value for name, value in policy.items() if name not in _LATER or value != _LATER[name]}
        for policy in found
    ]


def _checked(snapshot: bytes) -> bytes:
    content = snapshot[8:]
    if snapshot[:3] != _MAGIC[:3] or int.from_bytes(snapshot[4:8], "little") != crc32c(content):
        raise Damage("metadata snapshot fails its checksum", size=len(snapshot))
    return content


def version_of(snapshot: bytes) -> int:
    """The version of a machine whose bytes these are, without decoding the rest; raises Damage."""
    content = _checked(snapshot)
    start = 3 if content[:1] == bytes([_MANY_FIELDS]) else 1
    size = _INTEGER_BYTES.get(content[start] if len(content) > start else 0, 0)
    try:
        return msgspec.msgpack.decode(content[start : start + 1 + size], type=int)
    except msgspec.DecodeError as error:
        raise Damage("metadata snapshot does not begin with a version", why=str(error)) from None


def decode(snapshot: bytes) -> Stored:
    """Decode a snapshot that ``encode`` made; raises Damage or StorageIncompatible."""
    magic = snapshot[:4]
    if magic[:3] == _MAGIC[:3] and magic not in _MAGICS:
        raise StorageIncompatible("metadata snapshot has a newer format", why=f"its magic is {magic!r}")
    content = _checked(snapshot)
    try:
        stored = _decoder.decode(content)
    except msgspec.DecodeError as error:
        raise StorageIncompatible("metadata snapshot cannot be read", why=str(error)) from None
    if (magic in (_MAGIC, _MAGIC_CREDENTIALS)) != (content[0] == _MANY_FIELDS):
        raise Damage("metadata snapshot has another content than its magic says", size=len(snapshot))
    return stored
