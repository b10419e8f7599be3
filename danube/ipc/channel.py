"""All rings of one worker behind one door: send to any peer, take from all, sleep safely.

One turn of a worker's loop:

    restarted = channel.peers_restarted()      # forget what was in flight with these
    for peer, kind, payload in channel.poll(limit): ...   # views, valid until release()
    for peer in channel.unblocked(): ...       # send what was kept for these
    channel.send(peer, kind, parts)            # False: full, keep it until unblocked() names the peer
    channel.release()                          # give space back; rings writers that wait for it
    channel.flush()                            # publish all that was sent; rings sleeping readers
    channel.arm()                              # when all of that did nothing; True: sleep until fileno()
                                               # is readable, then disarm() and begin again

Delivery: in order per peer, at most once, and only between the two processes that were meant: every record
carries the incarnation of both, and those of a dead process are dropped.  Records of a restarted peer
are held back until ``peers_restarted()`` has named it, so state of the old one is never mixed with
messages of the new one.

Large records: one that exceeds half a ring crosses in fragments, which the receiver joins in private
memory.  At most one per peer is under way; until it is through, send() to that peer says False.

Damage: poll() raises RingDamaged with ``facts["worker"]``.  Call reset(worker): the ring's content is given
up, and ``peers_restarted()`` names the peer here and this worker there, because both have lost messages.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from danube.errors import InvalidArgument, LimitExceeded, RingDamaged
from danube.ipc import atomics
from danube.ipc.bell import Bell
from danube.ipc.layout import LINE_BYTES
from danube.ipc.region import Region
from danube.ipc.ring import KIND_END, RingReader, RingWriter
from danube.limits import FRAME_BYTES_MAX, MIB

FRAGMENT_FIRST: Final = KIND_END + 1  # u32 kind, u32 size of the whole record, then its first bytes
FRAGMENT_NEXT: Final = KIND_END + 2
CHANNEL_RECORD_BYTES_MAX: Final = FRAME_BYTES_MAX
POLL_BYTES: Final = 4 * MIB

_FRAGMENT: Final = struct.Struct("=II")

Bytes = bytes | bytearray | memoryview
Received = tuple[int, int, memoryview]


class _Large:
    """A large record on its way to or from one peer; fragments up to ``position`` have passed."""

    __slots__ = ("body", "kind", "position")

    def __init__(self, kind: int, body: bytes | bytearray) -> None:
        self.kind = kind
        self.body = memoryview(body)
        self.position = 0


class _Peer:
    """Both rings to one other worker, and its state."""

    def __init__(self, region: Region, own: int, incarnation: int, worker: int) -> None:
        layout = region.layout
        self.worker = worker
        self.announced = region.words(layout.incarnation_position(worker), LINE_BYTES)
        self.incarnation = self.announced.load(0)
        self.writer = RingWriter(*region.ring_memory(own, worker), incarnation, self.incarnation)
        self.reader = RingReader(*region.ring_memory(worker, own))
        self.bell = Bell(region.words(layout.sleeping_position(worker), LINE_BYTES), region.bells[worker])
        self.resets = self.writer.resets
        self.blocked_at: int | None = None  # the ring's tail when it refused a record
        self.room_again = False  # it was refused, there is room, and unblocked() has not yet said so
        self.outgoing: _Large | None = None
        self.incoming: _Large | None = None
        self.damage: RingDamaged | None = None
        self.to_report = False

    def changed(self) -> bool:
        replaced = self.announced.load(0) != self.incarnation
        return replaced or self.to_report or self.writer.resets != self.resets

    def accept_change(self) -> None:
        """From here on talk to the peer's current incarnation."""
        self.to_report = False
        self.incarnation = self.writer.destination = self.announced.load(0)
        self.resets = self.writer.resets
        self.writer.abandon()
        self.reader.restore()
        self.outgoing = self.incoming = None
        self.unblock()

    def block(self) -> None:
        """A record was refused: have this worker's bell rung when the peer releases.

        The decisive tail is the one that the refusal saw.  A tail that is loaded now may be newer, and room
        that was released in between would never be noticed.
        """
        self.blocked_at = self.writer.tail_known
        self.writer.want_room(True)

    def unblock(self) -> None:
        self.blocked_at = None
        self.room_again = False
        self.writer.want_room(False)

    def notice_room(self) -> bool:
        """Whether there is room since the last refusal; true once for each refusal."""
        if self.blocked_at is None or self.blocked_at == self.writer.tail:
            return False
        if self.outgoing is None:  # else flush() goes on with the large record first
            self.unblock()
            self.room_again = True
        return True

    def advance_outgoing(self) -> None:
        """Put as many fragments of the large record as there is room for."""
        outgoing = self.outgoing
        if outgoing is None:
            return
        body, size_max = outgoing.body, self.writer.payload_bytes_max // 2
        while outgoing.position < len(body):
            first = outgoing.position == 0
            end = min(len(body), outgoing.position + size_max - (_FRAGMENT.size if first else 0))
            part = body[outgoing.position : end]
            kind = FRAGMENT_FIRST if first else FRAGMENT_NEXT
            prefix = _FRAGMENT.pack(outgoing.kind, len(body)) if first else b""
            if not self.writer.put(kind, (prefix, part), len(prefix) + len(part)):
                self.block()
                return
            outgoing.position = end
        self.outgoing = None
        # Writers that were refused behind this record may try again.
        self.blocked_at = None if self.blocked_at is None else -1

    def join(self, kind: int, payload: memoryview) -> tuple[int, memoryview] | None:
        """Take a fragment; the whole record when this was its last.

        A first fragment replaces an unfinished record; further fragments of that one are dropped.
        """
        incoming = self.incoming
        if kind == FRAGMENT_FIRST:
            whole_kind, size = _FRAGMENT.unpack_from(payload)
            if size > CHANNEL_RECORD_BYTES_MAX:
                raise RingDamaged("a record in fragments is too large", size=size)
            incoming = self.incoming = _Large(whole_kind, bytearray(size))
            payload = payload[_FRAGMENT.size :]
        elif incoming is None:
            self.reader.stale_count += 1
            return None
        end = incoming.position + len(payload)
        if end > len(incoming.body):
            raise RingDamaged("fragments exceed their record", size=len(incoming.body))
        incoming.body[incoming.position : end] = payload
        incoming.position = end
        if end < len(incoming.body):
            return None
        self.incoming = None
        return incoming.kind, incoming.body


