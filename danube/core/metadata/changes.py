"""Differences between two metadata machines, for a reader that did not see the commands in between."""

from __future__ import annotations

from collections.abc import Mapping

from danube.core.cluster.commands import (
    Allocated,
    BrokerChanged,
    BrokerForgotten,
    ClusterChange,
    IdAllocated,
    KeyDeleted,
    KeyPut,
    LeaseEnded,
    LeaseKept,
    OffsetsReserved,
    OwnershipChanged,
    Skipped,
)
from danube.core.cluster.ownership import gone
from danube.core.cluster.state import ClusterState
from danube.core.metadata.commands import TopicChange, TopicCreated, TopicDeleted, TopicRecord, TopicUpdated

Topics = Mapping[int, TopicRecord]  # by id


def topic_deletions(earlier: Topics, later: Topics) -> list[TopicChange]:
    return [TopicDeleted(record) for topic_id, record in earlier.items() if topic_id not in later]


def topic_additions(earlier: Topics, later: Topics) -> list[TopicChange]:
    """Topics that were made or are not what they were, the oldest first."""
    changes: list[TopicChange] = []
    for topic_id, record in later.items():
        former = earlier.get(topic_id)
        if former is None:
            changes.append(TopicCreated(record))
        elif former != record:
            changes.append(TopicUpdated(record))
    return changes


def cluster_changes(earlier: ClusterState, later: ClusterState, version: int) -> list[ClusterChange]:
    """As above, for the cluster's part; ``Skipped`` comes first where anything differs."""
    if not earlier.used and not later.used:
        return []
    changes = [*_of_keys(earlier, later, version), *_of_leases(earlier, later)]
    changes += [*_of_brokers(earlier, later), *_of_owners(earlier, later), *_of_reservations(earlier, later)]
    return [Skipped(version), *changes] if changes else []


def _of_keys(earlier: ClusterState, later: ClusterState, version: int) -> list[ClusterChange]:
    gone_keys = [record for record in earlier.keys.records() if later.keys.find(record.key) is None]
    put = [record for record in later.keys.records() if earlier.keys.find(record.key) != record]
    put.sort(key=lambda record: record.mod_revision)
    allocated = [
        Allocated(counter, number)
        for counter, number in later.keys.counters()
        if earlier.keys.last_number(counter) != number
    ]
    return [
        *(KeyDeleted(record, version) for record in gone_keys),
        *(KeyPut(record) for record in put),
        *(IdAllocated(record) for record in allocated),
    ]


def _of_leases(earlier: ClusterState, later: ClusterState) -> list[ClusterChange]:
    ended = [lease for lease in earlier.leases.leases() if later.leases.find(lease.lease_id) is None]
    kept = [lease for lease in later.leases.leases() if earlier.leases.find(lease.lease_id) != lease]
    return [*(LeaseEnded(lease) for lease in ended), *(LeaseKept(lease) for lease in kept)]


def _of_brokers(earlier: ClusterState, later: ClusterState) -> list[ClusterChange]:
    before, after = earlier.brokers, later.brokers
    forgotten = [record for record in before.brokers() if after.find(record.broker_id) is None]
    changed = [record for record in after.brokers() if before.find(record.broker_id) != record]
    return [
        *(BrokerForgotten(record) for record in forgotten),
        *(BrokerChanged(record) for record in changed),
    ]


def _of_owners(earlier: ClusterState, later: ClusterState) -> list[ClusterChange]:
    before, after = earlier.owners, later.owners
    dropped = [one for one in before.records() if after.find(one.topic_id, one.partition) is None]
    changed = [one for one in after.records() if before.find(one.topic_id, one.partition) != one]
    return [OwnershipChanged(record) for record in [*map(gone, dropped), *changed]]


def _of_reservations(earlier: ClusterState, later: ClusterState) -> list[ClusterChange]:
    before = earlier.reservations
    changed = [one for one in later.reservations.records() if before.find(one.topic_id, one.partition) != one]
    return [OffsetsReserved(record) for record in changed]
