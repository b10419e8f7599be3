"""Holes in a manifest: found, filled, given up, expired; and what is damage beside them."""

from __future__ import annotations

import random
import struct

import pytest

from danube.errors import Damage, InvalidArgument
from danube.wal.segments.holes import Hole, HoleKind
from danube.wal.segments.segment import NO_HASH, LogIdentity
from danube.wal.tier.hole_changes import (
    Tail,
    decode_tail,
    encode_tail,
    filling,
    giving_up,
    holing,
    named,
    objection_to,
)
from danube.wal.tier.manifest import EntryFlag, Manifest, SegmentEntry
from danube.wal.tier.uploader import Change, adding, in_turn, replacing, trimming
from danube.wal.verify.objects import read_manifest
from tests.golden.tiered_cases import TIME_US, entry, hash_number
from tests.unit.wal.tier.test_manifest import manifest_of, resealed

NOW_US = TIME_US + 9


def applied(manifest: Manifest, change: Change) -> Manifest:
    after = change(manifest)
    assert after is not None
    assert Manifest.decode(after.encode()) == after
    assert read_manifest(after.encode()).problems == [], "the independent reader agrees"
    return after


def holed() -> Manifest:
    """[0, 20) uploaded, [20, 100) with broker 7, a later owner's [100, 110)."""
    manifest = applied(manifest_of((0, 10), (10, 20)), holing(100, 7, 3, NOW_US))
    return applied(manifest, adding([entry(100, 110, 9, previous_hash=NO_HASH)]))


def tail_of(
    *entries: SegmentEntry, log_end: int = 50, broker_id: int = 7, epochs: tuple[int, int] = (2, 3)
) -> Tail:
    return Tail(broker_id, *epochs, log_end, [tuple(one) for one in entries])


def spans(manifest: Manifest) -> list[tuple[int, int, str]]:
    return [(hole.start, hole.end, hole.kind.name.lower()) for hole in manifest.all_holes()]


def bounds(manifest: Manifest) -> list[tuple[int, int]]:
    return [manifest.entry(index)[:2] for index in range(len(manifest))]


FIRST, SECOND = entry(20, 30, 3), entry(30, 50, 4)


def test_a_hole_begins_where_uploading_had_come_and_the_next_segment_behind_it() -> None:
    manifest = applied(manifest_of((0, 10), (10, 20)), holing(100, 7, 3, NOW_US))
    assert spans(manifest) == [(20, 100, "open")] and manifest.uploaded_end == manifest.named_end == 100
    assert holing(100, 7, 3, NOW_US)(manifest) is None, "found twice it is one"
    assert adding([entry(20, 30, 3)])(manifest) is None, "what a late owner uploads is not named"
    manifest = holed()
    assert manifest.entry(2).flags & EntryFlag.HOLE_BEFORE and manifest.open_start == 20
    assert [manifest.hole_at(offset) is not None for offset in (-1, 19, 20, 99, 100)] == [
        False, False, True, True, False,
    ]  # fmt: skip


def test_what_comes_back_fills_the_front_and_the_rest_was_never_given() -> None:
    tail = tail_of(FIRST, SECOND)
    assert decode_tail(encode_tail(tail)) == tail
    assert [objection_to(tail, one, holed()) for one in tail.entries] == ["", ""]
    filled = applied(holed(), filling(tail, tail.entries, NOW_US))
    assert bounds(filled) == [(0, 10), (10, 20), (20, 30), (30, 50), (100, 110)]
    assert spans(filled) == [(50, 100, "unused")] and filled.entry(4).flags & EntryFlag.HOLE_BEFORE
    assert filling(tail, tail.entries, NOW_US)(filled) is None, "brought twice it changes nothing"
    assert all(named(filled, one) for one in tail.entries)


def test_a_hole_that_is_filled_to_its_end_is_none() -> None:
    whole = tail_of(entry(20, 100, 3), log_end=100)
    filled = applied(holed(), filling(whole, whole.entries, NOW_US))
    assert spans(filled) == [] and not filled.entry(3).flags & EntryFlag.HOLE_BEFORE
    assert filled.encode()[8] == 1, "and the format is the one that everybody reads"


