"""The mover with workers on its socket and a store in memory: what it tells, bears and leaves behind."""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from danube.broker.links import Frame, FrameReader, encode_frame
from danube.broker.mover import mover, owner_link
from danube.broker.mover import partition as mover_partition
from danube.broker.mover.mover import Mover
from danube.broker.processes import last_resort
from danube.broker.processes.contexts import DrainSignal, MoverContext, Pulse, SupervisorSettings
from danube.cluster.log.node_files import MEMBER, NodeRecord, store_node
from danube.config.sections import StorageConfig
from danube.core.partition import tier_plan
from danube.core.partition.tier_plan import TierSettings
from danube.errors import ObjectMissing, StoreUnavailable
from danube.wal.segments.segment import base_offset_of
from danube.wal.tier.binding import FILE_NAME
from danube.wal.tier.keys import (
    METADATA_PREFIX,
    STORE_KEY,
    cursors_prefix,
    manifest_prefix,
    partition_prefix,
    segment_key,
)
from danube.wal.tier.manifest import Manifest
from tests.unit.faulty_store import (
    TOPIC,
    FaultyStore,
    check_store,
    fail_before,
    make_segments,
    newest_manifest,
)
from tests.unit.wal_samples import IDENTITY, append, open_log, roll, sync

WAIT_S = 20.0
FAST = TierSettings(merge_after_us=0, reader_grace_us=0, merge_below=1 << 20, merge_to=1 << 22)
PLAIN = TierSettings(merge_below=0)


