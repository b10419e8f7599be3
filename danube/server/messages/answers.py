"""Answers of unary calls: each repeats the client's number; those of one connection leave together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from danube.server.messages.stream_messages import varint

if TYPE_CHECKING:
    from danube.core.http2.streams import Stream
    from danube.core.security.principals import Identity

# Bytes before a request id of this length: gRPC's five bytes and the tag of field 1.
_HEADS = tuple(bytes((0, 0, 0, 0, size + 1, 8)) for size in range(11))
_SMALL = (b"\0\0\0\0\0", *(_HEADS[1] + bytes((number,)) for number in range(1, 128)))


class Answering(Protocol):
    """A connection, as far as the answer of a call is concerned."""

    def answer(self, stream: Stream, message: bytes, size: int = 0) -> None: ...
    def answer_all(self, streams: Sequence[Stream], messages: Sequence[bytes], size: int) -> None: ...
    def answer_error(self, stream: Stream, error: BaseException) -> None: ...
    def consumed(self, stream: Stream, size: int) -> None: ...
    def identity_of(self, stream: Stream) -> Identity: ...


Call = tuple[Answering, "Stream", int]
"""One that waits for its answer, and what it counts against flow control until then."""


def answer_calls(calls: Sequence[Call], request_ids: Sequence[int]) -> None:
    """Tell each client; calls of one connection that follow each other are answered together."""
    count, start = len(calls), 0
    while start < count:
        connection, stream, size = calls[start]
        end = start + 1
        while end < count and calls[end][0] is connection:
            end += 1
        if end - start == 1:
            connection.answer(stream, response(request_ids[start]), size)
        else:
            some = calls[start:end]
            messages = [response(request_id) for request_id in request_ids[start:end]]
            connection.answer_all([one[1] for one in some], messages, sum([one[2] for one in some]))
        start = end


def refuse_calls(calls: Sequence[Call], error: BaseException) -> None:
    """Answer each call with the error."""
    for connection, stream, size in calls:
        connection.consumed(stream, size)
        connection.answer_error(stream, error)


def response(request_id: int) -> bytes:
    """A length-prefixed message whose field 1 is the echoed request id: MessageResponse and its like."""
    if request_id < 128:
        return _SMALL[request_id]
    number = varint(request_id)
    return _HEADS[len(number)] + number
