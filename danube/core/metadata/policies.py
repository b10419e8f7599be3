"""Policies of namespaces, and tenants: what is limited where.

A *tenant* is a named set of namespaces with a quota.  Three kinds of limits:

``max_topics``, ``max_partitions``, ``max_subjects``: a sum over the namespace, or over all namespaces of the
tenant.  The metadata machine judges them (:mod:`danube.core.metadata.quotas`).
``max_publish_rate``, ``max_publish_bytes``, ``max_storage_bytes``, ``max_dispatch_rate``,
``max_dispatch_bytes``: such a sum too, over all brokers.  The owners of partitions judge it together
(:mod:`danube.core.placement.shares`).
``..._per_topic``, ``..._per_subscription``, ``max_message_size`` and ``max_unacked``: each topic or
subscription has it.  The smallest of the tenant's, the namespace's and the topic's own holds.
``durability_min``, ``retention_max_ms``, ``auto_create``, ``schema_required``, ``subscription_auth``,
``dead_letter_within``: demands.  The strictest holds.

A limit of 0 is none.  A policy that is lowered takes nothing away: what is there stays, and new things are
refused.
"""

from __future__ import annotations

from typing import Final

import msgspec

from danube.core.partition.policy import Durability, TopicPolicy
from danube.errors import InvalidArgument, PolicyMismatch

LIMIT_MAX: Final = 1 << 53  # every client can hold the number


class NamespacePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a namespace, or of a tenant; the default limits nothing."""

    max_topics: int = 0
    max_partitions: int = 0  # a topic that is not partitioned counts as one
    max_subjects: int = 0  # of schemas; those named /namespace/name
    max_producers_per_topic: int = 0
    max_subscriptions_per_topic: int = 0
    max_consumers_per_topic: int = 0
    max_consumers_per_subscription: int = 0
    max_subscription_dispatch_rate: int = 0  # records a second to each subscription
    max_message_size: int = 0  # bytes of a record's payload
    max_publish_rate_per_topic: int = 0  # records a second, of all producers and partitions together
    max_publish_bytes_per_topic: int = 0  # bytes a second, as batches are sent
    max_storage_bytes_per_topic: int = 0  # on disks and in the object store, of all partitions together
    durability_min: str = ""  # non-reliable topics are below each level
    retention_max_ms: int = 0
    auto_create: bool = True  # whether using a topic that is missing makes it, where topics.auto_create is on
    schema_required: bool = False  # whether producers need a topic with a schema
    max_publish_rate: int = 0  # records a second of all topics together; these and those below came later
    max_publish_bytes: int = 0  # bytes a second, as batches are sent
    max_storage_bytes: int = 0  # on disks and in the object store
    subscription_auth: str = ""  # "prefix": a subscription is named after who consumes from it
    dead_letter_within: str = ""  # "namespace" or "tenant": where dead letters may go to
    max_dispatch_rate: int = 0  # records a second to all subscriptions of all topics together
    max_dispatch_bytes: int = 0  # bytes a second, as they are delivered
    max_unacked: int = 0  # records in flight of each subscription of a partition

    @property
    def limits_taking(self) -> bool:
        """Whether topics are limited together in what they publish or store."""
        return any(getattr(self, name) for name in TAKING)

    @property
    def limits_dispatch(self) -> bool:
        """Whether topics are limited together in what they deliver."""
        return any(getattr(self, name) for name in DISPATCH)

    def check(self) -> None:
        """Raise InvalidArgument if a value cannot be kept."""
        for name in LIMITS:
            if not 0 <= getattr(self, name) <= LIMIT_MAX:
                raise InvalidArgument(f"{name} must be 0 .. {LIMIT_MAX}", hint="0 is no limit")
        if self.durability_min not in ("", "written", "fsync"):
            raise InvalidArgument(
                f"durability_min {self.durability_min[:40]!r} is not known",
                hint='use written, fsync, or "" for none',
            )
        for name, known in WORDS.items():
            if getattr(self, name) not in known:
                raise InvalidArgument(
                    f"{name} {getattr(self, name)[:40]!r} is not known",
                    hint=f'use {" or ".join(known[1:])}, or "" for none',
                )


class Tenant(msgspec.Struct, frozen=True):
    """A named set of namespaces, which exist or not; a namespace belongs to one tenant at most."""

    name: str
    namespaces: tuple[str, ...]
    quota: NamespacePolicy = NamespacePolicy()


NOTHING: Final = NamespacePolicy()
LIMITS: Final = tuple(
    name for name in NamespacePolicy.__struct_fields__ if name.startswith("max_") or name.endswith("_ms")
)
SUMS: Final = ("max_topics", "max_partitions", "max_subjects")
TAKING: Final = ("max_publish_rate", "max_publish_bytes", "max_storage_bytes")
DISPATCH: Final = ("max_dispatch_rate", "max_dispatch_bytes")
SUMS_OF_ALL: Final = (*TAKING, *DISPATCH)
# What a demand may say, the strictest last.
WORDS: Final = {"subscription_auth": ("", "prefix"), "dead_letter_within": ("", "tenant", "namespace")}
LATER: Final = (*SUMS_OF_ALL, *WORDS, "max_unacked")  # left out where they say nothing


def smallest(*limits: int) -> int:
    """The smallest of these limits, of which 0 is none."""
    return min((limit for limit in limits if limit), default=0)


def strictest(first: NamespacePolicy, second: NamespacePolicy) -> NamespacePolicy:
    """The policy that holds where both do."""
    if first in (NOTHING, second):
        return second
    return NamespacePolicy(
        **{name: smallest(getattr(first, name), getattr(second, name)) for name in LIMITS},
        durability_min=max(first.durability_min, second.durability_min, key=_level),
        auto_create=first.auto_create and second.auto_create,
        schema_required=first.schema_required or second.schema_required,
        subscription_auth=_stricter("subscription_auth", first, second),
        dead_letter_within=_stricter("dead_letter_within", first, second),
    )


def _stricter(name: str, *policies: NamespacePolicy) -> str:
    said: list[str] = [getattr(policy, name) for policy in policies]
    return max(said, key=WORDS[name].index)


def _level(durability: str) -> int:
    return int(Durability.parse(durability)) if durability else -1


def fitting(policy: TopicPolicy, limits: NamespacePolicy) -> TopicPolicy:
    """A topic's policy as near to ``policy`` as the limits of its namespace allow."""
    found = policy
    if policy.reliable and _level(policy.durability) < _level(limits.durability_min):
        found = msgspec.structs.replace(found, durability=limits.durability_min)
    if _kept_too_long(policy, limits):
        found = msgspec.structs.replace(found, retention_ms=limits.retention_max_ms)
    return found


