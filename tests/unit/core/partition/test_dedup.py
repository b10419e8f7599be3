"""Idempotent publish: epochs, sequences, windows, bounds and what survives a restart."""

from __future__ import annotations

import struct

import pytest

from danube.core.batch.format import MAGIC, BatchHeader
from danube.core.partition import dedup
from danube.core.partition.dedup import Duplicate, producer_id_of
from danube.core.partition.partition import Admitted, Partition
from danube.core.partition.policy import TopicPolicy
from danube.errors import (
    Damage,
    Fenced,
    InvalidArgument,
    LimitExceeded,
    SequenceConflict,
    SequenceGap,
    StorageIncompatible,
)
from danube.limits import DEDUP_BATCHES_PER_PRODUCER

NOW_US = 1_700_000_000_000_000
NOW_S = NOW_US // 1_000_000


def header(
    sequence: int, count: int = 1, producer_id: int = 5, epoch: int = 1, crc: int | None = None
) -> BatchHeader:
    crc = sequence * 31 + 1 if crc is None else crc
    return BatchHeader(
        MAGIC, 1024, 0, 0, 0, crc, 0, 0, 0, count, 0, 0, producer_id, sequence, 0, epoch, 0, 0, 0, 0, 0, 0
    )


def partition(log_end: int = 0) -> Partition:
    return Partition("/default/orders", 3, TopicPolicy(), log_end)


def admit_and_write(orders: Partition, batch: BatchHeader, now_us: int = NOW_US) -> Admitted | Duplicate:
    verdict = orders.admit(batch, now_us)
    orders.written(orders.log_end)
    return verdict


def stored(batch: BatchHeader, admitted: Admitted | Duplicate) -> BatchHeader:
    return batch._replace(base_offset=admitted.base_offset, epoch=3, append_time_us=NOW_US)


def test_a_resend_is_stored_once_and_answered_with_the_old_offset() -> None:
    orders = partition(log_end=100)
    assert orders.admit(header(0, 10), NOW_US) == Admitted(100, NOW_US)
    orders.admit(header(10, 5), NOW_US)
    assert orders.admit(header(0, 10), NOW_US) == Duplicate(100, 110, 3)
    assert orders.log_end == 115


@pytest.mark.parametrize(
    "again",
    [header(0, 10, crc=99), header(0, 9, crc=1), header(3, 7, crc=1), header(3, 10, crc=1)],
    ids=["other content", "other count", "inside a batch", "across batches"],
)
def test_a_used_sequence_with_other_content_is_refused_by_content(again: BatchHeader) -> None:
    orders = partition()
    orders.admit(header(0, 10, crc=1), NOW_US)
    orders.admit(header(10, 10), NOW_US)
    with pytest.raises(SequenceConflict):
        orders.admit(again, NOW_US)
    assert orders.log_end == 20


def test_a_skipped_sequence_is_refused_and_names_the_expected_one() -> None:
    orders = partition()
    orders.admit(header(0, 10), NOW_US)
    with pytest.raises(SequenceGap) as caught:
        orders.admit(header(11), NOW_US)
    assert caught.value.facts["next_sequence"] == 10
    assert orders.admit(header(10), NOW_US).base_offset == 10


def test_the_window_is_bounded_and_what_left_it_is_refused_not_stored_again() -> None:
    orders = partition()
    for sequence in range(DEDUP_BATCHES_PER_PRODUCER + 3):
        admit_and_write(orders, header(sequence))
    assert admit_and_write(orders, header(3)) == Duplicate(3, 4, 3)
    with pytest.raises(SequenceConflict):
        orders.admit(header(2), NOW_US)


