"""Names of objects in a store, below its prefix: ids and numbers only, never text that a user chose.

    store.json                                                        which store this is
    metadata/<version, 20 digits>                                     a snapshot of the metadata
    partitions/<topic id, 16 hex>-<partition>/
        <base, 20 digits>-<end, 20 digits>-<content hash, 16 hex>.seg     a sealed segment
        manifest-<epoch, 10 digits>-<generation, 10 digits>               what the partition's objects are
        cursors-<epoch, 10 digits>-<generation, 10 digits>                its subscriptions' states
        owner-<epoch, 10 digits>                                          empty: that owner is at work
        returned-<broker id, 20 digits>-<epoch, 10 digits>                what that broker's disk brought back

Numbers have all their digits, so the order of names is the order of numbers.  A segment is named
after its content: the same name is never given to other bytes.  Epoch and generation name a manifest
or cursors object once; the largest pair is in force.  An owner says ``owner-`` before its first manifest, so
that an older one that is still at work sees it; the largest one is kept.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from danube.wal.segments.segment import LogIdentity

STORE_KEY: Final = "store.json"
METADATA_PREFIX: Final = "metadata/"
PARTITIONS_PREFIX: Final = "partitions/"

_PARTITION: Final = r"partitions/(?P<topic_id>[0-9a-f]{16})-(?P<partition>0|[1-9][0-9]{0,9})/"
_PATTERN: Final = re.compile(
    r"(?P<store>store\.json)|metadata/(?P<version>[0-9]{20})|"
    + _PARTITION
    + r"(?:(?P<base>[0-9]{20})-(?P<end>[0-9]{20})-(?P<hash>[0-9a-f]{16})\.seg"
    r"|owner-(?P<owner>[0-9]{10})"
    r"|returned-(?P<broker>[0-9]{20})-(?P<last>[0-9]{10})"
    r"|(?P<kind>manifest|cursors)-(?P<epoch>[0-9]{10})-(?P<generation>[0-9]{10}))"
)
_U32: Final = 0xFFFF_FFFF


class KeyKind(StrEnum):
    STORE = "store"
    METADATA = "metadata"
    SEGMENT = "segment"
    MANIFEST = "manifest"
    CURSORS = "cursors"
    OWNER = "owner"
    RETURNED = "returned"


class StoreKey(NamedTuple):
    """Parts of a key; fields that its kind does not have are None, 0 or empty."""

    kind: KeyKind
    identity: LogIdentity | None = None
    base_offset: int = 0
    end_offset: int = 0
    hash_prefix: str = ""
    epoch: int = 0
    generation: int = 0
    version: int = 0


class NamedSegment(Protocol):
    """Source of a segment's key: two offsets and the 16 bytes of the content hash."""

    @property
    def base_offset(self) -> int: ...
    @property
    def end_offset(self) -> int: ...
    @property
    def content_hash(self) -> bytes: ...


def partition_prefix(identity: LogIdentity) -> str:
    return f"{PARTITIONS_PREFIX}{identity.directory_name}/"


def segment_key(identity: LogIdentity, segment: NamedSegment) -> str:
    name = f"{segment.base_offset:020d}-{segment.end_offset:020d}-{segment.content_hash[:8].hex()}.seg"
    return partition_prefix(identity) + name


def manifest_prefix(identity: LogIdentity) -> str:
    """Every manifest of a partition begins with it; the last one listed is in force."""
    return partition_prefix(identity) + "manifest-"


def manifest_key(identity: LogIdentity, epoch: int, generation: int) -> str:
    return f"{manifest_prefix(identity)}{epoch:010d}-{generation:010d}"


def cursors_prefix(identity: LogIdentity) -> str:
    return partition_prefix(identity) + "cursors-"


def cursors_key(identity: LogIdentity, epoch: int, generation: int) -> str:
    return f"{cursors_prefix(identity)}{epoch:010d}-{generation:010d}"


def owner_key(identity: LogIdentity, epoch: int) -> str:
    return f"{partition_prefix(identity)}owner-{epoch:010d}"


def returned_prefix(identity: LogIdentity) -> str:
    return f"{partition_prefix(identity)}returned-"


def returned_key(identity: LogIdentity, broker_id: int, epoch: int) -> str:
    return f"{returned_prefix(identity)}{broker_id:020d}-{epoch:010d}"


def metadata_key(version: int) -> str:
    return f"{METADATA_PREFIX}{version:020d}"


def parse_key(key: str) -> StoreKey | None:
    """Return the parts of ``key``; None for a name that Danube does not give."""
    match = _PATTERN.fullmatch(key)
    if match is None:
        return None
    if match["store"]:
        return StoreKey(KeyKind.STORE)
    if match["version"]:
        return StoreKey(KeyKind.METADATA, version=int(match["version"]))
    identity = LogIdentity(int(match["topic_id"], 16), int(match["partition"]))
    if identity.partition > _U32:
        return None
    if match["owner"] is not None:
        epoch = int(match["owner"])
        return StoreKey(KeyKind.OWNER, identity, epoch=epoch) if epoch <= _U32 else None
    if match["last"] is not None:
        epoch = int(match["last"])
        return StoreKey(KeyKind.RETURNED, identity, epoch=epoch) if epoch <= _U32 else None
    if match["kind"] is None:
        return StoreKey(KeyKind.SEGMENT, identity, int(match["base"]), int(match["end"]), match["hash"])
    epoch, generation = int(match["epoch"]), int(match["generation"])
    if epoch > _U32 or generation > _U32:
        return None
    return StoreKey(KeyKind(match["kind"]), identity, epoch=epoch, generation=generation)


def parse_partition(name: str) -> LogIdentity | None:
    """The identity in a partition's folder name (``<topic id>-<partition>``), without slashes."""
    match = re.fullmatch(_PARTITION, f"{PARTITIONS_PREFIX}{name}/")
    if match is None or int(match["partition"]) > _U32:
        return None
    return LogIdentity(int(match["topic_id"], 16), int(match["partition"]))