def check_topic_policy(topic: str, policy: TopicPolicy, limits: NamespacePolicy) -> None:
    """Raise PolicyMismatch if a topic with this policy may not be in its namespace."""
    check_durability(topic, policy, limits)
    if _kept_too_long(policy, limits):
        kept = f"for {policy.retention_ms} ms" if policy.retention_ms and policy.expires else "for ever"
        raise PolicyMismatch(
            f"{topic} would keep records {kept}",
            why=f"its namespace allows {limits.retention_max_ms} ms (retention_max_ms)",
            hint=f"set retention_ms to 1 .. {limits.retention_max_ms}, and cleanup to delete",
            limit=limits.retention_max_ms,
        )


def _kept_too_long(policy: TopicPolicy, limits: NamespacePolicy) -> bool:
    if not limits.retention_max_ms or not policy.reliable:
        return False
    return not policy.expires or not 0 < policy.retention_ms <= limits.retention_max_ms


def check_durability(topic: str, policy: TopicPolicy, limits: NamespacePolicy) -> None:
    """Raise PolicyMismatch if the topic acknowledges records before its namespace allows it."""
    if _level(policy.durability) < _level(limits.durability_min):
        raise PolicyMismatch(
            f"{topic} acknowledges at level {policy.durability}",
            why=f"its namespace demands {limits.durability_min} (durability_min)",
            hint=f"give the topic the durability {limits.durability_min}",
        )


def check_schema(topic: str, has_schema: bool, limits: NamespacePolicy) -> None:
    """Raise PolicyMismatch if a topic has no schema and needs one."""
    if limits.schema_required and not has_schema:
        raise PolicyMismatch(
            f"{topic} has no schema",
            why="its namespace demands one (schema_required)",
            hint="danube schema set-topic gives it one",
        )
