"""Metadata after a possible loss of commands: no id, epoch or offset that they gave is given again.

If most journals are lost, the cluster continues with the content of one of them.  The missing commands may
have been executed: the store, other disks and clients may have topics with their ids, manifests with their
epochs and records at their offsets.  The number of these commands is unknown.  So every counter advances by
far more than can have been used, and by far less than its range:

    counter                                 goes ahead by
    version of the machine (and revisions)  COMMANDS_AHEAD
    ids of topics and schemas, counters     IDS_AHEAD
    versions of each schema subject         SCHEMA_VERSIONS_AHEAD
    epochs of each partition                EPOCHS_AHEAD; refused if none would be left to give
    reserved end of each partition          OFFSETS_AHEAD, counted from the clock if that is more

Reserved:  by no broker (broker id 0), up to an epoch above all lost ones.  So no directory is continued, and
           the next owner begins behind the end.  The offsets before it are a hole, which any disk from
           before the loss may fill.
Added:     partitions whose addition is lost, and those that were never served before, have no record here.
           The machine remembers under KEY that it was recovered, and their records follow from that.
Lost:      ids that topics of lost commands may have.  Nothing that is stored under them is removed.

Leases, brokers, ownership and moves stay: they end as they do after all brokers were absent for a while.

A data directory that was restored from a copy or from a store is the same case: everything after the copy is
gone, and readers elsewhere remember its offsets.  Such a directory begins a new *history* (:class:`History`).
On one host there are no reservations, so each log of a topic that is older than the history goes on at
``offset_ahead`` of its end.  That follows the clock: two histories that begin with the same copy at different
times never give the same offset.
"""

from __future__ import annotations

from typing import Final

import msgspec

from danube.core.cluster.commands import Reservation
from danube.core.metadata.machine import Metadata
from danube.errors import Damage, LimitExceeded

KEY: Final = "/cluster/recovered"
OFFSETS_PER_SECOND: Final = 1 << 24  # more than any partition gives in the long run
HISTORIES_SINCE_US: Final = 1_767_225_600_000_000  # 2026
INCARNATIONS_AHEAD: Final = 1 << 14
LOG_EPOCHS: Final = 256  # of one log in one incarnation of its worker, or one epoch of its owner in a cluster
COMMANDS_AHEAD: Final = 1 << 32
IDS_AHEAD: Final = 1 << 32
IDS_PER_SECOND: Final = 1 << 10
SCHEMA_VERSIONS_AHEAD: Final = 1 << 16
EPOCHS_AHEAD: Final = 1 << 16
OFFSETS_AHEAD: Final = 1 << 40
EPOCH_END: Final = 1 << 24  # of an ownership: a log has 256 for each, and 32 bits


class History(msgspec.Struct, frozen=True):
    """Identity of the records from here on: ``history_id`` names the history, which began at ``since_us``.

    Logs that go on in it have at least ``first_epoch``.  In a cluster that is 0, because reservations
    hold the epochs there.
    """

    history_id: str
    since_us: int
    first_epoch: int = 0
    why: str = ""


class Recovery(msgspec.Struct, frozen=True):
    """The value of KEY.  ``lost_topic_ids``: ranges, ascending; one for each time that it was recovered.

    ``histories``: those that followed the first one, which has no name; the last one is under way.
    """

    lost_topic_ids: tuple[tuple[int, int], ...] = ()
    histories: tuple[History, ...] = ()

    @property
    def count(self) -> int:
        return len(self.lost_topic_ids)

    @property
    def history_id(self) -> str:
        """The history that is under way; "" for the first one."""
        return self.histories[-1].history_id if self.histories else ""

    def history_of(self, topic_id: int) -> History | None:
        """The history that a log goes on in if it is older; None if all that it gave is known."""
        if not self.histories or topic_id >= self.lost_topic_ids[-1][0]:
            return None
        return self.histories[-1]


_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(Recovery)
_NEVER: Final = Recovery()


