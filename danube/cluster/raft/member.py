"""One member without its role: its stored log, its machine, and the messages that wait to leave it.

The role calls in this order: changes of the log or the promise, ``sync``, ``apply``, ``send``.  Messages
wait for ``send``, so no message reflects a state that is not durable.  Only a leader's requests
may leave by ``send_requests`` before the sync: they promise nothing, and peers store while it does.

Snapshots are made, written and read ``aside``: a large one takes seconds, in which heartbeats go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from danube.cluster.raft.disk import Disk
from danube.cluster.raft.engine import Host, Machine, Members
from danube.cluster.raft.entries import HardState, RaftLog
from danube.cluster.raft.entry import COMMAND
from danube.cluster.raft.journal import Base, Identity, Journal, Promise, Recovered, Staged
from danube.cluster.raft.messages import AppendRequest, Message, SnapshotPart, encode
from danube.cluster.raft.quorum import check_members
from danube.errors import ConfigInvalid, Damage, NotFound, broken

# Call the first function in another thread, then the second one on the loop with its result; one job at a
# time.
Aside = Callable[[Callable[[], Any], Callable[[Any], None]], None]


class Member:
    """The parts of ``node_id``; opening it reads the journal and brings the machine up to its snapshot."""

    def __init__(
        self,
        node_id: str,
        disk: Disk,
        machine: Machine,
        host: Host,
        *,
        cluster_id: str,
        bootstrap: Members | None,
        snapshot_bytes: int,
        aside: Aside,
    ) -> None:
        self.node_id, self.machine, self.host = node_id, machine, host
        self.counters: Counter[str] = Counter()
        self.journal = Journal(disk)
        self._snapshot_bytes = snapshot_bytes
        self._aside = aside
        self._compacting = self.installing = False
        self._outbox: list[tuple[str, Message]] = []
        try:
            recovered = self._recovered(Identity(cluster_id, node_id), bootstrap)
            self.storage = HardState(self.journal, recovered.promise)
            self.log = RaftLog(self.journal, recovered)
            self._restore()
        except BaseException:
            self.journal.close()
            raise

    def _recovered(self, identity: Identity, bootstrap: Members | None) -> Recovered:
        recovered = self.journal.recover()
        if recovered is None:
            if bootstrap is None:
                raise NotFound(
                    "this member has no journal",
                    why="a voter without its journal has forgotten its votes, so it must not take part",
                    hint="let it join as a new member, with a new id",
                )
            check_members(bootstrap)
            if self.machine.applied_index:
                raise ConfigInvalid(
                    "the member's journal is missing, and its state is not", index=self.machine.applied_index
                )
            recovered = self.journal.create(identity, bootstrap)
        if recovered.identity != identity:
            theirs = recovered.identity
            raise ConfigInvalid(
                f"this journal is that of member {theirs.node_id} of cluster {theirs.cluster_id}",
                why=f"this is {identity.node_id} of {identity.cluster_id}",
                hint="start it with its own directory",
            )
        return recovered

    def _restore(self) -> None:
        log, applied = self.log, self.machine.applied_index
        if applied > log.last_log_index:
            raise Damage(
                "the member's journal lacks entries that were applied",
                why=f"it ends at {log.last_log_index}, the state is as of {applied}",
                hint="remove this member and let a new one join in its place",
                index=applied,
            )
        if applied < log.snapshot_index:
            snapshot = self.journal.snapshot()
            self.machine.restore(log.snapshot_index, snapshot, self.machine.thaw(snapshot))
        log.commit_index = log.last_applied = max(log.snapshot_index, applied)

    @property
    def members(self) -> Members:
        return self.log.members

    # A step

    def post(self, node_id: str, message: Message) -> None:
        """Send with the end of this step."""
        self._outbox.append((node_id, message))

    def sync(self) -> None:
        self.journal.sync()
        self.log.synced()

    def commit_to(self, index: int) -> None:
        """Entries up to ``index`` are agreed on; ``apply`` takes them."""
        if index > self.log.last_log_index:
            broken("a commit beyond the log", index=index, last=self.log.last_log_index)
        self.log.commit_index = max(self.log.commit_index, index)

    def apply(self, applied: Callable[[int, object], None] | None) -> None:
        """Apply committed entries to the machine; call ``applied`` with each index and result."""
        log = self.log
        if self.journal.dirty:
            broken("entries would be applied that are not durable")
        while log.last_applied < log.commit_index:
            index = log.last_applied + 1
            entry = log[index]
            result = self.machine.apply(index, entry.term, entry.content) if entry.kind == COMMAND else None
            log.last_applied = index
            if applied is not None:
                applied(index, result)

    def send_requests(self) -> None:
        """Send a leader's requests to its peers; all other messages wait for ``send``."""
        if self.journal.promise_noted:
            return  # the term itself is not durable yet
        outbox, self._outbox = self._outbox, []
        requests = (AppendRequest, SnapshotPart)
        self._send([one for one in outbox if isinstance(one[1], requests)])
        self._outbox += [one for one in outbox if not isinstance(one[1], requests)]

    def send(self) -> None:
        outbox, self._outbox = self._outbox, []
        self._send(outbox)

    def _send(self, outbox: list[tuple[str, Message]]) -> None:
        for node_id, message in outbox:
            self.host.send(node_id, encode(message))
        self.counters["messages_sent"] += len(outbox)

    # Snapshots

    def compact_if_grown(self) -> None:
        """Replace entries by a snapshot, once they take more room than it and more than they may."""
        journal, log = self.journal, self.log
        if self._compacting or journal.entries_bytes <= max(self._snapshot_bytes, journal.snapshot_size):
            return
        if log.last_applied <= log.snapshot_index:
            return
        self._compacting = True
        base, encode_state = log.plan_snapshot(self._snapshot_bytes // 4), self.machine.freeze()

        def work() -> tuple[bytes, Staged]:
            snapshot = encode_state()
            return snapshot, journal.stage(base, snapshot)

        self._aside(work, self._compact)

    def _compact(self, made: tuple[bytes, Staged]) -> None:
        snapshot, staged = made
        self._compacting = False
        if staged.base.index <= self.log.snapshot_index:  # a leader's came meanwhile, and holds more
            self.journal.unstage()
            return
        self.log.compact(staged, self._promise())
        self.machine.stored(snapshot)
        self.counters["snapshots_taken"] += 1

    def install(
        self,
        part: SnapshotPart,
        snapshot: bytes,
        wanted: Callable[[], bool],
        installed: Callable[[], None],
    ) -> None:
        """Begin with a leader's snapshot, if it is still ``wanted`` when it has been read and written."""
        self.installing = True
        base = Base(part.last_index, part.last_term, part.last_index, part.last_term, part.members, 0)

        def work() -> tuple[object, Staged]:
            return self.machine.thaw(snapshot), self.journal.stage(base, snapshot)

        def done(made: tuple[object, Staged]) -> None:
            self.installing = False
            thawed, staged = made
            if not wanted() or base.index <= self.log.commit_index:
                self.journal.unstage()
                return
            self.log.install(staged, self._promise())
            self.machine.restore(base.index, snapshot, thawed)
            self.counters["snapshots_installed"] += 1
            installed()

        self._aside(work, done)

    def _promise(self) -> Promise:
        return Promise(self.storage.term, self.storage.voted_for)
