"""What can be asked of the metadata, what it holds, and what changes: plain values and their bytes.

A *command* is a proposed edit; it is stored and replicated as MessagePack.  A *change* is what one
applied command did.  Everything is stored in full, defaults included: a default that moves in a
later version must not move the topics that were made under the old one.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from danube.core.policy import TopicPolicy
from danube.errors import StorageIncompatible
from danube.ids import partition_name


class CreateTopic(msgspec.Struct, frozen=True, kw_only=True, tag="create_topic", tag_field="kind"):
    """Make a topic; ``partitions`` 0 is one that is not partitioned.

    With ``ensure`` a topic that is there already, with the same partitions and policy, is what
    was asked for.
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


class CreateNamespace(msgspec.Struct, frozen=True, kw_only=True, tag="create_namespace", tag_field="kind"):
    namespace: str
    ensure: bool = False


class DeleteNamespace(msgspec.Struct, frozen=True, kw_only=True, tag="delete_namespace", tag_field="kind"):
    """Delete a namespace that holds no topic."""

    namespace: str


Command = CreateTopic | DeleteTopic | UpdatePolicy | CreateNamespace | DeleteNamespace


class TopicRecord(msgspec.Struct, frozen=True):
    """One topic as it is now.  ``topic_id`` is never used again, not even by the same name."""

    topic: str
    topic_id: int
    partitions: int
    policy: TopicPolicy
    created_us: int

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


class PolicyUpdated(msgspec.Struct, frozen=True):
    """``record`` is the topic with its new policy."""

    record: TopicRecord


class NamespaceCreated(msgspec.Struct, frozen=True):
    namespace: str


class NamespaceDeleted(msgspec.Struct, frozen=True):
    namespace: str


Change = TopicCreated | TopicDeleted | PolicyUpdated | NamespaceCreated | NamespaceDeleted

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(list[Command])


def in_full(value: Any) -> Any:
    """``value`` as maps and lists, with the fields that equal their default as well."""
    if isinstance(value, msgspec.Struct):
        fields = {name: in_full(field) for name, field in msgspec.structs.asdict(value).items()}
        settings = value.__struct_config__
        return {settings.tag_field: settings.tag, **fields} if settings.tag_field else fields
    if isinstance(value, list | tuple):
        return [in_full(entry) for entry in value]
    return value


def encode_command(command: Command) -> bytes:
    return _encoder.encode(in_full(command))


def join_commands(encoded: list[bytes]) -> bytes:
    """A list of encoded commands, as decode_commands reads it."""
    return _encoder.encode([msgspec.Raw(command) for command in encoded])


def decode_commands(content: bytes | memoryview) -> list[Command]:
    """The commands of a joined list; raises StorageIncompatible for what this version cannot read."""
    try:
        return _decoder.decode(content)
    except msgspec.DecodeError as error:
        raise StorageIncompatible(
            "metadata command cannot be read", why=str(error), hint="it was written by a newer version"
        ) from None
