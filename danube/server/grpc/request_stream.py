"""The requests of a bidirectional call, as an async iterator with a bounded queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from google.protobuf.message import DecodeError

from danube.core.protocol.grpc import MessageAssembler
from danube.errors import DanubeError, InvalidArgument, LimitExceeded, NotSupported, RecordTooLarge

WAITING_MAX = 64
_ERRORS: Final[dict[str, type[DanubeError]]] = {
    "UNIMPLEMENTED": NotSupported,
    "RESOURCE_EXHAUSTED": RecordTooLarge,
}


def check_framing(assembler: MessageAssembler) -> None:
    """Raise the assembler's error in the framing of a call's messages."""
    if assembler.status:
        raise _ERRORS.get(assembler.status, InvalidArgument)(assembler.problem)


class RequestStream:
    """Fed by the connection, read by a servicer."""

    def __init__(self, request_class: Any, message_bytes_max: int) -> None:
        self._class = request_class
        self._assembler = MessageAssembler(message_bytes_max)
        self._queue: asyncio.Queue[Any] = asyncio.Queue()

    def take(self, data: memoryview, ended: bool) -> None:
        """Take received bytes; raises if they are no message, and if the servicer does not keep up."""
        messages = self._assembler.take(data, ended)
        check_framing(self._assembler)
        for message in messages:
            if self._queue.qsize() >= WAITING_MAX:
                raise LimitExceeded(
                    "too many requests wait on this call", hint="wait for answers before sending more"
                )
            try:
                self._queue.put_nowait(self._class.FromString(bytes(message)))
            except DecodeError:
                name = self._class.DESCRIPTOR.full_name
                raise InvalidArgument(f"the message is not a {name}") from None
        if ended:
            self._queue.put_nowait(None)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._requests()

    async def _requests(self) -> AsyncIterator[Any]:
        while (request := await self._queue.get()) is not None:
            yield request