def test_a_disk_without_anything_new_says_that_nothing_was_given() -> None:
    filled = applied(holed(), filling(tail_of(log_end=20), [], NOW_US))
    assert spans(filled) == [(20, 100, "unused")]


def test_a_log_that_ends_before_the_hole_has_lost_what_it_had_and_settles_nothing() -> None:
    assert filling(tail_of(log_end=19), [], NOW_US)(holed()) is None


def test_what_a_disk_should_have_and_does_not_bring_stays_open() -> None:
    filled = applied(holed(), filling(tail_of(SECOND, log_end=60), [SECOND], NOW_US))
    assert spans(filled) == [(20, 30, "open"), (50, 60, "open"), (60, 100, "unused")]
    more = applied(filled, filling(tail_of(FIRST, SECOND, log_end=60), [FIRST], NOW_US))
    assert spans(more) == [(50, 60, "open"), (60, 100, "unused")]


@pytest.mark.parametrize(
    ("tail", "why"),
    [
        (tail_of(entry(20, 101, 3)), "behind what was reserved"),
        (tail_of(entry(20, 30, 3, epoch=4)), "not of that broker's time"),
        (tail_of(entry(20, 30, 3, previous_hash=hash_number(77))), "previous hash"),
        (tail_of(FIRST, entry(30, 50, 4, previous_hash=hash_number(77))), "previous hash"),
        (tail_of(FIRST, broker_id=8), "broker 7's"),
        (tail_of(FIRST, epochs=(4, 9)), "broker 7's"),
        (tail_of(entry(5, 10, 3)), "no hole"),
        (tail_of(entry(110, 111, 3)), "no hole"),
    ],
)
def test_what_does_not_belong_there_is_not_named(tail: Tail, why: str) -> None:
    assert why in objection_to(tail, tail.entries[-1], holed())
    after = filling(tail, tail.entries[-1:], NOW_US)(holed())
    assert after is None or tail.entries[-1][:2] not in bounds(after)


def test_what_is_given_up_does_not_come_back() -> None:
    manifest = applied(holed(), giving_up(100, NOW_US))
    assert spans(manifest) == [(20, 100, "given_up")]
    assert giving_up(100, NOW_US)(manifest) is None
    assert "given up" in objection_to(tail_of(FIRST), FIRST, manifest)
    assert filling(tail_of(FIRST), [FIRST], NOW_US)(manifest) is None
    assert giving_up(20, NOW_US)(holed()) is None, "what begins behind stays"


def test_a_manifest_without_entries_is_changed_like_any_other() -> None:
    """Its owner died before anything was uploaded, or all of it has expired."""
    empty = Manifest.empty("/default/t", LogIdentity(1, 0), 512)
    assert empty, "it is not nothing"
    holed = in_turn(adding([]), holing(40, 1, 511, TIME_US))(empty)
    assert holed is not None and [hole[:2] for hole in holed.all_holes()] == [(0, 40)]
    given_up = in_turn(adding([]), trimming(0), giving_up(40, TIME_US))(holed)
    assert given_up is not None and not given_up.all_holes()[0].open
    expired = in_turn(trimming(50), giving_up(0, TIME_US))(manifest_of((0, 50)))
    assert expired is not None and (len(expired), expired.start_offset) == (0, 50)


def test_a_hole_expires_with_the_records_behind_it() -> None:
    assert spans(applied(holed(), trimming(20))) == [(20, 100, "open")]
    assert spans(applied(holed(), trimming(60))) == [(60, 100, "open")]
    gone = applied(holed(), trimming(110))
    assert spans(gone) == [] and gone.uploaded_end == 110
    assert "expired" in objection_to(tail_of(FIRST), FIRST, gone)


def test_nothing_is_merged_over_a_hole() -> None:
    manifest = holed()
    sources = [manifest.entry(index) for index in (1, 2)]
    merged = entry(10, 110, 8, flags=EntryFlag.MERGED, record_count=20, previous_hash=hash_number(1))
    with pytest.raises(InvalidArgument, match="overlaps a segment"):
        replacing(merged, sources)(manifest)


