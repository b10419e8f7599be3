"""Audit heads in the metadata: cut ends and chains made anew are found by them, and they stay few."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from danube.broker.audit.audit import Audit
from danube.broker.audit.heads import HEADS_MAX, Head, HeadKeeper, decode_heads, heads_of, key_of, thinned
from danube.broker.audit.lines import Entry, Place
from danube.broker.audit.trail import list_files, verify
from danube.broker.audit.writer import AuditWriter
from danube.core.cluster.commands import PutKey
from danube.core.metadata.commands import Outcome
from danube.core.metadata.machine import Metadata
from danube.core.security.principals import Identity, Principal
from danube.errors import Overloaded, Unavailable

MINUTE_US = 60_000_000
START_US = 1_795_855_243_000_000
ANN = Identity(Principal("user", "ann"), "token")


class Site:
    """One worker's audit over a metadata machine of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.loop = asyncio.new_event_loop()
        self.machine = Metadata()
        self.now_us = START_US
        self.refused: Exception | None = None
        self.answer: list[Callable[[Outcome], None]] | None = None  # gathers what is not answered

    def keeper(self) -> HeadKeeper:
        return HeadKeeper(key_of(0, 0), self.directory, lambda: self.machine.cluster.keys, self.submit)

    def submit(self, command: PutKey, then: Callable[[Outcome], None]) -> None:
        if self.refused is not None:
            raise self.refused
        if self.answer is not None:
            self.answer.append(then)
            return
        self.machine.apply(self.machine.version + 1, command)
        then(None)

    def life(self, minutes: int) -> None:
        """A start, one request a minute, and a stop."""
        writer = AuditWriter(self.directory, 0, self.clock)
        writer.open()
        audit = Audit(writer, self.loop, now_us=self.clock)
        audit.heads = self.keeper()
        for number in range(minutes):
            audit.tell(ANN, "delete_topic", f"/default/t{number}")
            self.now_us += MINUTE_US
            audit.sweep()
        audit.close()

    def clock(self) -> int:
        return self.now_us

    @property
    def kept(self) -> dict[int, list[Place]]:
        return {
            worker: [head.place for head in known.heads]
            for worker, known in heads_of(self.machine.cluster.keys, 0).items()
        }

    def found(self) -> list[str]:
        return [finding.what for finding in verify(self.directory, kept=self.kept).findings]

    def forge(self, lines: int) -> None:
        """Make a whole new chain with its head, as somebody may who writes to the folder."""
        shutil.rmtree(self.directory)
        writer = AuditWriter(self.directory, 0, self.clock)
        writer.open()
        for number in range(lines):
            writer.append(Entry(self.now_us, "delete_topic", "allowed", "user:bob", resource=f"/t{number}"))
        writer.close()
        assert not verify(self.directory).findings


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path / "audit")
    yield made
    made.loop.run_until_complete(made.loop.shutdown_default_executor())
    made.loop.close()


def test_heads_of_a_chain_that_nobody_touched_are_in_it(site: Site) -> None:
    site.life(5)
    site.life(5)
    assert len(site.kept[0]) == 10 and not site.found()
    assert Metadata.restore(site.machine.snapshot()).cluster.keys.below("/audit/")


def test_a_cut_of_end_and_head_together_is_found(site: Site) -> None:
    site.life(5)
    (one,) = list_files(site.directory)
    lines = one.path.read_bytes().splitlines(keepends=True)
    one.path.write_bytes(b"".join(lines[:-1]))
    (site.directory / "worker-0.head").unlink()
    AuditWriter(site.directory, 0, site.clock).open()  # the next start writes a head that fits
    assert not verify(site.directory).findings
    assert "the chain was made anew" in site.found()[0]


@pytest.mark.parametrize("lines", [1, 5, 40])
def test_a_chain_made_anew_is_found_also_after_further_starts(site: Site, lines: int) -> None:
    site.life(5)
    site.forge(lines)
    assert "the chain was made anew" in site.found()[0]
    for _ in range(3):
        site.life(100)  # its heads are of the forged chain
        assert "the chain was made anew" in site.found()[0]


def test_files_that_are_gone_altogether_are_found(site: Site) -> None:
    site.life(2)
    shutil.rmtree(site.directory)
    site.directory.mkdir()
    assert len(site.found()) == 2  # the metadata's head, and no head beside the files


