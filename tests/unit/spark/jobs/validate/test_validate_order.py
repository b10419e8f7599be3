"""How segments follow each other: what the comparison of neighbours names, and what it lets pass."""

from __future__ import annotations

from typing import Any

from danube.spark.jobs.findings import Damage, SegmentFacts
from danube.spark.jobs.validate.order import check_order, without_leftovers
from danube.spark.jobs.validate.segment import repeats_between
from danube.wal.verify.walk import COMPACTED


def facts(base: int, end: int, *, compacted: bool = False, **more: Any) -> SegmentFacts:
    values: dict[str, Any] = {
        "sealed": True, "batch_count": 1, "epoch": 2, "first_epoch": 2, "first_append_us": base,
        "last_append_us": end - 1, "content_hash": b"%016d" % end, "chain_hash": b"%016d" % end,
        "previous_hash": b"%016d" % base if base else bytes(16), "flags": COMPACTED * compacted,
    }  # fmt: skip
    return SegmentFacts(base, end_offset=end, where=f"{base}.seg", **(values | more))


def kinds(*segments: SegmentFacts) -> list[str]:
    return [one.fault for one in check_order(segments)]


def test_neighbours_that_fit_pass() -> None:
    assert kinds(facts(0, 10), facts(10, 20), facts(20, 30)) == []
    assert kinds() == [] and kinds(facts(5, 9)) == []
    unknown = facts(10, 20, previous_hash=bytes(16))
    assert kinds(facts(0, 10), unknown) == []
    assert kinds(facts(0, 10, content_hash=b"merged" + bytes(10)), facts(10, 20)) == []


def test_neighbours_that_do_not_fit_are_named() -> None:
    assert kinds(facts(0, 10), facts(12, 20)) == [Damage.OFFSETS_MISSING, Damage.CHAIN]
    assert Damage.OFFSETS_REPEATED in kinds(facts(0, 10), facts(8, 20))
    assert kinds(facts(0, 10), facts(10, 20, previous_hash=b"x" * 16)) == [Damage.CHAIN]
    assert kinds(facts(0, 10), facts(10, 20, first_epoch=1)) == [Damage.EPOCH_ORDER]
    assert kinds(facts(0, 10), facts(10, 20, first_append_us=3)) == [Damage.TIME_ORDER]


def test_a_hole_that_is_stated_is_not_told_again() -> None:
    assert list(check_order([facts(0, 10), facts(12, 20)], lambda one: one.base_offset == 12)) == []


def test_a_recovery_may_have_copied_what_was_not_synced() -> None:
    numbered = {"sequences": [(7, 1, 0, 10, 0)]}
    copied = facts(8, 20, previous_hash=bytes(16), sequences=[(7, 1, 8, 20, 8)])
    assert kinds(facts(0, 10, sealed=False, **numbered), copied) == []
    assert Damage.SEQUENCE_REPEATED in kinds(facts(0, 10, **numbered), copied)


def test_sources_of_a_compacted_segment_may_be_left_for_a_while() -> None:
    compacted = facts(0, 30, compacted=True, content_hash=b"c" * 16)
    left = [facts(10, 20), facts(20, 30)]
    kept, leftovers = without_leftovers([compacted, *left, facts(30, 40)])
    assert leftovers == left and kinds(*kept) == []
    assert without_leftovers([facts(0, 30), *left])[1] == [], "without the flag they repeat offsets"
    assert without_leftovers([facts(0, 15, compacted=True), facts(10, 20)])[1] == []


def test_a_sequence_in_two_segments_is_named() -> None:
    one = facts(0, 10, sequences=[(7, 1, 0, 10, 0), (8, 1, 5, 6, 3)])
    good = facts(10, 20, sequences=[(7, 1, 10, 20, 10), (7, 2, 0, 5, 15)])
    bad = facts(20, 30, sequences=[(7, 1, 19, 29, 20)])
    assert kinds(one, good) == []
    assert kinds(one, good, bad) == [Damage.SEQUENCE_REPEATED]
    assert repeats_between([(one.where, one.sequences), (bad.where, one.sequences)])[0][:2] == ("20.seg", 0)
