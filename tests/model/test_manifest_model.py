"""Random uploads, merges and trims: a manifest answers like a list that is searched from its start."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from danube.wal.tier.manifest import EntryFlag, Manifest, SegmentEntry
from tests.examples import examples
from tests.golden.tiered_cases import IDENTITY, entry

STEPS = 120


class Held(NamedTuple):
    """What the model knows of a segment: offsets, records in it, and when its last one was appended."""

    base_offset: int
    end_offset: int
    record_count: int
    last_append_us: int


class Model:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.manifest = Manifest.empty("/default/model", IDENTITY, 3)
        self.held: list[Held] = []
        self.start = 0
        self.generation = 0
        self.clock = 1_000

    @property
    def end(self) -> int:
        return self.held[-1].end_offset if self.held else self.start

    def step(self) -> None:
        choose = self.random.random()
        if choose < 0.6 or not self.held:
            self.add()
        elif choose < 0.75:
            self.replace()
        elif choose < 0.85:
            self.trim()
        else:
            self.manifest = self.manifest.taken_over(self.manifest.epoch + self.random.randrange(2))
        self.generation += 1

    def add(self) -> None:
        rows: list[SegmentEntry] = []
        for number in range(self.random.randrange(1, 4)):
            hole = self.random.random() < 0.15
            base = self.end + (self.random.randrange(1, 5) if hole else 0)
            size = self.random.randrange(1, 50)
            self.clock += self.random.randrange(-20, 60)
            self.held.append(Held(base, base + size, size, self.clock))
            flags = EntryFlag.HOLE_BEFORE if hole else 0
            rows.append(entry(base, base + size, number + 1, last_append_us=self.clock, flags=flags))
        self.manifest = self.manifest.with_added(*rows)

    def replace(self) -> None:
        first = self.random.randrange(len(self.held))
        last = min(first + self.random.randrange(3), len(self.held) - 1)
        group = self.held[first : last + 1]
        count = sum(one.record_count for one in group)
        compacted = self.random.random() < 0.5
        if compacted:
            count = self.random.randrange(count + 1)
        merged = Held(group[0].base_offset, group[-1].end_offset, count, group[-1].last_append_us)
        self.held[first : last + 1] = [merged]
        flags = EntryFlag.MERGED | (EntryFlag.COMPACTED if compacted else 0)
        row = entry(
            merged.base_offset, merged.end_offset, 9, record_count=count, batch_count=min(count, 1),
            last_append_us=merged.last_append_us, flags=flags,
        )  # fmt: skip
        self.manifest = self.manifest.with_replaced(first, last, row)

    def trim(self) -> None:
        self.start = max(self.start, self.random.randrange(self.start, self.end + 2))
        self.held = [one for one in self.held if one.end_offset > self.start]
        self.manifest = self.manifest.trimmed(self.start)

    def check(self) -> None:
        manifest, held = self.manifest, self.held
        again = Manifest.decode(manifest.encode())
        assert again == manifest and again.encode() == manifest.encode()
        rows = [manifest.entry(index) for index in range(len(manifest))]
        seen = [Held(row.base_offset, row.end_offset, row.record_count, row.last_append_us) for row in rows]
        assert seen == held
        assert (manifest.start_offset, manifest.uploaded_end) == (self.start, self.end)
        assert manifest.generation == self.generation
        ends = [self.start, *(one.end_offset for one in held)]
        stated = [bool(row.flags & EntryFlag.HOLE_BEFORE) for row in rows]
        assert stated == [one.base_offset > end for one, end in zip(held, ends[:-1], strict=True)]
        for _ in range(10):
            self.check_search()

    def check_search(self) -> None:
        manifest, held = self.manifest, self.held
        offset = self.random.randrange(max(self.start - 5, 0), self.end + 5)
        behind = [index for index, one in enumerate(held) if one.end_offset > offset]
        assert manifest.find(offset) == (behind[0] if behind else len(held))
        end = offset + self.random.randrange(60)
        touched = [
            index for index, one in enumerate(held) if one.end_offset > offset and one.base_offset < end
        ]
        assert list(manifest.plan(offset, end)) == (touched if end > offset else [])
        time_us = self.clock - self.random.randrange(-50, 1_000)
        newer = [index for index, one in enumerate(held) if one.last_append_us >= time_us]
        assert manifest.at_time(time_us) == (newer[0] if newer else len(held))


@pytest.mark.parametrize("seed", range(examples(40)))
def test_random_changes_answer_like_a_list(seed: int) -> None:
    model = Model(seed)
    for _ in range(STEPS):
        model.step()
        model.check()