class Worker:
    """A worker's end of the connection."""

    def __init__(self, address: str) -> None:
        self.states: list[Frame] = []
        self.stores: list[tuple[bool, str]] = []
        self.fetched: dict[int, Frame] = {}
        self._address = address
        self._news = asyncio.Event()

    async def connect(self) -> Worker:
        self._reader, self._writer = await asyncio.open_unix_connection(self._address)
        self._task = asyncio.create_task(self._read())
        return self

    async def _read(self) -> None:
        frames = FrameReader()
        while data := await self._reader.read(65_536):
            for frame in frames.feed(data):
                if frame["kind"] == "state":
                    self.states.append(frame)
                elif frame["kind"] == "store":
                    self.stores.append((frame["answers"], frame["error"]))
                else:
                    self.fetched[frame["id"]] = frame
            self._news.set()
        self._news.set()

    def say(self, kind: str, **fields: Any) -> None:
        self._writer.write(encode_frame(kind, **fields))

    def say_raw(self, data: bytes) -> None:
        self._writer.write(data)

    async def until(self, met: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not met():
                self._news.clear()
                await self._news.wait()

    @property
    def manifest(self) -> Manifest:
        return Manifest.decode(self.states[-1]["manifest"])

    def attach(self, directory: Path, epoch: int = 1, partition: int = 3, **fields: Any) -> None:
        given = {"topic": TOPIC, "topic_id": IDENTITY.topic_id, "log_start": 0, **fields}
        self.say("attach", partition=partition, epoch=epoch, directory=str(directory), **given)

    async def uploaded(self, count: int) -> Manifest:
        """Wait until the newest state tells of so many objects."""
        await self.until(lambda: bool(self.states) and len(self.manifest) == count)
        return self.manifest

    async def error(self, words: str) -> None:
        await self.until(lambda: bool(self.states) and words in self.states[-1]["error"])

    @property
    def ended(self) -> bool:
        return self._task.done()

    async def close(self) -> None:
        self._writer.close()
        await self._task


class Place:
    """A data directory, a store, and the movers that run on them."""

    def __init__(self, root: Path) -> None:
        self.data = root / "data"
        self.data.mkdir()
        self.directory = self.data / "partitions" / IDENTITY.directory_name
        self.store = FaultyStore()
        self.starts = 0

    def make(self, count: int) -> dict[int, bytes]:
        paths = make_segments(self.directory, count)
        return {base_offset_of(path.name) or 0: path.read_bytes() for path in paths}

    @asynccontextmanager
    async def mover(
        self,
        settings: TierSettings = PLAIN,
        drain_ms: int = 5_000,
        clustered: bool = False,
        workers_drain_ms: int = 9_000,
        **storage: Any,
    ) -> AsyncIterator[Callable[[], Any]]:
        """A running mover; yields how to make a connected worker."""
        address = f"\0danube-test-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen()
        listener.setblocking(False)
        context = MoverContext(
            listener=listener,
            drain=DrainSignal(),
            settings=SupervisorSettings(
                data_dir=self.data, mover_drain_timeout_ms=drain_ms, drain_timeout_ms=workers_drain_ms
            ),
            start_count=self.starts,
            pulse=Pulse(),
        )
        self.starts += 1
        config = StorageConfig(mode="object_store", **storage)
        mover = Mover(context, config, self.store, settings, clustered)
        running = asyncio.create_task(mover.run())
        workers: list[Worker] = []

        async def connect() -> Worker:
            workers.append(await Worker(address).connect())
            return workers[-1]

        try:
            yield connect
        finally:
            assert context.pulse.last_ns > 0
            mover.stop()
            async with asyncio.timeout(WAIT_S):
                await running
            for worker in workers:
                await worker.close()
            os.close(context.drain.fileno())
            context.pulse.close()


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


@pytest.fixture(autouse=True)
def no_bug(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What would end the mover's process fails the test instead."""
    bugs: list[str] = []
    monkeypatch.setattr(last_resort, "leave", lambda what, error: bugs.append(f"{what}: {error!r}"))
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    yield
    assert not bugs, bugs


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Its movers look and install ten times as often as others do."""
    monkeypatch.setattr(mover, "MERGES_S", 0.1)
    monkeypatch.setattr(mover_partition, "INSTALL_INTERVAL_US", 100_000)
    return Place(tmp_path)


@on_a_loop
async def test_what_was_sealed_before_and_after_the_attach_is_uploaded(place: Place) -> None:
    originals = place.make(3)
    async with place.mover() as connect:
        worker = await connect()
        worker.attach(place.directory)
        manifest = await worker.uploaded(3)
        assert manifest == newest_manifest(place.store.memory)
        check_store(place.store.memory, originals, set())
        log = open_log(place.directory)
        append(log, b"more")
        log.write()
        sync(log)
        roll(log)
        worker.say("sealed", topic_id=IDENTITY.topic_id, partition=3)
        await worker.uploaded(5)  # with the one that was active before
        log.abandon()


@on_a_loop
async def test_an_hour_without_a_store_costs_time_and_few_requests(place: Place) -> None:
    place.make(4)
    async with place.mover() as connect:
        worker = await connect()
        place.store.always = fail_before
        for number in range(40):
            worker.attach(place.directory, topic_id=100 + number)
        worker.attach(place.directory)
        await worker.error("the store is away")
        begun = len(place.store.calls)
        await asyncio.sleep(2.0)
        assert len(place.store.calls) - begun < 20  # 41 partitions on their own would be hundreds
        place.store.always = None
        await worker.until(lambda: any(len(Manifest.decode(one["manifest"])) == 4 for one in worker.states))
    check_store(place.store.memory, {}, set())


@on_a_loop
async def test_an_owner_with_a_lower_epoch_is_told_so_and_writes_nothing(place: Place) -> None:
    place.make(1)
    async with place.mover() as connect:
        worker = await connect()
        worker.attach(place.directory, epoch=7)
        await worker.uploaded(1)
        other = await connect()
        other.attach(place.directory, epoch=6)
        await other.error("newer owner")
    async with place.mover() as connect:
        worker = await connect()
        before = list(place.store.memory.list(manifest_prefix(IDENTITY)))
        worker.attach(place.data / "elsewhere", epoch=5)
        await worker.error("newer owner")
        assert list(place.store.memory.list(manifest_prefix(IDENTITY))) == before


@on_a_loop
async def test_a_new_owner_goes_on_where_the_old_one_was(place: Place) -> None:
    place.make(2)
    async with place.mover() as connect:
        worker = await connect()
        worker.attach(place.directory, epoch=1)
        await worker.uploaded(2)
        await worker.close()
        again = await connect()
        again.attach(place.directory, epoch=2)
        again.say("trim", topic_id=IDENTITY.topic_id, partition=3, start_offset=1)
        await again.until(lambda: bool(again.states) and again.manifest.start_offset == 1)
        assert (again.manifest.epoch, len(again.manifest)) == (2, 2)


@on_a_loop
async def test_an_attach_that_is_repeated_is_answered_again(place: Place) -> None:
    place.make(1)
    async with place.mover() as connect:
        worker = await connect()
        worker.attach(place.directory)
        await worker.uploaded(1)
        worker.states.clear()
        worker.attach(place.directory)
        await worker.uploaded(1)


@on_a_loop
async def test_expired_records_leave_the_manifest_and_then_the_store(place: Place) -> None:
    place.make(3)
    async with place.mover(TierSettings(merge_below=0, reader_grace_us=0)) as connect:
        worker = await connect()
        worker.attach(place.directory)
        manifest = await worker.uploaded(3)
        gone = segment_key(IDENTITY, manifest.entry(0))
        place.store.calls.clear()
        worker.say("trim", topic_id=IDENTITY.topic_id, partition=3, start_offset=manifest.entry(0).end_offset)
        await worker.uploaded(2)
        async with asyncio.timeout(WAIT_S):
            while place.store.memory.head(gone) is not None:
                await asyncio.sleep(0.01)


@on_a_loop
async def test_small_objects_become_one_and_the_sources_go(place: Place) -> None:
    originals = place.make(16)
    async with place.mover(FAST) as connect:
        worker = await connect()
        worker.attach(place.directory)
        await worker.until(lambda: bool(worker.states) and worker.manifest.uploaded_end == 64)
        await worker.uploaded(1)
        check_store(place.store.memory, originals, set())
        async with asyncio.timeout(WAIT_S):
            while sum(one.key.endswith(".seg") for one in place.store.memory.list("")) > 1:
                await asyncio.sleep(0.01)
        check_store(place.store.memory, originals, set())


@on_a_loop
async def test_a_fetch_copies_a_range_into_the_file(place: Place) -> None:
    place.make(1)
    cache = place.data / "cache"
    cache.touch()
    async with place.mover() as connect:
        worker = await connect()
        worker.attach(place.directory)
        entry = (await worker.uploaded(1)).entry(0)
        key = segment_key(IDENTITY, entry)

        def fetch(number: int, **changed: Any) -> None:
            wanted = {"key": key, "start": 8, "end": 64, "path": str(cache), "position": 100, **changed}
            worker.say("fetch", id=number, topic_id=IDENTITY.topic_id, partition=3, **wanted)

        fetch(1)
        fetch(2, key=key.replace("-3/", "-4/"))
        fetch(3, path="/tmp/danube-elsewhere")
        fetch(4, path=str(place.data / "absent"))
        fetch(5, end=entry.size_bytes + 1)
        fetch(6, key=key[:-6] + "ff.seg")
        fetch(7, start=9, end=8)
        await worker.until(lambda: len(worker.fetched) == 7)
        assert cache.read_bytes()[100:] == place.store.memory.get(key, 8, 64)
        assert not worker.fetched[1]["error"]
        assert all(worker.fetched[number]["error"] for number in range(2, 8))
        assert worker.fetched[6]["code"] == ObjectMissing.code
        place.store.always = fail_before
        fetch(8)
        await worker.until(lambda: 8 in worker.fetched)
        assert worker.fetched[8]["code"] == StoreUnavailable.code
        place.store.always = None


@on_a_loop
async def test_many_fetches_stop_the_reading_and_all_are_answered(place: Place) -> None:
    place.make(1)
    (place.data / "cache").touch()
    async with place.mover() as connect:
        worker = await connect()
        worker.attach(place.directory)
        key = segment_key(IDENTITY, (await worker.uploaded(1)).entry(0))
        count = 3 * owner_link.FETCHES_MAX
        for number in range(count):
            worker.say(
                "fetch", id=number, topic_id=IDENTITY.topic_id, partition=3, key=key, start=0, end=64,
                path=str(place.data / "cache"), position=0,
            )  # fmt: skip
        await worker.until(lambda: len(worker.fetched) == count)
        assert not any(frame["error"] for frame in worker.fetched.values())


@on_a_loop
async def test_a_deleted_topic_leaves_nothing_also_after_a_crash(place: Place) -> None:
    place.make(2)
    async with place.mover() as connect:
        worker = await connect()
        worker.attach(place.directory)
        worker.say("cursors", topic_id=IDENTITY.topic_id, partition=3, blob=b"cursors")
        await worker.uploaded(2)
        place.store.always = fail_before
        worker.say("delete", topic_id=IDENTITY.topic_id, partitions=4)
        async with asyncio.timeout(WAIT_S):
            while not (place.data / "deletions").exists():
                await asyncio.sleep(0.01)
    place.store.always = None
    assert list(place.store.memory.list(partition_prefix(IDENTITY)))
    async with place.mover(), asyncio.timeout(WAIT_S):
        while list(place.store.memory.list(partition_prefix(IDENTITY))):
            await asyncio.sleep(0.01)
        while (place.data / "deletions").read_bytes() != b"{}":
            await asyncio.sleep(0.01)


@on_a_loop
async def test_copies_of_cursors_and_metadata_reach_the_store(place: Place) -> None:
    async with place.mover() as connect:
        worker = await connect()
        worker.attach(place.directory)
        await worker.until(lambda: bool(worker.states))
        worker.say("cursors", topic_id=IDENTITY.topic_id, partition=3, blob=b"first")
        worker.say("metadata", version=9, blob=b"nine")
        worker.say("metadata", version=8, blob=b"eight")
        async with asyncio.timeout(WAIT_S):
            while not list(place.store.memory.list(cursors_prefix(IDENTITY))):
                await asyncio.sleep(0.01)
        worker.say("cursors", topic_id=IDENTITY.topic_id, partition=3, blob=b"last")
        await asyncio.sleep(0.1)
    # The second copy and the snapshot did not wait for their intervals: the mover was told to stop.
    cursors = [place.store.memory.get(one.key) for one in place.store.memory.list(cursors_prefix(IDENTITY))]
    assert cursors == [b"first", b"last"]
    metadata = list(place.store.memory.list(METADATA_PREFIX))
    assert [place.store.memory.get(one.key) for one in metadata] == [b"nine"]


@on_a_loop
async def test_the_store_of_another_broker_is_not_touched(place: Place, tmp_path: Path) -> None:
    place.make(1)
    async with place.mover() as connect:
        worker = await connect()
        worker.attach(place.directory)
        await worker.uploaded(1)
    before = list(place.store.memory.list(""))
    (place.data / FILE_NAME).unlink()  # as an empty data directory that meets a used store
    async with place.mover() as connect:
        worker = await connect()
        worker.attach(place.directory)
        await worker.error("is not the store of")
        assert list(place.store.memory.list("")) == before


@on_a_loop
async def test_a_store_that_is_away_at_the_start_is_used_when_it_comes(place: Place) -> None:
    place.make(1)
    place.store.always = fail_before
    async with place.mover() as connect:
        worker = await connect()
        worker.attach(place.directory)
        await worker.error("the store is away")
        assert not worker.states[-1]["loaded"] and worker.stores == [(False, "the store is away")]
        worker.attach(place.directory, epoch=2)  # another owner before the store was reached once
        await worker.until(lambda: Manifest.decode(worker.states[-1]["manifest"]).epoch == 2)
        assert worker.states[-1]["error"] == "the store is away"
        late = await connect()
        await late.until(lambda: bool(late.stores))
        place.store.always = None
        await worker.uploaded(1)
    assert worker.states[-1]["loaded"] and worker.stores[-1] == late.stores[-1] == (True, "")
    assert place.store.memory.head(STORE_KEY) is not None


@on_a_loop
async def test_what_is_found_on_disk_says_nothing_of_the_store(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bound in ("RETRY_MAX_US", "OUTAGE_PROBE_MAX_US"):  # else pauses alone take as long
        monkeypatch.setattr(tier_plan, bound, 500_000)
    place.make(1)
    async with place.mover() as connect:
        worker = await connect()
        worker.attach(place.directory)
        await worker.uploaded(1)
        place.store.always = fail_before
        place.make(2)
        worker.say("sealed", topic_id=IDENTITY.topic_id, partition=3)
        await worker.until(lambda: worker.stores[-1] == (False, "the store is away"))
        for _ in range(5):  # looks at the directory go on
            told = len(worker.states)
            worker.say("sealed", topic_id=IDENTITY.topic_id, partition=3)
            await worker.until(lambda told=told: len(worker.states) > told)
        assert worker.stores == [(True, ""), (False, "the store is away")]
        place.store.always = None
        await worker.until(lambda: worker.stores[-1] == (True, ""))


@on_a_loop
async def test_a_store_that_nobody_asks_is_asked(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danube.broker.mover.health.ASK_AFTER_NS", 50_000_000)
    async with place.mover() as connect:
        worker = await connect()
        await worker.until(lambda: worker.stores[-1:] == [(True, "")])
        place.store.always = fail_before
        await worker.until(lambda: worker.stores[-1:] == [(False, "the store is away")])
        place.store.always = None
        await worker.until(lambda: worker.stores[-1:] == [(True, "")])


@on_a_loop
async def test_what_no_worker_says_ends_the_connection_and_nothing_else(place: Place) -> None:
    async with place.mover() as connect:
        bad, good = await connect(), await connect()
        bad.say_raw(b"\xff" * 64)
        await bad.until(lambda: bad.ended)
        good.attach(place.directory)
        await good.until(lambda: bool(good.states))


@on_a_loop
async def test_another_user_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async with place.mover() as connect:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        stranger = await connect()
        await stranger.until(lambda: stranger.ended)


@on_a_loop
async def test_what_ends_after_the_mover_changes_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, begun, over = threading.Event(), threading.Event(), threading.Event()

    def claim() -> None:
        begun.set()
        go_on.wait(WAIT_S)
        over.set()

    monkeypatch.setattr(mover, "claim_of", lambda *_, **__: claim)
    async with place.mover(drain_ms=0):
        await asyncio.to_thread(begun.wait, WAIT_S)
    go_on.set()  # and what the supervisor would say has been heard is closed: see no_bug
    await asyncio.to_thread(over.wait, WAIT_S)
    await asyncio.sleep(0.05)
    assert begun.is_set() and over.is_set()


@on_a_loop
async def test_frames_of_partitions_that_are_not_attached_are_ignored(place: Place) -> None:
    async with place.mover() as connect:
        worker = await connect()
        worker.say("sealed", topic_id=1, partition=1)
        worker.attach(place.directory)
        await worker.until(lambda: bool(worker.states))
        worker.say("detach", topic_id=IDENTITY.topic_id, partition=3)
        worker.say("sealed", topic_id=IDENTITY.topic_id, partition=3)
        worker.attach(place.directory)
        await worker.uploaded(0)


@on_a_loop
async def test_a_stop_in_an_outage_ends_within_its_time(place: Place) -> None:
    place.make(2)
    begun = asyncio.get_running_loop().time()
    async with place.mover(drain_ms=800) as connect:
        worker = await connect()
        place.store.always = fail_before
        worker.attach(place.directory)
        await worker.until(lambda: bool(worker.states))
    assert asyncio.get_running_loop().time() - begun < 10
    place.store.always = None


@on_a_loop
async def test_a_stop_waits_for_the_last_copy_of_the_metadata_and_no_longer(place: Place) -> None:
    loop = asyncio.get_running_loop()
    async with place.mover(drain_ms=9_000) as connect:
        worker = await connect()
        await worker.until(lambda: worker.stores[-1:] == [(True, "")])
        worker.say("metadata", version=7, blob=b"topics")
        worker.attach(place.directory)
        await worker.until(lambda: bool(worker.states))
        begun_s = loop.time()
    assert loop.time() - begun_s < 4.5
    assert [place.store.memory.get(one.key) for one in place.store.memory.list(METADATA_PREFIX)]


@on_a_loop
async def test_in_a_cluster_a_stop_leaves_nothing_on_this_host_that_was_sealed(place: Place) -> None:
    """Another broker goes on behind what the store has; what is only here would be a hole."""
    store_node(place.data, NodeRecord("1", "of-this-cluster", MEMBER))
    async with place.mover(clustered=True) as connect:
        worker = await connect()
        worker.attach(place.directory)
        await worker.until(lambda: any(state["loaded"] for state in worker.states))
        place.make(5)
        worker.say("sealed", topic_id=IDENTITY.topic_id, partition=3)
        await worker.close()
    assert len(newest_manifest(place.store.memory)) == 5


@on_a_loop
async def test_the_time_for_the_last_uploads_begins_when_the_workers_have_ended(place: Place) -> None:
    """A signal to the whole group of processes comes to the mover as early as to them."""
    store_node(place.data, NodeRecord("1", "of-this-cluster", MEMBER))
    async with place.mover(clustered=True, drain_ms=1_500) as connect:
        worker = await connect()
        worker.attach(place.directory)
        await worker.until(lambda: any(state["loaded"] for state in worker.states))

        async def end() -> None:
            await asyncio.sleep(1.5)
            place.make(5)
            worker.say("sealed", topic_id=IDENTITY.topic_id, partition=3)
            await worker.close()

        ending = asyncio.create_task(end())
    await ending
    assert len(newest_manifest(place.store.memory)) == 5


@on_a_loop
async def test_a_stop_does_not_wait_for_workers_that_never_end(place: Place) -> None:
    store_node(place.data, NodeRecord("1", "of-this-cluster", MEMBER))
    begun = asyncio.get_running_loop().time()
    async with place.mover(clustered=True, drain_ms=400, workers_drain_ms=400) as connect:
        worker = await connect()
        worker.attach(place.directory)
        await worker.until(lambda: bool(worker.states))
    assert asyncio.get_running_loop().time() - begun < 5


@on_a_loop
async def test_a_damaged_local_segment_is_told_in_words_and_stays(place: Place) -> None:
    place.make(2)
    path = sorted(place.directory.glob("*.seg"))[1]
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    async with place.mover() as connect:
        worker = await connect()
        worker.attach(place.directory)
        await worker.error("is damaged")
        await worker.until(lambda: len(worker.manifest) == 1)
        assert path.exists()