def test_opening_anew_fences_the_former_opening() -> None:
    orders = partition()
    old = orders.open_producer("anna", 0, 0, NOW_US)
    assert old.producer_id == producer_id_of("anna") and 0 < old.producer_id < 1 << 63
    assert (old.epoch, old.next_sequence) == (NOW_S, 0)
    orders.admit(header(0, 2, old.producer_id, old.epoch), NOW_US)
    new = orders.open_producer("anna", 0, 0, NOW_US)
    assert (new.producer_id, new.epoch, new.next_sequence) == (old.producer_id, old.epoch + 1, 0)
    with pytest.raises(Fenced):
        orders.admit(header(2, 1, old.producer_id, old.epoch), NOW_US)
    with pytest.raises(Fenced):
        orders.admit(header(0, 2, old.producer_id, old.epoch), NOW_US)
    with pytest.raises(Fenced):
        orders.open_producer("anna", old.producer_id, old.epoch, NOW_US)
    assert orders.admit(header(0, 2, new.producer_id, new.epoch), NOW_US) == Admitted(2, NOW_US)


def test_epochs_rise_even_if_the_clock_goes_back() -> None:
    orders = partition()
    epochs = [orders.open_producer("anna", 0, 0, now).epoch for now in (NOW_US, 5, NOW_US - 10**9)]
    assert epochs == [NOW_S, NOW_S + 1, NOW_S + 2]


def test_resuming_tells_what_the_log_expects() -> None:
    orders = partition()
    grant = orders.open_producer("anna", 0, 0, NOW_US)
    orders.admit(header(0, 7, grant.producer_id, grant.epoch), NOW_US)
    again = orders.open_producer("anna", grant.producer_id, grant.epoch, NOW_US)
    assert (again.epoch, again.next_sequence) == (grant.epoch, 7)


def test_an_epoch_that_was_opened_elsewhere_begins_at_its_sequence_0() -> None:
    orders = partition()
    orders.admit(header(0, 4, epoch=6), NOW_US)
    with pytest.raises(SequenceGap):
        orders.admit(header(4, epoch=7), NOW_US)
    assert orders.admit(header(4, 1, epoch=6), NOW_US).base_offset == 4, "the refused batch fenced nobody"
    assert orders.admit(header(0, 1, epoch=7), NOW_US).base_offset == 5
    with pytest.raises(Fenced):
        orders.admit(header(5, epoch=6), NOW_US)


def test_a_resumed_newer_epoch_fences_before_its_first_batch() -> None:
    orders = partition()
    grant = orders.open_producer("anna", 0, 0, NOW_US)
    resumed = orders.open_producer("anna", grant.producer_id, grant.epoch + 1, NOW_US)
    assert resumed.next_sequence == 0
    with pytest.raises(Fenced):
        orders.admit(header(0, 1, grant.producer_id, grant.epoch), NOW_US)


@pytest.mark.parametrize("epoch", [NOW_S + dedup.EPOCH_AHEAD_MAX + 1, (1 << 32) - 1, -1])
def test_an_epoch_that_was_never_given_out_cannot_lock_a_name(epoch: int) -> None:
    orders = partition()
    with pytest.raises(InvalidArgument):
        orders.open_producer("anna", producer_id_of("anna"), epoch, NOW_US)
    with pytest.raises(InvalidArgument):
        orders.admit(header(0, epoch=epoch), NOW_US)
    assert orders.open_producer("anna", 0, 0, NOW_US).epoch == NOW_S


def test_the_last_epoch_is_an_error_not_an_overflow() -> None:
    with pytest.raises(LimitExceeded):
        partition().open_producer("anna", 0, 0, (1 << 32) * 1_000_000)


def test_rollback_restores_the_expectations_exactly() -> None:
    orders = partition()
    admit_and_write(orders, header(0, 4, producer_id=5))
    orders.admit(header(4, 3, producer_id=5), NOW_US)
    orders.admit(header(0, 2, producer_id=6), NOW_US)
    orders.admit(header(7, 1, producer_id=5), NOW_US)
    orders.rollback(4)
    assert orders.admit(header(0, 4, producer_id=5), NOW_US) == Duplicate(0, 4, 3)
    with pytest.raises(SequenceGap):
        orders.admit(header(7, 1, producer_id=5), NOW_US)
    with pytest.raises(SequenceGap):
        orders.admit(header(2, 1, producer_id=6), NOW_US)
    assert orders.admit(header(4, 3, producer_id=5), NOW_US).base_offset == 4
    assert orders.admit(header(0, 2, producer_id=6), NOW_US).base_offset == 7


