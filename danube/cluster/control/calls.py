"""Requests to a controller, by the workers and commands of its host and by other members, and its answers.

============  =======================  ======================================================
request       sent by                  answered with
============  =======================  ======================================================
Propose       host, member             Proposed, by the leader; a host's own controller finds it
Change        host, member             Changed
Barrier       host, member             Reached: a version that holds all that was acknowledged
Status        host                     ClusterStatus
Introduce     anyone                   Introduction: who is here, and which cluster
Join          anyone                   Changed: the node was made a learner
============  =======================  ======================================================

Failed stands in the place of any answer.

An outcome crosses a socket as a record, as nothing, or as the error that was raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from danube.cluster.links.frames import UNREADABLE
from danube.cluster.log.waiting import Waiting
from danube.cluster.raft.engine import Members
from danube.core.cluster.commands import Allocated, BrokerRecord, KeyRecord, Lease
from danube.core.metadata.commands import Outcome, TopicRecord, in_full
from danube.core.placement.duties import Placing
from danube.errors import DanubeError, ProtocolError, error_for_code

_RECORDS: Final[dict[str, msgspec.msgpack.Decoder[Outcome]]] = {
    cls.__name__: msgspec.msgpack.Decoder(cls)
    for cls in (TopicRecord, KeyRecord, Allocated, Lease, BrokerRecord)
}
_Value = TypeVar("_Value")


class SentError(msgspec.Struct, frozen=True):
    """An error with its class as a code; facts that are plain values come along."""

    code: int
    what: str
    why: str = ""
    hint: str = ""
    facts: dict[str, Any] = {}


class SentOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """``kind`` names the record's class; both are empty for nothing."""

    kind: str = ""
    record: msgspec.Raw = msgspec.Raw()
    error: SentError | None = None


def sent_error(error: DanubeError) -> SentError:
    facts = {
        name: value for name, value in error.facts.items() if isinstance(value, str | int | float | bool)
    }
    return SentError(error.code, error.what[:4_096], error.why[:4_096], error.hint[:4_096], facts)


def received_error(sent: SentError) -> DanubeError:
    """The error as it was raised; of a class that is not known here, its family's."""
    error = error_for_code(sent.code, sent.what, sent.why, sent.hint)
    error.facts.update(sent.facts)
    return error


def encode_outcomes(outcomes: Sequence[Outcome]) -> list[SentOutcome]:
    return [_sent(outcome) for outcome in outcomes]


def _sent(outcome: Outcome) -> SentOutcome:
    if outcome is None:
        return SentOutcome()
    if isinstance(outcome, DanubeError):
        return SentOutcome(error=sent_error(outcome))
    if isinstance(outcome, TopicRecord):  # its defaults must not move between versions
        return SentOutcome("TopicRecord", msgspec.Raw(msgspec.msgpack.encode(in_full(outcome))))
    return SentOutcome(type(outcome).__name__, msgspec.Raw(msgspec.msgpack.encode(outcome)))


def decode_outcomes(sent: Sequence[SentOutcome]) -> list[Outcome]:
    """Decode outcomes; raises ProtocolError for bytes that no member of this version sends."""
    return [_received(outcome) for outcome in sent]


def _received(sent: SentOutcome) -> Outcome:
    if sent.error is not None:
        return received_error(sent.error)
    if not sent.kind:
        return None
    decoder = _RECORDS.get(sent.kind)
    if decoder is None:
        raise ProtocolError("an outcome has an unknown kind", why=sent.kind[:80])
    return _decoded(decoder, sent.record, "an outcome")


class Propose(msgspec.Struct, frozen=True, tag="propose"):
    """Joined commands of one origin, all in one entry.

    An origin sends one at a time, and again until it is answered: ``sequence`` tells a repetition.
    """

    origin: str
    sequence: int
    commands: bytes
    timeout_ms: int = 10_000


class Change(msgspec.Struct, frozen=True, tag="change"):
    """Change the members: ``what`` is add (as a learner), promote, remove or move (to ``address``).

    ``repeated``: the request was sent before and may have been executed, so a missing member counts as
    removed.
    """

    what: str
    node_id: str
    address: str = ""
    timeout_ms: int = 10_000
    repeated: bool = False


class Barrier(msgspec.Struct, frozen=True, tag="barrier"):
    timeout_ms: int = 10_000


class Status(msgspec.Struct, frozen=True, tag="status"):
    pass


class Introduce(msgspec.Struct, frozen=True, tag="introduce"):
    pass


class Join(msgspec.Struct, frozen=True, tag="join"):
    node_id: str
    address: str


class Proposed(msgspec.Struct, frozen=True, tag="proposed"):
    """``version``: a machine that has it holds all that was stored."""

    version: int
    outcomes: list[SentOutcome]


class Changed(msgspec.Struct, frozen=True, tag="changed"):
    members: Members


class Reached(msgspec.Struct, frozen=True, tag="reached"):
    version: int


class ClusterStatus(msgspec.Struct, frozen=True, tag="status"):
    """One member as it sees the cluster; ``leader_id`` is "" while none is known."""

    self_node_id: str
    raft_addr: str
    cluster: str
    cluster_id: str
    role: str
    leader_id: str
    current_term: int
    last_applied: int
    commit_index: int
    version: int
    voters: dict[str, str]
    learners: dict[str, str]
    reached: list[str] = []  # nodes to which there is a connection
    counters: dict[str, int] = {}
    placing: Placing | None = None  # of the leader
    waiting: Waiting | None = None  # for what, while it can decide nothing


class Introduction(msgspec.Struct, frozen=True, tag="introduction"):
    node_id: str
    cluster_id: str = ""
    leader_id: str = ""
    members: Members = Members({})


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    error: SentError


Request = Propose | Change | Barrier | Status | Introduce | Join
Answer = Proposed | Changed | Reached | ClusterStatus | Introduction | Failed

_encoder: Final = msgspec.msgpack.Encoder()
_requests: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)
_answers: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)


def encode(value: Request | Answer) -> bytes:
    return _encoder.encode(value)


def decode_request(body: bytes) -> Request:
    """Raises ProtocolError."""
    return _decoded(_requests, body, "a request")


def decode_answer(body: bytes) -> Answer:
    """Raises ProtocolError."""
    return _decoded(_answers, body, "an answer")


def _decoded(decoder: msgspec.msgpack.Decoder[_Value], body: bytes | msgspec.Raw, what: str) -> _Value:
    try:
        return decoder.decode(body)
    except UNREADABLE as error:
        raise ProtocolError(f"{what} cannot be read", why=str(error)) from None
