"""Metadata of a single broker, turned into that of the first member of a cluster.

A cluster has agreed on the owner of each partition, on its epoch, and on how far offsets were given; one host
needs none of that.  So the adopted metadata says that the broker owned every reliable partition in one epoch,
above all epochs that it had alone, and that it stopped where each log ends.  The broker goes on from there
as a member that was stopped and started: it takes the next epoch, and continues its own logs.

Topics, schemas, settings, rights and the histories stay as they are.  Partitions of topics that keep nothing
have no owner; the cluster gives them one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from danube.core.cluster.commands import Ownership, Reservation
from danube.core.cluster.ownership import Place
from danube.core.metadata.commands import TopicRecord
from danube.core.metadata.machine import Metadata


def kept_partitions(state: Metadata) -> Iterable[tuple[TopicRecord, int]]:
    """Every partition that has a log, with its topic."""
    for record in state.topics():
        if record.policy.reliable:
            for index in range(record.partition_count):
                yield record, index


def adoption_epoch(state: Metadata, incarnation: int) -> int:
    """The ownership's: above those of all logs, which end below ``incarnation``, and none goes back."""
    return max([incarnation, *(one.epoch for one in state.cluster.owners.records())])


def adopted(state: Metadata, broker_id: int, epoch: int, log_ends: Mapping[Place, int]) -> Metadata:
    """A machine that goes on from ``state``, which is not changed, in a cluster of one."""
    after = state.copy()
    after.version = state.version + 1
    agreement = after.cluster.agreement
    agreement.load(agreement.index + 1, agreement.term + 1, agreement.now_us, agreement.origins())
    owners, reservations = after.cluster.owners, after.cluster.reservations
    owners.load([Ownership(*place, broker_id, epoch) for place in sorted(log_ends)])
    reservations.load([
        Reservation(*place, end, broker_id, epoch, closed=True) for place, end in sorted(log_ends.items())
    ])  # fmt: skip
    return after
