"""A partition at its owner: assigns offsets to batches, and tracks the ends of the log.

The owner worker asks ``admit`` about every batch before its bytes go to the log, and reports
``written`` and ``synced`` afterwards.  The ends keep this order at all times:

    synced_end <= written_end <= log_end,    high_watermark <= written_end

``high_watermark`` is the end of what consumers may see.  It follows ``written_end`` at the levels memory and
written (for a topic that keeps no log, *written* means that the bytes lie in memory) and
``synced_end`` at fsync, and everywhere while the partition is ``held`` because the disk has fallen behind.
It never goes back.  ``acknowledged_end`` is the end of the records that are stored at the current level.
After the level was raised this end may be lower; the partition is ``settling`` until it has caught up.

Nothing is changed by a call that raises.  Pure: no file, no clock.

A partition whose owner appends only below what it has reserved: the partition of a cluster.

This is a separate class, so that a single host does not pay for the check.

The owner's side of a reservation: how far it may append now, and when to reserve more.

    wanted()    the end to reserve next, when half of a step is used; None: nothing to ask for now
    reserved()  the metadata has it: the owner may append below that end
    refused()   it was not reserved; wanted() tells again
    close()     nothing more is appended

On a single host offsets are not reserved.  Pure: nothing is kept in files, because only the metadata's
reservation counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NoReturn

import msgspec

from danube.core.batch.format import BatchHeader, Flag
from danube.core.partition.dedup import Duplicate, ProducerGrant, ProducerState, ProducerTable, producer_id_of
from danube.core.partition.policy import Durability, TopicPolicy
from danube.errors import InvalidArgument, Overloaded, OwnerMoved, ProtocolError, broken
from danube.ids import check_label

STEP: Final = 1 << 25


class OffsetBudget:
    """Offsets of one partition in one epoch of its ownership; ``end``: appends stay below it."""

    __slots__ = ("_asked", "_step", "closed", "end")

    def __init__(self, end: int, step: int = STEP) -> None:
        self.end = end
        self.closed = False
        self._asked = 0
        self._step = step

    def wanted(self, log_end: int) -> int | None:
        """The end to reserve now: a step ahead, once less than half of one is left and none is asked for."""
        if self.closed or self._asked or self.end - log_end >= self._step // 2:
            return None
        return log_end + self._step

    def asked(self, end: int) -> None:
        """A command for this end was proposed."""
        self._asked = end

    def reserved(self, end: int) -> None:
        """Note that a reservation up to ``end`` was committed; a late or repeated one changes nothing."""
        if self.closed:
            return
        self.end = max(self.end, end)
        if self.end >= self._asked:
            self._asked = 0

    def refused(self) -> None:
        """Note that the requested reservation will not come."""
        self._asked = 0

    def close(self, log_end: int) -> int:
        """Stop at ``log_end``; the end to close the reservation with."""
        if log_end > self.end:
            broken("a log passed what was reserved for it", log_end=log_end, reserved_end=self.end)
        self.closed = True
        self.end = log_end
        return log_end


__all__ = ["Admitted", "Duplicate", "Partition", "ProducerGrant"]

_FSYNC: Final = Durability.FSYNC  # a member of an IntEnum costs several times as much to look up


class Admitted(msgspec.Struct, frozen=True, gc=False):
    """The batch goes to the log with this first offset and append time."""

    base_offset: int
    append_time_us: int


class Partition:
    """Decides for one partition in one epoch of its ownership.

    ``log_end`` is where the recovered log ends; all of it is expected to be on disk.  After a
    recovery ``restore`` comes before the first ``admit``.
    """

    __slots__ = (
        "_append_time_us",
        "_producers",
        "epoch",
        "held",
        "high_watermark",
        "level",
        "log_end",
        "name",
        "policy",
        "synced_end",
        "written_end",
    )

    def __init__(self, name: str, epoch: int, policy: TopicPolicy, log_end: int = 0) -> None:
        if log_end < 0:
            broken("a log ends before it begins", partition=name, log_end=log_end)
        self.name = name
        self.epoch = epoch
        self.policy = policy
        self.level = policy.level
        self.held = False
        self.log_end = self.written_end = self.synced_end = self.high_watermark = log_end
        self._producers = ProducerTable()
        self._append_time_us = 0

    @property
    def acknowledged_end(self) -> int:
        """Records below it are stored at the level that an acknowledgement names."""
        return self.synced_end if self.level >= _FSYNC else self.high_watermark

    @property
    def settling(self) -> bool:
        """Records that may have been seen are not stored at the level of now: it was raised a moment ago."""
        return self.level >= _FSYNC and self.synced_end < self.high_watermark

    def open_producer(self, name: str, producer_id: int, epoch: int, now_us: int) -> ProducerGrant:
        """Open a producer anew (``producer_id`` 0), or resume the epoch of an earlier opening.

        Opening anew fences every older epoch of ``name``.  Resuming raises Fenced when a newer
        epoch is known and SequenceGap when the producer was forgotten (open it anew then).
        """
        check_label(name, "producer")
        if producer_id == 0:
            return self._producers.open_name(name, now_us, self.high_watermark)
        if producer_id != producer_id_of(name):
            raise InvalidArgument(
                f"producer id {producer_id} does not belong to {name!r}",
                hint="resume with the name and the id of the same opening",
            )
        return self._producers.resume(producer_id, epoch, now_us, self.high_watermark)

    def recall(self, producer_id: int, batches_max: int) -> tuple[tuple[int, int, int], ...]:
        """The last batches of a producer: first sequence, first offset and number of records of each."""
        return self._producers.recall(producer_id, batches_max)

    def admit(self, header: BatchHeader, now_us: int) -> Admitted | Duplicate:
        """Give a batch its offset and time, or recognise it as one that has them already.

        Append times never go back, even where the clock does.  A Duplicate is answered once
        ``acknowledged_end`` has reached its ``end_offset``.  Raises Fenced, SequenceGap or
        SequenceConflict (see :mod:`danube.core.partition.dedup`), and ProtocolError for a batch that only
        a broker may send.
        """
        if header.flags & Flag.SELECTED:
            raise ProtocolError("a published batch must not select offsets")
        producer: ProducerState | None = None
        if header.producer_id:
            verdict = self._producers.check(header, now_us, self.high_watermark)
            if isinstance(verdict, Duplicate):
                return verdict
            producer = verdict
        base_offset = self.log_end
        append_time_us = self._append_time_us
        if now_us > append_time_us:
            append_time_us = now_us
        admitted = Admitted(base_offset, append_time_us)
        if producer is not None:
            self._producers.remember(producer, header, base_offset, self.epoch, self.written_end)
        self._append_time_us = append_time_us
        self.log_end = base_offset + header.record_count
        return admitted

    def expects(self, header: BatchHeader) -> bool:
        """False if ``admit`` gives the batch no offset: it repeats one, or follows one that was refused."""
        return not header.producer_id or self._producers.expects(header)

    def written(self, end: int) -> int:
        """The log is in the page cache (or memory) up to ``end``; return the high watermark."""
        if not self.written_end <= end <= self.log_end:
            self._moved_outside("written", end)
        self.written_end = end
        if self.level < _FSYNC and not self.held and end > self.high_watermark:
            self.high_watermark = end
        return self.high_watermark

    def hold(self) -> None:
        """The disk has fallen behind: until ``release`` nothing counts that is not synced."""
        self.held = True

    def release(self) -> int:
        """The disk has caught up; return the high watermark."""
        self.held = False
        return self._follow_level()

    def synced(self, end: int) -> int:
        """The log is on stable storage up to ``end``; return the high watermark.

        Group commits finish in any order, so an ``end`` that was passed before is not an error.
        """
        if end > self.written_end:
            self._moved_outside("synced", end)
        if end > self.synced_end:
            self.synced_end = end
            if (self.level >= _FSYNC or self.held) and end > self.high_watermark:
                self.high_watermark = end
        return self.high_watermark

    def rollback(self, log_end: int) -> None:
        """Undo every admission at or above ``log_end``; called when writing failed.

        Sequence expectations become the former ones, so that a resend is admitted again.  Written batches
        stay: raises InvariantBroken below ``written_end``.
        """
        if not self.written_end <= log_end <= self.log_end:
            self._moved_outside("rolled back", log_end)
        self._producers.rollback(log_end)
        self.log_end = log_end

    def update_policy(self, policy: TopicPolicy) -> int:
        """Take over a new policy; return the high watermark, which never goes back."""
        self.policy = policy
        self.level = policy.level
        self.held = self.held and self.level < _FSYNC
        return self._follow_level()

    def _follow_level(self) -> int:
        reached = self.synced_end if self.level >= _FSYNC or self.held else self.written_end
        self.high_watermark = max(self.high_watermark, reached)
        return self.high_watermark

    def snapshot(self, end_offset: int | None = None) -> bytes:
        """Return the state of producers for a log that is cut at ``end_offset`` (default: log_end)."""
        end = self.log_end if end_offset is None else end_offset
        if not 0 <= end <= self.log_end:
            self._moved_outside("snapshot", end)
        return self._producers.snapshot(end, self._append_time_us)

    def restore(self, snapshot: bytes | None, headers: Iterable[BatchHeader]) -> None:
        """Rebuild the state of producers from a snapshot and the headers of later stored batches.

        ``headers`` are in log order; those below the snapshot's end are skipped.  Raises Damage or
        StorageIncompatible for a snapshot that cannot be used, before anything is changed; then
        ``restore(None, headers of the whole log)`` gives the same.
        """
        producers = ProducerTable()
        known_end, append_time_us = producers.restore(snapshot) if snapshot is not None else (0, 0)
        if known_end > self.log_end:
            self._moved_outside("snapshot", known_end)
        for header in headers:
            if header.base_offset < known_end:
                continue
            known_end = header.end_offset
            append_time_us = max(append_time_us, header.append_time_us)
            if header.producer_id:
                producers.replay(header)
        if known_end > self.log_end:
            self._moved_outside("recovered headers", known_end)
        self._producers = producers
        self._append_time_us = max(self._append_time_us, append_time_us)

    def _moved_outside(self, what: str, end: int) -> None:
        broken(
            f"{what} end is outside the log",
            partition=self.name,
            end=end,
            synced_end=self.synced_end,
            written_end=self.written_end,
            log_end=self.log_end,
        )


class ReservedPartition(Partition):
    """``budget`` is this epoch's; its owner reserves more and tells it."""

    __slots__ = ("budget",)

    def __init__(
        self, name: str, epoch: int, policy: TopicPolicy, log_end: int, budget: OffsetBudget
    ) -> None:
        super().__init__(name, epoch, policy, log_end)
        self.budget = budget

    def admit(self, header: BatchHeader, now_us: int) -> Admitted | Duplicate:
        """As before; Overloaded where more must be reserved first, OwnerMoved if it is being released."""
        if self.log_end + header.record_count > self.budget.end:
            self._refuse()
        return super().admit(header, now_us)

    def _refuse(self) -> NoReturn:
        if self.budget.closed:
            raise OwnerMoved(f"{self.name} is being released", hint="look it up again")
        raise Overloaded(
            f"{self.name} has given all offsets that are reserved",
            why="the controller does not answer, or takes its time",
            hint="send again",
            reserved_end=self.budget.end,
        )
