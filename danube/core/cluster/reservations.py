"""How far each partition's owner may give offsets, inside the metadata machine.

An owner appends only below the end that it reserved, and reserves ahead of its need.  Only its own disk may
know how far it came; whoever owns the partition next begins at the end, so no offset is given twice.

Reserved:  by the owner of the current epoch; the end only grows, and who reserved it last is kept: that
           one's disk may hold records which nobody else has.
Closed:    by the same, with ``last``: it has stopped appending for good in this epoch and says where its
           log ends, at or below what was reserved.  Nothing more is reserved in that epoch.  An owner that
           reserved nothing in its epoch has appended nothing, and has nothing to close.
Forgotten: with the topic.

An assignment and a release leave it as it is.
"""

from __future__ import annotations

from typing import Final

from danube.core.cluster.commands import Reservation, ReserveOffsets
from danube.core.cluster.ownership import Owners, Place
from danube.errors import Fenced, InvalidArgument, LimitExceeded, WrongState
from danube.limits import PARTITIONS_PER_COMMAND_MAX

RESERVED_END_MAX: Final = 1 << 62


class Reservations:
    """The reservation of every partition that has one."""

    __slots__ = ("_by_place",)

    def __init__(self) -> None:
        self._by_place: dict[Place, Reservation] = {}

    def __len__(self) -> int:
        return len(self._by_place)

    def of(self, topic_id: int, partition: int) -> Reservation:
        """What is reserved of a partition; an end of 0 where nothing ever was."""
        return self._by_place.get((topic_id, partition)) or Reservation(topic_id, partition, 0, 0, 0)

    def find(self, topic_id: int, partition: int) -> Reservation | None:
        return self._by_place.get((topic_id, partition))

    def records(self) -> list[Reservation]:
        """All by topic id and partition."""
        return [record for _, record in sorted(self._by_place.items())]

    def check(self, command: ReserveOffsets) -> bool:
        """Whether it would change anything; raises a CallerError where it is not sound in itself."""
        if not 1 <= len(command.partitions) <= PARTITIONS_PER_COMMAND_MAX:
            raise LimitExceeded(
                f"a command names 1 .. {PARTITIONS_PER_COMMAND_MAX} partitions",
                why=f"not {len(command.partitions)}",
                limit=PARTITIONS_PER_COMMAND_MAX,
            )
        if len({place[:2] for place in command.partitions}) < len(command.partitions):
            raise InvalidArgument("a command names a partition twice")
        for *_, end in command.partitions:
            if not 0 <= end <= RESERVED_END_MAX:
                raise LimitExceeded(f"offsets are 0 .. {RESERVED_END_MAX}", why=f"not {end}")
        return any(_made(command, place) != self.of(*place[:2]) for place in command.partitions)

    def refuse(self, command: ReserveOffsets, owners: Owners) -> None:
        """Raise Fenced or WrongState where carrying it out would break the machine."""
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
                _wrong(known, "its owner said that nothing more is appended in this epoch")
            if command.last and known.epoch != epoch:
                _wrong(known, f"nothing was reserved in epoch {epoch}, so nothing was appended")
            if command.last and end > known.end:
                _wrong(known, f"a log cannot end at {end}, above what was reserved")
            if end < known.end and not command.last:
                _wrong(known, f"it does not go back to {end}")

    def reserve(self, command: ReserveOffsets) -> list[Reservation]:
        """Those that changed."""
        changed = []
        for place in command.partitions:
            record = _made(command, place)
            if record != self.of(*place[:2]):
                self._by_place[record.topic_id, record.partition] = record
                changed.append(record)
        return changed

    def forget_topic(self, topic_id: int, partition_count: int) -> None:
        for partition in range(partition_count if self._by_place else 0):
            self._by_place.pop((topic_id, partition), None)

    def copy(self) -> Reservations:
        other = Reservations()
        other._by_place = dict(self._by_place)
        return other

    def load(self, records: list[Reservation]) -> None:
        """Take in what a snapshot kept."""
        self._by_place = {(record.topic_id, record.partition): record for record in records}


def _made(command: ReserveOffsets, place: tuple[int, int, int, int]) -> Reservation:
    topic_id, partition, epoch, end = place
    return Reservation(topic_id, partition, end, command.broker_id, epoch, command.last)


def _wrong(known: Reservation, why: str) -> None:
    raise WrongState(
        f"offsets of partition {known.partition} of topic id {known.topic_id} are reserved up to {known.end}",
        why=why,
        end=known.end,
    )
