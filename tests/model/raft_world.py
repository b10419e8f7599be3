"""Members of a group in one thread: simulated clocks, network and disks, and what must hold after every step.

A step is one message, one timer, one fault or one call of a client, and all that the member does because
of it.  Each member has a loop of its own with a clock of its own.  Checked after each step: election
safety, append-only leaders, log matching, leader completeness, state machine safety; that a promise is
kept (one vote a term), that a leader has a majority's votes and what it commits is on a majority's disks;
that a register which clients write and read behaves as one.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from danube.cluster.raft.engine import EngineStatus, Members
from danube.cluster.raft.entries import RaftLog
from danube.cluster.raft.journal import Journal
from danube.cluster.raft.messages import VoteAnswer, VoteRequest, decode
from danube.cluster.raft.raftos_engine import LeaderRole, RaftosEngine
from danube.cluster.raft.replication import Bounds
from danube.core.batch.checksum import crc32c
from danube.errors import DanubeError, InvariantBroken

HEARTBEAT_MS = 100


class Violation(AssertionError):
    """A property does not hold."""


class Killed(BaseException):
    """The process ends here."""


class Handle:
    __slots__ = ("arguments", "callback", "cancelled", "when")

    def __init__(self, when: float, callback: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.when, self.callback, self.arguments, self.cancelled = when, callback, arguments, False

    def cancel(self) -> None:
        self.cancelled = True

    def __lt__(self, other: Handle) -> bool:
        return self.when < other.when


class Loop(asyncio.AbstractEventLoop):
    """As much of a loop as an engine needs; time stands still unless it is moved."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.ready: deque[Handle] = deque()
        self.timers: list[Handle] = []

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        handle = Handle(0, callback, args)
        self.ready.append(handle)
        return handle

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        handle = Handle(self.now + delay, callback, args)
        heapq.heappush(self.timers, handle)
        return handle

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        raise Violation(str(context))

    def run_ready(self) -> None:
        while self.ready:
            handle = self.ready.popleft()
            if not handle.cancelled:
                handle.callback(*handle.arguments)

    def next_timer(self) -> float | None:
        while self.timers and self.timers[0].cancelled:
            heapq.heappop(self.timers)
        return self.timers[0].when if self.timers else None

    def fire(self) -> None:
        """Move the clock to the next timer and let it run."""
        if self.next_timer() is not None:
            handle = heapq.heappop(self.timers)
            self.now = max(self.now, handle.when)
            handle.callback(*handle.arguments)


class MemoryDisk:
    """A Disk whose unsynced writes a power cut may lose, in part or in whole."""

    path = "raft.log"

    def __init__(self) -> None:
        self.content: bytearray | None = None
        self.unsynced: list[tuple[int, bytes]] = []
        self.durable = self.staged = b""
        self.countdown = -1  # calls until ``fault`` is raised
        self.fault: BaseException = Killed()

    def _call(self) -> None:
        if self.countdown >= 0:
            self.countdown -= 1
            if self.countdown < 0:
                raise self.fault

    def load(self) -> bytes | None:
        return None if self.content is None else bytes(self.content)

    def stage(self, pieces: Iterable[bytes]) -> None:
        self._call()
        self.staged = b"".join(pieces)

    def unstage(self) -> None:
        self.staged = b""

    def complete(self, head: bytes, pieces: Iterable[bytes], identity: bytes) -> None:
        self._call()
        self.content = bytearray(head + self.staged[len(head) :] + b"".join(pieces))
        self.staged = b""
        self._synced()
        self._call()

    def write(self, content: bytes, position: int) -> None:
        self._call()
        self._put(self._present(), position, content)
        self.unsynced.append((position, content))

    def sync(self) -> None:
        self._call()
        self._synced()

    def truncate(self, size: int) -> None:
        self._call()
        del self._present()[size:]
        self._synced()

    def read(self, size: int, position: int) -> bytes:
        return bytes(self._present()[position : position + size])

    def close(self) -> None:
        self.countdown = -1

    def _present(self) -> bytearray:
        assert self.content is not None
        return self.content

    def _synced(self) -> None:
        self.durable, self.unsynced = bytes(self._present()), []

    @staticmethod
    def _put(content: bytearray, position: int, written: bytes) -> None:
        if len(content) < position:
            content.extend(bytes(position - len(content)))
        content[position : position + len(written)] = written

    def lose_power(self, rng: random.Random) -> None:
        """Keep what was synced, and of the rest what chance wants; a mark lies in one sector."""
        if self.content is None:
            return
        content = bytearray(self.durable)
        for position, written in self.unsynced:
            fate = rng.random()
            if fate < 0.4:
                self._put(content, position, written)
            elif fate < 0.7 and len(written) > 16:
                cut = rng.randrange(1, len(written))
                torn = written[:cut] if rng.random() < 0.5 else bytes(cut) + written[cut:]
                self._put(content, position, torn)
        self.content = content
        self._synced()


