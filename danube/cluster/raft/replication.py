"""Replication at a leader: progress of each peer, its next requests, and arriving snapshots.

Pure: no clock, no network.

A peer is *probed* (one request at a time, until one is accepted), then *followed* (a bounded number of
requests in flight, each beginning where the one before ended). A refusal leads back to probing.  If the log
no longer holds the entries that a peer needs, the peer gets the snapshot, part by part, one in flight.  Every
heartbeat names the end of the sent entries, so a lost request is noticed soon.

A large request takes long on a slow network, and smaller ones overtake it.  So for some heartbeats after a
large request refusals are ignored, and heartbeats name the end that the peer is known to have.  Otherwise
each heartbeat would repeat the large request until the network is full of repetitions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from danube.cluster.raft.engine import Members
from danube.cluster.raft.entries import RaftLog
from danube.cluster.raft.entry import size_of
from danube.cluster.raft.messages import AppendAnswer, AppendRequest, SnapshotAnswer, SnapshotPart
from danube.cluster.raft.quorum import quorum_value
from danube.limits import (
    KIB,
    RAFT_BATCH_BYTES,
    RAFT_BATCH_ENTRIES,
    RAFT_MESSAGES_IN_FLIGHT,
    RAFT_SNAPSHOT_BYTES_MAX,
)

_LARGE_ROUNDS = 5  # heartbeats without an answer before a large request is repeated
_LARGE_BYTES = 32 * KIB  # at most what travels with the small ones


class Bounds(NamedTuple):
    """How much goes to one peer at once."""

    batch_entries: int = RAFT_BATCH_ENTRIES
    batch_bytes: int = RAFT_BATCH_BYTES
    in_flight: int = RAFT_MESSAGES_IN_FLIGHT


class Progress:
    """One peer as its leader knows it."""

    def __init__(self, next_index: int) -> None:
        self.next = next_index
        self.match = 0  # so far its log is durable and the leader's
        self.probing = True
        self.waiting = False  # for the answer of a probe
        self.in_flight: deque[int] = deque()  # the last index of each request that is not answered
        self.acked_round = 0
        self.position = -1  # of the snapshot that it gets, -1 where it gets none
        self.part_round = 0
        self.large_end = self.large_round = 0  # of the last large request: its last index, when it was sent


class Replication:
    """The progress of all peers of one leadership."""

    def __init__(self, log: RaftLog, term: int, part_at: Callable[[int], bytes], bounds: Bounds) -> None:
        self._log, self._term, self._part_at, self._bounds = log, term, part_at, bounds
        self.peers: dict[str, Progress] = {}
        self.round = 0
        self._snapshot_index = self._snapshot_size = 0
        self._commits = (log.commit_index, log.commit_index)  # as of this round and the one before
        self.snapshot_count = 0

    def set_peers(self, node_ids: Iterable[str]) -> None:
        """Keep, add and forget peers."""
        self.peers = {
            node_id: self.peers.get(node_id) or Progress(self._log.last_log_index + 1) for node_id in node_ids
        }

    def begin_round(self, number: int) -> None:
        self.round = number
        self._commits = (self._log.commit_index, self._commits[0])

    def caught_up(self, node_id: str) -> bool:
        """Whether a peer has the entries that were committed a heartbeat ago, by its latest answer."""
        peer = self.peers.get(node_id)
        return peer is not None and peer.match >= self._commits[1] and peer.acked_round >= self.round - 1 > 0

    def match_quorum(self, members: Members, own_id: str) -> int:
        """So far a majority has the log on disk, this member included where it does."""
        return quorum_value(
            members, lambda one: self._log.durable_index if one == own_id else self._match(one)
        )

    def acked_quorum(self, members: Members, own_id: str) -> int:
        """The last heartbeat that a majority has answered."""
        return quorum_value(members, lambda one: self.round if one == own_id else self._acked(one))

    def _match(self, node_id: str) -> int:
        peer = self.peers.get(node_id)
        return peer.match if peer is not None else 0

    def _acked(self, node_id: str) -> int:
        peer = self.peers.get(node_id)
        return peer.acked_round if peer is not None else 0

    # Requests

    def requests(
        self, node_id: str, *, heartbeat: bool, commit_moved: bool
    ) -> Iterator[AppendRequest | SnapshotPart]:
        """Return the requests to send to a peer now.

        With ``heartbeat`` there is at least one, with ``commit_moved`` at least one if the peer follows.
        """
        peer = self.peers[node_id]
        if peer.position >= 0 or peer.next <= self._log.base_index:
            yield from self._snapshot_requests(peer, heartbeat)
            return
        sent = False
        if peer.probing:
            if not peer.waiting or (heartbeat and not self._passed(peer)):
                peer.waiting = sent = True
                yield self._append(peer)
        else:
            while peer.next <= self._log.last_log_index and len(peer.in_flight) < self._bounds.in_flight:
                request = self._append(peer)
                peer.next += len(request.entries)
                peer.in_flight.append(peer.next - 1)
                sent = True
                yield request
        if not sent and (heartbeat or (commit_moved and not peer.probing)):
            known = peer.match if peer.match >= self._log.base_index else 0
            yield self._request(known if self._passed(peer) else peer.next - 1)

    def _passed(self, peer: Progress) -> bool:
        """Whether small requests may be passing a large one that is on its way."""
        return peer.match < peer.large_end and self.round - peer.large_round < _LARGE_ROUNDS

    def _append(self, peer: Progress) -> AppendRequest:
        request = self._request(peer.next - 1)
        request.entries = self._log.batch(peer.next, self._bounds.batch_entries, self._bounds.batch_bytes)
        if sum(map(size_of, request.entries)) > _LARGE_BYTES:
            peer.large_end, peer.large_round = peer.next - 1 + len(request.entries), self.round
        return request

    def _request(self, previous_index: int) -> AppendRequest:
        log = self._log
        previous_term = log.term_at(previous_index) if previous_index else 0
        return AppendRequest(self._term, self.round, previous_index, previous_term, log.commit_index, [])

    def _snapshot_requests(self, peer: Progress, heartbeat: bool) -> Iterator[AppendRequest | SnapshotPart]:
        if peer.position < 0 or self._snapshot_index != self._log.snapshot_index:
            self._begin_snapshot()
            peer.position, peer.waiting = 0, False
        if not peer.waiting or self.round - peer.part_round >= _LARGE_ROUNDS:
            peer.waiting, peer.part_round = True, self.round
            yield self._part(peer.position)
        elif heartbeat:
            yield self._request(0)

    def _begin_snapshot(self) -> None:
        """A newer snapshot has taken the place of the one that was being sent: begin again."""
        if self._snapshot_index != self._log.snapshot_index:
            for peer in self.peers.values():
                if peer.position >= 0:
                    peer.position, peer.waiting = 0, False
        self._snapshot_index, self._snapshot_size = self._log.snapshot_index, self._log.snapshot_size
        self.snapshot_count += 1

    def _part(self, position: int) -> SnapshotPart:
        log = self._log
        return SnapshotPart(
            self._term,
            self.round,
            log.snapshot_index,
            log.snapshot_term,
            log.snapshot_members,
            self._snapshot_size,
            position,
            self._part_at(position),
        )

    # Answers

    def on_append_answer(self, node_id: str, answer: AppendAnswer) -> None:
        peer = self.peers.get(node_id)
        if peer is None:
            return
        peer.acked_round = max(peer.acked_round, answer.round)
        if answer.success:
            self._accepted(peer, min(answer.match_index, self._log.last_log_index))
        elif peer.position < 0 and answer.previous_index > peer.match:
            self._refused(peer, answer)

    def _accepted(self, peer: Progress, match_index: int) -> None:
        peer.match = max(peer.match, match_index)
        if peer.position >= 0 and peer.match >= self._snapshot_index:
            peer.position, peer.next, peer.waiting = -1, peer.match + 1, False
        if peer.position < 0 and match_index >= peer.next - 1:
            peer.probing = peer.waiting = False
        peer.next = max(peer.next, peer.match + 1)
        while peer.in_flight and peer.in_flight[0] <= peer.match:
            peer.in_flight.popleft()

    def _refused(self, peer: Progress, answer: AppendAnswer) -> None:
        if peer.probing and answer.previous_index != peer.next - 1:
            return  # an older probe's
        if not peer.probing and self._passed(peer):
            return  # it overtook the request that it follows
        peer.next = max(peer.match + 1, min(answer.hint_index + 1, answer.previous_index))
        peer.probing, peer.waiting = True, False
        peer.in_flight.clear()

    def on_snapshot_answer(self, node_id: str, answer: SnapshotAnswer) -> None:
        peer = self.peers.get(node_id)
        if peer is None:
            return
        peer.acked_round = max(peer.acked_round, answer.round)
        if peer.position >= 0 and answer.last_index == self._snapshot_index:
            wanted = answer.position if answer.position < self._snapshot_size else 0
            if wanted != peer.position:
                peer.position, peer.waiting = wanted, False


class Arriving:
    """A snapshot that comes in parts; a part of another one begins it again."""

    def __init__(self) -> None:
        self._key = (0, 0)
        self._content = bytearray()

    def take(self, part: SnapshotPart) -> bytes | None:
        """The whole snapshot with its last part, None before."""
        key = (part.term, part.last_index)
        if key != self._key or part.position == 0:
            self._key, self._content = key, bytearray()
        if (
            part.position == len(self._content)
            and part.position + len(part.content) <= RAFT_SNAPSHOT_BYTES_MAX
        ):
            self._content += part.content
        if len(self._content) < part.size:
            return None
        snapshot = bytes(self._content)
        self.forget()
        return snapshot

    @property
    def position(self) -> int:
        """Position at which the next part has to begin."""
        return len(self._content)

    def forget(self) -> None:
        self._key, self._content = (0, 0), bytearray()
