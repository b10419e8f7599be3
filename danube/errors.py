"""The error tree: three families by what the caller can do, each class with one stable code.

``CallerError``  do not send it again as it is.
``Unavailable``  send it again later; the same request may succeed.
``Damage``       tell a human; stored bytes differ from what was written.

A code never changes its meaning and travels in the native ERROR frame; ``status`` is the name of the gRPC
status, ``exit_code`` is the CLI's exit code.  An error has the failure, its cause and a ``hint``. Facts are
for programs and logs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

_by_code: dict[int, type[DanubeError]] = {}


class DanubeError(Exception):
    """Root of everything that Danube raises on purpose."""

    code: ClassVar[int] = 1000
    status: ClassVar[str] = "INTERNAL"
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False

    def __init__(self, what: str = "", *, why: str = "", hint: str = "", **facts: Any) -> None:
        self.what = what or type(self).__name__
        self.why = why
        self.hint = hint
        self.facts = facts
        super().__init__(": ".join(part for part in (self.what, why) if part))

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "code" in cls.__dict__:
            if cls.code in _by_code:
                raise TypeError(f"error code {cls.code} is used twice: {_by_code[cls.code]}, {cls}")
            _by_code[cls.code] = cls


class CallerError(DanubeError):
    """The request is wrong; sending it again gives the same answer."""

    code = 1100
    status = "INVALID_ARGUMENT"
    exit_code = 2


class InvalidName(CallerError):
    code = 1101


class Fenced(CallerError):
    """A newer producer or owner has taken over; this one must stop."""

    code = 1102
    status = "FAILED_PRECONDITION"
    exit_code = 4


class InvalidArgument(CallerError):
    code = 1103


class RecordTooLarge(CallerError):
    code = 1104
    exit_code = 8


class ProtocolError(CallerError):
    """The peer broke the native protocol; the connection is closed."""

    code = 1105
    exit_code = 8


class UnsupportedVersion(CallerError):
    code = 1106
    status = "UNIMPLEMENTED"


class SequenceGap(CallerError):
    """A producer skipped a sequence; something between was never stored."""

    code = 1107
    status = "FAILED_PRECONDITION"
    exit_code = 8


class SequenceConflict(CallerError):
    """A used sequence came again with other content."""

    code = 1108
    status = "FAILED_PRECONDITION"
    exit_code = 8


class ConfigInvalid(CallerError):
    code = 1109
    exit_code = 11


class ClosedError(CallerError):
    """The client, producer or consumer was closed before this call."""

    code = 1110
    status = "CANCELLED"


class PartialFailure(CallerError):
    """Some of the records were accepted and others were not; facts: sent."""

    code = 1111
    status = "ABORTED"
    exit_code = 9


class NotFound(CallerError):
    code = 1120
    status = "NOT_FOUND"
    exit_code = 3


class TopicNotFound(NotFound):
    code = 1121


class SubscriptionNotFound(NotFound):
    code = 1122


class SchemaNotFound(NotFound):
    """No such subject, version or schema id."""

    code = 1124


class ObjectMissing(NotFound):
    """The object store has no object of this key; facts: store, key."""

    code = 1126


class OffsetOutOfRange(CallerError):
    """The offset was removed by retention or has not been written yet; facts: start, end."""

    code = 1123
    status = "OUT_OF_RANGE"
    exit_code = 3


class Conflict(CallerError):
    code = 1130
    status = "ALREADY_EXISTS"
    exit_code = 4


class TopicExists(Conflict):
    code = 1131


class SubscriptionBusy(Conflict):
    """An exclusive subscription has another consumer, or the mode differs."""

    code = 1132
    status = "PERMISSION_DENIED"


class ProducerBusy(Conflict):
    """An exclusive producer meets another one."""

    code = 1136
    status = "PERMISSION_DENIED"


class PolicyMismatch(Conflict):
    """The topic exists with another delivery mode than asked for."""

    code = 1133
    status = "FAILED_PRECONDITION"


class AlreadyRunning(Conflict):
    """Another broker holds the data directory or the port."""

    code = 1134


class WrongState(Conflict):
    """State of the named thing does not allow the request; change the state first, then ask again."""

    code = 1135
    status = "FAILED_PRECONDITION"


class SchemaInvalid(CallerError):
    """The definition cannot be used: it does not parse, or it would cost too much; facts: line, path."""

    code = 1140
    exit_code = 8


class SchemaIncompatible(CallerError):
    """The new version breaks a rule of the subject's compatibility; facts: violations."""

    code = 1141
    status = "FAILED_PRECONDITION"
    exit_code = 8


class PayloadInvalid(CallerError):
    """A record does not follow the topic's schema; facts: index, path."""

    code = 1142
    exit_code = 8


class SchemaSubjectMismatch(CallerError):
    """The topic follows another subject, or the subject asked for is not there."""

    code = 1143
    status = "FAILED_PRECONDITION"
    exit_code = 8