class Register:
    """The machine: a value, and a sum over everything that was applied."""

    def __init__(self, world: World, node_id: str, state: tuple[int, str, int] = (0, "", 0)) -> None:
        self._world, self._node_id = world, node_id
        self.state = state  # index, value, sum

    @property
    def applied_index(self) -> int:
        return self.state[0]

    @property
    def value(self) -> str:
        return self.state[1]

    def apply(self, index: int, term: int, entry: bytes) -> tuple[int, str]:
        if index <= self.applied_index:
            raise Violation(f"{self._node_id} applies {index} after {self.applied_index}")
        self.state = (index, entry.decode(), _sum(f"{self.state[2]} {index} {term} {entry!r}"))
        self._world.check_state(self._node_id, self.state)
        return index, self.state[1]

    def freeze(self) -> Callable[[], bytes]:
        frozen = msgspec.msgpack.encode(self.state)
        return lambda: frozen

    def stored(self, snapshot: bytes) -> None:
        pass

    def thaw(self, snapshot: bytes) -> object:
        return msgspec.msgpack.decode(snapshot)

    def restore(self, index: int, snapshot: bytes, thawed: object) -> None:
        last, value, total = msgspec.msgpack.decode(snapshot)
        if last > index or index < self.applied_index:
            raise Violation(f"{self._node_id} restores {last} at {index} over {self.applied_index}")
        self.state = (last, value, total)
        self._world.check_state(self._node_id, self.state)
        self.state = (index, *self.state[1:])


def _sum(text: str) -> int:
    return crc32c(text.encode())


