"""Duplicates: the state that a partition keeps of its idempotent producers, and the checks by it.

A producer numbers its records from 0 in each of its *epochs*; a batch carries the sequence of its
first record.  For every producer id the partition keeps the epoch, the sequence it expects next
and a window of the last batches (their sequence, size in records, body checksum and offset), so
that a batch sent again after a lost answer is recognised by content and answered with the offset
it got the first time.

Bounds: PRODUCERS_PER_PARTITION_MAX producers; DEDUP_BATCHES_PER_PRODUCER batches for each while
they fit into DEDUP_BATCHES_PER_PARTITION_MAX together, at least DEDUP_BATCHES_KEPT.  A batch that
is not written yet is never dropped from a window, because a rollback has to find it.

Nothing is changed by a call that raises.  Pure: time comes in as a number.  The snapshot, which
lies in segment footers, is little-endian:

    position  size  field
           0     4  magic            b"DND1"; the digit is the format version
           4     4  crc              CRC32C of bytes 8 .. end of the snapshot
           8     8  end_offset       the snapshot knows the batches below this offset
          16     8  append_time_us   the latest append time handed out
          24     4  forgotten_epoch  highest epoch of any producer that was evicted
          28     4  producer_count
          32        producers, least recently used first, 24 bytes each:
                      u64 producer_id, u64 next_sequence, u32 epoch, u32 batch_count
                    batches, of the first producer, then the second ..., 28 bytes each:
                      u64 base_sequence, u64 base_offset, u32 record_count, u32 body_crc, u32 epoch
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Final

import msgspec

from danube.core.batch.checksum import crc32c, key_hash
from danube.core.batch.format import BatchHeader
from danube.errors import (
    Damage,
    Fenced,
    InvalidArgument,
    LimitExceeded,
    SequenceConflict,
    SequenceGap,
    StorageIncompatible,
)
from danube.limits import (
    DEDUP_BATCHES_KEPT,
    DEDUP_BATCHES_PER_PARTITION_MAX,
    DEDUP_BATCHES_PER_PRODUCER,
    PRODUCERS_PER_PARTITION_MAX,
)

# A producer may name an epoch this far above the known one and the clock; a higher one would
# leave no room for the epochs of later openings.
EPOCH_AHEAD_MAX: Final = 24 * 3600
_EPOCH_END: Final = 1 << 32
_EVICTION_LOOKUPS_MAX: Final = 1_024

_MAGIC: Final = b"DND1"
_HEAD: Final = struct.Struct("<4sIQqII")
_PRODUCER: Final = struct.Struct("<QQII")
_BATCH: Final = struct.Struct("<QQIII")
_CRC_START: Final = 8

# base_sequence, base_offset, record_count, body_crc, epoch of the owner
_Batch = tuple[int, int, int, int, int]


class Duplicate(msgspec.Struct, frozen=True, gc=False):
    """The batch is stored already, under ``base_offset``, by the owner of ``epoch``.

    It may be acknowledged once the partition's ``acknowledged_end`` has reached ``end_offset``; the original
    can still be on its way to the level that the topic promises.
    """

    base_offset: int
    end_offset: int
    epoch: int


class ProducerGrant(msgspec.Struct, frozen=True, gc=False):
    """A producer may publish under this id and epoch, beginning with ``next_sequence``."""

    producer_id: int
    epoch: int
    next_sequence: int


class ProducerState:
    """Memory of one producer id; ``batches`` are contiguous in sequence, oldest first."""

    __slots__ = ("batches", "epoch", "next_sequence", "producer_id")

    def __init__(self, producer_id: int, epoch: int, next_sequence: int = 0) -> None:
        self.producer_id = producer_id
        self.epoch = epoch
        self.next_sequence = next_sequence
        self.batches: deque[_Batch] = deque()

    def end_offset(self) -> int:
        """Offset after the producer's last known batch."""
        if not self.batches:
            return 0
        last = self.batches[-1]
        return last[1] + last[2]


def producer_id_of(name: str) -> int:
    """The stable, non-zero 63-bit id of a producer name."""
    return (key_hash(name.encode()) & ((1 << 63) - 1)) or 1


