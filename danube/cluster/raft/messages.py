"""Messages between members of a group, as bytes: one byte for the kind, then MessagePack.

A body is a list of fields in a fixed order.  A newer version may add fields at the end, which an older
one skips, and new kinds, which an older one drops and counts.  A number is never used again.

    kind  message           from       to
       1  VoteRequest       candidate  voters
       2  VoteAnswer        voter      candidate
       3  PreVoteRequest    follower   voters       would you vote for me?  Changes nothing.
       4  PreVoteAnswer     voter      follower
       5  AppendRequest     leader     all          entries, or none: a heartbeat
       6  AppendAnswer      all        leader
       7  SnapshotPart      leader     a member behind the leader's log
       8  SnapshotAnswer    that one   leader
       9  Stale             all        sender of a request of an older term
      10  ElectNow          leader     the voter that is to follow it

``term`` is the sender's, for a leader that of its leadership.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from danube.cluster.raft.engine import Members
from danube.cluster.raft.entry import Entry
from danube.limits import RAFT_MESSAGE_BYTES_MAX

Number = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class VoteRequest(msgspec.Struct, array_like=True):
    term: Number
    last_log_index: Number
    last_log_term: Number


class VoteAnswer(msgspec.Struct, array_like=True):
    term: Number
    vote_granted: bool


class PreVoteRequest(msgspec.Struct, array_like=True):
    term: Number
    round: Number
    last_log_index: Number
    last_log_term: Number


class PreVoteAnswer(msgspec.Struct, array_like=True):
    term: Number
    round: Number
    vote_granted: bool


class AppendRequest(msgspec.Struct, array_like=True):
    """Entries that follow ``previous_index``; ``round`` comes back in the answer."""

    term: Number
    round: Number
    previous_index: Number
    previous_term: Number
    commit_index: Number
    entries: list[Entry]


class AppendAnswer(msgspec.Struct, array_like=True):
    """``match_index``: so far the follower's log is known to be the leader's (0 when refused).

    A refusal names the ``previous_index`` it refuses, and where the leader is to try next.
    """

    term: Number
    round: Number
    previous_index: Number
    success: bool
    match_index: Number
    hint_index: Number


class SnapshotPart(msgspec.Struct, array_like=True):
    """Bytes of a snapshot that holds all entries up to ``last_index``, from ``position`` on."""

    term: Number
    round: Number
    last_index: Number
    last_term: Number
    members: Members
    size: Number
    position: Number
    content: bytes


class SnapshotAnswer(msgspec.Struct, array_like=True):
    """``position``: which part the follower wants next."""

    term: Number
    round: Number
    last_index: Number
    position: Number


class Stale(msgspec.Struct, array_like=True):
    term: Number


class ElectNow(msgspec.Struct, array_like=True):
    term: Number


Message = (
    VoteRequest
    | VoteAnswer
    | PreVoteRequest
    | PreVoteAnswer
    | AppendRequest
    | AppendAnswer
    | SnapshotPart
    | SnapshotAnswer
    | Stale
    | ElectNow
)

KIND_BY_TYPE: Final[dict[type[Message], int]] = {
    VoteRequest: 1,
    VoteAnswer: 2,
    PreVoteRequest: 3,
    PreVoteAnswer: 4,
    AppendRequest: 5,
    AppendAnswer: 6,
    SnapshotPart: 7,
    SnapshotAnswer: 8,
    Stale: 9,
    ElectNow: 10,
}
# Answered with Stale when their sender lives in an older term; answers are just dropped.
REQUESTS: Final = (VoteRequest, PreVoteRequest, AppendRequest, SnapshotPart)

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[int, msgspec.msgpack.Decoder[Message]] = {
    kind: msgspec.msgpack.Decoder(cls) for cls, kind in KIND_BY_TYPE.items()
}
_prefixes = {cls: bytes([kind]) for cls, kind in KIND_BY_TYPE.items()}


class UnknownKind(ValueError):
    """A message of a newer version."""


class Unreadable(ValueError):
    """Bytes that are no message."""


def encode(message: Message) -> bytes:
    return _prefixes[type(message)] + _encoder.encode(message)


def decode(content: bytes) -> Message:
    """The message; raises UnknownKind or Unreadable, and nothing else, whatever the bytes are."""
    if not 2 <= len(content) <= RAFT_MESSAGE_BYTES_MAX:
        raise Unreadable(f"{len(content)} bytes are no message")
    decoder = _decoders.get(content[0])
    if decoder is None:
        raise UnknownKind(f"kind {content[0]}")
    try:
        return decoder.decode(memoryview(content)[1:])
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise Unreadable(str(error)) from error