def test_rollback_is_exact_for_more_batches_than_the_window_holds() -> None:
    orders = partition()
    admit_and_write(orders, header(0))
    for sequence in range(1, 2 * DEDUP_BATCHES_PER_PRODUCER):
        orders.admit(header(sequence), NOW_US)
    orders.rollback(1)
    assert orders.admit(header(1), NOW_US).base_offset == 1


def test_rollback_leaves_the_fence_standing() -> None:
    orders = partition()
    admit_and_write(orders, header(0, epoch=6))
    orders.admit(header(0, epoch=7), NOW_US)
    orders.rollback(1)
    with pytest.raises(Fenced):
        orders.admit(header(1, epoch=6), NOW_US)
    assert orders.admit(header(0, epoch=7), NOW_US).base_offset == 1


def test_producers_are_bounded_and_the_least_recently_used_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "PRODUCERS_PER_PARTITION_MAX", 4)
    orders = partition()
    for producer_id in (1, 2, 3, 4, 1, 5):
        sequence = 1 if orders.log_end == 4 else 0
        admit_and_write(orders, header(sequence, producer_id=producer_id))
    assert len(orders._producers._by_id) == 4
    with pytest.raises(SequenceGap, match="no longer knows"):
        orders.admit(header(1, producer_id=2), NOW_US)
    assert isinstance(orders.admit(header(0, producer_id=1), NOW_US), Duplicate)


def test_who_waits_for_an_answer_is_not_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "PRODUCERS_PER_PARTITION_MAX", 2)
    orders = Partition("/default/orders", 3, TopicPolicy(durability="fsync"))
    orders.admit(header(0, producer_id=1), NOW_US)
    orders.open_producer("idle", 0, 0, NOW_US)
    orders.admit(header(0, producer_id=2, epoch=2), NOW_US)
    assert orders.admit(header(0, producer_id=1), NOW_US) == Duplicate(0, 1, 3)


def test_eviction_happens_although_everyone_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "PRODUCERS_PER_PARTITION_MAX", 2)
    orders = partition()
    for producer_id in (1, 2, 3):
        orders.admit(header(0, producer_id=producer_id, epoch=producer_id), NOW_US)
    assert len(orders._producers._by_id) == 2


def test_a_fenced_producer_stays_fenced_after_its_name_was_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "PRODUCERS_PER_PARTITION_MAX", 1)
    orders = partition()
    anna = orders.open_producer("anna", 0, 0, NOW_US)
    orders.open_producer("anna", 0, 0, NOW_US)
    orders.open_producer("bert", 0, 0, NOW_US)
    with pytest.raises(SequenceGap):
        orders.admit(header(0, 1, anna.producer_id, anna.epoch), NOW_US)
    with pytest.raises(SequenceGap):
        orders.open_producer("anna", anna.producer_id, anna.epoch, NOW_US)
    assert orders.open_producer("anna", 0, 0, NOW_US).epoch > anna.epoch + 1


def test_all_windows_together_are_bounded_and_the_busy_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "DEDUP_BATCHES_PER_PARTITION_MAX", 400)
    orders = partition()
    table = orders._producers
    for producer_id in (1, 2, 3):
        for sequence in range(200):
            admit_and_write(orders, header(sequence, producer_id=producer_id))
            assert table._batch_count <= 400
    assert table._batch_count == sum(len(p.batches) for p in table._by_id.values())
    assert isinstance(orders.admit(header(0, producer_id=3), NOW_US), Duplicate)
    assert isinstance(orders.admit(header(192, producer_id=1), NOW_US), Duplicate)
    with pytest.raises(SequenceConflict):
        orders.admit(header(191, producer_id=1), NOW_US)
    assert orders.admit(header(200, producer_id=1), NOW_US).base_offset == 600


