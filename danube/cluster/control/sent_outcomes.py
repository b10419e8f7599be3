"""How what a proposer is told crosses a socket: a record, nothing, or the error that was raised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from danube.cluster.links.frames import UNREADABLE
from danube.core.cluster.commands import Allocated, BrokerRecord, KeyRecord, Lease
from danube.core.metadata.commands import Outcome, TopicRecord, in_full
from danube.errors import DanubeError, ProtocolError, error_for_code

_RECORDS: Final[dict[str, type]] = {
    cls.__name__: cls for cls in (TopicRecord, KeyRecord, Allocated, Lease, BrokerRecord)
}


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
    """Raises ProtocolError for what no member of this version sends."""
    return [_received(outcome) for outcome in sent]


def _received(sent: SentOutcome) -> Outcome:
    if sent.error is not None:
        return received_error(sent.error)
    if not sent.kind:
        return None
    cls = _RECORDS.get(sent.kind)
    if cls is None:
        raise ProtocolError("an outcome has an unknown kind", why=sent.kind[:80])
    try:
        outcome: Outcome = msgspec.msgpack.decode(sent.record, type=cls)
        return outcome
    except UNREADABLE as error:
        raise ProtocolError("an outcome cannot be read", why=str(error)) from None
