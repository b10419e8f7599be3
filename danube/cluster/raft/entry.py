"""One entry of the replicated log, and the kinds of entries."""

from __future__ import annotations

from typing import Final

import msgspec

from danube.cluster.raft.engine import Members

COMMAND: Final = 0  # goes to the machine
NOTHING: Final = 1  # the first entry of a term: commits entries of older terms
MEMBERS: Final = 2  # takes effect where it is in the log, committed or not

# Maximum size of an entry beside its content, in a message and in the journal.
ENTRY_OVERHEAD_BYTES: Final = 24

_members_encoder = msgspec.msgpack.Encoder()
_members_decoder = msgspec.msgpack.Decoder(Members)


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Agreed on at one index; which, is said by where it lies."""

    term: int
    kind: int
    content: bytes


def members_entry(term: int, members: Members) -> Entry:
    return Entry(term, MEMBERS, _members_encoder.encode(members))


def members_of(entry: Entry) -> Members:
    """The members that an entry of this kind names; raises msgspec's error where it is none."""
    return _members_decoder.decode(entry.content)


def size_of(entry: Entry) -> int:
    """Bytes that an entry takes in a message or the journal, at most."""
    return len(entry.content) + ENTRY_OVERHEAD_BYTES
