"""The metadata machine as bytes.

Little-endian: 4 bytes magic, 4 bytes CRC32C of what follows, then a MessagePack list.  The magic's digit
is the format version.  ``DNM1`` ends after the topics; a machine that holds nothing else is still
written so, and an earlier version can read it.  ``DNM2`` goes on with what the topics' records and the
other parts of the machine hold.  Fields may only be added at the end, each with a default.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from danube.core.checksum import crc32c
from danube.core.commands import (
    Binding,
    KnownConsumer,
    Role,
    SubscriptionSettings,
    TopicRecord,
    TopicSchema,
    in_full,
)
from danube.core.policy import TopicPolicy
from danube.core.registry import Subject
from danube.errors import Damage, StorageIncompatible

_MAGIC_TOPICS: Final = b"DNM1"
_MAGIC: Final = b"DNM2"


class Stored(msgspec.Struct, frozen=True):
    """What a snapshot holds."""

    index: int
    next_topic_id: int
    namespaces: list[str]
    topics: list[TopicRecord]  # by id
    next_schema_id: int
    subjects: list[Subject]  # by id
    known: list[KnownConsumer]  # the oldest first
    roles: list[Role]
    bindings: list[Binding]


class _Snapshot(msgspec.Struct, array_like=True):
    """Policies are listed once each; a topic names its own by number, and others name topics by id."""

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


_LATER: Final = {
    name: getattr(TopicPolicy(), name) for name in ("retention_segments", "cleanup", "tombstone_retention_ms")
}
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_Snapshot)


def encode(stored: Stored) -> bytes:
    """The bytes of a machine; equal machines give equal bytes."""
    policies: dict[TopicPolicy, int] = {}
    topics = [
        (record.topic, record.topic_id, record.partitions,
         policies.setdefault(record.policy, len(policies)), record.created_us)
        for record in stored.topics
    ]  # fmt: skip
    fields: list[Any] = [
        stored.index, stored.next_topic_id, stored.namespaces, _in_full(list(policies)), topics
    ]  # fmt: skip
    more: list[Any] = [
        [(record.topic_id, in_full(record.schema)) for record in stored.topics if record.schema is not None],
        [
            (record.topic_id, in_full(dict(sorted(record.settings.items()))))
            for record in stored.topics
            if record.settings
        ],
        stored.next_schema_id, stored.subjects, in_full(stored.known), in_full(stored.roles),
        in_full(stored.bindings),
    ]  # fmt: skip
    alone = stored.next_schema_id == 1 and not any(part for part in more if part != 1)
    content = _encoder.encode(fields if alone else fields + more)
    return (_MAGIC_TOPICS if alone else _MAGIC) + crc32c(content).to_bytes(4, "little") + content


def _in_full(policies: list[TopicPolicy]) -> list[dict[str, Any]]:
    """Every field but those that came later and say nothing: so the bytes of old policies stay."""
    found: list[dict[str, Any]] = in_full(policies)
    return [
        {name: value for name, value in policy.items() if name not in _LATER or value != _LATER[name]}
        for policy in found
    ]


def decode(snapshot: bytes) -> Stored:
    """What ``encode`` was given; raises Damage or StorageIncompatible."""
    magic = snapshot[:4]
    if magic[:3] == _MAGIC[:3] and magic not in (_MAGIC_TOPICS, _MAGIC):
        raise StorageIncompatible("metadata snapshot has a newer format", why=f"its magic is {magic!r}")
    content = snapshot[8:]
    if magic[:3] != _MAGIC[:3] or int.from_bytes(snapshot[4:8], "little") != crc32c(content):
        raise Damage("metadata snapshot fails its checksum", size=len(snapshot))
    try:
        stored = _decoder.decode(content)
    except msgspec.DecodeError as error:
        raise StorageIncompatible("metadata snapshot cannot be read", why=str(error)) from None
    schemas, settings = dict(stored.schemas), dict(stored.settings)
    topics = [
        TopicRecord(
            topic, topic_id, partitions, stored.policies[policy], created_us,
            schemas.get(topic_id), settings.get(topic_id, {}),
        )
        for topic, topic_id, partitions, policy, created_us in stored.topics
    ]  # fmt: skip
    return Stored(
        stored.index, stored.next_topic_id, stored.namespaces, topics, stored.next_schema_id,
        stored.subjects, stored.known, stored.roles, stored.bindings,
    )  # fmt: skip
