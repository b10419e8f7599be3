"""What a door needs from the broker and the broker from a door.

A :class:`Session` is one client connection as the owner of a partition sees it.  The connection may
be held by this worker or by another one: the owner only sends frames to it.  Frames are collected
during a turn of the loop and leave together at its end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from danube.core.protocol.native import error_frame, published_frame
from danube.errors import DanubeError

if TYPE_CHECKING:
    from danube.broker.partition.chunks import Chunk
    from danube.broker.partition.consumers import ConsumerLink
    from danube.broker.partition.producers import ProducerLink


class Session(ABC):
    """One client connection at the owner; handles are the client's numbers for what it opened."""

    def __init__(self) -> None:
        self.producers: dict[int, ProducerLink] = {}
        self.consumers: dict[int, ConsumerLink] = {}
        self.opening: dict[int, object] = {}  # handle -> the request that opens it, until that is answered
        self.closed = False
        self.writable = True

    @abstractmethod
    def send(self, *parts: bytes | memoryview) -> None:
        """Queue one whole frame in one or more parts, which are not copied and must never change."""

    def send_chunk(self, head: bytes, chunk: Chunk) -> None:
        """Queue a DELIVER frame whose batches are a whole chunk, which other sessions may get too."""
        self.send(head, chunk.data)

    def send_published(
        self,
        correlation: int,
        handle: int,
        base_offset: int,
        epoch: int,
        record_count: int,
        level: int,
        flags: int,
    ) -> None:
        """Queue the answer to a publish."""
        self.send(published_frame(correlation, handle, base_offset, epoch, record_count, level, flags))

    def send_error(self, error: DanubeError, correlation: int = 0, handle: int = 0) -> None:
        self.send(error_frame(error, correlation, handle))
