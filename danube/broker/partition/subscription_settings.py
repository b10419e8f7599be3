"""What an operator set for a subscription, meeting the subscription at its partition's owner.

The metadata's settings come first, then what the subscription's maker asked for, then the topic's policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from danube.core.metadata.commands import SubscriptionSettings

if TYPE_CHECKING:
    from danube.broker.partition.hosted import HostedPartition
    from danube.core.metadata.commands import TopicRecord
    from danube.core.partition.policy import FailurePolicy

_NONE = SubscriptionSettings()


def failure_for(record: TopicRecord, subscription: str, asked: FailurePolicy | None) -> FailurePolicy:
    """The failure policy of a subscription whose maker asked for ``asked``."""
    return record.settings.get(subscription, _NONE).failure or asked or record.policy.failure


def max_unacked_for(record: TopicRecord, subscription: str, asked: int = 0) -> int:
    """How many records it may have unacked; ``asked`` 0: its maker did not say."""
    return record.settings.get(subscription, _NONE).max_unacked or asked or record.policy.max_unacked


def follow(hosted: HostedPartition, former: TopicRecord, record: TopicRecord) -> None:
    """Let live subscriptions follow what changed of their settings and of the topic's policy.

    They have then what a start would give them.
    """
    if former.settings == record.settings and former.policy == record.policy:
        return
    for name, host in hosted.subscriptions.items():
        before, now = former.settings.get(name, _NONE).failure, record.settings.get(name, _NONE).failure
        if before != now:
            host.core.set_failure(now or record.policy.failure, own=now is not None)
        elif failure_for(record, name, host.core.asked.failure) != host.core.failure:
            host.core.set_failure(record.policy.failure, own=False)
        max_unacked = max_unacked_for(record, name, host.core.asked.max_unacked)
        if max_unacked != host.core.max_unacked:
            host.core.set_max_unacked(max_unacked)
