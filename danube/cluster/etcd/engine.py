"""The Engine over etcd: etcd keeps the order, and a key with a lease names the leading member.

Owner:      the loop's thread.  One task does everything in turn; what blocks is in a thread of its own.
Leader:     who put the key ``leader`` together with the next term.  It alone stores entries, one at a time.
            One that was paused or cut off past its lease is told by its next transaction, which fails.
Followers:  read the head when the watch says so, and once a second whatever it says.
Away:       while etcd does not answer no member leads.  Brokers serve as long as their leases hold.
Growth:     each member renews its own copy; the leader stores a snapshot in etcd and deletes what it holds.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from danube.cluster.etcd.calls import EtcdPlace, EtcdWatch
from danube.cluster.etcd.log import EtcdLog, Head, Known
from danube.cluster.raft.engine import EngineStatus, Host, Machine, Members
from danube.errors import (
    Damage,
    DanubeError,
    InvalidArgument,
    NotFound,
    NotLeader,
    NotSupported,
    OutcomeUnknown,
    StorageFull,
    Unavailable,
)
from danube.host import clock, telemetry
from danube.limits import MIB, RAFT_ENTRY_BYTES_MAX

LEASE_S: Final = 2  # the least that etcd gives with its own defaults
KEEP_S: Final = 0.4
LOOK_S: Final = 1.0  # the longest time that a hanging watch can hide a change
LEADER_LOOK_S: Final = 0.1  # most watch events at the leader are of its own writes
RETRY_S: Final = 0.1
CALL_TIMEOUT_S: Final = 2.0
SNAPSHOT_BYTES_MIN: Final = 4 * MIB
SNAPSHOT_RATIO: Final = 4
SNAPSHOT_ENTRIES_MAX: Final = 10_000
HISTORY_S: Final = 300.0  # how much of its own history etcd keeps

_log = telemetry.events("cluster.etcd")
_random = random.SystemRandom()


class News(NamedTuple):
    """Result of one poll of etcd: the entries or the snapshot that come next, and whether that is all."""

    known: Known
    entries: list[Any]
    snapshot: tuple[int, bytes, object] | None


class EtcdEngine:
    """One member; see the module.  The constructor makes no request, so it raises no error of etcd."""

    def __init__(self, node_id: str, machine: Machine, host: Host, place: EtcdPlace, known: Known) -> None:
        self._node_id = node_id
        self._machine = machine
        self._host = host
        self._place = place
        self._known = known
        self._log_of = EtcdLog(place.calls(CALL_TIMEOUT_S), place.prefix)
        self._log_of.known = known
        self._side = place.calls(CALL_TIMEOUT_S)  # leases, snapshots and deletions
        self._thread = ThreadPoolExecutor(1, "danube-etcd")
        self._side_thread = ThreadPoolExecutor(1, "danube-etcd-side")
        self._proposals: deque[tuple[bytes, asyncio.Future[Any]]] = deque()
        self._barriers: list[asyncio.Future[int]] = []
        self._changes: deque[tuple[Members, asyncio.Future[None]]] = deque()
        self._adopt: tuple[int, str, int] | None = None  # a snapshot that the head is to name
        self._wake = asyncio.Event()
        self._news = True  # read, whatever else waits
        self._hinted = False  # the watch told of something
        self._tasks: list[asyncio.Task[None]] = []
        self._role, self._leader_id, self._term = "follower", "", known.head.term
        self._lease_id = 0
        self._reached = False  # whether etcd answered last
        self._entry_count = self._entry_bytes = self._snapshot_bytes = 0
        self._renewing: asyncio.Task[None] | None = None
        self._stored_count = 0
        self._stopped = False
        loop = asyncio.get_running_loop()
        self._watch = EtcdWatch(
            place.calls(CALL_TIMEOUT_S), *self._log_of.watched,
            lambda: _call_from_thread(loop, self._told),
        )  # fmt: skip

    # -- the port ---------------------------------------------------------------------------------

    @property
    def status(self) -> EngineStatus:
        head = self._known.head
        return EngineStatus(
            self._node_id, self._role, self._leader_id, self._term, head.index, head.index,
            self._machine.applied_index, head.snapshot_index, Members(dict(self._known.members)),
        )  # fmt: skip

    @property
    def reached(self) -> bool:
        """Whether etcd answered the last request."""
        return self._reached

    def start(self) -> None:
        self._watch.start()
        loop = asyncio.get_running_loop()
        for work in (self._take_part(), self._keep_lease(), self._forget_history()):
            task = loop.create_task(work)
            task.add_done_callback(self._ended)
            self._tasks.append(task)

    def stop(self) -> None:
        """Take no part any more; another member may lead at once.  May be called twice."""
        if self._stopped:
            return
        self._stopped = True
        for task in (*self._tasks, *([self._renewing] if self._renewing is not None else [])):
            task.cancel()
        self._tasks = []
        self._follow("")
        lease_id, self._lease_id = self._lease_id, 0
        self._side_thread.submit(_give_back, self._side, lease_id)
        self._thread.submit(self._log_of.close)
        self._side_thread.submit(self._watch.stop)
        for thread in (self._thread, self._side_thread):
            thread.shutdown(wait=False)

    def receive(self, node_id: str, message: bytes) -> None:
        """Members send each other no messages here."""

    def propose(self, entry: bytes) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._role != "leader":
            future.set_exception(NotLeader("this member does not lead", leader_id=self._leader_id))
        elif len(entry) > RAFT_ENTRY_BYTES_MAX:
            future.set_exception(InvalidArgument("an entry is too large", limit=RAFT_ENTRY_BYTES_MAX))
        else:
            self._proposals.append((entry, future))
            self._wake.set()
        return future

    def read_barrier(self) -> asyncio.Future[int]:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self._role != "leader":
            future.set_exception(NotLeader("this member does not lead", leader_id=self._leader_id))
        else:
            self._barriers.append(future)
            self._wake.set()
        return future

    def change_members(self, members: Members) -> asyncio.Future[None]:
        """Remove a member, or note its other address; brokers add themselves."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._role != "leader":
            future.set_exception(NotLeader("this member does not lead", leader_id=self._leader_id))
        elif members.learners or not members.voters.keys() <= self._known.members.keys():
            future.set_exception(
                NotSupported(
                    "a node cannot be added by hand to a cluster on etcd",
                    hint="start its broker with the same cluster.metadata: it adds itself",
                )
            )
        else:
            self._changes.append((members, future))
            self._wake.set()
        return future

    def statistics(self) -> Mapping[str, int]:
        return {"entries_stored": self._stored_count, "etcd_reached": int(self._reached)}

    # -- turns ------------------------------------------------------------------------------------

    def _told(self) -> None:
        """Note that something has changed in etcd."""
        self._hinted = True
        self._wake.set()

    async def _take_part(self) -> None:
        looked_ns, looked = -1, False
        while True:
            try:
                late = clock.monotonic_ns() - looked_ns > self._pause_s * 1e9
                asked = self._barriers and not (looked and self._proposals)  # neither waits for ever
                if looked := bool(self._news or late or asked):
                    looked_ns = clock.monotonic_ns()
                    await self._look()
                elif self._role == "leader" and self._proposals:
                    await self._store(*self._proposals.popleft())
                elif self._role == "leader" and self._changes:
                    await self._change(*self._changes.popleft())
                elif self._role == "leader" and self._adopt is not None:
                    await self._name_snapshot(*self._adopt)
                else:
                    await self._rest(self._pause_s)
            except Unavailable as error:
                self._lost(error)
                await asyncio.sleep(RETRY_S * (0.5 + _random.random()))

    @property
    def _pause_s(self) -> float:
        """Return the pause between two polls without a notice."""
        if not self._hinted:
            return LOOK_S
        return LEADER_LOOK_S if self._role == "leader" else 0.0

    async def _rest(self, most_s: float) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(most_s):
                await self._wake.wait()
        except TimeoutError:
            pass  # look, whatever the watch says

    def _lost(self, error: Unavailable) -> None:
        """Note that etcd is away: no member leads, and no leader is known."""
        _log.lasting("etcd does not answer as it should", source="etcd", why=str(error), hint=error.hint)
        self._reached = False
        self._news = True
        self._follow("")

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def _on_side(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._side_thread, work, *arguments)

    # -- following --------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Read the head and new entries; lead if this member was elected or can be."""
        barriers, self._barriers = self._barriers, []
        self._news = self._hinted = False
        try:
            news = await self._in_thread(self._read, self._machine.applied_index)
            while self._take(news):
                news = await self._in_thread(self._read, self._machine.applied_index)
            self._see(news.known)
        except BaseException as error:
            reason = error if isinstance(error, DanubeError) else OutcomeUnknown("this member stops")
            _fail(barriers, NotLeader("etcd did not say that this member leads", why=str(reason)))
            raise
        for barrier in barriers:
            if not barrier.done():
                if self._role == "leader":
                    barrier.set_result(news.known.head.index)
                else:
                    barrier.set_exception(NotLeader("another member leads", leader_id=self._leader_id))
        if not news.known.leader_id or self._own_before(news.known):
            await self._campaign(news.known)

    def _read(self, applied_index: int) -> News:
        known = self._log_of.read()
        head = known.head
        if not known.revision or head.cluster_id != self._known.head.cluster_id:
            raise Damage(
                "the metadata has gone from etcd",
                why=f"{self._place.prefix}head is not this cluster's any more",
            )
        if head.index < applied_index:
            raise Damage("the metadata in etcd went back", why=f"{head.index} after {applied_index}")
        if head.index == applied_index:
            return News(known, [], None)
        entries = self._log_of.entries_after(applied_index, head.index)
        if entries is not None:
            return News(known, entries, None)
        if head.snapshot_index <= applied_index:
            if self._log_of.read().head.snapshot_index <= applied_index:
                raise Damage("metadata in etcd is not whole", why=f"entry {applied_index + 1} is not there")
            return News(known, [], None)
        snapshot = self._log_of.snapshot(head)
        if snapshot is None:
            return News(known, [], None)  # a newer one has replaced it
        return News(known, [], (head.snapshot_index, snapshot, self._machine.thaw(snapshot)))

    def _take(self, news: News) -> bool:
        """Apply read entries; return whether there are more to read."""
        if news.snapshot is not None:
            index, snapshot, thawed = news.snapshot
            self._machine.restore(index, snapshot, thawed)
            self._entry_count = self._entry_bytes = 0
            self._snapshot_bytes = len(snapshot)
        for entry in news.entries:
            self._machine.apply(entry.number, entry.term, entry.content)
            self._count(len(entry.content))
        return self._machine.applied_index < news.known.head.index

    def _see(self, known: Known) -> None:
        """Take in the leader and the members."""
        former, self._known = self._known, known
        self._reached = True
        if former.members != known.members:
            self._host.members_changed(Members(dict(known.members)))
        if known.leader_id == self._node_id and not self._own_before(known):
            self._lead()
        else:
            self._follow("" if self._own_before(known) else known.leader_id)

    def _own_before(self, known: Known) -> bool:
        """Whether the leader that etcd knows is a former process of this node."""
        leader = known.leader
        own = leader is not None and leader.value == self._node_id.encode()
        return own and leader is not None and leader.lease_id != self._lease_id

    async def _campaign(self, known: Known) -> None:
        if self._node_id not in known.members:
            return  # it was removed
        if known.leader is not None and self._own_before(known):
            await self._on_side(self._side.revoke_lease, known.leader.lease_id)
        if not self._lease_id:
            self._lease_id = await self._on_side(self._side.grant_lease, LEASE_S)
        self._news = True  # whatever comes of it, the next look tells
        try:
            elected = await self._in_thread(self._log_of.campaign, self._node_id, self._lease_id)
        except NotFound:  # the lease has ended
            elected, self._lease_id = False, 0
        if not elected:
            await asyncio.sleep(RETRY_S * _random.random())

    # -- leading ----------------------------------------------------------------------------------

    def _lead(self) -> None:
        if (self._role, self._term) != ("leader", self._known.head.term):
            self._role, self._leader_id, self._term = "leader", self._node_id, self._known.head.term
            self._host.role_changed(self.status)

    def _follow(self, leader_id: str) -> None:
        """Stop leading; waiting proposals were not stored."""
        waiting: list[asyncio.Future[Any]] = [future for _, future in self._proposals]
        waiting += [future for _, future in self._changes]
        waiting += self._barriers
        self._proposals.clear()
        self._changes.clear()
        self._barriers = []
        self._adopt = None
        told = self._role, self._leader_id, self._term
        self._role, self._leader_id, self._term = "follower", leader_id, self._known.head.term
        if told != (self._role, self._leader_id, self._term):
            self._host.role_changed(self.status)
        _fail(waiting, NotLeader("another member leads", leader_id=leader_id))

    async def _store(self, entry: bytes, future: asyncio.Future[Any]) -> None:
        """Store one entry; its outcome is known before the next one is stored."""
        try:
            stored = await self._in_thread(self._log_of.append, self._term, entry)
        except StorageFull as error:  # refused, and this member leads on
            _fail([future], error)
            return
        except asyncio.CancelledError:
            _fail([future], OutcomeUnknown("this member stops"))
            raise
        except DanubeError as error:
            _fail([future], error)
            raise
        if not stored:
            _fail([future], NotLeader("another member leads"))
            self._news = True
            return
        self._known = self._known._replace(head=self._log_of.known.head, revision=self._log_of.known.revision)
        self._stored_count += 1
        result = self._machine.apply(self._known.head.index, self._term, entry)
        if not future.done():
            future.set_result(result)
        self._count(len(entry))

    async def _change(self, members: Members, future: asyncio.Future[None]) -> None:
        """Bring the members in etcd to these."""
        try:
            for node_id, address in self._known.members.items():
                wanted = members.voters.get(node_id, "")
                if not wanted:
                    await self._in_thread(self._log_of.remove_member, node_id)
                elif wanted != address:
                    await self._in_thread(self._log_of.move_member, node_id, wanted)
        except DanubeError as error:
            _fail([future], error)
            raise
        self._news = True
        self._known = self._known._replace(members=dict(members.voters))
        self._host.members_changed(members)
        if not future.done():
            future.set_result(None)

    async def _keep_lease(self) -> None:
        """Keep the lease that the leader's key hangs on; without it another member leads soon."""
        while True:
            await asyncio.sleep(KEEP_S)
            if not (lease_id := self._lease_id):
                continue
            try:
                kept = await self._on_side(self._side.keep_lease, lease_id)
            except Unavailable:
                continue  # the next read reports it
            if not kept and self._lease_id == lease_id:
                self._lease_id = 0
                self._news = True
                self._wake.set()

    # -- growth -----------------------------------------------------------------------------------

    def _count(self, size_bytes: int) -> None:
        """Another entry was applied: renew the copy, and the snapshot in etcd, when it has outgrown them."""
        self._entry_count += 1
        self._entry_bytes += size_bytes
        limit = max(SNAPSHOT_BYTES_MIN, SNAPSHOT_RATIO * self._snapshot_bytes)
        if self._renewing is None and (self._entry_bytes > limit or self._entry_count > SNAPSHOT_ENTRIES_MAX):
            self._entry_count = self._entry_bytes = 0
            self._renewing = asyncio.get_running_loop().create_task(self._renew())
            self._renewing.add_done_callback(self._ended)

    async def _renew(self) -> None:
        try:
            index, make = self._machine.applied_index, self._machine.freeze()
            snapshot = await asyncio.to_thread(make)
            self._snapshot_bytes = len(snapshot)
            self._machine.stored(snapshot)
            if self._role == "leader" and index > self._known.head.snapshot_index:
                log = self._log_of
                self._adopt = index, *await self._on_side(log.put_snapshot, self._side, index, snapshot)
                self._wake.set()
        except Unavailable as error:
            _log.lasting("no snapshot could be stored in etcd", source="snapshot", why=str(error))
        finally:
            self._renewing = None

    async def _name_snapshot(self, index: int, directory: str, chunks: int) -> None:
        self._adopt = None
        if not await self._in_thread(self._log_of.adopt_snapshot, index, directory, chunks):
            self._news = True
            return
        known = self._log_of.known
        self._known = self._known._replace(head=known.head, revision=known.revision)
        await self._delete_before(known.head)

    async def _delete_before(self, head: Head) -> None:
        await self._on_side(self._log_of.delete_before, self._side, head)

    async def _forget_history(self) -> None:
        """Compact etcd, which otherwise keeps all former values."""
        former = 0
        while True:
            await asyncio.sleep(HISTORY_S)
            if self._role != "leader":
                former = 0
                continue
            if former and self._place.compacted:
                try:
                    await self._on_side(self._side.compact_history, former)
                except Unavailable as error:
                    if "compacted" not in error.why:  # another client did it
                        _log.lasting("etcd does not compact its history", source="history", why=error.why)
            former = self._known.revision

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._host.failed(error)


def _fail(futures: list[asyncio.Future[Any]], error: DanubeError) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)


def _give_back(calls: Any, lease_id: int) -> None:
    """End the lease of a leader that stops, as far as etcd answers."""
    try:
        if lease_id:
            calls.revoke_lease(lease_id)
    except DanubeError:
        pass  # it ends by itself
    finally:
        calls.close()


def _call_from_thread(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(work)
    except RuntimeError:
        pass  # the loop has ended
