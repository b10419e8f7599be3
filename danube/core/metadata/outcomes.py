"""Outcome of a command for its proposer, on one host and in a cluster alike."""

from __future__ import annotations

from typing import Any, Final

from danube.core.cluster import commands as cluster
from danube.core.cluster.commands import ClusterRecord
from danube.core.metadata.commands import Change, Command, TopicCommand, TopicRecord
from danube.core.metadata.machine import Metadata

# Records that commands tell of; the other commands of a cluster tell nothing.
_TOLD: Final[dict[type, type]] = {
    cluster.PutKey: cluster.KeyRecord,
    cluster.CompareAndSet: cluster.KeyRecord,
    cluster.DeleteKey: cluster.KeyRecord,
    cluster.AllocateId: cluster.Allocated,
    cluster.GrantLease: cluster.Lease,
    cluster.RenewLease: cluster.Lease,
    cluster.RegisterBroker: cluster.BrokerRecord,
    cluster.SetBrokerMode: cluster.BrokerRecord,
}


def outcome_of(
    state: Metadata, command: Command, changes: list[Change]
) -> TopicRecord | ClusterRecord | None:
    """The record that ``command`` made, changed, deleted or found to be so already.

    ``state`` has applied the command, which gave ``changes``, or needed no change.  None if nothing
    is to be told, or where a key that was to be deleted is not there.
    """
    kind: Any = TopicRecord if isinstance(command, TopicCommand) else _TOLD.get(type(command))
    if kind is None:
        return None
    records: list[Any] = [getattr(change, "record", None) for change in changes]
    found = (record for record in records if isinstance(record, kind))
    told: TopicRecord | ClusterRecord | None = next(found, None)
    if told is None and isinstance(command, TopicCommand):
        return state.topic(command.topic)
    if told is None and isinstance(command, cluster.RegisterBroker | cluster.SetBrokerMode):
        return state.cluster.brokers.find(command.broker_id)
    return told
