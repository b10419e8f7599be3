"""Sound prefix of a member's journal, from its beginning up to its damage; nothing is changed.

A member itself starts with a whole journal or not at all (:mod:`danube.cluster.raft.journal`).  This module
is for an operator who has no whole one left.  Each step has a checksum and a number, so the steps before the
damage are as they were written.  Steps behind it are not read, for it is unknown what is missing in between.
The header and the mark state nothing that the steps do not: if only they are damaged, no step is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from danube.cluster.log import log_file
from danube.cluster.raft.engine import Members
from danube.cluster.raft.entry import MEMBERS, Entry, members_of
from danube.cluster.raft.journal import Base, Identity, Journal, Part, Promise, Put, Record
from danube.errors import Damage

_HEADER_BYTES: Final = 40
_decoder: Final = msgspec.msgpack.Decoder(list[Record])


class Prefix(NamedTuple):
    """The member as of the last sound step.

    ``identity`` None: not even the first one is.  ``snapshot`` None: it is not whole, and there is no entry.
    ``damage`` None: the journal is whole.
    """

    identity: Identity | None
    base: Base
    promise: Promise
    entries: list[Entry]
    snapshot: bytes | None
    damage: Damage | None

    @property
    def last_index(self) -> int:
        return max(self.base.index, self.base.log_index + len(self.entries))

    @property
    def last_term(self) -> int:
        return max(self.base.term, self.entries[-1].term if self.entries else 0)

    def members(self) -> Members:
        """Members as of the last sound entry that changed them."""
        for entry in reversed(self.entries):
            if entry.kind == MEMBERS:
                return members_of(entry)
        return self.base.members


def read_prefix(content: bytes, path: str) -> Prefix:
    """Read the sound prefix of a journal's bytes; raises StorageIncompatible for a newer version."""
    found = _Steps()
    start, number = _HEADER_BYTES, 1
    while (step := log_file.entry_at(content, start, start)) is not None and step.first_index == number:
        try:
            taken = found.take(_decoder.decode(step.content))
        except msgspec.MsgspecError:
            break
        if not taken:
            break
        start, number = step.end, number + 1
    whole = found.identity is not None and len(found.snapshot) == found.base.snapshot_size
    return Prefix(
        found.identity, found.base, found.promise, found.entries, bytes(found.snapshot) if whole else None,
        _damage_in(content, path),
    )  # fmt: skip


class _Steps:
    """Takes step after step; the rules are those of the journal's own recovery."""

    def __init__(self) -> None:
        self.identity: Identity | None = None
        self.base = Base(0, 0, 0, 0, Members({}), 0)
        self.promise = Promise(0, None)
        self.entries: list[Entry] = []
        self.snapshot = bytearray()

    def take(self, records: list[Record]) -> bool:
        """False for what a journal never holds: then nothing of the step counts."""
        if self.identity is None:
            match records:
                case [Identity() as identity, Base() as base]:
                    self.identity, self.base = identity, base
                    return True
            return False
        return all(self._take(record) for record in records)

    def _take(self, record: Record) -> bool:
        match record:
            case Part(content=content):
                self.snapshot += content
            case Promise():
                self.promise = record
            case Put(first_index=first_index, entries=entries):
                start = first_index - self.base.log_index - 1
                if not 0 <= start <= len(self.entries):
                    return False
                del self.entries[start:]
                self.entries += entries
            case _:
                return False
        return True


class _Content:
    """Bytes as a Disk whose changes go nowhere."""

    def __init__(self, content: bytes, path: str) -> None:
        self.path = path
        self._content = content

    def load(self) -> bytes | None:
        return self._content

    def stage(self, pieces: Iterable[bytes]) -> None:
        pass

    def unstage(self) -> None:
        pass

    def complete(self, head: bytes, pieces: Iterable[bytes], identity: bytes) -> None:
        pass

    def write(self, content: bytes, position: int) -> None:
        pass

    def sync(self) -> None:
        pass

    def truncate(self, size: int) -> None:
        pass

    def read(self, size: int, position: int) -> bytes:
        return self._content[position : position + size]

    def close(self) -> None:
        pass


def _damage_in(content: bytes, path: str) -> Damage | None:
    """Return the damage that would stop a member from starting with this content; None without any."""
    try:
        Journal(_Content(content, path)).recover()
    except Damage as error:
        return error
    return None
