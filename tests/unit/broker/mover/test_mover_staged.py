"""The mover and objects that a job staged: examined, named, refused, swept; through races and crashes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from danube.broker.mover import staged as mover_staged
from danube.broker.mover.partition import MovedPartition, Step
from danube.broker.mover.staged import FORGET_US, StagedObjects
from danube.core.partition.compaction_plan import CompactionSettings
from danube.core.partition.tier_plan import TierSettings
from danube.errors import InvalidArgument, OwnerMoved, error_for_code
from danube.host import clock
from danube.wal.tier.keys import segment_key
from danube.wal.tier.manifest import EntryFlag, Manifest, SegmentEntry
from danube.wal.tier.rewriting import compact_objects, compaction_plan, merge_objects
from danube.wal.tier.staged import Rules, Staged, encode_staged, staged
from danube.wal.tier.uploader import Ownership, Uploader, adding
from tests.unit.broker.mover.test_mover import Place, Worker, no_bug, on_a_loop, place  # noqa: F401
from tests.unit.faulty_store import (
    TOPIC,
    Crash,
    FaultyStore,
    check_store,
    crash_after,
    crash_before,
    fail_before,
    make_segments,
    newest_manifest,
)
from tests.unit.merge_samples import Record, sealed_log
from tests.unit.wal.tier.test_compacting import LATER_US, check_whole, segments_of, stored
from tests.unit.wal_samples import IDENTITY

PLAIN = TierSettings(merge_below=0, reader_grace_us=0)
NO_LAG = CompactionSettings(dirty_bytes_min=1 << 40, dirty_age_us=1 << 60, lag_us=0)  # the mover does nothing
KEYED = TierSettings(merge_below=0, reader_grace_us=0, compaction=NO_LAG)
WAIT_S = 40.0


class Job:
    """What a job does: stages objects from the manifest that it read, with a directory of its own."""

    def __init__(self, store: Any, folder: Path) -> None:
        self.uploader = Uploader(store, Ownership(TOPIC, IDENTITY, 1, folder / "job"))
        self.work = folder / "job-work"
        (folder / "job").mkdir(exist_ok=True)

    def merge(self, manifest: Manifest, first: int, stop: int) -> Staged:
        sources = [manifest.entry(index) for index in range(first, stop)]
        return staged(merge_objects(self.uploader, sources, self.work), sources)

    def compact(self, manifest: Manifest, target_bytes: int = 1_500) -> list[Staged]:
        """Of each key the latest record, tombstones removed; all but the newest object."""
        settings = CompactionSettings(dirty_bytes_min=0, lag_us=0, target_bytes=target_bytes)
        plan = compaction_plan(manifest, LATER_US, 0, settings)
        assert plan is not None
        self.uploader.manifest = manifest
        made: list[Staged] = []
        for entry, sources in compact_objects(self.uploader, plan, settings, self.work):
            removed = sum(source.record_count for source in sources) - entry.record_count
            after = made[-1].made.content_hash if made else b""
            made.append(
                staged(entry, sources, removed=removed, keys=True, tombstones_before_us=1, after=after)
            )
        return made


async def ask(
    worker: Worker, objects: list[Staged], epoch: int = 1, number: int = 0
) -> list[tuple[str, str]]:
    """What becomes of each; raises the error of the whole question."""
    number = number or len(worker.fetched) + 1_000
    worker.say(
        "staged", id=number, topic_id=IDENTITY.topic_id, partition=IDENTITY.partition, epoch=epoch,
        objects=encode_staged(objects),
    )  # fmt: skip
    await worker.until(lambda: number in worker.fetched)
    frame = worker.fetched[number]
    if frame["error"]:
        raise error_for_code(frame["code"], frame["error"])
    return [(word, why) for word, why in msgspec.msgpack.decode(frame["answers"])]


async def settled(worker: Worker, objects: list[Staged], epoch: int = 1) -> list[tuple[str, str]]:
    """Ask until nothing waits."""
    known: dict[bytes, tuple[str, str]] = {}
    async with asyncio.timeout(WAIT_S):
        while True:
            left = [one for one in objects if one.made.content_hash not in known]
            answers = await ask(worker, left, epoch)
            for one, answer in zip(left, answers, strict=True):
                if answer[0] != "waiting":
                    known[one.made.content_hash] = answer
            if len(known) == len(objects):
                return [known[one.made.content_hash] for one in objects]
            await asyncio.sleep(0.02)


def keyed(place: Place, segments: list[list[list[Record]]]) -> None:  # noqa: F811
    """The sealed log of a compacted topic."""
    sealed_log(place.directory, segments)


@on_a_loop
async def test_a_merged_object_takes_the_place_of_its_sources(place: Place) -> None:  # noqa: F811
    originals = place.make(8)
    async with place.mover(PLAIN) as connect:
        worker = await connect()
        worker.attach(place.directory)
        manifest = await worker.uploaded(8)
        one = Job(place.store, place.data).merge(manifest, 2, 6)
        assert await settled(worker, [one]) == [("installed", "")]
        after = await worker.uploaded(5)
        assert after.entry(2).content_hash == one.made.content_hash
        assert after.entry(2).flags == EntryFlag.MERGED
        assert after.entry(2).uploaded_us != one.made.uploaded_us, "by the clock of the mover"
        assert after == newest_manifest(place.store.memory)
        assert await ask(worker, [one]) == [("installed", "")], "asked twice"
        check_store(place.store.memory, originals, set())
        async with asyncio.timeout(WAIT_S):
            while len(list(place.store.memory.list("partitions/"))) > 5 + 3 + 1:  # manifests, a claim
                await asyncio.sleep(0.02)
        check_store(place.store.memory, originals, set())
    assert not list((place.data / "merging").rglob("*")), "nothing is left of examining it"


@on_a_loop
async def test_an_object_that_was_tampered_with_is_refused(place: Place) -> None:  # noqa: F811
    originals = place.make(6)
    async with place.mover(PLAIN) as connect:
        worker = await connect()
        worker.attach(place.directory)
        manifest = await worker.uploaded(6)
        job = Job(place.store, place.data)
        bad, good = job.merge(manifest, 0, 2), job.merge(manifest, 2, 4)
        key = segment_key(IDENTITY, bad.made)
        data = bytearray(place.store.memory.get(key))
        data[200] ^= 1
        place.store.memory.put(key, bytes(data))
        answers = await settled(worker, [bad, good])
        assert [word for word, _ in answers] == ["refused", "installed"]
        assert "damaged batches" in answers[0][1]
        check_store(place.store.memory, originals, set())
        assert (await worker.uploaded(5)).entry(2).content_hash == good.made.content_hash


@on_a_loop
async def test_another_epoch_than_the_owners_is_refused(place: Place) -> None:  # noqa: F811
    place.make(4)
    async with place.mover(PLAIN) as connect:
        old, new = await connect(), await connect()
        old.attach(place.directory, epoch=1)
        manifest = await old.uploaded(4)
        one = Job(place.store, place.data).merge(manifest, 0, 4)
        new.attach(place.directory, epoch=2)
        await new.uploaded(4)
        for asker, epoch in ((old, 1), (old, 2), (new, 1)):
            with pytest.raises(OwnerMoved):
                await ask(asker, [one], epoch)
        assert await settled(new, [one], 2) == [("installed", "")]
        assert new.manifest.epoch == 2 and len(await new.uploaded(1)) == 1


@on_a_loop
async def test_an_owner_that_a_newer_one_has_fenced_installs_nothing(place: Place) -> None:  # noqa: F811
    place.make(4)
    async with place.mover(PLAIN) as connect:
        worker = await connect()
        worker.attach(place.directory, epoch=1)
        manifest = await worker.uploaded(4)
        one = Job(place.store, place.data).merge(manifest, 0, 4)
        elsewhere = Uploader(place.store, Ownership(TOPIC, IDENTITY, 5, place.data / "elsewhere"))
        (place.data / "elsewhere").mkdir()
        elsewhere.load()
        newer = elsewhere.install(lambda manifest: manifest.trimmed(manifest.entry(0).end_offset))
        with pytest.raises(OwnerMoved, match="newer owner"):
            await settled(worker, [one])
        assert newest_manifest(place.store.memory) == newer


@on_a_loop
async def test_retention_in_between(place: Place) -> None:  # noqa: F811
    place.make(6)
    async with place.mover(PLAIN) as connect:
        worker = await connect()
        worker.attach(place.directory)
        manifest = await worker.uploaded(6)
        one = Job(place.store, place.data).merge(manifest, 0, 3)
        end = manifest.entry(0).end_offset
        worker.say("trim", topic_id=IDENTITY.topic_id, partition=IDENTITY.partition, start_offset=end)
        (answer,) = await settled(worker, [one])
        assert answer[0] == "refused" and ("expired" in answer[1] or "sources" in answer[1])
        assert (await worker.uploaded(5)).start_offset == end


@on_a_loop
async def test_a_store_that_is_away_delays_and_decides_nothing(place: Place) -> None:  # noqa: F811
    place.make(4)
    async with place.mover(PLAIN) as connect:
        worker = await connect()
        worker.attach(place.directory)
        manifest = await worker.uploaded(4)
        one = Job(place.store, place.data).merge(manifest, 0, 4)
        place.store.always = fail_before
        assert (await ask(worker, [one]))[0][0] == "waiting"
        await worker.error("the store is away")
        async with asyncio.timeout(WAIT_S):
            while await ask(worker, [one]) != [("waiting", worker.states[-1]["error"])]:
                await asyncio.sleep(0.02)
        assert "the store is away" in (await ask(worker, [one]))[0][1]
        place.store.always = None
        assert await settled(worker, [one]) == [("installed", "")]


@on_a_loop
async def test_more_than_a_few_take_turns(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(mover_staged, "STAGED_MAX", 2)
    monkeypatch.setattr(mover_staged, "JOB_BYTES_MAX", 1)
    originals = place.make(10)
    async with place.mover(PLAIN) as connect:
        worker = await connect()
        worker.attach(place.directory)
        manifest = await worker.uploaded(10)
        job = Job(place.store, place.data)
        offered = [job.merge(manifest, first, first + 2) for first in range(0, 10, 2)]
        answers = await ask(worker, offered)
        assert [why for _, why in answers] == ["", "", *["others are examined first"] * 3]
        assert await settled(worker, offered) == [("installed", "")] * 5
        check_store(place.store.memory, originals, set())


@on_a_loop
async def test_what_is_no_list_ends_the_question_and_nothing_else(place: Place) -> None:  # noqa: F811
    place.make(1)
    async with place.mover(PLAIN) as connect:
        worker = await connect()
        worker.attach(place.directory)
        await worker.uploaded(1)
        worker.say(
            "staged", id=7, topic_id=IDENTITY.topic_id, partition=IDENTITY.partition, epoch=1, objects=b"\xff"
        )
        await worker.until(lambda: 7 in worker.fetched)
        assert worker.fetched[7]["code"] == InvalidArgument.code and not worker.ended
        with pytest.raises(OwnerMoved):
            worker.say("staged", id=8, topic_id=1, partition=1, epoch=1, objects=encode_staged([]))
            await worker.until(lambda: 8 in worker.fetched)
            raise error_for_code(worker.fetched[8]["code"], worker.fetched[8]["error"])
        assert await ask(worker, []) == []


@on_a_loop
async def test_the_latest_of_each_key_where_the_topic_is_compacted(place: Place) -> None:  # noqa: F811
    segments = segments_of(6)
    segments[1][0] = [(b"k0", b""), (b"k1", b"1")]  # a tombstone, whose older record is in the first segment
    keyed(place, segments)
    async with place.mover(KEYED) as connect:
        worker = await connect()
        worker.attach(place.directory)
        manifest = await worker.uploaded(6)
        records = stored(place.store, manifest)
        offered = Job(place.store, place.data).compact(manifest)
        assert len(offered) > 1
        answers = await settled(worker, offered)
        assert {word for word, _ in answers} == {"refused"} and "cleanup" in answers[0][1]
        worker.say(
            "policy", topic_id=IDENTITY.topic_id, partition=IDENTITY.partition, compacts=True,
            tombstone_retention_ms=0,
        )  # fmt: skip
        first = segment_key(IDENTITY, offered[0].made)
        data = place.store.memory.get(first)
        place.store.memory.delete([first])
        answers = await settled(worker, offered)
        assert {word for word, _ in answers} == {"refused"}, "none without the one before it"
        assert "not in the store" in answers[0][1] and "not compacted with it" in answers[1][1]
        assert stored(place.store, await worker.uploaded(6)) == records
        place.store.memory.put(first, data)
        assert await settled(worker, offered) == [("installed", "")] * len(offered)
        after = await worker.uploaded(len(offered) + 1)
        check_whole(stored(place.store, after), records)
        assert len(stored(place.store, after)) < len(records)


# -- by hand: a crash at any call, what is forgotten ------------------------------------------------


class Hand:
    """A partition at the mover without its loop: whatever is due is done, in turn."""

    def __init__(
        self, store: FaultyStore, directory: Path, starts: int = 0, settings: TierSettings = PLAIN
    ) -> None:
        self.owner = Ownership(TOPIC, IDENTITY, 1, directory)
        uploader = Uploader(store, self.owner, start_count=starts)
        self.partition = MovedPartition(self.owner, uploader, settings, 0)
        self.work = directory.parent / "work"
        self.now_us = clock.wall_us() + 10**9

    def run(self, rounds: int = 20, *, merges: bool = True) -> None:
        for _ in range(rounds):
            self.now_us += 2_000_000
            step, _ = self.partition.next_step(self.now_us, stopping=False)
            if step is not None:
                self._step(step)
            upload = self.partition.upload_job(1 << 20, 1)
            if upload is not None:
                self.partition.uploaded(upload[0], upload[1]())
            merge = self.partition.merge_job(self.now_us, self.work) if merges else None
            if merge is not None:
                self.partition.merged(merge(), self.now_us)

    def _step(self, step: Step) -> None:
        self.partition.took(step, self.partition.job(step, self.now_us)(), self.now_us)

    def offer(self, objects: list[Staged]) -> list[tuple[str, str]]:
        return self.partition.offered(objects, self.now_us)


def filled(folder: Path) -> tuple[FaultyStore, Path, dict[int, bytes], list[Staged]]:
    """Six objects that are named, and two that a job has staged of them."""
    store, directory = FaultyStore(), folder / "log"
    paths = make_segments(directory, 6)
    originals = {int(path.name[:20]): path.read_bytes() for path in paths}
    uploader = Uploader(store, Ownership(TOPIC, IDENTITY, 1, directory))
    uploader.load()
    added = [uploader.upload(path) for path in paths]
    manifest = uploader.install(adding([entry for entry in added if entry is not None]))
    job = Job(store, folder)
    offered = [job.merge(manifest, 0, 3), job.merge(manifest, 3, 6)]
    store.calls.clear()
    return store, directory, originals, offered


def test_a_mover_that_is_killed_at_any_call_names_whole_objects_only(tmp_path: Path) -> None:
    """Also between examining and installing: the next one is asked again and ends as if nothing had been."""
    at = 0
    while True:
        for fault in (crash_before, crash_after):
            folder = tmp_path / f"{at}-{fault.__name__}"
            folder.mkdir()
            store, directory, originals, offered = filled(folder)
            store.faults[at] = fault
            hand = Hand(store, directory)
            try:
                hand.run(3)
                assert [word for word, _ in hand.offer(offered)] == ["waiting"] * 2
                hand.run()
            except Crash:
                pass
            else:
                assert at > 15, "every call was met"
                assert hand.offer(offered) == [("installed", "")] * 2
                return
            check_store(store.memory, originals, set())
            again = Hand(store, directory, starts=1)
            again.run(3)
            again.offer(offered)
            again.run()
            assert again.offer(offered) == [("installed", "")] * 2
            newest = newest_manifest(store.memory)
            assert newest is not None and len(newest) == 2
            check_store(store.memory, originals, set())
        at += 1


def test_what_is_examined_is_not_swept_before_it_is_named(tmp_path: Path) -> None:
    store, directory, originals, offered = filled(tmp_path)
    hand = Hand(store, directory)
    hand.run(3)
    hand.offer(offered)
    job = hand.partition.merge_job(hand.now_us, hand.work)
    assert job is not None
    hand.now_us += 10**12  # everything is old, and a sweep long due
    assert hand.partition.next_step(hand.now_us, stopping=False)[0] is not Step.SWEEP
    hand.partition.merged(job(), hand.now_us)
    assert hand.partition.next_step(hand.now_us, stopping=False)[0] is Step.INSTALL
    hand._step(Step.INSTALL)
    assert hand.partition.next_step(hand.now_us, stopping=False)[0] is Step.REMOVE
    check_store(store.memory, originals, set())


def test_refused_objects_are_swept_and_those_that_wait_are_not(tmp_path: Path) -> None:
    store, directory, originals, offered = filled(tmp_path)
    keys = [segment_key(IDENTITY, one.made) for one in offered]
    store.memory.put(keys[0], store.memory.get(keys[0])[:-8])
    hand = Hand(store, directory)
    hand.run(3)
    hand.offer(offered)
    hand.now_us += 10**12  # they are old orphans
    for _ in range(3):
        step, _ = hand.partition.next_step(hand.now_us, stopping=False)
        if step is not None:
            hand._step(step)
    assert all(store.memory.head(key) is not None for key in keys), "they wait to be examined"
    hand.run()
    assert [word for word, _ in hand.offer(offered)] == ["refused", "installed"]
    hand.now_us += 10**12
    hand.run()
    assert store.memory.head(keys[0]) is None and store.memory.head(keys[1]) is not None
    check_store(store.memory, originals, set())


def test_sources_that_go_between_examining_and_installing(tmp_path: Path) -> None:
    store, directory, _, offered = filled(tmp_path)
    hand = Hand(store, directory)
    hand.run(3)
    hand.offer(offered)
    job = hand.partition.merge_job(hand.now_us, hand.work)
    assert job is not None
    hand.partition.merged(job(), hand.now_us)
    hand.partition.trim_offset = offered[0].made.end_offset - 1  # the first two of its sources
    hand.run()
    answers = hand.offer(offered)
    assert answers[0][0] == "refused" and "expired" in answers[0][1]
    assert answers[1] == ("installed", "")
    assert hand.offer(offered[:1])[0][0] == "refused", "by what the manifest says now"


MERGING = TierSettings(merge_after_us=0, reader_grace_us=0, merge_below=2_000, merge_to=1 << 22)


def test_the_movers_own_merge_is_named_first(tmp_path: Path) -> None:
    store, directory, originals, offered = filled(tmp_path)
    hand = Hand(store, directory, settings=MERGING)
    hand.run(3, merges=False)
    own = hand.partition.merge_job(hand.now_us, hand.work)
    assert own is not None and hand.offer(offered)[0][0] == "waiting"
    assert hand.partition.merge_job(hand.now_us, hand.work) is None, "one thing at a time"
    hand.partition.merged(own(), hand.now_us)
    hand.run()
    assert [word for word, _ in hand.offer(offered)] == ["refused"] * 2
    newest = newest_manifest(store.memory)
    assert newest is not None and len(newest) == 1
    check_store(store.memory, originals, set())


def test_the_movers_own_merge_is_late(tmp_path: Path) -> None:
    """It was begun when the job's objects were examined and not named yet."""
    store, directory, originals, offered = filled(tmp_path)
    hand = Hand(store, directory, settings=MERGING)
    hand.run(3, merges=False)
    hand.offer(offered)
    examine = hand.partition.merge_job(hand.now_us, hand.work)
    assert examine is not None
    hand.partition.merged(examine(), hand.now_us)
    own = hand.partition.merge_job(hand.now_us, hand.work)
    assert own is not None
    hand._step(Step.INSTALL)
    hand.partition.merged(own(), hand.now_us)
    assert hand.offer(offered) == [("installed", "")] * 2
    hand.run(3, merges=False)
    newest = newest_manifest(store.memory)
    assert newest is not None and len(newest) == 2
    check_store(store.memory, originals, set())


