"""Byte ring from one worker to another.

Writer:  one.  put() claims and fills, then publish(); what is never published stays invisible.
Reader:  one.  drain() hands out views; release() gives their space back.
Order:   the writer fills slots, then stores ``head``; the reader loads ``head``, then reads slots, then
         stores ``tail``; the writer loads ``tail``, then fills again (see danube.ipc.atomics).
Full:    put() returns False.  The caller keeps the batch and stops reading its socket.
Crash:   a new writer goes on at the stored ``head``, over the claims of the dead one; a new reader goes
         on at the stored ``tail`` and reads again what the dead one had drained and not released.
         Both carry an incarnation in every record, so a reader that is told which incarnations to
         expect drops what was meant for, or comes from, a dead process.
Damage:  the header of every slot carries a check over its own position and fields.  A slot that fails it
         raises RingDamaged, and goes on doing so until reset() gives up all that is in the ring.

Positions are byte counts modulo 2**64 and may start anywhere.  The size is a power of two.

Words (each line has one writer), then slots, each starting at a multiple of 8:

    word  writer          field
       0  the ring's      head      published end
       1  the ring's      wanted    1: the writer was refused and wants its bell rung on release
       8  the reader      tail      released end
       9  the reader      resets    how often the reader gave up the ring's content

    position  size  field of a slot
           0     4  size         payload bytes
           4     4  kind         chosen by the writer, below KIND_END; PADDING fills the ring's end
           8     4  source       incarnation of the writer
          12     4  destination  incarnation of the reader it is meant for
          16     8  check        hash of position, size, kind, source, destination
          24        payload, padded to 8

The check is Python's hash of a tuple of integers, which costs 50 ns.  It need not be portable, because all
processes are forks of one interpreter and the memory ends with them.  Payloads get no checksum here: batches
carry their own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from danube.errors import LimitExceeded, RingDamaged
from danube.ipc.atomics import WORD_MASK, Words

HEAD: Final = 0
WANTED: Final = 1
TAIL: Final = 8
RESETS: Final = 9

SLOT_HEADER_BYTES: Final = 24
KIND_END: Final = 0xFFFF_0000  # kinds from here on are the ring's own
PADDING: Final = 0xFFFF_FFFF

_SLOT: Final = struct.Struct("=IIIIq")
_pack = _SLOT.pack_into
_unpack = _SLOT.unpack_from

if _SLOT.size != SLOT_HEADER_BYTES:
    raise ImportError("the table above is the format")


class RingWriter:
    """The writing end.  ``destination`` is the reader's incarnation that records are meant for."""

    def __init__(self, words: Words, slots: memoryview, source: int, destination: int) -> None:
        self._load = words.load
        self._store = words.store
        self._slots = slots
        self._capacity = len(slots)
        self._mask = self._capacity - 1
        self.source = source
        self.destination = destination
        # Half a ring, so that it always fits when the ring is empty, wherever the position is.
        self.payload_bytes_max = self._capacity // 2 - SLOT_HEADER_BYTES
        self._head = self._claimed = words.load(HEAD)
        self._tail = words.load(TAIL)

    def put(self, kind: int, parts: Sequence[bytes | bytearray | memoryview], size: int) -> bool:
        """Claim a slot and fill it with ``parts``, together ``size`` bytes; False while the ring is full.

        Several may be claimed; they become visible together.  Raises LimitExceeded for more than
        ``payload_bytes_max`` and RingDamaged when the stored ``tail`` cannot be.
        """
        place = self._claim(kind, size)
        if place < 0:
            return False
        slots = self._slots
        for part in parts:
            end = place + len(part)
            slots[place:end] = part
            place = end
        return True

    def _claim(self, kind: int, size: int) -> int:
        """Claim a slot; returns where its payload starts, or -1."""
        if not 0 <= size <= self.payload_bytes_max:
            raise LimitExceeded(f"{size} bytes do not fit a slot", why=f"limit is {self.payload_bytes_max}")
        need = SLOT_HEADER_BYTES + ((size + 7) & ~7)
        position = self._claimed
        place = position & self._mask
        here = self._capacity - place
        whole = need if need <= here else here + need
        if self._capacity - ((position - self._tail) & WORD_MASK) < whole and not self._room(whole):
            return -1
        if need > here:
            if here >= SLOT_HEADER_BYTES:
                self._write_header(place, position, here - SLOT_HEADER_BYTES, PADDING)
            position = (position + here) & WORD_MASK
            place = 0
        self._write_header(place, position, size, kind)
        self._claimed = (position + need) & WORD_MASK
        return place + SLOT_HEADER_BYTES

    def _write_header(self, place: int, position: int, size: int, kind: int) -> None:
        source, destination = self.source, self.destination
        check = hash((position, size, kind, source, destination))
        _pack(self._slots, place, size, kind, source, destination, check)

    def _room(self, need: int) -> bool:
        """Look at the reader's progress; whether ``need`` bytes are free now."""
        self._tail = tail = self._load(TAIL)
        used = (self._claimed - tail) & WORD_MASK
        if used > self._capacity:
            raise RingDamaged("the ring's tail is not within the ring", tail=tail, claimed=self._claimed)
        return self._capacity - used >= need

    def publish(self) -> bool:
        """Make all filled claims visible; whether there were any."""
        if self._claimed == self._head:
            return False
        self._head = self._claimed
        self._store(HEAD, self._claimed)
        return True

    def abandon(self) -> None:
        """Forget the claims since the last publish(), and store ``head`` again in case it was damaged."""
        self._claimed = self._head
        self._store(HEAD, self._head)

    @property
    def tail(self) -> int:
        """The reader's released end, as stored now."""
        return self._load(TAIL)

    @property
    def tail_known(self) -> int:
        """The reader's released end as put() saw it last."""
        return self._tail

    @property
    def resets(self) -> int:
        """How often the reader has given up the ring's content."""
        return self._load(RESETS)

    def want_room(self, wanted: bool) -> None:
        """Ask the reader to ring this worker's bell when it releases, or stop asking."""
        self._store(WANTED, int(wanted))


