"""gRPC statuses as errors, and which of them are worth another try."""

from __future__ import annotations

from typing import Final

from danube.errors import (
    Conflict,
    ConnectionFailed,
    DanubeError,
    InvalidArgument,
    NotFound,
    NotSupported,
    OperationTimeout,
    Overloaded,
    WrongState,
)

_CLASSES: Final[dict[str, type[DanubeError]]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "NOT_FOUND": NotFound,
    "ALREADY_EXISTS": Conflict,
    "FAILED_PRECONDITION": WrongState,
    "UNIMPLEMENTED": NotSupported,
    "UNAVAILABLE": ConnectionFailed,
    "DEADLINE_EXCEEDED": OperationTimeout,
    "RESOURCE_EXHAUSTED": Overloaded,
}
_UNREACHABLE: Final = "failed to connect"  # grpcio's words
RETRIED: Final = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"})


def status_error(status: str, message: str) -> DanubeError:
    """The error of a call that ended with this status; ``facts["status"]`` keeps its name."""
    what = f"status {status}: {message}" if message else f"status {status}"
    hint = "is a broker running there, and is this its gRPC port?" if _UNREACHABLE in message else ""
    return _CLASSES.get(status, DanubeError)(what, hint=hint, status=status)


def status_of(error: DanubeError) -> str:
    """Name of the status behind an error that came from a call; empty for any other."""
    return str(error.facts.get("status", ""))
