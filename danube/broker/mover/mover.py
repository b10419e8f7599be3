"""The mover: the one process of a broker that speaks to the object store.

Workers report their partitions over a socket (mover_link). The mover uploads sealed segments and fetches the
blocks that workers read.  One loop decides, and groups of threads do the blocking work: uploads, steps
(listing, manifests, sweeping), merges, fetches, and jobs of no partition.  Every queue is bounded: a
partition has at most one step under way, uploads wait in their directories, and too many fetches stop the
reading of the worker's connection.  A free thread takes the most urgent work: partitions that leave, then
those with a backlog, the oldest first.

If the mover dies at any point nothing is lost, because it keeps no state: a new one reads the store and the
directories again.  During an outage of the store all work waits, with rare attempts, and then continues.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from danube.broker.links import Frame
from danube.broker.mover.claims import ClaimedPartitions, claim_of, ownership_of
from danube.broker.mover.copies import Ended, Job, MetadataCopies, TopicDeletions, clean_uploads
from danube.broker.mover.health import StoreHealth
from danube.broker.mover.owner_link import OwnerLink
from danube.broker.mover.partition import NEVER_US, MovedPartition, Step, judged
from danube.broker.mover.returning import Returns
from danube.broker.mover.threads import UploadPace, deliver, forget, wait_for, yielding_pool
from danube.broker.processes import last_resort
from danube.config.plans import hold_bounds, tier_settings
from danube.core.partition.pending import together
from danube.core.partition.step_queue import StepQueue
from danube.core.partition.tier_plan import TierSettings, choose
from danube.errors import DanubeError, Fenced
from danube.host import clock, telemetry
from danube.host.disk_reserve import reserve
from danube.wal.cold.fetching import fetch
from danube.wal.segments.segment import LogIdentity
from danube.wal.stores.objects import ObjectStore
from danube.wal.tier.uploader import Uploader

if TYPE_CHECKING:
    from danube.broker.processes.contexts import MoverContext
    from danube.config.loading import BrokerConfig
    from danube.config.sections import StorageConfig

HEARTBEAT_S: Final = 0.5
WATCH_S: Final = 0.1  # interval in which workers are measured while there are uploads
STEP_THREADS: Final = 4
BLOCK_THREADS: Final = 4  # for jobs of no partition, which must not delay steps
FETCH_THREADS: Final = 8
MERGES_S: Final = 1.0  # between searches for segments to merge
WORK_NAME: Final = "merging"
STOP_MARGIN_S: Final = 0.3  # part of the supervisor's time limit that is reserved for the exit itself
QUEUE_FACTOR: Final = 16  # partitions chosen at once for each upload slot

_log = telemetry.events("mover")


def run_mover(context: MoverContext, config: BrokerConfig) -> None:
    """Run the mover process."""
    from danube.wal.stores.opening import open_store

    telemetry.configure(config.log.level, config.log.format, process="mover")
    store = open_store(config.storage)
    with asyncio.Runner() as runner:
        runner.run(Mover(context, config.storage, store, clustered=config.cluster.enabled).run())


class Mover:
    """Assigns the work of all partitions to threads, and keeps their timers."""

    def __init__(
        self,
        context: MoverContext,
        storage: StorageConfig,
        store: ObjectStore,
        settings: TierSettings | None = None,
        clustered: bool = False,
    ) -> None:
        self._context = context
        self._storage = storage
        self.store = store
        self._data_dir = context.settings.data_dir
        self._settings = settings or tier_settings(storage)
        self._uploads = yielding_pool(storage.upload_parallel, "danube-upload")
        self._steps = ThreadPoolExecutor(STEP_THREADS, thread_name_prefix="danube-step")
        self._blocks = ThreadPoolExecutor(BLOCK_THREADS, thread_name_prefix="danube-block")
        self._fetches = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="danube-fetch")
        self._merges = yielding_pool(1, "danube-merge")
        self._stepping = 0
        self._ready: StepQueue[MovedPartition] = StepQueue()  # partitions with a step that waits for a thread
        self._partitions: dict[LogIdentity, MovedPartition] = {}
        self._links: dict[LogIdentity, OwnerLink] = {}  # the owners' connections
        self._open_links: set[OwnerLink] = set()
        self._waiting: dict[MovedPartition, None] = {}  # partitions with a backlog
        self._chosen: deque[MovedPartition] = deque()
        self._timers: dict[MovedPartition, asyncio.TimerHandle] = {}
        self._random = random.SystemRandom()
        self._claims = ClaimedPartitions(self, self._data_dir)
        self._claim = claim_of(store, self._data_dir, clustered=clustered)
        self._returns = Returns(self, self._data_dir, self._holds) if clustered else None
        self._bound = self._merging = self._stopping = self._ended = False
        self._stop, self._changed = asyncio.Event(), asyncio.Event()
        self._health = StoreHealth(store, self._open_links, context.pulse, self._store_is_back)
        self._gate = self._health.gate
        self._pace = UploadPace(hold_bounds(storage), storage.upload_parallel)
        self._metadata = MetadataCopies(self)
        self._deletions = TopicDeletions(self, self._data_dir)
        self._ending: set[MovedPartition] = set()  # retired partitions with work under way
        self._loop: asyncio.AbstractEventLoop

    # -- life -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until the supervisor stops it and running work has ended, or the time for that is over."""
        self._loop = loop = asyncio.get_running_loop()
        last_resort.install(loop)
        loop.add_signal_handler(signal.SIGTERM, self.stop)
        if self._context.drain.requested:
            self.stop()
        reserve.keep(self._data_dir / "reserve-mover")
        self._beat()
        server = await loop.create_unix_server(lambda: OwnerLink(self), sock=self._context.listener)
        self._bind()
        _log.info("mover serves", store=self.store.name)
        await self._stop.wait()
        server.close()
        await self._drain()

    def stop(self) -> None:
        """Make run() finish jobs under way and return."""
        self._stop.set()

    def _beat(self) -> None:
        """Beat the pulse, and set the speed of uploads by the delay of workers and the waiting uploads."""
        if self._ended:
            return
        self._context.heartbeat()
        if self._bound and not self._stopping:
            self._health.ask_if_silent(self.block)
        waiting = together(one.pending for one in self._waiting)
        self._context.pulse.upload_share = self._pace.watch({link.pid for link in self._open_links}, waiting)
        if self._bound:
            self._fill_slots()  # the pace may allow more uploads now
        self._loop.call_later(WATCH_S if self._pace.running else HEARTBEAT_S, self._beat)

    def _bind(self) -> None:
        """Check that the store is this broker's before any other access to it."""
        self.block(self._claim, self._bind_ended)

    def _bind_ended(self, _: Any, error: DanubeError | None) -> None:
        if error is None:
            self._bound = True
            self._health.answered()
            clean_uploads(self, self._settings.orphan_age_us)
            self._merge()
            self._metadata.begin()
            self._deletions.begin()
            if self._returns is not None:
                self._returns.begin()
            self._store_is_back()
            return
        _log.limited("the store cannot be used", source=self.store.name, why=str(error), hint=error.hint)
        self._health.failed(error)
        for partition in self._partitions.values():
            partition.error = str(error)
            self._tell(partition)
        self._loop.call_later(self._random.uniform(1, 5), self._bind)

    async def _drain(self) -> None:
        """Begin no new work; finish uploads and install finished ones, within the time given.

        In a cluster all sealed segments are uploaded, because the next owner continues behind the store's
        content.  A signal to the process group reaches the mover as early as the workers, which seal until
        they have ended.
        """
        self._stopping = True
        self._pace.release()
        settings = self._context.settings
        self._metadata.hurry()
        for partition in list(self._partitions.values()):
            self.advance(partition)
        if self._returns is not None:
            await wait_for(lambda: not self._open_links, self._changed, settings.drain_timeout_ms / 1000)
        limit_s = max(0.0, settings.mover_drain_timeout_ms / 1000 - STOP_MARGIN_S)
        await wait_for(lambda: self._quiet, self._changed, limit_s)
        if not self._quiet:
            _log.info("uploads were left for the next start", uploads=self._pace.running)
        self._ended = True
        for link in list(self._open_links):
            link.close()
        for pool in (self._uploads, self._steps, self._blocks, self._fetches, self._merges):
            pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.sleep(0)

    @property
    def _quiet(self) -> bool:
        """Return whether no work is under way that is worth waiting for; a merge can be done again."""
        if self._returns is not None and (self._open_links or self._may_upload):
            return False
        partitions = [*self._partitions.values(), *self._ending]
        return self._metadata.idle and not any(one.busy or one.running for one in partitions)

    @property
    def _may_upload(self) -> bool:
        return not self._gate.closed and any(one.waiting(clock.wall_us()) for one in self._waiting)

    # -- frames of workers ------------------------------------------------------------------------

    def connected(self, link: OwnerLink) -> None:
        self._open_links.add(link)
        self._health.tell(link)

    def disconnected(self, link: OwnerLink) -> None:
        """Note that a worker's connection ended; its sealed segments are uploaded all the same."""
        self._open_links.discard(link)
        for identity in [identity for identity, one in self._links.items() if one is link]:
            del self._links[identity]
            self._partitions[identity].dirty = True  # the worker may have sealed segments without a report
            self.advance(self._partitions[identity])
        self._changed.set()

    def on_frame(self, link: OwnerLink, frame: Frame) -> None:
        """Handle one frame, which the link has checked."""
        kind = frame["kind"]
        if kind == "attach":
            self._attach(link, frame)
        elif kind == "fetch":
            self._fetch(link, frame)
        elif kind == "inherit":
            self._claims.begin(link, frame)
        elif kind == "metadata":
            self._metadata.take(frame["version"], frame["blob"])
        elif kind == "delete":
            self._delete(frame["topic_id"], frame["partitions"])
        else:
            identity = LogIdentity(frame["topic_id"], frame["partition"])
            partition = self._partitions.get(identity)
            owned = partition is not None and self._links.get(identity) is link
            if kind == "staged":
                link.send("judged", **judged(frame, partition if owned else None, clock.wall_us()))
            elif partition is not None and owned:
                if kind == "detach":
                    del self._links[identity]
                partition.take(frame)
                self.advance(partition)

    def _attach(self, link: OwnerLink, frame: Frame) -> None:
        owner = ownership_of(frame)
        identity = owner.identity
        before = self._partitions.get(identity)
        if before is not None and owner.epoch < before.owner.epoch:
            error = str(Fenced(f"{owner.topic} has a newer owner", why=f"its epoch is {before.owner.epoch}"))
            link.send("state", **before.state() | {"error": error})
            return
        self._links[identity] = link
        if before is None or before.owner != owner or before.retired:
            starts, rests = self._context.start_count, self._pace.rests
            uploader = Uploader(self.store, owner, start_count=starts, rests=rests)
            partition = MovedPartition(owner, uploader, self._settings, frame["log_start"])
            self._partitions[identity] = partition
            if not self._bound and self._health.error:
                partition.error = self._health.error
                self._tell(partition)
            if before is not None:
                self._retire(before)
                partition.predecessor = before
        else:
            partition = before
            partition.dirty = True
            self._tell(partition)
        self.advance(partition)

    def _holds(self, identity: LogIdentity) -> bool:
        return identity in self._links or identity in self._claims.busy

    def retire_earlier(self, identity: LogIdentity) -> str:
        """End jobs of an earlier ownership of a partition; return why another one cannot begin yet."""
        before = self._partitions.get(identity)
        if before is not None:
            self._retire(before)
        if not self._bound:
            return self._health.error or "the store is not in use yet"
        return "" if before is None or before.idle else "what was begun for an earlier owner has not ended"

    def _retire(self, partition: MovedPartition) -> None:
        """Let the partition's running work end, and begin no more."""
        partition.retired = True
        if not partition.idle:
            self._ending.add(partition)
        self._waiting.pop(partition, None)
        self._ready.discard(partition)
        if (timer := self._timers.pop(partition, None)) is not None:
            timer.cancel()

    def _delete(self, topic_id: int, partitions: int) -> None:
        for number in range(partitions):
            identity = LogIdentity(topic_id, number)
            partition = self._partitions.pop(identity, None)
            self._links.pop(identity, None)
            if partition is not None:
                self._retire(partition)
        self._deletions.add(topic_id, partitions)

    # -- fetches ----------------------------------------------------------------------------------

    def _fetch(self, link: OwnerLink, frame: Frame) -> None:
        link.fetch_began()
        identity = LogIdentity(frame["topic_id"], frame["partition"])
        source = (frame["key"], frame["start"], frame["end"])
        target = (Path(frame["path"]), frame["position"])
        job = partial(fetch, self.store, identity, source, target, self._data_dir)
        self._in_thread(self._fetches, job, partial(self._fetch_ended, link, frame))

    def _fetch_ended(self, link: OwnerLink, frame: Frame, _: Any, error: DanubeError | None) -> None:
        if error is not None:
            _log.limited("an object cannot be fetched", source=frame["key"], why=str(error))
            partition = self._partitions.get(LogIdentity(frame["topic_id"], frame["partition"]))
            if partition is not None and error.status == "NOT_FOUND":
                partition.loaded = False  # a newer manifest may name another object for these records
                self.advance(partition)
        link.fetch_ended(frame["id"], error)

    # -- steps ------------------------------------------------------------------------------------

    def advance(self, partition: MovedPartition) -> None:
        """Begin due steps of the partition, and set a timer for later ones."""
        predecessor = partition.predecessor
        if not self._bound or (predecessor is not None and not predecessor.idle):
            return
        partition.predecessor = None
        now_us = clock.wall_us()
        step, due_us = partition.next_step(now_us, self._stopping)
        if (timer := self._timers.pop(partition, None)) is not None:
            timer.cancel()
        if step is not None:
            if self._stepping >= STEP_THREADS:
                self._ready.put(partition, partition.urgency)
            elif step is Step.SCAN or self._gate.admit(now_us):  # a scan of a directory needs no store
                self._stepping += 1
                ended = partial(self._step_ended, partition, step)
                self._in_thread(self._steps, partition.job(step, now_us), ended)
            else:
                self._wake_later(partition, 1_000_000)
        elif due_us != NEVER_US:
            self._wake_later(partition, due_us - now_us)
        self._offer(partition)

    def _wake_later(self, partition: MovedPartition, delay_us: int) -> None:
        delay_s = max(0.001, delay_us / 1e6) * self._random.uniform(1.0, 1.1)
        self._timers[partition] = self._loop.call_later(delay_s, self._on_timer, partition)

    def _on_timer(self, partition: MovedPartition) -> None:
        del self._timers[partition]
        self.advance(partition)

    def _step_ended(
        self, partition: MovedPartition, step: Step, result: Any, error: DanubeError | None
    ) -> None:
        self._stepping -= 1
        now_us = clock.wall_us()
        if step is not Step.SCAN:
            self._health.judge(error, now_us, self._random.random())
        if error is None:
            if partition.took(step, result, now_us):
                self._tell(partition)
        else:
            _log.limited("moving failed", source=partition.owner.topic, step=step, why=str(error))
            partition.failed(step, error, now_us, self._random.random())
            self._tell(partition)
        while self._ready and self._stepping < STEP_THREADS:
            self.advance(self._ready.pop())  # it comes before the partition that has just had a thread
        self._after(partition)

    def _after(self, partition: MovedPartition) -> None:
        """Continue with a partition after one of its steps ended."""
        if not partition.retired:
            self.advance(partition)
        elif partition.idle:
            self._ending.discard(partition)
            if (successor := self._partitions.get(partition.owner.identity)) is not None:
                self.advance(successor)
            self._deletions.retry()

    def _store_is_back(self) -> None:
        for partition in list(self._partitions.values()):
            partition.wait_no_longer()
            self.advance(partition)

    def _tell(self, partition: MovedPartition) -> None:
        link = self._links.get(partition.owner.identity)
        if link is not None and self._partitions.get(partition.owner.identity) is partition:
            link.changed(partition)

    def _tell_error(self, partition: MovedPartition, told: str) -> None:
        if partition.error != told:
            self._tell(partition)

    # -- uploads ----------------------------------------------------------------------------------

    def _offer(self, partition: MovedPartition) -> None:
        if partition.backlog.segments and not partition.retired:
            self._waiting[partition] = None
            self._fill_slots()
        else:
            self._waiting.pop(partition, None)

    def _fill_slots(self) -> None:
        while (self._returns is not None or not self._stopping) and self._pace.running < self._pace.slots:
            now_us = clock.wall_us()
            if not self._chosen:
                claims = [claim for one in self._waiting if (claim := one.waiting(now_us)) is not None]
                self._chosen.extend(choose(claims, self._storage.upload_parallel * QUEUE_FACTOR))
            if not self._chosen or not self._gate.admit(now_us):
                return
            self._upload(self._chosen.popleft(), now_us)

    def _upload(self, partition: MovedPartition, now_us: int) -> None:
        slots = files = self._pace.slots
        if len(self._waiting) < slots:  # otherwise each slot has a partition of its own
            files = sum(len(one.backlog.segments) - len(one.finished) for one in self._waiting)
        lanes = max(1, slots // max(1, files))
        begun = partition.upload_job(self._storage.part_bytes, lanes) if partition.waiting(now_us) else None
        if begun is None:
            self._gate.unused()
            return
        base_offset, job = begun
        self._pace.running += 1
        self._in_thread(self._uploads, job, partial(self._upload_ended, partition, base_offset))

    def _upload_ended(
        self, partition: MovedPartition, base_offset: int, entry: Any, error: DanubeError | None
    ) -> None:
        self._pace.running -= 1
        failed = partial(partition.upload_failed, base_offset)
        self._went(partition, "upload", error, lambda _: partition.uploaded(base_offset, entry), failed)
        self._fill_slots()

    def _went(
        self,
        partition: MovedPartition,
        step: str,
        error: DanubeError | None,
        took: Callable[[int], None],
        failed: Callable[[DanubeError, int, float], None],
    ) -> None:
        """Take the outcome of an upload or a merge for the store's condition, the partition and its owner."""
        now_us, told = clock.wall_us(), partition.error
        self._health.judge(error, now_us, self._random.random())
        if error is None:
            took(now_us)
        else:
            _log.limited("moving failed", source=partition.owner.topic, step=step, why=str(error))
            failed(error, now_us, self._random.random())
        self._tell_error(partition, told)
        self._after(partition)

    # -- merges -----------------------------------------------------------------------------------

    def _merge(self) -> None:
        """Merge objects of one partition at a time, in a thread of its own; partitions take turns."""
        reserve.fill()  # only here: until the store is bound, the binding thread uses the reserve
        self._fill_slots()  # the gate may be open again, and no partition's timer checks it
        now_us = clock.wall_us()
        if not self._merging and not self._stopping and not self._gate.closed:
            for identity, partition in list(self._partitions.items()):
                told = partition.error
                job = partition.merge_job(now_us, self._data_dir / WORK_NAME)
                self._tell_error(partition, told)
                if job is not None:
                    self._partitions[identity] = self._partitions.pop(identity)  # its next turn comes last
                    self._merging = True
                    self._in_thread(self._merges, job, partial(self._merge_ended, partition))
                    break
        self._loop.call_later(MERGES_S, self._merge)

    def _merge_ended(self, partition: MovedPartition, result: Any, error: DanubeError | None) -> None:
        self._merging = False
        self._went(partition, "merge", error, partial(partition.merged, result), partition.merge_failed)

    # -- threads ----------------------------------------------------------------------------------

    def block(self, job: Job, ended: Ended) -> None:
        """Run ``job`` in a thread; ``ended(result, error)`` is called on the loop."""
        self._in_thread(self._blocks, job, ended)

    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._loop.call_later(delay_s, action)

    def settled(self, topic_id: int) -> bool:
        """Return whether all work for a deleted topic has ended."""
        return all(one.owner.identity.topic_id != topic_id for one in self._ending)

    def _in_thread(self, pool: Executor, job: Job, ended: Ended) -> None:
        if not self._ended:  # after that no work begins: the next mover starts anew
            future = self._loop.run_in_executor(pool, job)
            future.add_done_callback(lambda done: deliver(forget if self._ended else ended, done))
            future.add_done_callback(lambda _: self._changed.set())