class RingReader:
    """The reading end.  Records from drain() are views into the ring: use them before release()."""

    def __init__(self, words: Words, slots: memoryview) -> None:
        self._load = words.load
        self._store = words.store
        self._slots = slots
        self._capacity = len(slots)
        self._mask = self._capacity - 1
        self._position = self._released = words.load(TAIL)
        self.stale_count = 0

    @property
    def pending(self) -> bool:
        """Whether something was published and not drained."""
        return self._load(HEAD) != self._position

    @property
    def wanted(self) -> bool:
        """Whether the writer waits for room."""
        return self._load(WANTED) != 0

    def drain(
        self, bytes_max: int, source: int | None = None, destination: int | None = None
    ) -> list[tuple[int, memoryview]]:
        """Whole records ``(kind, payload)`` in order, until they exceed ``bytes_max``; at least one if any.

        With ``source`` or ``destination``, records of other incarnations are dropped and counted in
        ``stale_count``.  Raises RingDamaged; good records before the damage are handed out first.
        """
        records: list[tuple[int, memoryview]] = []
        position = self._position
        head = self._load(HEAD)
        available = (head - position) & WORD_MASK
        if available > self._capacity or available & 7:
            raise RingDamaged("the ring's head is not within the ring", head=head, position=position)
        slots, mask, capacity = self._slots, self._mask, self._capacity
        limit = available - bytes_max
        while available > 0 and (available > limit or not records):
            place = position & mask
            here = capacity - place
            if here < SLOT_HEADER_BYTES:
                need = here
            else:
                size, kind, sent_by, meant_for, check = _unpack(slots, place)
                need = SLOT_HEADER_BYTES + ((size + 7) & ~7)
                sound = check == hash((position, size, kind, sent_by, meant_for))
                if not sound or need > available or need > here:
                    if records:
                        break
                    self._position = position
                    raise RingDamaged("a slot fails its check", position=position, size=size, kind=kind)
                if kind == PADDING:
                    pass
                elif source not in (None, sent_by) or destination not in (None, meant_for):
                    self.stale_count += 1
                else:
                    place += SLOT_HEADER_BYTES
                    records.append((kind, slots[place : place + size]))
            position = (position + need) & WORD_MASK
            available -= need
        self._position = position
        return records

    def release(self) -> bool:
        """Give back the space of all drained records; whether there was any."""
        if self._position == self._released:
            return False
        self._released = self._position
        self._store(TAIL, self._position)
        return True

    def restore(self) -> None:
        """Store ``tail`` again in case it was damaged."""
        self._store(TAIL, self._released)

    def reset(self) -> None:
        """Give up everything in the ring, after RingDamaged; the writer can see that it happened."""
        self._store(RESETS, (self._load(RESETS) + 1) & WORD_MASK)
        self._position = self._released = self._load(HEAD)
        self._store(TAIL, self._position)