class Channel:
    """Everything that worker ``worker``, running as ``incarnation``, exchanges with the others."""

    def __init__(self, region: Region, worker: int, incarnation: int) -> None:
        layout = region.layout
        if not 0 <= worker < layout.workers:
            raise InvalidArgument(f"no worker {worker} in a region for {layout.workers}")
        self.worker = worker
        self.incarnation = incarnation
        words = region.words(layout.sleeping_position(worker), LINE_BYTES)
        self._bell = Bell(words, region.bells[worker])
        self._peers = {
            peer: _Peer(region, worker, incarnation, peer) for peer in range(layout.workers) if peer != worker
        }
        self._order = list(self._peers.values())
        self._touched: dict[int, _Peer] = {}  # peers with unpublished claims or fragments to send
        self._drained: list[_Peer] = []
        self._next = 0
        # A dead predecessor may have left these as they were when it slept or was refused.
        self._bell.disarm()
        for known in self._order:
            known.unblock()

    def send(self, worker: int, kind: int, parts: Sequence[Bytes]) -> bool:
        """Copy ``parts`` (views of bytes) as one record for ``worker``; visible after flush().

        False while there is no room: keep the record until unblocked() names the worker.
        """
        peer = self._peers[worker]
        if kind >= KIND_END:
            raise InvalidArgument(f"kind {kind} is the ring's own")
        if peer.outgoing is None:
            size = sum(map(len, parts))
            if size > peer.writer.payload_bytes_max:
                return self._send_large(peer, kind, size, parts)
            self._touched[worker] = peer
            try:
                if peer.writer.put(kind, parts, size):
                    return True
            except RingDamaged:
                self.reset(worker)
        peer.block()
        return False

    def _send_large(self, peer: _Peer, kind: int, size: int, parts: Sequence[Bytes]) -> bool:
        if size > CHANNEL_RECORD_BYTES_MAX:
            limit = f"limit is {CHANNEL_RECORD_BYTES_MAX}"
            raise LimitExceeded(f"{size} bytes cannot go to another worker", why=limit)
        peer.outgoing = _Large(kind, b"".join(parts))
        self._touched[peer.worker] = peer
        return True

    @property
    def touched(self) -> bool:
        """Whether something was sent that flush() has yet to publish."""
        return bool(self._touched)

    def flush(self) -> bool:
        """Publish everything sent since the last flush and wake the peers that sleep: once per turn.

        False while part of a large record still waits for room; a worker does not leave before True.
        """
        if not self._touched:
            return True
        published: list[_Peer] = []
        waiting: dict[int, _Peer] = {}
        for worker, peer in self._touched.items():
            if peer.outgoing is not None:
                try:
                    peer.advance_outgoing()
                except RingDamaged:
                    self.reset(worker)
            if peer.writer.publish():
                published.append(peer)
            if peer.outgoing is not None:
                waiting[worker] = peer
        self._touched = waiting
        if published:
            atomics.fence()
            for peer in published:
                peer.bell.ring()
        return not waiting

    def poll(self, bytes_max: int = POLL_BYTES) -> list[Received]:
        """Records ``(worker, kind, payload)``, about ``bytes_max`` at most; peers take turns to be first.

        Payloads are views, valid until release().  Raises RingDamaged with ``facts["worker"]``; records
        gathered before the damage are handed out first.
        """
        received: list[Received] = []
        order = self._order
        count = len(order)
        for step in range(count):
            peer = order[(self._next + step) % count]
            if bytes_max <= 0:
                break
            if peer.damage is None:
                if not peer.reader.pending or peer.changed():
                    continue
                bytes_max -= self._take(peer, bytes_max, received)
            if peer.damage is not None:
                if not received:
                    raise peer.damage
                break  # the next poll starts with this peer and raises
        else:
            step = 1
        if count:
            self._next = (self._next + step) % count
        return received

    def _take(self, peer: _Peer, bytes_max: int, received: list[Received]) -> int:
        """Drain one peer's ring into ``received``; returns the bytes taken.  Damage is noted at the peer."""
        worker, taken = peer.worker, 0
        try:
            records = peer.reader.drain(bytes_max, peer.incarnation, self.incarnation)
            self._drained.append(peer)
            for kind, payload in records:
                taken += len(payload)
                if kind >= KIND_END:
                    joined = peer.join(kind, payload)
                    if joined is None:
                        continue
                    kind, payload = joined
                received.append((worker, kind, payload))
        except RingDamaged as error:
            error.facts["worker"] = worker
            peer.damage = error
        return taken

    def release(self) -> None:
        """Release the space of records that poll() returned, and wake the writers that wait for it."""
        if not self._drained:
            return
        drained, self._drained = self._drained, []
        for peer in drained:
            if peer.damage is None:
                peer.reader.release()
        atomics.fence()
        for peer in drained:
            if peer.reader.wanted:
                peer.bell.ring()

    def arm(self) -> bool:
        """Announce that this worker will sleep; return False (and stay awake) if there is something to do.

        That is: records, a restarted peer, or room for refused records.  After False the worker runs another
        turn and tries the refused records again, whether or not it calls unblocked(). After True it sleeps
        until ``fileno()`` is readable and then calls disarm().
        """
        self._bell.arm()
        for peer in self._order:
            if peer.reader.pending or peer.changed() or peer.notice_room():
                self._bell.disarm()
                return False
        return True

    def disarm(self) -> None:
        """Awake: peers need not ring, and earlier rings are forgotten."""
        self._bell.disarm()

    def unblocked(self) -> list[int]:
        """Peers that refused a record and have room again.  Each is named once: try again at once."""
        workers: list[int] = []
        for peer in self._order:
            peer.notice_room()
            if peer.room_again:
                peer.room_again = False
                workers.append(peer.worker)
        return workers

    def peers_restarted(self) -> list[int]:
        """Peers that were replaced, or with which messages were lost, since the last call.

        Records in flight are lost: earlier records do not reach these peers, and earlier records of these
        peers are not handed out.
        """
        workers = [peer.worker for peer in self._order if peer.changed()]
        for worker in workers:
            self._peers[worker].accept_change()
            self._touched.pop(worker, None)
        return workers

    def reset(self, worker: int) -> None:
        """Give up the content of the ring from ``worker``, after RingDamaged."""
        peer = self._peers[worker]
        peer.reader.reset()
        peer.to_report = True
        peer.damage = None
        peer.incoming = None
        atomics.fence()
        peer.bell.ring()

    def fileno(self) -> int:
        """Descriptor that becomes readable when a peer rings; for ``loop.add_reader``."""
        return self._bell.descriptor

    @property
    def stale_count(self) -> int:
        """Records dropped because a process that they came from or were meant for is gone."""
        return sum(peer.reader.stale_count for peer in self._order)
