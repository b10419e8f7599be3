"""The partition against the plainest model: a list of what is in the log and a copy per write."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from danube.core.batch.format import MAGIC, BatchHeader
from danube.core.partition.dedup import Duplicate, producer_id_of
from danube.core.partition.partition import Partition
from danube.core.partition.policy import TopicPolicy
from danube.errors import Fenced, SequenceConflict, SequenceGap
from tests.examples import examples

NAMES = ("anna", "bert", "carl")
NOW_US = 1_000_000_000_000


@dataclass
class Entry:
    name: str
    epoch: int
    sequence: int
    count: int
    crc: int
    offset: int


@dataclass
class Model:
    """All of the log, and the highest epoch of each name that anyone has seen."""

    log: list[Entry] = field(default_factory=list)
    epochs: dict[str, int] = field(default_factory=dict)
    written_end: int = 0

    @property
    def log_end(self) -> int:
        return self.log[-1].offset + self.log[-1].count if self.log else 0

    def batches(self, name: str) -> list[Entry]:
        return [e for e in self.log if e.name == name and e.epoch == self.epochs.get(name)]

    def expected(self, name: str) -> int:
        return sum(e.count for e in self.batches(name))

    def publish(self, name: str, epoch: int, sequence: int, count: int, crc: int) -> int | type[Exception]:
        """The offset it gets or has, or the error."""
        known = self.epochs.get(name, -1)
        if epoch < known:
            return Fenced
        if epoch > known and sequence:
            return SequenceGap
        if epoch > known:
            self.epochs[name] = epoch
        if sequence > self.expected(name):
            return SequenceGap
        if sequence < self.expected(name):
            same = [e for e in self.batches(name) if (e.sequence, e.count, e.crc) == (sequence, count, crc)]
            return same[0].offset if same else SequenceConflict
        self.log.append(Entry(name, epoch, sequence, count, crc, self.log_end))
        return self.log[-1].offset

    def header(
        self, name: str, epoch: int, sequence: int, count: int, crc: int, offset: int = 0
    ) -> BatchHeader:
        return BatchHeader(
            MAGIC, 1024, offset, 0, 1, crc, 0, 0, 0, count, 0, 0, producer_id_of(name), sequence, 0, epoch,
            0, 0, 0, 0, 0, 0,
        )  # fmt: skip


class PartitionMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.model = Model()
        self.partition = Partition("/default/orders", 1, TopicPolicy())
        self.snapshot: tuple[bytes, int] | None = None

    def publish(self, name: str, epoch: int, sequence: int, count: int, crc: int) -> None:
        before = self.model.log_end
        expected = self.model.publish(name, epoch, sequence, count, crc)
        try:
            verdict = self.partition.admit(self.model.header(name, epoch, sequence, count, crc), NOW_US)
        except (Fenced, SequenceConflict, SequenceGap) as error:
            assert type(error) is expected
            return
        assert verdict.base_offset == expected
        assert isinstance(verdict, Duplicate) == (self.model.log_end == before)

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 3), crc=st.integers(0, 2))
    def publish_next(self, name: str, count: int, crc: int) -> None:
        self.publish(name, self.model.epochs.get(name, 1), self.model.expected(name), count, crc)

    @rule(
        name=st.sampled_from(NAMES),
        epoch_step=st.integers(-1, 1),
        sequence=st.integers(0, 8),
        count=st.integers(1, 3),
        crc=st.integers(0, 2),
    )
    def publish_anything(self, name: str, epoch_step: int, sequence: int, count: int, crc: int) -> None:
        self.publish(name, max(0, self.model.epochs.get(name, 1) + epoch_step), sequence, count, crc)

    @precondition(lambda self: self.model.log)
    @rule(data=st.data())
    def resend(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.model.log))
        self.publish(entry.name, entry.epoch, entry.sequence, entry.count, entry.crc)

    @rule(name=st.sampled_from(NAMES))
    def open_anew(self, name: str) -> None:
        grant = self.partition.open_producer(name, 0, 0, 0)
        assert grant.epoch > self.model.epochs.get(name, -1)
        self.model.epochs[name] = grant.epoch

    @rule(name=st.sampled_from(NAMES))
    def resume(self, name: str) -> None:
        if name not in self.model.epochs:
            return
        grant = self.partition.open_producer(name, producer_id_of(name), self.model.epochs[name], NOW_US)
        assert grant.next_sequence == self.model.expected(name)

    @rule()
    def write(self) -> None:
        self.model.written_end = self.partition.written(self.model.log_end)

    @rule(data=st.data())
    def fail_to_write(self, data: st.DataObject) -> None:
        ends = [e.offset for e in self.model.log if e.offset >= self.model.written_end] + [self.model.log_end]
        end = data.draw(st.sampled_from(ends))
        self.partition.rollback(end)
        self.model.log = [e for e in self.model.log if e.offset < end]

    @rule()
    def seal(self) -> None:
        self.snapshot = self.partition.snapshot(self.model.written_end), self.model.written_end

    @rule(with_snapshot=st.booleans())
    def restart(self, with_snapshot: bool) -> None:
        """What was written is recovered; an epoch that stored nothing is forgotten, unless sealed."""
        written = self.model.written_end
        self.model.log = [e for e in self.model.log if e.offset < written]
        headers = [self.model.header(*vars(entry).values()) for entry in self.model.log]
        self.partition = Partition("/default/orders", 1, TopicPolicy(), written)
        use = self.snapshot if with_snapshot else None
        self.partition.restore(use[0] if use else None, headers)
        for name in NAMES:
            stored = [e.epoch for e in self.model.log if e.name == name]
            known = self.partition._producers._by_id.get(producer_id_of(name))
            self.model.epochs.pop(name, None)
            if known is not None:
                assert known.epoch >= max(stored, default=0)
                assert use is not None or known.epoch == max(stored)
                self.model.epochs[name] = known.epoch
            else:
                assert not stored
        if not with_snapshot:
            self.snapshot = None

    @invariant()
    def a_snapshot_is_restored_to_itself(self) -> None:
        """Of all that is known, and of what is written: what a footer and a checkpoint hold."""
        for end in (self.partition.log_end, self.partition.written_end):
            snapshot = self.partition.snapshot(end)
            again = Partition("/default/orders", 1, TopicPolicy(), end)
            again.restore(snapshot, [])
            assert again.snapshot() == snapshot

    @invariant()
    def ends_agree(self) -> None:
        assert self.partition.log_end == self.model.log_end
        assert self.partition.written_end == self.model.written_end


PartitionMachine.TestCase.settings = settings(
    deadline=None, max_examples=examples(60), stateful_step_count=40
)
TestPartitionAgainstItsModel = PartitionMachine.TestCase
