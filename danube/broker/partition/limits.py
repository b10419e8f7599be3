"""Limits of a partition's namespace at its owner, judged when a producer or consumer opens.

Each partition counts for itself: a client of a partitioned topic opens a handle on every partition.  Whoever
comes back under the same name is not counted again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from danube.core.dispatch.rate import NOT_LIMITED, DispatchLimits, DispatchSum
from danube.core.metadata.policies import check_durability, check_schema, smallest
from danube.core.partition.publish_rate import PublishRate, SumRate
from danube.errors import LimitExceeded, QuotaExceeded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from danube.broker.partition.consumers import SubscriptionHost
    from danube.broker.partition.lossy import LossyHost
    from danube.broker.partition.producers import Producers
    from danube.broker.partition.tier import PartitionTier
    from danube.core.metadata.commands import TopicRecord
    from danube.core.metadata.policies import NamespacePolicy
    from danube.wal.log.log import Log


class LimitedPartition(Protocol):
    """Members of :class:`danube.broker.partition.hosted.HostedPartition` that limits are about."""

    name: str
    record: TopicRecord
    limits: NamespacePolicy | None
    producers: Producers
    log: Log | None

    @property
    def subscriptions(self) -> Mapping[str, SubscriptionHost]: ...
    @property
    def lossy(self) -> Mapping[str, LossyHost]: ...
    @property
    def tier(self) -> PartitionTier | None: ...


def record_bytes_max(record: TopicRecord, limits: NamespacePolicy | None) -> int:
    """The bytes that a record of the topic may have."""
    own = record.policy.max_record_bytes
    return own if limits is None else smallest(own, limits.max_message_size)


def dispatch_limits(
    record: TopicRecord, limits: NamespacePolicy | None, sums: tuple[DispatchSum, ...]
) -> DispatchLimits:
    """Return the limits of each subscription of one partition.

    The topic's own limit is one for each partition; that of the namespace is shared by the partitions.
    """
    per_second = record.policy.max_dispatch_rate
    if limits is not None:
        share = -(-limits.max_subscription_dispatch_rate // record.partition_count)
        per_second = smallest(per_second, share)
    return DispatchLimits(per_second, sums) if per_second or sums else NOT_LIMITED


def publish_rates(record: TopicRecord, limits: NamespacePolicy | None) -> tuple[int, int]:
    """Records and bytes a second for one partition, its share of the topic's; 0: no limit.

    The smallest of the topic's own and what its namespace allows each topic holds.
    """
    policy, count = record.policy, record.partition_count
    records, size_bytes = policy.max_publish_rate, policy.max_publish_bytes
    if limits is not None:
        records = smallest(records, limits.max_publish_rate_per_topic)
        size_bytes = smallest(size_bytes, limits.max_publish_bytes_per_topic)
    return -(-records // count), -(-size_bytes // count)


def paced(
    rate: PublishRate | None,
    record: TopicRecord,
    limits: NamespacePolicy | None,
    sums: tuple[SumRate, ...],
    now_ns: int,
) -> PublishRate | None:
    """The rate of a partition under these limits; what it owes stays.  None: publishing is not limited."""
    rates = publish_rates(record, limits)
    storage = 0 if limits is None else limits.max_storage_bytes_per_topic
    if rates == (0, 0) and not storage and not sums:
        return None
    if rate is None:
        return PublishRate(*rates, sums)
    rate.sums = sums
    rate.set(*rates, now_ns)
    return rate


def stored_bytes(hosted: LimitedPartition) -> int:
    """Return the bytes of a partition on its disk and in the object store; those in both count once."""
    log, tier = hosted.log, hosted.tier
    if log is None:
        return 0
    if tier is None:
        return log.local_bytes
    return tier.pending().size_bytes + (0 if tier.manifest is None else tier.manifest.size_bytes)


def storage_refusal(hosted: LimitedPartition) -> QuotaExceeded | None:
    """Why a partition takes no batches: it stores its share of the bytes that its topic may; or None."""
    limits = hosted.limits
    if limits is None or not limits.max_storage_bytes_per_topic or hosted.log is None:
        return None
    limit = -(-limits.max_storage_bytes_per_topic // hosted.record.partition_count)
    stored = stored_bytes(hosted)
    if stored < limit:
        return None
    return storage_full(hosted.name, stored, limit, "max_storage_bytes_per_topic", part="share of ")


def storage_full(name: str, stored: int, limit: int, quota: str, part: str = "") -> QuotaExceeded:
    """The refusal of a partition, namespace or tenant that stores as many bytes as it may."""
    return QuotaExceeded(
        f"{name} stores {stored} bytes",
        why=f"its {part}{quota} is {limit}",
        hint="let retention delete records, or have the limit raised",
        limit=limit, quota=quota, retry_after_ms=1_000,
    )  # fmt: skip


def check_producer(
    hosted: LimitedPartition, limits: NamespacePolicy, name: str, *, internal: bool = False
) -> None:
    """Raise PolicyMismatch or LimitExceeded if a producer of this name may not open.

    ``internal``: it is a broker's, and not counted.
    """
    check_demands(hosted.record, limits)
    most = 0 if internal else limits.max_producers_per_topic
    if most and not hosted.producers.has(name) and hosted.producers.name_count >= most:
        raise _full(hosted.name, hosted.producers.name_count, "producers", "max_producers_per_topic", most)


def check_demands(record: TopicRecord, limits: NamespacePolicy) -> None:
    """Raise PolicyMismatch if a topic is not what its namespace demands of those that are published to."""
    check_durability(record.topic, record.policy, limits)
    check_schema(record.topic, record.schema is not None, limits)


def check_consumer(
    hosted: LimitedPartition, limits: NamespacePolicy, subscription: str, consumer: str
) -> None:
    """Raise LimitExceeded if a consumer may not join the subscription, or may not make it."""
    host = hosted.lossy.get(subscription) or hosted.subscriptions.get(subscription)
    most, count = limits.max_subscriptions_per_topic, len(hosted.subscriptions) + len(hosted.lossy)
    if host is None and most and count >= most:
        raise _full(hosted.name, count, "subscriptions", "max_subscriptions_per_topic", most)
    if host is not None and any(link.name == consumer for link in host.links.values()):
        return  # it takes over from its older connection
    most, count = limits.max_consumers_per_subscription, 0 if host is None else len(host.links)
    if most and count >= most:
        where = f"subscription {subscription!r} of {hosted.name}"
        raise _full(where, count, "consumers", "max_consumers_per_subscription", most)
    if most := limits.max_consumers_per_topic:
        count = sum(len(one.links) for one in hosted.subscriptions.values())
        count += sum(len(one.links) for one in hosted.lossy.values())
        if count >= most:
            raise _full(hosted.name, count, "consumers", "max_consumers_per_topic", most)


def _full(where: str, count: int, what: str, quota: str, limit: int) -> LimitExceeded:
    return LimitExceeded(
        f"{where} has {count} {what}",
        why=f"the limit of its namespace is {limit} ({quota})",
        hint="close some that are not used, or have the limit raised",
        limit=limit, quota=quota,
    )  # fmt: skip