class Node:
    """One member and the machine it runs on."""

    def __init__(self, world: World, node_id: str, bootstrap: Members) -> None:
        self.world, self.node_id, self.bootstrap = world, node_id, bootstrap
        self.disk = MemoryDisk()
        self.machine = Register(world, node_id)
        self.durable_machine = world.rng.random() < 0.5  # or one that begins with the journal's snapshot
        self.engine: RaftosEngine | None = None
        self.loop = Loop(0.0)
        self.view: RaftLog | None = None
        self.term = self.commit = 0
        self.seen: tuple[Any, ...] = ()
        self.led = (0, 0, 0)  # term, last index, its term

    # Host

    def send(self, node_id: str, message: bytes) -> None:
        self.world.sent(self.node_id, node_id, message)

    def role_changed(self, status: EngineStatus) -> None:
        pass

    def members_changed(self, members: Members) -> None:
        pass

    def failed(self, error: BaseException) -> None:
        if not isinstance(error, Killed | OSError | DanubeError) and not isinstance(error.__cause__, OSError):
            raise Violation(f"{self.node_id} failed: {error!r}") from error
        if isinstance(error, DanubeError) and not isinstance(error.__cause__, OSError):
            raise Violation(f"{self.node_id} failed: {error!r}") from error
        self.engine = None

    # Life

    @property
    def alive(self) -> bool:
        return self.engine is not None

    @property
    def leads(self) -> bool:
        return self.engine is not None and isinstance(self.engine.role, LeaderRole)

    @property
    def log(self) -> RaftLog | None:
        """As it is durable, at the end of a step."""
        return self.engine._member.log if self.engine is not None else self.view

    def boot(self) -> None:
        world = self.world
        self.loop = Loop(world.now)
        self.commit, self.view = 0, None
        if not self.durable_machine:
            self.machine = Register(world, self.node_id)
        with world.running(self.loop):
            self.engine = RaftosEngine(
                self.node_id,
                Path("unused"),
                self.machine,
                self,
                bootstrap=self.bootstrap,
                heartbeat_ms=HEARTBEAT_MS,
                snapshot_bytes=world.snapshot_bytes,
                bounds=world.bounds,
                loop=self.loop,
                disk=self.disk,
                randomness=world.rng,
                in_thread=self._in_thread,
            )
            self.engine.start()
        world.step(self, lambda: None)

    def _in_thread(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """What another thread does takes no time or some, in which everything else goes on."""
        made = self.loop.create_future()

        def run() -> None:
            try:
                made.set_result(work())
            except BaseException as error:
                made.set_exception(error)

        delay = self.world.aside_s()
        if delay:
            self.loop.call_later(delay, run)
        else:
            self.loop.call_soon(run)
        return made

    def crash(self, *, power: bool) -> None:
        """End the process; with ``power`` what was not synced may be lost."""
        self.engine = None
        self.loop.ready.clear()
        self.loop.timers.clear()
        self.disk.countdown = -1
        if power:
            self.disk.lose_power(self.world.rng)
        self._look()

    def _look(self) -> None:
        """Read what is on the disk, as the next process will."""
        copy = MemoryDisk()
        copy.content = None if self.disk.content is None else bytearray(self.disk.content)
        recovered = Journal(copy).recover()
        self.view = None if recovered is None else RaftLog(Journal(copy), recovered)


class Client:
    """One call: what was known to have happened before it began."""

    def __init__(self, world: World, node: Node, value: str | None) -> None:
        self._world, self._node, self.value = world, node, value
        self.floor = world.floor
        self.outcome = ""

    def ended(self, future: asyncio.Future[Any]) -> None:
        world, error = self._world, None if future.cancelled() else future.exception()
        if error is not None:
            self.outcome = type(error).__name__
            return
        self.outcome = "ok"
        if self.value is not None:
            position, value = future.result()
            world.check_write(self, position, value)
        else:
            position = self._node.machine.applied_index
            world.check_read(self, future.result(), position, self._node)
        world.floor = max(world.floor, position)


class World:
    """All members, the network between them and the memory of what they said."""

    def __init__(
        self,
        rng: random.Random,
        size: int,
        *,
        snapshot_bytes: int = 1_500,
        bounds: Bounds = Bounds(batch_entries=3, in_flight=3),  # noqa: B008
    ) -> None:
        self.rng, self.snapshot_bytes, self.bounds = rng, snapshot_bytes, bounds
        self.now = 0.0
        self.network: list[tuple[float, str, str, bytes]] = []
        self.blocked: set[tuple[str, str]] = set()
        self.delay: Callable[[], list[float]] = lambda: [0.0]
        self.aside_s: Callable[[], float] = lambda: 0.0
        self.votes: dict[int, dict[str, str]] = {}
        self.leaders: dict[int, str] = {}
        self.entries: dict[tuple[int, int], tuple[int, Any]] = {}
        self.committed: dict[int, Any] = {}
        self.committed_term: dict[int, int] = {}
        self.committed_end = 0
        self.states: dict[int, tuple[int, str, int]] = {}
        self.floor = 0
        self.write_count = self.ok_count = self.read_count = self.step_count = self.crash_count = 0
        self.calls: list[Client] = []
        members = Members({f"n{number}": f"n{number}:1" for number in range(size)})
        self.nodes: dict[str, Node] = {}
        for node_id in members.voters:
            self.nodes[node_id] = Node(self, node_id, members)
        for node in self.nodes.values():
            node.boot()

    def running(self, loop: Loop) -> Any:
        return _Running(loop)

    def join(self, node_id: str) -> Node:
        """A new member with an empty disk."""
        node = Node(self, node_id, Members({}, {node_id: f"{node_id}:1"}))
        self.nodes[node_id] = node
        node.boot()
        return node

    # What happens

    def step(self, node: Node, action: Callable[[], None]) -> None:
        """Let one thing happen to a member, and all that follows from it there; then check."""
        self.step_count += 1
        try:
            with self.running(node.loop):
                action()
                node.loop.run_ready()
        except Killed:
            node.crash(power=self.rng.random() < 0.5)
            self.crash_count += 1
        except InvariantBroken as error:
            raise Violation(f"{node.node_id}: {error}") from error
        if not node.alive and node.view is None:
            node.crash(power=True)
        self.check(node)

    def deliver(self, place: int, *, keep: bool = False) -> None:
        _, source, target, message = self.network[place]
        if not keep:
            self.network[place] = self.network[-1]
            self.network.pop()
        self.hand(source, target, message)

    def hand(self, source: str, target: str, message: bytes) -> None:
        node = self.nodes.get(target)
        if node is not None and node.engine is not None and (source, target) not in self.blocked:
            engine = node.engine
            self.step(node, lambda: engine.receive(source, message))

    def fire(self, node: Node) -> None:
        if node.alive:
            self.step(node, node.loop.fire)

    def write(self, node: Node) -> Client:
        self.write_count += 1
        call = Client(self, node, f"v{self.write_count}")
        self._call(node, call, lambda engine: engine.propose(str(call.value).encode()))
        return call

    def read(self, node: Node) -> Client:
        call = Client(self, node, None)
        self._call(node, call, lambda engine: engine.read_barrier())
        return call

    def _call(
        self,
        node: Node,
        call: Client,
        ask: Callable[[RaftosEngine], asyncio.Future[Any]],
        *,
        run: bool = True,
    ) -> None:
        engine = node.engine
        assert engine is not None
        self.calls.append(call)
        self.step(node, lambda: ask(engine).add_done_callback(call.ended))

    def change(self, node: Node, members: Members) -> asyncio.Future[None]:
        engine = node.engine
        assert engine is not None
        outcome: list[asyncio.Future[None]] = []
        self.step(node, lambda: outcome.append(engine.change_members(members)))
        outcome[0].add_done_callback(lambda future: future.cancelled() or future.exception())
        return outcome[0]

    def sent(self, source: str, target: str, message: bytes) -> None:
        if message[0] <= 2:
            content = decode(message)
            if isinstance(content, VoteRequest):
                self._voted(content.term, source, source)
            elif isinstance(content, VoteAnswer) and content.vote_granted:
                self._voted(content.term, source, target)
        if (source, target) not in self.blocked and target in self.nodes:
            for delay in self.delay():
                self.network.append((self.now + delay, source, target, message))

    # What must hold

    def _voted(self, term: int, voter: str, candidate: str) -> None:
        before = self.votes.setdefault(term, {}).setdefault(voter, candidate)
        if before != candidate:
            raise Violation(f"{voter} votes for {before} and for {candidate} in term {term}")

    def check_state(self, node_id: str, state: tuple[int, str, int]) -> None:
        if self.states.setdefault(state[0], state) != state:
            raise Violation(f"{node_id} has {state} where another had {self.states[state[0]]}")

    def check(self, node: Node) -> None:
        if node.engine is None:
            return
        member = node.engine._member
        log, term = member.log, member.storage.term
        if term < node.term:
            raise Violation(f"{node.node_id} goes back from term {node.term} to {term}")
        node.term = term
        self._check_entries(node, log)
        if node.leads:
            self._check_leader(node, log, node.engine.role.term)
        if log.commit_index > node.commit:
            self._check_commit(node, log)

    def _check_entries(self, node: Node, log: RaftLog) -> None:
        entries = log._entries
        seen = (log.base_index, len(entries), entries[-1] if entries else None)
        if node.seen and seen[:2] == node.seen[:2] and seen[2] is node.seen[2]:
            return
        node.seen = seen
        previous_term = log.base_term
        for index, entry in enumerate(entries, log.base_index + 1):
            known = self.entries.setdefault((index, entry.term), (previous_term, entry))
            if known != (previous_term, entry):
                raise Violation(
                    f"{node.node_id} has {entry} after {previous_term} at {index}, another {known}"
                )
            previous_term = entry.term

    def _check_leader(self, node: Node, log: RaftLog, term: int) -> None:
        last = (term, log.last_log_index, log.last_log_term)
        if self.leaders.get(term) is None:
            self._check_elected(node, log, term)
        elif self.leaders[term] != node.node_id:
            raise Violation(f"term {term} has two leaders, {self.leaders[term]} and {node.node_id}")
        elif node.led[0] == term and (
            last[1] < node.led[1]
            or (node.led[1] >= log.base_index and log.term_at(node.led[1]) != node.led[2])
        ):
            raise Violation(f"leader {node.node_id} cuts its log in term {term}")
        node.led = last

    def _check_elected(self, node: Node, log: RaftLog, term: int) -> None:
        self.leaders[term] = node.node_id
        voters = node.bootstrap.voters if log.last_log_index == 1 else log.members.voters
        votes = self.votes.get(term, {})
        granted = [one for one in voters if one == node.node_id or votes.get(one) == node.node_id]
        if len(granted) <= len(voters) // 2:
            raise Violation(f"{node.node_id} leads term {term} with the votes of {granted} of {list(voters)}")
        for index in range(log.base_index + 1, self.committed_end + 1):
            if self.committed_term[index] < term:  # a late vote may make a leader of a term that is over
                if index > log.last_log_index:
                    raise Violation(f"leader {node.node_id} lacks committed entry {index}")
                if log[index] != self.committed.get(index, log[index]):
                    raise Violation(f"leader {node.node_id} of term {term} has another entry {index}")

    def _check_commit(self, node: Node, log: RaftLog) -> None:
        for index in range(max(node.commit, log.base_index) + 1, log.commit_index + 1):
            if self.committed.setdefault(index, log[index]) != log[index]:
                raise Violation(
                    f"{node.node_id} commits {log[index]} at {index}, not {self.committed[index]}"
                )
        if log.commit_index > self.committed_end:
            self._check_majority(node, log)
            for index in range(self.committed_end + 1, log.commit_index + 1):
                self.committed_term[index] = node.term
        self.committed_end = max(self.committed_end, log.commit_index)
        node.commit = log.commit_index

    def _check_majority(self, node: Node, log: RaftLog) -> None:
        index, voters = log.commit_index, log.members.voters
        term = log.term_at(index)
        holders = [one for one in voters if self._holds(one, index, term)]
        if len(holders) <= len(voters) // 2:
            raise Violation(f"{node.node_id} commits {index} with {holders} of {list(voters)}")

    def _holds(self, node_id: str, index: int, term: int) -> bool:
        node = self.nodes.get(node_id)
        log = node.log if node is not None else None
        if log is None or log.last_log_index < index:
            return False
        return index <= log.base_index or log.term_at(index) == term

    def check_write(self, call: Client, position: int, value: str) -> None:
        self.ok_count += 1
        entry = self.committed.get(position)
        if value != call.value or (entry is not None and entry.content.decode() != value):
            raise Violation(f"{call.value} is acknowledged as {value} at {position}: {entry}")
        if position <= call.floor:
            raise Violation(f"{value} is at {position}, but {call.floor} had been seen before it was written")

    def check_read(self, call: Client, index: int, position: int, node: Node) -> None:
        self.read_count += 1
        engine = node.engine
        if engine is None:
            return
        if engine.status.applied_index < max(index, call.floor):
            raise Violation(
                f"{node.node_id} reads at {engine.status.applied_index}, {call.floor} had been seen"
            )
        if self.states.get(position, node.machine.state)[1] != node.machine.value:
            raise Violation(f"{node.node_id} reads {node.machine.value} at {position}")


class _Running:
    """Make a loop the running one: raftos' timers ask for it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._before: Any = None

    def __enter__(self) -> None:
        self._before = asyncio._get_running_loop()
        asyncio._set_running_loop(self._loop)

    def __exit__(self, *_: object) -> None:
        asyncio._set_running_loop(self._before)
