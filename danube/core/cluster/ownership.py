"""Ownership of partitions with epochs, inside the metadata machine.

Assigned:  a partition without an owner gets an owner and an epoch.  The owner may take the partition again
           and gets another epoch.  The epochs of a partition count up as long as its topic exists: none is
           given twice, and a later owner has a higher one.  (A topic that is made again has another id.)
Unloaded:  the owner is asked to release the partition.  It stays the owner, with its epoch, until it does.
Released:  by the owner of the current epoch, after it has stopped appending; or by anyone, with reason
           dead, when the owner's registration has ended.
Deleted:   with its topic.

Every command names the epoch that its proposer saw; a command with any other epoch is Fenced.

Reservations of offsets: how far each partition's owner may give offsets.

An owner appends only below the end that it reserved, and reserves ahead of its need.  Only the owner's disk
may know how far its log came; the next owner begins at the reserved end, so no offset is given twice.

Reserved:  by the owner of the current epoch; the end only grows.  The broker that reserved last is kept,
           because its disk may hold records that no other broker has.
Closed:    by the same owner, with ``last``: it has stopped appending for good in this epoch and says where
           its log ends, at or below the reserved end.  Nothing more is reserved in that epoch.  An owner
           that reserved nothing in its epoch has appended nothing, and has nothing to close.
Forgotten: with the topic.

An assignment and a release do not change a reservation.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from danube.core.cluster.commands import (
    AssignPartitions,
    Ownership,
    OwnershipCommand,
    ReleasePartitions,
    Reservation,
    ReserveOffsets,
    UnloadPartitions,
)
from danube.core.cluster.records import Records
from danube.errors import Fenced, InvalidArgument, LimitExceeded, WrongState
from danube.limits import PARTITIONS_PER_COMMAND_MAX

EPOCH_MAX: Final = (1 << 32) - 1  # the size of the field in a batch's header
DEAD: Final = "dead"
DELETED: Final = "deleted"
REASONS: Final = ("unload", "rebalance", "drain", "stop", DEAD)

Place = tuple[int, int]  # topic id, partition


_place_of = attrgetter("topic_id", "partition")


class Owners(Records[Place, Ownership]):
    """The ownership of every partition that ever had an owner, by topic id and partition."""

    key_of = _place_of

    def of(self, topic_id: int, partition: int) -> Ownership:
        """Return the ownership of a partition: without a broker and with epoch 0 if it never had an owner."""
        return self._by_key.get((topic_id, partition)) or Ownership(topic_id, partition, 0, 0)

    def of_broker(self, broker_id: int) -> list[Ownership]:
        """Return all partitions of a broker; walks over every partition."""
        return [record for record in self._by_key.values() if record.broker_id == broker_id]

    # Check

    def check(self, command: OwnershipCommand) -> None:
        """Raise a CallerError if the command is not sound in itself."""
        _check_places(command.partitions)
        if isinstance(command, AssignPartitions):
            highest = max(command.epoch_floor, *(epoch for _, _, epoch in command.partitions))
            if command.epoch_floor < 0 or highest >= EPOCH_MAX:
                raise LimitExceeded(f"epochs are 1 .. {EPOCH_MAX}", why=f"not above {highest}")
            return
        if not command.reason and isinstance(command, ReleasePartitions):
            return
        if command.reason not in REASONS:
            raise InvalidArgument(
                f"reason {command.reason[:40]!r} is not known", hint=f"use {', '.join(REASONS)}"
            )

    def refuse(self, command: OwnershipCommand) -> None:
        """Raise Fenced or WrongState if carrying it out would break the machine."""
        for topic_id, partition, epoch in command.partitions:
            record = self.of(topic_id, partition)
            if record.epoch != epoch:
                raise Fenced(
                    f"partition {partition} of topic id {topic_id} has epoch {record.epoch}, not {epoch}",
                    why="its ownership has changed since",
                    hint="look again",
                    epoch=record.epoch,
                )
            match command:
                case AssignPartitions() if record.broker_id not in (0, command.broker_id):
                    _wrong(record, "its owner has to release it first")
                case ReleasePartitions() if record.broker_id != command.broker_id:
                    _wrong(record, f"broker {command.broker_id} cannot release it")
                case UnloadPartitions() if record.broker_id == 0:
                    _wrong(record, "there is nothing to unload")

    # Change

    def assign(self, command: AssignPartitions) -> list[Ownership]:
        """Give each partition its owner and an epoch."""
        return [
            self._put(Ownership(topic_id, partition, command.broker_id, max(epoch, command.epoch_floor) + 1))
            for topic_id, partition, epoch in command.partitions
        ]

    def unload(self, command: UnloadPartitions) -> list[Ownership]:
        """Note that partitions are to be released, unless they were requested the same way before."""
        done = []
        for topic_id, partition, epoch in command.partitions:
            former = self.of(topic_id, partition)
            record = Ownership(
                topic_id, partition, former.broker_id, epoch, command.reason,
                former.broker_id, command.to_broker_id,
            )  # fmt: skip
            if record != former:
                done.append(self._put(record))
        return done

    def release(self, command: ReleasePartitions) -> list[Ownership]:
        done = []
        for topic_id, partition, epoch in command.partitions:
            former = self.of(topic_id, partition)
            reason = command.reason or former.reason or "stop"
            done.append(
                self._put(
                    Ownership(topic_id, partition, 0, epoch, reason, command.broker_id, former.to_broker_id)
                )
            )
        return done

    def forget_topic(self, topic_id: int, partition_count: int) -> list[Ownership]:
        """Drop the partitions of a topic; return each without an owner, with its last epoch."""
        dropped = []
        for partition in range(partition_count if self._by_key else 0):
            former = self._by_key.pop((topic_id, partition), None)
            if former is not None:
                dropped.append(gone(former))
        return dropped


def gone(former: Ownership) -> Ownership:
    """An ownership whose topic was deleted."""
    return Ownership(former.topic_id, former.partition, 0, former.epoch, DELETED, former.broker_id)


def _wrong(record: Ownership, why: str) -> None:
    owner = f"broker {record.broker_id} owns" if record.broker_id else "nobody owns"
    raise WrongState(
        f"{owner} partition {record.partition} of topic id {record.topic_id}",
        why=why,
        broker_id=record.broker_id,
        epoch=record.epoch,
    )


RESERVED_END_MAX: Final = 1 << 62


class Reservations(Records[Place, Reservation]):
    """The reservation of every partition that has one, by topic id and partition."""

    key_of = _place_of

    def of(self, topic_id: int, partition: int) -> Reservation:
        """Return the reservation of a partition; its end is 0 if nothing was ever reserved."""
        return self._by_key.get((topic_id, partition)) or Reservation(topic_id, partition, 0, 0, 0)

    def check(self, command: ReserveOffsets) -> bool:
        """Whether it would change anything; raises a CallerError if it is not sound in itself."""
        _check_places(command.partitions)
        for *_, end in command.partitions:
            if not 0 <= end <= RESERVED_END_MAX:
                raise LimitExceeded(f"offsets are 0 .. {RESERVED_END_MAX}", why=f"not {end}")
        return any(_made(command, place) != self.of(*place[:2]) for place in command.partitions)

    def refuse(self, command: ReserveOffsets, owners: Owners) -> None:
        """Raise Fenced or WrongState if carrying it out would break the machine."""
        for topic_id, partition, epoch, end in command.partitions:
            owner, known = owners.of(topic_id, partition), self.of(topic_id, partition)
            if owner.epoch != epoch or owner.broker_id != command.broker_id:
                raise Fenced(
                    f"broker {command.broker_id} does not own partition {partition} of topic id {topic_id}"
                    f" in epoch {epoch}",
                    why=f"broker {owner.broker_id} has it in epoch {owner.epoch}",
                    hint="look again",
                    epoch=owner.epoch,
                )
            if known.closed and known.epoch == epoch and not (command.last and end == known.end):
                _wrong_reservation(known, "its owner said that nothing more is appended in this epoch")
            if command.last and known.epoch != epoch:
                _wrong_reservation(known, f"nothing was reserved in epoch {epoch}, so nothing was appended")
            if command.last and end > known.end:
                _wrong_reservation(known, f"a log cannot end at {end}, above what was reserved")
            if end < known.end and not command.last:
                _wrong_reservation(known, f"it does not go back to {end}")

    def reserve(self, command: ReserveOffsets) -> list[Reservation]:
        """Apply the command; return the reservations that changed."""
        changed = []
        for place in command.partitions:
            record = _made(command, place)
            if record != self.of(*place[:2]):
                changed.append(self._put(record))
        return changed

    def forget_topic(self, topic_id: int, partition_count: int) -> None:
        for partition in range(partition_count if self._by_key else 0):
            self._by_key.pop((topic_id, partition), None)


def _check_places(places: Sequence[tuple[int, ...]]) -> None:
    """Raise a CallerError where a command names too many partitions, none, or one twice."""
    if not 1 <= len(places) <= PARTITIONS_PER_COMMAND_MAX:
        raise LimitExceeded(
            f"a command names 1 .. {PARTITIONS_PER_COMMAND_MAX} partitions",
            why=f"not {len(places)}",
            limit=PARTITIONS_PER_COMMAND_MAX,
        )
    if len({place[:2] for place in places}) < len(places):
        raise InvalidArgument("a command names a partition twice")


def _made(command: ReserveOffsets, place: tuple[int, int, int, int]) -> Reservation:
    topic_id, partition, epoch, end = place
    return Reservation(topic_id, partition, end, command.broker_id, epoch, command.last)


def _wrong_reservation(known: Reservation, why: str) -> None:
    raise WrongState(
        f"offsets of partition {known.partition} of topic id {known.topic_id} are reserved up to {known.end}",
        why=why,
        end=known.end,
    )
