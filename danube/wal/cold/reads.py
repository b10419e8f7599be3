"""Reads that wait for blocks of objects, in the order in which they get room in the cache.

A read needs all of its blocks at the same time, because a batch may lie across the edge of two blocks.  If
many reads need distant blocks and the cache holds few, each read would evict blocks that another one waits
for, for ever.  So reads are *admitted* in order of arrival, as many as fit.  Only their blocks are fetched,
and these stay until they were read.  If an admitted read turns out to need more blocks, it displaces the
youngest read.  A read that is not continued within KEPT_NS is dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Hashable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from danube.wal.cold.segment import ColdSegment

KEPT_NS: Final = 2_000_000_000

Block = tuple[str, int]  # key of the object, number
Name = tuple[str, Hashable]  # key of the object, reader


class Ticket:
    """``done`` becomes true when it is worth reading again; then ``tell`` is called, once."""

    __slots__ = ("_tell", "done")

    def __init__(self, tell: Callable[[], None] | None = None, *, done: bool = False) -> None:
        self.done = done
        self._tell = tell

    def end(self) -> None:
        """Note that waiting is over, whatever the reason: who waits asks again only once it is told."""
        if not self.done:
            self.done = True
            if self._tell is not None:
                self._tell()


class WaitingRead:
    """Blocks ``first .. last`` (included) of an object; ``ticket`` is done once all are there."""

    __slots__ = ("end_ns", "first", "last", "reader", "segment", "ticket")

    def __init__(self, segment: ColdSegment, reader: Hashable, first: int, last: int, ticket: Ticket) -> None:
        self.segment = segment
        self.reader = reader
        self.first = first
        self.last = last
        self.ticket = ticket
        self.end_ns = 0  # when it is let go; 0: not all is there yet

    @property
    def blocks(self) -> list[Block]:
        return [(self.segment.key, block) for block in range(self.first, self.last + 1)]

    @property
    def complete(self) -> bool:
        return self.segment.blocks.issuperset(range(self.first, self.last + 1))


class WaitingReads:
    """``bytes_max`` bounds the blocks of admitted reads; a single read may be larger."""

    def __init__(self, bytes_max: int, size_of: Callable[[ColdSegment, int], int]) -> None:
        self.kept_bytes = 0
        self._bytes_max = bytes_max
        self._size_of = size_of
        self._kept: dict[Block, int] = {}  # by how many reads
        self._admitted: dict[Name, WaitingRead] = {}  # both in order of arrival
        self._waiting: OrderedDict[Name, WaitingRead] = OrderedDict()
        self._readers: dict[str, set[Hashable]] = {}  # by key of the object

    def __len__(self) -> int:
        return len(self._admitted) + len(self._waiting)

    def keeps(self, block: Block) -> bool:
        """Whether a block must stay in the cache."""
        return block in self._kept

    def waits_for(self, key: str) -> bool:
        """Whether a read of this object waits."""
        return key in self._readers

    def wait(
        self, segment: ColdSegment, reader: Hashable, first: int, last: int, ticket: Ticket
    ) -> WaitingRead:
        """Note that ``reader`` waits for these blocks, beside those that it waited for before."""
        name = (segment.key, reader)
        admitted = self._admitted.get(name)
        read = admitted or self._waiting.get(name)
        if read is None:
            read = self._waiting[name] = WaitingRead(segment, reader, first, last, ticket)
            self._readers.setdefault(segment.key, set()).add(reader)
        if admitted is not None:
            self._release(admitted)
        read.first, read.last = min(first, read.first), max(last, read.last)
        if admitted is not None:
            self._keep(admitted)
        if read.ticket.done:
            read.ticket = ticket
        read.end_ns = 0
        return read

    def admitted(self, read: WaitingRead) -> bool:
        """Whether its turn has come."""
        return self._admitted.get((read.segment.key, read.reader)) is read

    def admit(self, other_bytes: int) -> list[WaitingRead]:
        """Admit reads that fit beside ``other_bytes`` under way; return the newly admitted ones."""
        while len(self._admitted) > 1 and self.kept_bytes > self._bytes_max:
            name, read = self._admitted.popitem()
            self._release(read)
            self._waiting[name] = read
            self._waiting.move_to_end(name, last=False)
        fresh: list[WaitingRead] = []
        while self._waiting:
            name, read = next(iter(self._waiting.items()))
            new = [number for key, number in read.blocks if (key, number) not in self._kept]
            size = sum(self._size_of(read.segment, number) for number in new)
            if self._kept and self.kept_bytes + other_bytes + size > self._bytes_max:
                break
            self._admitted[name] = self._waiting.pop(name)
            self._keep(read)
            fresh.append(read)
        return fresh

    def _keep(self, read: WaitingRead) -> None:
        for block in read.blocks:
            count = self._kept.get(block, 0)
            self._kept[block] = count + 1
            self.kept_bytes += 0 if count else self._size_of(read.segment, block[1])

    def _release(self, read: WaitingRead) -> None:
        read.end_ns = 0
        for block in read.blocks:
            self._kept[block] -= 1
            if not self._kept[block]:
                del self._kept[block]
                self.kept_bytes -= self._size_of(read.segment, block[1])

    def came(self, segment: ColdSegment, now_ns: int) -> None:
        """Blocks of the object came: reads that have all of theirs now need not wait."""
        for read in self._admitted.values():
            if read.segment is segment and not read.end_ns and read.complete:
                read.end_ns = now_ns + KEPT_NS
                read.ticket.end()

    def mark_read(self, segment: ColdSegment, readers: Container[Hashable]) -> bool:
        """These wait no more; True when one of them did."""
        done = [reader for reader in self._readers.get(segment.key, ()) if reader in readers]
        for reader in done:
            self._forget((segment.key, reader))
        return bool(done)

    def _forget(self, name: Name) -> None:
        read = self._admitted.pop(name, None)
        if read is not None:
            self._release(read)
        else:
            read = self._waiting.pop(name)
        read.ticket.end()
        readers = self._readers[name[0]]
        readers.discard(name[1])
        if not readers:
            del self._readers[name[0]]

    def drop(self, segment: ColdSegment) -> None:
        """Forget all readers of an object that cannot be fetched now; each of them requests it again."""
        for reader in list(self._readers.get(segment.key, ())):
            self._forget((segment.key, reader))

    def let_go(self, now_ns: int) -> bool:
        """Forget reads that were not continued; True when there were any."""
        late = [name for name, read in self._admitted.items() if read.end_ns and now_ns >= read.end_ns]
        for name in late:
            self._forget(name)
        return bool(late)