class ProducerTable:
    """All producers of one partition, least recently used first."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[int, ProducerState] = OrderedDict()
        self._batch_count = 0
        # Upper bound of what eviction has forgotten: an unknown producer at or below this epoch may
        # be one that was fenced before it was forgotten.
        self._forgotten_epoch = 0

    def open_name(self, name: str, now_us: int, acknowledged_end: int) -> ProducerGrant:
        """Open anew under ``name``: a higher epoch than any before, which fences those."""
        producer_id = producer_id_of(name)
        known = self._by_id.get(producer_id)
        epoch = max(known.epoch if known else self._forgotten_epoch, now_us // 1_000_000 - 1) + 1
        if epoch >= _EPOCH_END:
            raise LimitExceeded(f"producer {name[:40]!r} has used up its epochs", epoch=epoch)
        self._enter(producer_id, epoch, acknowledged_end)
        return ProducerGrant(producer_id, epoch, 0)

    def resume(self, producer_id: int, epoch: int, now_us: int, acknowledged_end: int) -> ProducerGrant:
        """Go on in an epoch that was opened earlier, here or at a former owner."""
        known = self._by_id.get(producer_id)
        if known is None or epoch != known.epoch:
            self._check_new_epoch(producer_id, epoch, known, now_us)
            known = self._enter(producer_id, epoch, acknowledged_end)
        self._by_id.move_to_end(producer_id)
        return ProducerGrant(producer_id, epoch, known.next_sequence)

    def recall(self, producer_id: int, batches_max: int) -> tuple[tuple[int, int, int], ...]:
        """The last batches that are known of a producer's epoch: first sequence, first offset, records."""
        known = self._by_id.get(producer_id)
        kept = list(known.batches)[-batches_max:] if known is not None and batches_max > 0 else []
        return tuple((sequence, offset, count) for sequence, offset, count, _, _ in kept)

    def check(self, header: BatchHeader, now_us: int, acknowledged_end: int) -> ProducerState | Duplicate:
        """The producer whose next batch this is, or the earlier batch that it repeats.

        Raises Fenced (older epoch), SequenceGap (a sequence was skipped, or the producer is not
        known) and SequenceConflict (a used sequence with other content, or one that is too old
        to be compared).
        """
        known = self._by_id.get(header.producer_id)
        if known is None or header.producer_epoch != known.epoch:
            known = self._enter_by_batch(header, known, now_us, acknowledged_end)
        self._by_id.move_to_end(header.producer_id)
        sequence = header.base_sequence
        expected = known.next_sequence
        if sequence == expected:
            return known
        if sequence > expected:
            raise _gap(header, expected)
        return _find_duplicate(known, header)

    def expects(self, header: BatchHeader) -> bool:
        """Whether the batch is no repetition and skips none, as far as its producer is known."""
        known = self._by_id.get(header.producer_id)
        if known is None or header.producer_epoch != known.epoch:
            return True
        return header.base_sequence == known.next_sequence

    def remember(
        self, producer: ProducerState, header: BatchHeader, offset: int, epoch: int, written_end: int
    ) -> None:
        """Note that ``header`` was admitted at ``offset`` as the producer's next batch."""
        sequence, count = header.base_sequence, header.record_count
        batches = producer.batches
        batches.append((sequence, offset, count, header.body_crc, epoch))
        producer.next_sequence = sequence + count
        self._batch_count += 1
        while len(batches) > DEDUP_BATCHES_PER_PRODUCER and batches[0][1] < written_end:
            batches.popleft()
            self._batch_count -= 1
        if self._batch_count > DEDUP_BATCHES_PER_PARTITION_MAX:
            self._trim(written_end)

    def replay(self, header: BatchHeader) -> None:
        """Update the table from a stored batch; stored batches are never refused."""
        producer_id, sequence = header.producer_id, header.base_sequence
        known = self._by_id.get(producer_id)
        if known is not None and header.producer_epoch < known.epoch:
            return
        if known is None or header.producer_epoch > known.epoch:
            known = self._enter(producer_id, header.producer_epoch, header.base_offset)
        elif sequence != known.next_sequence:
            # The producer was forgotten and came back in between; the window must stay contiguous.
            self._batch_count -= len(known.batches)
            known.batches.clear()
        self._by_id.move_to_end(producer_id)
        self.remember(known, header, header.base_offset, header.epoch, header.base_offset)

    def rollback(self, log_end: int) -> None:
        """Forget every batch at or above ``log_end``: its producer is expected to send it again.

        Epochs stay, so a fenced producer stays fenced.
        """
        for producer in self._by_id.values():
            batches = producer.batches
            while batches and batches[-1][1] >= log_end:
                producer.next_sequence = batches.pop()[0]
                self._batch_count -= 1

    def _enter_by_batch(
        self, header: BatchHeader, known: ProducerState | None, now_us: int, acknowledged_end: int
    ) -> ProducerState:
        self._check_new_epoch(header.producer_id, header.producer_epoch, known, now_us)
        if header.base_sequence != 0:
            raise _gap(header, 0)
        return self._enter(header.producer_id, header.producer_epoch, acknowledged_end)

    def _check_new_epoch(
        self, producer_id: int, epoch: int, known: ProducerState | None, now_us: int
    ) -> None:
        """Raise unless ``epoch`` may follow the known epoch, which is another one."""
        if known is not None and epoch < known.epoch:
            raise Fenced(
                "a newer producer of the same name has taken over",
                why=f"its epoch is {known.epoch}, this one's is {epoch}",
                hint="stop this producer, or give the two different names",
                producer_id=producer_id,
                epoch=known.epoch,
            )
        if known is None and 0 < self._forgotten_epoch >= epoch:
            raise SequenceGap(
                "the partition no longer knows this producer",
                why=f"it was idle while more than {PRODUCERS_PER_PARTITION_MAX} others published",
                hint="open the producer again under its name",
                producer_id=producer_id,
                epoch=epoch,
            )
        epoch_max = max(known.epoch if known else 0, now_us // 1_000_000) + EPOCH_AHEAD_MAX
        if not 0 <= epoch <= epoch_max:
            raise InvalidArgument(
                f"producer epoch {epoch} was never given out",
                why="epochs come from the broker and follow its clock",
                hint="open the producer under its name",
                epoch_max=epoch_max,
            )

    def _enter(self, producer_id: int, epoch: int, acknowledged_end: int) -> ProducerState:
        """Begin ``epoch``; the window of the one before is of no use to anyone."""
        entered = ProducerState(producer_id, epoch)
        former = self._by_id.get(producer_id)
        if former is not None:
            self._batch_count -= len(former.batches)
        elif len(self._by_id) >= PRODUCERS_PER_PARTITION_MAX:
            self._evict(acknowledged_end)
        self._by_id[producer_id] = entered
        self._by_id.move_to_end(producer_id)
        return entered

    def _evict(self, acknowledged_end: int) -> None:
        """Forget the least recently used producer, preferring one that waits for no answer."""
        candidates = islice(self._by_id.values(), _EVICTION_LOOKUPS_MAX)
        oldest = next(iter(self._by_id.values()))
        evicted = next((state for state in candidates if state.end_offset() <= acknowledged_end), oldest)
        del self._by_id[evicted.producer_id]
        self._batch_count -= len(evicted.batches)
        self._forgotten_epoch = max(self._forgotten_epoch, evicted.epoch)

    def _trim(self, written_end: int) -> None:
        """Shorten the windows of the least recently used until an eighth of the bound is free."""
        enough = DEDUP_BATCHES_PER_PARTITION_MAX * 7 // 8
        for producer in self._by_id.values():
            batches = producer.batches
            while len(batches) > DEDUP_BATCHES_KEPT and batches[0][1] < written_end:
                batches.popleft()
                self._batch_count -= 1
            if self._batch_count <= enough:
                return

    def snapshot(self, end_offset: int, append_time_us: int) -> bytes:
        """The table as it was when the log ended at ``end_offset``."""
        heads: list[bytes] = []
        bodies: list[bytes] = []
        for producer in self._by_id.values():
            batches = list(producer.batches)
            next_sequence = producer.next_sequence
            while batches and batches[-1][1] >= end_offset:
                next_sequence = batches.pop()[0]
            del batches[: max(0, len(batches) - DEDUP_BATCHES_PER_PRODUCER)]
            heads.append(_PRODUCER.pack(producer.producer_id, next_sequence, producer.epoch, len(batches)))
            bodies.append(struct.pack("<" + "QQIII" * len(batches), *chain.from_iterable(batches)))
        head = _HEAD.pack(_MAGIC, 0, end_offset, append_time_us, self._forgotten_epoch, len(heads))
        content = b"".join((head[_CRC_START:], *heads, *bodies))
        return _MAGIC + crc32c(content).to_bytes(4, "little") + content

    def restore(self, snapshot: bytes) -> tuple[int, int]:
        """Replace everything by a snapshot; return its ``(end_offset, append_time_us)``.

        Raises Damage or StorageIncompatible, and then changes nothing.
        """
        end_offset, append_time_us, forgotten_epoch, producer_count = _read_head(snapshot)
        by_id: OrderedDict[int, ProducerState] = OrderedDict()
        heads_end = _HEAD.size + producer_count * _PRODUCER.size
        stored: Iterator[_Batch] = _BATCH.iter_unpack(snapshot[heads_end:])
        heads: Iterator[tuple[int, int, int, int]] = _PRODUCER.iter_unpack(snapshot[_HEAD.size : heads_end])
        for producer_id, next_sequence, epoch, batch_count in heads:
            producer = by_id[producer_id] = ProducerState(producer_id, epoch, next_sequence)
            producer.batches.extend(islice(stored, batch_count))
        self._by_id = by_id
        self._batch_count = sum(len(producer.batches) for producer in by_id.values())
        self._forgotten_epoch = forgotten_epoch
        return end_offset, append_time_us


def _read_head(snapshot: bytes) -> tuple[int, int, int, int]:
    """Check a snapshot's frame; return end_offset, append_time_us, forgotten_epoch, producer_count."""
    if snapshot[:3] == _MAGIC[:3] and snapshot[:4] != _MAGIC:
        raise StorageIncompatible("producer snapshot has a newer format", why=f"magic is {snapshot[:4]!r}")
    if len(snapshot) < _HEAD.size or snapshot[:4] != _MAGIC:
        raise Damage("producer snapshot is malformed", size=len(snapshot))
    _, crc, end_offset, append_time_us, forgotten_epoch, producer_count = _HEAD.unpack_from(snapshot)
    if crc32c(snapshot[_CRC_START:]) != crc:
        raise Damage("producer snapshot fails its checksum", size=len(snapshot))
    return end_offset, append_time_us, forgotten_epoch, producer_count


def _find_duplicate(producer: ProducerState, header: BatchHeader) -> Duplicate:
    """The earlier batch that ``header``, whose sequence was used before, repeats."""
    sequence = header.base_sequence
    for base_sequence, base_offset, record_count, body_crc, epoch in reversed(producer.batches):
        if base_sequence > sequence:
            continue
        if (base_sequence, record_count, body_crc) == (sequence, header.record_count, header.body_crc):
            return Duplicate(base_offset, base_offset + record_count, epoch)
        raise SequenceConflict(
            f"sequence {sequence} came again with other content",
            why=f"it was used by the batch at offset {base_offset}",
            hint="a producer that starts over must be opened again under its name",
            sequence=sequence,
            base_offset=base_offset,
        )
    raise SequenceConflict(
        f"sequence {sequence} is too old to be compared",
        why=f"the partition remembers the last {len(producer.batches)} batches of this producer",
        hint=f"keep at most {DEDUP_BATCHES_PER_PRODUCER} batches in flight",
        sequence=sequence,
        next_sequence=producer.next_sequence,
    )


def _gap(header: BatchHeader, expected: int) -> SequenceGap:
    return SequenceGap(
        f"sequence {header.base_sequence} came where {expected} was expected",
        why="a batch between the two was never stored",
        hint="send the batches again in order, beginning with the expected sequence",
        sequence=header.base_sequence,
        next_sequence=expected,
    )
