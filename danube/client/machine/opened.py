"""What a session tells the producers, consumers and requests that use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from danube.errors import DanubeError

if TYPE_CHECKING:
    from danube.client.machine.session import Session


class Opened(Protocol):
    """What a handle belongs to: a producer or consumer of one partition."""

    def on_connected(self) -> None:
        """The connection is ready; open yourself on it."""

    def on_disconnected(self) -> None:
        """The connection is gone; the session will be back or fail."""

    def on_handle_closed(self, error: DanubeError) -> None:
        """The broker closed the handle."""

    def on_deliver(self, body: memoryview) -> None:
        """Batches came; raise to drop the connection."""

    def on_waiting(self, reason: DanubeError | None) -> None:
        """Why no batches come now; None: they go on."""

    def on_sought(self) -> None:
        """Somebody moved the subscription: what comes next is to be seen, whatever was acked."""

    def on_session_failed(self, error: DanubeError) -> None:
        """There will be no further connection."""

    def on_owner_lost(self, home: Session, error: DanubeError) -> None:
        """The broker of this session is gone: go to ``home`` and ask there."""


class Awaited(Protocol):
    """What a correlation belongs to."""

    def on_answer(self, kind: int, flags: int, body: memoryview) -> None: ...

    def on_error(self, error: DanubeError) -> None: ...