def test_a_restart_remembers_through_snapshot_and_headers() -> None:
    first = partition()
    log = [stored(header(s, 2, producer_id=p), first.admit(header(s, 2, producer_id=p), NOW_US))
           for s in (0, 2, 4) for p in (5, 6)]  # fmt: skip
    snapshot = first.snapshot(4)
    for known, headers in ((snapshot, log), (None, log), (first.snapshot(), [])):
        second = partition(first.log_end)
        second.restore(known, headers)
        assert second.snapshot() == first.snapshot()
        assert second.admit(header(0, 2, producer_id=6), NOW_US) == Duplicate(2, 4, 3)
        assert second.admit(header(4, 2, producer_id=5), NOW_US) == Duplicate(8, 10, 3)
        assert second.admit(header(6, 2, producer_id=5), NOW_US) == Admitted(12, NOW_US)


def test_a_snapshot_of_an_earlier_end_leaves_out_what_came_later() -> None:
    first = partition()
    first.admit(header(0, 2), NOW_US)
    first.admit(header(2, 2), NOW_US)
    second = partition(2)
    second.restore(first.snapshot(2), [])
    with pytest.raises(SequenceGap):
        second.admit(header(4, 2), NOW_US)
    assert second.admit(header(2, 2), NOW_US).base_offset == 2


def test_replay_follows_epochs_and_ignores_what_was_fenced() -> None:
    log = [header(0, 1, epoch=2), header(0, 1, epoch=3), header(1, 1, epoch=2), header(1, 1, epoch=3)]
    log = [batch._replace(base_offset=offset) for offset, batch in enumerate(log)]
    orders = partition(4)
    orders.restore(None, log)
    assert orders.admit(header(1, 1, epoch=3), NOW_US) == Duplicate(3, 4, 0)
    with pytest.raises(Fenced):
        orders.admit(header(2, 1, epoch=2), NOW_US)


def test_replay_of_a_log_with_a_hole_keeps_the_window_contiguous() -> None:
    log = [header(0)._replace(base_offset=0), header(9)._replace(base_offset=1)]
    orders = partition(2)
    orders.restore(None, log)
    with pytest.raises(SequenceConflict):
        orders.admit(header(0), NOW_US)
    assert orders.admit(header(9), NOW_US) == Duplicate(1, 2, 0)
    assert orders.admit(header(10), NOW_US).base_offset == 2


def test_the_snapshot_is_what_its_table_says() -> None:
    orders = partition()
    orders.admit(header(0, 2, producer_id=5, epoch=4, crc=77), NOW_US)
    content = struct.pack("<QqII", 2, NOW_US, 0, 1)
    content += struct.pack("<QQII", 5, 2, 4, 1) + struct.pack("<QQIII", 0, 0, 2, 77, 3)
    snapshot = orders.snapshot()
    assert snapshot[:4] == b"DND1" and snapshot[8:] == content


def test_every_flipped_bit_and_every_cut_of_a_snapshot_is_damage() -> None:
    orders = partition()
    orders.admit(header(0, 2), NOW_US)
    snapshot = orders.snapshot()
    for bit in range(len(snapshot) * 8):
        flipped = bytearray(snapshot)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises((Damage, StorageIncompatible)):
            partition(2).restore(bytes(flipped), [])
    for cut in range(len(snapshot)):
        with pytest.raises(Damage):
            partition(2).restore(snapshot[:cut], [])


def test_a_snapshot_of_a_newer_version_is_told_apart_from_damage() -> None:
    snapshot = partition().snapshot()
    with pytest.raises(StorageIncompatible):
        partition().restore(b"DND2" + snapshot[4:], [])
