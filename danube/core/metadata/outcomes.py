"""Outcome of a command for its proposer, on one host and in a cluster alike."""

from __future__ import annotations

from danube.core.cluster.commands import (
    Allocated,
    AllocateId,
    BrokerChanged,
    BrokerRecord,
    ClusterCommand,
    ClusterRecord,
    CompareAndSet,
    DeleteKey,
    GrantLease,
    IdAllocated,
    KeyDeleted,
    KeyPut,
    KeyRecord,
    Lease,
    LeaseKept,
    PutKey,
    RegisterBroker,
    RenewLease,
    SetBrokerMode,
)
from danube.core.metadata.commands import (
    Change,
    Command,
    TopicCommand,
    TopicCreated,
    TopicDeleted,
    TopicRecord,
    TopicUpdated,
)
from danube.core.metadata.machine import Metadata


def outcome_of(
    state: Metadata, command: Command, changes: list[Change]
) -> TopicRecord | ClusterRecord | None:
    """The record that ``command`` made, changed, deleted or found to be so already.

    ``state`` has applied the command, which gave ``changes``, or needed no change.  None if nothing
    is to be told, or where a key that was to be deleted is not there.
    """
    if isinstance(command, TopicCommand):
        for change in changes:
            if isinstance(change, TopicCreated | TopicUpdated | TopicDeleted):
                return change.record
        return state.topic(command.topic)
    return _of_cluster(state, command, changes) if isinstance(command, ClusterCommand) else None


def _of_cluster(state: Metadata, command: ClusterCommand, changes: list[Change]) -> ClusterRecord | None:
    records = [
        change.record
        for change in changes
        if isinstance(change, KeyPut | KeyDeleted | IdAllocated | LeaseKept | BrokerChanged)
    ]
    match command:
        case PutKey() | CompareAndSet() | DeleteKey():
            return next((record for record in records if isinstance(record, KeyRecord)), None)
        case AllocateId():
            return next((record for record in records if isinstance(record, Allocated)), None)
        case GrantLease() | RenewLease():
            return next((record for record in records if isinstance(record, Lease)), None)
        case RegisterBroker() | SetBrokerMode():
            found = next((record for record in records if isinstance(record, BrokerRecord)), None)
            return found or state.cluster.brokers.find(command.broker_id)
    return None