def test_answers_that_nobody_fetches_are_forgotten(tmp_path: Path) -> None:
    store, directory, _, offered = filled(tmp_path)
    hand = Hand(store, directory)
    hand.run(3)
    store.memory.delete([segment_key(IDENTITY, offered[0].made)])
    hand.offer(offered[:1])
    hand.run(3)
    objects = hand.partition._staged
    assert len(objects._known) == 1
    hand.now_us += FORGET_US // 2
    hand.offer([])
    assert len(objects._known) == 1
    hand.now_us += FORGET_US
    hand.offer([])
    assert not objects._known


def test_before_the_manifest_is_read_everything_waits(tmp_path: Path) -> None:
    store, directory, _, offered = filled(tmp_path)
    hand = Hand(store, directory)
    assert hand.offer(offered) == [("waiting", "the manifest is not read yet")] * 2


def test_a_group_that_is_asked_for_in_parts_waits_for_the_one_before(tmp_path: Path) -> None:
    """Two questions: what the second needs is known from the first, and not installed yet."""

    def entry(number: int, content: bytes) -> SegmentEntry:
        return SegmentEntry(
            number, number + 1, 1, 1, 300, 200, 5, 5, 9, 1, int(EntryFlag.COMPACTED | EntryFlag.MERGED),
            content, bytes(16), b"c" * 15 + bytes([number]),
        )  # fmt: skip

    sources = [
        entry(number, b"c" * 15 + bytes([number]))._replace(flags=0, content_hash=b"c" * 15 + bytes([number]))
        for number in range(3)
    ]
    manifest = Manifest.empty(TOPIC, IDENTITY, 1).with_added(*sources)
    first = staged(entry(0, b"a" * 16), sources[:1], keys=True, tombstones_before_us=1)
    second = staged(entry(1, b"b" * 16), sources[1:2], keys=True, tombstones_before_us=1, after=b"a" * 16)
    objects, rules = StagedObjects(), Rules(now_us=10, tombstone_retention_ms=0)
    assert objects.ask([second], manifest, rules, "")[0][0] == "refused"
    assert objects.ask([first], manifest, rules, "")[0] == ("waiting", "")
    assert objects.ask([second], manifest, rules, "")[0] == ("waiting", "")
    objects.took(mover_staged.Examined({b"b" * 16: ""}), 1)
    change: Callable[[Manifest], Manifest | None] = objects.change(rules)
    assert change(manifest) is None, "the first is not examined yet"
    objects.took(mover_staged.Examined({b"a" * 16: ""}), 1)
    after = objects.change(rules)(manifest)
    assert after is not None and after.entry(1).content_hash == b"b" * 16
