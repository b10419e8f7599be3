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
    """Return topics that were made or changed, the oldest first."""
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
    keys_gone, keys_put = later.keys.changes_since(earlier.keys)
    counters = set(earlier.keys.counters())
    leases_ended, leases_kept = later.leases.changes_since(earlier.leases)
    brokers_gone, brokers_changed = later.brokers.changes_since(earlier.brokers)
    dropped, owned = later.owners.changes_since(earlier.owners)
    _, reserved = later.reservations.changes_since(earlier.reservations)
    changes: list[ClusterChange] = [
        *(KeyDeleted(record, version) for record in keys_gone),
        *(KeyPut(record) for record in sorted(keys_put, key=lambda record: record.mod_revision)),
        *(IdAllocated(Allocated(*one)) for one in later.keys.counters() if one not in counters),
        *(LeaseEnded(record) for record in leases_ended),
        *(LeaseKept(record) for record in leases_kept),
        *(BrokerForgotten(record) for record in brokers_gone),
        *(BrokerChanged(record) for record in brokers_changed),
        *(OwnershipChanged(record) for record in [*map(gone, dropped), *owned]),
        *(OffsetsReserved(record) for record in reserved),
    ]
    return [Skipped(version), *changes] if changes else []