def test_files_that_retention_removed_are_no_finding(site: Site) -> None:
    site.life(3)
    os.utime(list_files(site.directory)[0].path, (1, 1))
    writer = AuditWriter(site.directory, 0, site.clock, keep_us=1_000_000_000)
    writer.open()
    assert len(list_files(site.directory)) == 1 and not site.found()
    audit = Audit(writer, site.loop, now_us=site.clock)
    audit.heads = site.keeper()
    site.now_us += MINUTE_US
    audit.tell(ANN, "delete_topic", "/default/a")
    audit.sweep()
    assert not site.found()
    audit.close()


def test_an_invented_retention_is_found(site: Site) -> None:
    """A chain that begins behind all heads, and says that retention removed what was before."""
    site.life(3)
    shutil.rmtree(site.directory)
    site.directory.mkdir()
    writer = AuditWriter(site.directory, 0, site.clock)
    writer.open()
    list_files(site.directory)[0].path.write_bytes(b"")
    writer._size, writer.place = 0, Place(50, "1" * 64)
    writer.append(Entry(site.now_us, "audit.retention", "allowed", details={"places": [[50, "1" * 64]]}))
    writer.close()
    assert not verify(site.directory).findings
    assert site.found() == ["the files begin behind line 4, the last that the metadata names"]


def test_heads_of_another_directory_are_forgotten(site: Site, tmp_path: Path) -> None:
    site.life(3)
    site.directory = tmp_path / "elsewhere"
    site.life(2)
    known = heads_of(site.machine.cluster.keys, 0)[0]
    assert known.directory == str(site.directory) and len(known.heads) == 2 and not site.found()


def test_a_thousand_lines_make_a_head_within_a_minute(site: Site) -> None:
    writer = AuditWriter(site.directory, 0, site.clock)
    writer.open()
    audit = Audit(writer, site.loop, now_us=site.clock)
    audit.heads = site.keeper()
    audit.sweep()
    for number in range(1_000):
        audit.sweep()
        assert len(site.kept[0]) == 1
        audit.tell(ANN, "delete_topic", f"/default/t{number}")
    audit.sweep()
    assert len(site.kept[0]) == 2
    audit.close()


def test_a_head_that_is_not_taken_is_told_and_tried_again(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    writer = AuditWriter(site.directory, 0, site.clock)
    writer.open()
    audit = Audit(writer, site.loop, now_us=site.clock)
    audit.heads = site.keeper()
    with caplog.at_level(logging.INFO, "danube"):
        site.refused = Overloaded("too many metadata changes wait")
        audit.sweep()
        assert "an audit head is not in the metadata" in caplog.text and not site.kept
        site.refused, site.answer = None, []
        audit.sweep()
        audit.sweep()
        assert len(site.answer) == 1  # the one before is not answered
        site.answer[0](Unavailable("no leader"))
        assert caplog.text.count("no leader") <= 1 and not site.kept  # told once a second
        site.answer = None
        audit.sweep()  # a minute later, though nothing moved
        assert not site.kept
        site.now_us += MINUTE_US
        audit.sweep()
    assert len(site.kept[0]) == 1 and not site.found()
    audit.close()


@pytest.mark.parametrize("step_us", [0, MINUTE_US, -MINUTE_US])
def test_heads_stay_few_and_their_gaps_grow_with_their_age(step_us: int) -> None:
    kept: list[Head] = []
    for number in range(1, 5_000):
        kept = thinned([*kept, Head(number, bytes(32), START_US + number * step_us)])
    assert len(kept) == HEADS_MAX
    numbers = [head.number for head in kept]
    assert numbers[0] == 1 and numbers[-1] == 4_999 and numbers == sorted(numbers)
    if step_us > 0:
        ages = [5_000 - number for number in numbers]
        assert all(before - after <= max(1, before / 4) for before, after in itertools.pairwise(ages))


def test_what_is_no_list_of_heads_is_none() -> None:
    machine = Metadata()
    for index, (name, value) in enumerate(
        [("0", b"no"), ("x", b"\x92\xa1/\x90"), ("1", b"\x92\xa1/\x90")], 1
    ):
        machine.apply(index, PutKey(key=f"/audit/heads/7/{name}", value=value))
    assert list(heads_of(machine.cluster.keys, 7)) == [1]
    assert decode_heads(b"") is None