class NotSupported(CallerError):
    """This broker cannot do it as it runs now, for example because it is one host."""

    code = 1150
    status = "UNIMPLEMENTED"


class NotAuthenticated(CallerError):
    """The credential is missing or is not accepted; the error does not tell which part of it is wrong."""

    code = 1160
    status = "UNAUTHENTICATED"
    exit_code = 5


class NotAllowed(CallerError):
    """The principal has no role that gives the permission on this resource."""

    code = 1161
    status = "PERMISSION_DENIED"
    exit_code = 5


class TokenExpired(CallerError):
    """The credential was good and has ended; get a new one."""

    code = 1162
    status = "UNAUTHENTICATED"
    exit_code = 5


class Unavailable(DanubeError):
    """Send it again later."""

    code = 1200
    status = "UNAVAILABLE"
    exit_code = 6
    retryable = True


class ConnectionFailed(Unavailable):
    code = 1201


class OwnerMoved(Unavailable):
    """The partition's owner restarted or moved; open the producer or consumer again."""

    code = 1202


class OperationTimeout(Unavailable):
    code = 1203
    status = "DEADLINE_EXCEEDED"
    exit_code = 7


class Overloaded(Unavailable):
    """A limit was reached; facts name it."""

    code = 1204
    status = "RESOURCE_EXHAUSTED"


class Draining(Unavailable):
    """The broker is stopping."""

    code = 1205


class StorageFull(Unavailable):
    code = 1206
    status = "RESOURCE_EXHAUSTED"
    exit_code = 12


class StorageFailed(Unavailable):
    """A write or sync failed; nothing of this send is acknowledged."""

    code = 1207
    exit_code = 12


class StoreUnavailable(Unavailable):
    """The object store does not answer, or is too busy: an outage, 5xx, a time-out; facts: store."""

    code = 1210


class StoreRefused(Unavailable):
    """The object store says no and will until an operator acts: credentials, bucket, region; facts: store."""

    code = 1211


class NotLeader(Unavailable):
    """This member of the cluster decides nothing now; nothing was stored; facts: leader_id ("": unknown)."""

    code = 1213


class OutcomeUnknown(Unavailable):
    """Leadership was lost on the way: it may or may not take effect, and asking again does no harm."""

    code = 1214


class QuotaExceeded(Unavailable):
    """A namespace or tenant is over its quota; facts: limit, retry_after_ms."""

    code = 1215
    status = "RESOURCE_EXHAUSTED"


class EtcdRefused(Unavailable):
    """The user, the password, the role or the certificate is not enough for the cluster's etcd.

    A start ends with it.  A running broker tries again.
    """

    code = 1216
    exit_code = 5


class IssuerUnavailable(Unavailable):
    """The keys of the issuer of a token (``auth.oidc``) are not known now; the broker reads them again."""

    code = 1217


class FetchPending(Unavailable):
    """The bytes are not on this host yet: they are being fetched from the object store."""

    code = 1212

    def __init__(
        self,
        what: str = "",
        *,
        ready: Callable[[], bool] | None = None,
        cause: DanubeError | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(what, **facts)
        self.ready = ready or (lambda: True)  # whether a retry may succeed
        self.cause = cause  # the reason that the bytes do not arrive, if it is known


class LimitExceeded(CallerError):
    """A hard limit of frame, batch, connection or topic; facts name it."""

    code = 1112
    status = "RESOURCE_EXHAUSTED"


class Damage(DanubeError):
    """Stored bytes differ from the written ones; facts: file, position, offsets."""

    code = 1300
    status = "DATA_LOSS"
    exit_code = 12


class StorageIncompatible(Damage):
    """A file was written by a newer version or belongs elsewhere; nothing was touched."""

    code = 1301


class RingDamaged(Damage):
    """A slot in shared memory differs from the written one; none of its bytes were handed out."""

    code = 1310
    status = "UNAVAILABLE"


class StoreDamaged(Damage):
    """Length, hash or identity of an object differs from the uploaded one; facts: store, key."""

    code = 1320


class InvariantBroken(BaseException):
    """A bug.  Derives from BaseException so that no ``except Exception`` hides it."""

    def __init__(self, what: str, **facts: Any) -> None:
        self.facts = facts
        super().__init__(what + "".join(f" {name}={value!r}" for name, value in facts.items()))


def broken(what: str, **facts: Any) -> NoReturn:
    """Stop the shard: an invariant does not hold."""
    raise InvariantBroken(what, **facts)


def error_for_code(code: int, what: str, why: str = "", hint: str = "") -> DanubeError:
    """Rebuild an error that crossed the wire; an unknown code becomes its family or the root."""
    cls = _by_code.get(code) or _by_code.get(code // 100 * 100) or DanubeError
    return cls(what, why=why, hint=hint)


def catalogue() -> list[type[DanubeError]]:
    """All error classes with a code of their own, by code."""
    return [_by_code[code] for code in sorted(_by_code)]


def exit_code_of(error: BaseException) -> int:
    """The CLI's exit code for an exception."""
    if isinstance(error, DanubeError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 1
