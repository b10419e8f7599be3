"""Contracts between the broker and its doors, which are the servers of its protocols (:mod:`danube.server`).

A :class:`Session` is one client connection as the owner of a partition sees it.  The connection may
be held by this worker or by another one: the owner only sends frames to it.  Frames are collected
during a turn of the loop and leave together at its end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from danube.core.protocol.native import error_frame, published_frame
from danube.core.security.principals import ANONYMOUS, Identity
from danube.errors import DanubeError

if TYPE_CHECKING:
    import asyncio


class Session(ABC):
    """One client connection at the owner; handles are the client's numbers of its producers and consumers."""

    def __init__(self) -> None:
        self.producers: dict[int, Any] = {}  # handle -> ProducerLink
        self.consumers: dict[int, Any] = {}  # handle -> HostedConsumer
        self.opening: dict[int, object] = {}  # handle -> the request that opens it, until that is answered
        self.closed = False
        self.writable = True
        self.rest_ns = 0  # its publishes are ahead of their limit until then; 0: they are not

    @abstractmethod
    def send(self, *parts: bytes | memoryview) -> None:
        """Queue one whole frame in one or more parts, which are not copied and must never change."""

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


class RoutedSession(Session):
    """A connection that this worker holds: whose it is, and where each of its handles lives."""

    def __init__(self, connection_id: int, identity: Identity = ANONYMOUS) -> None:
        super().__init__()
        self.connection_id = connection_id
        self.identity = identity
        self.grants: dict[int, Any] = {}  # handle -> Grant, where access is controlled
        self.routes: dict[int, int] = {}  # handle -> the other worker where it lives
        self.requests: dict[int, int] = {}  # correlation -> other worker that owes the answer
        self.known_to: set[int] = set()  # other workers that keep something for this connection
        self.told = False  # the next frame is an operation that a full ring refused, and audited already

    def holds(self, handle: int) -> bool:
        """Return whether a handle is open, here or elsewhere, or is being opened."""
        return any(handle in held for held in (self.routes, self.producers, self.consumers, self.opening))


class Holder(Protocol):
    """Whatever keeps rights for a client: a connection."""

    def judge_again(self) -> int:
        """Give up what is no longer allowed; return how many rights were looked at."""


class Door(Protocol):
    """A protocol's server on one worker."""

    draining: bool
    waiting: Any  # true where hand_over() may have something in this turn
    unflushed: bool  # flush() is needed at the end of this turn

    def factory(self) -> asyncio.BaseProtocol: ...
    def session(self, connection_id: int) -> RoutedSession | None: ...
    def holders(self) -> list[Holder]: ...
    def worker_restarted(self, worker: int) -> None: ...
    def hand_over(self) -> bool: ...
    def flush(self) -> None: ...
    def sweep(self, now_s: float) -> None: ...
    def drain(self) -> None: ...
    def close_all(self) -> None: ...
    def silence(self) -> None: ...
    def abort_entered(self) -> None: ...

    @property
    def connections(self) -> Any: ...


class PassedConnections(Protocol):
    """Connections that other workers pass to this one (see :mod:`danube.server.arrivals`)."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


class Turns(Protocol):
    """Scheduling of a worker's turns (:class:`danube.broker.worker.worker.Worker`)."""

    flush_pending: bool  # the turn that runs will flush every door

    def schedule_turn(self) -> None: ...
    def run_turn(self) -> None: ...