@pytest.mark.parametrize(
    ("position", "value", "why"),
    [
        (0, (19).to_bytes(8, "little"), "overlaps a segment"),
        (0, (100).to_bytes(8, "little"), "ends where it begins"),
        (8, (101).to_bytes(8, "little"), "overlaps a segment"),
        (24, (4).to_bytes(4, "little"), "later epoch"),
        (28, (3).to_bytes(4, "little"), "unknown kind"),
    ],
)
def test_holes_that_cannot_be_are_damage_to_both_readers(position: int, value: bytes, why: str) -> None:
    data = bytearray(holed().encode())
    row = len(data) - 8 - 48
    data[row + position : row + position + len(value)] = value
    with pytest.raises(Damage) as damaged:
        Manifest.decode(resealed(data))
    assert why in str(damaged.value)
    assert read_manifest(resealed(data)).problems


def test_a_count_of_holes_that_does_not_fit_its_version_is_damage() -> None:
    for data, position, value in (
        (holed().encode(), 52, struct.pack("<I", 0)),
        (holed().encode(), 56, struct.pack("<H", 40)),
        (manifest_of((0, 10)).encode(), 52, struct.pack("<I", 1)),
    ):
        changed = bytearray(data)
        changed[position : position + len(value)] = value
        with pytest.raises(Damage):
            Manifest.decode(resealed(changed))
        assert read_manifest(resealed(changed)).problems


def test_gaps_that_no_hole_names_are_told_by_the_verifier() -> None:
    manifest = manifest_of((0, 10)).with_added(entry(30, 40, 2, flags=EntryFlag.HOLE_BEFORE))
    manifest = manifest.with_holes([Hole(15, 20, 1, 3, HoleKind.UNUSED)])
    facts = read_manifest(manifest.encode())
    assert [(problem.start, problem.end) for problem in facts.problems] == [(10, 15), (20, 30)]


@pytest.mark.parametrize("number", range(40))
def test_whatever_comes_in_any_order_every_offset_is_named_or_in_one_hole(number: int, seed: int) -> None:
    draw = random.Random(seed * 1_000 + number)
    manifest, epoch, tails = manifest_of(), 1, []
    manifest = Manifest.empty(manifest.topic, manifest.identity, 60)
    for _ in range(60):
        end, chance = manifest.uploaded_end, draw.random()
        if chance < 0.35:
            size = draw.randrange(1, 9)
            change: Change = adding(
                [entry(end, end + size, draw.randrange(1, 200), epoch=epoch, previous_hash=NO_HASH)]
            )
        elif chance < 0.6:
            reserved, given = end + draw.randrange(1, 40), draw.randrange(0, 20)
            log_end = min(end + given, reserved)
            rows, at = [], end
            while at < log_end:
                stop = min(log_end, at + draw.randrange(1, 6))
                rows.append(entry(at, stop, draw.randrange(1, 200), epoch=epoch, previous_hash=NO_HASH))
                at = stop
            tails.append(tail_of(*rows, log_end=log_end, broker_id=draw.randrange(3), epochs=(epoch, epoch)))
            change = holing(reserved, tails[-1].broker_id, epoch, NOW_US)
            epoch += 1
        elif chance < 0.85 and tails:
            tail = draw.choice(tails)
            change = filling(tail, [one for one in tail.entries if draw.random() < 0.8], NOW_US)
        elif chance < 0.9:
            change = giving_up(draw.randrange(end + 1), NOW_US)
        else:
            change = trimming(draw.choice([hole.start for hole in manifest.all_holes()] or [0]))
        after = change(manifest)
        manifest = manifest if after is None else applied(manifest, change)
        covered = manifest.start_offset
        for start, stop in sorted(
            [*bounds(manifest), *((hole.start, hole.end) for hole in manifest.all_holes())]
        ):
            assert start <= covered < stop
            covered = stop
        assert covered == manifest.uploaded_end