def recovery_of(state: Metadata) -> Recovery:
    """How often commands were lost, and which ids with them; raises Damage where that cannot be read."""
    record = state.cluster.keys.find(KEY)
    if record is None:
        return _NEVER
    try:
        return _decoder.decode(record.value)
    except msgspec.DecodeError as error:
        raise Damage(f"key {KEY} cannot be read", why=str(error)) from None


def offset_ahead(log_end: int, since_us: int) -> int:
    """Return where a log that ends at ``log_end`` goes on in a history that began at ``since_us``."""
    return max(log_end, _seconds(since_us) * OFFSETS_PER_SECOND) + OFFSETS_AHEAD


def _seconds(since_us: int) -> int:
    return max(0, since_us - HISTORIES_SINCE_US) // 1_000_000


def recovered(state: Metadata, history: History) -> Metadata:
    """A machine that goes on from ``state``, which is not changed, in a new history; raises LimitExceeded."""
    after = state.copy()
    after.version = state.version + COMMANDS_AHEAD
    ids_ahead = IDS_AHEAD + _seconds(history.since_us) * IDS_PER_SECOND
    first_lost, after.next_topic_id = state.next_topic_id, state.next_topic_id + ids_ahead
    subjects = [
        msgspec.structs.replace(one, last_version=one.last_version + SCHEMA_VERSIONS_AHEAD)
        for one in state.registry.stored()
    ]
    after.registry.load(state.registry.next_schema_id + ids_ahead, subjects)
    _move_partitions(after, history.since_us)
    keys = after.cluster.keys
    keys.load([], [(name, number + ids_ahead) for name, number in keys.counters()])
    before = recovery_of(state)
    lost = (*before.lost_topic_ids, (first_lost, after.next_topic_id))
    keys.put(after.version, KEY, _encoder.encode(Recovery(lost, (*before.histories, history))), 0)
    return after


def _move_partitions(after: Metadata, since_us: int) -> None:
    """Epochs and reserved ends behind all that were lost."""
    cluster = after.cluster
    owners = [
        msgspec.structs.replace(one, epoch=one.epoch + EPOCHS_AHEAD) for one in cluster.owners.records()
    ]
    highest = max((one.epoch for one in owners), default=0)
    if highest + EPOCHS_AHEAD >= EPOCH_END:
        raise LimitExceeded(
            "a partition has no epochs left to go ahead by",
            why=f"its epoch would be {highest} of {EPOCH_END}",
            hint="recover another member",
            limit=EPOCH_END,
        )
    cluster.owners.load(owners)
    cluster.reservations.load([
        Reservation(
            one.topic_id, one.partition, offset_ahead(one.end, since_us), 0,
            cluster.owners.of(one.topic_id, one.partition).epoch,
        )
        for one in cluster.reservations.records()
    ])  # fmt: skip


def epoch_floor(state: Metadata) -> int:
    """Epochs that are given to partitions which never had one are above it."""
    return recovery_of(state).count * EPOCHS_AHEAD


def reservation_of(state: Metadata, topic_id: int, partition: int) -> Reservation:
    """How far offsets of a partition may have been given, also by commands that are lost."""
    known = state.cluster.reservations.find((topic_id, partition))
    recovery = recovery_of(state)
    if known is not None or not recovery.count or topic_id >= recovery.lost_topic_ids[-1][0]:
        return known or state.cluster.reservations.of(topic_id, partition)
    since_us = recovery.histories[-1].since_us if recovery.histories else 0
    end = max(recovery.count * OFFSETS_AHEAD, offset_ahead(0, since_us))
    return Reservation(topic_id, partition, end, 0, recovery.count * EPOCHS_AHEAD)


def may_be_lost(state: Metadata, topic_id: int) -> bool:
    """Whether a lost command may have made a topic of this id; then its stored data is not removed."""
    return any(start <= topic_id < end for start, end in recovery_of(state).lost_topic_ids)
