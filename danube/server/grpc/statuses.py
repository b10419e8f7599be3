"""Errors as gRPC statuses: the number, a sentence, and google.rpc.ErrorInfo with the stable reason."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from danube.core.http2.headers import trailers_block
from danube.core.protocol.grpc import STATUS_NUMBERS
from danube.errors import DanubeError
from danube.host import telemetry

if TYPE_CHECKING:
    from google.rpc.status_pb2 import Status

_log = telemetry.events("grpc")
MESSAGE_CHARACTERS_MAX = 1024
DOMAIN = "danube"


def trailers_of(error: BaseException) -> bytes:
    """Return the trailing header block of an error; an unexpected one is logged and sent as INTERNAL."""
    if isinstance(error, DanubeError):
        return _trailers(error.status, sentence(error), type(error).__name__, error.code, error.retryable)
    _log.failure("a call failed", error)
    return _trailers("INTERNAL", "the broker could not do it; its log says why", "Internal", 0, False)


def sentence(error: DanubeError) -> str:
    """Put an error into one line: the failure, its cause and the hint."""
    text = f"{error} ({error.hint})" if error.hint else str(error)
    return text[:MESSAGE_CHARACTERS_MAX]


@lru_cache(maxsize=256)
def _trailers(status: str, message: str, reason: str, code: int, retryable: bool) -> bytes:
    number = STATUS_NUMBERS[status]
    details = _details(number, message, reason, code, retryable).SerializeToString()
    return trailers_block(number, message, details)


def _details(number: int, message: str, reason: str, code: int, retryable: bool) -> Status:
    from google.rpc.error_details_pb2 import ErrorInfo
    from google.rpc.status_pb2 import Status

    status = Status(code=number, message=message)
    metadata = {"code": str(code), "retryable": str(retryable).lower()}
    status.details.add().Pack(ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata))
    return status
